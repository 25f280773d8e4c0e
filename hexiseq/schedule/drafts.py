"""Plans before they are written out: replicas by kind, which thousands of ranks do not make larger."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from hexiseq import cost
from hexiseq.cost import Kind
from hexiseq.plan import ExcludedDevice, Group, Plan, Prediction, RankDevice, Replica, Shard
from hexiseq.schedule.estimate import Job


@dataclass(frozen=True)
class Draft:
    """A plan for all ranks of a job, by kinds of replicas; judged and weighed when first asked."""

    job: Job
    kinds: tuple[Kind, ...]

    @functools.cached_property
    def predicted(self) -> Prediction:
        """The prediction without memory."""
        return self.job.judge(self.kinds)

    @property
    def seconds(self) -> float:
        return self.predicted.step_seconds

    @functools.cached_property
    def lacking_gb(self) -> float:
        """Of the rank that lacks most memory; at most 0 when all fit."""
        used, limit = self.job.memory(self.kinds)
        return float((used - limit).max())


def written(found: Draft, policy: str, excluded: tuple[ExcludedDevice, ...] = ()) -> Plan:
    """The plan with every rank, and its prediction with memory."""
    job = found.job
    replicas = [
        (min(row), renumbered(kind.replica, row)) for kind in found.kinds for row in kind.ranks.tolist()
    ]  # fmt: skip
    replicas.sort(key=lambda item: item[0])
    devices: dict[tuple[int, str], RankDevice] = {}
    for place in job.places:
        key = (id(place.device), place.node_name)
        if key not in devices:
            devices[key] = RankDevice(place.device.type, place.node_name, place.device.kernel)
    used, limit = cost.kinds_memory_gb(found.kinds, job.workload, job.places)
    return dataclasses.replace(
        found.kinds[0].plan,
        policy=policy,
        replicas=tuple(replica for _, replica in replicas),
        devices=tuple(devices[id(place.device), place.node_name] for place in job.places),
        excluded=excluded,
        predicted=dataclasses.replace(
            found.predicted, memory_gb=tuple(used.tolist()), memory_limit_gb=tuple(limit.tolist())
        ),
    )


def renumbered(replica: Replica, ranks: Sequence[int]) -> Replica:
    """The replica with these ranks, in its order."""
    ahead = iter(ranks)
    groups = tuple(
        Group(group.slots, tuple(Shard(next(ahead), s.tokens, s.heads) for s in group.shards))
        for group in replica.groups
    )
    return Replica(groups, replica.sequences)

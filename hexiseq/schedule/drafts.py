"""Plans before they are written out: replicas by kind, which thousands of ranks do not make larger."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from hexiseq import cost
from hexiseq.cost import Kind
from hexiseq.plan import ExcludedDevice, Group, Plan, Prediction, RankDevice, Replica, Shard, make_replica
from hexiseq.schedule.estimate import Job


@dataclass(frozen=True)
class Draft:
    """A plan for all ranks of a job, by kinds of replicas; judged and weighed when first asked.

    The layouts of all kinds have one slot, fusion and exchange.
    """

    job: Job
    kinds: tuple[Kind, ...]

    @functools.cached_property
    def predicted(self) -> Prediction:
        """The prediction without memory."""
        return self.job.judge(self.kinds)

    @property
    def seconds(self) -> float:
        return self.predicted.step_seconds

    def seconds_below(self, limit: float) -> float:
        """The seconds, or infinity where they are known to be no fewer than the limit."""
        if "predicted" not in self.__dict__ and (found := self.job.judge_below(self.kinds, limit)) is not None:
            self.__dict__["predicted"] = found
        return self.seconds if "predicted" in self.__dict__ else math.inf

    @functools.cached_property
    def lacking_gb(self) -> float:
        """Of the rank that lacks most memory; at most 0 when all fit."""
        return float(self.job.lacking_gb(self.kinds).max())


def written(found: Draft, policy: str, excluded: tuple[ExcludedDevice, ...] = ()) -> Plan:
    """The plan with every rank, and its prediction with memory."""
    job, layout = found.job, found.kinds[0].layout
    devices: dict[tuple[int, str], RankDevice] = {}
    for place in job.places:
        key = (id(place.seat.device), place.node_name)
        if key not in devices:
            devices[key] = RankDevice(place.device.type, place.node_name, place.device.kernel)
    return Plan(
        policy=policy,
        seq_len=layout.seq_len,
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        slot=layout.slot,
        fusion=layout.fusion,
        exchange=layout.exchange,
        recompute=job.workload.recompute,
        offload=job.workload.offload,
        dtype=job.workload.dtype,
        replicas=tuple(sorted(
            (replica for kind in found.kinds for replica in _replicas(kind)), key=lambda replica: min(replica.ranks)
        )),
        devices=tuple(devices[id(place.seat.device), place.node_name] for place in job.places),
        excluded=excluded,
        predicted=cost.with_memory(found.predicted, found.kinds, job.workload, job.wires.devices),
    )  # fmt: skip


def _replicas(kind: Kind) -> list[Replica]:
    """All replicas of a kind."""
    layout = kind.layout
    one = make_replica(layout.seq_len, layout.slot, layout.counts, layout.sequences)
    shapes = [(group.slots, [(shard.tokens, shard.heads) for shard in group.shards]) for group in one.groups]
    found = []
    for row in kind.ranks.tolist():
        ahead = iter(row)
        groups = tuple(Group(slots, tuple(Shard(next(ahead), *shape) for shape in shards)) for slots, shards in shapes)
        found.append(Replica(groups, layout.sequences))
    return found

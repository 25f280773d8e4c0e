"""Which ranks share a row of a picture: each its own while there are few, those alike together when there are many."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from hexiseq import cost
from hexiseq.cluster import Cluster
from hexiseq.cost import Wires, alike_replicas, match_places, optimizer_seconds
from hexiseq.plan import Interval, Plan, Replica, Shard
from hexiseq.workload import Workload


@dataclass(frozen=True)
class Row:
    """Ranks drawn as one.

    Attributes:
        kind: index of their kind of replica.
        replicas: how many replicas it stands for.
        replica: index of the one whose tokens and heads are drawn.
        node: name, or for several nodes how many and their class.
        groups: indices of their groups, ascending.
        ranks: those of the drawn replica.
        tokens, heads: what each rank owns, by rank's order.
    """

    kind: int
    replicas: int
    replica: int
    node: str
    type: str
    groups: tuple[int, ...]
    ranks: tuple[int, ...]
    tokens: tuple[tuple[Interval, ...], ...]
    heads: tuple[Interval, ...]

    @property
    def devices(self) -> int:
        return self.replicas * len(self.ranks)


@dataclass(frozen=True)
class _Member:
    """A shard, where it is, and what makes its group one of a kind."""

    shard: Shard
    type: str
    node: str
    group: int
    group_kind: Hashable


def kinds_of(plan: Plan) -> list[list[Replica]]:
    """Replicas by kind: laid out alike, on devices of the same types that share nodes of the same classes alike."""

    def signature(ranks: Sequence[int]) -> Hashable:
        nodes: dict[str, int] = {}
        found = []
        for rank in ranks:
            device = plan.devices[rank]
            found.append((device.type, node_class(device.node), nodes.setdefault(device.node, len(nodes))))
        return tuple(found)

    return alike_replicas(plan, signature)


def node_class(node: str) -> str:
    """Nodes of a class are numbered behind its name."""
    return re.sub(r"-\d+$", "", node)


def rows(plan: Plan, kinds: Sequence[Sequence[Replica]], *, each: int, most: int) -> list[Row]:
    """Rows in the order of nodes: a rank each for up to `each` ranks, else at most `most` rows where that can be.

    Ranks alike share a row: those of a group on a node; if that is not enough those of groups alike; then all of a
    device type in a kind of replica.
    """
    if plan.world_size <= each:
        found = [
            row
            for index, replica in enumerate(plan.replicas)
            for row in _kind_rows(plan, _members(plan, replica), _by_rank, index, 1, index)
        ]
        order = list(dict.fromkeys(device.node for device in plan.devices))
        return sorted(found, key=lambda row: (order.index(row.node), row.replica))
    first = {replica.ranks[0]: index for index, replica in enumerate(plan.replicas)}
    members = [_members(plan, alike[0]) for alike in kinds]
    for key in (_by_group, _by_group_kind, _by_type):
        found = []
        for index, alike in enumerate(kinds):
            drawn = first[alike[0].ranks[0]]
            found += _kind_rows(plan, members[index], key, index, len(alike), drawn)
        if len(found) <= most:
            break
    return found


def _members(plan: Plan, replica: Replica) -> list[_Member]:
    found = []
    for g, group in enumerate(replica.groups):
        devices = [plan.devices[shard.rank] for shard in group.shards]
        kind = (group.slots, *((d.type, s.num_heads) for d, s in zip(devices, group.shards, strict=True)))
        found += [_Member(s, d.type, d.node, g, kind) for d, s in zip(devices, group.shards, strict=True)]
    order = {node: i for i, node in enumerate(dict.fromkeys(member.node for member in found))}
    return sorted(found, key=lambda member: (order[member.node], member.group, member.shard.rank))


def _by_rank(plan: Plan, member: _Member) -> Hashable:
    return member.shard.rank


def _by_group(plan: Plan, member: _Member) -> Hashable:
    return member.node, member.group, _share(plan, member)


def _by_group_kind(plan: Plan, member: _Member) -> Hashable:
    return node_class(member.node), member.group_kind, member.type, member.shard.num_heads


def _by_type(plan: Plan, member: _Member) -> Hashable:
    return member.type


def _share(plan: Plan, member: _Member) -> Hashable:
    # Whole tokens do not divide evenly: shares that look alike are.
    return member.type, member.shard.num_heads, round(member.shard.num_tokens / plan.seq_len, 4)


def _kind_rows(plan: Plan, members: Sequence[_Member], key, kind: int, replicas: int, drawn: int) -> list[Row]:
    found: dict[Hashable, list[_Member]] = {}
    for member in members:
        found.setdefault(key(plan, member), []).append(member)
    made = []
    for together in found.values():
        nodes = list(dict.fromkeys(member.node for member in together))
        classes = list(dict.fromkeys(map(node_class, nodes)))
        name = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes {', '.join(classes)}"
        made.append(
            Row(
                kind=kind,
                replicas=replicas,
                replica=drawn,
                node=name,
                type=together[0].type,
                groups=tuple(sorted({member.group for member in together})),
                ranks=tuple(member.shard.rank for member in together),
                tokens=tuple(member.shard.tokens for member in together),
                heads=tuple(member.shard.heads for member in together),
            )
        )
    return made


def runs(numbers: Sequence[int], most: int = 3) -> str:
    """Ascending numbers, runs of them written as such, at most so many."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], "..."])


def busy_seconds(plan: Plan, cluster: Cluster, workload: Workload) -> np.ndarray:
    """Seconds a step that each rank computes by the cost model, ``[ranks]``: kernels, merges, loss and optimizer."""
    places = match_places(plan, cluster)
    # One device alone would have all states; it has a share of them.
    one_of_each = {id(place.device): place for place in places}
    optimizer = {key: optimizer_seconds(workload, Wires(cluster, [place])) for key, place in one_of_each.items()}
    own = np.array([optimizer[id(place.device)] for place in places]) / len(places)
    return cost.busy_seconds(plan, cluster, workload, places) + own

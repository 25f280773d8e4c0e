"""The ranks a job has, where they are, and whether they are the devices a cluster or a plan speaks of.

Device types come from the driver's names where a process can see its GPUs, else from what Slurm calls them. A rank
whose type is not known yet counts as one device; the strategy finds out when the rank runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hexiseq import doctor
from hexiseq.cluster import Cluster, Link, Node, Seat, gres_of
from hexiseq.plan import Plan, align

MISMATCH = ("refuse", "replan")
MOST_ROWS = 40  # of a printed table
Identity = tuple[str, str]


@dataclass(frozen=True)
class Member:
    """A rank of the job before it runs.

    Attributes:
        node: the host's name.
        partition: Slurm's, else empty.
        device: what the driver calls its GPU; empty where it cannot be seen.
        gres: what Slurm calls its GPU; empty where it has no name.
    """

    node: str
    partition: str = ""
    device: str = ""
    gres: str = ""


@dataclass(frozen=True)
class Roster:
    """The ranks of a job, in order. ``types``: of each, as the cluster's catalogue calls it; None where not known."""

    members: tuple[Member, ...]
    types: tuple[str | None, ...]

    @property
    def known(self) -> bool:
        return None not in self.types

    @property
    def identities(self) -> list[Identity]:
        """Device type and node of each rank; of ranks that are known."""
        assert self.known
        return [(str(kind), member.node) for kind, member in zip(self.types, self.members, strict=True)]

    def __len__(self) -> int:
        return len(self.members)

    def table(self) -> str:
        """Rank -> node -> device -> partition, ranks that differ in number alone in one row."""
        runs: list[tuple[int, int, list[str]]] = []
        for rank, (member, kind) in enumerate(zip(self.members, self.types, strict=True)):
            row = [member.node, kind or member.device or member.gres or "not known yet", member.partition or "-"]
            if runs and runs[-1][2] == row:
                runs[-1] = (runs[-1][0], rank, row)
            else:
                runs.append((rank, rank, row))
        rows = [[f"{a}" if a == b else f"{a}-{b}", *row] for a, b, row in runs]
        left = [["...", f"{len(rows) - MOST_ROWS} more", "", ""]] if len(rows) > MOST_ROWS else []
        return "\n".join(align(["rank", "node", "device", "partition"], rows[:MOST_ROWS] + left))


def roster(members: Sequence[Member], cluster: Cluster | None, gres: Mapping[str, str]) -> Roster:
    """The ranks with the device types of `cluster` they stand for.

    Args:
        gres: device type -> what the site calls it, where that is not the rule (`gres_of`).
    """
    devices = cluster.devices if cluster else ()
    names = {device.type: device.names for device in devices}
    called: dict[str, list[str]] = {}
    for device in devices:
        called.setdefault(gres_of(device.type, gres), []).append(device.type)

    def kind(member: Member) -> str | None:
        if member.device:
            return recognised(member.device, names)
        types = called.get(member.gres, [member.gres] if member.gres else [])
        return types[0] if len(types) == 1 else None

    return Roster(tuple(members), tuple(kind(member) for member in members))


def recognised(found: str, names: Mapping[str, Sequence[str]]) -> str:
    """The device type a rank's reported name stands for; the name itself where it stands for none."""
    return found if found in names else doctor.recognise(found, names) or found


def reconcile(cluster: Cluster, present: Roster, mismatch: str) -> tuple[Cluster, str | None]:
    """The cluster a job's ranks are, and a warning where that is not the one given.

    Args:
        mismatch: one of `MISMATCH`, for ranks that are not the cluster's devices: end with a table of both, or take
            the cluster to be what is there.

    Raises:
        ValueError: they are not and `mismatch` is ``refuse``, or there is a device of which the cluster knows nothing.
    """
    places = cluster.places
    wanted = by_node([place.device.type for place in places], [place.node_name for place in places])
    if not present.known:
        if len(present) == len(places):
            return cluster, None
        there: dict[str, dict[str, list[int]]] = {}
    else:
        there = by_node(*zip(*present.identities, strict=True))
        if _kinds(there) == _kinds(wanted):
            return cluster, None
    difference = "\n".join(
        [
            f"the job's {len(present)} ranks are not the {len(places)} devices of cluster {cluster.name!r}:",
            present.table(),
            *_difference(wanted, there),
        ]
    )
    strange = sorted({kind for kind in present.types if kind} - {device.type for device in cluster.devices})
    if strange:
        raise ValueError(
            f"{difference}\ncluster {cluster.name!r} has no {', '.join(strange)}: add it to the cluster with its rates "
            "(+gpu@cluster.gpus.NAME=NAME), or tell what the site calls a known one with slurm.gres.TYPE=NAME"
        )
    if mismatch == "refuse" or not present.known:
        raise ValueError(
            f"{difference}\nstart one rank on each device of the cluster, or plan for the devices there are with "
            "launch.mismatch=replan"
        )
    return as_found(cluster, there), f"{difference}\nplanning for what is there (launch.mismatch=replan)"


def as_found(cluster: Cluster, there: Mapping[str, Mapping[str, Sequence[int]]]) -> Cluster:
    """`cluster` with the nodes of `there` (`by_node`): each as the class that is most like it, with its own devices."""
    devices = {device.type: device for device in cluster.devices}
    # Nodes of one class with the same devices stay one class, so that planning stays as quick.
    count = Counter((_closest(cluster, node), tuple(_kind(node))) for node in there.values())
    variants: dict[str, list[str]] = {}
    nodes = []
    for (like, kind), number in count.items():
        names = variants.setdefault(like.name, [])
        names.append(f"{like.name}-as-found-{len(names) + 1}")
        seats = tuple(Seat(devices[device]) for device, seats in kind for _ in range(seats))
        nodes.append(dataclasses.replace(like, name=names[-1], seats=seats, count=number))
    links = [
        Link((a, b), link.gb_per_s)
        for link in cluster.links
        for a in variants.get(link.nodes[0], [])
        for b in variants.get(link.nodes[1], [])
    ]
    return dataclasses.replace(cluster, name=f"{cluster.name}-as-found", nodes=tuple(nodes), links=tuple(links))


def _closest(cluster: Cluster, node: Mapping[str, Sequence[int]]) -> Node:
    """The node class with most devices in common."""

    def common(candidate: Node) -> tuple[int, int]:
        seats = Counter(seat.device.type for seat in candidate.seats)
        both = sum(min(seats[kind], len(ranks)) for kind, ranks in node.items())
        return both, -len(candidate.seats)

    return max(cluster.nodes, key=common)


def match_ranks(plan: Plan, found: Sequence[Identity], names: Mapping[str, Sequence[str]] | None = None) -> Plan:
    """The plan with its ranks renamed so that each runs on a device of its type, on one node with the same others.

    Nodes match by name where the ranks report names of the plan; else by the device types they hold.

    Args:
        found: per rank, device type and node.
        names: device type -> what the driver calls it (`doctor.recognise`).

    Raises:
        ValueError: with a table of expected and found devices.
    """
    known = {device.type: (names or {}).get(device.type, ()) for device in plan.devices}
    there = by_node([recognised(reported, known) for reported, _ in found], [node for _, node in found])
    wanted = by_node([device.type for device in plan.devices], [device.node for device in plan.devices])
    if set(there) == set(wanted):
        pairs = list(zip(sorted(wanted), sorted(there), strict=True))
    else:
        # Nodes with the same devices are interchangeable; sorting puts them side by side.
        alike = [sorted((_kind(nodes[name]), name) for name in nodes) for nodes in (wanted, there)]
        pairs = [(a, b) for (_, a), (_, b) in zip(*alike, strict=False)]
    if len(there) != len(wanted) or any(_kind(wanted[a]) != _kind(there[b]) for a, b in pairs):
        raise ValueError("\n".join(
            [f"the job's {len(found)} ranks are not the plan's {plan.world_size} devices:",
             *_difference(wanted, there),
             "start one rank on each device of the plan, or plan for the devices there are"]))  # fmt: skip
    new_rank = [0] * plan.world_size
    for planned, real in pairs:
        for kind, ranks in wanted[planned].items():
            for old, new in zip(ranks, there[real][kind], strict=True):
                new_rank[old] = new
    return plan.relabel(new_rank)


def by_node(types: Sequence[str], nodes: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Node -> device type -> ranks."""
    table: dict[str, dict[str, list[int]]] = {}
    for rank, (kind, node) in enumerate(zip(types, nodes, strict=True)):
        table.setdefault(node, {}).setdefault(kind, []).append(rank)
    return table


def _kind(node: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    return sorted((kind, len(ranks)) for kind, ranks in node.items())


def _kinds(nodes: Mapping[str, Mapping[str, Sequence[int]]]) -> list[list[tuple[str, int]]]:
    return sorted(_kind(node) for node in nodes.values())


def _difference(
    wanted: Mapping[str, Mapping[str, Sequence[int]]], there: Mapping[str, Mapping[str, Sequence[int]]]
) -> list[str]:
    """Lines of a table: nodes with the same devices together, how many are expected and found."""
    expected, found = Counter(map(_devices, wanted.values())), Counter(map(_devices, there.values()))
    rows = [[kind, str(expected[kind]), str(found[kind])] for kind in sorted({*expected, *found})]
    return align(["nodes with", "expected", "found"], rows)


def _devices(node: Mapping[str, Sequence[int]]) -> str:
    return " + ".join(f"{count} {kind}" for kind, count in _kind(node))

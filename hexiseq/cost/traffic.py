"""Bytes that ranks exchange in a layer and a step, and the wires they pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from hexiseq.cluster import Cluster, Device, Place
from hexiseq.cost.layout import Held, Layout, common_heads
from hexiseq.plan import interval_array
from hexiseq.workload import Workload

GB = 1e9


def accumulator_bytes(workload: Workload) -> int:
    """Bytes of an element of a running sum: fp32, or fp64 in fp64 jobs."""
    return max(4, workload.element_bytes)


def reduced_bytes(workload: Workload) -> int:
    """Bytes of all gradients, as they are reduced once an optimizer step."""
    return workload.model.parameters * accumulator_bytes(workload)


def parameter_traffic(workload: Workload, ranks: Any) -> Any:
    """Bytes that pass each wire of the circle of ranks in an optimizer step: parameters gathered, gradients reduced.

    Layers are gathered once or twice a micro-step, embedding and head (which stay) once; gradients are reduced in fp32
    once an optimizer step.

    Args:
        ranks: a number, or an array of numbers.
    """
    model = workload.model
    gathers = 1 if workload.keep_parameters else 2
    gathered = gathers * model.layers * model.layer_parameters + model.embedding_parameters
    size = workload.accumulation * gathered * workload.element_bytes + reduced_bytes(workload)
    return size * (ranks - 1) / ranks


def exposed_traffic(workload: Workload, ranks: Any) -> Any:
    """The part of `parameter_traffic` that passes while no rank has anything to compute.

    A micro-step begins with embedding, head and the first layer; at the end of the step, when backward is done, the
    gradients of these same are still to be reduced. All else is asked for a layer ahead, or reduced a layer behind.
    """
    model = workload.model
    size = workload.accumulation * workload.element_bytes + accumulator_bytes(workload)
    return (model.layer_parameters + model.embedding_parameters) * size * (ranks - 1) / ranks


# Flows: bytes from rank to rank -----------------------------------------------------------------------------------


class Flow(ABC):
    """Bytes from rank to rank of a replica, of several exchanges one by one; a rank sends itself nothing.

    Attributes:
        out, into: bytes that each rank sends, and receives: ``[exchanges, ranks]``.
    """

    out: np.ndarray
    into: np.ndarray

    def __init__(self) -> None:
        self.loads: dict[Wires, np.ndarray] = {}  # that have been asked for

    @abstractmethod
    def between(self, sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        """Bytes from ranks to ranks, pair by pair: ``[exchanges, *pairs]``."""

    def matrix(self) -> np.ndarray:
        """Bytes of all pairs: ``[exchanges, sender, receiver]``."""
        return self.between(*np.indices((self.out.shape[1],) * 2))


class Inside(Flow):
    """All-to-alls inside groups: from each member to each other ``sent[:, sender] * received[:, receiver]``."""

    def __init__(self, home: np.ndarray, sent: np.ndarray, received: np.ndarray) -> None:
        super().__init__()
        self.home, self.sent, self.received = home, sent, received
        first = np.searchsorted(home, np.arange(home[-1] + 1))
        self.out = sent * (np.add.reduceat(received, first, axis=1)[:, home] - received)
        self.into = received * (np.add.reduceat(sent, first, axis=1)[:, home] - sent)

    @override
    def between(self, sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        among = (self.home[sender] == self.home[receiver]) & (sender != receiver)
        return self.sent[:, sender] * self.received[:, receiver] * among


class Across(Flow):
    """KV or its gradients across groups: so many bytes of each head that one rank gives and the other takes.

    Attributes:
        size: bytes of a head from group to group: ``[exchanges, sender, receiver]``.
    """

    def __init__(self, home: np.ndarray, size: np.ndarray, given: Held, taken: Held) -> None:
        super().__init__()
        self.home, self.size, self.given, self.taken = home, size, given, taken
        self.out = _within(size @ taken.below, home, given)
        self.into = _within(size.transpose(0, 2, 1) @ given.below, home, taken)

    @override
    def between(self, sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        heads = common_heads(self.given, sender, self.taken, receiver)
        return self.size[:, self.home[sender], self.home[receiver]] * heads


def _within(below: np.ndarray, home: np.ndarray, held: Held) -> np.ndarray:
    """Of what lies below each head, ``[exchanges, groups, heads]``, that of the heads each rank has."""
    return below[:, home, held.last] - below[:, home, held.first]


def exchange_flow(layout: Layout, workload: Workload) -> Inside:
    """The four all-to-alls of a layer: of forward to heads and back, of backward to heads and back."""
    home, heads, kv = layout.home, layout.heads, layout.kv
    tokens = layout.tokens * float(workload.model.head_dim * layout.sequences * workload.element_bytes)
    # Where two ranks hold the same KV head, gradients go home as unrounded partial sums.
    shared = (layout.held.below[:, -1] > layout.num_kv_heads)[home]
    grads = tokens * np.where(shared, accumulator_bytes(workload) / workload.element_bytes, 1.0)
    return Inside(
        home,
        np.array([tokens, heads, tokens, heads + 2 * kv]),
        np.array([heads + 2 * kv, tokens, 3 * heads + 2 * kv, grads]),
    )


def kv_flows(layout: Layout, workload: Workload) -> tuple[Across, Across]:
    """KV across groups in one pass; dKV, and what of it leaves when all kernel calls of its sender have ended."""
    fetched, delivered, last = group_tokens(layout, workload.model.window)
    unit = 2 * workload.model.head_dim * layout.sequences
    return (
        Across(layout.home, unit * workload.element_bytes * fetched[None], layout.claimed, layout.held),
        Across(layout.home, unit * accumulator_bytes(workload) * np.array([delivered, last]), layout.held,
               layout.claimed),
    )  # fmt: skip


def group_tokens(layout: Layout, window: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens from group to group in one pass, ``[sender, receiver]``: of KV, of dKV, and of dKV after the last call.

    Gathered, what a group attends to comes straight from its owner, and dKV goes straight back after the last call.
    """
    groups, runs = len(layout.slots), layout.runs.astype(float)
    reach = (layout.seq_len if window is None else window) - 1  # tokens before itself that a query attends to
    back = runs[:, 1, 1] > runs[:, 1, 0]
    # Each group's first attended position in groups outer to it, and in groups inner to it, by its back queries alone.
    outer_from = np.maximum(runs[:, 0, 0] - reach, 0)
    inner_from = np.where(back, np.maximum(runs[:, 1, 0] - reach, 0), layout.seq_len)
    if layout.exchange == "ring":
        return _ring_tokens(layout, outer_from, inner_from)
    outer = np.arange(groups)[:, None] < np.arange(groups)  # the source is outer to the receiver
    fronts = np.where(outer, _from(runs[:, 0], outer_from), _from(runs[:, 0], inner_from))
    needed = fronts + np.where(outer, 0, _from(runs[:, 1], inner_from))
    np.fill_diagonal(needed, 0.0)
    back_again = needed.T
    return needed, back_again, back_again


def _from(intervals: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Tokens of each interval ``[start, end)`` at positions from `first` on: ``[intervals, firsts]``."""
    return np.maximum(0.0, intervals[:, 1:] - np.maximum(intervals[:, :1], first))


def _ring_tokens(
    layout: Layout, outer_from: np.ndarray, inner_from: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same on the ring: a slot goes from group to group, by the tokens that somebody further along attends to.

    It goes from the group before its owner down to group 0, then, past the wrap and by its front half alone, from the
    last group up to the one behind its owner. Its dKV goes the same way, by the tokens that somebody so far attended
    to; that of the back half leaves the ring at group 0 and goes straight home.
    """
    slots, groups = layout.slots, len(layout.slots)
    fetched, delivered, late = np.zeros((3, groups, groups))
    if groups == 1:
        return fetched, delivered, late
    runs = interval_array(layout.seq_len, layout.slot, np.ones(slots.sum(), int)).astype(float)
    home, group = np.repeat(np.arange(groups), slots), np.arange(groups)
    # Groups further along have later fronts and earlier backs, so that one of them reaches furthest.
    behind, ahead = np.append(outer_from[1:], layout.seq_len), np.minimum.accumulate(inner_from)
    last = np.append(layout.seq_len, inner_from[:-1])  # of the group before home, which reaches furthest so far

    def arrive() -> np.ndarray:
        """Tokens of each slot that come to each group."""
        past = np.maximum(0.0, runs[:, 0, 1] - np.maximum(runs[:, 0, 0], behind[home]))[:, None]
        inner = _from(runs[:, 0], ahead) + _from(runs[:, 1], ahead)
        # One piece travels, from the first token to the last that is needed.
        both = np.where(inner > 0, np.maximum(inner, past + (runs[:, 1, 1] - runs[:, 1, 0])[:, None]), past)
        both = np.where(past > 0, both, inner)
        return np.where(home[:, None] > group, both, past) * (home[:, None] != group)

    def leave(home: np.ndarray, runs: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of what lies there whose dKV leaves a group: of its front half, and of its back half."""
        before = home > group  # not past the wrap
        so_far = np.where(before, last[home], np.minimum(outer_from[group], last[home]))
        fronts = np.maximum(0.0, runs[..., 0, 1] - np.maximum(runs[..., 0, 0], so_far)) * (home != group)
        return fronts, np.maximum(0.0, runs[..., 1, 1] - np.maximum(runs[..., 1, 0], so_far)) * before

    before_it = (group - 1) % groups
    # Without a window a group's slots all go as far: sums over groups are running sums.
    if (outer_from == 0).all() and np.isin(inner_from, (0, layout.seq_len)).all():
        front, back = (layout.runs[:, :, 1] - layout.runs[:, :, 0]).T.astype(float)
        to_inner, so_far = ahead == 0, last == 0  # whether all of what comes is needed, and was
        fetched[(group + 1) % groups, group] = _earlier(front) + np.where(
            to_inner, _later(front + back), _later(np.where(group < groups - 1, front, 0.0))
        )
        delivered[group, before_it] = _earlier(front) + _later(so_far * front)
        delivered[group[1:], before_it[1:]] += _later(so_far * back)[1:]
        delivered[0, 1:] += (so_far * back)[1:]
    else:
        fetched[(group + 1) % groups, group] = arrive().sum(0)
        fronts, backs = leave(home[:, None], runs[:, None], group)
        delivered[group, before_it] = fronts.sum(0)
        delivered[group[1:], before_it[1:]] += backs.sum(0)[1:]
        np.add.at(delivered[0], home, backs[:, 0])

    # The last call takes the slots just before a group's own; inner groups' only where there are no outer ones.
    first = np.cumsum(slots) - slots
    ticks = (np.where(group > 0, first, len(home) - slots[0]) - 1) % layout.width + 1
    steps = np.arange(ticks.max())
    slot, taken = (first[:, None] - 1 - steps) % len(home), steps < ticks[:, None]
    fronts, backs = leave(home[slot], runs[slot], group[:, None])
    late[group, before_it] = (fronts * taken).sum(1)
    np.add.at(late[0], home[slot[0]], backs[0] * taken[0])
    return fetched, delivered, late


def _earlier(values: np.ndarray) -> np.ndarray:
    """The sum of all before each."""
    return np.cumsum(values) - values


def _later(values: np.ndarray) -> np.ndarray:
    """The sum of all after each."""
    return values.sum() - np.cumsum(values)


# Wires ---------------------------------------------------------------------------------------------------------


class Devices:
    """The devices of ranks: the distinct ones, and which of them each rank has."""

    def __init__(self, distinct: Sequence[Device], index: np.ndarray) -> None:
        self.distinct, self.index = tuple(distinct), index

    @staticmethod
    def of(places: Sequence[Place]) -> Devices:
        # By identity: comparing devices field by field costs more than a plan of thousands of ranks may take.
        return Devices(*_numbered([place.seat.device for place in places]))

    def subset(self, ranks: np.ndarray) -> Devices:
        numbers, index = np.unique(self.index[ranks], return_inverse=True)
        return Devices([self.distinct[number] for number in numbers.tolist()], index)

    def each(self, name: str) -> np.ndarray:
        """An attribute of each rank's device."""
        return np.array([getattr(device, name) for device in self.distinct], float)[self.index]


def _numbered(things: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """The distinct things, by identity, and the number of each."""
    keys = list(map(id, things))
    distinct = dict(zip(keys, things, strict=True))
    number = dict(zip(distinct, range(len(distinct)), strict=True))
    return list(distinct.values()), np.array(list(map(number.__getitem__, keys)))


class Wires:
    """The wires between ranks: each rank's port inside its node, each node's NICs, special links between nodes.

    Loads are bytes on every wire: out of ranks' ports, into them, out of nodes' NICs, into them, and from node to node
    if links are special.

    Attributes:
        devices: of the ranks.
        node: of each rank.
        port, nic: bytes a second of each rank's port, and each node's NICs.
        link: bytes a second from node to node, None where no pair is slower than its NICs.
        seat: a number for each device on a class of nodes, of each rank.
        host_memory_gb: of each rank's node; NaN where it is not known.
    """

    def __init__(self, cluster: Cluster, places: Sequence[Place]) -> None:
        _, first, node = np.unique([place.node for place in places], return_index=True, return_inverse=True)
        classes, of_class = _numbered([place.node_class for place in places])
        intra, network = (
            np.array([getattr(one, name) for one in classes])[of_class] * GB
            for name in ("intra_gb_per_s", "network_gb_per_s")
        )
        devices, link = Devices.of(places), None
        if cluster.links:
            ends = [places[rank] for rank in first.tolist()]
            link = np.array([[cluster.bandwidth_gb_per_s(a, b) for b in ends] for a in ends]) * GB
        seat, host = devices.index * len(classes) + of_class, [one.host_memory_gb for one in classes]
        self._set(devices, node, intra, network[first], link, seat, np.array(host, float)[of_class])

    def _set(
        self, devices: Devices, node: np.ndarray, port: np.ndarray, nic: np.ndarray, link: np.ndarray | None,
        seat: np.ndarray, host_memory_gb: np.ndarray,
    ) -> None:  # fmt: skip
        self.devices, self.node, self.port, self.nic, self.link, self.seat = devices, node, port, nic, link, seat
        self.host_memory_gb = host_memory_gb
        self._subsets: dict[bytes, Wires] = {}

    def __len__(self) -> int:
        """Number of ranks."""
        return len(self.node)

    def subset(self, ranks: np.ndarray) -> Wires:
        """The wires as the given ranks see them, in that order; worked out once.

        Others with ranks on the same nodes, which exchange what they have at the same time, take their part of the
        NICs and links.
        """
        key = ranks.tobytes()
        if key not in self._subsets:
            nodes, node = np.unique(self.node[ranks], return_inverse=True)
            part = np.bincount(node) / self.seats[nodes]
            link = None
            if self.link is not None:
                link = self.link[np.ix_(nodes, nodes)] * np.maximum(part[:, None], part)
            found = self._subsets[key] = object.__new__(Wires)
            found._set(self.devices.subset(ranks), node, self.port[ranks], self.nic[nodes] * part, link,
                       self.seat[ranks], self.host_memory_gb[ranks])  # fmt: skip
        return self._subsets[key]

    def signatures(self, rows: np.ndarray) -> list[Hashable]:
        """For rows of ranks something equal only for those on devices alike that share nodes alike, one by one."""
        # Nodes of a row numbered in their order.
        order = np.argsort(self.node[rows], axis=1, kind="stable")
        nodes = np.take_along_axis(self.node[rows], order, axis=1)
        numbers = np.zeros_like(nodes)
        np.put_along_axis(numbers, order, np.cumsum(np.diff(nodes, axis=1, prepend=nodes[:, :1]) > 0, axis=1), axis=1)
        # How many of all ranks a node has decides what part of its NICs is theirs.
        parts = zip(self.seat[rows], numbers, self.seats[self.node[rows]], strict=True)
        found = [tuple(part.tobytes() for part in row) for row in parts]
        if self.link is None:
            return list(found)
        links = (self.link[np.ix_(here, here)].tobytes() for here in map(np.unique, self.node[rows]))
        return list(zip(found, links, strict=True))

    def signature(self, ranks: Sequence[int]) -> Hashable:
        """The same of one row."""
        return self.signatures(np.array([ranks]))[0]

    @cached_property
    def seats(self) -> np.ndarray:
        """Ranks of each node."""
        return np.bincount(self.node)

    @cached_property
    def slowest_hbm(self) -> float:
        """Bytes a second of the slowest device's memory."""
        return float(self.devices.each("hbm_gb_per_s").min()) * GB

    @cached_property
    def rate(self) -> np.ndarray:
        """Bytes a second of every wire, in the order of loads."""
        link = np.empty(0) if self.link is None else self.link.ravel()
        return np.concatenate([self.port, self.port, self.nic, self.nic, link])

    @cached_property
    def neighbours(self) -> tuple[np.ndarray, np.ndarray]:
        """All pairs of ranks that share a node."""
        order = np.argsort(self.node, kind="stable")
        ends = np.cumsum(self.seats)[self.node[order]]
        mates = self.seats[self.node[order]]
        # Each rank with all of its node, itself included.
        a = np.repeat(np.arange(len(order)), mates)
        b = np.arange(len(a)) - np.repeat(np.cumsum(mates) - ends, mates)
        return order[a], order[b]

    def load(self, flow: Flow) -> np.ndarray:
        """Bytes that exchanges between these ranks put on each wire: ``[exchanges, wires]``."""
        if self not in flow.loads:
            flow.loads[self] = self._load(flow)
        return flow.loads[self]

    def _load(self, flow: Flow) -> np.ndarray:
        a, b = self.neighbours
        near = flow.between(a, b)
        near_out, near_in = self._summed(near, a, len(self.node)), self._summed(near, b, len(self.node))
        far_out, far_in = (
            self._summed(far, self.node, len(self.nic)) for far in (flow.out - near_out, flow.into - near_in)
        )
        parts = [near_out, near_in, far_out, far_in]
        if self.link is not None:
            on_node = (self.node[:, None] == np.arange(len(self.nic))).astype(float)
            links = on_node.T @ flow.matrix() @ on_node * (1 - np.eye(len(self.nic)))
            parts.append(links.reshape(len(links), -1))
        return np.concatenate(parts, axis=1)

    def _summed(self, values: np.ndarray, index: np.ndarray, most: int) -> np.ndarray:
        """Sums of each row's values by their index below `most`."""
        rows = np.arange(len(values))[:, None] * most
        return np.bincount((rows + index).ravel(), values.ravel(), len(values) * most).reshape(len(values), most)

    def spread(self, load: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """The load of replicas on these ranks, ``[count, width]``, on nodes alike: each has `load` on its own wires."""
        _, first = np.unique(self.node[ranks[0]], return_index=True)
        nodes, total, most = self.node[ranks[:, first]], len(self.node), len(self.nic)
        wires = [ranks, total + ranks, 2 * total + nodes, 2 * total + most + nodes]
        if self.link is not None:
            pairs = nodes[:, :, None] * most + nodes[:, None, :]
            wires.append(2 * (total + most) + pairs.reshape(len(ranks), -1))
        return np.bincount(np.concatenate(wires, axis=1).ravel(), np.tile(load, len(ranks)), len(self.rate))

    def seconds(self, load: np.ndarray) -> list[float]:
        """Time of the busiest wire for each of these loads."""
        return (load / self.rate).max(axis=1).tolist()

    def around(self, size: float) -> float:
        """Time of the busiest wire for so many bytes on every wire of the circle of all ranks."""
        return size / self._around

    @cached_property
    def _around(self) -> float:
        """Bytes a second of the slowest wire of the circle; infinite where there is none."""
        return float(np.where(self.circle > 0, self.rate, np.inf).min())

    @cached_property
    def circle(self) -> np.ndarray:
        """The load of one byte around the circle of all ranks."""
        nodes = len(self.nic)
        # A rank alone on its node passes the circle on through the NIC only.
        port = (self.seats[self.node] > 1).astype(float)
        nic = np.full(nodes, float(nodes > 1))
        link = np.zeros((nodes, nodes) if self.link is not None else 0)
        if self.link is not None:
            link[np.arange(nodes), np.roll(np.arange(nodes), -1)] = float(nodes > 1)
        return np.concatenate([port, port, nic, nic, link.ravel()])

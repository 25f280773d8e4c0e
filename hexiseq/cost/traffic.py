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
    size = workload.accumulation * gathered * workload.element_bytes + model.parameters * accumulator_bytes(workload)
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
    """Bytes from rank to rank of a replica, all at one time; a rank sends itself nothing.

    Attributes:
        out, into: bytes that each rank sends, and receives.
    """

    out: np.ndarray
    into: np.ndarray

    @abstractmethod
    def between(self, sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        """Bytes from ranks to other ranks, pair by pair."""

    def matrix(self) -> np.ndarray:
        """Bytes of all pairs: ``[sender, receiver]``."""
        ranks = np.arange(len(self.out))
        return self.between(ranks[:, None], ranks)


class Inside(Flow):
    """An all-to-all inside groups: from each member to each other ``sent[sender] * received[receiver]``."""

    def __init__(self, home: np.ndarray, sent: np.ndarray, received: np.ndarray) -> None:
        self.home, self.sent, self.received = home, sent, received
        self.out = sent * (np.bincount(home, received)[home] - received)
        self.into = received * (np.bincount(home, sent)[home] - sent)

    @override
    def between(self, sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        among = (self.home[sender] == self.home[receiver]) & (sender != receiver)
        return self.sent[sender] * self.received[receiver] * among


class Across(Flow):
    """KV or its gradients across groups: of each head that one rank gives and the other takes so many bytes.

    Attributes:
        size: bytes of a head from group to group, ``[sender, receiver]``.
    """

    def __init__(self, home: np.ndarray, size: np.ndarray, given: Held, taken: Held) -> None:
        self.home, self.size, self.given, self.taken = home, size, given, taken

    @cached_property
    def out(self) -> np.ndarray:  # type: ignore[override]
        below = self.size @ self.taken.below
        return below[self.home, self.given.last] - below[self.home, self.given.first]

    @cached_property
    def into(self) -> np.ndarray:  # type: ignore[override]
        below = self.size.T @ self.given.below
        return below[self.home, self.taken.last] - below[self.home, self.taken.first]

    @override
    def between(self, sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        heads = common_heads(self.given, sender, self.taken, receiver)
        return self.size[self.home[sender], self.home[receiver]] * heads


def exchange_flows(layout: Layout, workload: Workload) -> dict[str, Inside]:
    """The four all-to-alls of a layer."""
    home, heads, kv = layout.home, layout.heads, layout.kv
    tokens = layout.tokens * float(workload.model.head_dim * layout.sequences * workload.element_bytes)
    # Where two ranks hold the same KV head, gradients go home as unrounded partial sums.
    shared = (np.bincount(home, kv) > layout.num_kv_heads)[home]
    grads = tokens * np.where(shared, accumulator_bytes(workload) / workload.element_bytes, 1.0)
    return {
        "heads_in": Inside(home, tokens, heads + 2 * kv),
        "heads_out": Inside(home, heads, tokens),
        "grads_in": Inside(home, tokens, 3 * heads + 2 * kv),
        "grads_out": Inside(home, heads + 2 * kv, grads),
    }


def kv_flows(layout: Layout, workload: Workload) -> dict[str, Across]:
    """KV and dKV across groups in one pass, and what of dKV leaves when all kernel calls of its sender have ended."""
    fetched, delivered, last = group_tokens(layout, workload.model.window)
    unit = 2 * workload.model.head_dim * layout.sequences
    home, held, claimed, wide = layout.home, layout.held, layout.claimed, unit * accumulator_bytes(workload)
    dkv = Across(home, wide * delivered, held, claimed)
    return {
        "kv": Across(home, unit * workload.element_bytes * fetched, claimed, held),
        "dkv": dkv,
        "late_dkv": dkv if last is delivered else Across(home, wide * last, held, claimed),
    }


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
    before = home[:, None] > group  # not past the wrap
    away = home[:, None] != group
    back_tokens = (runs[:, 1, 1] - runs[:, 1, 0])[:, None]

    # Groups further along have later fronts and earlier backs, so that one of them reaches furthest.
    behind = np.append(outer_from[1:], layout.seq_len)[home]
    past = np.maximum(0.0, runs[:, 0, 1] - np.maximum(runs[:, 0, 0], behind))[:, None]
    ahead = np.minimum.accumulate(inner_from)
    inner = _from(runs[:, 0], ahead) + _from(runs[:, 1], ahead)
    # One piece travels, from the first token to the last that is needed.
    both = np.where(past > 0, np.where(inner > 0, np.maximum(inner, past + back_tokens), past), inner)
    held = np.where(before, both, past) * away

    last = np.append(layout.seq_len, inner_from[:-1])[home]  # of the group before home, which reaches furthest so far
    so_far = np.where(before, last[:, None], np.minimum(outer_from, last[:, None]))
    fronts = np.maximum(0.0, runs[:, 0, 1:] - np.maximum(runs[:, 0, :1], so_far)) * away
    backs = np.maximum(0.0, runs[:, 1, 1:] - np.maximum(runs[:, 1, :1], so_far)) * (away & before)

    before_it = (group - 1) % groups
    fetched[(group + 1) % groups, group] = held.sum(0)
    delivered[group, before_it] = fronts.sum(0)
    delivered[group[1:], before_it[1:]] += backs.sum(0)[1:]
    np.add.at(delivered[0], home, backs[:, 0])

    # The last call takes the slots just before a group's own; inner groups' only where there are no outer ones.
    first = np.cumsum(slots) - slots
    ticks = (np.where(group > 0, first, len(home) - slots[0]) - 1) % layout.width + 1
    steps = np.arange(ticks.max())
    slot, taken = (first[:, None] - 1 - steps) % len(home), steps < ticks[:, None]
    late[group, before_it] = (fronts[slot, group[:, None]] * taken).sum(1)
    np.add.at(late[0], home[slot[0]], backs[slot[0], 0] * taken[0])
    return fetched, delivered, late


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
    known: dict[int, int] = {}
    index = np.array([known.setdefault(id(thing), len(known)) for thing in things])
    _, first = np.unique(index, return_index=True)
    return [things[i] for i in first.tolist()], index


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

    def __len__(self) -> int:
        """Number of ranks."""
        return len(self.node)

    def subset(self, ranks: np.ndarray) -> Wires:
        """The wires as the given ranks see them, in that order."""
        nodes, node = np.unique(self.node[ranks], return_inverse=True)
        link = None if self.link is None else self.link[np.ix_(nodes, nodes)]
        found = object.__new__(Wires)
        found._set(self.devices.subset(ranks), node, self.port[ranks], self.nic[nodes], link, self.seat[ranks],
                   self.host_memory_gb[ranks])  # fmt: skip
        return found

    def signature(self, ranks: Sequence[int] | np.ndarray) -> Hashable:
        """Equal only for ranks on devices alike that share nodes alike, one by one."""
        rows = np.asarray(ranks)
        nodes, relative = np.unique(self.node[rows], return_inverse=True)
        link = b"" if self.link is None else self.link[np.ix_(nodes, nodes)].tobytes()
        return self.seat[rows].tobytes(), relative.tobytes(), link

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
        seats = np.bincount(self.node)
        ends = np.cumsum(seats)[self.node[order]]
        mates = seats[self.node[order]]
        # Each rank with all of its node, itself included.
        a = np.repeat(np.arange(len(order)), mates)
        b = np.arange(len(a)) - np.repeat(np.cumsum(mates) - ends, mates)
        return order[a], order[b]

    def load(self, flow: Flow) -> np.ndarray:
        """Bytes that a flow between these ranks puts on each wire."""
        a, b = self.neighbours
        ranks, nodes, near = len(self.node), len(self.nic), flow.between(a, b)
        near_out, near_in = np.bincount(a, near, ranks), np.bincount(b, near, ranks)
        far_out, far_in = (
            np.bincount(self.node, every - inside, nodes)
            for every, inside in ((flow.out, near_out), (flow.into, near_in))
        )
        parts = [near_out, near_in, far_out, far_in]
        if self.link is not None:
            on_node = (self.node[:, None] == np.arange(nodes)).astype(float)
            links = on_node.T @ flow.matrix() @ on_node
            np.fill_diagonal(links, 0.0)
            parts.append(links.ravel())
        return np.concatenate(parts)

    def spread(self, load: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """The load of replicas on these ranks, ``[count, width]``, on nodes alike: each has `load` on its own wires."""
        _, first = np.unique(self.node[ranks[0]], return_index=True)
        nodes, total, most = self.node[ranks[:, first]], len(self.node), len(self.nic)
        wires = [ranks, total + ranks, 2 * total + nodes, 2 * total + most + nodes]
        if self.link is not None:
            pairs = nodes[:, :, None] * most + nodes[:, None, :]
            wires.append(2 * (total + most) + pairs.reshape(len(ranks), -1))
        return np.bincount(np.concatenate(wires, axis=1).ravel(), np.tile(load, len(ranks)), len(self.rate))

    def seconds(self, *loads: np.ndarray) -> float:
        """Time of the busiest wire for these loads, all at one time."""
        return float((sum(loads) / self.rate).max())

    def around(self, size: float) -> float:
        """Time of the busiest wire for so many bytes on every wire of the circle of all ranks."""
        on_circle = self.circle > 0
        return size / float(self.rate[on_circle].min()) if on_circle.any() else 0.0

    @cached_property
    def circle(self) -> np.ndarray:
        """The load of one byte around the circle of all ranks."""
        nodes = len(self.nic)
        # A rank alone on its node passes the circle on through the NIC only.
        port = (np.bincount(self.node)[self.node] > 1).astype(float)
        nic = np.full(nodes, float(nodes > 1))
        link = np.zeros((nodes, nodes) if self.link is not None else 0)
        if self.link is not None:
            link[np.arange(nodes), np.roll(np.arange(nodes), -1)] = float(nodes > 1)
        return np.concatenate([port, port, nic, nic, link.ravel()])

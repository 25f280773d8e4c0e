"""Bytes that ranks exchange in a layer and a step, and the wires they pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hexiseq.cluster import Cluster, Place
from hexiseq.plan import Plan, Replica, fusion_width, interval_array
from hexiseq.workload import Workload

GB = 1e9


def accumulator_bytes(workload: Workload) -> int:
    """Bytes of an element of a running sum: fp32, or fp64 in fp64 jobs."""
    return max(4, workload.element_bytes)


def exchange_bytes(
    plan: Plan, replica: Replica, heads: np.ndarray, kv: np.ndarray, workload: Workload
) -> dict[str, np.ndarray]:
    """The four all-to-alls of a layer, ``[sender, receiver]`` bytes, a rank's own part left out."""
    home = replica.array[:, 0]
    tokens = replica.array[:, 1] * float(workload.model.head_dim * replica.sequences * workload.element_bytes)
    # Where two ranks hold the same KV head, gradients go home as unrounded partial sums.
    shared = (np.bincount(home, kv) > plan.num_kv_heads)[home]
    grads = tokens * np.where(shared, accumulator_bytes(workload) / workload.element_bytes, 1.0)
    among = (home[:, None] == home).astype(float)
    np.fill_diagonal(among, 0.0)

    def between(sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        found = np.outer(sent, received)
        found *= among
        return found

    return {
        "heads_in": between(tokens, heads + 2 * kv),
        "heads_out": between(heads, tokens),
        "grads_in": between(tokens, 3 * heads + 2 * kv),
        "grads_out": between(heads + 2 * kv, grads),
    }


def kv_bytes(plan: Plan, replica: Replica, workload: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """KV and dKV bytes across groups in one pass, ``[sender, receiver]`` in the order of the replica's ranks.

    And of those of dKV what leaves when all kernel calls of its sender have ended.
    """
    home, heads = hops(plan, replica)
    fetched, delivered, last = group_tokens(plan, replica, workload.model.window)
    unit = 2 * workload.model.head_dim * replica.sequences
    # A receiver takes each head from the first member of the sending group that holds it; a gradient goes to the first
    # that holds its head.
    kv = (unit * workload.element_bytes * fetched)[np.ix_(home, home)]
    dkv = (unit * accumulator_bytes(workload) * delivered)[np.ix_(home, home)]
    # In place: ranks x ranks is large.
    kv *= heads
    dkv *= heads.T
    if plan.exchange == "allgather":
        return kv, dkv, dkv
    late = (unit * accumulator_bytes(workload) * last)[np.ix_(home, home)]
    late *= heads.T
    return kv, dkv, late


def hops(plan: Plan, replica: Replica) -> tuple[np.ndarray, np.ndarray]:
    """The group of each rank; and KV heads from rank to rank where the sender's group sends KV to the receiver's.

    Transposed, those of dKV where it goes the other way.
    """
    home = replica.array[:, 0]
    first, last = held_heads(plan, replica)
    # A member speaks for the heads that no earlier one of its group holds: ends so far, group after group.
    base = home * (plan.num_kv_heads + 1)
    so_far = np.maximum.accumulate(np.append(0, last + base)[:-1]) - base
    start, end = np.maximum(first, so_far), np.maximum(last, so_far)
    common = np.minimum(end[:, None], last) - np.maximum(start[:, None], first)
    return home, np.maximum(common, 0).astype(float)


def held_heads(plan: Plan, replica: Replica) -> tuple[np.ndarray, np.ndarray]:
    """First and last (exclusive) KV head that each rank attends with, equal for a rank without heads."""
    first, last = replica.array[:, 2] // plan.gqa_ratio, -(-replica.array[:, 3] // plan.gqa_ratio)
    return first, np.where(replica.array[:, 3] > replica.array[:, 2], last, first)


def group_tokens(plan: Plan, replica: Replica, window: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens from group to group in one pass, ``[sender, receiver]``: of KV, of dKV, and of dKV after the last call.

    Gathered, what a group attends to comes straight from its owner, and dKV goes straight back after the last call.
    """
    slots = [group.slots for group in replica.groups]
    groups = len(slots)
    runs = interval_array(plan.seq_len, plan.slot, slots).astype(float)
    reach = (plan.seq_len if window is None else window) - 1  # tokens before itself that a query attends to
    back = runs[:, 1, 1] > runs[:, 1, 0]
    # Each group's first attended position in groups outer to it, and in groups inner to it, by its back queries alone.
    outer_from = np.maximum(runs[:, 0, 0] - reach, 0)
    inner_from = np.where(back, np.maximum(runs[:, 1, 0] - reach, 0), plan.seq_len)
    if plan.exchange == "ring":
        return _ring_tokens(plan, slots, outer_from, inner_from)
    outer = np.arange(groups)[:, None] < np.arange(groups)  # the source is outer to the receiver
    fronts = np.where(outer, _from(runs[:, 0], outer_from), _from(runs[:, 0], inner_from))
    needed = fronts + np.where(outer, 0, _from(runs[:, 1], inner_from))
    np.fill_diagonal(needed, 0.0)
    return needed, needed.T, needed.T


def _from(intervals: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Tokens of each interval ``[start, end)`` at positions from `first` on: ``[intervals, firsts]``."""
    return np.maximum(0.0, intervals[:, 1:] - np.maximum(intervals[:, :1], first))


def _ring_tokens(
    plan: Plan, slots: Sequence[int], outer_from: np.ndarray, inner_from: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same on the ring: a slot goes from group to group, by the tokens that somebody further along attends to.

    It goes from the group before its owner down to group 0, then, past the wrap and by its front half alone, from the
    last group up to the one behind its owner. Its dKV goes the same way, by the tokens that somebody so far attended
    to; that of the back half leaves the ring at group 0 and goes straight home.
    """
    groups = len(slots)
    fetched, delivered, late = np.zeros((3, groups, groups))
    if groups == 1:
        return fetched, delivered, late
    runs = interval_array(plan.seq_len, plan.slot, np.ones(sum(slots), int)).astype(float)
    home, group = np.repeat(np.arange(groups), slots), np.arange(groups)
    before = home[:, None] > group  # not past the wrap
    away = home[:, None] != group
    back_tokens = (runs[:, 1, 1] - runs[:, 1, 0])[:, None]

    # Groups further along have later fronts and earlier backs, so that one of them reaches furthest.
    behind = np.append(outer_from[1:], plan.seq_len)[home]
    past = np.maximum(0.0, runs[:, 0, 1] - np.maximum(runs[:, 0, 0], behind))[:, None]
    ahead = np.minimum.accumulate(inner_from)
    inner = _from(runs[:, 0], ahead) + _from(runs[:, 1], ahead)
    # One piece travels, from the first token to the last that is needed.
    both = np.where(past > 0, np.where(inner > 0, np.maximum(inner, past + back_tokens), past), inner)
    held = np.where(before, both, past) * away

    last = np.append(plan.seq_len, inner_from[:-1])[home]  # of the group before home, which reaches furthest so far
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
    width = np.array([fusion_width(plan.fusion, count) for count in slots])
    ticks = (np.where(group > 0, first, len(home) - slots[0]) - 1) % width + 1
    steps = np.arange(ticks.max())
    slot, taken = (first[:, None] - 1 - steps) % len(home), steps < ticks[:, None]
    late[group, before_it] = (fronts[slot, group[:, None]] * taken).sum(1)
    np.add.at(late[0], home[slot[0]], backs[slot[0], 0] * taken[0])
    return fetched, delivered, late


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


@dataclass(frozen=True)
class Kind:
    """Replicas that are alike: laid out alike, on devices and nodes alike.

    Attributes:
        plan: what holds for all its replicas: lengths, heads, slot, fusion, exchange.
        replica: one of them; its own rank numbers do not matter.
        ranks: in the job, of all of them, in the order of the replica's ranks: ``[count, width]``.
    """

    plan: Plan
    replica: Replica
    ranks: np.ndarray


def replica_kinds(plan: Plan, signature: Callable[[Sequence[int]], Hashable]) -> list[Kind]:
    """The plan's replicas by kind; those whose ranks differ in `signature` are of different kinds."""
    if len(plan.replicas) == 1:
        return [Kind(plan, plan.replicas[0], np.array([plan.replicas[0].ranks]))]
    found: dict[Hashable, list[Replica]] = {}
    for replica in plan.replicas:
        layout = tuple(
            (group.slots, tuple((shard.num_tokens, shard.heads) for shard in group.shards)) for group in replica.groups
        )
        found.setdefault((replica.sequences, layout, signature(replica.ranks)), []).append(replica)
    return [Kind(plan, alike[0], np.array([replica.ranks for replica in alike])) for alike in found.values()]


@dataclass(frozen=True)
class Load:
    """Bytes on each wire: out of and into ranks' ports and nodes' NICs; from node to node if links are special."""

    port_out: np.ndarray
    port_in: np.ndarray
    nic_out: np.ndarray
    nic_in: np.ndarray
    link: np.ndarray | None


class Wires:
    """The wires between ranks: each rank's port inside its node, each node's NICs, special links between nodes."""

    def __init__(self, cluster: Cluster, places: Sequence[Place]) -> None:
        self.cluster, self.places = cluster, tuple(places)
        first: dict[int, Place] = {}
        for place in self.places:
            first.setdefault(place.node, place)
        nodes = sorted(first)
        node_at = {node: i for i, node in enumerate(nodes)}
        self.node = np.array([node_at[place.node] for place in self.places])
        self.port = np.array([place.node_class.intra_gb_per_s for place in self.places]) * GB
        self.nic = np.array([first[node].node_class.network_gb_per_s for node in nodes]) * GB
        self.link = None  # no pair of nodes is slower than its NICs
        if cluster.links:
            ends = [first[node] for node in nodes]
            self.link = np.array([[cluster.bandwidth_gb_per_s(a, b) for b in ends] for a in ends]) * GB

    def subset(self, ranks: np.ndarray) -> Wires:
        """The wires as the given ranks see them, in that order."""
        if len(ranks) == len(self.places) and (ranks == np.arange(len(ranks))).all():
            return self
        return Wires(self.cluster, [self.places[rank] for rank in ranks.tolist()])

    def signature(self, ranks: Sequence[int]) -> Hashable:
        """Equal only for ranks on devices alike that share nodes alike, one by one."""
        rows = np.asarray(ranks)
        nodes, relative = np.unique(self.node[rows], return_inverse=True)
        link = b"" if self.link is None else self.link[np.ix_(nodes, nodes)].tobytes()
        return self._seat[rows].tobytes(), relative.tobytes(), link

    @cached_property
    def _seat(self) -> np.ndarray:
        """A number for each device on a class of nodes."""
        # By identity: comparing devices field by field costs more than a plan of thousands of ranks may take.
        known: dict[tuple[int, int], int] = {}
        seats = ((id(place.seat.device), id(place.node_class)) for place in self.places)
        return np.array([known.setdefault(seat, len(known)) for seat in seats])

    @cached_property
    def slowest_hbm(self) -> float:
        """Bytes a second of the slowest device's memory."""
        return min(d.hbm_gb_per_s for d in {id(p.seat.device): p.seat.device for p in self.places}.values()) * GB

    def load(self) -> Load:
        """No bytes on any wire."""
        ranks, nodes = len(self.places), len(self.nic)
        link = None if self.link is None else np.zeros((nodes, nodes))
        return Load(np.zeros(ranks), np.zeros(ranks), np.zeros(nodes), np.zeros(nodes), link)

    def add(self, load: Load, ranks: np.ndarray, sent: np.ndarray) -> None:
        """Put ``sent[sender, receiver]`` bytes on the wires for each row of `ranks`; their nodes must be alike."""
        nodes = self.node[ranks]
        inside = np.where(nodes[0][:, None] == nodes[0], sent, 0.0)
        outside = sent - inside
        load.port_out[ranks] += inside.sum(1)
        load.port_in[ranks] += inside.sum(0)
        for wire, axis in ((load.nic_out, 1), (load.nic_in, 0)):
            each = np.broadcast_to(outside.sum(axis), nodes.shape)
            wire += np.bincount(nodes.ravel(), each.ravel(), minlength=len(wire))
        if load.link is not None:
            for row in nodes:
                np.add.at(load.link, (row[:, None], row), outside)

    def seconds(self, sent: np.ndarray) -> float:
        """Time for ``sent[sender, receiver]`` bytes, all at one time."""
        if not sent.any():
            return 0.0
        if self.link is not None:
            load = self.load()
            self.add(load, np.arange(len(self.places))[None], sent)
            return self.busiest(load, 0.0)
        # The same without a load: what is left when no link is special.
        near_out, near_in = np.einsum("ij,ij->i", sent, self._same), np.einsum("ij,ij->j", sent, self._same)
        busy = float((np.maximum(near_out, near_in) / self.port).max())
        if len(self.nic) > 1:
            out = np.bincount(self.node, sent.sum(1) - near_out)
            into = np.bincount(self.node, sent.sum(0) - near_in)
            busy = max(busy, float((np.maximum(out, into) / self.nic).max()))
        return busy

    @cached_property
    def _same(self) -> np.ndarray:
        """1 where two ranks share a node."""
        return (self.node[:, None] == self.node).astype(float)

    def busiest(self, load: Load, circle: float) -> float:
        """Time of the busiest wire for `load` and `circle` bytes on every wire of the circle of all ranks."""
        nodes = len(self.nic)
        ring_node = circle if nodes > 1 else 0.0
        # A rank alone on its node passes the circle on through the NIC only.
        ring_port = np.where(np.bincount(self.node)[self.node] > 1, circle, 0.0) if circle else 0.0
        times = [
            (np.maximum(load.port_out, load.port_in) + ring_port) / self.port,
            (np.maximum(load.nic_out, load.nic_in) + ring_node) / self.nic,
        ]
        if load.link is not None and self.link is not None:
            order = np.arange(nodes)
            ring_link = np.zeros_like(load.link)
            ring_link[order, np.roll(order, -1)] = ring_node
            times.append((load.link + ring_link) / self.link)
        return max(float(time.max()) for time in times)

"""Quick estimates of layouts that are not worked out: groups with fractional shares, and even grids.

Estimates decide what is looked at, never what is chosen: that is for `hexiseq.cost`, whose terms they simplify. They
know the ring only, and put a rank's KV where the member that stands where it stands in the next group is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hexiseq import cost
from hexiseq.cluster import Cluster, Place
from hexiseq.cost import Inside, Kind, Layout, Wires
from hexiseq.plan import Prediction, kv_heads
from hexiseq.workload import Workload, all_pairs, attention_flops

# Of one kernel call: wide ones make merging cheap, narrow ones hold less KV; below 8,192 merging costs a tenth.
FUSED_TOKENS = (65536, 8192, 1)


class Job:
    """Devices that work together: a cluster or a part of it, one rank each.

    Seconds below are of a micro-step of one sequence, all layers and passes, by kind of device (`device` of a rank).

    Attributes:
        linear: per token of a rank.
        forward, backward: attention in large tiles, per token of the group and query head of the rank; forward of one
            pass.
        merge: merging in one pass, the same per kernel call.
        launch: per kernel call and fragment.
        capacity: tokens a rank can hold at the very most.
        copies: of layers' inputs to host memory and back, per token of a rank.
    """

    def __init__(self, cluster: Cluster, places: Sequence[Place], workload: Workload) -> None:
        self.cluster, self.places, self.workload = cluster, tuple(places), workload
        self.wires = Wires(cluster, self.places)
        self.device, devices = self.wires.devices.index, self.wires.devices.distinct
        model = workload.model
        self.forwards = cost.passes(workload.recompute)[0]
        per_pair = attention_flops(model, all_pairs(model, workload.seq_len) / workload.seq_len)
        merged = model.layers * model.head_dim * (8 + workload.element_bytes)
        self.linear = np.array([cost.token_seconds(d, workload) for d in devices])
        self.forward = np.array([per_pair / (d.attention_forward_tflops * 1e12) for d in devices])
        self.backward = np.array(
            [cost.BACKWARD_ATTENTION * per_pair / (d.attention_backward_tflops * 1e12) for d in devices]
        )
        self.devices, self.curved = devices, any(d.curved for d in devices)
        self._slower: dict[int, np.ndarray] = {}
        self.merge = np.array([merged / (d.hbm_gb_per_s * 1e9) for d in devices])
        self.launch = np.array([model.layers * (1 + self.forwards) * d.launch_us * 1e-6 for d in devices])
        self.capacity = np.array([cost.token_capacity(d, workload, len(self.places)) for d in devices])[self.device]
        self.copies = 2 * model.layers * cost.copy_seconds(devices, workload)
        # Bytes of a token's KV of one head, all layers of one pass; and of its gradient over that.
        self.kv_bytes = 2 * model.layers * model.head_dim * workload.element_bytes
        self.gradients = cost.accumulator_bytes(workload) / workload.element_bytes

    def part(self, ranks: np.ndarray) -> Job:
        """The job on these ranks alone."""
        return Job(self.cluster, [self.places[rank] for rank in ranks.tolist()], self.workload)

    @cached_property
    def nodes(self) -> list[list[np.ndarray]]:
        """Ranks of each node, by kind of node."""
        order = np.argsort(self.wires.node, kind="stable")
        kinds: dict[bytes, list[np.ndarray]] = {}
        for ranks in np.split(order, np.cumsum(np.bincount(self.wires.node))[:-1]):
            kinds.setdefault(self.wires.seat[ranks].tobytes(), []).append(ranks)
        return list(kinds.values())

    def calls(self, tokens: Any, own: Any = 0.0, outer: Any = None) -> Any:
        """Kernel calls over a group's tokens, each for so many foreign ones; those with half of the queries are halves.

        Args:
            own: tokens of the group; next to none.
            outer: tokens of groups further out; of a group in the middle.
        """
        n = self.workload.seq_len
        outer = n / 2 if outer is None else outer
        return 1 + (n - own + outer) / (2 * tokens)

    def summed(self, outer: Any) -> Any:
        """Tokens of a KV head, K and V apart, whose gradients a rank sums up, with so many in groups further out."""
        return 2 * (self.workload.seq_len - outer / 2)

    def slower(self, groups: int) -> np.ndarray:
        """How much longer attention takes on each kind of device in so many groups, about alike, than in large tiles.

        The own square is a group's share of its work. Half of the foreign slots are halves, and half of the calls have
        half of the queries.
        """
        if groups not in self._slower:
            tokens = self.workload.seq_len / groups
            edge = math.sqrt(tokens * min(FUSED_TOKENS[0], tokens) / 2)
            self._slower[groups] = np.array([
                1 / groups / d.attention_fraction(tokens, causal=True) + (1 - 1 / groups) / d.attention_fraction(edge)
                for d in self.devices
            ])  # fmt: skip
        return self._slower[groups]

    def judge(self, kinds: Sequence[Kind]) -> Prediction:
        """Step time of replicas of these kinds, without memory."""
        return cost.assess(kinds, self.wires, self.workload)

    def judge_below(self, kinds: Sequence[Kind], limit: float) -> Prediction | None:
        """The same, or None where the step is soon known to take as long as that."""
        return cost.assess_below(kinds, self.wires, self.workload, limit)

    def lacking_gb(self, kinds: Sequence[Kind]) -> np.ndarray:
        """`cost.lacking_gb` of one replica of each kind, ranks of one after those of the other."""
        return cost.lacking_gb(kinds, self.workload, self.wires)

    def most_tokens(self, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
        """`cost.most_tokens` of replicas of this kind."""
        return cost.most_tokens(kind, self.workload, self.wires)


@dataclass(frozen=True)
class Alike:
    """Replicas on devices and nodes alike, with equally many sequences: ranks of the job ``[count, width]``."""

    ranks: np.ndarray
    sequences: int


def kind_of(layout: Layout, ranks: np.ndarray) -> Kind:
    """Replicas laid out alike: what the layout calls rank ``r`` is ``ranks[:, r]``."""
    return Kind(layout, ranks[:, layout.ranks])


@dataclass(frozen=True)
class Ring:
    """The members of all groups of a ring, in any order.

    Attributes:
        home: group of each.
        partner: index of the member of the next group that KV comes from.
        node: of each.
        heads: KV heads of each.
        tokens: of each group.
    """

    home: np.ndarray
    partner: np.ndarray
    node: np.ndarray
    heads: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class Moving:
    """What the ring of a replica moves, in seconds of all layers.

    Attributes:
        forward, backward: of KV in one forward pass, and of KV and gradients in backward.
        late: of the last gradients, which nothing hides, for each token of a call.
        nics: of all passes, on each node's NICs.
    """

    forward: float
    backward: float
    late: float
    nics: np.ndarray

    def times(self, sequences: int) -> Moving:
        """Of so many sequences."""
        k = sequences
        return Moving(k * self.forward, k * self.backward, k * self.late, k * self.nics)


def moving(job: Job, ring: Ring, port: np.ndarray, nic: np.ndarray) -> Moving:
    """What a ring moves for one sequence.

    Args:
        port: bytes a second of each member inside its node.
        nic: of each node.
    """
    total = float(ring.tokens.sum())
    if len(ring.tokens) == 1:
        return Moving(0.0, 0.0, 0.0, np.zeros(len(nic)))
    # From the group after it a group receives inner slots whole and outer ones as front halves.
    outer = np.cumsum(ring.tokens) - ring.tokens
    received = job.kv_bytes * (total - ring.tokens - outer / 2)
    moved = received[ring.home] * ring.heads
    crosses = ring.node[ring.partner] != ring.node
    # Group 0 sends back halves' gradients straight home, to other nodes if there are any.
    first = job.kv_bytes * job.gradients * (total - float(ring.tokens[0])) / 2
    direct = np.where(ring.home == 0, first * ring.heads, 0.0)
    one_node = len(nic) == 1
    near, far = np.where(crosses, 0.0, moved), np.bincount(ring.node, np.where(crosses, moved, 0.0), len(nic))
    near_back = (1 + job.gradients) * near + (direct if one_node else 0.0)
    far_back = (1 + job.gradients) * far + (0.0 if one_node else np.bincount(ring.node, direct, len(nic)))
    forward = max(float((near / port).max()), float((far / nic).max()))
    backward = max(float((near_back / port).max()), float((far_back / nic).max()))
    # Of a last call's slots front halves go on to the group before, taken to be as near as the one after.
    sent = job.kv_bytes * job.gradients * ring.heads / 2
    last_near, last_far = np.where(crosses, 0.0, sent), np.bincount(ring.node, np.where(crosses, sent, 0.0), len(nic))
    late = max(float((last_near / port).max()), float((last_far / nic).max()))
    return Moving(forward, backward, late, (job.forwards * far + far_back) / nic)


def attention_seconds(
    job: Job, forward: Any, backward: Any, merging: Any, own: Any, outer: Any, smallest: float, ring: Moving,
    later: float = 1.0,
) -> float:  # fmt: skip
    """Seconds of all passes of a sequence's attention with the ring, in calls as wide as is best.

    Wide calls merge less, narrow ones leave fewer gradients to wait for.

    Args:
        forward, backward: of each rank in one pass, merging in kernel calls left out.
        merging: of each rank in one call over all its queries.
        own, outer: tokens of its group, and of those further out.
        smallest: tokens of the smallest group, which no call is wider than.
        later: how much later the last rank finishes for whole slots.
    """
    widest, found = min(FUSED_TOKENS[0], smallest), math.inf
    for call in (widest, widest / 2, widest / 4):
        calls = job.calls(call, own, outer) * merging
        there, again = later * float((forward + calls).max()), later * float((backward + calls).max())
        seconds = job.forwards * max(there, ring.forward) + max(again + call * ring.late, ring.backward)
        found = min(found, seconds)
    return found


def even_estimate(job: Job, alike: Alike, width: int, consecutive: bool) -> float:
    """Seconds of a micro-step of an even grid.

    Args:
        width: ranks of a group.
        consecutive: whether groups are of consecutive ranks, or consecutive ranks of consecutive groups.
    """
    model, ranks = job.workload.model, alike.ranks[0]
    n, total, layers = len(ranks), job.workload.seq_len, job.workload.model.layers
    groups, wires = n // width, job.wires.subset(ranks)
    devices = np.flatnonzero(np.bincount(job.device[ranks]))  # the kinds there are
    tokens, query, kv = total / groups, model.heads / width, max(model.kv_heads / width, 1.0)
    node, port, nic = wires.node, wires.port, wires.nic
    seats = np.bincount(node)

    index = np.arange(n)
    home = index // width if consecutive else index % groups
    place = index % width if consecutive else index // groups
    following = (home + 1) % groups
    partner = following * width + place if consecutive else place * groups + following
    ring = moving(job, Ring(home, partner, node, np.full(n, kv), np.full(groups, tokens)), port, nic)

    all_to_all, nics = 0.0, ring.nics
    if width > 1:
        together = np.bincount(home * len(seats) + node, minlength=groups * len(seats))[home * len(seats) + node]
        sent = total / n * layers * model.head_dim * job.workload.element_bytes
        every = 2 * kv * width
        sent *= job.forwards * (2 * model.heads + every) + 4 * model.heads + 2 * every
        near = sent * (together - 1) / width / port
        far = np.bincount(node, sent * (width - together) / width) / nic
        all_to_all = max(float(near.max()), float(far.max()))
        nics = nics + far
    work, slower, merge = tokens * query, job.slower(groups)[devices], job.merge[devices]
    own, outer = (0.0, total / 2) if groups > 1 else (total, 0.0)  # of a group in the middle
    backward = work * slower * job.backward[devices]
    if groups > 1:
        backward = backward + kv * job.summed(outer) * merge
    attention = attention_seconds(
        job, work * slower * job.forward[devices], backward, work * merge, own, outer, tokens, ring
    )
    path = total / n * float(job.linear[devices].max()) + all_to_all + attention
    return alike.sequences * max(path, float(nics.max()), total / n * float(job.copies[devices].max()))


class Exchange:
    """All-to-all inside the groups of one replica, by kind of group."""

    def __init__(self, job: Job, ranks: np.ndarray) -> None:
        self.job, self.ranks = job, ranks
        self.node = job.wires.node[ranks]
        self._nodes, self.alike = self.node.tolist(), job.wires.seat[ranks].tolist()
        self._found: dict[tuple, tuple[float, np.ndarray]] = {}

    def of(self, members: list[int], heads: tuple[int, ...]) -> tuple[float, np.ndarray]:
        """Seconds of a sequence per token of the group, all layers and passes; and the members' KV heads.

        Args:
            members: ranks of the replica.
        """
        first: dict[int, int] = {}
        nodes = tuple(first.setdefault(self._nodes[r], len(first)) for r in members)
        key = (tuple(self.alike[r] for r in members), nodes, heads)
        if key not in self._found:
            self._found[key] = self._measure(members, heads)
        return self._found[key]

    def _measure(self, members: list[int], heads: tuple[int, ...]) -> tuple[float, np.ndarray]:
        job, model = self.job, self.job.workload.model
        ends, ratio = np.cumsum(heads).tolist(), model.heads // model.kv_heads
        ranges = [kv_heads((end - h, end), ratio) for h, end in zip(heads, ends, strict=True)]
        kv = np.array([float(last - start) for start, last in ranges])
        if len(members) == 1:
            return 0.0, kv
        speed = 1 / job.linear[job.device[self.ranks[members]]]
        part, h = speed / speed.sum(), np.array(heads, float)
        # The other ranks of these nodes, of this replica or others, are in groups alike, through the same NICs.
        wires = job.wires.subset(self.ranks[members])
        unit = model.layers * model.head_dim * job.workload.element_bytes

        flow = Inside(
            np.zeros(len(members), int),
            unit * np.array([part, h, part, h + 2 * kv]),
            np.array([h + 2 * kv, part, 3 * h + 2 * kv, part]),
        )
        to_heads, back, to_heads_again, home = wires.seconds(wires.load(flow))
        return job.forwards * (to_heads + back) + to_heads_again + home, kv

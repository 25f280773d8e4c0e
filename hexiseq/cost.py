"""What a plan costs: step time, traffic and memory, before anything runs. Formulas with units: ``docs/cost-model.md``.

The step is the slowest path through compute, all-to-all and KV exchange, or the busiest wire, whichever is longer.
Bytes and FLOPs follow what the runtime moves and computes for exactly these tokens and heads; only the rates are
estimates. Arrays are indexed by rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hexiseq.cluster import Cluster, Device, Place
from hexiseq.plan import (
    Bound,
    Interval,
    Plan,
    Prediction,
    Replica,
    claims,
    fragments,
    fusion_width,
    group_intervals,
    kv_heads,
)
from hexiseq.workload import (
    STATE_BYTES_PER_PARAMETER,
    Workload,
    all_pairs,
    attended_pairs,
    attention_flops,
    head_flops,
    linear_flops,
)

MEMORY_FRACTION = 0.95  # of a device's memory a plan may fill; the rest is the allocator's fragmentation
BACKWARD_ATTENTION = 2.5  # backward FLOPs of attention over forward: five matrix products against two
BACKWARD_LINEAR = 2  # gradients to the input and to the weight
LOSS_CHUNK_TOKENS = 1024  # tokens whose logits exist at one time
GB = 1e9


class OutOfMemory(ValueError):
    """A device cannot hold its share. The message says which, how much it lacks and what would fit.

    Attributes:
        problem: the message without what would fit.
        rank: in the plan.
        lacking_gb: GB above the limit.
        fits_seq_len: largest sequence length that fits the same split, 0 when nothing does.
        full_fits_seq_len: the same with ``recompute=full``; asked for only when nothing else fits.
    """

    def __init__(
        self,
        problem: str,
        recompute: str,
        fits_seq_len: int,
        rank: int = -1,
        lacking_gb: float = math.nan,
        full_fits_seq_len: int = 0,
    ) -> None:
        remedies = [f"seq_len {fits_seq_len:,} would fit"] if fits_seq_len >= 2 else []
        if recompute != "full" and fits_seq_len >= 2:
            remedies.append("recompute=full needs less")
        elif recompute != "full" and full_fits_seq_len >= 2:
            remedies.append(
                f"no sequence fits with recompute={recompute}, with recompute=full seq_len {full_fits_seq_len:,} would"
            )
        elif fits_seq_len < 2:
            remedies.append("no sequence fits beside the parameters: use more devices or a smaller model")
        super().__init__(f"{problem}; {'; '.join(remedies)}")
        self.problem, self.fits_seq_len, self.rank, self.lacking_gb = problem, fits_seq_len, rank, lacking_gb
        self.full_fits_seq_len = full_fits_seq_len


@dataclass(frozen=True)
class ReplicaCost:
    """One replica, one layer, one micro-step. Seconds and bytes; arrays follow ``ranks``.

    Byte matrices are ``[sender, receiver]``. ``forward``: attention's forward pass; ``backward``: its own backward pass
    only, without what recomputation repeats.

    Attributes:
        linear: seconds of the matrix products, forward.
        attention_forward, attention_backward: seconds in the attention kernels.
        merge_forward, merge_backward: seconds of merging partial results and launching kernels.
        own_forward, own_backward: the part of the two above that is the group's own causal call.
        heads_in, heads_out: all-to-all of forward: q, k, v to heads; out back to tokens.
        grads_in, grads_out: all-to-all of backward: q, k, v, out, dout to heads; dq, dk, dv back to tokens.
        kv, dkv: KV across groups in one pass (forward and backward alike), by the plan's exchange; dKV in backward.
        loss: seconds of embedding, output head and loss, forward and backward, once a micro-step.
    """

    ranks: np.ndarray
    linear: np.ndarray
    attention_forward: np.ndarray
    attention_backward: np.ndarray
    merge_forward: np.ndarray
    merge_backward: np.ndarray
    own_forward: np.ndarray
    own_backward: np.ndarray
    heads_in: np.ndarray
    heads_out: np.ndarray
    grads_in: np.ndarray
    grads_out: np.ndarray
    kv: np.ndarray
    dkv: np.ndarray
    loss: np.ndarray


def predict(plan: Plan, cluster: Cluster, workload: Workload, places: Sequence[Place] | None = None) -> Prediction:
    """Step time, its parts and peak memory of a plan.

    Args:
        places: the device of each rank; by default matched by device type and node (`match_places`).

    Raises:
        ValueError: the plan is for another workload, or names a device the cluster lacks.
    """
    check_workload(plan, workload)
    places = match_places(plan, cluster) if places is None else places
    wires = Wires(cluster, places)
    repeats = workload.accumulation

    path = compute = all_to_all = across = 0.0
    traffic = np.zeros((len(places), len(places)))
    forwards, linears = passes(workload.recompute)
    counts = {"forward": forwards, "backward": 1}
    for replica in plan.replicas:
        near = wires.subset(np.array(replica.ranks))
        seconds = kernel_seconds = exchange_seconds = moving_seconds = 0.0
        for model in workload.model.kinds:
            cost = replica_cost(plan, replica, dataclasses.replace(workload, model=model), places)
            linear = linears * float(cost.linear.max())
            kernels = {
                "forward": float((cost.attention_forward + cost.merge_forward).max()),
                "backward": float((cost.attention_backward + cost.merge_backward).max()),
            }
            exchange = {
                "forward": near.seconds(cost.heads_in) + near.seconds(cost.heads_out),
                "backward": near.seconds(cost.grads_in) + near.seconds(cost.grads_out),
            }
            overlapped, moving = _across_groups(plan.exchange, cost, near)
            exchanged = sum(counts[p] * exchange[p] for p in counts)
            seconds += model.layers * (linear + exchanged + sum(counts[p] * overlapped[p] for p in counts))
            kernel_seconds += model.layers * (linear + sum(counts[p] * kernels[p] for p in counts))
            exchange_seconds += model.layers * exchanged
            moving_seconds += model.layers * sum(counts[p] * moving[p] for p in counts)
            traffic[np.ix_(cost.ranks, cost.ranks)] += (repeats * model.layers) * (
                forwards * (cost.heads_in + cost.heads_out + cost.kv)
                + cost.grads_in + cost.grads_out + cost.kv + cost.dkv
            )  # fmt: skip
        loss = float(cost.loss.max())
        if repeats * (seconds + loss) > path:
            path = repeats * (seconds + loss)
            compute = repeats * (kernel_seconds + loss)
            all_to_all, across = repeats * exchange_seconds, repeats * moving_seconds

    parameter_bytes = parameter_traffic(workload, len(places))
    optimizer = optimizer_seconds(workload, places)
    step = max(path + optimizer, wires.busiest(traffic, parameter_bytes))
    memory, limit = memory_gb(plan, workload, places)
    return Prediction(
        step_seconds=float(step),
        tokens_per_second=workload.tokens_per_step / float(step),
        compute_seconds=float(compute + optimizer),
        all_to_all_seconds=float(all_to_all),
        ring_seconds=float(across),
        parameter_seconds=float(wires.circle_seconds(parameter_bytes)),
        memory_gb=tuple(memory.tolist()),
        memory_limit_gb=tuple(limit.tolist()),
    )


def _across_groups(exchange: str, cost: ReplicaCost, wires: Wires) -> tuple[dict[str, float], dict[str, float]]:
    """Per pass: seconds of the attention kernels together with the exchange across groups; of the exchange alone."""
    forward, backward = cost.attention_forward + cost.merge_forward, cost.attention_backward + cost.merge_backward
    kv = wires.seconds(cost.kv)
    if exchange == "ring":
        moving = {"forward": kv, "backward": wires.seconds(cost.kv + cost.dkv)}
        kernels = {"forward": forward, "backward": backward}
        return {p: max(float(kernels[p].max()), moving[p]) for p in moving}, moving
    # The own call alone is there to hide the gather; nothing hides the return of dKV.
    back = wires.seconds(cost.dkv)
    overlapped = {
        "forward": float((np.maximum(cost.own_forward, kv) + forward - cost.own_forward).max()),
        "backward": float((np.maximum(cost.own_backward, kv) + backward - cost.own_backward).max()) + back,
    }
    return overlapped, {"forward": kv, "backward": kv + back}


def replica_cost(plan: Plan, replica: Replica, workload: Workload, places: Sequence[Place]) -> ReplicaCost:
    """What one layer of one replica computes and moves; the model's layers must be of one kind."""
    assert len(workload.model.kinds) == 1, "a layer of which kind?"
    model, batch, size = workload.model, replica.sequences, workload.element_bytes
    shards = [shard for group in replica.groups for shard in group.shards]
    ranks = np.array([shard.rank for shard in shards])
    devices = [places[rank].device for rank in ranks]
    gemm, forward_rate, backward_rate = (
        np.array([getattr(device, name) for device in devices]) * 1e12
        for name in ("gemm_tflops", "attention_forward_tflops", "attention_backward_tflops")
    )
    hbm = np.array([device.hbm_gb_per_s for device in devices]) * GB
    launch = np.array([device.launch_us for device in devices]) * 1e-6
    # A rank without tokens still feeds the model one dummy token.
    fed = np.array([max(shard.num_tokens, 1) for shard in shards], float)
    heads = np.array([shard.num_heads for shard in shards], float)
    kv = np.array([np.diff(kv_heads(shard.heads, plan.gqa_ratio))[0] for shard in shards], float)
    cuts = np.array([len(fragments(shard.heads, plan.gqa_ratio)) for shard in shards], float)

    rows, calls, foreign, own, pairs, own_pairs = _kernel_calls(plan, replica, model.window)
    dim = model.head_dim
    flops = batch * heads * attention_flops(model, 1.0) * pairs
    own_flops = batch * heads * attention_flops(model, 1.0) * own_pairs
    # The running sum is read and written in fp32, the partial result read; log-sum-exps likewise.
    accumulate = 8 + size
    merged = batch * heads * rows * (dim * accumulate + 12)
    own_merged = batch * heads * own * (dim * accumulate + 12)
    merged_back = batch * dim * (heads * (rows * accumulate + own * 2 * size) + 2 * kv * (own + foreign) * accumulate)
    own_merged_back = batch * dim * (heads * own * (accumulate + 2 * size) + 2 * kv * own * accumulate)

    matrices = _exchange_bytes(plan, replica, heads, kv, workload)
    kv_bytes, dkv_bytes = _kv_bytes(plan, replica, workload)
    return ReplicaCost(
        ranks=ranks,
        linear=batch * fed * linear_flops(model) / gemm,
        attention_forward=flops / forward_rate,
        attention_backward=BACKWARD_ATTENTION * flops / backward_rate,
        merge_forward=merged / hbm + cuts * calls * launch,
        merge_backward=merged_back / hbm + cuts * calls * launch,
        own_forward=own_flops / forward_rate + own_merged / hbm + cuts * launch,
        own_backward=BACKWARD_ATTENTION * own_flops / backward_rate + own_merged_back / hbm + cuts * launch,
        loss=batch * fed * ((1 + BACKWARD_LINEAR) * head_flops(model) / gemm + 4 * model.hidden * size / hbm),
        kv=kv_bytes,
        dkv=dkv_bytes,
        **matrices,
    )


def passes(recompute: str) -> tuple[int, int]:
    """How often a layer's attention runs forward, and its linear part counts, in a micro-step.

    Selective recompute keeps attention's result, so only the linear part runs again; full repeats the ring too.
    """
    return (2 if recompute == "full" else 1), 1 + BACKWARD_LINEAR + (recompute != "none")


def _kernel_calls(plan: Plan, replica: Replica, window: int | None) -> tuple[np.ndarray, ...]:
    """Per rank: rows of all calls, calls, foreign KV tokens, own group's tokens, (query, key) pairs, the own call's.

    Inner groups' tokens meet the back queries, outer groups' all queries. On the ring, consecutive slots of one side
    share a call as far as the plan fuses them; gathered, all of a side are one. A window is counted in the pairs alone:
    it leaves out rows and calls, too, but cuts some into several.
    """
    slots = [group.slots for group in replica.groups]
    runs = group_intervals(plan.seq_len, plan.slot, slots)
    front = [b - a for (a, b), _ in runs]
    back = [d - c for _, (c, d) in runs]
    columns: list[tuple[float, ...]] = []
    for g, group in enumerate(replica.groups):
        own = front[g] + back[g]
        width = fusion_width(plan.fusion, group.slots) if plan.exchange == "ring" else replica.slots
        inner_calls = -(-sum(slots[g + 1 :]) // width) if back[g] else 0
        outer_calls = -(-sum(slots[:g]) // width)
        rows = own * (1 + outer_calls) + back[g] * inner_calls
        foreign = (sum(front[g + 1 :]) + sum(back[g + 1 :]) if back[g] else 0) + sum(front[:g])
        pairs = sum(attended_pairs(b, window) - attended_pairs(a, window) for a, b in runs[g])
        calls = 1 + outer_calls + inner_calls
        columns += [(rows, calls, foreign, own, pairs, _own_pairs(runs[g], window))] * len(group.shards)
    return tuple(np.array(column, float) for column in zip(*columns, strict=True))


def _own_pairs(run: tuple[Interval, Interval], window: int | None) -> int:
    """(query, key) pairs within a group's own tokens."""
    (a, b), (c, d) = run
    if window is None:
        return attended_pairs(b - a + d - c, None)

    def reach(end: int) -> int:
        """Pairs of the back queries with all tokens before `end`, of the sequence and of one that began earlier."""
        most = end + window - 1  # the first query that does not reach them
        return attended_pairs(max(0, most - c), None) - attended_pairs(max(0, most - d), None)

    return attended_pairs(b - a, window) + attended_pairs(d - c, window) + reach(b) - reach(a)


def _exchange_bytes(
    plan: Plan, replica: Replica, heads: np.ndarray, kv: np.ndarray, workload: Workload
) -> dict[str, np.ndarray]:
    """The four all-to-alls of a layer, ``[sender, receiver]`` bytes, a rank's own part left out."""
    width = len(heads)
    found = {name: np.zeros((width, width)) for name in ("heads_in", "heads_out", "grads_in", "grads_out")}
    unit = workload.model.head_dim * replica.sequences
    start = 0
    for group in replica.groups:
        part = slice(start, start + len(group.shards))
        start = part.stop
        tokens = np.array([shard.num_tokens for shard in group.shards], float) * unit * workload.element_bytes
        h, k = heads[part], kv[part]
        # Where two ranks hold the same KV head, gradients go home as unrounded partial sums.
        shared = k.sum() > plan.num_kv_heads
        grads = tokens * (accumulator_bytes(workload) / workload.element_bytes if shared else 1)
        found["heads_in"][part, part] = np.outer(tokens, h + 2 * k)
        found["heads_out"][part, part] = np.outer(h, tokens)
        found["grads_in"][part, part] = np.outer(tokens, 3 * h + 2 * k)
        found["grads_out"][part, part] = np.outer(h + 2 * k, grads)
    for matrix in found.values():
        np.fill_diagonal(matrix, 0.0)
    return found


def _kv_bytes(plan: Plan, replica: Replica, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """KV and dKV bytes across groups in one pass, ``[sender, receiver]`` in the order of the replica's ranks."""
    kv_tokens, dkv_tokens = _kv_tokens(plan, replica, workload.model.window)
    unit = 2 * workload.model.head_dim * replica.sequences
    return unit * workload.element_bytes * kv_tokens, unit * accumulator_bytes(workload) * dkv_tokens


def _kv_tokens(plan: Plan, replica: Replica, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens times KV heads from rank to rank in one pass: KV, and dKV.

    A receiver takes each head from the first member of the sending group that holds it; a gradient goes to the first
    that holds its head.
    """
    home, heads = _hops(plan, replica)
    fetched, delivered = _group_tokens(plan, replica, window)
    return heads * fetched[np.ix_(home, home)], heads.T * delivered[np.ix_(home, home)]


def _hops(plan: Plan, replica: Replica) -> tuple[np.ndarray, np.ndarray]:
    """The group of each rank; and KV heads from rank to rank where the sender's group sends KV to the receiver's.

    Transposed, those of dKV where it goes the other way.
    """
    home = np.array([g for g, group in enumerate(replica.groups) for _ in group.shards])
    held = np.zeros((len(home), plan.num_kv_heads))
    speaks = np.zeros_like(held)
    member = 0
    for group in replica.groups:
        ranges = [kv_heads(shard.heads, plan.gqa_ratio) for shard in group.shards]
        for (first, last), (start, end) in zip(ranges, claims(ranges), strict=True):
            held[member, first:last] = speaks[member, start:end] = 1
            member += 1
    return home, speaks @ held.T


def _group_tokens(plan: Plan, replica: Replica, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens from group to group in one pass, ``[sender, receiver]``: of KV, and of dKV.

    Gathered, what a group attends to comes straight from its owner, and dKV goes straight back.
    """
    slots = [group.slots for group in replica.groups]
    groups = len(slots)
    runs = np.array(group_intervals(plan.seq_len, plan.slot, slots), float)
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
    return needed, needed.T


def _from(intervals: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Tokens of each interval ``[start, end)`` at positions from `first` on: ``[intervals, firsts]``."""
    return np.maximum(0.0, intervals[:, 1:] - np.maximum(intervals[:, :1], first))


def _ring_tokens(
    plan: Plan, slots: Sequence[int], outer_from: np.ndarray, inner_from: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same on the ring: a slot goes from group to group, by the tokens that somebody further along attends to.

    It goes from the group before its owner down to group 0, then, past the wrap and by its front half alone, from the
    last group up to the one behind its owner. Its dKV goes the same way, by the tokens that somebody so far attended
    to; that of the back half leaves the ring at group 0 and goes straight home.
    """
    groups = len(slots)
    fetched, delivered = np.zeros((groups, groups)), np.zeros((groups, groups))
    if groups == 1:
        return fetched, delivered
    runs = np.array(group_intervals(plan.seq_len, plan.slot, [1] * sum(slots)), float)
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
    return fetched, delivered


def accumulator_bytes(workload: Workload) -> int:
    """Bytes of an element of a running sum: fp32, or fp64 in fp64 jobs."""
    return max(4, workload.element_bytes)


def parameter_traffic(workload: Workload, ranks: int) -> float:
    """Bytes that pass each wire of the circle of ranks in an optimizer step: parameters gathered, gradients reduced.

    Layers are gathered once or twice a micro-step, embedding and head (which stay) once; gradients are reduced in fp32
    once an optimizer step.
    """
    model = workload.model
    gathers = 1 if workload.keep_parameters else 2
    gathered = gathers * model.layers * model.layer_parameters + model.embedding_parameters
    size = workload.accumulation * gathered * workload.element_bytes + model.parameters * accumulator_bytes(workload)
    return size * (ranks - 1) / ranks


def state_bytes(workload: Workload) -> float:
    """Bytes of parameters, gradients and optimizer states, over all ranks: fp32, in fp64 jobs fp64."""
    return workload.model.parameters * STATE_BYTES_PER_PARAMETER * accumulator_bytes(workload) / 4


def optimizer_seconds(workload: Workload, places: Sequence[Place]) -> float:
    """The optimizer reads and writes its states once; it is bound by memory."""
    states = state_bytes(workload) / len(places)
    return max(2 * states / (place.device.hbm_gb_per_s * GB) for place in places)


class Wires:
    """The wires between ranks: each rank's port inside its node, each node's NICs, special links between nodes."""

    def __init__(self, cluster: Cluster, places: Sequence[Place]) -> None:
        self.cluster, self.places = cluster, tuple(places)
        nodes = sorted({place.node for place in self.places})
        node_at = {node: i for i, node in enumerate(nodes)}
        self.node = np.array([node_at[place.node] for place in self.places])
        first = [next(place for place in self.places if place.node == node) for node in nodes]
        self.port = np.array([place.node_class.intra_gb_per_s for place in self.places]) * GB
        self.nic = np.array([place.node_class.network_gb_per_s for place in first]) * GB
        if cluster.links:
            self.link = np.array([[cluster.bandwidth_gb_per_s(a, b) for b in first] for a in first]) * GB
        else:
            self.link = np.minimum.outer(self.nic, self.nic)
        self.member = (self.node[:, None] == np.arange(len(nodes))).astype(float)
        self.same = self.node[:, None] == self.node[None, :]

    def subset(self, ranks: np.ndarray) -> Wires:
        """The wires as the given ranks see them, in that order."""
        if len(ranks) == len(self.places) and (ranks == np.arange(len(ranks))).all():
            return self
        return Wires(self.cluster, [self.places[rank] for rank in ranks.tolist()])

    def seconds(self, sent: np.ndarray) -> float:
        """Time for ``sent[sender, receiver]`` bytes, all at one time."""
        return self.busiest(sent, 0.0)

    def busiest(self, sent: np.ndarray, circle: float) -> float:
        """Time of the busiest wire for ``sent`` and `circle` bytes on every wire of the circle of all ranks."""
        inside = np.where(self.same, sent, 0.0)
        between = self.member.T @ (sent - inside) @ self.member
        ring_node = circle if len(self.nic) > 1 else 0.0
        ring_link = np.zeros_like(between)
        if ring_node:
            order = np.arange(len(self.nic))
            ring_link[order, np.roll(order, -1)] = circle
        # A rank alone on its node passes the circle on through the NIC only.
        ring_port = np.where(self.member.sum(0)[self.node] > 1, circle, 0.0)
        loads = (
            (inside.sum(1) + ring_port) / self.port,
            (inside.sum(0) + ring_port) / self.port,
            (between.sum(1) + ring_node) / self.nic,
            (between.sum(0) + ring_node) / self.nic,
            (between + ring_link) / self.link,
        )
        return max(float(load.max()) for load in loads)

    def circle_seconds(self, size: float) -> float:
        """Time for `size` bytes on every wire of the circle of all ranks."""
        return self.busiest(np.zeros((len(self.places),) * 2), size) if len(self.places) > 1 else 0.0


def token_bytes(workload: Workload) -> tuple[float, float]:
    """Bytes a token leaves on its rank: kept per layer until backward, and while one layer is worked on."""
    model, size = workload.model, workload.element_bytes
    q, kv = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    # Input, two norms, residual; q, k, v and out; gate, up, activation and their product.
    everything = (4 * model.hidden + 2 * q + kv + 4 * model.intermediate) * size
    kept = {"none": everything, "selective": (model.hidden + q) * size, "full": model.hidden * size}
    working = 0 if workload.recompute == "none" else everything
    return float(kept[workload.recompute]), float(working)


def fixed_bytes(workload: Workload, ranks: int) -> float:
    """Bytes every rank holds whatever its share: sharded states and gathered parameters and gradients."""
    model, size = workload.model, workload.element_bytes
    states = state_bytes(workload) / ranks
    if ranks == 1:
        return states + model.layer_parameters * size
    gathered_layers = model.layers if workload.keep_parameters else min(2, model.layers)
    gathered = (gathered_layers * model.layer_parameters + model.embedding_parameters) * size
    # One layer's gradients and their copy in the dtype of the reduction; embedding and head to the end of backward.
    gradients = model.layer_parameters * (size + accumulator_bytes(workload)) + model.embedding_parameters * size
    if workload.accumulation > 1:
        # Gradients are reduced once an optimizer step, so they wait unsharded.
        gradients += model.parameters * accumulator_bytes(workload)
    return states + gathered + gradients


def memory_gb(plan: Plan, workload: Workload, places: Sequence[Place]) -> tuple[np.ndarray, np.ndarray]:
    """Predicted peak memory of each rank, and its limit, in GB."""
    fixed, share = _memory_parts(plan, workload, places)
    limit = MEMORY_FRACTION * np.array([place.device.memory_gb for place in places])
    return fixed + share, limit


def attention_bytes(plan: Plan, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Peak bytes of one attention call on each rank, forward and backward, by rank.

    Beyond what the model holds: q, k, v and out in token form, the log-sum-exp, and their gradients.
    """
    forward, backward = np.zeros(plan.world_size), np.zeros(plan.world_size)
    for replica in plan.replicas:
        ranks = list(replica.ranks)
        forward[ranks], backward[ranks] = _replica_attention_bytes(plan, replica, workload)
    return forward, backward


def _replica_attention_bytes(plan: Plan, replica: Replica, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """The same of one replica's ranks, in its order. Numbers of heads are counted before they become bytes."""
    model, size, wide = workload.model, workload.element_bytes, accumulator_bytes(workload)
    all_q, all_kv = model.heads, 2 * model.kv_heads
    shards = [shard for group in replica.groups for shard in group.shards]
    home = np.array([g for g, group in enumerate(replica.groups) for _ in group.shards])
    tokens = np.array([shard.num_tokens for shard in shards], float)
    rows = np.array([group.num_tokens for group in replica.groups], float)[home]
    alone = np.array([len(group.shards) == 1 for group in replica.groups])[home]
    h = np.array([shard.num_heads for shard in shards], float)
    held_heads = (kv_heads(shard.heads, plan.gqa_ratio) for shard in shards)
    kv = np.array([2.0 * (last - first) for first, last in held_heads])
    # A kernel call is for one fragment; what the one before returned is still there.
    cuts = [fragments(shard.heads, plan.gqa_ratio) or (((0, 0), (0, 0)),) for shard in shards]
    most_h, most_kv = (np.array([max(cut[i][1] - cut[i][0] for cut in rank) for rank in cuts], float) for i in (0, 1))
    last_h, last_kv = (np.array([rank[-1][i][1] - rank[-1][i][0] for rank in cuts], float) for i in (0, 1))
    most_kv, last_kv = 2 * most_kv, 2 * last_kv

    # A group of one in the accumulator's dtype adds to what its own call returns, which becomes the result.
    rounds = wide > size
    adopts = alone & (not rounds)
    make = _ring_moments if plan.exchange == "ring" else _gather_moments
    at = make(plan, replica, workload, kv, np.where(adopts, 0.0, rows))
    parts = at.before * last_h + at.now * most_h
    grads = parts + at.keys_before * last_kv + at.keys_now * most_kv

    # Forward. Merging casts a part, and takes about eight rows of log-sum-exps.
    merge = at.now * most_h * (size + rounds * wide + 8 * wide / model.head_dim)
    merge[0] = 0.0  # the own call is copied
    working = at.kv * size + np.maximum(parts * size, merge)
    sent, sums, result = tokens * (all_q + all_kv) * size, rows * h * wide, tokens * all_q * size
    heads = np.where(alone, 0.0, rows * (h + kv) * size)
    # At the end what the last call held is still there, and the result beside what it is made from.
    message = rows * h * size * rounds
    home_bytes = np.where(alone, np.where(adopts, 0.0, result), message + 2 * result)
    forward = _peak(np.where(alone, 0.0, sent), heads, sums, working, home_bytes, result)

    # Backward.
    working = at.kv * size + at.dkv * wide + grads * size
    sent, sums, result = tokens * (3 * all_q + all_kv) * size, rows * (h + kv) * wide, tokens * (all_q + all_kv) * size
    heads = np.where(alone, 0.0, rows * (3 * h + kv) * size)
    # Partial sums of a KV head that several members hold are not rounded before they are added.
    held = np.bincount(home, kv)[home]
    travels = np.where(held > all_kv, wide, size)
    message = np.where(travels < wide, rows * (h + kv) * size, 0.0)
    local = tokens * (all_q + all_kv) * wide
    home_bytes = np.where(
        alone,
        np.where(adopts, 0.0, local + result),
        message + tokens * (all_q + held) * travels + np.where(travels > size, local, 0.0) + result,
    )
    backward = _peak(np.where(alone, 0.0, sent), heads, sums, working, home_bytes, result)
    unit = model.head_dim * replica.sequences
    return unit * forward, unit * backward


def _peak(
    sent: np.ndarray, heads: np.ndarray, sums: np.ndarray, working: np.ndarray, home: np.ndarray, result: np.ndarray
) -> np.ndarray:
    """The most of an all-to-all to heads, the calls, and the way back to tokens, without the result.

    Args:
        sent, heads: the message and what it becomes.
        sums: of all calls.
        working: what calls hold beside these, ``[moments, ranks]``; the last moment is after the last call.
        home: all that is made of the sums, the result included.
    """
    return np.maximum(sent + heads, heads + sums + np.maximum(working.max(0), working[-1] + home)) - result


@dataclass(frozen=True)
class _Moments:
    """What a rank holds besides its own tokens, when that may be most: ``[moments, ranks]``.

    The first moment is the own call, the last one after all calls and after dKV has come home.

    Attributes:
        kv, dkv: rows times twice the KV heads of all buffers.
        before, keys_before: rows of queries and keys whose results the last finished call returned.
        now, keys_now: those of the call at work, 0 between calls.
    """

    kv: np.ndarray
    dkv: np.ndarray
    before: np.ndarray
    keys_before: np.ndarray
    now: np.ndarray
    keys_now: np.ndarray

    @staticmethod
    def of(*moments: tuple[np.ndarray | float, ...]) -> _Moments:
        """From the attributes at each moment, or at several moments, in their order."""
        width = max(np.shape(value)[-1] for moment in moments for value in moment if np.ndim(value))

        def stacked(values: tuple[np.ndarray | float, ...]) -> np.ndarray:
            moments = max(1 if np.ndim(value) < 2 else np.shape(value)[0] for value in values)
            return np.stack([np.broadcast_to(value, (moments, width)) for value in values])

        return _Moments(*np.concatenate([stacked(moment) for moment in moments], axis=1))


def _group_rows(plan: Plan, replica: Replica) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of each group, and those of its back interval."""
    runs = np.array(group_intervals(plan.seq_len, plan.slot, [group.slots for group in replica.groups]), float)
    lengths = runs[:, :, 1] - runs[:, :, 0]
    return lengths.sum(1), lengths[:, 1]


def _ring_moments(plan: Plan, replica: Replica, workload: Workload, kv: np.ndarray, adopted: np.ndarray) -> _Moments:
    """On the ring: at the own call, and before, in and after the calls at which most slots are held.

    Without documents and windows, which shorten messages.

    Args:
        kv: twice the KV heads of each rank.
        adopted: rows of the own call's result that count, 0 where it is the sum of all.
    """
    home, heads = _hops(plan, replica)
    heads *= 2
    slots = np.array([group.slots for group in replica.groups])
    total, groups = int(slots.sum()), len(slots)
    rows, back = (per_group[home] for per_group in _group_rows(plan, replica))
    if groups == 1:
        return _Moments.of((0, 0, 0, 0, adopted, adopted), (0, 0, adopted, adopted, 0, 0))
    n, off = slots[home], (np.cumsum(slots) - slots)[home]
    after, before = (home + 1) % groups, (home - 1) % groups
    width = np.array([fusion_width(plan.fusion, int(count)) for count in slots])[home]
    outer = total - off  # the first tick of outer slots, of which only front halves are needed
    half = plan.slot / 2

    # Heads from the group after, and to the one before; those that make part of a buffer need one of their own.
    to_before = home[None, :] == before[:, None]
    sent, returned = heads * to_before, heads.T * to_before
    pieces = np.where((sent > 0).sum(0) > 1, kv, 0.0)
    copied, copied_back = (np.where(m < kv[:, None], m, 0.0).sum(1) for m in (sent, returned))
    from_after, from_first = returned.sum(0), (heads.T * (home == 0)[:, None]).sum(0)

    def held(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Rows of the slots of foreign ticks ``[start, end)``."""
        start, end = np.minimum(np.maximum(start, n), total), np.minimum(np.maximum(end, n), total)
        inner = np.maximum(np.minimum(end, outer) - start, 0)
        return plan.slot * inner + half * np.maximum(end - np.maximum(start, outer), 0)

    def first(tick: np.ndarray) -> np.ndarray:
        """The first tick of a tick's block; a block is the slots of one call."""
        tick = np.minimum(np.maximum(tick, n), total - 1)
        side = np.where(tick < outer, n, outer)
        return side + (tick - side) // width * width

    def last(tick: np.ndarray) -> np.ndarray:
        """The tick after its block."""
        tick = first(tick)
        return np.minimum(tick + width, np.where(tick < outer, outer, total))

    def incoming(done: np.ndarray, posted: np.ndarray) -> np.ndarray:
        """dKV on its way in: posted up to that batch, and taken up to that tick. Own slots' stays to the end."""
        passing = held(np.maximum(done, n + slots[after]), posted + n)
        fronts, backs = (half * np.clip(posted - start, 0, n) for start in (total - n, off))
        return (passing + fronts) * from_after + np.where(home > 0, backs, 0.0) * from_first

    # Windows are widest at the first blocks of either side, or once all that is posted ahead is sent; what comes home
    # adds up until the end.
    t = np.stack([n, n + width, n + 2 * width, n + slots[after], outer, outer + width, outer + 2 * width, off + n])
    t = first(np.vstack([t, np.full_like(n, total - 1)]))
    end, ahead = last(t), last(last(t) + n - 1)
    previous = np.where(t > n, first(t - 1), t)
    earlier = np.where(previous > n, first(previous - 1), previous)
    relayed = np.minimum(end, total - slots[before])
    own_slot = np.where(home > 0, plan.slot, half) * sent.sum(1)
    arriving = held(end, end + n) * pieces
    # Sends are let go of two ticks later, when the next block's are posted: until then the block before counts, too.
    kv_between = held(earlier, ahead) * kv + arriving + held(previous - 1, relayed) * copied
    kv_between += np.where(t == n, n * own_slot, np.where(previous == n, own_slot, 0.0))
    kv_call = held(previous, ahead) * kv + arriving + held(t - 1, relayed) * copied + np.where(t == n, own_slot, 0.0)
    passed = held(earlier, t) * kv + held(previous - 1, t) * copied_back
    dkv_call = passed + held(t, end) * kv + incoming(t, t)
    dkv_after = passed + held(t, end) * kv + held(t, relayed) * copied_back + incoming(t, end)
    now, keys = np.where(t < outer, back, rows), held(t, end)
    prior = np.where(t == n, adopted, np.where(previous < outer, back, rows))
    prior_keys = np.where(t == n, adopted, held(previous, t))

    own = n * own_slot + held(n, last(2 * n - 1)) * kv + held(n, 2 * n) * pieces
    everything = np.full_like(n, total)
    final = first(everything)
    left = held(final, everything) * kv
    left_rows = np.where(final < outer, back, rows), held(final, everything)
    come_home = held(first(final - 1), everything) * kv + incoming(everything, everything)
    return _Moments.of(
        (own, incoming(n, n), 0, 0, adopted, adopted),
        (kv_between, passed + incoming(t, t), prior, prior_keys, 0, 0),
        (kv_call, dkv_call, prior, prior_keys, now, keys),
        (kv_call, dkv_after, now, keys, 0, 0),
        (left, come_home, *left_rows, 0, 0),
        (left, left, *left_rows, 0, 0),
    )


def _gather_moments(plan: Plan, replica: Replica, workload: Workload, kv: np.ndarray, adopted: np.ndarray) -> _Moments:
    """The same with the all-gather: at the own call, before and in that for the inner and that for the outer groups."""
    model = workload.model
    window = None if model.full_layers else model.window  # the layer that needs most
    home, heads = _hops(plan, replica)
    fetched, delivered = _group_tokens(plan, replica, window)
    rows, back = (per_group[home] for per_group in _group_rows(plan, replica))
    index = np.arange(len(fetched))
    place = np.argsort(np.argsort([min(shard.rank for shard in group.shards) for group in replica.groups]))
    places = place[:, None] - (place[:, None] > place)  # of a source among those of a receiver, as they arrive
    by_rank = 2 * heads * fetched[np.ix_(home, home)]

    def side(sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the sources ``[source, receiver]`` of one call, and the rows times heads that it copies together.

        It need not where they lie together as they arrived: whole heads, and no other source between them.
        """
        tokens = (fetched * sources).sum(0)[home]
        pieces = ((by_rank > 0) & (heads < kv / 2) & sources[np.ix_(home, home)]).any(0)
        spread = np.where(sources, places, -1).max(0) - np.where(sources, places, len(index)).min(0) + 1
        return tokens, np.where(pieces | (spread > sources.sum(0))[home], tokens * kv, 0.0)

    inner, inner_copy = side(index[:, None] > index)
    outer, outer_copy = side(index[:, None] < index)
    incoming = by_rank.sum(0)
    both = by_rank.sum(1) + incoming  # the message, too, is held until the calls are done
    returned = (2 * heads.T * delivered[np.ix_(home, home)]).sum(0)
    inner_dkv, all_dkv = inner * kv, (inner + outer) * kv
    # Results of the call before the outer one, and of the last.
    prior = np.where(inner > 0, back, adopted), np.where(inner > 0, inner, adopted)
    left_rows = np.where(outer > 0, rows, prior[0]), np.where(outer > 0, outer, prior[1])
    last_copy = np.where(outer > 0, outer_copy, inner_copy)
    left = np.where(last_copy > 0, last_copy, incoming)
    return _Moments.of(
        (both, 0, 0, 0, adopted, adopted),
        (both + inner_copy, inner_dkv, adopted, adopted, np.where(inner > 0, back, 0.0), inner),
        (both + inner_copy + outer_copy, inner_dkv, *prior, 0, 0),
        (both + outer_copy, all_dkv, *prior, np.where(outer > 0, rows, 0.0), outer),
        (left, 2 * all_dkv + returned, *left_rows, 0, 0),
        (left, all_dkv, *left_rows, 0, 0),
    )


def _memory_parts(plan: Plan, workload: Workload, places: Sequence[Place]) -> tuple[np.ndarray, np.ndarray]:
    """GB of each rank: whatever its share, and because of its share (proportional to the sequence's length)."""
    model, size = workload.model, workload.element_bytes
    kept, working = token_bytes(workload)
    fixed = np.array([place.device.overhead_gb for place in places]) + fixed_bytes(workload, len(places)) / GB
    attention = np.maximum(*attention_bytes(plan, workload))
    share = np.zeros(len(places))
    for replica in plan.replicas:
        batch = replica.sequences
        for group in replica.groups:
            for shard in group.shards:
                tokens = shard.num_tokens
                lse = model.layers * group.num_tokens * shard.num_heads * 4 if workload.recompute != "full" else 0
                mlp = batch * tokens * (2 * model.intermediate + 2 * model.hidden) * size
                layer = batch * tokens * working + max(attention[shard.rank], mlp)
                loss = batch * (min(tokens, LOSS_CHUNK_TOKENS) * model.vocab * 4 * 2 + tokens * model.hidden * size)
                share[shard.rank] = (batch * (model.layers * tokens * kept + lse) + max(layer, loss)) / GB
    return fixed, share


def check_memory(plan: Plan, cluster: Cluster, workload: Workload, places: Sequence[Place] | None = None) -> None:
    """Raise `OutOfMemory` for the rank that lacks most, saying what would fit; return when every rank fits."""
    places = match_places(plan, cluster) if places is None else places
    fixed, share = _memory_parts(plan, workload, places)
    limit = MEMORY_FRACTION * np.array([place.device.memory_gb for place in places])
    lacking = fixed + share - limit
    rank = int(lacking.argmax())
    if lacking[rank] <= 0:
        return
    full_fits = 0
    if (fits := _fitting_length(plan, workload, places)) < 2 and workload.recompute != "full":
        full = dataclasses.replace(workload, recompute="full")
        full_fits = _fitting_length(plan, full, places)
    place = places[rank]
    problem = (
        f"rank {rank}, a {place.device.type} on node {place.node_name}, needs {(fixed + share)[rank]:.1f} GB of "
        f"{limit[rank]:.1f} GB usable ({place.device.memory_gb:g} GB), {lacking[rank]:.1f} GB too much, for "
        f"{plan.shard(rank).num_tokens:,} of {plan.seq_len:,} tokens"
    )
    raise OutOfMemory(problem, workload.recompute, fits, rank, float(lacking[rank]), full_fits)


def _fitting_length(plan: Plan, workload: Workload, places: Sequence[Place]) -> int:
    """A length at which the plan's split fits for certain, 0 when there is none; near the largest."""
    fixed, share = _memory_parts(plan, workload, places)
    free = MEMORY_FRACTION * np.array([place.device.memory_gb for place in places]) - fixed
    share = np.maximum(share / plan.seq_len, 1e-15)
    # All but the loss chunk scales with the length; setting a whole one aside, or a row a token, never promises too
    # much.
    row = max(replica.sequences for replica in plan.replicas) * workload.model.vocab * 8 / GB
    chunk = min(LOSS_CHUNK_TOKENS, plan.seq_len) * row
    return max(0, math.floor(np.min((free - chunk) / share)), math.floor(np.min(free / (share + row))))


def longest_length(workload: Workload, places: Sequence[Place]) -> int:
    """A length no plan over all these devices exceeds; 0 when one of them cannot hold the parameters."""
    model, size = workload.model, workload.element_bytes
    kept, working = token_bytes(workload)
    per_token = model.layers * kept + working + (3 * model.heads + 2 * model.kv_heads) * model.head_dim * size
    fixed = fixed_bytes(workload, len(places))
    free = [(MEMORY_FRACTION * p.device.memory_gb - p.device.overhead_gb) * GB - fixed for p in places]
    return 0 if min(free) < 0 else int(sum(free) / per_token)


def check_workload(plan: Plan, workload: Workload) -> None:
    """Raise ValueError when the plan was made for another workload."""
    model = workload.model
    for name, planned, wanted in (
        ("seq_len", plan.seq_len, workload.seq_len),
        ("num_heads", plan.num_heads, model.heads),
        ("num_kv_heads", plan.num_kv_heads, model.kv_heads),
        ("dtype", plan.dtype, workload.dtype),
        ("recompute", plan.recompute, workload.recompute),
        ("sequences of a micro-step", plan.sequences, workload.sequences),
    ):
        if planned != wanted:
            raise ValueError(f"the plan's {name} is {planned}, the workload's {wanted}; make a new plan for this job")


def match_places(plan: Plan, cluster: Cluster) -> tuple[Place, ...]:
    """The place of each rank: the next free one of the same device type and node, by rank.

    Raises:
        ValueError: the cluster has no (more) such device there, or it cannot run the plan's kernel.
    """
    free: dict[tuple[str, str], list[Place]] = {}
    for place in cluster.places:
        free.setdefault((place.device.type, place.node_name), []).append(place)
    found = []
    for rank, device in enumerate(plan.devices):
        places = free.get((device.type, device.node))
        if not places:
            there = sum(p.device.type == device.type and p.node_name == device.node for p in cluster.places)
            raise ValueError(
                f"the plan wants a {device.type} on node {device.node} for rank {rank}; cluster {cluster.name!r} has "
                f"{there} there (its devices: {_inventory(cluster)})"
            )
        place = places.pop(0)
        if device.kernel not in place.device.kernels:
            raise ValueError(
                f"the plan wants kernel {device.kernel} for rank {rank}; its device, a {device.type} on node "
                f"{device.node}, can run {', '.join(place.device.kernels)}"
            )
        found.append(place)
    return tuple(found)


def _inventory(cluster: Cluster) -> str:
    counts: dict[str, int] = {}
    for place in cluster.places:
        key = f"{place.device.type} on {place.node_name}"
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{count} {key}" for key, count in counts.items())


def lower_bound(cluster: Cluster, workload: Workload) -> float:
    """Seconds of a step no feasible plan beats, on all of the cluster or a part of it.

    Compute is spread in fractions (`devices_bound`). A plan stays on one node, with that node's compute, or its
    parameters pass the NICs of two nodes at least: then the more devices, the less compute and the more traffic.
    """
    devices = [place.device for place in cluster.places]
    everything = devices_bound(devices, workload)
    if math.isinf(everything):
        return _spread(_rates(devices), workload)  # nothing fits; compute alone is still true
    nodes: dict[int, list[Place]] = {}
    for place in cluster.places:
        nodes.setdefault(place.node, []).append(place)
    if len(nodes) == 1:
        return everything
    kinds = {tuple(place.device for place in places) for places in nodes.values()}
    within = min(devices_bound(kind, workload) for kind in kinds)
    second = sorted((places[0].node_class.network_gb_per_s for places in nodes.values()), reverse=True)[1] * GB
    best = np.array([sorted(rates, reverse=True) for rates in _each_rate(devices)]).cumsum(axis=1)
    across = min(
        max(_spread(best[:, ranks - 1].tolist(), workload), parameter_traffic(workload, ranks) / second)
        for ranks in range(2, len(devices) + 1)
    )
    return max(everything, min(within, across))


def devices_bound(devices: Sequence[Device], workload: Workload) -> float:
    """Seconds no feasible plan on these devices, or some of them, beats; infinite when memory cannot hold the tokens.

    Every kind of work is spread over all devices at their own rate for it, in fractions, with no traffic, merge or
    launch. Tokens respect memory when there is one sequence a micro-step. Valid because each kind ends with its
    slowest rank, and ``max(work_r / rate_r) >= sum(work) / sum(rate)``; leaving devices out only lowers the rates. Over
    several replicas it holds because throughput, a harmonic mean of rates, is superadditive.
    """
    spread = _spread(_rates(devices), workload)
    if workload.sequences > 1:
        return spread
    per_token = _linear_flops_per_token(workload)
    capacity = [token_capacity(device, workload, len(devices)) for device in devices]
    seconds = [per_token / (device.gemm_tflops * 1e12) for device in devices]
    freely = workload.seq_len / sum(1 / s for s in seconds)
    return spread + workload.accumulation * max(0.0, _level(workload.seq_len, seconds, capacity) - freely)


def _each_rate(devices: Sequence[Device]) -> list[list[float]]:
    names = ("gemm_tflops", "attention_forward_tflops", "attention_backward_tflops")
    return [[getattr(device, name) * 1e12 for device in devices] for name in names]


def _rates(devices: Sequence[Device]) -> list[float]:
    return [sum(rates) for rates in _each_rate(devices)]


def _linear_flops_per_token(workload: Workload) -> float:
    model = workload.model
    linears = passes(workload.recompute)[1]
    return model.layers * linears * linear_flops(model) + (1 + BACKWARD_LINEAR) * head_flops(model)


def _spread(rates: Sequence[float], workload: Workload) -> float:
    """Seconds of all compute of a step at summed rates in FLOP/s: matrices, attention forward, attention backward."""
    gemm, forward, backward = rates
    model, n = workload.model, workload.seq_len
    flops = model.heads * attention_flops(model, all_pairs(model, n))
    attention = flops * (passes(workload.recompute)[0] / forward + BACKWARD_ATTENTION / backward)
    linear = _linear_flops_per_token(workload) * n / gemm
    return float(workload.sequences * workload.accumulation * (attention + linear))


def bound(cluster: Cluster, workload: Workload) -> Bound:
    return Bound(lower_bound(cluster, workload))


def token_capacity(device: Device, workload: Workload, ranks: int) -> float:
    """Tokens of one sequence a device can hold at the very most, without any heads."""
    kept, working = token_bytes(workload)
    model, size = workload.model, workload.element_bytes
    per_token = model.layers * kept + working + (3 * model.heads + 2 * model.kv_heads) * model.head_dim * size
    fixed = min(fixed_bytes(workload, ranks), fixed_bytes(workload, 1))
    free = (MEMORY_FRACTION * device.memory_gb - device.overhead_gb) * GB - fixed
    return max(0.0, free / per_token)


def _level(total: float, seconds: Sequence[float], capacity: Sequence[float]) -> float:
    """Least time in which `total` tokens fit, each device at `seconds` a token up to `capacity`; infinite if none."""
    filled, rate = 0.0, sum(1 / s for s in seconds)
    for time, i in sorted((capacity[i] * s, i) for i, s in enumerate(seconds)):
        if filled + rate * time >= total:
            return (total - filled) / rate
        filled += capacity[i]
        rate -= 1 / seconds[i]
    return math.inf


def with_prediction(plan: Plan, cluster: Cluster, workload: Workload) -> Plan:
    """The plan with `predicted`, `bound` and `gap` filled in."""
    predicted, limit = predict(plan, cluster, workload), bound(cluster, workload)
    gap = predicted.step_seconds / limit.step_seconds - 1
    return dataclasses.replace(plan, predicted=predicted, bound=limit, gap=gap)


__all__ = [
    "MEMORY_FRACTION",
    "OutOfMemory",
    "ReplicaCost",
    "Wires",
    "attention_bytes",
    "bound",
    "check_memory",
    "check_workload",
    "longest_length",
    "lower_bound",
    "match_places",
    "memory_gb",
    "predict",
    "replica_cost",
    "with_prediction",
]

"""The time of a step: kernels, exchanges and the wires they share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hexiseq.cluster import Cluster, Device, Place
from hexiseq.cost.layout import Kind, Layout, layout_of, replica_kinds
from hexiseq.cost.matching import check_offload, check_workload, match_places
from hexiseq.cost.memory import state_bytes, with_memory
from hexiseq.cost.traffic import (
    GB,
    Devices,
    Flow,
    Wires,
    exchange_flow,
    exposed_traffic,
    kv_flows,
    parameter_traffic,
)
from hexiseq.plan import Plan, Prediction, Replica
from hexiseq.workload import Workload, attended_pairs, attention_flops, elementwise_bytes, head_flops, linear_flops

BACKWARD_ATTENTION = 2.5  # backward FLOPs of attention over forward: five matrix products against two
BACKWARD_LINEAR = 2  # gradients to the input and to the weight


@dataclass(frozen=True)
class ReplicaCost:
    """One replica, one layer, one micro-step. Seconds and bytes; arrays and flows follow ``ranks``.

    ``forward``: attention's forward pass; ``backward``: its own backward pass only, without what recomputation repeats.
    Flows are worked out when first asked for.

    Attributes:
        linear: seconds of the matrix products and of elementwise work, forward.
        attention_forward, attention_backward: seconds in the attention kernels.
        merge_forward, merge_backward: seconds of merging partial results and launching kernels.
        own_forward, own_backward: the part of the two above that is the group's own causal call.
        loss: seconds of embedding, output head and loss, forward and backward, once a micro-step.
        copy: seconds in which the layer's input goes to host memory, or comes back; zeros without offload.
        layout, workload: what it is the cost of.
    """

    ranks: np.ndarray
    linear: np.ndarray
    attention_forward: np.ndarray
    attention_backward: np.ndarray
    merge_forward: np.ndarray
    merge_backward: np.ndarray
    own_forward: np.ndarray
    own_backward: np.ndarray
    loss: np.ndarray
    copy: np.ndarray
    layout: Layout
    workload: Workload

    @property
    def exchange(self) -> Flow:
        """The four all-to-alls: of forward q, k, v to heads, and out back to tokens; of backward q, k, v, out, dout to
        heads, and dq, dk, dv back to tokens."""
        return self.layout.once(("all-to-all", self.workload), lambda: exchange_flow(self.layout, self.workload))

    @property
    def kv(self) -> Flow:
        """KV across groups in one pass (forward and backward alike), by the plan's exchange."""
        return self._across[0]

    @property
    def dkv(self) -> Flow:
        """dKV in backward, and the part of it that leaves after the last call: that of its slots, or gathered all."""
        return self._across[1]

    @cached_property
    def _across(self) -> tuple[Flow, Flow]:
        return kv_flows(self.layout, self.workload)

    @property
    def kernels(self) -> tuple[float, float]:
        """Seconds of the slowest rank in all calls, forward and backward."""
        forward, backward = self.attention_forward + self.merge_forward, self.attention_backward + self.merge_backward
        return float(forward.max()), float(backward.max())


def predict(plan: Plan, cluster: Cluster, workload: Workload, places: Sequence[Place] | None = None) -> Prediction:
    """Step time, its parts and peak memory of a plan.

    Replicas that are laid out alike on devices and nodes alike cost the same, so each kind is counted once.

    Args:
        places: the device of each rank; by default matched by device type and node (`match_places`).

    Raises:
        ValueError: the plan is for another workload, or names a device the cluster lacks.
    """
    check_workload(plan, workload)
    places = match_places(plan, cluster) if places is None else places
    check_offload(workload, places)
    wires = Wires(cluster, places)
    kinds = replica_kinds(plan, wires.signature)
    return with_memory(assess(kinds, wires, workload), kinds, workload, wires.devices)


def assess(kinds: Sequence[Kind], wires: Wires, workload: Workload) -> Prediction:
    """The prediction of a job of these replicas, on the wires of all its ranks, without memory."""
    found = assess_below(kinds, wires, workload, math.inf)
    assert found is not None
    return found


def assess_below(kinds: Sequence[Kind], wires: Wires, workload: Workload, seconds: float) -> Prediction | None:
    """The same, or None where kernels and all-to-alls alone are known to take a step as long as that."""
    repeats, optimizer = workload.accumulation, optimizer_seconds(workload, wires)
    exposed = exposed_seconds(workload, wires)
    models = [
        workload if model is workload.model else dataclasses.replace(workload, model=model)
        for model in workload.model.kinds
    ]
    costs = []
    for kind in kinds:
        near = wires.subset(kind.ranks[0])
        costs.append([_replica_cost(kind.layout, one, near.devices) for one in models])
        loss = float(costs[-1][-1].loss.max())

        def late(floor: float, loss: float = loss) -> bool:
            return repeats * (floor + loss) + exposed + optimizer >= seconds

        # Nothing hides all-to-alls; KV across groups, which takes longest to work out, may be hidden.
        busy = sum(cost.workload.model.layers * _busy(cost) for cost in costs[-1])
        if late(busy) or late(
            busy + sum(cost.workload.model.layers * sum(_all_to_all(cost, near).values()) for cost in costs[-1])
        ):
            return None
    load = np.zeros(len(wires.rate))
    path = compute = all_to_all = across = copies = 0.0
    for kind, parts in zip(kinds, costs, strict=True):
        near = wires.subset(kind.ranks[0])
        moved = np.zeros(len(near.rate))
        path_seconds = kernel_seconds = exchange_seconds = moving_seconds = copying_seconds = 0.0
        for cost in parts:
            layers, layer = cost.workload.model.layers, layer_seconds(cost, near)
            path_seconds += layers * layer.path
            kernel_seconds += layers * layer.kernels
            exchange_seconds += layers * layer.all_to_all
            moving_seconds += layers * layer.across
            copying_seconds += layers * layer.copies
            moved += (repeats * layers) * layer.load
        load += wires.spread(moved, kind.ranks)
        loss = float(parts[-1].loss.max())
        if repeats * (path_seconds + loss) > path:
            path = repeats * (path_seconds + loss)
            compute = repeats * (kernel_seconds + loss)
            all_to_all, across = repeats * exchange_seconds, repeats * moving_seconds
            copies = repeats * copying_seconds

    parameter_bytes = parameter_traffic(workload, len(wires))
    (busiest,) = wires.seconds((load + parameter_bytes * wires.circle)[None])
    step = max(path + exposed + optimizer, busiest)
    return Prediction(
        step_seconds=float(step),
        tokens_per_second=workload.tokens_per_step / float(step),
        compute_seconds=float(compute + optimizer),
        all_to_all_seconds=float(all_to_all),
        ring_seconds=float(across),
        parameter_seconds=wires.around(parameter_bytes),
        memory_gb=(),
        memory_limit_gb=(),
        host_copy_seconds=copies,
    )


@dataclass(frozen=True)
class LayerSeconds:
    """One layer of a micro-step, forward and backward with what recomputation repeats, in seconds.

    Attributes:
        path: from one end to the other.
        kernels: matrix products and attention, of the slowest rank each, without waiting.
        all_to_all, across: exchanges inside groups and across groups, overlapped or not.
        copies: of the input to host memory and back, overlapped or not.
        load: bytes on every wire.
    """

    path: float
    kernels: float
    all_to_all: float
    across: float
    copies: float
    load: np.ndarray


def _busy(cost: ReplicaCost) -> float:
    """Seconds of one layer's kernels, of the slowest rank each."""
    forwards, linears = passes(cost.workload.recompute)
    forward, backward = cost.kernels
    return linears * float(cost.linear.max()) + (forwards * forward + backward)


def _all_to_all(cost: ReplicaCost, wires: Wires) -> dict[str, float]:
    """Seconds of one layer's all-to-alls: of all its forward passes, and of backward."""
    in_forward, back, in_backward, home = wires.seconds(wires.load(cost.exchange))
    return {"forward": passes(cost.workload.recompute)[0] * (in_forward + back), "backward": in_backward + home}


def layer_seconds(cost: ReplicaCost, wires: Wires) -> LayerSeconds:
    """What one layer takes on the replica's own `wires`."""
    forwards, linears = passes(cost.workload.recompute)
    counts = {"forward": forwards, "backward": 1}
    linear = linears * float(cost.linear.max())
    kernels = dict(zip(counts, cost.kernels, strict=True))
    all_to_all = _all_to_all(cost, wires)
    heads, kv, dkv = wires.load(cost.exchange), wires.load(cost.kv), wires.load(cost.dkv)
    # Nothing hides what leaves after the last call.
    gather, both, late = wires.seconds(np.concatenate([kv, kv + dkv[:1], dkv[1:]]))
    if cost.layout.exchange == "ring":
        moving = {"forward": gather, "backward": both}
        overlapped = {
            "forward": max(kernels["forward"], gather),
            "backward": max(kernels["backward"] + late, both),
        }
    else:
        moving = {"forward": gather, "backward": gather + late}
        overlapped = {
            "forward": _behind_own_call(gather, cost.own_forward, cost.attention_forward + cost.merge_forward),
            "backward": late
            + _behind_own_call(gather, cost.own_backward, cost.attention_backward + cost.merge_backward),
        }

    def total(seconds: dict[str, float]) -> float:
        return sum(counts[p] * seconds[p] for p in counts)

    exchanged = sum(all_to_all.values())
    load = forwards * (heads[0] + heads[1] + kv[0]) + heads[2] + heads[3] + kv[0] + dkv[0]
    path, copy = linear + exchanged + total(overlapped), float(cost.copy.max())
    # A layer's input leaves while it is worked on forward; backward the one before it comes.
    forward = float(cost.linear.max()) + all_to_all["forward"] / forwards + overlapped["forward"]
    path += max(0.0, copy - forward) + max(0.0, copy - (path - forward))
    return LayerSeconds(path, _busy(cost), exchanged, total(moving), 2 * copy, load)


def _behind_own_call(gather: float, own: np.ndarray, kernels: np.ndarray) -> float:
    """Seconds of the kernels where the own call alone is there to hide the gather."""
    return float((np.maximum(own, gather) + kernels - own).max())


def busy_seconds(plan: Plan, cluster: Cluster, workload: Workload, places: Sequence[Place] | None = None) -> np.ndarray:
    """Seconds of a step that each rank computes, ``[ranks]``: kernels, merges, embedding and loss, but no optimizer.

    Args:
        places: as of `predict`.
    """
    places = match_places(plan, cluster) if places is None else places
    forwards, linears = passes(workload.recompute)
    wires, busy = Wires(cluster, places), np.zeros(plan.world_size)
    for kind in replica_kinds(plan, wires.signature):
        for model in workload.model.kinds:
            near = wires.devices.subset(kind.ranks[0])
            cost = _replica_cost(kind.layout, dataclasses.replace(workload, model=model), near)
            layer = linears * cost.linear + forwards * (cost.attention_forward + cost.merge_forward)
            busy[kind.ranks] += model.layers * (layer + cost.attention_backward + cost.merge_backward)
        busy[kind.ranks] += cost.loss
    return workload.accumulation * busy


def layer_bytes(cost: ReplicaCost, recompute: str) -> np.ndarray:
    """Bytes from rank to rank in one layer of a micro-step, all passes together: ``[sender, receiver]``."""
    (heads_in, heads_out, grads_in, grads_out), kv = cost.exchange.matrix(), cost.kv.matrix()[0]
    return passes(recompute)[0] * (heads_in + heads_out + kv) + grads_in + grads_out + kv + cost.dkv.matrix()[0]


def replica_cost(plan: Plan, replica: Replica, workload: Workload, places: Sequence[Place]) -> ReplicaCost:
    """What one layer of one replica computes and moves; the model's layers must be of one kind.

    Args:
        places: by rank of the plan.
    """
    return _replica_cost(layout_of(plan, replica), workload, Devices.of([places[rank] for rank in replica.ranks]))


def _replica_cost(layout: Layout, workload: Workload, devices: Devices) -> ReplicaCost:
    """The same of a layout on the replica's own devices."""
    assert len(workload.model.kinds) == 1, "a layer of which kind?"
    model, batch, size = workload.model, layout.sequences, workload.element_bytes
    gemm, forward_rate, backward_rate = (
        devices.each(name) * 1e12 for name in ("gemm_tflops", "attention_forward_tflops", "attention_backward_tflops")
    )
    hbm, launch = devices.each("hbm_gb_per_s") * GB, devices.each("launch_us") * 1e-6
    # A rank without tokens still feeds the model one dummy token.
    fed = np.maximum(layout.tokens, 1.0)
    heads, kv, cuts = layout.heads, layout.kv, layout.pieces[0]

    rows, calls, foreign, own, pairs, own_pairs = _kernel_calls(layout, model.window)
    dim = model.head_dim
    if any(device.curved for device in devices.distinct):
        # Pairs that take as long in large tiles.
        own_slower, slower = _slowdowns(devices, own_pairs, _tiles(layout))
        pairs = (pairs - own_pairs) * slower + own_pairs * own_slower
        own_pairs = own_pairs * own_slower
    flops = batch * heads * attention_flops(model, 1.0) * pairs
    own_flops = batch * heads * attention_flops(model, 1.0) * own_pairs
    # The running sum is read and written in fp32, the partial result read; log-sum-exps likewise.
    accumulate = 8 + size
    merged = batch * heads * rows * (dim * accumulate + 12)
    own_merged = batch * heads * own * (dim * accumulate + 12)
    merged_back = batch * dim * (heads * (rows * accumulate + own * 2 * size) + 2 * kv * (own + foreign) * accumulate)
    own_merged_back = batch * dim * (heads * own * (accumulate + 2 * size) + 2 * kv * own * accumulate)

    return ReplicaCost(
        ranks=layout.ranks,
        linear=batch * fed * (linear_flops(model) / gemm + elementwise_bytes(model, size) / hbm),
        attention_forward=flops / forward_rate,
        attention_backward=BACKWARD_ATTENTION * flops / backward_rate,
        merge_forward=merged / hbm + cuts * calls * launch,
        merge_backward=merged_back / hbm + cuts * calls * launch,
        own_forward=own_flops / forward_rate + own_merged / hbm + cuts * launch,
        own_backward=BACKWARD_ATTENTION * own_flops / backward_rate + own_merged_back / hbm + cuts * launch,
        loss=batch * fed * ((1 + BACKWARD_LINEAR) * head_flops(model) / gemm + 4 * model.hidden * size / hbm),
        copy=batch * fed * copy_seconds(devices.distinct, workload)[devices.index],
        layout=layout,
        workload=workload,
    )


def passes(recompute: str) -> tuple[int, int]:
    """How often a layer's attention runs forward, and its linear part counts, in a micro-step.

    Selective recompute keeps attention's result, so only the linear part runs again; full repeats the ring too.
    """
    return (2 if recompute == "full" else 1), 1 + BACKWARD_LINEAR + (recompute != "none")


def _kernel_calls(layout: Layout, window: int | None) -> np.ndarray:
    """Per rank: rows of all calls, calls, foreign KV tokens, own group's tokens, (query, key) pairs, the own call's.

    Inner groups' tokens meet the back queries, outer groups' all queries. On the ring, consecutive slots of one side
    share a call as far as the plan fuses them; gathered, all of a side are one. A window is counted in the pairs alone:
    it leaves out rows and calls, too, but cuts some into several.
    """
    runs = layout.runs
    lengths = runs[:, :, 1] - runs[:, :, 0]
    front, back = lengths[:, 0], lengths[:, 1]
    own = front + back
    width = _call_width(layout)
    inner_slots, outer_slots = _foreign_slots(layout)
    inner_calls, outer_calls = -(-inner_slots // width), -(-outer_slots // width)
    rows = own * (1 + outer_calls) + back * inner_calls
    foreign = np.where(back > 0, layout.seq_len - np.cumsum(own), 0) + np.cumsum(front) - front
    up_to = attended_pairs(runs, window)
    pairs = (up_to[:, :, 1] - up_to[:, :, 0]).sum(1)
    columns = [rows, 1 + outer_calls + inner_calls, foreign, own, pairs, _own_pairs(runs, window)]
    return np.array(columns, float)[:, layout.home]


def _call_width(layout: Layout) -> np.ndarray:
    """Slots of each group's calls for foreign ones."""
    return layout.width if layout.exchange == "ring" else np.full(len(layout.slots), layout.slots.sum())


def _foreign_slots(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Slots that each group meets with its back queries, and with all its queries."""
    slots, back = layout.slots, layout.runs[:, 1, 1] > layout.runs[:, 1, 0]
    outer = np.cumsum(slots) - slots
    return np.where(back, slots.sum() - slots - outer, 0), outer


def _tiles(layout: Layout) -> np.ndarray:
    """The calls for foreign slots by size, the wide ones and the last of either side: in turn (query, key) pairs of all
    and of one, per rank."""
    width, lengths = _call_width(layout), layout.runs[:, :, 1] - layout.runs[:, :, 0]
    inner, outer = _foreign_slots(layout)
    columns = []
    for queries, keys, count in ((lengths[:, 1], layout.slot, inner), (lengths.sum(1), layout.slot // 2, outer)):
        for number, wide in ((count // width, width), (np.minimum(count % width, 1), count % width)):
            columns += [number * queries * keys * wide, queries * keys * wide]
    return np.array(columns, float)[:, layout.home]


def _slowdowns(devices: Devices, own_pairs: np.ndarray, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much slower than in large tiles each rank's own call is, and its others, weighted by their pairs.

    Args:
        tiles: as `_tiles` has them.
    """
    own_slower, slower = np.ones((2, len(devices.index)))
    pairs, one = tiles[::2], tiles[1::2]
    for kind, device in enumerate(devices.distinct):
        ranks = np.flatnonzero(devices.index == kind)
        # A square of so many pairs, half of which it leaves out.
        own_slower[ranks] = 1 / device.attention_fraction(np.sqrt(2 * own_pairs[ranks]), causal=True)
        longer = (pairs[:, ranks] / device.attention_fraction(np.sqrt(one[:, ranks]))).sum(0)
        slower[ranks] = longer / np.maximum(pairs[:, ranks].sum(0), 1.0)
    return own_slower, slower


def _own_pairs(runs: np.ndarray, window: int | None) -> np.ndarray:
    """(query, key) pairs within each group's own tokens; `runs` are ``[groups, 2, 2]``."""
    (a, b), (c, d) = runs.transpose(1, 2, 0)
    if window is None:
        return attended_pairs(b - a + d - c, None)

    def reach(end: np.ndarray) -> np.ndarray:
        """Pairs of the back queries with all tokens before `end`, of the sequence and of one that began earlier."""
        most = end + window - 1  # the first query that does not reach them
        return attended_pairs(np.maximum(0, most - c), None) - attended_pairs(np.maximum(0, most - d), None)

    return attended_pairs(b - a, window) + attended_pairs(d - c, window) + reach(b) - reach(a)


def token_seconds(device: Device, workload: Workload) -> float:
    """Seconds a device spends on each of its tokens, attention aside: all layers and passes, embedding and loss."""
    model, size = workload.model, workload.element_bytes
    gemm, hbm = device.gemm_tflops * 1e12, device.hbm_gb_per_s * GB
    layer = linear_flops(model) / gemm + elementwise_bytes(model, size) / hbm
    loss = (1 + BACKWARD_LINEAR) * head_flops(model) / gemm + 4 * model.hidden * size / hbm
    return model.layers * passes(workload.recompute)[1] * layer + loss


def copy_seconds(devices: Sequence[Device], workload: Workload) -> np.ndarray:
    """Seconds in which each device copies a token's input of one layer to host memory, or back; 0 without offload."""
    if not workload.offload:
        return np.zeros(len(devices))
    size = workload.model.hidden * workload.element_bytes
    return size / (np.array([device.host_gb_per_s for device in devices], float) * GB)


def exposed_seconds(workload: Workload, wires: Wires) -> float:
    """Seconds of a step in which parameters or their gradients move and no rank has anything to compute."""
    return wires.around(exposed_traffic(workload, len(wires)))


def optimizer_seconds(workload: Workload, wires: Wires) -> float:
    """The optimizer reads and writes its states once; it is bound by memory."""
    return 2 * state_bytes(workload) / len(wires) / wires.slowest_hbm

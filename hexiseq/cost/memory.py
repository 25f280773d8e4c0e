"""Peak memory of each rank: states, activations, and attention moment by moment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hexiseq.cluster import Cluster, Device, Place, offload_lacks
from hexiseq.cost.layout import Kind, Layout, common_heads, replica_kinds
from hexiseq.cost.matching import check_offload, match_places
from hexiseq.cost.traffic import GB, Devices, Wires, accumulator_bytes, group_tokens
from hexiseq.plan import Plan, Prediction
from hexiseq.workload import STATE_BYTES_PER_PARAMETER, Workload

MEMORY_FRACTION = 0.95  # of a device's memory a plan may fill; the rest is the allocator's fragmentation
HOST_MEMORY_FRACTION = 0.8  # of a host's memory that layers' inputs may fill; the rest is for all else it runs
INPUTS_HELD = 2  # layers' inputs on the device with offload: that of the layer at work and one on its way
LOSS_CHUNK_TOKENS = 1024  # tokens whose logits exist at one time
SEARCHED = 32  # numbers of tokens weighed together when the most that fit are sought


@dataclass(frozen=True)
class Shortage:
    """What a plan lacks.

    Attributes:
        words: the device that lacks most, the node whose host does, or both.
        lacking_gb: GB above the limit, of both the larger number.
        device, host: whether a device's memory lacks, and whether a host's.
    """

    words: str
    lacking_gb: float
    device: bool
    host: bool


class OutOfMemory(ValueError):
    """A device or a host cannot hold its share. The message says which, how much it lacks and what would fit.

    Attributes:
        shortage: what lacks.
        fits_seq_len: largest sequence length that fits the same split, 0 when nothing does.
        full_fits_seq_len: the same with ``recompute=full``; asked for only when nothing else fits.
        change: another setting with which the same split would fit, in words; empty where there is none.
    """

    def __init__(
        self,
        shortage: Shortage,
        recompute: str,
        fits_seq_len: int,
        full_fits_seq_len: int = 0,
        change: str = "",
        *,
        manual: bool = False,
    ) -> None:
        """Args as the attributes; `manual`: the plan was given, and says length, recompute and offload itself."""
        there = _where(manual)
        remedies = []
        if fits_seq_len >= 2:
            length = f"seq_len {fits_seq_len:,} would"
            remedies.append(f"a new plan may fit, and with {length}" if manual else f"{length} fit")
        if not shortage.device:
            remedies.append("a host with more memory holds more" if remedies or change else
                            f"no sequence fits there: use hosts with more memory, or offload=false{there}")  # fmt: skip
        elif recompute != "full" and fits_seq_len >= 2:
            remedies.append(f"recompute=full{there} needs less{' of devices alone' if shortage.host else ''}")
        elif recompute != "full" and full_fits_seq_len >= 2:
            remedies.append(
                f"no sequence fits with recompute={recompute}, with recompute=full{there} "
                f"seq_len {full_fits_seq_len:,} would"
            )
        elif fits_seq_len < 2 and not change:
            hosts = " and hosts with more memory" if shortage.host else ""
            remedies.append(f"no sequence fits beside the parameters: use more devices{hosts} or a smaller model")
        if change:
            remedies.append(f"{change} would fit")
        super().__init__(f"{shortage.words}; {'; '.join(remedies)}")
        self.shortage, self.change = shortage, change
        self.fits_seq_len, self.full_fits_seq_len = fits_seq_len, full_fits_seq_len


def token_bytes(workload: Workload) -> tuple[float, float]:
    """Bytes a token leaves on its rank: kept of all layers until backward, and while one layer is worked on."""
    model, size = workload.model, workload.element_bytes
    q, kv = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    # Each of two norms: what it takes in, in fp32, what it makes of it and what it returns. In 16 bits the first is a
    # copy, else the layer's input or the residual. Then q, k, v and out; gate, up, activation and their product.
    norms = 2 * model.hidden * (accumulator_bytes(workload) + 2 * size)
    everything = norms + (2 * q + kv + 4 * model.intermediate) * size
    if workload.recompute == "none":
        return float(model.layers * everything), 0.0
    inputs = min(INPUTS_HELD, model.layers) if workload.offload else model.layers
    outputs = model.layers if workload.recompute == "selective" else 0  # of attention
    kept = (inputs * model.hidden + outputs * q) * size
    # Of the layer at work, its input, unless norms have a copy, and selective attention's result are there already.
    there = (model.hidden if size >= 4 else 0) + (q if outputs else 0)
    return float(kept), float(everything - there * size)


def host_token_bytes(workload: Workload) -> int:
    """Bytes a token leaves in the memory of its rank's host: the inputs of all layers, with offload."""
    return workload.model.layers * workload.model.hidden * workload.element_bytes if workload.offload else 0


def state_bytes(workload: Workload) -> float:
    """Bytes of parameters, gradients and optimizer states, over all ranks: fp32, in fp64 jobs fp64."""
    return workload.model.parameters * STATE_BYTES_PER_PARAMETER * accumulator_bytes(workload) / 4


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
    return kinds_memory_gb(replica_kinds(plan, _anywhere), workload, Devices.of(places))


def kinds_memory_gb(kinds: Sequence[Kind], workload: Workload, devices: Devices) -> tuple[np.ndarray, np.ndarray]:
    """The same of a job of these replicas, on the devices of all its ranks."""
    fixed, share = _memory_parts(kinds, workload, devices)
    return fixed + share, MEMORY_FRACTION * devices.each("memory_gb")


def with_memory(predicted: Prediction, kinds: Sequence[Kind], workload: Workload, devices: Devices) -> Prediction:
    """The prediction with the memory of each rank of a job of these replicas."""
    used, limit = kinds_memory_gb(kinds, workload, devices)
    hosted = np.zeros(len(used))
    for kind in kinds:
        hosted[kind.ranks] = _hosted_gb(kind.layout, workload)
    return dataclasses.replace(
        predicted,
        memory_gb=tuple(used.tolist()),
        memory_limit_gb=tuple(limit.tolist()),
        host_memory_gb=tuple(hosted.tolist()) if workload.offload else (),
    )


def lacking_gb(kinds: Sequence[Kind], workload: Workload, wires: Wires) -> np.ndarray:
    """GB that ranks lack, of their device's or of their host's memory; negative where some is left.

    Of one replica of each kind, ranks of one after those of the other.
    """
    own = wires.devices.subset(np.concatenate([kind.ranks[0] for kind in kinds]))
    used = fixed_bytes(workload, len(wires)) / GB + own.each("overhead_gb")
    used += np.concatenate([_share_gb(kind.layout, workload) for kind in kinds])
    lacking = used - MEMORY_FRACTION * own.each("memory_gb")
    if workload.offload:
        hosts = [_host_memory_gb(kind, workload, wires) for kind in kinds]
        lacking = np.maximum(lacking, np.concatenate([held - room for held, room in hosts]))
    return lacking


def attention_bytes(plan: Plan, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Peak bytes of one attention call on each rank, forward and backward, by rank.

    Beyond what the model holds: q, k, v and out in token form, the log-sum-exp, and their gradients.
    """
    forward, backward = np.zeros(plan.world_size), np.zeros(plan.world_size)
    for kind in replica_kinds(plan, _anywhere):
        one = _attention_bytes(_attention(kind.layout, workload), kind.layout.tokens, workload)
        forward[kind.ranks], backward[kind.ranks] = (kind.layout.sequences * size for size in one)
    return forward, backward


def _anywhere(ranks: Sequence[int]) -> None:
    """Memory does not ask which devices a replica is on."""


@dataclass(frozen=True)
class _Attention:
    """What attention holds on each rank of a replica, but for what depends on how many tokens of its group are its own.

    Bytes are of one head dim of one sequence.

    Attributes:
        alone: whether the rank is a group of its own.
        adopts: whether its own call's result becomes the sum of all.
        shares: whether gradients of KV heads travel as unrounded sums, since several members hold some.
        held: KV heads, counted twice, of all members together.
        forward, backward: bytes of heads, of sums, of the most that calls hold beside these, of what the last call
            left, and of a rounded copy of the sums.
    """

    alone: np.ndarray
    adopts: np.ndarray
    shares: np.ndarray
    held: np.ndarray
    forward: tuple[np.ndarray, ...]
    backward: tuple[np.ndarray, ...]


def _attention(layout: Layout, workload: Workload) -> _Attention:
    model, size, wide = workload.model, workload.element_bytes, accumulator_bytes(workload)
    home, h, kv = layout.home, layout.heads, 2 * layout.kv
    rows = layout.group_tokens[home]
    alone = (np.bincount(home) == 1)[home]
    # A kernel call is for one fragment; what the one before returned is still there.
    _, most_h, most_kv, last_h, last_kv = layout.pieces
    most_kv, last_kv = 2 * most_kv, 2 * last_kv

    # A group of one in the accumulator's dtype adds to what its own call returns, which becomes the result.
    rounds = wide > size
    adopts = alone & (not rounds)
    make = _ring_moments if layout.exchange == "ring" else _gather_moments
    at = make(layout, workload, kv, np.where(adopts, 0.0, rows))
    parts = at.before * last_h + at.now * most_h
    grads = parts + at.keys_before * last_kv + at.keys_now * most_kv

    # Merging casts a part, and takes about eight rows of log-sum-exps.
    merge = at.now * most_h * (size + rounds * wide + 8 * wide / model.head_dim)
    merge[0] = 0.0  # the own call is copied
    working = at.kv * size + np.maximum(parts * size, merge)
    heads = np.where(alone, 0.0, rows * (h + kv) * size)
    forward = heads, rows * h * wide, working.max(0), working[-1], rows * h * size * rounds

    working = at.kv * size + at.dkv * wide + grads * size
    heads = np.where(alone, 0.0, rows * (3 * h + kv) * size)
    held = np.bincount(home, kv)[home]
    shares = held > 2 * model.kv_heads
    rounded = np.where(np.where(shares, wide, size) < wide, rows * (h + kv) * size, 0.0)
    backward = heads, rows * (h + kv) * wide, working.max(0), working[-1], rounded
    return _Attention(alone, adopts, shares, held, forward, backward)


def _attention_bytes(at: _Attention, tokens: np.ndarray, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Peak bytes of one call, forward and backward, of ranks with so many tokens, a vector or rows of vectors."""
    model, size, wide = workload.model, workload.element_bytes, accumulator_bytes(workload)
    all_q, all_kv = model.heads, 2 * model.kv_heads

    # At the end what the last call held is still there, and the result beside what it is made from.
    heads, sums, most, left, rounded = at.forward
    sent, result = tokens * (all_q + all_kv) * size, tokens * all_q * size
    home = np.where(at.alone, np.where(at.adopts, 0.0, result), rounded + 2 * result)
    forward = np.maximum(np.where(at.alone, 0.0, sent) + heads, heads + sums + np.maximum(most, left + home)) - result

    heads, sums, most, left, rounded = at.backward
    sent, result = tokens * (3 * all_q + all_kv) * size, tokens * (all_q + all_kv) * size
    # Partial sums of a KV head that several members hold are not rounded before they are added.
    travels = np.where(at.shares, wide, size)
    local = tokens * (all_q + all_kv) * wide
    home = np.where(
        at.alone,
        np.where(at.adopts, 0.0, local + result),
        rounded + tokens * (all_q + at.held) * travels + np.where(travels > size, local, 0.0) + result,
    )
    backward = np.maximum(np.where(at.alone, 0.0, sent) + heads, heads + sums + np.maximum(most, left + home)) - result
    return model.head_dim * forward, model.head_dim * backward


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
        shapes = [[np.shape(value) for value in moment] for moment in moments]
        width = max(shape[-1] for moment in shapes for shape in moment if shape)
        count = [max(shape[0] if len(shape) > 1 else 1 for shape in moment) for moment in shapes]
        stacked = np.empty((len(moments[0]), sum(count), width))
        end = 0
        for moment, rows in zip(moments, count, strict=True):
            for attribute, value in enumerate(moment):
                stacked[attribute, end : end + rows] = value
            end += rows
        return _Moments(*stacked)


def _group_rows(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of each group, and those of its back interval."""
    lengths = (layout.runs[:, :, 1] - layout.runs[:, :, 0]).astype(float)
    return lengths.sum(1), lengths[:, 1]


def _ring_moments(layout: Layout, workload: Workload, kv: np.ndarray, adopted: np.ndarray) -> _Moments:
    """On the ring: at the own call, and before, in and after the calls at which most slots are held.

    Without documents and windows, which shorten messages.

    Args:
        kv: twice the KV heads of each rank.
        adopted: rows of the own call's result that count, 0 where it is the sum of all.
    """
    home, slots = layout.home, layout.slots
    total, groups = int(slots.sum()), len(slots)
    rows, back = (per_group[home] for per_group in _group_rows(layout))
    if groups == 1:
        return _Moments.of((0, 0, 0, 0, adopted, adopted), (0, 0, adopted, adopted, 0, 0))
    n, off = slots[home], (np.cumsum(slots) - slots)[home]
    after, before = (home + 1) % groups, (home - 1) % groups
    width = layout.width[home]
    outer = total - off  # the first tick of outer slots, of which only front halves are needed
    half = layout.slot / 2

    # Heads from the group after, and to the one before; those that make part of a buffer need one of their own.
    claimed, below = layout.claimed, layout.held.below
    sent, from_after, from_first = (
        2 * (below[group, claimed.last] - below[group, claimed.first]) for group in (before, after, np.zeros_like(home))
    )
    pair, mate, given, taken = layout.hops
    pieces = np.where(np.bincount(mate, given > 0, len(home)) > 1, kv, 0.0)
    copied, copied_back = (
        np.bincount(pair, np.where(2 * heads < kv[pair], 2 * heads, 0.0), len(home)) for heads in (given, taken)
    )

    def held(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Rows of the slots of foreign ticks ``[start, end)``."""
        start, end = np.minimum(np.maximum(start, n), total), np.minimum(np.maximum(end, n), total)
        inner = np.maximum(np.minimum(end, outer) - start, 0)
        return layout.slot * inner + half * np.maximum(end - np.maximum(start, outer), 0)

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
    own_slot = np.where(home > 0, layout.slot, half) * sent
    arriving = held(end, end + n) * pieces
    # Sends are let go of two ticks later, when the next block's are posted: until then the block before counts, too.
    kv_between = held(earlier, ahead) * kv + arriving + held(previous - 1, relayed) * copied
    kv_between += np.where(t == n, n * own_slot, np.where(previous == n, own_slot, 0.0))
    kv_call = held(previous, ahead) * kv + arriving + held(t - 1, relayed) * copied + np.where(t == n, own_slot, 0.0)
    now, keys = np.where(t < outer, back, rows), held(t, end)
    passed, coming = held(earlier, t) * kv + held(previous - 1, t) * copied_back, incoming(t, t)
    dkv_call = passed + keys * kv + coming
    dkv_after = passed + keys * kv + held(t, relayed) * copied_back + incoming(t, end)
    prior = np.where(t == n, adopted, np.where(previous < outer, back, rows))
    prior_keys = np.where(t == n, adopted, held(previous, t))

    own = n * own_slot + held(n, last(2 * n - 1)) * kv + held(n, 2 * n) * pieces
    everything = np.full_like(n, total)
    final = first(everything)
    left_rows = np.where(final < outer, back, rows), held(final, everything)
    left = left_rows[1] * kv
    come_home = held(first(final - 1), everything) * kv + incoming(everything, everything)
    return _Moments.of(
        (own, incoming(n, n), 0, 0, adopted, adopted),
        (kv_between, passed + coming, prior, prior_keys, 0, 0),
        (kv_call, dkv_call, prior, prior_keys, now, keys),
        (kv_call, dkv_after, now, keys, 0, 0),
        (left, come_home, *left_rows, 0, 0),
        (left, left, *left_rows, 0, 0),
    )


def _gather_moments(layout: Layout, workload: Workload, kv: np.ndarray, adopted: np.ndarray) -> _Moments:
    """The same with the all-gather: at the own call, before and in that for the inner and that for the outer groups."""
    model = workload.model
    window = None if model.full_layers else model.window  # the layer that needs most
    home = layout.home
    everyone = np.arange(len(home))
    heads = common_heads(layout.claimed, everyone[:, None], layout.held, everyone)  # from rank to rank
    fetched, delivered, _ = group_tokens(layout, window)
    rows, back = (per_group[home] for per_group in _group_rows(layout))
    index = np.arange(len(fetched))
    place = np.argsort(np.argsort(np.minimum.reduceat(layout.ranks, layout.begins[:-1])))
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


def _memory_parts(kinds: Sequence[Kind], workload: Workload, devices: Devices) -> tuple[np.ndarray, np.ndarray]:
    """GB of each rank: whatever its share, and because of its share (proportional to the sequence's length)."""
    share = np.zeros(len(devices.index))
    for kind in kinds:
        share[kind.ranks] = _share_gb(kind.layout, workload)
    return devices.each("overhead_gb") + fixed_bytes(workload, len(share)) / GB, share


def _share_gb(layout: Layout, workload: Workload) -> np.ndarray:
    """GB that the ranks of one replica need because of their share."""
    return _held_gb(layout, _attention(layout, workload), layout.tokens, workload)


def _held_gb(layout: Layout, at: _Attention, tokens: np.ndarray, workload: Workload) -> np.ndarray:
    """The same of ranks with so many tokens of their groups, a vector or rows of vectors."""
    model, size = workload.model, workload.element_bytes
    kept, working = token_bytes(workload)
    batch = layout.sequences
    attention = batch * np.maximum(*_attention_bytes(at, tokens, workload))
    rows = layout.group_tokens[layout.home] * layout.heads
    lse = model.layers * rows * 4 if workload.recompute != "full" else 0.0
    mlp = batch * tokens * (2 * model.intermediate + 2 * model.hidden) * size
    # Backward is done with the MLP before it comes to attention, and what is recomputed is not there yet before.
    attending = 0.0
    if workload.recompute != "none":
        # The norm, whose input is there already but for a copy in fp32, and the residual's gradient; q, k, v, out and
        # their gradients.
        copied = accumulator_bytes(workload) if size < 4 else 0
        heads = model.heads + model.kv_heads
        attending = model.hidden * (3 * size + copied) + 4 * heads * model.head_dim * size
    layer = np.maximum(batch * tokens * working + mlp, batch * tokens * attending + attention)
    logits = np.minimum(tokens, LOSS_CHUNK_TOKENS) * model.vocab * 4 * 2
    loss = batch * (logits + tokens * model.hidden * size)
    return (batch * (tokens * kept + lse) + np.maximum(layer, loss)) / GB


def _hosted_gb(layout: Layout, workload: Workload) -> np.ndarray:
    """GB of layers' inputs that each rank of a replica keeps in host memory."""
    return layout.sequences * layout.tokens * host_token_bytes(workload) / GB


def _host_room_gb(ranks: np.ndarray, wires: Wires) -> np.ndarray:
    """GB of its host's memory that are for each of these ranks: as many as for every other of the job there."""
    return HOST_MEMORY_FRACTION * wires.host_memory_gb[ranks] / np.bincount(wires.node)[wires.node[ranks]]


def _host_memory_gb(kind: Kind, workload: Workload, wires: Wires) -> tuple[np.ndarray, np.ndarray]:
    """GB that a replica keeps in the memory of each rank's host, and what is there for all its ranks.

    Of replicas alike it is the one with least room.
    """
    _, at = np.unique(wires.node[kind.ranks[0]], return_inverse=True)
    on_node = np.eye(at.max() + 1)[at]
    held = _hosted_gb(kind.layout, workload) @ on_node
    room = (_host_room_gb(kind.ranks, wires) @ on_node).min(0)
    return held[at], room[at]


def most_tokens(kind: Kind, workload: Workload, wires: Wires) -> tuple[np.ndarray, np.ndarray]:
    """What ranks of a replica can hold, with the heads, groups and slots there are.

    Returns:
        The most tokens of its group that each rank can hold, -1 where there is no room for its heads; and the part of
        the memory for its share that a rank takes without a token, infinite where there is no such memory.
    """
    layout, at, own = kind.layout, _attention(kind.layout, workload), wires.devices.subset(kind.ranks[0])
    free = MEMORY_FRACTION * own.each("memory_gb")
    free -= own.each("overhead_gb") + fixed_bytes(workload, len(wires)) / GB
    free *= 1 - 1e-12  # sums in another order must fit, too
    # Memory grows with tokens: between the most that is known to fit and the least that does not, ever finer.
    most, step = np.full(len(free), -1), workload.seq_len + 1
    while step > 1:
        step = -(-step // SEARCHED)
        tokens = most + step * np.arange(1, SEARCHED + 1)[:, None]
        most = most + step * (_held_gb(layout, at, tokens, workload) <= free).sum(0)
    none = _held_gb(layout, at, np.zeros(len(free)), workload)
    if workload.offload:  # a rank's part of its host's memory, so that its tokens do not hang on others'
        room = _host_room_gb(kind.ranks, wires).min(0) * (1 - 1e-12)
        most = np.minimum(most, np.floor(room * GB / (layout.sequences * host_token_bytes(workload))).astype(int))
    return np.minimum(most, workload.seq_len), np.where(free > 0, none / np.where(free > 0, free, 1.0), np.inf)


def check_memory(
    plan: Plan, cluster: Cluster, workload: Workload, places: Sequence[Place] | None = None, *, manual: bool = False
) -> None:
    """Raise `OutOfMemory` for the rank that lacks most, and the node whose host does, saying what would fit.

    Return when all fit. Remedies for a `manual` plan are changes to it.
    """
    places = match_places(plan, cluster) if places is None else places
    check_offload(workload, places)
    wires = Wires(cluster, places)
    if (shortage := _shortage(plan, workload, places, wires)) is None:
        return
    full_fits = 0
    if (fits := _fitting_length(plan, workload, wires)) < 2 and workload.recompute != "full" and shortage.device:
        full_fits = _fitting_length(plan, dataclasses.replace(workload, recompute="full"), wires)
    change = _fitting_change(plan, workload, places, wires, manual)
    raise OutOfMemory(shortage, workload.recompute, fits, full_fits, change, manual=manual)


def _shortage(plan: Plan, workload: Workload, places: Sequence[Place], wires: Wires) -> Shortage | None:
    fixed, share = _memory_parts(replica_kinds(plan, _anywhere), workload, wires.devices)
    used, limit = fixed + share, MEMORY_FRACTION * wires.devices.each("memory_gb")
    held, room = _hosts_gb(plan, workload, wires)
    rank, there = int((used - limit).argmax()), int((held - room).argmax())
    lacking, host_lacking = float((used - limit)[rank]), float((held - room)[there])
    words = []
    if lacking > 0:
        device, node = places[rank].device, places[rank].node_name
        words.append(
            f"rank {rank}, a {device.type} on node {node}, needs {_shown(used[rank])} of {_shown(limit[rank])} usable "
            f"({device.memory_gb:g} GB), {_shown(lacking)} too much, for {plan.shard(rank).num_tokens:,} of "
            f"{plan.seq_len:,} tokens"
        )
    if host_lacking > 0:
        words.append(
            f"node {places[there].node_name} keeps {_shown(held[there])} of layers' inputs in its host's memory, of "
            f"{_shown(room[there])} usable ({wires.host_memory_gb[there]:g} GB), {_shown(host_lacking)} too much"
        )
    if not words:
        return None
    return Shortage(", and ".join(words), max(lacking, host_lacking), lacking > 0, host_lacking > 0)


def _shown(gb: float) -> str:
    return f"{gb:.3g} GB" if gb < 1000 else f"{gb:,.0f} GB"


def _hosts_gb(plan: Plan, workload: Workload, wires: Wires) -> tuple[np.ndarray, np.ndarray]:
    """What each rank's replica keeps in the memory of its host, and what is there for it, in GB; 0 without offload."""
    held, room = np.zeros((2, plan.world_size))
    for kind in replica_kinds(plan, wires.signature) if workload.offload else ():
        held[kind.ranks], room[kind.ranks] = _host_memory_gb(kind, workload, wires)
    return held, room


def _fitting_change(plan: Plan, workload: Workload, places: Sequence[Place], wires: Wires, manual: bool) -> str:
    """Another setting with which the plan's split would fit, in words; empty where there is none."""
    if workload.keep_parameters:
        other = dataclasses.replace(workload, keep_parameters=False)
        if _shortage(plan, other, places, wires) is None:
            return "keep_parameters=false"
    if offload_lacks(places):
        return ""
    offload = not workload.offload
    for recompute in dict.fromkeys((workload.recompute, "full")):
        if recompute == "none":
            continue
        other = dataclasses.replace(workload, recompute=recompute, offload=offload)
        if _shortage(plan, other, places, wires) is None:
            also = "" if recompute == workload.recompute else f" with recompute={recompute}"
            return f"offload={str(offload).lower()}{also}{_where(manual)}"
    return ""


def _where(manual: bool) -> str:
    return " in the plan" if manual else ""


def _fitting_length(plan: Plan, workload: Workload, wires: Wires) -> int:
    """A length at which the plan's split fits for certain, 0 when there is none; near the largest."""
    fixed, share = _memory_parts(replica_kinds(plan, _anywhere), workload, wires.devices)
    free = MEMORY_FRACTION * wires.devices.each("memory_gb") - fixed
    share = np.maximum(share / plan.seq_len, 1e-15)
    # All but the loss chunk scales with the length; setting a whole one aside, or a row a token, never promises too
    # much.
    row = max(replica.sequences for replica in plan.replicas) * workload.model.vocab * 8 / GB
    chunk = min(LOSS_CHUNK_TOKENS, plan.seq_len) * row
    fits = max(0, math.floor(np.min((free - chunk) / share)), math.floor(np.min(free / (share + row))))
    held, room = _hosts_gb(plan, workload, wires)
    if (kept := held > 0).any():
        fits = min(fits, math.floor(plan.seq_len * (1 - 1e-12) * float((room[kept] / held[kept]).min())))
    return fits


def least_token_bytes(workload: Workload) -> float:
    """Bytes a token takes on its rank at the very least, while one layer is worked on."""
    model = workload.model
    kept, working = token_bytes(workload)
    mlp = (2 * model.intermediate + 2 * model.hidden) * workload.element_bytes
    return kept + working + mlp


def longest_length(workload: Workload, places: Sequence[Place]) -> int:
    """A length no plan over all these devices exceeds; 0 when one of them cannot hold the parameters."""
    per_token = least_token_bytes(workload)
    fixed = fixed_bytes(workload, len(places))
    free = [(MEMORY_FRACTION * p.device.memory_gb - p.device.overhead_gb) * GB - fixed for p in places]
    return 0 if min(free) < 0 else int(sum(free) / per_token)


def token_capacity(device: Device, workload: Workload, ranks: int) -> float:
    """Tokens of one sequence a device can hold at the very most, without any heads."""
    per_token = least_token_bytes(workload)
    fixed = min(fixed_bytes(workload, ranks), fixed_bytes(workload, 1))
    free = (MEMORY_FRACTION * device.memory_gb - device.overhead_gb) * GB - fixed
    return max(0.0, free / per_token)

"""The plan: which rank owns which tokens and which query heads.

``Plan > Replica > Group > Shard``, all frozen and validated when made. A replica processes one sequence; its groups
form the context-parallel ring; the ranks of a group exchange heads by all-to-all. Ranges are half-open everywhere.

Tokens are laid out as *nested mirrored intervals*: group 0 owns the outermost tokens, front and back, the last group
the middle. With causal masking every (query half-slot, KV slot) pair then costs the same, so a group's attention work
is proportional to its tokens wherever it sits. See ``docs/plan-format.md``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Interval = tuple[int, int]

POLICIES = ("hexiseq", "ring", "ulysses", "usp", "loongtrain", "even", "fast_only", "manual")
# What a plan says about itself; nothing that ranks execute depends on it.
NOTES = ("policy", "predicted", "bound", "gap", "solve_seconds", "rivals", "gains")
RECOMPUTE_MODES = ("none", "selective", "full")
NO_OFFLOAD = (
    "offload takes layers' inputs to host memory, and with recompute none a layer keeps much else; use recompute "
    "selective or full"
)
EXCHANGES = ("ring", "allgather")
# auto: each rank takes the best its device and installation can run, and logs why.
KERNELS = ("torch_flash", "torch_efficient", "flash_attn2", "flash_attn3", "cpu", "dense", "auto")
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shard:
    """What one rank owns.

    Attributes:
        rank: index of the rank in the job.
        tokens: at most two ascending intervals of positions in the sequence; empty for a rank without tokens.
        heads: query heads ``[h0, h1)``; ``h0 == h1`` for a rank without heads.
    """

    rank: int
    tokens: tuple[Interval, ...]
    heads: Interval

    @functools.cached_property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.tokens)

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    def positions(self) -> np.ndarray:
        """Global positions of the shard's tokens, in order: int64 ``[num_tokens]``."""
        return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in self.tokens] or [np.empty(0, np.int64)])


@dataclass(frozen=True)
class Group:
    """Ranks that exchange heads by all-to-all, and the whole number of ring slots they own together."""

    slots: int
    shards: tuple[Shard, ...]

    @functools.cached_property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(shard.rank for shard in self.shards)


@dataclass(frozen=True)
class Replica:
    """The ranks that process ``sequences`` sequences together in every micro-step; its groups form the ring."""

    groups: tuple[Group, ...]
    sequences: int = 1

    @functools.cached_property
    def slots(self) -> int:
        return sum(group.slots for group in self.groups)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for group in self.groups for rank in group.ranks)

    @functools.cached_property
    def array(self) -> np.ndarray:
        """Group, tokens, first and last (exclusive) query head of each shard, group after group: ``[ranks, 4]``."""
        rows = [(g, shard.num_tokens, *shard.heads) for g, group in enumerate(self.groups) for shard in group.shards]
        return np.array(rows)


@dataclass(frozen=True)
class RankDevice:
    """The device a rank must find itself on: type and node as the cluster names them, and its attention kernel."""

    type: str
    node: str
    kernel: str


@dataclass(frozen=True)
class ExcludedDevice:
    """A device of the cluster the plan leaves out of the job, and why."""

    type: str
    node: str
    reason: str


@dataclass(frozen=True)
class Prediction:
    """What the cost model expects of a plan (`hexiseq.cost`). Seconds are per optimizer step, on the slowest path.

    With offload `host_copy_seconds` is what copies to host memory and back take, overlapped or not, and
    `host_memory_gb` what each rank holds in its node's memory.
    """

    step_seconds: float
    tokens_per_second: float
    compute_seconds: float
    all_to_all_seconds: float
    ring_seconds: float
    parameter_seconds: float
    memory_gb: tuple[float, ...]
    memory_limit_gb: tuple[float, ...]
    host_copy_seconds: float = 0.0
    host_memory_gb: tuple[float, ...] = ()


@dataclass(frozen=True)
class Bound:
    """A step time no feasible plan for the same cluster and workload can beat."""

    step_seconds: float


@dataclass(frozen=True)
class Rival:
    """Another way to run the same job. ``status`` is ``ok``, ``illegal`` or ``out_of_memory``; times only when ok."""

    name: str
    status: str
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Gain:
    """A part of what this plan wins over the best even one: the factor that ``source`` makes the step shorter by.

    Sources build on one another, in this order: ``tokens`` by speed in the even plan's groups, ``heads`` by speed too,
    ``grouping``: other groups, replicas, slots and exchange, ``devices``: leaving some out.
    """

    source: str
    factor: float


@dataclass(frozen=True)
class Plan:
    """All shards of all ranks, with the prediction that justified them.

    Attributes:
        policy: how it was made, one of `POLICIES`.
        seq_len: tokens of a sequence, covered exactly; nothing is padded.
        num_heads, num_kv_heads: query and key/value heads of the model.
        slot: ring transfer unit in tokens, even; a mirrored pair of half-slots. The outermost back half-slot is short
            when `seq_len` does not divide.
        fusion: consecutive ring slots fused into one kernel call; part of the plan so that results repeat.
        exchange: how KV crosses groups, one of `EXCHANGES`: slot by slot from group to group, or all at one time.
        recompute: one of `RECOMPUTE_MODES`, the same on all ranks: it decides which collectives run.
        offload: whether the layers' inputs wait for backward in host memory; not with recompute ``none``.
        dtype: one of `DTYPES`, of parameters in compute and of activations.
        devices: per rank.

    Raises:
        ValueError: naming what is lost, doubled or out of range.
    """

    policy: str
    seq_len: int
    num_heads: int
    num_kv_heads: int
    slot: int
    fusion: int
    exchange: str
    recompute: str
    offload: bool = dataclasses.field(default=False, kw_only=True)
    dtype: str
    replicas: tuple[Replica, ...]
    devices: tuple[RankDevice, ...]
    excluded: tuple[ExcludedDevice, ...] = ()
    predicted: Prediction | None = None
    bound: Bound | None = None
    gap: float | None = None
    solve_seconds: float | None = None
    rivals: tuple[Rival, ...] = ()
    gains: tuple[Gain, ...] = ()

    def __post_init__(self) -> None:
        _check_scalars(self)
        _check_ranks(self)
        checked = set()
        for index, replica in enumerate(self.replicas):
            # One of many replicas that are laid out alike speaks for all.
            layout = tuple((group.slots, *((s.tokens, s.heads) for s in group.shards)) for group in replica.groups)
            if layout in checked:
                continue
            checked.add(layout)
            _check_tokens(self, index, replica)
            for group_index, group in enumerate(replica.groups):
                _check_heads(self, f"replica {index} group {group_index}", group)

    def annotated(self, **notes: Any) -> Plan:
        """The plan with other `NOTES`. The layout stays as it is, and is not checked again."""
        assert set(notes) <= set(NOTES), f"not notes: {set(notes) - set(NOTES)}"
        plan = copy.copy(self)
        for name, value in notes.items():
            object.__setattr__(plan, name, value)
        return plan

    def crossing(self, *, exchange: str | None = None, fusion: int | None = None) -> Plan:
        """The plan with another way across groups. The layout, which does not hang on it, is not checked again."""
        plan = copy.copy(self)
        object.__setattr__(plan, "exchange", exchange or self.exchange)
        object.__setattr__(plan, "fusion", fusion or self.fusion)
        _check_scalars(plan)
        return plan

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def gqa_ratio(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def sequences(self) -> int:
        """Sequences of one micro-step, over all replicas."""
        return sum(replica.sequences for replica in self.replicas)

    def place(self, rank: int) -> tuple[int, int, int]:
        """``(replica, group, member)`` indices of a rank."""
        for r, replica in enumerate(self.replicas):
            for g, group in enumerate(replica.groups):
                for m, shard in enumerate(group.shards):
                    if shard.rank == rank:
                        return r, g, m
        raise ValueError(f"rank {rank} is not in the plan: its ranks are 0 to {self.world_size - 1}")

    def shard(self, rank: int) -> Shard:
        r, g, m = self.place(rank)
        return self.replicas[r].groups[g].shards[m]

    def shards(self) -> list[Shard]:
        """All shards, by rank."""
        found = [s for replica in self.replicas for group in replica.groups for s in group.shards]
        return sorted(found, key=lambda shard: shard.rank)

    def relabel(self, new_rank: Sequence[int]) -> Plan:
        """The same plan with rank ``r`` renamed to ``new_rank[r]``, a permutation of the ranks."""
        if sorted(new_rank) != list(range(self.world_size)):
            raise ValueError(f"not a permutation of {self.world_size} ranks: {list(new_rank)}")
        old_rank = np.argsort(new_rank)

        def permute(values: tuple) -> tuple:
            return tuple(values[old] for old in old_rank)

        replicas = tuple(
            dataclasses.replace(
                replica,
                groups=tuple(
                    dataclasses.replace(
                        group,
                        shards=tuple(dataclasses.replace(s, rank=int(new_rank[s.rank])) for s in group.shards),
                    )
                    for group in replica.groups
                ),
            )
            for replica in self.replicas
        )
        predicted = self.predicted and dataclasses.replace(
            self.predicted,
            memory_gb=permute(self.predicted.memory_gb),
            memory_limit_gb=permute(self.predicted.memory_limit_gb),
            host_memory_gb=permute(self.predicted.host_memory_gb) if self.predicted.host_memory_gb else (),
        )
        return dataclasses.replace(self, replicas=replicas, devices=permute(self.devices), predicted=predicted)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers only, with the stable keys of ``docs/plan-format.md``."""
        return {"version": 1, **_plain(dataclasses.asdict(self))}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`. Raises ValueError with the path of a missing or unknown key or a wrong type."""
        return _from_dict(data)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a ``plan.json``. Raises ValueError naming the file and what is wrong with it."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ValueError(f"plan file {path}: {error.strerror}") from None
        try:
            return Plan.from_dict(json.loads(text))
        except ValueError as error:
            raise ValueError(f"plan file {path}: {error}") from None

    def digest(self) -> str:
        """Hash of all that decides what the ranks execute; predictions and rivals are not part of it."""
        data = self.to_dict()
        for key in NOTES:
            del data[key]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def kv_heads(heads: Interval, gqa_ratio: int) -> Interval:
    """KV heads that query heads ``[h0, h1)`` attend with: ``[h0 // G, ceil(h1 / G))``, empty for an empty range."""
    first, last = heads
    return (first // gqa_ratio, -(-last // gqa_ratio)) if last > first else (first // gqa_ratio,) * 2


@functools.lru_cache(maxsize=65536)
def fragments(heads: Interval, gqa_ratio: int) -> tuple[tuple[Interval, Interval], ...]:
    """Cut query heads into at most three runs that use their KV heads in a whole ratio: a kernel call each.

    The left part of a cut KV group, whole groups, the right part. Kernels take the ratio from the shapes: ``[1, 7)``
    with ratio 3 (two, three and one query head on KV heads 0, 1, 2) would pass their divisibility check and be
    silently wrong.

    Returns:
        Per run its query heads and its KV heads, as ranges within those of `heads`.
    """
    h0, h1 = heads
    if h1 <= h0:
        return ()
    k0 = kv_heads(heads, gqa_ratio)[0]
    first_whole, last_whole = -(-h0 // gqa_ratio) * gqa_ratio, h1 // gqa_ratio * gqa_ratio
    cuts = sorted({h0, h1, *(edge for edge in (first_whole, last_whole) if h0 < edge < h1)})
    return tuple(
        ((a - h0, b - h0), (a // gqa_ratio - k0, -(-b // gqa_ratio) - k0)) for a, b in itertools.pairwise(cuts)
    )


def claims(held: Sequence[Interval]) -> list[Interval]:
    """KV heads of each member of a group that no earlier member holds: it speaks for the group on these.

    Args:
        held: KV heads of the members, in member order.
    """
    found, end = [], 0
    for first, last in held:
        found.append((max(first, end), max(last, end)))
        end = max(end, last)
    return found


def fusion_width(fusion: int, slots: int) -> int:
    """Slots a group of `slots` own slots fuses into one kernel call when the plan asks for `fusion`.

    A receive is posted ``slots`` ticks ahead, so a wider call would wait for a slot its neighbour only sends after it.
    One tick of the window is left for the transfer itself.
    """
    return max(1, min(fusion, slots - 1))


def short_tokens(seq_len: int, slot: int, slots: int) -> int:
    """Tokens missing from the outermost back half-slot when `slots` slots cover `seq_len` tokens."""
    return slots * slot - seq_len


def fits_slots(seq_len: int, slot: int, slots: int) -> bool:
    """Whether `slots` slots of `slot` tokens cover `seq_len` exactly, with at most the outermost half-slot short."""
    return slot >= 2 and slot % 2 == 0 and 0 <= short_tokens(seq_len, slot, slots) <= slot // 2


def group_intervals(seq_len: int, slot: int, slots: Sequence[int]) -> list[tuple[Interval, Interval]]:
    """Front and back interval of each group of a ring; `slots` are the groups' slots, outermost group first.

    Intervals may be empty (the outermost back half-slot can be missing) and touch in the last group.
    """
    return [((a, b), (c, d)) for (a, b), (c, d) in interval_array(seq_len, slot, slots).tolist()]


def interval_array(seq_len: int, slot: int, slots: Sequence[int] | np.ndarray) -> np.ndarray:
    """The same as ``[groups, 2 (front, back), 2 (start, end)]``."""
    inner = np.cumsum(slots)
    end, half = int(inner[-1]) * slot, slot // 2
    fronts = np.minimum(inner * half, seq_len)
    backs = np.minimum(np.maximum(end - inner * half, fronts), seq_len)
    outer = (inner - slots) * half
    return np.stack([outer, fronts, backs, np.minimum(end - outer, seq_len)], axis=1).reshape(-1, 2, 2)


def cut(intervals: Sequence[Interval], sizes: Sequence[int]) -> list[tuple[Interval, ...]]:
    """Cut a run of intervals into consecutive parts of the given sizes; touching pieces of a part are joined."""
    if sum(sizes) != sum(b - a for a, b in intervals):
        raise ValueError(f"sizes {list(sizes)} sum to {sum(sizes)}, the intervals hold "
                         f"{sum(b - a for a, b in intervals)} tokens")  # fmt: skip
    pieces = [list(interval) for interval in intervals if interval[1] > interval[0]]
    parts: list[tuple[Interval, ...]] = []
    for size in sizes:
        part: list[Interval] = []
        while size:
            start, end = pieces[0]
            taken = min(size, end - start)
            if part and part[-1][1] == start:
                part[-1] = (part[-1][0], start + taken)
            else:
                part.append((start, start + taken))
            pieces[0][0] += taken
            if pieces[0][0] == end:
                pieces.pop(0)
            size -= taken
        parts.append(tuple(part))
    return parts


def make_replica(
    seq_len: int,
    slot: int,
    groups: Sequence[tuple[int, Sequence[tuple[int, int, int]]]],
    sequences: int = 1,
) -> Replica:
    """Lay out a replica from counts: per group ``(slots, [(rank, tokens, query heads), ...])``, outermost first."""
    made = []
    intervals = group_intervals(seq_len, slot, [slots for slots, _ in groups])
    for (slots, members), run in zip(groups, intervals, strict=True):
        ends = np.cumsum([heads for _, _, heads in members]).tolist()
        shards = tuple(
            Shard(rank, tokens, (end - heads, end))
            for (rank, _, heads), tokens, end in zip(members, cut(run, [m[1] for m in members]), ends, strict=True)
        )
        made.append(Group(slots, shards))
    return Replica(tuple(made), sequences)


def table(plan: Plan) -> str:
    """The plan as aligned text: one row per rank, then what it is predicted to cost, bound and rivals."""
    header = ["rank", "device", "node", "replica", "group", "tokens", "share", "heads", "kv heads", "memory"]
    rows = []
    for shard in plan.shards():
        replica, group, _ = plan.place(shard.rank)
        device, kv = plan.devices[shard.rank], kv_heads(shard.heads, plan.gqa_ratio)
        memory = "-"
        if plan.predicted:
            used, limit = plan.predicted.memory_gb[shard.rank], plan.predicted.memory_limit_gb[shard.rank]
            memory = f"{used:.3g}/{limit:.3g} GB"
            if plan.predicted.host_memory_gb:
                memory += f", host {plan.predicted.host_memory_gb[shard.rank]:.3g} GB"
        rows.append([
            str(shard.rank), device.type, device.node, str(replica), str(group), f"{shard.num_tokens:,}",
            f"{shard.num_tokens / plan.seq_len:.1%}", f"{shard.heads[0]}-{shard.heads[1]} ({shard.num_heads})",
            f"{kv[0]}-{kv[1]}", memory,
        ])  # fmt: skip
    lines = [
        f"plan: policy {plan.policy}, {plan.seq_len:,} tokens, {plan.num_heads} query / {plan.num_kv_heads} KV heads, "
        f"slot {plan.slot:,}, fusion {plan.fusion}, exchange {plan.exchange}, recompute {plan.recompute}"
        f"{', offload' if plan.offload else ''}, {plan.dtype}",
        *align(header, rows),
    ]
    for d in dict.fromkeys(plan.excluded):
        count = plan.excluded.count(d)
        lines.append(f"left out: {f'{count} x ' if count > 1 else ''}{d.type} on {d.node}: {d.reason}")
    if (p := plan.predicted) is not None:
        lines.append(
            f"predicted: {p.step_seconds:.4g} s a step, {p.tokens_per_second:,.0f} tokens/s (compute "
            f"{p.compute_seconds:.3g} s, all-to-all {p.all_to_all_seconds:.3g} s, "
            f"{plan.exchange} {p.ring_seconds:.3g} s, "
            f"parameters {p.parameter_seconds:.3g} s"
            f"{f', host copies {p.host_copy_seconds:.3g} s' if plan.offload else ''})"
        )
    if plan.bound is not None and plan.gap is not None:
        lines.append(f"bound: no plan beats {plan.bound.step_seconds:.4g} s; gap {plan.gap:.1%}")
    if plan.rivals:
        lines.append("rivals:")
        best = plan.predicted.step_seconds if plan.predicted else None
        rows = [
            [
                rival.name,
                rival.status,
                f"{rival.step_seconds:.4g} s" if rival.step_seconds else "-",
                f"{rival.tokens_per_second:,.0f}" if rival.tokens_per_second else "-",
                f"{rival.step_seconds / best:.3f}x" if rival.step_seconds and best else "-",
                rival.reason,
            ]
            for rival in plan.rivals
        ]
        lines += align(["way", "status", "step", "tokens/s", "time against this plan", "why"], rows)
    if plan.gains:
        factors = ", ".join(f"{gain.source} {gain.factor:.3f}x" for gain in plan.gains)
        lines.append(f"gain over the best even plan, {math.prod(gain.factor for gain in plan.gains):.3f}x: {factors}")
    return "\n".join(lines)


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell, two spaces apart."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _from_dict(data: Mapping[str, Any]) -> Plan:
    if not isinstance(data, Mapping):
        raise ValueError(f"plan: expected a mapping, got {type(data).__name__}")
    data = dict(data)
    version = data.pop("version", 1)
    if version != 1:
        raise ValueError(f"plan: version {version!r} is not known, only 1")
    return _read(Plan, data, "")


_hints = functools.cache(typing.get_type_hints)


def _read(kind: Any, value: Any, path: str) -> Any:
    """A value of a plan file as the type of its field; `path` names it in messages, empty for the plan itself."""
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, path)
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else _read(arguments[0], value, path)
    if kind == Interval:
        if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_integer, value))):
            raise ValueError(f"plan: {path} must be [start, end), two integers, got {value!r}")
        return tuple(value)
    if arguments:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"plan: {path} must be a list, got {value!r}")
        return tuple(_read(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"plan: {path} must be true or false, got {value!r}")
    if kind is int and not _is_integer(value):
        raise ValueError(f"plan: {path} must be an integer, got {value!r}")
    if kind is float and not (_is_integer(value) or (isinstance(value, float) and math.isfinite(value))):
        raise ValueError(f"plan: {path} must be a number, got {value!r}")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"plan: {path} must be text, got {value!r}")
    return value


def _read_fields(kind: Any, value: Any, path: str) -> Any:
    where = f"plan: {path}: " if path else "plan: "
    fields = dataclasses.fields(kind)
    known = ", ".join(field.name for field in fields)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}expected a mapping with {known}, got {value!r}")
    for field in fields:
        if field.name not in value and field.default is dataclasses.MISSING:
            raise ValueError(f"{where}key {field.name!r} is missing")
    hints = _hints(kind)
    for key in value:
        if key not in hints:
            raise ValueError(f"{where}key {key!r} is not known; the keys are {known}")
    return kind(**{key: _read(hints[key], item, f"{path}.{key}" if path else key) for key, item in value.items()})


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_scalars(plan: Plan) -> None:
    def choose(name: str, value: str, choices: Sequence[str]) -> None:
        if value not in choices:
            raise ValueError(f"plan: {name} {value!r} is not one of {', '.join(choices)}")

    choose("policy", plan.policy, POLICIES)
    choose("exchange", plan.exchange, EXCHANGES)
    choose("recompute", plan.recompute, RECOMPUTE_MODES)
    choose("dtype", plan.dtype, tuple(DTYPES))
    if not isinstance(plan.offload, bool):
        raise ValueError(f"plan: offload must be true or false, got {plan.offload!r}")
    if plan.offload and plan.recompute == "none":
        raise ValueError(f"plan: {NO_OFFLOAD}")
    kernels = [device.kernel for device in plan.devices]
    for kernel in set(kernels):
        choose(f"devices[{kernels.index(kernel)}].kernel", kernel, KERNELS)
    for name in ("memory_gb", "memory_limit_gb", "host_memory_gb") if plan.predicted else ():
        length = len(getattr(plan.predicted, name))
        if length != plan.world_size and not (name == "host_memory_gb" and length == 0):
            raise ValueError(f"plan: predicted.{name} must have a number for each of {plan.world_size} devices, "
                             f"got {length}")  # fmt: skip
    for name in ("seq_len", "num_heads", "num_kv_heads", "fusion"):
        value = getattr(plan, name)
        if not _is_integer(value) or value < 1:
            raise ValueError(f"plan: {name} must be a positive integer, got {value!r}")
    if plan.num_heads % plan.num_kv_heads:
        raise ValueError(
            f"plan: {plan.num_heads} query heads are not a multiple of {plan.num_kv_heads} KV heads; "
            "every KV head must serve the same number of query heads"
        )
    if not _is_integer(plan.slot) or plan.slot < 2 or plan.slot % 2:
        raise ValueError(f"plan: slot must be an even number of tokens, at least 2, got {plan.slot!r}")


def _check_ranks(plan: Plan) -> None:
    ranks = sorted(rank for replica in plan.replicas for rank in replica.ranks)
    if not ranks or ranks != list(range(plan.world_size)):
        raise ValueError(
            f"plan: {plan.world_size} devices need the ranks 0 to {plan.world_size - 1} once each, got {ranks}"
        )
    for index, replica in enumerate(plan.replicas):
        if replica.sequences < 1:
            raise ValueError(f"plan: replica {index} has {replica.sequences} sequences a micro-step, needs at least 1")
        for group_index, group in enumerate(replica.groups):
            if group.slots < 1 or not group.shards:
                raise ValueError(f"plan: replica {index} group {group_index} needs at least one slot and one rank, "
                                 f"got {group.slots} slots and {len(group.shards)} ranks")  # fmt: skip


def _check_tokens(plan: Plan, index: int, replica: Replica) -> None:
    runs = group_intervals(plan.seq_len, plan.slot, [group.slots for group in replica.groups])
    if fits_slots(plan.seq_len, plan.slot, replica.slots) and all(map(_is_cut, replica.groups, runs)):
        return  # the groups' intervals cover the sequence once
    where = f"plan: replica {index}"
    owned = []
    for group in replica.groups:
        for shard in group.shards:
            for start, end in shard.tokens:
                if not 0 <= start < end <= plan.seq_len:
                    raise ValueError(f"{where}: rank {shard.rank} has tokens [{start}, {end}), "
                                     f"not a range within [0, {plan.seq_len})")  # fmt: skip
                owned.append((start, end, shard.rank))
    position, previous = 0, None
    for start, end, rank in [*sorted(owned), (plan.seq_len, plan.seq_len, None)]:
        if start > position:
            raise ValueError(f"{where}: tokens [{position}, {start}) belong to no rank")
        if start < position:
            raise ValueError(f"{where}: tokens [{start}, {min(position, end)}) belong to ranks {previous} and {rank}")
        position, previous = end, rank

    if not fits_slots(plan.seq_len, plan.slot, replica.slots):
        raise ValueError(
            f"{where}: {replica.slots} slots of {plan.slot} tokens do not cover {plan.seq_len} tokens; "
            f"the outermost half-slot alone may be short, so {replica.slots * plan.slot - plan.slot // 2} to "
            f"{replica.slots * plan.slot} tokens would fit"
        )
    for group_index, (group, run) in enumerate(zip(replica.groups, runs, strict=True)):
        if _is_cut(group, run):
            continue
        shown = " and ".join(f"[{a}, {b})" for a, b in run if b > a)
        raise ValueError(
            f"{where} group {group_index}: its {group.slots} slots are the tokens {shown}, cut in member order; "
            f"its ranks own {[list(shard.tokens) for shard in group.shards]}"
        )


def _is_cut(group: Group, run: tuple[Interval, Interval]) -> bool:
    """Whether the group's shards are its intervals cut in member order."""
    if group.num_tokens != sum(b - a for a, b in run):
        return False
    return cut(run, [shard.num_tokens for shard in group.shards]) == [shard.tokens for shard in group.shards]


def _check_heads(plan: Plan, where: str, group: Group) -> None:
    position, previous = 0, None
    for shard in group.shards:
        first, last = shard.heads
        if not 0 <= first <= last <= plan.num_heads:
            raise ValueError(f"plan: {where}: rank {shard.rank} has heads [{first}, {last}), "
                             f"not a range within [0, {plan.num_heads})")  # fmt: skip
        if first < position and last > first:
            raise ValueError(f"plan: {where}: query heads [{first}, {min(position, last)}) belong to ranks "
                             f"{previous} and {shard.rank}")  # fmt: skip
        if first > position:
            raise ValueError(f"plan: {where}: query heads [{position}, {first}) belong to no rank")
        if last > first:
            position, previous = last, shard.rank
    if position != plan.num_heads:
        raise ValueError(f"plan: {where}: query heads [{position}, {plan.num_heads}) belong to no rank")

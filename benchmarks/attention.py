"""Attention over a plan against other systems' context parallel, on CPU ranks over gloo.

    python -m benchmarks.attention                       # even split, against torch, zigzag ring and Ulysses
    python -m benchmarks.attention --uneven              # ranks of speed 1 : 0.5 : 0.5, fitting plan against even one
    python -m benchmarks.attention --documents 1024      # packed documents against one long one
    python -m benchmarks.attention --window 1024         # sliding window against none

All methods run in the same processes and process group, one thread each, every rank pinned to a core. Their results,
out and gradients, are first checked against one process. Then they take turns in rounds, in rotating order, so that a
disturbance of the machine meets them all; ratios are medians over rounds of the ratio within a round. Wall seconds are
the slowest rank's between two barriers, CPU seconds those of the busiest core. ``one-process`` is the bare kernel for
the whole sequence on rank 0's core while the other ranks wait; efficiency is its time, times the largest share of the
work that one core has, over a method's time: 1 would be kernels and nothing else. Kernel calls are timed on their own,
too: what is left is a method's overhead, which the noise of a shared machine, nearly all in the kernels, leaves alone.

Where there are more ranks than cores the last ranks share a core: three ranks on two cores are one fast rank and two of
half its speed. An even split then leaves the first core idle a third of the time, by every method alike.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import operator
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import peers
from benchmarks.ranks import (
    Method,
    core_of,
    cores,
    kernels_timed,
    pin,
    ring_plan,
    slot_for,
    tensors,
    timed,
    ulysses_plan,
)
from hexiseq import standins
from hexiseq.attention import attend, close_all
from hexiseq.attention.kernels import cpu
from hexiseq.attention.tiles import Mask, tiles
from hexiseq.documents import balanced_order
from hexiseq.plan import Plan
from hexiseq.testing import Pool

ONE_PROCESS = "one-process"
PASSES = ("forward", "backward", "both")
# Largest error, as max|difference| / max|reference|, against one process in float32.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
SLOTS_PER_RANK = 8


@dataclasses.dataclass(frozen=True)
class Contest:
    """What is compared, the same on all ranks.

    Attributes:
        plans: of our methods, by name. Names that end in ``/masked`` attend with `documents` and `window`.
        peers: names of other systems' methods.
        versus: methods whose times are set against one another.
        documents: boundaries of the packed documents, or None.
        cores: of the ranks, by `core_of`.
    """

    plans: dict[str, Plan]
    peers: tuple[str, ...]
    versus: tuple[tuple[str, str], ...]
    documents: tuple[int, ...] | None
    window: int | None
    dim: int
    rounds: int
    cores: tuple[int, ...]

    @property
    def plan(self) -> Plan:
        """Any of them: all have the same sequence, heads, dtype and ranks."""
        return next(iter(self.plans.values()))

    @property
    def masked(self) -> bool:
        return self.documents is not None or self.window is not None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contestant on this rank. ``backward`` takes what ``forward`` returned."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def run(contest: Contest) -> dict[str, Any]:
    """All rounds on this rank: errors by method, and seconds by method, pass and clock, a number per round."""
    rank, plan = dist.get_rank(), contest.plan
    pin(core_of(rank, contest.cores))
    dtype = getattr(torch, plan.dtype)
    whole = tensors(plan.seq_len, plan.num_heads, plan.num_kv_heads, contest.dim, dtype)
    masks = [Mask(), _mask(contest)] if contest.masked else [Mask()]
    with standins.install((torch.float32, torch.bfloat16)), kernels_timed(cpu, standins, peers):
        expected = {mask: _reference(whole, mask) for mask in masks}
        entries, errors = [], {}
        for method, mask in _methods(contest, rank):
            local = [t[:, method.positions].contiguous() for t in whole]
            entry = _entry(method, local)
            errors[method.name] = _error(entry, local, [t[:, method.positions] for t in expected[mask]])
            entries.append(entry)
        del expected
        names = (ONE_PROCESS, f"{ONE_PROCESS}/masked")
        entries += [_one_process(name, whole, mask) for name, mask in zip(names, masks, strict=False)]
        seconds = _rounds(entries, contest.rounds)
    close_all()
    return {"errors": errors, "seconds": seconds}


def _rounds(entries: list[Entry], rounds: int) -> dict[str, dict[str, list[tuple[float, float, float]]]]:
    seconds: dict[str, dict[str, list[tuple[float, float, float]]]] = {
        entry.name: {"forward": [], "backward": []} for entry in entries
    }
    for first in range(-1, rounds):  # round -1 makes whatever is made at first use, and does not count
        for i in range(len(entries)):
            entry = entries[(first + i) % len(entries)]
            result, forward = timed(entry.forward)
            seconds[entry.name]["forward"].append(forward)
            _, backward = timed(entry.backward, result)
            seconds[entry.name]["backward"].append(backward)
            del result
        if dist.get_rank() == 0:
            took = sum(passes[what][-1][0] for passes in seconds.values() for what in passes)
            print(f"round {first + 1} of {rounds}: {took:.1f} s", file=sys.stderr, flush=True)
    return {name: {what: taken[1:] for what, taken in passes.items()} for name, passes in seconds.items()}


def _methods(contest: Contest, rank: int) -> list[tuple[Method, Mask]]:
    found, plan = [], contest.plan
    for name, own in contest.plans.items():
        masked = name.endswith("/masked")
        options: dict[str, Any] = {"plan": own}
        if masked and contest.documents is not None:
            options["documents"] = [contest.documents]
        if masked and contest.window is not None:
            options["window"] = contest.window
        positions = torch.from_numpy(own.shard(rank).positions())

        def forward(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any] = options) -> Tensor:
            return attend(q, k, v, **options)

        found.append((Method(name, positions, forward), _mask(contest) if masked else Mask()))
    for name in contest.peers:
        found.append((peers.load(name, rank, plan.world_size, plan.seq_len), Mask()))
    return found


def _mask(contest: Contest) -> Mask:
    documents = None if contest.documents is None else (contest.documents,)
    return Mask(causal=True, window=contest.window, documents=documents)


def _entry(method: Method, local: list[Tensor]) -> Entry:
    *inputs, dout = local
    for t in inputs:
        t.requires_grad_()
    return Entry(
        method.name,
        lambda: method.forward(*inputs),
        lambda out: (out.detach(), *torch.autograd.grad(out, inputs, dout)),
    )


def _one_process(name: str, whole: list[Tensor], mask: Mask) -> Entry:
    """The kernel calls of the whole sequence, each query with each key once, on rank 0; nothing is merged."""
    if dist.get_rank():
        return Entry(name, lambda: None, lambda _: None)
    scale = whole[0].shape[-1] ** -0.5
    q, k, v, dout = (t.detach().transpose(1, 2) for t in whole)
    everything = ((0, q.shape[2]),)
    calls = [
        (slice(*tile.queries), slice(*tile.keys), tile.mask)
        for tile in tiles(everything, everything, mask, mask.documents[0] if mask.documents else None)
    ]

    def forward() -> list[tuple[Tensor, Tensor]]:
        return [cpu.forward(q[:, :, a], k[:, :, b], v[:, :, b], kind, scale) for a, b, kind in calls]

    def backward(results: list[tuple[Tensor, Tensor]]) -> None:
        for (a, b, kind), (out, lse) in zip(calls, results, strict=True):
            cpu.backward(dout[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], out, lse, kind, scale)

    return Entry(name, forward, backward)


def _reference(whole: list[Tensor], mask: Mask) -> list[Tensor]:
    """out, dq, dk, dv by torch's own attention on rank 0, in float32, sent to all."""
    found = [torch.empty(t.shape) for t in (whole[0], *whole[:3])]
    if dist.get_rank() == 0:
        q, k, v, dout = (t.float() for t in whole)
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = _plain([t.transpose(1, 2) for t in inputs], mask).transpose(1, 2)
        found = [t.contiguous() for t in (out.detach(), *torch.autograd.grad(out, inputs, dout))]
    for t in found:
        dist.broadcast(t, 0)
    return found


def _plain(qkv: list[Tensor], mask: Mask) -> Tensor:
    edges = mask.documents[0] if mask.documents else (0, qkv[0].shape[2])
    parts = []
    for start, end in itertools.pairwise(edges):
        q, k, v = (t[:, :, start:end] for t in qkv)
        if mask.window is None:
            parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
            continue
        for a in range(0, end - start, 512):  # a strip of the score matrix at a time
            b = min(a + 512, end - start)
            first = max(0, a - mask.window + 1)
            behind = torch.arange(a, b)[:, None] - torch.arange(first, b)
            seen = (behind >= 0) & (behind < mask.window)
            strip = q[:, :, a:b], k[:, :, first:b], v[:, :, first:b]
            parts.append(scaled_dot_product_attention(*strip, attn_mask=seen, enable_gqa=True))
    return torch.cat(parts, dim=2)


def _error(entry: Entry, local: list[Tensor], expected: list[Tensor]) -> float:
    """Largest error over out, dq, dk and dv of all ranks. Raises AssertionError on all of them if it is too large."""
    worst = torch.zeros(())
    for found, right in zip(entry.backward(entry.forward()), expected, strict=True):
        ends = torch.stack([(found.float() - right).abs().max(), right.abs().max()])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        worst = torch.maximum(worst, ends[0] / ends[1])
    dtype = str(local[0].dtype).removeprefix("torch.")
    assert worst <= TOLERANCE[dtype], f"{entry.name} is wrong by {worst:.2g}, more than {TOLERANCE[dtype]}"
    return worst.item()


# In the parent: what to compare, and what came of it.


def contest_of(options: argparse.Namespace) -> tuple[Contest, dict[str, str]]:
    """What the options ask for, and why each of the peers that cannot take part does not.

    Raises:
        ValueError: the options do not go together.
    """
    ranks, masked = options.ranks, options.documents is not None or options.window is not None
    if options.uneven and (masked or ranks != 3):
        raise ValueError("--uneven compares causal plans of 3 ranks: leave out --documents and --window")
    slot = options.slot or slot_for(options.seq, SLOTS_PER_RANK * ranks)
    total = -(-options.seq // slot)
    shape = {
        "slot": slot, "seq_len": options.seq, "heads": options.heads, "kv_heads": options.kv_heads,
        "fusion": options.fusion, "dtype": options.dtype,
    }  # fmt: skip
    for parts in (ranks, 4) if options.uneven else (ranks,):
        if total % parts:
            raise ValueError(
                f"{total} slots of {slot} tokens do not divide into {parts} equal parts: choose another --slot"
            )
    if options.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {options.rounds}")
    even, plans, absent = [total // ranks] * ranks, {}, {}
    chosen: tuple[str, ...] = ()
    versus: list[tuple[str, str]] = []
    for exchange in options.exchange:
        if options.uneven:
            plans[f"even-{exchange}"] = ring_plan(even, exchange=exchange, **shape)
            fitting = [total // 2, total // 4, total // 4]
            plans[f"fitting-{exchange}"] = ring_plan(fitting, exchange=exchange, **shape)
            versus.append((f"even-{exchange}", f"fitting-{exchange}"))
        else:
            plans[f"ours-{exchange}"] = plan = ring_plan(even, exchange=exchange, **shape)
            if masked:
                plans[f"ours-{exchange}/masked"] = plan
                versus.append((f"ours-{exchange}/masked", f"ours-{exchange}"))
    if not options.uneven and not masked:
        absent = _absent_peers(ranks, options)
        chosen = tuple(name for name in options.peers if name not in absent)
        if options.heads % ranks:
            absent["ours-ulysses"] = f"{options.heads} query heads do not divide over {ranks} ranks"
        else:
            plans["ours-ulysses"] = ulysses_plan(ranks, exchange=options.exchange[0], **shape)
        versus = [(a, b) for a in plans for b in (*chosen, *plans) if a != b]
    return Contest(
        plans=plans,
        peers=chosen,
        versus=tuple(versus),
        documents=None if options.documents is None else _documents(options, next(iter(plans.values()))),
        window=options.window,
        dim=options.head_dim,
        rounds=options.rounds,
        cores=tuple(cores(options.cores)),
    ), absent


def _absent_peers(ranks: int, options: argparse.Namespace) -> dict[str, str]:
    found = {}
    for name in options.peers:
        reason = peers.not_installed(name) or peers.why_not(
            name, ranks=ranks, seq_len=options.seq, heads=options.heads, kv_heads=options.kv_heads
        )
        if reason:
            found[name] = reason
    return found


def _documents(options: argparse.Namespace, plan: Plan) -> tuple[int, ...]:
    """Boundaries of drawn documents, in the order that training packs them in."""
    drawn = draw_documents(options.seq, options.documents)
    if options.as_drawn:
        return drawn
    lengths = np.diff(drawn)
    ends = np.cumsum(lengths[balanced_order(lengths.tolist(), plan, 0)])
    return (0, *ends.tolist())


def draw_documents(seq_len: int, mean: int) -> tuple[int, ...]:
    """Boundaries of documents of random lengths, a quarter to seven quarters of the mean, packed to `seq_len`."""
    if not 4 <= mean <= seq_len:
        raise ValueError(f"--documents is a mean length from 4 to {seq_len} tokens, got {mean}")
    rng, edges = np.random.default_rng(0), [0]
    while edges[-1] < seq_len:
        edges.append(edges[-1] + int(rng.integers(mean // 4, mean * 7 // 4 + 1)))
    return (*edges[:-1], seq_len)


def pairs(contest: Contest, positions: np.ndarray, masked: bool) -> int:
    """Query-key pairs of the tokens at `positions`."""
    before = positions
    if masked and contest.documents is not None:
        edges = np.array(contest.documents)
        before = positions - edges[np.searchsorted(edges, positions, side="right") - 1]
    if masked and contest.window is not None:
        before = np.minimum(before, contest.window - 1)
    return int(before.sum()) + len(positions)


def largest_share(contest: Contest, name: str) -> float:
    """The part of all work that the busiest core has. Peers split work evenly over ranks."""
    ranks, own = contest.plan.world_size, [1.0] * contest.plan.world_size
    if name in contest.plans and contest.plans[name].policy == "ring":
        shards = contest.plans[name].shards()
        own = [float(pairs(contest, shard.positions(), name.endswith("/masked"))) for shard in shards]
    by_core = dict.fromkeys(contest.cores, 0.0)
    for rank in range(ranks):
        by_core[core_of(rank, contest.cores)] += own[rank]
    return max(by_core.values()) / sum(own)


Times = dict[str, dict[str, dict[str, list[float]]]]


def combine(contest: Contest, by_rank: Sequence[dict[str, Any]]) -> Times:
    """Seconds by method, pass and clock, a number per round.

    ``wall`` of the slowest rank, ``cpu`` of the busiest core; of all ranks together ``used`` CPU seconds, and what of
    these is ``outside`` the attention kernels.
    """
    times: Times = {}
    for name, first in by_rank[0]["seconds"].items():
        times[name] = {}
        for what in ("forward", "backward"):
            rounds = range(len(first[what]))
            ranks = [result["seconds"][name][what] for result in by_rank]
            busiest = []
            for i in rounds:
                by_core = dict.fromkeys(contest.cores, 0.0)
                for rank, seconds in enumerate(ranks):
                    by_core[core_of(rank, contest.cores)] += seconds[i][1]
                busiest.append(max(by_core.values()))
            times[name][what] = {
                "wall": [max(seconds[i][0] for seconds in ranks) for i in rounds],
                "cpu": busiest,
                "used": [sum(seconds[i][1] for seconds in ranks) for i in rounds],
                "outside": [sum(seconds[i][1] - seconds[i][2] for seconds in ranks) for i in rounds],
            }
        parts = [times[name][what] for what in ("forward", "backward")]
        times[name]["both"] = {clock: [a + b for a, b in zip(*(p[clock] for p in parts), strict=True)]
                               for clock in parts[0]}  # fmt: skip
    return times


def ratio(times: Times, a: str, b: str, what: str, clock: str, scale: float = 1.0) -> float:
    """Median over rounds of `a`'s time over `b`'s in the same round."""
    rounds = zip(times[a][what][clock], times[b][what][clock], strict=True)
    return scale * statistics.median(x / y for x, y in rounds)


def report(contest: Contest, times: Times, errors: dict[str, float], absent: dict[str, str]) -> dict[str, Any]:
    """Print all tables; returns the ratios and efficiencies as plain containers."""
    plan = contest.plan
    found: dict[str, Any] = {"efficiency": {}}
    header = [f"{what} {clock}" for what in PASSES for clock in ("wall", "cpu")]
    columns = [(what, clock) for what in PASSES for clock in ("wall", "cpu")]
    print(
        f"{plan.world_size} ranks on {len(contest.cores)} cores, {plan.seq_len} tokens, {plan.num_heads} query and "
        f"{plan.num_kv_heads} KV heads of {contest.dim}, {plan.dtype}, slot {plan.slot}, fusion {plan.fusion}, "
        f"{contest.rounds} rounds"
    )
    if contest.masked:
        everything = np.arange(plan.seq_len)
        part = pairs(contest, everything, True) / pairs(contest, everything, False)
        documents = "" if contest.documents is None else f"{len(contest.documents) - 1} documents, "
        window = "" if contest.window is None else f"window {contest.window}, "
        found["work"] = part
        print(f"/masked: {documents}{window}{part:.4f} of the causal work")
    for name, reason in absent.items():
        print(f"without {name}: {reason}")
    print(f"all equal to one process within {max(errors.values()):.1e}")
    rows = {}
    for name in times:
        rounds = [times[name][what][clock] for what, clock in columns]
        rows[name] = [f"{statistics.median(t):.4f} ({min(t):.4f})" for t in rounds]
    _table("seconds, median (minimum)", header, rows)
    found["ratios"] = {f"{a} / {b}": [ratio(times, a, b, *column) for column in columns] for a, b in contest.versus}
    for name in (name for name in contest.plans if name.endswith("/masked")):
        base = _one_process_of(name)
        row = [ratio(times, name, base, *column, scale=len(contest.cores)) for column in columns]
        found["ratios"][f"{len(contest.cores)} * {name} / {base}"] = row
    _table("ratio of times, median over rounds", header, _rounded(found["ratios"]))
    for name in (*contest.plans, *contest.peers):
        base = _one_process_of(name)
        share = largest_share(contest, name)
        found["efficiency"][name] = [share, *(ratio(times, base, name, *column, scale=share) for column in columns)]
    _table("efficiency: kernel seconds of the busiest core's share over the method's",
           ["share", *header], _rounded(found["efficiency"]))  # fmt: skip
    found["outside"] = {
        name: [statistics.median(map(operator.truediv, times[name][what]["outside"], times[name][what]["used"]))
               for what in PASSES]
        for name in (*contest.plans, *contest.peers)
    }  # fmt: skip
    _table("part of all CPU time that is outside the kernels", list(PASSES), _rounded(found["outside"]))
    return found


def _one_process_of(name: str) -> str:
    return f"{ONE_PROCESS}/masked" if name.endswith("/masked") else ONE_PROCESS


def _rounded(rows: dict[str, list[float]]) -> dict[str, list[str]]:
    return {name: [f"{value:.3f}" for value in values] for name, values in rows.items()}


def _table(title: str, header: list[str], rows: dict[str, list[str]]) -> None:
    first = max(map(len, (title, *rows)))
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows.values(), strict=True)]
    print()
    for name, cells in {title: header, **rows}.items():
        print(f"{name:{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Contest, dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, choices=(2, 3), help="2; 3 with --uneven")
    add("--cores", type=int, help="cores the ranks are pinned to; ranks beyond them share the last (2)")
    add("--seq", type=int, default=8192, help="tokens of the sequence (%(default)s)")
    add("--heads", type=int, default=8, help="query heads (%(default)s)")
    add("--kv-heads", type=int, help="KV heads (as many as query heads)")
    add("--head-dim", type=int, default=64, help="(%(default)s)")
    add("--dtype", choices=tuple(TOLERANCE), default="float32", help="(%(default)s)")
    add("--rounds", type=int, default=7, help="(%(default)s)")
    add("--slot", type=int, help=f"tokens of a ring slot ({SLOTS_PER_RANK} slots per rank)")
    add("--fusion", type=int, default=4, help="slots fused into a kernel call at most (%(default)s)")
    add("--exchange", nargs="+", choices=("ring", "allgather"), default=["ring"], help="of our plans (ring)")
    add(
        "--peers", nargs="*", choices=peers.NAMES, default=list(peers.NAMES), help="other systems to compare with (all)"
    )
    add(
        "--uneven",
        action="store_true",
        help="3 ranks on 2 cores: the plan for 1 : 0.5 : 0.5 against the even one",
    )
    add("--documents", type=int, metavar="MEAN", help="pack documents of this mean length")
    add("--as-drawn", action="store_true", help="leave the documents in the order drawn")
    add("--window", type=int, help="attend to the latest tokens only")
    add("--json", type=Path, metavar="PATH", help="write all numbers there")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or (3 if options.uneven else 2)
    options.kv_heads = options.kv_heads or options.heads
    options.cores = options.cores or 2
    try:
        return options, *contest_of(options)
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> None:
    options, contest, absent = parse(arguments)
    with contextlib.closing(Pool(options.ranks, timeout=3600.0)) as pool:
        by_rank = pool.run(run, contest)
    times, errors = combine(contest, by_rank), by_rank[0]["errors"]
    found = report(contest, times, errors, absent)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        data = {
            "options": settings,
            "versions": versions,
            "errors": errors,
            "absent": absent,
            "seconds": times,
            **found,
        }
        options.json.write_text(json.dumps(data | found, indent=1) + "\n")


if __name__ == "__main__":
    main()

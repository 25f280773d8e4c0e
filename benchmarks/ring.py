"""The ring's measured ticks against its event simulation, on CPU ranks over gloo.

    python -m benchmarks.ring                            # three ranks of speed 1 : 0.5 : 0.5 with 12, 6 and 6 slots
    python -m benchmarks.ring --slots 4 4 --backward

Ranks are pinned to cores, one thread each; those beyond the cores share the last one. Every rank notes when each block
of slots starts and ends and how long it waits for transfers. What a rank spends on its own slots and on a tick, waiting
apart, and what a slot takes between two idle ranks, goes into `hexiseq.simulate`; printed is when blocks then start and
end there, and when they did. Both clocks start when the first rank does. Times are medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.ranks import core_of, cores, pin, ring_plan, slot_for, tensors
from hexiseq.attention import attend, close_all, exchange, op
from hexiseq.plan import Plan
from hexiseq.simulate import Edge, RingSimulation, RingTimes, ring_messages, simulate_ring
from hexiseq.testing import Pool


@dataclass
class Pass:
    """One pass of one rank, in seconds of the machine's monotonic clock: blocks with their first tick and ticks."""

    begin: float
    blocks: list[tuple[int, int, float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    end: float = 0.0

    def costs(self) -> list[float]:
        """Seconds of each block, from the end of the one before to its own, without what was waited."""
        found, before = [], self.begin
        for *_, end in self.blocks:
            waited = sum(b - a for a, b in self.waits if before <= a < end)
            found.append(end - before - waited)
            before = end
        return found


def run(
    plan: Plan, dim: int, backward: bool, rounds: int, cores: Sequence[int]
) -> tuple[list[Pass], dict[Edge, float]]:
    """The passes of this rank, and what a slot takes on each link that it receives on."""
    rank = dist.get_rank()
    pin(core_of(rank, cores))
    positions = torch.from_numpy(plan.shard(rank).positions())
    whole = tensors(plan.seq_len, plan.num_heads, plan.num_kv_heads, dim, getattr(torch, plan.dtype))
    *inputs, dout = (t[:, positions].contiguous() for t in whole)
    for t in inputs:
        t.requires_grad_()
    passes = []
    for _ in range(rounds + 1):  # the first makes whatever is made at first use
        out = attend(*inputs, plan=plan) if backward else None
        dist.barrier()
        with _noting() as made:
            if out is None:
                attend(*inputs, plan=plan)
            else:
                torch.autograd.grad(out, inputs, dout)
            made.end = time.perf_counter()
        passes.append(made)
    links = _links(plan, dim, backward)
    close_all()
    return passes[1:], links


@contextlib.contextmanager
def _noting() -> Iterator[Pass]:
    """Note the blocks and waits of the attention call made inside."""
    walk, wait, made = op.walk_kv, exchange.Mailbox._wait, Pass(time.perf_counter())

    def noted_walk(*args: Any) -> Iterator[Any]:
        for block, kv in walk(*args):
            start = time.perf_counter()
            yield block, kv
            made.blocks.append((block.first, len(block.ticks), start, time.perf_counter()))

    def noted_wait(*args: Any) -> None:
        start = time.perf_counter()
        wait(*args)
        made.waits.append((start, time.perf_counter()))

    with mock.patch.object(op, "walk_kv", noted_walk), mock.patch.object(exchange.Mailbox, "_wait", noted_wait):
        yield made


def _links(plan: Plan, dim: int, backward: bool) -> dict[Edge, float]:
    """Seconds of a whole slot's KV from each sender to this rank, both idle and one link at a time."""
    rank, found = dist.get_rank(), {}
    buffer = torch.zeros(plan.slot, 2, plan.num_kv_heads, dim, dtype=getattr(torch, plan.dtype))
    for edge in sorted({(m.sender, m.receiver) for m in ring_messages(plan, backward=backward)}):
        taken = []
        for _ in range(7):
            dist.barrier()
            start = time.perf_counter()
            if rank == edge[0]:
                dist.send(buffer, edge[1])
            elif rank == edge[1]:
                dist.recv(buffer, edge[0])
            taken.append(time.perf_counter() - start)
        if rank == edge[1]:
            found[edge] = statistics.median(taken)
    dist.barrier()
    return found


def times_of(
    plan: Plan, by_rank: Sequence[list[Pass]], links: dict[tuple[int, int], float], backward: bool
) -> RingTimes:
    """What the simulation is given: medians over rounds."""
    own, tick = [], []
    for passes in by_rank:
        costs = np.median([made.costs() for made in passes], axis=0)
        ticks = sum(count for _, count, *_ in passes[0].blocks[1:])
        own.append(float(costs[0]))
        tick.append(float(costs[1:].sum() / ticks) if ticks else 0.0)
    wide = torch.promote_types(getattr(torch, plan.dtype), torch.float32).itemsize
    scale = wide / getattr(torch, plan.dtype).itemsize  # gradients travel unrounded
    return RingTimes(own, tick, links, {edge: scale * s for edge, s in links.items()} if backward else None)


def report(by_rank: Sequence[list[Pass]], times: RingTimes, simulated: RingSimulation) -> dict[str, Any]:
    """Print what was measured beside what was simulated; returns it as plain containers."""
    zeros = [min(passes[i].begin for passes in by_rank) for i in range(len(by_rank[0]))]
    found: dict[str, Any] = {"blocks": [], "ranks": []}
    print("\nmilliseconds   own call      per tick")
    for rank, (own, tick) in enumerate(zip(times.own_seconds, times.tick_seconds, strict=True)):
        print(f"rank {rank:<8} {1e3 * own:>9.2f} {1e3 * tick:>13.3f}")
    print("a slot between ranks: " + ", ".join(f"{a} to {b} {1e3 * s:.3f}" for (a, b), s in times.kv_seconds.items()))
    print("\nrank  ticks     measured start       end    simulated start       end    end, measured / simulated")
    for rank, (passes, span) in enumerate(zip(by_rank, simulated.ranks, strict=True)):
        for index, block in enumerate(span.blocks):
            start, end = (
                statistics.median(made.blocks[index][side] - zero for made, zero in zip(passes, zeros, strict=True))
                for side in (2, 3)
            )
            found["blocks"].append([rank, block.first, block.ticks, start, end, block.start, block.end])
            ticks = f"{block.first}-{block.first + block.ticks - 1}"
            print(
                f"{rank:<5} {ticks:<9} {1e3 * start:>14.2f} {1e3 * end:>9.2f} {1e3 * block.start:>18.2f} "
                f"{1e3 * block.end:>9.2f} {end / block.end if block.end else 1.0:>28.3f}"
            )
    print("\nrank     waited: measured  simulated      done: measured  simulated   ratio")
    for rank, (passes, span) in enumerate(zip(by_rank, simulated.ranks, strict=True)):
        waited = statistics.median(sum(b - a for a, b in made.waits) for made in passes)
        done = statistics.median(made.end - zero for made, zero in zip(passes, zeros, strict=True))
        found["ranks"].append([rank, waited, span.stall_seconds, done, span.finished])
        print(
            f"{rank:<8} {1e3 * waited:>16.2f} {1e3 * span.stall_seconds:>10.2f} {1e3 * done:>19.2f} "
            f"{1e3 * span.finished:>10.2f} {done / span.finished:>7.3f}"
        )
    return found


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Plan, list[int]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--slots", type=int, nargs="+", default=[12, 6, 6], help="of each rank (12 6 6)")
    add("--cores", type=int, default=2, help="cores the ranks are pinned to (%(default)s)")
    add("--seq", type=int, default=8192, help="tokens of the sequence (%(default)s)")
    add("--heads", type=int, default=8, help="query heads (%(default)s)")
    add("--kv-heads", type=int, help="KV heads (as many as query heads)")
    add("--head-dim", type=int, default=64, help="(%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    add("--fusion", type=int, default=1, help="slots fused into a kernel call at most (%(default)s)")
    add("--rounds", type=int, default=7, help="(%(default)s)")
    add("--backward", action="store_true", help="backward rather than forward")
    add("--json", type=Path, metavar="PATH", help="write all numbers there")
    options = parser.parse_args(arguments)
    try:
        if len(options.slots) < 2 or min(options.slots) < 1:
            raise ValueError(f"--slots needs at least two ranks with a slot each, got {options.slots}")
        plan = ring_plan(
            options.slots, slot=slot_for(options.seq, sum(options.slots)), seq_len=options.seq, heads=options.heads,
            kv_heads=options.kv_heads or options.heads, fusion=options.fusion, exchange="ring", dtype=options.dtype,
        )  # fmt: skip
        return options, plan, cores(options.cores)
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> None:
    options, plan, pinned = parse(arguments)
    with contextlib.closing(Pool(plan.world_size, timeout=3600.0)) as pool:
        results = pool.run(run, plan, options.head_dim, options.backward, options.rounds, pinned)
    by_rank = [passes for passes, _ in results]
    links = {edge: seconds for _, found in results for edge, seconds in found.items()}
    times = times_of(plan, by_rank, links, options.backward)
    slots, direction = ", ".join(map(str, options.slots)), "backward" if options.backward else "forward"
    print(
        f"{plan.world_size} ranks on {len(pinned)} cores with {slots} slots of {plan.slot}, {plan.seq_len} tokens, "
        f"{plan.num_heads} query and {plan.num_kv_heads} KV heads of {options.head_dim}, {plan.dtype}, "
        f"fusion {plan.fusion}, {direction}, {options.rounds} rounds"
    )
    found = report(by_rank, times, simulate_ring(plan, times))
    if options.json:
        options.json.write_text(json.dumps({"slot": plan.slot, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

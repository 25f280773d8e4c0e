"""How long the collectives of parameters take on gloo, against once around the circle of ranks at the links' rate.

    python scripts/slow_links.py 0.02 0.02 -- python -m benchmarks.collectives 0.02
    python scripts/slow_links.py 0.02 0.02 0.02 -- python -m benchmarks.collectives 0.02

Rank 0 prints a line for each: its median seconds over those of the circle, on which every rank passes on all parts but
one; and what it keeps of its own at the most, over the bytes of the whole. A transfer to the next rank, receives posted
first, says what the links themselves reach.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.probe import map_blocks_from, status_bytes

WHOLE_BYTES, REPEATS = 12_000_000, 5


def median_seconds(collective: Callable[[], object]) -> float:
    """Median seconds of the slowest rank."""
    taken = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        collective()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        taken.append(seconds.item())
    return statistics.median(taken)


def peak_bytes(collective: Callable[[], object]) -> int:
    """What this rank holds at most meanwhile, beyond what it held before."""
    dist.barrier()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    collective()
    return status_bytes("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gb_per_s", type=float, help="of the slowest of the links between ranks")
    options = parser.parse_args()
    if options.gb_per_s <= 0:
        parser.error(f"gb_per_s must be positive, got {options.gb_per_s:g}")
    map_blocks_from(262_144)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 2:
        parser.error("one rank exchanges nothing; start at least two")
    part = torch.zeros(WHOLE_BYTES // 4 // ranks)
    whole, received = part.repeat(ranks), torch.empty_like(part)

    def around() -> None:
        ops = [dist.P2POp(dist.irecv, received, (rank - 1) % ranks), dist.P2POp(dist.isend, part, (rank + 1) % ranks)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    collectives: dict[str, tuple[Callable[[], object], int]] = {
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, part), ranks - 1),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole), ranks - 1),
        "to the next rank": (around, 1),
    }
    for name, (collective, parts) in collectives.items():
        circle = parts * part.nbytes / (options.gb_per_s * 1e9)
        ratio, kept = median_seconds(collective) / circle, peak_bytes(collective) / whole.nbytes
        if rank == 0:
            print(f"{ranks} ranks, {name}: {ratio:.2f} x the circle's {circle:.3f} s; keeps {kept:.2f} x the whole",
                  flush=True)  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

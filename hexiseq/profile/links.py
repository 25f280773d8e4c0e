"""What links between ranks carry: point to point, both ways at one time, and all-to-all, within nodes and between them,
over the backend the job uses. Collective: all ranks call it at one time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hexiseq.profile.rates import quantile

SIZES = {"cpu": (4_096, 65_536, 1_048_576, 4_194_304), "cuda": (4_096, 262_144, 4_194_304, 67_108_864)}  # bytes
MOST_PAIRS = 3  # within a node
# A sample is of as many exchanges as take so long. On CPUs it is of one, and there are more samples: who waits for whom
# to get a core is chance, which a few long ones meet more or less of, while the tenth of many short ones is steady.
SAMPLE_SECONDS = {"cpu": 0.0, "cuda": 0.02}
LOW = {"cpu": 0.1, "cuda": 0.0}  # the part of the samples that are faster than what counts
MOST_REPEATS = 50
MOST_ROUNDS = {"cpu": 400, "cuda": 40}
LEAST_ROUNDS = 3

Sets = list[list[int]]


def pair_rounds(nodes: Sequence[str]) -> list[tuple[str, Sets]]:
    """Pairs of ranks that are measured at one time, each rank in one of them at most, and whether they span nodes.

    Args:
        nodes: of every rank.

    Returns:
        ``within`` or ``between``, and the pairs. Nodes do not share their inner links, so all are measured at once;
        between nodes, neighbours in a circle are.
    """
    members = _members(nodes)
    within: list[Sets] = [[] for _ in range(MOST_PAIRS)]
    for ranks in members:
        for i, pair in enumerate(itertools.islice(itertools.combinations(ranks, 2), MOST_PAIRS)):
            within[i].append(list(pair))
    heads = [ranks[0] for ranks in members]
    edges = [[a, b] for a, b in itertools.pairwise(heads)] + ([[heads[-1], heads[0]]] if len(heads) > 2 else [])
    # Edges of a circle in turns: even ones, odd ones, and the last where it meets the first.
    between: list[Sets] = [edges[0 : len(edges) - len(edges) % 2 : 2], edges[1::2]] if len(edges) > 1 else [edges]
    if len(edges) > 1 and len(edges) % 2:
        between.append([edges[-1]])
    return [("within", pairs) for pairs in within if pairs] + [("between", pairs) for pairs in between if pairs]


def exchange_sets(nodes: Sequence[str]) -> list[tuple[str, Sets]]:
    """Ranks that exchange all to all, as `pair_rounds`: those of each node, and those of one place in their nodes."""
    members = _members(nodes)
    found = []
    if any(len(ranks) > 1 for ranks in members):
        found.append(("within", [ranks for ranks in members if len(ranks) > 1]))
    if len(members) > 1:
        places = range(min(len(ranks) for ranks in members))
        found.append(("between", [[ranks[place] for ranks in members] for place in places]))
    return found


def measure_links(nodes: Sequence[str], device: torch.device, seconds: float, timeout: timedelta) -> dict[str, Any]:
    """Time transfers for about `seconds`.

    Args:
        nodes: of every rank.

    Returns:
        ``links``: for each link this rank took part in, ``kind`` (``p2p`` or ``all_to_all``), ``reach``, ``ranks``,
        ``bytes`` that a rank sends in one exchange, by size, and ``seconds`` of it.
    """
    rank = dist.get_rank()
    work: list[tuple[str, str, Sets, Any]] = [("p2p", reach, pairs, None) for reach, pairs in pair_rounds(nodes)]
    for reach, sets in exchange_sets(nodes):
        # Every rank makes every group, in the same order.
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in sets]
        work.append(("all_to_all", reach, sets, groups))
    if not work:
        return {"links": []}

    tasks, mine = [], []
    for kind, reach, sets, groups in work:
        own = next((i for i, ranks in enumerate(sets) if rank in ranks), None)
        for size in SIZES[device.type]:
            run = None
            if own is not None:
                ranks = sets[own]
                run = _pair(ranks, size, device) if kind == "p2p" else _all(groups[own], len(ranks), size, device)
            tasks.append(run)
        mine.append(None if own is None else (kind, reach, sets[own]))

    repeats = []
    for run in tasks:
        took = _timed(run, 1, device)
        took = _timed(run, 1, device)
        repeats.append(max(1, min(MOST_REPEATS, int(SAMPLE_SECONDS[device.type] / _largest(took)))))
    samples: list[list[float]] = [[] for _ in tasks]
    start = time.perf_counter()
    for turn in range(MOST_ROUNDS[device.type]):
        for i, run in enumerate(tasks):
            samples[i].append(_timed(run, repeats[i], device) / repeats[i])
        if turn + 1 >= LEAST_ROUNDS and _largest(time.perf_counter() - start) > seconds:
            break

    found, sizes = [], SIZES[device.type]
    for i, link in enumerate(mine):
        if link is None:
            continue
        kind, reach, ranks = link
        share = 1.0 if kind == "p2p" else (len(ranks) - 1) / len(ranks)  # a rank's own part stays where it is
        times = [quantile(samples[i * len(sizes) + j], LOW[device.type]) for j in range(len(sizes))]
        found.append({"kind": kind, "reach": reach, "ranks": ranks, "bytes": [share * _whole(size, ranks, kind) for size
                                                                              in sizes], "seconds": times})  # fmt: skip
    return {"links": found}


def _members(nodes: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return list(found.values())


def _whole(size: int, ranks: Sequence[int], kind: str) -> int:
    """Bytes of a message; all-to-all takes equal parts."""
    return size if kind == "p2p" else max(1, size // len(ranks)) * len(ranks)


def _pair(ranks: Sequence[int], size: int, device: torch.device) -> Any:
    (peer,) = (other for other in ranks if other != dist.get_rank())
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return run


def _all(group: Any, ranks: int, size: int, device: torch.device) -> Any:
    sent = torch.zeros(max(1, size // ranks) * ranks, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _timed(run: Any, repeats: int, device: torch.device) -> float:
    """Seconds of `repeats` exchanges; all ranks start together, those without one wait."""
    dist.all_reduce(torch.zeros(1))
    if run is None:
        return 0.0
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _largest(value: float) -> float:
    """Over all ranks, so that all of them decide alike."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return max(float(total), 1e-7)

"""Ways to divide a job's devices into replicas, and its sequences over them.

All replicas run the same number of micro-steps; a stronger one takes more sequences inside each. Replicas on devices
and nodes alike are searched once, so that a division of thousands of devices is as cheap as one of its replicas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from hexiseq import cost
from hexiseq.schedule.estimate import Alike, Job

LARGEST = 512  # ranks of a replica that is tried where smaller ones are possible
MOST_NUMBERS = 6  # numbers of replicas that are tried


def divisions(job: Job) -> Iterator[tuple[Alike, ...]]:
    """Divisions worth a try: a part of each kind of node or of device for every replica, or one kind of node each."""
    seen = set()
    for number in replica_numbers(len(job.places), job.workload.sequences):
        for replicas in (_mixed(job, number), _shared(job, number), _by_kind(job, number)):
            key = tuple(sorted(ranks.tobytes() for ranks in replicas))
            if len(replicas) == number and key not in seen:
                seen.add(key)
                yield _with_sequences(job, replicas)


def replica_numbers(ranks: int, sequences: int, *, even: bool = False) -> list[int]:
    """Numbers of replicas, each with a rank and a sequence at least: powers of two, and divisors of the sequences.

    Args:
        even: only those that divide both ranks and sequences.
    """
    most = min(ranks, sequences)
    if even:
        common = math.gcd(ranks, sequences)
        found = [number for number in range(1, common + 1) if common % number == 0]
    else:
        divisors = (number for number in range(1, most + 1) if sequences % number == 0)
        found = sorted({1, most, *(2**i for i in range(most.bit_length()) if 2**i <= most), *divisors})
    small = [number for number in found if ranks <= LARGEST * number] or found[-1:]
    if len(small) > MOST_NUMBERS:  # as far apart from one another as they come
        picked = np.linspace(0, len(small) - 1, MOST_NUMBERS).round().astype(int)
        small = [small[i] for i in picked.tolist()]
    return small


def _mixed(job: Job, number: int) -> list[np.ndarray]:
    """Every replica its part of every kind of node, whole nodes if there are enough; else parts of nodes."""
    kinds = job.nodes
    nodes = sum(map(len, kinds))
    if number > nodes:
        return _inside(job, kinds, number)
    replicas: list[list[np.ndarray]] = [[] for _ in range(number)]
    for turn, kind in enumerate(kinds):
        for r in range(number):
            # Kinds start their rounding elsewhere, so that no replica gets the odd node of them all.
            start, end = (((r + i) * len(kind) + turn * number // len(kinds)) // number for i in (0, 1))
            replicas[r] += kind[start:end]
    return [np.sort(np.concatenate(members)) for members in replicas if members]


def _shared(job: Job, number: int) -> list[np.ndarray]:
    """Every replica its part of every kind of device, where that takes parts of nodes."""
    if number <= min(map(len, job.nodes)):
        return []
    order = np.lexsort((job.wires.node, job.wires.seat))
    kinds = np.split(order, np.cumsum(np.bincount(job.wires.seat[order]))[:-1])
    kinds = [ranks for ranks in kinds if len(ranks)]
    if number > min(map(len, kinds)):
        return []
    parts = [np.array_split(ranks, number) for ranks in kinds]
    return [np.sort(np.concatenate(members)) for members in zip(*parts, strict=True)]


def _inside(job: Job, kinds: list[list[np.ndarray]], number: int) -> list[np.ndarray]:
    """Every node cut into replicas, larger nodes into more, with devices of each type in turn."""
    nodes = [ranks for kind in kinds for ranks in kind]
    parts = [1] * len(nodes)
    for _ in range(number - len(nodes)):
        parts[max(range(len(nodes)), key=lambda i: (len(nodes[i]) / parts[i], -i))] += 1
    found = []
    for ranks, count in zip(nodes, parts, strict=True):
        by_type = ranks[np.lexsort((ranks, job.device[ranks]))]
        found += [np.sort(by_type[i::count]) for i in range(count)]
    return [ranks for ranks in found if len(ranks)]


def _by_kind(job: Job, number: int) -> list[np.ndarray]:
    """Replicas of one kind of node each, kinds with more compute in more replicas."""
    kinds = job.nodes
    if len(kinds) == 1 or number < len(kinds) or number > sum(map(len, kinds)):
        return []
    one = dataclasses.replace(job.workload, sequences=1)
    strength = [1 / cost.compute_bound(job.wires.devices.subset(np.concatenate(kind)), one) for kind in kinds]
    counts = [1] * len(kinds)
    for _ in range(number - len(kinds)):
        weakest = [s / c if c < len(kind) else 0.0 for s, c, kind in zip(strength, counts, kinds, strict=True)]
        counts[max(range(len(kinds)), key=lambda i: (weakest[i], -i))] += 1
    found = []
    for kind, count in zip(kinds, counts, strict=True):
        for r in range(count):
            found.append(np.sort(np.concatenate(kind[r * len(kind) // count : (r + 1) * len(kind) // count])))
    return found


def _with_sequences(job: Job, replicas: Sequence[np.ndarray]) -> tuple[Alike, ...]:
    """Sequences one by one to the replica that would finish first, alike replicas together."""
    one = dataclasses.replace(job.workload, sequences=1)
    seconds: dict[Hashable, float] = {}
    signatures: list[Hashable] = [None] * len(replicas)
    widths = np.array([len(ranks) for ranks in replicas])
    for width in np.unique(widths).tolist():
        same = np.flatnonzero(widths == width).tolist()
        for i, signature in zip(same, job.wires.signatures(np.array([replicas[i] for i in same])), strict=True):
            signatures[i] = signature
    for signature, ranks in zip(signatures, replicas, strict=True):
        if signature not in seconds:
            seconds[signature] = cost.compute_bound(job.wires.devices.subset(ranks), one)
    each = np.array([seconds[signature] for signature in signatures])
    level = max(0.0, (job.workload.sequences - len(replicas)) / float((1 / each).sum()))
    counts = np.maximum(1, np.floor(level / each)).astype(int)
    while counts.sum() > job.workload.sequences:
        counts[int(np.where(counts > 1, counts * each, -np.inf).argmax())] -= 1
    for _ in range(job.workload.sequences - int(counts.sum())):
        counts[int(((counts + 1) * each).argmin())] += 1
    found: dict[tuple, list[np.ndarray]] = {}
    for signature, ranks, count in zip(signatures, replicas, counts.tolist(), strict=True):
        found.setdefault((signature, count), []).append(ranks)
    return tuple(Alike(np.array(rows), count) for (_, count), rows in found.items())

"""The split inside one group, exact: integer heads of its members by a small integer program, and integer tokens.

The program is over what can still win, not over all there is: a greedy answer bounds the ranges of heads that are worth
a variable. Members that are all alike and cut evenly need no program. Answers are cached, since the same group comes up
in many groupings.
"""

from __future__ import annotations

import functools
import heapq
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import mip

from hexiseq.plan import fragments

NANOSECONDS = 1e9  # CBC is two orders of magnitude slower on the same program in seconds
PIECE = 5e-4  # of the group's ideal time: what one kernel call or KV copy less is worth, beyond its launch
MOST_NODES = 2000


Answer = TypeVar("Answer")


def or_none(program: Callable[..., Answer]) -> Callable[..., Answer | None]:
    """A function that builds, solves and reads a program: where the solver fails, None and a warning.

    There are rules of thumb in place of every program.
    """

    @functools.wraps(program)
    def run(*args: Any) -> Answer | None:
        try:
            return program(*args)
        except Exception as error:  # whatever a native solver, its binding or its absence leads to
            warnings.warn(f"the integer program's solver failed ({type(error).__name__}: {error}); the plan is made by "
                          "rounding and may be slower", stacklevel=2)  # fmt: skip
            return None

    return run


def integer_program() -> mip.Model:
    """An empty minimisation in nanoseconds that repeats bit for bit."""
    program = mip.Model(sense=mip.MINIMIZE, solver_name=mip.CBC)
    program.verbose, program.threads, program.seed = 0, 1, 1
    program.preprocess = program.cuts = 0  # cost more than they save on programs this small
    program.max_mip_gap, program.max_mip_gap_abs = 1e-6, 1.0
    return program


def solved(program: mip.Model) -> bool:
    """Run the solver; whether it found anything."""
    program.optimize(max_nodes=MOST_NODES)
    return bool(program.num_solutions)


# Heads ---------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """Heads ``first`` to ``last`` on one member: its finish time, and its fragments plus the KV heads it needs."""

    first: int
    last: int
    seconds: float
    pieces: int


@functools.lru_cache(maxsize=4096)
def cut_heads(
    total: int, kv_heads: int, seconds: tuple[float, ...], launch: tuple[float, ...], limits: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Heads of each member, contiguous in member order: least finish time, and `PIECE` per fragment and KV copy.

    Args:
        seconds: of one head on each member.
        launch: of one fragment on each member.
        limits: most heads of each member; when they are short the answer is None.
    """
    width, ratio = len(seconds), total // kv_heads
    if sum(limits) < total:
        return None
    if len(set(seconds)) == 1 and total % (width * ratio) == 0 and min(limits) * width >= total:
        return (total // width,) * width

    def price(first: int, last: int, member: int) -> Range:
        calls = len(fragments((first, last), ratio))
        copies = -(-last // ratio) - first // ratio if last > first else 0
        time = (last - first) * seconds[member] + calls * launch[member]
        return Range(first, last, time, calls + copies)

    dealt, start = [], 0
    for member, size in enumerate(_deal(total, seconds, launch, limits)):
        dealt.append(price(start, start + size, member))
        start += size
    piece = PIECE * total / sum(1 / one for one in seconds)
    least = max((r.last - r.first) * seconds[m] + launch[m] for m, r in enumerate(dealt) if r.last > r.first)
    # No cut has fewer pieces than every KV head once, in one fragment; slower than this a range cannot win.
    slowest = max(r.seconds for r in dealt) + piece * (sum(r.pieces for r in dealt) - kv_heads - 1)
    most = [min(limit, int(slowest / one)) for limit, one in zip(limits, seconds, strict=True)]
    options, starts = [], {0}
    for member in range(width):
        rest = sum(most[member + 1 :])  # the members after this one can take no more
        ends = [(a, b) for a in sorted(starts) for b in range(max(a, total - rest), min(total, a + most[member]) + 1)]
        priced = [r for r in (price(a, b, member) for a, b in ends) if r.seconds <= slowest * (1 + 1e-9)]
        options.append(priced)
        starts = {r.last for r in priced}
    if all(len(ranges) == 1 for ranges in options):
        return tuple(r.last - r.first for r in dealt)  # nothing else is worth a look
    cut = _best_path(options, least, piece, total) or dealt

    def value(ranges: list[Range]) -> float:
        return max(r.seconds for r in ranges) + piece * sum(r.pieces for r in ranges)

    return tuple(r.last - r.first for r in min(cut, dealt, key=value))


def deal_heads(
    total: int, seconds: tuple[float, ...], launch: tuple[float, ...], limits: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The same by a greedy rule that takes no notice of fragments and KV copies: for estimates."""
    return None if sum(limits) < total else tuple(_deal(total, seconds, launch, limits))


def _deal(total: int, seconds: Sequence[float], launch: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Heads one by one to the member that would finish first: the least finish time if no range had two fragments."""
    if len(set(seconds)) == len(set(launch)) == 1 and min(limits) * len(seconds) >= total + len(seconds):
        each, more = divmod(total, len(seconds))  # in turn
        return [each + (m < more) for m in range(len(seconds))]
    sizes = [0] * len(seconds)
    # A heap of who would finish first; ties go to the first member, as in a search from the left.
    waiting = [(seconds[m] + launch[m], m) for m, limit in enumerate(limits) if limit > 0]
    heapq.heapify(waiting)
    for _ in range(total):
        _, m = heapq.heappop(waiting)
        sizes[m] += 1
        if sizes[m] < limits[m]:
            heapq.heappush(waiting, ((sizes[m] + 1) * seconds[m] + launch[m], m))
    return sizes


@or_none
def _best_path(options: list[list[Range]], least: float, piece: float, total: int) -> list[Range] | None:
    """One range per member, each starting where the last ended: least ``finish + piece * pieces``.

    No cut finishes before `least`. Counting only the time beyond it makes the relaxation tight: half a long range and
    half a short one cost half of the excess, not nothing.
    """
    program = integer_program()
    excess = program.add_var(name="excess")
    arriving: dict[int, list[mip.Var]] = {}
    taken, pieces = [], []
    for member, ranges in enumerate(options):
        chosen = [program.add_var(var_type=mip.BINARY) for _ in ranges]
        leaving: dict[int, list[mip.Var]] = {}
        ending: dict[int, list[mip.Var]] = {}
        for r, x in zip(ranges, chosen, strict=True):
            leaving.setdefault(r.first, []).append(x)
            ending.setdefault(r.last, []).append(x)
        if member == 0:
            program.add_constr(mip.xsum(chosen) == 1)
        else:
            for boundary in sorted(arriving.keys() | leaving.keys()):
                program.add_constr(
                    mip.xsum(arriving.get(boundary, [])) == mip.xsum(leaving.get(boundary, []))
                )  # fmt: skip
        beyond = [max(0.0, r.seconds - least) * NANOSECONDS * x for r, x in zip(ranges, chosen, strict=True)]
        program.add_constr(excess >= mip.xsum(beyond))
        pieces += [r.pieces * x for r, x in zip(ranges, chosen, strict=True)]
        taken.append(chosen)
        arriving = ending
    program.objective = mip.minimize(excess + piece * NANOSECONDS * mip.xsum(pieces))
    if not solved(program):
        return None
    path = [r for ranges, chosen in zip(options, taken, strict=True)
            for r, x in zip(ranges, chosen, strict=True) if round(x.x)]  # fmt: skip
    # Rounding a solver's floats must not lose a head.
    joined = [0, *(r.last for r in path)] == [*(r.first for r in path), total]
    return path if joined and len(path) == len(options) else None


# Tokens ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def share_tokens(total: int, seconds: tuple[float, ...], caps: tuple[int, ...]) -> tuple[int, ...] | None:
    """Tokens of each member: least largest ``tokens * seconds``, none above its cap; None when caps are short.

    Exact without a program: up to the time by which all hold as many in fractions, then one by one to the member that
    would finish first.
    """
    if sum(caps) < total:
        return None
    left, rate, level = float(total), sum(1 / one for one in seconds), 0.0
    for full, m in sorted((cap * one, m) for m, (cap, one) in enumerate(zip(caps, seconds, strict=True))):
        if rate <= 0 or (level := left / rate) <= full:
            break
        left, rate = left - caps[m], rate - 1 / seconds[m]
    level *= 1 - 1e-12
    sizes = [min(cap, int(level / one)) for one, cap in zip(seconds, caps, strict=True)]
    waiting = [
        ((size + 1) * one, m) for m, (size, one) in enumerate(zip(sizes, seconds, strict=True)) if size < caps[m]
    ]
    heapq.heapify(waiting)
    for _ in range(total - sum(sizes)):
        _, m = heapq.heappop(waiting)
        sizes[m] += 1
        if sizes[m] < caps[m]:
            heapq.heappush(waiting, ((sizes[m] + 1) * seconds[m], m))
    return tuple(sizes)

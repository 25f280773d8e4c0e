"""The last stage: small changes of the plan found, kept where the cost model says that they are faster.

Heads, slots, fusion and the order of the groups are changed one at a time; the tokens inside groups follow, as many as
fit memory. It costs a judgement per change, and is for replicas of few ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hexiseq.cost import Layout
from hexiseq.plan import fits_slots
from hexiseq.schedule.even import lay_out
from hexiseq.schedule.local import share_tokens
from hexiseq.schedule.search import MOST_FUSED, Search, slot_totals, widest_fusion
from hexiseq.schedule.shares import rank_totals, round_slots

MOST_RANKS = 16  # of a replica that is polished
MOST_JUDGED = 1200  # changes, divided by ranks
MOST_TOTALS = 12  # other numbers of slots
FUSIONS = (1, 2, 4, 8, 16, 32, MOST_FUSED)  # slots of a call; and one more than now
MOST_ORDERED = 4  # groups that are tried in every order; of more, neighbours change places


@dataclass(frozen=True)
class Outline:
    """All of a layout but the tokens inside its groups.

    Attributes:
        groups: of each, outermost first, its slots and its members: rank and query heads.
        slot, fusion, exchange: as of the layout.
    """

    groups: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    slot: int
    fusion: int
    exchange: str

    @property
    def slots(self) -> list[int]:
        return [slots for slots, _ in self.groups]


def polish(search: Search, layout: Layout) -> Layout:
    """The layout after all changes that make it faster, taken as they come and repeated while they help."""
    best = Outline(
        tuple((slots, tuple((rank, heads) for rank, _, heads in members)) for slots, members in layout.counts),
        layout.slot, layout.fusion, layout.exchange,
    )  # fmt: skip
    if len(search.places) > MOST_RANKS:
        return layout
    seconds = search.job.judge([search.kind(layout)]).step_seconds
    left, seen = MOST_JUDGED // len(search.places), {best}
    moves = list(_moves(search, best))
    waiting = len(moves)  # until all have been tried in vain
    for move in itertools.cycle(moves):
        if not waiting:
            break
        waiting -= 1
        while (other := move(best)) is not None and other not in seen:
            seen.add(other)
            if not left or search.options.late():
                return layout
            left -= 1
            found = _laid_out(search, other, seconds)
            if found is None:
                break
            (layout, seconds), best, waiting = found, other, len(moves)
    return layout


def _laid_out(search: Search, outline: Outline, below: float) -> tuple[Layout, float] | None:
    """An outline with the best tokens that fit, and its seconds, if these are fewer than `below`."""
    n = search.workload.seq_len
    short = sum(outline.slots) * outline.slot - n

    def built(caps: np.ndarray) -> Layout | None:
        counts = []
        for g, (slots, members) in enumerate(outline.groups):
            tokens, ranks = slots * outline.slot - (short if g == 0 else 0), [rank for rank, _ in members]
            most = np.clip(caps[ranks], 0, tokens).astype(int)
            sizes = share_tokens(tokens, tuple(search.linear[ranks].tolist()), tuple(most.tolist()))
            if sizes is None:
                return None
            counts.append((slots, [(r, size, h) for (r, h), size in zip(members, sizes, strict=True)]))
        return lay_out(search.workload, counts, outline.slot, outline.fusion, outline.exchange)

    # Memory only makes it slower.
    layout, limit = built(search.capacity), below * (1 - 1e-9)
    while layout is not None and (found := search.job.judge_below([search.kind(layout)], limit)) is not None:
        if found.step_seconds >= limit:
            break
        if search.over_gb(layout) <= 0:
            return layout, found.step_seconds
        room, alone = search.room(layout)
        fitting = built(room) if alone.max() <= 1 else None
        layout = fitting if fitting is not None and search.over_gb(fitting) <= 0 else None
    return None


Move = Callable[[Outline], "Outline | None"]


def _moves(search: Search, outline: Outline) -> Iterator[Move]:
    """Changes of one thing; None where an outline does not allow one."""
    count = len(outline.groups)
    if count > 1:
        yield from (functools.partial(_fused, fusion=fusion) for fusion in FUSIONS)
        yield lambda outline: _fused(outline, outline.fusion + 1)
        yield from (functools.partial(_ordered, order=order) for order in _orders(count))
        yield from (
            functools.partial(_slot_given, giver=a, taker=b) for a, b in itertools.permutations(range(count), 2)
        )
    widest = max(len(members) for _, members in outline.groups)
    for g, giver, taker in itertools.product(range(count), range(widest), range(widest)):
        if giver != taker:
            yield functools.partial(_head_given, g=g, giver=giver, taker=taker)
    if count > 1 and search.options.slot is None:
        for rank, whole in itertools.product(range(MOST_TOTALS), (False, True)):
            yield functools.partial(_recut, n=search.workload.seq_len, rank=rank, whole=whole)


def _changed(outline: Outline, groups: tuple, fusion: int, slot: int) -> Outline:
    most = widest_fusion([slots for slots, _ in groups])
    return dataclasses.replace(outline, groups=groups, slot=slot, fusion=max(1, min(fusion, most)))


def _fused(outline: Outline, fusion: int) -> Outline:
    return _changed(outline, outline.groups, fusion, outline.slot)


def _orders(count: int) -> Iterator[tuple[int, ...]]:
    """Orders of groups to try: all of few, else neighbours that change places."""
    if count <= MOST_ORDERED:
        yield from itertools.permutations(range(count))
    else:
        yield from ((*range(i), i + 1, i, *range(i + 2, count)) for i in range(count - 1))


def _ordered(outline: Outline, order: Sequence[int]) -> Outline:
    return _changed(outline, tuple(outline.groups[g] for g in order), outline.fusion, outline.slot)


def _slot_given(outline: Outline, giver: int, taker: int) -> Outline | None:
    if outline.groups[giver][0] < 2:
        return None
    more = {giver: -1, taker: 1}
    groups = tuple((slots + more.get(g, 0), members) for g, (slots, members) in enumerate(outline.groups))
    return _changed(outline, groups, outline.fusion, outline.slot)


def _head_given(outline: Outline, g: int, giver: int, taker: int) -> Outline | None:
    slots, members = outline.groups[g]
    if max(giver, taker) >= len(members) or not members[giver][1]:
        return None
    heads = tuple((r, h - (m == giver) + (m == taker)) for m, (r, h) in enumerate(members))
    groups = (*outline.groups[:g], (slots, heads), *outline.groups[g + 1 :])
    return _changed(outline, groups, outline.fusion, outline.slot)


def _recut(outline: Outline, n: int, rank: int, whole: bool) -> Outline | None:
    """Another number of slots, the `rank`-th best, in calls of as many tokens or as wide as they come."""
    tokens = tuple(slots * outline.slot for slots in outline.slots)
    totals = _ranked_totals(n, tokens)
    if rank >= len(totals):
        return None
    slot, shares = 2 * -(-n // (2 * totals[rank])), np.array(tokens, float)
    counts = round_slots(shares, np.full(len(tokens), totals[rank]), totals[rank], 1)
    if not fits_slots(n, slot, totals[rank]) or sum(counts) != totals[rank]:
        return None
    groups = tuple((count, members) for count, (_, members) in zip(counts, outline.groups, strict=True))
    return _changed(outline, groups, round((n if whole else outline.fusion * outline.slot) / slot), slot)


@functools.lru_cache(maxsize=64)
def _ranked_totals(n: int, tokens: tuple[int, ...]) -> list[int]:
    ranked = rank_totals([float(one) for one in tokens], [1] * len(tokens), slot_totals(n, len(tokens), 64), 1)
    return [total for _, total in ranked[:MOST_TOTALS]]

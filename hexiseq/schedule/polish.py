"""The last stage: small changes of the plan found, kept where the cost model says that they are faster.

Heads, slots, fusion and the order of the groups are changed one at a time; the tokens inside groups follow, as many as
fit memory. It costs a judgement per change, and is for replicas of few ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hexiseq.cost import Layout
from hexiseq.plan import fits_slots
from hexiseq.schedule.even import lay_out
from hexiseq.schedule.local import share_tokens
from hexiseq.schedule.search import Search, slot_totals, widest_fusion
from hexiseq.schedule.shares import rank_totals, round_slots

MOST_RANKS = 16  # of a replica that is polished
MOST_JUDGED = 9000  # changes, divided by the square of ranks: of many they cost more and change less
MOST_TOTALS = 12  # other numbers of slots
NEARLY = 0.98  # of the longest time: who takes so long finishes last, too
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
    """The layout after all changes that make it faster; the first that does is taken, and all are tried again."""
    best = Outline(
        tuple((slots, tuple((rank, heads) for rank, _, heads in members)) for slots, members in layout.counts),
        layout.slot, layout.fusion, layout.exchange,
    )  # fmt: skip
    if len(search.places) > MOST_RANKS:
        return layout
    seconds = search.job.judge([search.kind(layout)]).step_seconds
    left, seen, better = MOST_JUDGED // len(search.places) ** 2, {best}, True
    while better:
        better = False
        for other in _changes(search, best):
            if other in seen:
                continue
            seen.add(other)
            if not left or search.options.late():
                return layout
            left -= 1
            found = _laid_out(search, other, seconds)
            if found is not None:
                (layout, seconds), best, better = found, other, True
                break
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


def _changes(search: Search, outline: Outline) -> Iterator[Outline]:
    """Outlines that differ in one thing."""
    groups, n = outline.groups, search.workload.seq_len

    def changed(groups: tuple, fusion: int = outline.fusion, slot: int = outline.slot) -> Outline:
        most = widest_fusion([slots for slots, _ in groups])
        return dataclasses.replace(outline, groups=groups, slot=slot, fusion=max(1, min(fusion, most)))

    if len(groups) > 1:
        most = widest_fusion(outline.slots)
        for fusion in sorted({2**i for i in range(most.bit_length())} | {most, outline.fusion + 1} - {0}):
            yield changed(groups, fusion)
        orders = itertools.permutations(groups) if len(groups) <= MOST_ORDERED else (
            (*groups[:i], groups[i + 1], groups[i], *groups[i + 2 :]) for i in range(len(groups) - 1)
        )  # fmt: skip
        for order in orders:
            yield changed(order)
    attention, linear = _seconds(search, outline)
    moves: list[tuple[bool, tuple]] = []
    for giver, taker in itertools.permutations(range(len(groups)), 2):
        if groups[giver][0] > 1:
            more = {giver: -1, taker: 1}
            idle = max(attention[giver]) < NEARLY * max(map(max, attention)) and linear[giver] < NEARLY * max(linear)
            moves.append((idle, tuple((slots + more.get(g, 0), members) for g, (slots, members) in enumerate(groups))))
    for g, (slots, members) in enumerate(groups):
        for giver, taker in itertools.permutations(range(len(members)), 2):
            if members[giver][1] > 0:
                heads = tuple((r, h - (m == giver) + (m == taker)) for m, (r, h) in enumerate(members))
                idle = attention[g][giver] < NEARLY * max(map(max, attention))
                moves.append((idle, (*groups[:g], (slots, heads), *groups[g + 1 :])))
    # First what takes work from those that finish last.
    for _, moved in sorted(moves, key=lambda move: move[0]):
        yield changed(moved)
    if len(groups) > 1 and search.options.slot is None:
        shares = np.array([slots * outline.slot for slots in outline.slots], float)
        totals = slot_totals(n, len(groups), 64)
        ranked = rank_totals(shares.tolist(), [1] * len(groups), totals, 1)
        for _, total in ranked[:MOST_TOTALS]:
            slot = 2 * -(-n // (2 * total))
            counts = round_slots(shares, np.full(len(groups), total), total, 1)
            if not fits_slots(n, slot, total) or sum(counts) != total:
                continue
            cut = tuple((count, members) for count, (_, members) in zip(counts, groups, strict=True))
            for fused in (outline.fusion * outline.slot, n):
                yield changed(cut, round(fused / slot), slot)


def _seconds(search: Search, outline: Outline) -> tuple[list[list[float]], list[float]]:
    """Seconds of each member's attention, and of each group's linear work shared by speed."""
    rates = search.attention_in(len(outline.groups)).tolist()
    tokens = [slots * outline.slot for slots in outline.slots]
    attention = [[n * h * rates[r] for r, h in members] for n, (_, members) in zip(tokens, outline.groups, strict=True)]
    linear = [
        n / float((1 / search.linear[[r for r, _ in members]]).sum())
        for n, (_, members) in zip(tokens, outline.groups, strict=True)
    ]
    return attention, linear

"""How many tokens each group gets: fractions for the least step, then whole slots.

Groups that are alike are one *class*: nothing here grows with the number of devices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_PIECES = 100  # of how many tokens groups take by a time
TIMES, ROUNDS = 33, 8  # linear times compared at once, and how often, each time between the neighbours of the best


@dataclass(frozen=True)
class GroupClass:
    """Groups whose members are alike.

    Attributes:
        heads: query heads of each member.
        attention: seconds of a micro-step per token of the group, of its slowest member.
        merging: seconds of a micro-step that attention takes besides, however many tokens the group has.
        linear: of each member, seconds of a micro-step per token it holds.
        caps: the most tokens each member can hold.
    """

    heads: tuple[int, ...]
    attention: float
    merging: float
    linear: tuple[float, ...]
    caps: tuple[float, ...]


@dataclass(frozen=True)
class Shares:
    """Fractional tokens of a group of each class, and the slowest member's linear seconds."""

    tokens: np.ndarray
    linear_seconds: float


def share(classes: Sequence[GroupClass], counts: Sequence[int], total: int) -> Shares | None:
    """Fractional tokens for the least (slowest attention + slowest linear); None when they do not fit.

    For a linear time the least attention time grows by pieces, between which some group is balanced in itself: takes as
    long over all it can hold as attention may. So without caps the optimum is where one of them is.

    Args:
        counts: groups of each class.
    """
    number = np.array(counts, float)
    rates, merging = (np.array([getattr(c, name) for c in classes]) for name in ("attention", "merging"))
    seconds, caps, home = _members(classes)
    speeds = np.bincount(home, 1 / seconds)
    best: tuple[float, Shares] | None = None
    for ratio, first in sorted(set(zip((rates * speeds).round(15).tolist(), merging.round(15).tolist(), strict=True))):
        # Newton's method from below, for a sum of pieces that grow ever slower.
        linear = total / float(number @ speeds)
        for _ in range(MOST_PIECES):
            within, most = (ratio * linear + first - merging) / rates, linear * speeds
            tokens = np.maximum(0.0, np.minimum(within, most))
            lacking = total - float(number @ tokens)
            if lacking <= 1e-12 * total:
                break
            linear += lacking / float(number @ np.where(within < most, ratio / rates, speeds))
        time = linear + float((tokens * rates + merging).max())
        if best is None or time < best[0] * (1 - 1e-12):
            best = time, Shares(np.maximum(tokens, 1e-9), linear)
    assert best is not None
    shares = best[1]
    if (shares.linear_seconds <= caps * seconds).all() and (shares.tokens * rates > merging).all():
        return shares
    return _within_limits(total, number, rates, merging, seconds, caps, home)


def _within_limits(
    total: int, number: np.ndarray, rates: np.ndarray, merging: np.ndarray, seconds: np.ndarray, caps: np.ndarray,
    home: np.ndarray,
) -> Shares | None:  # fmt: skip
    """The same where some member is full before the others are done, or summing up gradients is most of some group's
    work. The sum is convex in the linear time, which is sought between ever nearer times."""
    if number @ np.bincount(home, caps) < total * (1 - 1e-12):
        return None
    member = np.eye(len(number))[home]

    def shared(linear: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Attention times, infinite where the tokens do not fit, and tokens by class, for some linear times."""
        most = np.minimum(caps, linear[:, None] / seconds) @ member
        # All classes' tokens at the attention times at which one of them is full: [times, classes, classes].
        full = np.append(most * rates + merging, np.full((len(linear), 1), merging.max()), axis=1)
        full = np.sort(np.maximum(full, merging.max()), axis=1)
        held = np.minimum(most[:, None], (full[:, :, None] - merging) / rates) @ number
        place = (held < total * (1 - 1e-12)).sum(1)
        fits, row = place < held.shape[1], np.arange(len(linear))
        last = np.minimum(place, held.shape[1] - 1)
        before = np.maximum(last - 1, 0)
        gained = held[row, last] - held[row, before]
        part = np.where(gained > 0, (total - held[row, before]) / np.where(gained > 0, gained, 1.0), 1.0)
        attention = full[row, before] + np.clip(part, 0.0, 1.0) * (full[row, last] - full[row, before])
        return np.where(fits, attention, np.inf), np.minimum(most, (attention[:, None] - merging) / rates)

    low, high = 0.0, min(float((caps * seconds).max()), total * float(seconds.max()))
    for _ in range(ROUNDS):
        times = np.linspace(low, high, TIMES)
        attention, tokens = shared(times)
        best = int((times + attention).argmin())
        low, high = times[max(best - 1, 0)], times[min(best + 1, TIMES - 1)]
    # Where summing up gradients takes longest of all, there is room for more tokens than there are.
    found = tokens[best] * min(1.0, total / float(number @ tokens[best]))
    return Shares(np.maximum(found, 1e-9), float(times[best]))


def _members(classes: Sequence[GroupClass]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Linear seconds and caps of all members of one group of each class, and their class."""
    seconds = np.array([s for c in classes for s in c.linear])
    caps = np.array([cap for c in classes for cap in c.caps])
    return seconds, caps, np.repeat(np.arange(len(classes)), [len(c.linear) for c in classes])


def rank_totals(
    shares: Sequence[float], counts: Sequence[int], totals: np.ndarray, least: np.ndarray | int
) -> list[tuple[float, int]]:
    """By how much whole slots make the last group finish later than fractions, for numbers of slots, best first.

    Within a thousandth fewer slots are better. Slots go one by one to the group that would finish first: with `total`
    of them, the last finish is the time by which all groups together have finished as many.

    Args:
        shares: tokens of a group of each class.
        least: slots every group gets at least, for each of `totals`.
    """
    if not len(totals):
        return []
    wanted, number = np.array(shares, float), np.array(counts)
    most, everything = int(totals.max()), float((wanted * counts).sum())
    # Only what can finish among the first `most` slots is of interest: a group has about its share of them.
    rows = int(most * float(wanted.max()) / everything) + 2
    finish = np.arange(1, rows + 1)[:, None] / wanted[None, :]
    order = np.argsort(finish, axis=None, kind="stable")
    done = np.cumsum(np.broadcast_to(number, finish.shape).ravel()[order])
    times = finish.ravel()[order]
    last = np.maximum(times[np.searchsorted(done, totals)], least / float(wanted.min()))
    scores = np.round(last * everything / totals, 3)
    order = np.lexsort((totals, scores))
    return list(zip(scores[order].tolist(), totals[order].tolist(), strict=True))


def round_slots(shares: np.ndarray, room: np.ndarray, total: int, least: int) -> list[int]:
    """Slots of each group: one by one to the group that would finish first, none above its room.

    Args:
        shares: tokens of each group.
        room: the most slots each can hold.
    """
    # All that finish well before the end are given at once.
    level = max(0.0, (total - len(shares)) / float(shares.sum()))
    counts = np.maximum(least, np.minimum(room, np.floor(level * shares))).astype(int)
    while (extra := int(counts.sum()) - total) > 0:
        late = np.where(counts > least, counts / shares, -np.inf)
        if math.isinf(late.max()):
            break
        counts[int(late.argmax())] -= min(1, extra)
    sizes, most, wanted = counts.tolist(), room.tolist(), shares.tolist()
    # A heap of who would finish first; ties go to the first group.
    waiting = [((size + 1) / wanted[g], g) for g, size in enumerate(sizes) if size < most[g]]
    heapq.heapify(waiting)
    for _ in range(total - sum(sizes)):
        if not waiting:
            sizes[0] += total - sum(sizes)  # nobody has room: whoever checks memory will say so
            break
        _, g = waiting[0]
        sizes[g] += 1
        if sizes[g] < most[g]:
            heapq.heapreplace(waiting, ((sizes[g] + 1) / wanted[g], g))
        else:
            heapq.heappop(waiting)
    return sizes


def best_slots(classes: Sequence[GroupClass], counts: Sequence[int], total: int, slot: int) -> tuple[int, ...] | None:
    """Slots of all groups of each class, for the least (slowest attention + slowest linear); None when they do not fit.

    Exact: each is the time of some class with some number of slots. For every such time of attention the least linear
    time with which all slots find a place is sought by bisection, for all of them at once.
    """
    assert total >= sum(counts), "fewer slots than groups"
    least = 2 if total >= 2 * sum(counts) else 1
    number = np.array(counts)
    times = [_slot_seconds(group, least, total, slot) for group in classes]
    if any(len(attention) == 0 for attention, _ in times):
        return None
    limits = [np.unique(np.concatenate(seconds)) for seconds in zip(*times, strict=True)]
    # Slots of a group of each class within each limit: [limits, classes].
    by_attention, by_linear = (
        np.stack([np.searchsorted(seconds[kind], limit, side="right") for seconds in times], axis=1) + least - 1
        for kind, limit in enumerate(limits)
    )

    def held(attention: np.ndarray, linear: np.ndarray) -> np.ndarray:
        most = np.minimum(by_attention[attention], by_linear[linear])
        return np.where((most >= least).all(1), most @ number, 0)

    everyone = np.arange(len(limits[0]))
    last = np.full(len(everyone), len(limits[1]) - 1)
    possible = everyone[held(everyone, last) >= total]
    if not len(possible):
        return None
    low, high = np.full(len(possible), -1), last[: len(possible)]
    while (high - low > 1).any():
        middle = (low + high + 1) // 2
        enough = held(possible, middle) >= total
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    best = int((limits[0][possible] + limits[1][high]).argmin())
    most = np.minimum(by_attention[possible[best]], by_linear[high[best]])
    sums = (most * number).tolist()
    # What is too many, classes that take longest have fewer of.
    extra = sum(sums) - total
    slowest = [-attention[n - least] - linear[n - least] for (attention, linear), n in zip(times, most, strict=True)]
    for i in np.argsort(slowest, kind="stable").tolist():
        fewer = min(extra, sums[i] - least * counts[i])
        sums[i], extra = sums[i] - fewer, extra - fewer
    return tuple(sums)


def _slot_seconds(group: GroupClass, least: int, most: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of attention and of linear work of a group with `least` to `most` slots, or as many as it can hold."""
    seconds, caps = np.array(group.linear), np.array(group.caps)
    slots = np.arange(least, min(most, int(caps.sum() / slot * (1 + 1e-12))) + 1)
    # Members fill up one after the other.
    full = np.append(0.0, np.sort(caps * seconds))
    tokens = np.minimum(caps, full[:, None] / seconds).sum(1)
    return group.attention * slot * slots + group.merging, np.interp(slot * slots, tokens, full)

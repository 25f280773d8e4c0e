"""How many tokens each group gets: fractions for the least step, then whole slots.

Groups that are alike are one *class*: nothing here grows with the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupClass:
    """Groups whose members are alike.

    Attributes:
        heads: query heads of each member.
        attention: seconds of a micro-step per token of the group, of its slowest member.
        linear: of each member, seconds of a micro-step per token it holds.
        caps: the most tokens each member can hold.
    """

    heads: tuple[int, ...]
    attention: float
    linear: tuple[float, ...]
    caps: tuple[float, ...]


@dataclass(frozen=True)
class Shares:
    """Fractional tokens of a group of each class, and the slowest member's linear seconds."""

    tokens: np.ndarray
    linear_seconds: float


def share(classes: Sequence[GroupClass], counts: Sequence[int], total: int) -> Shares | None:
    """Fractional tokens for the least (slowest attention + slowest linear); None when they do not fit.

    With ``ratio`` = attention time / linear time the sum is linear between the ratios at which some group is
    balanced in itself, so the optimum is at one of them.

    Args:
        counts: groups of each class.
    """
    number = np.array(counts, float)
    rates = np.array([c.attention for c in classes])
    speeds = np.array([sum(1 / s for s in c.linear) for c in classes])
    seconds, caps, home = _members(classes)

    def held(linear: float, ratio: float) -> np.ndarray:
        """Tokens a group of each class takes in so many linear seconds."""
        capacity = np.bincount(home, np.minimum(caps, linear / seconds), minlength=len(classes))
        return np.minimum(capacity, ratio * linear / rates)

    best: tuple[float, Shares] | None = None
    for ratio in sorted({round(float(value), 15) for value in rates * speeds}):
        high = total / float((number * np.minimum(ratio / rates, speeds)).sum())
        if (number * held(high, ratio)).sum() < total * (1 - 1e-12):  # a cap binds: the level is higher, by bisection
            low = high
            while (number * held(high, ratio)).sum() < total:
                high *= 2
                if high > 1e12:
                    return None
            for _ in range(50):
                middle = (low + high) / 2
                low, high = (low, middle) if (number * held(middle, ratio)).sum() >= total else (middle, high)
        tokens = held(high, ratio)
        time = high + float((tokens * rates).max())
        if best is None or time < best[0] * (1 - 1e-12):
            best = time, Shares(np.maximum(tokens, 1e-9), high)
    return best[1] if best else None


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
    for _ in range(total - int(counts.sum())):
        finish = np.where(counts < room, (counts + 1) / shares, np.inf)
        counts[int(finish.argmin())] += 1
    return counts.tolist()


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
    return group.attention * slot * slots, np.interp(slot * slots, tokens, full)

"""How many groups of which make: an integer program over templates, for clusters that no regular grouping suits.

A template is so many devices of each kind; a kind is a type of device on a kind of node. Where memory binds, tokens go
by memory and heads by speed, and groups want a certain mix of kinds that numbers of nodes seldom allow for all of them.
Everything here is over templates and kinds: nothing grows with the number of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mip
import numpy as np

from hexiseq.schedule.groups import MOST_ACROSS, Grouping
from hexiseq.schedule.local import integer_program, or_none, solved

MOST_TEMPLATES = 20_000  # where there would be more, groups are smaller
WORTH = 12  # templates that the program may choose from, for each weight
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of speed against memory, in what a template's devices are worth
RATIOS = (0.6, 0.8, 1.0, 1.25)  # of attention to linear time, over that of all work spread evenly
BETTER = 0.998  # of the level so far: what the next program must reach
MOST_PROGRAMS = 4  # for each ratio
NEARLY = 1.01  # the best promise so far, within which others are worth a try
BISECTIONS = 30
WHOLE = 1e6  # the sequence, in the program's units


@dataclass(frozen=True)
class Kinds:
    """The kinds of devices of a replica; arrays are by kind, seconds of a micro-step.

    Attributes:
        nodes: the ranks of each kind, node by node.
        linear: per token of a rank.
        attention: per token of the group and query head of the rank.
        merge: the same for every kernel call.
        bare: tokens a rank could hold without heads.
        head: tokens it can hold less, per token of the group and head.
        inside: bytes a second of a rank's port.
        outside: of its part of its node's NICs.
    """

    nodes: list[list[list[int]]]
    linear: np.ndarray
    attention: np.ndarray
    merge: np.ndarray
    bare: np.ndarray
    head: np.ndarray
    inside: np.ndarray
    outside: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Devices of each kind."""
        return np.array([sum(map(len, nodes)) for nodes in self.nodes])

    @property
    def seats(self) -> np.ndarray:
        """Devices on one node."""
        return np.array([len(nodes[0]) for nodes in self.nodes])


@dataclass(frozen=True)
class Templates:
    """Templates, a row each.

    Attributes:
        devices: of each kind.
        heads: query heads of a device of each kind.
        path: seconds per token of the group, of attention and all-to-all.
    """

    devices: np.ndarray
    heads: np.ndarray
    path: np.ndarray

    def rows(self, chosen: np.ndarray) -> Templates:
        return Templates(self.devices[chosen], self.heads[chosen], self.path[chosen])

    def held(self, kinds: Kinds, linear: float, ratio: float) -> np.ndarray:
        """Tokens that a group of each takes in so much linear time and `ratio` times as much attention time."""
        low, high = np.zeros(len(self.path)), np.minimum(ratio * linear / self.path, self.devices @ kinds.bare)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            room = np.maximum(0.0, kinds.bare - middle[:, None] * self.heads * kinds.head)
            fits = (self.devices * np.minimum(room, linear / kinds.linear)).sum(1) >= middle
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low


def template_groupings(
    kinds: Kinds, heads: int, kv_heads: int, exchanged: tuple[float, float], tokens: int, widest: int, below: float,
    late: Callable[[], bool],
) -> Iterator[Grouping]:  # fmt: skip
    """Groupings of all devices by the program, for some least sizes of groups and ratios of attention to linear time.

    Calls are no wider than the smallest group's tokens, so that small groups make merging dear for all.

    Args:
        exchanged: bytes per token and head in all-to-alls of all layers of a step: of forward passes, and of one pass.
        widest: tokens of the widest kernel call.
        below: seconds of a micro-step that groupings must promise to beat.
        late: whether to end.
    """
    counts, seen = kinds.counts, set()
    ideal = tokens * heads / float((counts / kinds.attention).sum()) / _spread(tokens, kinds)
    width = min(widest, tokens // 2)
    while width >= tokens / counts.sum() / 2:
        everything = _templates(kinds, heads, kv_heads, exchanged, 1 + 0.75 * tokens / width)
        for ratio in (part * ideal for part in RATIOS):
            level, best = below / (1 + ratio), None
            templates = _worthwhile(everything, kinds, level, ratio, width)
            for _ in range(MOST_PROGRAMS if not late() else 0):
                level *= BETTER
                numbers = _best_numbers(templates, templates.held(kinds, level, ratio) * WHOLE / tokens, counts)
                if numbers is None:
                    break
                best = templates.rows(numbers > 0), numbers[numbers > 0]
                level = _level(*best, kinds, ratio, tokens)
            if best is not None and (key := (best[0].devices.tobytes(), best[1].tobytes())) not in seen:
                seen.add(key)
                below = min(below, level * (1 + ratio) * NEARLY)
                yield _seated(kinds, np.repeat(best[0].devices, best[1], axis=0))
        width //= 2


def _templates(kinds: Kinds, heads: int, kv_heads: int, exchanged: tuple[float, float], calls: float) -> Templates:
    """All templates of few enough devices, with so many kernel calls over a group's tokens."""
    counts, attention = kinds.counts, kinds.attention + calls * kinds.merge
    for width in range(min(MOST_ACROSS, heads), 0, -1):
        if np.prod(np.minimum(counts, width) + 1.0) <= MOST_TEMPLATES * 4:
            break
    rows = np.array(list(itertools.product(*(range(min(count, width) + 1) for count in counts.tolist()))))
    size = rows.sum(1)
    rows = rows[(size > 0) & (size <= width)]
    # Heads by speed: the least seconds a token by which all are dealt.
    low, high = np.zeros(len(rows)), np.full(len(rows), heads * float(attention.max()))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        dealt = np.floor(middle[:, None] / attention)
        enough = (rows * dealt).sum(1) >= heads
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    dealt = np.floor(high[:, None] / attention)
    dealt *= (heads / np.maximum((rows * dealt).sum(1), 1))[:, None]
    copies = np.where(dealt > 0, np.maximum(dealt * kv_heads / heads, 1.0), 0.0)

    held = rows * kinds.bare
    part = held / held.sum(1, keepdims=True)
    near = ((rows > 0).sum(1) == 1) & (rows <= kinds.seats).all(1)
    outside, inside = 1 / (np.maximum(rows, 1) * kinds.outside), 1 / kinds.inside

    def seconds(weight: np.ndarray) -> np.ndarray:
        """Of an all-to-all with such weights of the heads, per byte and token of the group: over NICs, or ports."""
        mine = rows * weight
        whole = mine.sum(1, keepdims=True)
        across = np.maximum(part * (whole - mine), mine * (1 - part)) * outside
        within = part * (whole - weight) / np.maximum(rows, 1) * inside
        return np.where(near, within.max(1), across.max(1))

    forward, once = exchanged
    path = forward * (seconds(dealt + 2 * copies) + seconds(dealt))
    path += once * (seconds(3 * dealt + 2 * copies) + seconds(dealt + 2 * copies))
    return Templates(rows, dealt, high + np.where(rows.sum(1) > 1, path, 0.0))


def _spread(tokens: float, kinds: Kinds) -> float:
    """Seconds in which all devices together take that many tokens, as far as they hold them; attention aside."""
    low, high = 0.0, tokens * float(kinds.linear.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = float((kinds.counts * np.minimum(kinds.bare, middle / kinds.linear)).sum()) >= tokens
        low, high = (low, middle) if enough else (middle, high)
    return high


def _worthwhile(templates: Templates, kinds: Kinds, linear: float, ratio: float, least: float) -> Templates:
    """Of those that hold that many tokens the ones that make most of their devices, by some weights."""
    held = templates.held(kinds, linear, ratio)
    speed, memory = 1 / kinds.attention, np.minimum(kinds.bare, linear / kinds.linear)
    speed *= float((kinds.counts @ memory) / (kinds.counts @ speed))
    chosen = np.zeros(len(held), bool)
    for weight in WEIGHTS:
        worth = np.where(held >= least, held / (templates.devices @ (weight * speed + (1 - weight) * memory)), 0.0)
        chosen[np.argsort(-worth, kind="stable")[:WORTH]] = True
    return templates.rows(chosen & (held >= least))


@or_none
def _best_numbers(templates: Templates, held: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    """Groups of each template that hold most tokens, or None where these are fewer than the sequence has."""
    if not len(held):
        return None
    program = integer_program()
    numbers = [program.add_var(var_type=mip.INTEGER, ub=int((counts // np.maximum(row, 1))[row > 0].min()))
               for row in templates.devices]  # fmt: skip
    for kind, count in enumerate(counts.tolist()):
        used = zip(templates.devices[:, kind].tolist(), numbers, strict=True)
        program.add_constr(mip.xsum(n * x for n, x in used if n) <= count)
    program.objective = mip.minimize(mip.xsum(-value * x for value, x in zip(held.tolist(), numbers, strict=True)))
    # Fewer are of no use, which the relaxation mostly knows at once. Said as a row of the program, CBC takes one in a
    # hundred programs for infeasible that are not.
    program.cutoff = -WHOLE * (1 - 1e-6)
    if not solved(program):
        return None
    found = np.array([round(x.x) for x in numbers])
    whole = (found @ templates.devices <= counts).all() and float(found @ held) >= WHOLE
    return found if whole else None


def _level(templates: Templates, numbers: np.ndarray, kinds: Kinds, ratio: float, tokens: int) -> float:
    """Linear time by which so many groups hold the sequence."""
    low, high = 0.0, tokens * float(kinds.linear.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = float(numbers @ templates.held(kinds, middle, ratio)) >= tokens
        low, high = (low, middle) if enough else (middle, high)
    return high


def _seated(kinds: Kinds, groups: np.ndarray) -> Grouping:
    """Devices for groups of so many of each kind: inside a node as far as they fit, those of one kind first."""
    groups = groups.copy()
    for kind, left in enumerate((kinds.counts - groups.sum(0)).tolist()):
        for _ in range(left):  # who is in no group helps the smallest, of those that have its kind if there are any
            groups[min(range(len(groups)), key=lambda g: (groups[g, kind] == 0, groups[g].sum(), g)), kind] += 1
    free = [[list(ranks) for ranks in nodes] for nodes in kinds.nodes]
    order = sorted(range(len(groups)), key=lambda g: ((groups[g] > 0).sum() > 1, -groups[g].sum(), g))
    found: Grouping = []
    for g in order:
        members: list[int] = []
        for kind, wanted in enumerate(groups[g].tolist()):
            while wanted:
                # The node that is filled best; else the one with most devices left.
                fitting = [ranks for ranks in free[kind] if len(ranks) >= wanted]
                ranks = min(fitting, key=len) if fitting else max(free[kind], key=len)
                members += ranks[:wanted]
                wanted, ranks[:] = max(0, wanted - len(ranks)), ranks[wanted:]
        found.append(members)
    return sorted(found, key=lambda members: (-len(members), members))

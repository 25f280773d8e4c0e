"""Routes: what every rank sends, receives and computes in an attention call, as a pure function of plan and mask.

Nothing here touches a process or a tensor, so whole plans can be checked without starting one.

**The ring.** The slots of all groups form one circle of ``T`` slots. Group ``g`` starts at its own first slot
``off[g]`` and at tick ``t`` works on slot ``(off[g] + t) % T``; its own ``n_g`` slots, ticks 0 to ``n_g - 1``, come
first as one block. KV and its gradient travel from group ``g + 1`` to ``g`` to ``g - 1``. All communication is in
*batches*: batch ``t`` of a group pairs with batch ``t`` of its neighbours, and with nothing else.

- KV batch ``t``: send the slot of tick ``t`` to ``g - 1``; receive what ``g + 1`` sends at *its* tick ``t``, which is
  needed here ``n_g`` ticks later. So a group's receive window is exactly its own size.
- dKV batch ``t``: after tick ``t``, send the slot's gradient so far to ``g - 1``; receive what ``g + 1`` sends then.

A message holds the rows that somebody further along attends to, a gradient those that somebody so far has. With causal
masking a group inner to a slot's owner attends to the slot's front half only, so nothing but front halves travels past
the wrap from group 0 to the last group; the back half's gradient is then final at group 0 and goes straight to its
owner. Documents and windows shorten messages further, down to none.

**The all-gather** brings each rank all KV it attends to at once, straight from its holders, and takes gradients back
the same way: one batch each, whose messages name groups instead of slots.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hexiseq.attention.kernels import FULL
from hexiseq.attention.tiles import PLAIN, Mask, Run, Tile, rows_from, tiles
from hexiseq.plan import Interval, Plan, Replica, claims, fragments, fusion_width, group_intervals, kv_heads

OWN, INNER, OUTER, WHOLE = "own", "inner", "outer", "whole"
SEND_LAG = 2
"""Batches a send may stay in flight before it is waited for; the receiver has issued its side one tick earlier."""


@dataclass(frozen=True)
class Member:
    """A rank of a group: its rows of the group's run ``[F_g, B_g]``, its query heads, the KV heads these need."""

    rank: int
    rows: Interval
    heads: Interval
    kv: Interval


@dataclass(frozen=True)
class Message:
    """One transfer between two ranks: ``rows`` of a source (front first, then back) and global KV ``heads``.

    The source is a slot on the ring, a group's whole run in an all-gather.
    """

    tick: int
    source: int
    rows: Interval
    sender: int
    receiver: int
    heads: Interval

    @property
    def size(self) -> int:
        """Rows times KV heads; K and V of every sequence and ``D`` numbers each come on top."""
        return (self.rows[1] - self.rows[0]) * (self.heads[1] - self.heads[0])


@dataclass(frozen=True)
class Traffic:
    """Messages of one rank by batch; within a batch in source, peer member and row order.

    ``most``: in an all-gather, the summed sizes of sends and receives if there were neither documents nor a window.
    """

    sends: tuple[tuple[Message, ...], ...]
    receives: tuple[tuple[Message, ...], ...]
    most: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Part:
    """Rows of one source in a block's buffers.

    Attributes:
        source: slot on the ring, group in an all-gather.
        rows: of the source, in the KV buffer from row ``start``: what is attended to here and passed on.
        grad_rows: of the source, in the gradient buffer from row ``grad_start``: what was attended to so far.
    """

    source: int
    rows: Interval
    start: int
    grad_rows: Interval
    grad_start: int

    @property
    def here(self) -> slice:
        """Rows of the KV buffer."""
        return slice(self.start, self.start + self.rows[1] - self.rows[0])

    @property
    def grad_here(self) -> slice:
        """Rows of the gradient buffer."""
        return slice(self.grad_start, self.grad_start + self.grad_rows[1] - self.grad_rows[0])


@dataclass(frozen=True)
class Call:
    """A kernel call per GQA fragment.

    Attributes:
        sequences: of the batch.
        queries: rows of the group's run.
        keys: rows of the block's KV buffer; of the group's run in the own block.
        mask: ``full``, ``causal`` or ``anticausal``.
        first: whether it is the first to reach its rows, of queries and keys alike.
        grads: rows of the keys, counted from the first, and the rows of the gradient buffer they belong to.
    """

    sequences: slice
    queries: slice
    keys: slice
    mask: str
    first: bool
    grads: tuple[tuple[slice, slice], ...]


@dataclass(frozen=True)
class Block:
    """KV that is attended to together.

    Attributes:
        ticks: of the ring.
        side: ``own``, ``outer`` (all queries), ``inner`` (back queries only), ``whole`` (all queries, no masking).
        parts: by tick; none in the own block.
        rows, grad_rows: of the KV buffer and of the gradient buffer.
        most_rows: what both would be if there were neither documents nor a window.
        calls: in order.
    """

    ticks: range
    side: str
    parts: tuple[Part, ...]
    rows: int
    grad_rows: int
    most_rows: int
    calls: tuple[Call, ...]

    @property
    def first(self) -> int:
        return self.ticks.start

    @property
    def covered(self) -> bool:
        """Whether a single call reaches every row of the gradient buffer, in every sequence."""
        if len(self.calls) != 1 or self.calls[0].sequences != slice(None):
            return False
        return sum(target.stop - target.start for _, target in self.calls[0].grads) == self.grad_rows


@dataclass(frozen=True)
class Fragment:
    """Query heads that share KV heads in a whole ratio, as ranges within the rank's own heads."""

    q: slice
    kv: slice


@dataclass(frozen=True)
class Route:
    """All one rank does in one attention call.

    Attributes:
        members: the ranks of its group; ``member`` is its own index there.
        rows: tokens of the group, ``front`` of them in the front interval.
        slots: ring slots of the group, of ``total`` in the circle. ``off`` is the first.
        gathers: whether KV is gathered at once rather than slot by slot.
        blocks: in order, the own one first; none for a rank without heads.
        kv, dkv: traffic between groups.
        fragments: how the rank's query heads are cut for grouped-query attention.
        shared_kv: whether two members of the group compute gradients of the same KV head.
    """

    rank: int
    group: int
    member: int
    members: tuple[Member, ...]
    rows: int
    front: int
    half: int
    off: int
    slots: int
    total: int
    gathers: bool
    blocks: tuple[Block, ...]
    kv: Traffic
    dkv: Traffic
    fragments: tuple[Fragment, ...]
    shared_kv: bool

    @property
    def me(self) -> Member:
        return self.members[self.member]

    def own_rows(self, source: int, rows: Interval) -> list[tuple[Interval, int]]:
        """Where `rows` of an own source lie in the group's run: pieces of it, each with its first row in the message.

        Args:
            source: an own slot of the ring; in an all-gather the own group, whose rows are the run's.
        """
        if self.gathers:
            return [(rows, 0)]
        j, backs = source - self.off, self.rows - self.front
        # The back interval ascends, so its last half-slot belongs to the first slot; only that one can be short.
        outermost = backs - (self.slots - 1) * self.half
        end = self.rows - (outermost + (j - 1) * self.half if j else 0)
        halves = ((j * self.half, (j + 1) * self.half), (end - (self.half if j else outermost), end))
        found = []
        for (start, end), base in zip(halves, (0, self.half), strict=True):
            first, last = max(rows[0], base), min(rows[1], base + end - start)
            if last > first:
                found.append(((start + first - base, start + last - base), first - rows[0]))
        return found

    def owns(self, source: int) -> bool:
        return source == self.group if self.gathers else self.off <= source < self.off + self.slots


def routes(plan: Plan, mask: Mask = PLAIN) -> list[Route]:
    """The routes of all ranks, by rank."""
    circles = [_Circle(plan, replica, mask) for replica in plan.replicas]
    return [_route(plan, circles[plan.place(rank)[0]], rank) for rank in range(plan.world_size)]


def route(plan: Plan, rank: int, mask: Mask = PLAIN) -> Route:
    """What `rank` does in one attention call. Raises ValueError if the rank is not in the plan."""
    return _route(plan, _Circle(plan, plan.replicas[plan.place(rank)[0]], mask), rank)


def _route(plan: Plan, circle: _Circle, rank: int) -> Route:
    _, group, member = plan.place(rank)
    members, gathers = circle.members[group], plan.exchange == "allgather"
    me = members[member]
    held = [m.kv for m in members if m.kv[1] > m.kv[0]]
    if gathers:
        make = functools.partial(circle.gather_blocks, group)
        kv, dkv = circle.gather_traffic(group, rank)
    else:
        make = functools.partial(circle.ring_blocks, group)
        kv = circle.ring_traffic(group, rank, circle.kv_targets, take=True)
        dkv = circle.ring_traffic(group, rank, circle.dkv_targets, take=False)
        _check_progress(circle, group)
    return Route(
        rank=rank,
        group=group,
        member=member,
        members=members,
        rows=members[-1].rows[1],
        front=circle.n[group] * circle.half,
        half=circle.half,
        off=circle.off[group],
        slots=circle.n[group],
        total=circle.T,
        gathers=gathers,
        blocks=make() if me.heads[1] > me.heads[0] else (),
        kv=kv,
        dkv=dkv,
        fragments=tuple(Fragment(slice(*q), slice(*k)) for q, k in fragments(me.heads, plan.gqa_ratio)),
        shared_kv=any(a[1] > b[0] for a, b in itertools.pairwise(held)),
    )


class _Circle:
    """The groups and slots of one replica: who needs which rows of which source, and which member which heads."""

    def __init__(self, plan: Plan, replica: Replica, mask: Mask) -> None:
        self.mask, self.fusion, self.half = mask, plan.fusion, plan.slot // 2
        self.n = [group.slots for group in replica.groups]
        self.G, self.T = len(self.n), replica.slots
        self.off = [sum(self.n[:g]) for g in range(self.G)]
        self.owner = [g for g, n in enumerate(self.n) for _ in range(n)]
        self.groups: list[Run] = list(group_intervals(plan.seq_len, plan.slot, self.n))
        self.slots: list[Run] = list(group_intervals(plan.seq_len, plan.slot, [1] * self.T))
        self.members = []
        for group in replica.groups:
            row, members = 0, []
            for shard in group.shards:
                rows = (row, row + shard.num_tokens)
                members.append(Member(shard.rank, rows, shard.heads, kv_heads(shard.heads, plan.gqa_ratio)))
                row = rows[1]
            self.members.append(tuple(members))
        # A group attends to sources outer to it from its first token on, to inner ones from the first of its back
        # interval. The first of these tokens is the one that reaches furthest back.
        self.outer_from = [mask.first_attended(front[0]) for front, _ in self.groups]
        self.inner_from = [mask.first_attended(back[0]) if back[1] > back[0] else plan.seq_len
                           for _, back in self.groups]  # fmt: skip
        self.hop = functools.cache(self._hop)
        self.least = functools.cache(lambda inner, a, b: min((self.inner_from if inner else self.outer_from)[a:b]))

    def slot(self, g: int, t: int) -> int:
        return (self.off[g] + t) % self.T

    def attended(self, g: int, source: int, run: Run) -> Interval:
        """Rows of a foreign run, of owner `source`, that group `g` attends to."""
        if not self.mask.causal:
            return 0, _length(run)
        front, everything = _length(run[:1]), _length(run)
        if source < g:
            return _interval(rows_from(run, self.outer_from[g]), front)
        return _interval(rows_from(run, self.inner_from[g]), everything)

    def held(self, g: int, slot: int) -> Interval:
        """Rows of a foreign slot that travel to group `g`: it or somebody after it attends to them."""
        run, home = self.slots[slot], self.owner[slot]
        if not self.mask.causal:
            return 0, _length(run)
        front, everything = _length(run[:1]), _length(run)
        # The slot goes from home - 1 down to 0, then, past the wrap and by its front half, from G - 1 to home + 1.
        last = g if home < g else self.G - 1
        outer = (
            _interval(rows_from(run, self.least(False, home + 1, last + 1)), front) if last > home else (front, front)
        )
        if home < g:
            return outer
        inner = _interval(rows_from(run, self.least(True, 0, g + 1)), everything)
        return _hull(inner, outer)

    def summed(self, g: int, slot: int) -> Interval:
        """Rows of a foreign slot of which group `g` has a gradient: it or somebody before it attends to them."""
        run, home = self.slots[slot], self.owner[slot]
        if not self.mask.causal:
            return 0, _length(run)
        if home > g:
            return _interval(rows_from(run, self.least(True, g, home)), _length(run))
        # Past the wrap only the front half is left: of those outer to home, and of those inner to it so far.
        first = min(self.least(False, g, self.G), self.least(True, 0, home) if home else self.slots[0][1][1])
        return _interval(rows_from(run, first), _length(run[:1]))

    def kv_targets(self, g: int, t: int) -> list[tuple[int, Interval]]:
        """Groups that group `g` sends its slot of tick `t` to, with the rows they get."""
        slot, target = self.slot(g, t), (g - 1) % self.G
        return [] if self.owner[slot] == target else [(target, self.held(target, slot))]

    def dkv_targets(self, g: int, t: int) -> list[tuple[int, Interval]]:
        """Groups that group `g` sends the gradient of its slot of tick `t` to, with the rows they get."""
        slot, target = self.slot(g, t), (g - 1) % self.G
        home = self.owner[slot]
        if home == g:
            return []
        rows = self.summed(g, slot)
        if self.mask.causal and g == 0 and home != target:
            return [(target, _interval(rows[0], self.half)), (home, _interval(max(rows[0], self.half), rows[1]))]
        return [(target, rows)]

    def _hop(self, source: int, target: int, take: bool) -> tuple[tuple[int, int, Interval], ...]:
        """``(sender, receiver, KV heads)`` ranks and heads of one group-to-group transfer, in member order.

        With `take`, every receiver takes each head it needs from the first sender that holds it: copies are equal.
        Without, every sender gives each head it holds to the first receiver that holds it: partial sums are not.
        """
        senders, receivers = self.members[source], self.members[target]
        held, wanted = [m.kv for m in senders], [m.kv for m in receivers]
        found = []
        for s, given in zip(senders, claims(held) if take else held, strict=True):
            for r, taken in zip(receivers, wanted if take else claims(wanted), strict=True):
                heads = (max(given[0], taken[0]), min(given[1], taken[1]))
                if heads[1] > heads[0]:
                    found.append((s.rank, r.rank, heads))
        return tuple(found)

    def ring_traffic(
        self, g: int, rank: int, targets: Callable[[int, int], list[tuple[int, Interval]]], take: bool
    ) -> Traffic:
        def messages(source: int, t: int) -> Iterator[tuple[int, Message]]:
            for target, rows in targets(source, t):
                if rows[1] > rows[0]:
                    for sender, receiver, heads in self.hop(source, target, take):
                        yield target, Message(t, self.slot(source, t), rows, sender, receiver, heads)

        if self.G == 1:
            return Traffic(((),) * self.T, ((),) * self.T)
        # Only group 0 ever sends to a group that is not its neighbour.
        sources = sorted({(g + 1) % self.G, 0} - {g})
        mine = [tuple(m for _, m in messages(g, t) if m.sender == rank) for t in range(self.T)]
        theirs = [
            tuple(m for s in sources for to, m in messages(s, t) if to == g and m.receiver == rank)
            for t in range(self.T)
        ]
        return Traffic(tuple(mine), tuple(theirs))

    def gather_traffic(self, g: int, rank: int) -> tuple[Traffic, Traffic]:
        """KV from every holder to every rank that attends to it, and gradients back; in rank order of the peers."""

        def messages(owner: int, user: int, take: bool) -> Iterator[tuple[Message, int]]:
            run = self.groups[owner]
            rows, most = self.attended(user, owner, run), self._most(self.mask.causal and owner < user, run)
            for sender, receiver, heads in self.hop(*((owner, user) if take else (user, owner)), take):
                yield Message(0, owner, rows, sender, receiver, heads), most * _size(heads)

        found = []
        for take in (True, False):
            others = [h for h in range(self.G) if h != g]
            pairs = [(g, h) for h in others] + [(h, g) for h in others]
            mine = [item for pair in pairs for item in messages(*pair, take)]
            most = tuple(sum(n for m, n in mine if getattr(m, end) == rank) for end in ("sender", "receiver"))
            sends = sorted((m for m, _ in mine if m.sender == rank and m.size), key=lambda m: m.receiver)
            receives = sorted((m for m, _ in mine if m.receiver == rank and m.size), key=lambda m: m.sender)
            found.append(Traffic((tuple(sends),), (tuple(receives),), (most[0], most[1])))
        return found[0], found[1]

    def ring_blocks(self, g: int) -> tuple[Block, ...]:
        made = [self._own_block(g, range(self.n[g]))]
        for ticks, side in self._spans(g):
            slots = [self.slot(g, t) for t in ticks]
            sources = [(s, self.slots[s], self.held(g, s), self.summed(g, s)) for s in slots]
            most = sum(self._most(side == OUTER, run) for _, run, _, _ in sources)
            made.append(self._block(g, ticks, side, sources, most))
        return tuple(made)

    def _spans(self, g: int) -> Iterator[tuple[range, str]]:
        """Ticks of every block of foreign slots, and their side."""
        n, width = self.n[g], fusion_width(self.fusion, self.n[g])
        inner_end = self.T - self.off[g] if self.mask.causal else self.T
        for start, end, side in (
            (n, inner_end, INNER if self.mask.causal else WHOLE),
            (inner_end, self.T, OUTER),
        ):
            for first in range(start, end, width):
                yield range(first, min(first + width, end)), side

    def gather_blocks(self, g: int) -> tuple[Block, ...]:
        made = [self._own_block(g, range(1))]
        inner, outer = range(g + 1, self.G), range(g)
        sides = ((INNER, inner), (OUTER, outer)) if self.mask.causal else ((WHOLE, [*outer, *inner]),)
        for side, owners in sides:
            if owners:
                # In the order in which they arrive, so that the buffer is often a part of what was received.
                ordered = sorted(owners, key=lambda h: min(m.rank for m in self.members[h]))
                rows = {h: self.attended(g, h, self.groups[h]) for h in ordered}
                sources = [(h, self.groups[h], rows[h], rows[h]) for h in ordered]
                most = sum(self._most(side == OUTER, self.groups[h]) for h in ordered)
                made.append(self._block(g, range(1, 2), side, sources, most))
        return tuple(made)

    @staticmethod
    def _most(outer: bool, run: Run) -> int:
        return _length(run[:1]) if outer else _length(run)

    def _own_block(self, g: int, ticks: range) -> Block:
        run, calls = self.groups[g], []
        for sequences, edges in self.mask.sequences():
            for tile in tiles(run, run, self.mask, edges):
                # Squares on the diagonal come to every row once, and before anything else does.
                first = tile.queries == tile.keys
                calls.append(_call(sequences, tile, first, ((slice(0, _size(tile.keys)), slice(*tile.keys)),)))
        calls.sort(key=lambda call: not call.first)
        rows = _length(run)
        return Block(ticks, OWN, (), rows, rows, rows, tuple(calls))

    def _block(
        self, g: int, ticks: range, side: str, sources: Sequence[tuple[int, Run, Interval, Interval]], most: int
    ) -> Block:
        parts, row, grad_row = [], 0, 0
        for source, _, rows, grad_rows in sources:
            parts.append(Part(source, rows, row, grad_rows, grad_row))
            row, grad_row = row + _size(rows), grad_row + _size(grad_rows)
        calls: list[Call] = []
        for sequences, edges in self.mask.sequences():
            fused: list[Call] = []
            for part, (_, run, _, _) in zip(parts, sources, strict=True):
                if _size(part.rows):
                    for tile in tiles(self.groups[g], run, self.mask, edges):
                        _fuse(fused, _foreign_call(sequences, tile, part))
            calls += fused
        return Block(ticks, side, tuple(parts), row, grad_row, most, tuple(calls))


def _call(sequences: slice, tile: Tile, first: bool, grads: tuple[tuple[slice, slice], ...]) -> Call:
    return Call(sequences, slice(*tile.queries), slice(*tile.keys), tile.mask, first, grads)


def _foreign_call(sequences: slice, tile: Tile, part: Part) -> Call:
    """A tile of a source's rows as a call on the block's buffers."""
    shift, target = part.start - part.rows[0], part.grad_start - part.grad_rows[0]
    moved = Tile(tile.queries, (tile.keys[0] + shift, tile.keys[1] + shift), tile.mask)
    grads = (slice(0, _size(tile.keys)), slice(tile.keys[0] + target, tile.keys[1] + target))
    return _call(sequences, moved, False, (grads,))


def _fuse(calls: list[Call], new: Call) -> None:
    """Append a call, or join it to an earlier one: a rectangle is order-free over its keys."""
    for i, call in enumerate(calls):
        if call.mask == new.mask == FULL and call.queries == new.queries and call.keys.stop == new.keys.start:
            (rows, target), length = new.grads[0], call.keys.stop - call.keys.start
            last_rows, last_target = call.grads[-1]
            if last_target.stop == target.start:
                merged = (*call.grads[:-1], (slice(last_rows.start, rows.stop + length),
                                             slice(last_target.start, target.stop)))  # fmt: skip
            else:
                merged = (*call.grads, (slice(length, length + rows.stop), target))
            keys = slice(call.keys.start, new.keys.stop)
            calls[i] = Call(call.sequences, call.queries, keys, FULL, False, merged)
            return
    calls.append(new)


def _length(run: Run) -> int:
    return sum(b - a for a, b in run)


def _size(interval: Interval) -> int:
    return interval[1] - interval[0]


def _interval(start: int, end: int) -> Interval:
    """``[start, end)``, empty at `end` where it would be negative."""
    return min(start, end), end


def _hull(a: Interval, b: Interval) -> Interval:
    """The interval around two, of which empty ones count for nothing."""
    filled = [i for i in (a, b) if i[1] > i[0]] or [a]
    return min(i[0] for i in filled), max(i[1] for i in filled)


def _check_progress(circle: _Circle, g: int) -> None:
    """Assert that no wait of group `g` can be part of a cycle.

    Every wait is for a batch that the other side issues when it enters the block of that batch's tick. If that block
    starts before the waiting one does, waits only ever point to earlier ticks, and a cycle is impossible: whatever the
    groups' sizes, a block of tick 0 waits for nothing.
    """
    if circle.G == 1:
        return

    def starts(h: int) -> list[int]:
        own = [0] * circle.n[h]
        return own + [ticks.start for ticks, _ in circle._spans(h) for _ in ticks]

    before, after = (starts((g + d) % circle.G) for d in (1, -1))
    for ticks, _ in circle._spans(g):
        for t in ticks:
            assert before[t - circle.n[g]] < ticks.start, f"group {g} tick {t} waits for a later send"
        if ticks.start >= SEND_LAG:
            assert after[ticks.start - SEND_LAG] < ticks.start, f"group {g} waits for a later receive at {ticks.start}"

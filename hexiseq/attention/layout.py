"""Routes: what every rank sends, receives and computes at every tick of the ring, as a pure function of the plan.

Nothing here touches a process or a tensor, so whole plans can be checked without starting one.

The slots of all groups form one circle of ``T`` slots. Group ``g`` starts at its own first slot ``off[g]`` and at tick
``t`` works on slot ``(off[g] + t) % T``; its own ``n_g`` slots, ticks 0 to ``n_g - 1``, are one causal call. KV and its
gradient travel from group ``g + 1`` to ``g`` to ``g - 1``. All communication is in *batches*: batch ``t`` of a group
pairs with batch ``t`` of its neighbours, and with nothing else.

- KV batch ``t``: send the slot of tick ``t`` to ``g - 1``; receive what ``g + 1`` sends at *its* tick ``t``, which is
  needed here ``n_g`` ticks later. So a group's receive window is exactly its own size.
- dKV batch ``t``: after tick ``t``, send the slot's gradient so far to ``g - 1``; receive what ``g + 1`` sends then.

With causal masking a group inner to a slot's owner attends to the slot's front half only, so nothing but front halves
travels past the wrap from group 0 to the last group. The back half's gradient is then final at group 0 and goes
straight to its owner.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hexiseq.plan import Interval, Plan, Replica, kv_heads, short_tokens

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
    """One transfer between two ranks: ``rows`` of a slot (front half first, then back half) and global KV ``heads``."""

    tick: int
    slot: int
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
    """Messages of one rank by batch; within a batch in slot, peer member and row order."""

    sends: tuple[tuple[Message, ...], ...]
    receives: tuple[tuple[Message, ...], ...]


@dataclass(frozen=True)
class Block:
    """Consecutive ticks whose slots are attended to by one kernel call per GQA fragment.

    Attributes:
        first: first tick.
        slots: the slot of each tick.
        side: ``own`` (a causal or full square), ``outer`` (all queries), ``inner`` (back queries only), ``whole``
            (all queries, without masking).
        starts: row of the block's KV buffer at which each slot starts, and last the buffer's rows.
    """

    first: int
    slots: tuple[int, ...]
    side: str
    starts: tuple[int, ...]

    @property
    def ticks(self) -> range:
        return range(self.first, self.first + len(self.slots))


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
        blocks: kernel calls in order, the own slots first; none for a rank without heads.
        kv, dkv: ring traffic.
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
    blocks: tuple[Block, ...]
    kv: Traffic
    dkv: Traffic
    fragments: tuple[Fragment, ...]
    shared_kv: bool

    @property
    def me(self) -> Member:
        return self.members[self.member]

    def own_rows(self, slot: int) -> tuple[Interval, Interval]:
        """Where an own slot's front and back half lie in the group's run of rows."""
        j, backs = slot - self.off, self.rows - self.front
        # The back interval ascends, so its last half-slot belongs to the first slot; only that one can be short.
        outermost = backs - (self.slots - 1) * self.half
        end = self.rows - (outermost + (j - 1) * self.half if j else 0)
        return (j * self.half, (j + 1) * self.half), (end - (self.half if j else outermost), end)


def routes(plan: Plan, causal: bool = True) -> list[Route]:
    """The routes of all ranks, by rank."""
    return [route(plan, rank, causal) for rank in range(plan.world_size)]


def route(plan: Plan, rank: int, causal: bool = True) -> Route:
    """What `rank` does in one attention call. Raises ValueError if the rank is not in the plan."""
    replica, group, member = plan.place(rank)
    ring = _Ring(plan, plan.replicas[replica], causal)
    members = ring.members[group]
    me = members[member]
    has_heads = me.heads[1] > me.heads[0]
    held = [m.kv for m in members if m.kv[1] > m.kv[0]]
    made = Route(
        rank=rank,
        group=group,
        member=member,
        members=members,
        rows=members[-1].rows[1],
        front=ring.n[group] * ring.half,
        half=ring.half,
        off=ring.off[group],
        slots=ring.n[group],
        total=ring.T,
        blocks=ring.blocks(group) if has_heads else (),
        kv=ring.traffic(group, rank, ring.kv_targets, take=True),
        dkv=ring.traffic(group, rank, ring.dkv_targets, take=False),
        fragments=fragments(me.heads, plan.gqa_ratio),
        shared_kv=any(a[1] > b[0] for a, b in itertools.pairwise(held)),
    )
    _check_progress(ring, group)
    return made


def fragments(heads: Interval, ratio: int) -> tuple[Fragment, ...]:
    """Cut query heads into at most three runs that use their KV heads in a whole ratio.

    The left part of a cut KV group, whole groups, the right part. ``ratio`` is query heads per KV head. Kernels take
    the ratio from the shapes: ``[1, 7)`` with ratio 3 (two, three and one query head on KV heads 0, 1, 2) would pass
    their divisibility check and be silently wrong.
    """
    h0, h1 = heads
    if h1 <= h0:
        return ()
    k0 = kv_heads(heads, ratio)[0]
    first_whole, last_whole = -(-h0 // ratio) * ratio, h1 // ratio * ratio
    cuts = sorted({h0, h1, *(edge for edge in (first_whole, last_whole) if h0 < edge < h1)})
    return tuple(
        Fragment(slice(a - h0, b - h0), slice(a // ratio - k0, -(-b // ratio) - k0))
        for a, b in itertools.pairwise(cuts)
    )


def fusion_width(fusion: int, slots: int) -> int:
    """Slots a group of `slots` own slots fuses into one kernel call when the plan asks for `fusion`.

    A receive is posted ``slots`` ticks ahead, so a wider call would wait for a slot its neighbour only sends after it.
    One tick of the window is left for the transfer itself.
    """
    return max(1, min(fusion, slots - 1))


class _Ring:
    """The circle of one replica: who sends which rows of which slot to which group, and which member which heads."""

    def __init__(self, plan: Plan, replica: Replica, causal: bool) -> None:
        self.causal, self.fusion = causal, plan.fusion
        self.n = [group.slots for group in replica.groups]
        self.G, self.T, self.half = len(self.n), replica.slots, plan.slot // 2
        self.off = [sum(self.n[:g]) for g in range(self.G)]
        self.owner = [g for g, n in enumerate(self.n) for _ in range(n)]
        self.short = short_tokens(plan.seq_len, plan.slot, replica.slots)
        self.members = []
        for group in replica.groups:
            row, members = 0, []
            for shard in group.shards:
                rows = (row, row + shard.num_tokens)
                members.append(Member(shard.rank, rows, shard.heads, kv_heads(shard.heads, plan.gqa_ratio)))
                row = rows[1]
            self.members.append(tuple(members))

    def slot(self, g: int, t: int) -> int:
        return (self.off[g] + t) % self.T

    def front(self) -> Interval:
        return (0, self.half)

    def back(self, slot: int) -> Interval:
        return (self.half, 2 * self.half - (0 if slot else self.short))

    def rows_in(self, g: int, slot: int) -> Interval:
        """Rows of a foreign slot that group `g` attends to, and therefore computes gradients for."""
        return self.front() if self.causal and self.owner[slot] < g else (0, self.back(slot)[1])

    def kv_targets(self, g: int, t: int) -> list[tuple[int, Interval]]:
        """Groups that group `g` sends its slot of tick `t` to, with the rows they get."""
        slot, target = self.slot(g, t), (g - 1) % self.G
        return [] if self.owner[slot] == target else [(target, self.rows_in(target, slot))]

    def dkv_targets(self, g: int, t: int) -> list[tuple[int, Interval]]:
        """Groups that group `g` sends the gradient of its slot of tick `t` to, with the rows they get."""
        slot, target = self.slot(g, t), (g - 1) % self.G
        home = self.owner[slot]
        if home == g:
            return []
        if self.causal and g == 0 and home != target:
            return [(target, self.front()), (home, self.back(slot))]
        return [(target, self.rows_in(g, slot))]

    def hop(self, source: int, target: int, take: bool) -> Iterator[tuple[int, int, Interval]]:
        """``(sender, receiver, KV heads)`` ranks and heads of one group-to-group transfer, in member order.

        With `take`, every receiver takes each head it needs from the lowest sender that holds it: copies are equal.
        Without, every sender gives each head it holds to the lowest receiver that holds it: partial sums are not.
        """
        senders, receivers = self.members[source], self.members[target]
        sending = _claims(senders) if take else [m.kv for m in senders]
        receiving = [m.kv for m in receivers] if take else _claims(receivers)
        for s, held in zip(senders, sending, strict=True):
            for r, wanted in zip(receivers, receiving, strict=True):
                heads = (max(held[0], wanted[0]), min(held[1], wanted[1]))
                if heads[1] > heads[0]:
                    yield s.rank, r.rank, heads

    def traffic(
        self, g: int, rank: int, targets: Callable[[int, int], list[tuple[int, Interval]]], take: bool
    ) -> Traffic:
        hop = functools.cache(lambda source, target: list(self.hop(source, target, take)))

        def messages(source: int, t: int) -> Iterator[tuple[int, Message]]:
            for target, rows in targets(source, t):
                for sender, receiver, heads in hop(source, target):
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

    def blocks(self, g: int) -> tuple[Block, ...]:
        n, width = self.n[g], fusion_width(self.fusion, self.n[g])
        inner_end = self.T - self.off[g] if self.causal else self.T
        sides = ((n, inner_end, INNER if self.causal else WHOLE), (inner_end, self.T, OUTER))
        made = [Block(0, tuple(self.slot(g, t) for t in range(n)), OWN, ())]
        for start, end, side in sides:
            for first in range(start, end, width):
                slots = tuple(self.slot(g, t) for t in range(first, min(first + width, end)))
                starts = [0]
                for slot in slots:
                    starts.append(starts[-1] + self.rows_in(g, slot)[1])
                made.append(Block(first, slots, side, tuple(starts)))
        return tuple(made)


def _claims(members: tuple[Member, ...]) -> list[Interval]:
    """KV heads of each member that no lower member holds."""
    claims, end = [], 0
    for member in members:
        claims.append((max(member.kv[0], end), max(member.kv[1], end)))
        end = max(end, member.kv[1])
    return claims


def _check_progress(ring: _Ring, g: int) -> None:
    """Assert that no wait of group `g` can be part of a cycle.

    Every wait is for a batch that the other side issues when it enters the block of that batch's tick. If that block
    starts before the waiting one does, waits only ever point to earlier ticks, and a cycle is impossible: whatever the
    groups' sizes, a block of tick 0 waits for nothing.
    """
    if ring.G == 1:
        return
    before, after = ([block.first for block in ring.blocks((g + d) % ring.G) for _ in block.ticks] for d in (1, -1))
    for block in ring.blocks(g)[1:]:
        for t in block.ticks:
            assert before[t - ring.n[g]] < block.first, f"group {g} tick {t} waits for a later send"
        if block.first >= SEND_LAG:
            assert after[block.first - SEND_LAG] < block.first, f"group {g} waits for a later receive at {block.first}"

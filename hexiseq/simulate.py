"""Event simulation of a plan's attention: what every rank computes and waits for, tick by tick.

    result = simulate_ring(plan, RingTimes(own_seconds, tick_seconds, kv_seconds, dkv_seconds=None))

Given what each kernel call and each transfer takes, it says when each kernel call starts and ends and how long ranks
stall. The rules are the runtime's: slots, blocks of fused ticks, batches, receive windows and waits for old sends are
those of ``docs/architecture.md``. A rank's kernel call for a block starts when the previous one has ended and the
block's slots have arrived; a transfer starts when both sides have posted it and the link between them is free.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hexiseq.plan import Plan, Replica, claims, fusion_width, kv_heads, short_tokens

Edge = tuple[int, int]
SEND_LAG = 2
"""Batches a send may stay in flight before its sender waits for it."""


@dataclass(frozen=True)
class RingTimes:
    """Seconds of the pieces of one attention layer, for one pass (forward or backward).

    Attributes:
        own_seconds: by rank, the call on its group's own slots.
        tick_seconds: by rank, one foreign slot: kernel, merge and all else that is done per slot.
        kv_seconds: by ``(sender, receiver)`` ranks, a whole slot's KV as these two exchange it (the heads they share);
            parts of a slot take their share of it.
        dkv_seconds: the same for gradients in backward; None in forward, where none travel.
    """

    own_seconds: Sequence[float]
    tick_seconds: Sequence[float]
    kv_seconds: Mapping[Edge, float]
    dkv_seconds: Mapping[Edge, float] | None


@dataclass(frozen=True)
class BlockSpan:
    """One kernel call: ticks ``[first, first + ticks)``, from ``start`` to ``end`` in seconds since the layer began."""

    first: int
    ticks: int
    start: float
    end: float


@dataclass(frozen=True)
class RankSpan:
    """One rank: its kernel calls in order, and when the last of its transfers was done."""

    blocks: tuple[BlockSpan, ...]
    finished: float

    @property
    def busy_seconds(self) -> float:
        return sum(block.end - block.start for block in self.blocks)

    @property
    def stall_seconds(self) -> float:
        """Time spent waiting for slots, for old sends, and at the end for the last transfers."""
        return self.finished - self.busy_seconds


@dataclass(frozen=True)
class RingSimulation:
    """What every rank did, by rank."""

    ranks: tuple[RankSpan, ...]

    @property
    def seconds(self) -> float:
        return max(rank.finished for rank in self.ranks)


@dataclass(frozen=True)
class RingMessage:
    """A transfer of ``rows`` tokens of a slot: ``kind`` ``kv`` or ``dkv``, in batch ``tick`` of both its ranks.

    ``needed`` is the receiver's tick that uses it, None where a gradient has come home to the slot's owner.
    """

    kind: str
    tick: int
    slot: int
    rows: int
    sender: int
    receiver: int
    needed: int | None


def simulate_ring(plan: Plan, times: RingTimes, *, causal: bool = True, window: int | None = None) -> RingSimulation:
    """Simulate the ring of one attention layer, forward, or backward if `times` has seconds for gradients.

    Args:
        times: of all the plan's ranks.
        window: ticks ahead of its use that the receive of a KV slot is posted. None for the runtime's rule, a group's
            own slots; other values show what that rule is worth.

    Raises:
        ValueError: the plan has no ring, times are missing or negative, or the window is so small that ranks wait for
            one another for ever.
    """
    _check(plan, times, window)
    engine, spans = _Engine(), {}
    for replica in plan.replicas:
        ring = _Ring(plan, replica, causal)
        transfers = _Transfers(engine, plan, ring, times)
        for g, members in enumerate(ring.members):
            for rank, kv in members:
                spans[rank] = span = _Recorder()
                if kv[1] > kv[0]:
                    engine.start(_rank(engine, ring, transfers, g, rank, times, window, span))
    engine.run()
    stuck = sorted(rank for rank, span in spans.items() if span.running)
    if stuck:
        raise ValueError(f"ranks {stuck} wait for one another for ever: a receive window of {window} slots is too "
                         "small for this plan; use a larger one, or None for the groups' own slots")  # fmt: skip
    return RingSimulation(tuple(RankSpan(tuple(spans[r].blocks), spans[r].finished) for r in range(plan.world_size)))


def ring_messages(plan: Plan, *, causal: bool = True, backward: bool) -> list[RingMessage]:
    """All transfers of one attention layer, in the order in which each pair of ranks makes them."""
    return [
        message
        for replica in plan.replicas
        for kind in (("kv", "dkv") if backward else ("kv",))
        for message in _Ring(plan, replica, causal).messages(kind)
    ]


def ring_blocks(plan: Plan, rank: int, *, causal: bool = True) -> list[range]:
    """Ticks of each kernel call of a rank; none for a rank without heads."""
    replica, group, member = plan.place(rank)
    ring = _Ring(plan, plan.replicas[replica], causal)
    kv = ring.members[group][member][1]
    return ring.blocks(group) if kv[1] > kv[0] else []


def _check(plan: Plan, times: RingTimes, window: int | None) -> None:
    if plan.exchange != "ring":
        raise ValueError(f"only plans whose KV goes round a ring are simulated, this one has exchange {plan.exchange}")
    if window is not None and window < 1:
        raise ValueError(f"a receive window is at least 1 slot, got {window}")
    for name in ("own_seconds", "tick_seconds"):
        seconds = getattr(times, name)
        if len(seconds) != plan.world_size:
            raise ValueError(f"{name} has {len(seconds)} values, the plan {plan.world_size} ranks")
        for rank, value in enumerate(seconds):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value} for rank {rank}")


class _Ring:
    """The circle of one replica's slots: who works on which slot when, and what travels for it."""

    def __init__(self, plan: Plan, replica: Replica, causal: bool) -> None:
        self.causal, self.fusion, self.slot_tokens = causal, plan.fusion, plan.slot
        self.n = [group.slots for group in replica.groups]
        self.groups, self.total = len(self.n), replica.slots
        self.first = [sum(self.n[:g]) for g in range(self.groups)]
        self.owner = [g for g, n in enumerate(self.n) for _ in range(n)]
        self.short = short_tokens(plan.seq_len, plan.slot, replica.slots)
        # Per group its (rank, KV heads) members.
        self.members = [[(s.rank, kv_heads(s.heads, plan.gqa_ratio)) for s in group.shards] for group in replica.groups]

    def slot(self, g: int, t: int) -> int:
        return (self.first[g] + t) % self.total

    def blocks(self, g: int) -> list[range]:
        """Ticks of each kernel call: the own slots, then runs of at most the fusion width from one side."""
        n, inner_end = self.n[g], self.total - self.first[g] if self.causal else self.total
        width, runs = fusion_width(self.fusion, n), [range(0, n)]
        for start, end in ((n, inner_end), (inner_end, self.total)):
            runs += [range(first, min(first + width, end)) for first in range(start, end, width)]
        return runs

    def rows(self, slot: int) -> tuple[int, int]:
        """Tokens of a slot's front and back half."""
        half = self.slot_tokens // 2
        return half, half - (0 if slot else self.short)

    def used(self, g: int, slot: int) -> int:
        """Tokens of a foreign slot that group `g` attends to: of an outer group's slot the front half only."""
        front, back = self.rows(slot)
        return front if self.causal and self.owner[slot] < g else front + back

    def targets(self, kind: str, g: int, t: int) -> list[tuple[int, int]]:
        """``(group, tokens)`` that group `g` sends of its slot of tick `t`, or of that slot's gradient."""
        slot, before = self.slot(g, t), (g - 1) % self.groups
        home = self.owner[slot]
        if kind == "kv":
            return [] if home == before else [(before, self.used(before, slot))]
        if home == g:
            return []
        if self.causal and g == 0 and home != before:  # nobody further on uses the back half: it goes straight home
            front, back = self.rows(slot)
            return [(before, front), (home, back)]
        return [(before, self.used(g, slot))]

    def messages(self, kind: str) -> Iterator[RingMessage]:
        if self.groups == 1:
            return
        pairs = functools.cache(self.pairs)
        for g, t in itertools.product(range(self.groups), range(self.total)):
            slot = self.slot(g, t)
            for target, rows in self.targets(kind, g, t):
                if not rows:  # the outermost back half-slot can be missing
                    continue
                needed = None if self.owner[slot] == target else (slot - self.first[target]) % self.total
                for sender, receiver in pairs(kind, g, target):
                    yield RingMessage(kind, t, slot, rows, sender, receiver, needed)

    def pairs(self, kind: str, source: int, target: int) -> list[Edge]:
        """Ranks that exchange heads when group `source` sends to group `target`.

        Every receiver takes a KV head from the lowest sender that holds it; every sender gives its share of a
        gradient to the lowest receiver that holds the head.
        """
        senders, receivers = self.members[source], self.members[target]
        sending, receiving = [kv for _, kv in senders], [kv for _, kv in receivers]
        if kind == "kv":
            sending = claims(sending)
        else:
            receiving = claims(receiving)
        return [
            (s, r)
            for (s, _), held in zip(senders, sending, strict=True)
            for (r, _), wanted in zip(receivers, receiving, strict=True)
            if max(held[0], wanted[0]) < min(held[1], wanted[1])
        ]


class _Engine:
    """A clock, what happens next, and processes: generators that yield seconds to work or a transfer to wait for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()  # events of one instant happen in the order they were scheduled
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def start(self, process: Process) -> None:
        def go_on() -> None:
            for wanted in process:
                if isinstance(wanted, float):
                    self.at(self.now + wanted, go_on)
                    return
                if not wanted.done:
                    wanted.waiting.append(go_on)
                    return

        self.at(self.now, go_on)


@dataclass(eq=False)
class _Transfer:
    message: RingMessage
    seconds: float
    sides: int = 0
    done: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)


Process = Generator[float | _Transfer, None, None]


class _Transfers:
    """All transfers of a replica. Each directed link carries one at a time, in the order they become ready."""

    def __init__(self, engine: _Engine, plan: Plan, ring: _Ring, times: RingTimes) -> None:
        self.engine = engine
        self._free: dict[Edge, float] = defaultdict(float)
        self.sends: dict[tuple[str, int], list[_Transfer]] = defaultdict(list)
        self.receives: dict[tuple[str, int], list[_Transfer]] = defaultdict(list)
        tables = {"kv": times.kv_seconds} | ({"dkv": times.dkv_seconds} if times.dkv_seconds is not None else {})
        for kind, table in tables.items():
            for message in ring.messages(kind):
                edge = (message.sender, message.receiver)
                if edge not in table:
                    raise ValueError(f"{kind}_seconds lacks the link from rank {edge[0]} to rank {edge[1]}")
                transfer = _Transfer(message, table[edge] * message.rows / plan.slot)
                self.sends[kind, message.sender].append(transfer)
                self.receives[kind, message.receiver].append(transfer)

    def post(self, transfer: _Transfer) -> None:
        """One side is ready; at the second the transfer queues for its link."""
        transfer.sides += 1
        if transfer.sides < 2:
            return
        edge = (transfer.message.sender, transfer.message.receiver)
        self._free[edge] = max(self.engine.now, self._free[edge]) + transfer.seconds
        self.engine.at(self._free[edge], lambda: self._finish(transfer))

    def _finish(self, transfer: _Transfer) -> None:
        transfer.done = True
        for go_on in transfer.waiting:
            go_on()


class _Recorder:
    def __init__(self) -> None:
        self.blocks: list[BlockSpan] = []
        self.finished, self.running = 0.0, False


def _rank(
    engine: _Engine, ring: _Ring, transfers: _Transfers, g: int, rank: int, times: RingTimes, window: int | None,
    span: _Recorder,
) -> Process:  # fmt: skip
    """What one rank does in one layer; the order of its steps is that of the runtime's `kv_ring`."""
    n, before = ring.n[g], ring.n[(g - 1) % ring.groups]
    due, due_before = (n, before) if window is None else (window, window)
    held = SEND_LAG + max(0, before - due_before)  # until the receiver is sure to have posted its side
    sends, grads = _by_tick(transfers.sends["kv", rank]), _by_tick(transfers.sends["dkv", rank])
    posting: dict[int, list[_Transfer]] = defaultdict(list)
    arriving: dict[int | None, list[_Transfer]] = defaultdict(list)
    for transfer in transfers.receives["kv", rank]:
        assert transfer.message.needed is not None
        posting[max(0, transfer.message.needed - due)].append(transfer)
        arriving[transfer.message.needed].append(transfer)
    grads_posting = _by_tick(transfers.receives["dkv", rank])
    grads_arriving: dict[int | None, list[_Transfer]] = defaultdict(list)
    for transfer in transfers.receives["dkv", rank]:
        grads_arriving[transfer.message.needed].append(transfer)
    flying: dict[str, deque[_Transfer]] = {"kv": deque(), "dkv": deque()}
    span.running = True

    def post(transfers_: Sequence[_Transfer]) -> None:
        for transfer in transfers_:
            transfers.post(transfer)

    def reap(kind: str, last: int) -> Iterator[_Transfer]:
        while flying[kind] and flying[kind][0].message.tick <= last:
            yield flying[kind].popleft()

    for t in range(n):
        post(grads_posting[t])
    for block in ring.blocks(g):
        foreign = block.start > 0
        for t in block:
            yield from arriving[t]
        for t in block:
            post(sends[t] + posting[t])
            flying["kv"] += sends[t]
        yield from reap("kv", block.start - held)
        start = engine.now
        yield float(times.tick_seconds[rank] * len(block) if foreign else times.own_seconds[rank])
        span.blocks.append(BlockSpan(block.start, len(block), start, engine.now))
        for t in block if foreign else ():
            yield from grads_arriving[t]
            post(grads[t] + grads_posting[t])
            flying["dkv"] += grads[t]
        yield from reap("dkv", block.start - SEND_LAG)
    yield from reap("kv", ring.total)
    yield from grads_arriving[None]
    yield from reap("dkv", ring.total)
    span.finished, span.running = engine.now, False


def _by_tick(transfers: Sequence[_Transfer]) -> dict[int, list[_Transfer]]:
    found: dict[int, list[_Transfer]] = defaultdict(list)
    for transfer in transfers:
        found[transfer.message.tick].append(transfer)
    return found

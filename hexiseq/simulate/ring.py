"""The ring of one attention layer: whose slots travel when, and what a rank does tick by tick.

The rules are the runtime's: slots, blocks of fused ticks, batches, receive windows and waits for old sends are those of
``docs/architecture.md``. A rank's kernel call for a block starts when the previous one has ended and the block's slots
have arrived; a transfer may start when both sides have posted it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hexiseq.plan import Plan, Replica, claims, fusion_width, kv_heads, short_tokens
from hexiseq.simulate.engine import Carrier, Clock, Edge, OwnLinks, Process, Transfer, Work

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

    Every pair of ranks has a link of its own that carries one transfer at a time, in the order they become ready.

    Args:
        times: of all the plan's ranks.
        window: ticks ahead of its use that the receive of a KV slot is posted. None for the runtime's rule, a group's
            own slots; other values show what that rule is worth.

    Raises:
        ValueError: the plan has no ring, times are missing or negative, or the window is so small that ranks wait for
            one another for ever.
    """
    _check(plan, times, window)
    clock, logs = Clock(), [_Recorder() for _ in range(plan.world_size)]
    links = OwnLinks(clock)
    tables = {"kv": times.kv_seconds} | ({"dkv": times.dkv_seconds} if times.dkv_seconds is not None else {})

    def transfer(message: RingMessage) -> Transfer:
        edge, table = (message.sender, message.receiver), tables[message.kind]
        if edge not in table:
            raise ValueError(f"{message.kind}_seconds lacks the link from rank {edge[0]} to rank {edge[1]}")
        return Transfer(message.kind, *edge, table[edge] * message.rows / plan.slot)

    def alone(rank: int, process: Process) -> Process:
        yield from process
        logs[rank].finished, logs[rank].running = clock.now, False

    def call(rank: int, block: range) -> Work:
        foreign = block.start > 0
        seconds = times.tick_seconds[rank] * len(block) if foreign else times.own_seconds[rank]
        return Work("attention", float(seconds), block)

    for replica in plan.replicas:
        ring = Ring(plan, replica, causal)
        messages = [message for kind in tables for message in ring.messages(kind)]
        mail = Mail(messages, [transfer(message) for message in messages])
        for g, members in enumerate(ring.members):
            for rank, kv in members:
                if kv[1] > kv[0]:
                    logs[rank].running = True
                    process = ring_process(ring, mail, links, g, rank, functools.partial(call, rank), window, Held())
                    clock.start(alone(rank, process), logs[rank])
    clock.run()
    check_finished([rank for rank, log in enumerate(logs) if log.running], window)
    return RingSimulation(tuple(RankSpan(tuple(log.blocks), log.finished) for log in logs))


def ring_messages(plan: Plan, *, causal: bool = True, backward: bool) -> list[RingMessage]:
    """All transfers of one attention layer, in the order in which each pair of ranks makes them."""
    return [
        message
        for replica in plan.replicas
        for kind in (("kv", "dkv") if backward else ("kv",))
        for message in Ring(plan, replica, causal).messages(kind)
    ]


def ring_blocks(plan: Plan, rank: int, *, causal: bool = True) -> list[range]:
    """Ticks of each kernel call of a rank; none for a rank without heads."""
    replica, group, member = plan.place(rank)
    ring = Ring(plan, plan.replicas[replica], causal)
    kv = ring.members[group][member][1]
    return ring.blocks(group) if kv[1] > kv[0] else []


def check_finished(stuck: Sequence[int], window: int | None) -> None:
    """Raise ValueError when ranks were left waiting."""
    if stuck:
        raise ValueError(f"ranks {list(stuck)} wait for one another for ever: a receive window of {window} slots is "
                         "too small for this plan; use a larger one, or None for the groups' own slots")  # fmt: skip


def check_window(window: int | None) -> None:
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"a receive window is at least 1 slot, got {window!r}")


def _check(plan: Plan, times: RingTimes, window: int | None) -> None:
    if plan.exchange != "ring":
        raise ValueError(f"only plans whose KV goes round a ring have one to simulate, this one has exchange "
                         f"{plan.exchange}; simulate_step takes both")  # fmt: skip
    check_window(window)
    for name in ("own_seconds", "tick_seconds"):
        seconds = getattr(times, name)
        if len(seconds) != plan.world_size:
            raise ValueError(f"{name} has {len(seconds)} values, the plan {plan.world_size} ranks")
        for rank, value in enumerate(seconds):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value} for rank {rank}")


class Ring:
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

    def foreign_slots(self, g: int) -> float:
        """All that group `g` attends to besides its own, in slots: halves count as such."""
        return sum(self.used(g, self.slot(g, t)) for t in range(self.n[g], self.total)) / self.slot_tokens

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


def together(ring: Ring, messages: Sequence[RingMessage]) -> list[RingMessage]:
    """The messages with those joined that both sides post in one block each, and the receiver needs in one block.

    They follow one another on their way and nobody waits for a part of them, but that dKV of a block is passed on as it
    comes in: joined, it goes when the last of it has come. Many slots fused into few calls are simulated so in a
    fraction of the time.
    """
    block_of = [[i for i, block in enumerate(ring.blocks(g)) for _ in block] for g in range(ring.groups)]
    home = {rank: g for g, members in enumerate(ring.members) for rank, _ in members}
    found: dict[tuple, list[RingMessage]] = {}
    for m in messages:
        sending, receiving = block_of[home[m.sender]], block_of[home[m.receiver]]
        needed = None if m.needed is None else receiving[m.needed]
        key = (m.kind, m.sender, m.receiver, sending[m.tick], receiving[m.tick], needed)
        found.setdefault(key, []).append(m)
    return [
        # A send is due with its first tick, a gradient when its last tick is done.
        dataclasses.replace(
            parts[0], tick=parts[0 if parts[0].kind == "kv" else -1].tick, rows=sum(part.rows for part in parts)
        )
        for parts in found.values()
    ]


class Mail:
    """The transfers of one layer's ring in one pass, as its ranks look for them."""

    def __init__(self, messages: Sequence[RingMessage], transfers: Sequence[Transfer]) -> None:
        self.sends: dict[tuple[str, int], dict[int, list[Transfer]]] = defaultdict(_by_tick)
        self.receives: dict[tuple[str, int], dict[int, list[Transfer]]] = defaultdict(_by_tick)
        self.needed: dict[tuple[str, int], dict[int | None, list[Transfer]]] = defaultdict(_by_tick)
        for message, transfer in zip(messages, transfers, strict=True):
            self.sends[message.kind, message.sender][message.tick].append(transfer)
            self.receives[message.kind, message.receiver][message.tick].append(transfer)
            self.needed[message.kind, message.receiver][message.needed].append(transfer)


def _by_tick() -> dict:
    return defaultdict(list)


class Held:
    """Foreign KV a rank has room for at one time, in slots, and the most there was."""

    def __init__(self) -> None:
        self.now = self.most = 0.0

    def add(self, slots: float) -> None:
        self.now += slots
        self.most = max(self.most, self.now)


def ring_process(
    ring: Ring, mail: Mail, carrier: Carrier, g: int, rank: int, call: Callable[[range], Work], window: int | None,
    held: Held,
) -> Process:  # fmt: skip
    """What one rank does in one layer; the order of its steps is that of the runtime's `kv_ring`."""
    n, before = ring.n[g], ring.n[(g - 1) % ring.groups]
    due, due_before = (n, before) if window is None else (window, window)
    lag = SEND_LAG + max(0, before - due_before)  # until the receiver is sure to have posted its side
    sends, arriving = mail.sends["kv", rank], mail.needed["kv", rank]
    grads, grads_arriving = mail.sends["dkv", rank], mail.needed["dkv", rank]
    grads_posting = mail.receives["dkv", rank]
    flying: dict[str, deque[tuple[int, Sequence[Transfer]]]] = {"kv": deque(), "dkv": deque()}
    blocks = ring.blocks(g)
    # A block's buffer is made for its first receive, and freed when its slots have been passed on.
    size = [sum(ring.used(g, ring.slot(g, t)) for t in block) / ring.slot_tokens for block in blocks]
    made, passed = 1, deque[tuple[int, float]]()

    def reap(kind: str, last: int) -> list[Transfer]:
        found: list[Transfer] = []
        while flying[kind] and flying[kind][0][0] <= last:
            found += flying[kind].popleft()[1]
        return found

    def post(transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            carrier.post(transfer, rank)

    def send(kind: str, tick: int, transfers: Sequence[Transfer]) -> None:
        post(transfers)
        if transfers:
            flying[kind].append((tick, transfers))

    for t in range(n):
        post(grads_posting.get(t, ()))
    for index, block in enumerate(blocks):
        foreign = index > 0
        yield [transfer for t in block for transfer in arriving.get(t, ())] if foreign else []
        for t in block:
            # Receives are posted `due` ticks ahead, those of the first such ticks all at the start.
            ahead = range(n, due + 1) if t == 0 else range(t + due, t + due + 1)
            while made < len(blocks) and blocks[made].start < ahead.stop:
                held.add(size[made])
                made += 1
            send("kv", t, sends.get(t, ()))
            for tick in ahead:
                if tick >= n:
                    post(arriving.get(tick, ()))
        yield reap("kv", block.start - lag)
        while passed and passed[0][0] <= block.start - SEND_LAG:
            held.add(-passed.popleft()[1])
        yield call(block)
        if foreign:
            passed.append((block[-1], size[index]))
            for t in block:
                if t in grads_arriving:
                    yield grads_arriving[t]
                send("dkv", t, grads.get(t, ()))
                post(grads_posting.get(t, ()))
        yield reap("dkv", block.start - SEND_LAG)
    yield reap("kv", ring.total)
    yield grads_arriving.get(None, ())
    yield reap("dkv", ring.total)
    held.add(-held.now)


class _Recorder:
    def __init__(self) -> None:
        self.blocks: list[BlockSpan] = []
        self.finished, self.running = 0.0, False

    def worked(self, work: Work, start: float, end: float) -> None:
        assert work.ticks is not None
        self.blocks.append(BlockSpan(work.ticks.start, len(work.ticks), start, end))

    def waited(self, last: Transfer, start: float, end: float) -> None:
        """What is not a kernel call is a stall."""

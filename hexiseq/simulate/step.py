"""Event simulation of a whole step: every rank's kernel calls, every transfer, on wires they share.

    simulation = simulate_step(plan, cluster, workload)

What a kernel call takes and a transfer weighs is the cost model's; who waits for whom, and for how long, is found out
here. See ``docs/simulate.md``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hexiseq.cluster import Cluster, Place
from hexiseq.cost import (
    BACKWARD_LINEAR,
    ReplicaCost,
    Wires,
    accumulator_bytes,
    check_offload,
    check_workload,
    match_places,
    optimizer_seconds,
    passes,
    replica_cost,
)
from hexiseq.plan import Plan, RankDevice, Replica
from hexiseq.simulate.engine import GB, Carrier, Clock, Edge, Process, SharedWires, Transfer, Work
from hexiseq.simulate.ring import Held, Mail, Ring, check_finished, check_window, ring_process, together
from hexiseq.workload import ModelShape, Workload

LEAST_LAYERS = 3  # a first, one with neighbours on both sides, and a last
# Exchanges that a plan cannot hide, so that waiting while they move is no stall.
EXPOSED = ("all-to-all", "dkv return")


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in a step; they add up to the step.

    Attributes:
        busy: in kernel calls.
        exchange: waiting while an all-to-all or the return of gathered dKV moves: nothing can hide these.
        stall: all other waiting: for ranks that come late, for slots, gathers and parameters that are not there yet.
    """

    busy: float
    exchange: float
    stall: float


@dataclass(frozen=True)
class Stall:
    """What one rank waited for in a step, and why.

    A rank that comes late may itself have waited: `peer`, `late` and `wire` say where the chain began.

    Attributes:
        kind: of the transfer `rank` waited for: all-to-all, kv, dkv, dkv return, gather, reduce, host copy.
        peer: the rank it comes down to.
        late: whether that was at work still; else it is at the other end of a transfer that was under way.
        wire: what held the transfer back; of one that was not under way yet, what did in the end.
    """

    rank: int
    peer: int
    kind: str
    late: bool
    wire: str
    seconds: float


@dataclass(frozen=True)
class Phase:
    """A layer's pass, or what comes before, between and after the layers; seconds since its micro-step began.

    Attributes:
        name: ``start`` (first parameters), ``forward``, ``loss``, ``backward``, ``finish`` (last gradients, optimizer).
        layer: counted within what is simulated event by event; -1 outside layers.
        kind: of the layer: ``full`` or ``window``; empty outside layers.
        start, end: when the last rank began it, and the one after it.
        repeats: how many such layers of the step it stands for.
    """

    micro_step: int
    name: str
    layer: int
    kind: str
    start: float
    end: float
    repeats: float


@dataclass(frozen=True)
class Span:
    """What one rank's compute lane (`peer` None) did, or a transfer it received from `peer`, in seconds."""

    rank: int
    name: str
    start: float
    end: float
    peer: int | None = None
    size: float = 0.0


@dataclass(frozen=True)
class StepSimulation:
    """A simulated optimizer step.

    Attributes:
        ranks: by rank.
        phases: the layers' time line, micro-step after micro-step as far as they are simulated event by event.
        stalls: longest first.
        buffers: per replica and group, the most slots of foreign KV one of its ranks had room for at one time.
        devices: by rank.
        spans: with ``trace``: every kernel call and transfer that was simulated event by event, in seconds.
        traced: with ``trace``: what `ranks` counts of these spans alone, nothing extended.
    """

    step_seconds: float
    tokens_per_second: float
    ranks: tuple[RankTimes, ...]
    phases: tuple[Phase, ...]
    stalls: tuple[Stall, ...]
    buffers: tuple[tuple[float, ...], ...]
    devices: tuple[RankDevice, ...]
    spans: tuple[Span, ...] = ()
    traced: tuple[RankTimes, ...] = ()

    @property
    def utilisation(self) -> float:
        """Mean over ranks of busy time over step time."""
        return sum(rank.busy for rank in self.ranks) / (len(self.ranks) * self.step_seconds)


def simulate_step(
    plan: Plan,
    cluster: Cluster,
    workload: Workload,
    *,
    places: Sequence[Place] | None = None,
    jitter: float = 0.0,
    stragglers: Mapping[int, float] | None = None,
    seed: int = 0,
    window: int | None = None,
    layers: int = LEAST_LAYERS,
    trace: bool = False,
) -> StepSimulation:
    """Simulate one optimizer step of a plan.

    Args:
        places: the device of each rank; by default matched by device type and node.
        jitter: standard deviation of the logarithm of a factor of mean 1 on every kernel call.
        stragglers: by rank, a factor on the time of all its kernel calls.
        seed: of the jitter; the same seed gives the same simulation.
        window: ticks ahead of its use that the receive of a KV slot is posted; None for the runtime's rule.
        layers: layers of each kind that are simulated event by event, at least 3; those between the first and the last
            stand for the others.
        trace: keep every kernel call and transfer, for `write_trace`.

    Raises:
        ValueError: the plan is for another workload or cluster, or an argument makes no sense; the receive window is
            so small that ranks wait for one another for ever.
    """
    check_workload(plan, workload)
    places = match_places(plan, cluster) if places is None else tuple(places)
    check_offload(workload, places)
    slow = _check(plan, jitter, stragglers or {}, seed, window, layers)
    noise = _Noise(slow, jitter, seed)
    kinds = [dataclasses.replace(workload, model=model) for model in workload.model.kinds]
    parts = [
        [_Part(plan, replica, kind, places, window) for kind in kinds] for replica in plan.replicas
    ]  # by replica and kind of layer  # fmt: skip
    chain = [k for k, kind in enumerate(kinds) for _ in range(min(layers, kind.model.layers))]

    runs, micro_steps = [], []
    if workload.accumulation > 1:
        micro_steps.append((workload.accumulation - 1, False))
    micro_steps.append((1, True))
    for repeats, last in micro_steps:
        run = _MicroStep(plan, cluster, workload, places, parts, chain, noise, window, last, trace)
        run.simulate()
        runs.append((repeats, run))
    return _summary(plan, workload, kinds, chain, runs, trace)


def _check(
    plan: Plan, jitter: float, stragglers: Mapping[int, float], seed: int, window: int | None, layers: int
) -> list[float]:
    """The factor of each rank's kernel calls."""

    def number(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

    if not number(jitter) or not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be a number from 0 to 1, got {jitter!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"the jitter's seed must be an integer, got {seed!r}")
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < LEAST_LAYERS:
        raise ValueError(f"layers to simulate must be an integer of at least {LEAST_LAYERS}, got {layers!r}")
    if not isinstance(stragglers, Mapping):
        raise ValueError(f"stragglers must be factors by rank, such as {{3: 1.5}}, got {stragglers!r}")
    check_window(window)
    slow = [1.0] * plan.world_size
    for rank, factor in stragglers.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < plan.world_size:
            raise ValueError(f"straggler {rank!r} is not a rank of the plan: they are 0 to {plan.world_size - 1}")
        if not number(factor) or factor <= 0:
            raise ValueError(f"the factor of straggler {rank} must be a positive number, got {factor!r}")
        slow[rank] = float(factor)
    return slow


class _Noise:
    """What the kernel calls of a rank take: its own factor, and a random one for each call."""

    def __init__(self, slow: Sequence[float], jitter: float, seed: int) -> None:
        self.slow, self.jitter = slow, jitter
        # One stream for each rank: what it draws does not depend on the order of events.
        self._random = [random.Random(f"{seed} {rank}") for rank in range(len(slow))]

    def work(self, rank: int, name: str, seconds: float, ticks: range | None = None) -> Work:
        seconds *= self.slow[rank]
        if self.jitter:
            seconds *= self._random[rank].lognormvariate(-0.5 * self.jitter**2, self.jitter)
        return Work(name, seconds, ticks)


@dataclass(frozen=True)
class _Pass:
    """Attention's forward or backward pass in a layer of one replica; seconds and bytes by its ranks' order."""

    name: str
    own: Sequence[float]
    foreign: Sequence[float]
    into: np.ndarray
    back: np.ndarray


class _Part:
    """One replica's layers of one kind: what they compute and send, by the cost model."""

    def __init__(
        self, plan: Plan, replica: Replica, workload: Workload, places: Sequence[Place], window: int | None
    ) -> None:
        cost = replica_cost(plan, replica, workload, places)
        self.cost, self.ranks = cost, cost.ranks.tolist()
        self.index = {rank: i for i, rank in enumerate(self.ranks)}
        self.group = {shard.rank: g for g, group in enumerate(replica.groups) for shard in group.shards}
        self.linear, self.loss, self.copy = cost.linear.tolist(), cost.loss.tolist(), cost.copy.tolist()
        heads_in, heads_out, grads_in, grads_out = cost.exchange.matrix()
        self.forward = _pass("forward", cost, heads_in, heads_out)
        self.backward = _pass("backward", cost, grads_in, grads_out)
        self.ring = Ring(plan, replica, causal=True)
        self.held = [Held() for _ in self.ranks]
        kv, dkv = ((list(self.ring.messages(kind)) if plan.exchange == "ring" else []) for kind in ("kv", "dkv"))
        if window is None:
            kv, dkv = together(self.ring, kv), together(self.ring, dkv)
        self.messages = {"forward": kv, "backward": kv + dkv}
        rows: dict[tuple[str, int, int], int] = defaultdict(int)
        for message in kv + dkv:
            rows[message.kind, message.sender, message.receiver] += message.rows
        self.moved = {"kv": cost.kv.matrix()[0], "dkv": cost.dkv.matrix()[0]}
        # Of all that the cost model sends from rank to rank a message has the share of its rows.
        unit = {
            (kind, s, r): float(self.moved[kind][self.index[s], self.index[r]]) / count
            for (kind, s, r), count in rows.items()
        }
        sizes = [(message.kind, message.sender, message.receiver) for message in kv + dkv]
        self.sent = [
            (*key, unit[key] * message.rows) for key, message in zip(sizes, kv + dkv, strict=True)
        ]  # fmt: skip

    def mail(self, name: str) -> Mail:
        """Fresh transfers for one layer's ring in one pass."""
        messages = self.messages[name]
        return Mail(messages, [Transfer(*self.sent[i]) for i in range(len(messages))])


def _pass(name: str, cost: ReplicaCost, into: np.ndarray, back: np.ndarray) -> _Pass:
    own = getattr(cost, f"own_{name}")
    foreign = getattr(cost, f"attention_{name}") + getattr(cost, f"merge_{name}") - own
    return _Pass(name, own.tolist(), np.maximum(foreign, 0.0).tolist(), into, back)


# From when to when, and why: the rank it comes down to, whether that was at work, and the wire.
_Wait = tuple[float, float, tuple[int, bool, str]]


class _Log:
    """One rank's time, by the phase it is in; `others` are all ranks' logs."""

    def __init__(self, rank: int, clock: Clock, others: Sequence[_Log], trace: bool) -> None:
        self.rank, self.clock, self.others = rank, clock, others
        self.waits: list[_Wait] = []
        self.marks: list[float] = []
        self.busy: list[float] = []
        self.exchange: list[float] = []
        self.stalls: list[dict[tuple[int, str, bool, str], float]] = []
        self.spans: list[tuple[str, float, float]] | None = [] if trace else None
        self.finished = math.nan

    def mark(self) -> None:
        """The next phase begins."""
        self.marks.append(self.clock.now)
        self.busy.append(0.0)
        self.exchange.append(0.0)
        self.stalls.append(defaultdict(float))

    def worked(self, work: Work, start: float, end: float) -> None:
        self.busy[-1] += work.seconds
        if self.spans is not None and work.seconds > 0:
            self.spans.append((work.name, start, end))

    def waited(self, last: Transfer, start: float, end: float) -> None:
        if end <= start:
            return
        moving = max(start, min(end, last.posted))
        found = self._why(last.late, start, moving, last.wire) if moving > start else []
        for since, until, (peer, late, wire) in found:
            self.stalls[-1][peer, last.kind, late, wire] += until - since
        if end > moving:
            peer = last.sender if last.receiver == self.rank else last.receiver
            found.append((moving, end, (peer, False, last.wire)))
            if last.kind in EXPOSED:
                self.exchange[-1] += end - moving
            else:
                self.stalls[-1][peer, last.kind, False, last.wire] += end - moving
        self.waits += found

    def _why(self, late: int, start: float, end: float, wire: str) -> list[_Wait]:
        """Why a rank that came late at `end` did so: it was at work, or waited itself, for reasons known by then."""
        found: list[_Wait] = []
        for since, until, cause in reversed(self.others[late].waits):
            if until <= start:
                break
            if until < end:
                found.append((until, end, (late, True, wire)))
            found.append((max(since, start), min(until, end), cause))
            end = max(since, start)
        if end > start:
            found.append((start, end, (late, True, wire)))
        return found[::-1]


class _Collective:
    """An operation of all ranks, with as many bytes on every wire of their circle; it begins when the last has joined.

    A rank waits for it as for one transfer: of all its transfers, the one that ends last.
    """

    def __init__(self, carrier: Carrier, kind: str, circle: Sequence[Edge], size: float) -> None:
        self.carrier, self.kind, self.circle, self.size = carrier, kind, circle, size
        self.joined, self.left = 0, len(circle)
        self.whole = Transfer(kind, -1, -1, size)
        if not circle:
            self.whole.done = True

    def join(self, rank: int) -> None:
        self.joined += 1
        if self.joined < len(self.circle):
            return
        self.whole.posted, self.whole.late = self.carrier.clock.now, rank
        for sender, receiver in self.circle:
            part = Transfer(self.kind, sender, receiver, self.size)
            part.waiting.append(self._arrived)
            self.carrier.carry(part, rank)

    def _arrived(self, part: Transfer) -> None:
        self.left -= 1
        if self.left:
            return
        whole = self.whole
        whole.done, whole.wire, whole.sender, whole.receiver = True, part.wire, part.sender, part.receiver
        for go_on in whole.waiting:
            go_on(whole)


class _MicroStep:
    """One micro-step of all ranks: parameters, layers forward, loss, layers backward; at the last, the optimizer."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        workload: Workload,
        places: Sequence[Place],
        parts: Sequence[Sequence[_Part]],
        chain: Sequence[int],
        noise: _Noise,
        window: int | None,
        last: bool,
        trace: bool,
    ) -> None:
        self.plan, self.workload, self.parts, self.chain = plan, workload, parts, chain
        self.noise, self.window, self.last = noise, window, last
        self.clock = Clock()
        self.wires = SharedWires(self.clock, cluster, places)
        if trace:
            self.wires.carried = []
        self.logs: list[_Log] = []
        self.logs += [_Log(rank, self.clock, self.logs, trace) for rank in range(plan.world_size)]
        # From node to node, as few wires between nodes as there are nodes.
        order = sorted(range(plan.world_size), key=lambda rank: (places[rank].node, rank))
        self.circle = list(itertools.pairwise([*order, order[0]])) if len(order) > 1 else []
        self._collectives: dict[tuple[str, int], _Collective] = {}
        self._mail: dict[tuple, Mail] = {}
        self._meetings: dict[tuple, dict[int, list[Transfer]]] = {}
        # One device alone would have all states; it has a share of them.
        self.optimizer = [optimizer_seconds(workload, Wires(cluster, [place])) / len(places) for place in places]

    def simulate(self) -> None:
        for r, replica in enumerate(self.plan.replicas):
            for rank in replica.ranks:
                self.clock.start(self._rank(r, rank), self.logs[rank])
        self.clock.run()
        check_finished([rank for rank, log in enumerate(self.logs) if math.isnan(log.finished)], self.window)

    @property
    def seconds(self) -> float:
        return max(log.finished for log in self.logs)

    def phases(self) -> list[tuple[str, int]]:
        """Name and layer of every phase, as `_rank` marks them."""
        layers = range(len(self.chain))
        return [
            ("start", -1), *(("forward", i) for i in layers), ("loss", -1),
            *(("backward", i) for i in reversed(layers)), ("finish", -1),
        ]  # fmt: skip

    def _rank(self, r: int, rank: int) -> Process:
        log, end = self.logs[rank], len(self.chain) - 1
        again = not self.workload.keep_parameters  # parameters are gathered again for backward
        log.mark()
        self._collective("gather", -1).join(rank)
        self._collective("gather", 0).join(rank)
        yield [self._collective("gather", -1).whole]
        copying: list[Transfer] = []  # with offload the input of the layer before, on its way out; or in
        for i in range(end + 1):
            yield [self._collective("gather", i).whole, *copying]
            log.mark()
            part = self.parts[r][self.chain[i]]
            copying = self._copy(rank, part) if i < end else []  # the last layer's input stays
            if i < end:  # one layer ahead
                self._collective("gather", i + 1).join(rank)
            yield self.noise.work(rank, "linear", part.linear[part.index[rank]])
            yield from self._attention(rank, part, part.forward, (r, i, "forward"))
        log.mark()
        if again:
            self._collective("gather again", end).join(rank)
        part = self.parts[r][0]
        yield self.noise.work(rank, "loss", part.loss[part.index[rank]])
        for i in range(end, -1, -1):
            yield [*copying, *([self._collective("gather again", i).whole] if again else [])]
            log.mark()
            copying = self._copy(rank, self.parts[r][self.chain[i - 1]]) if i else []
            if again and i:
                self._collective("gather again", i - 1).join(rank)
            yield from self._backward(rank, self.parts[r][self.chain[i]], (r, i))
            if self.last:
                if i < end:  # one reduction is under way at a time
                    yield [self._collective("reduce", i + 1).whole]
                self._collective("reduce", i).join(rank)
        log.mark()
        if self.last:
            self._collective("reduce", -1).join(rank)
            yield [self._collective("reduce", 0).whole, self._collective("reduce", -1).whole]
            yield self.noise.work(rank, "optimizer", self.optimizer[rank])
        log.finished = self.clock.now

    def _copy(self, rank: int, part: _Part) -> list[Transfer]:
        """With offload, a layer's input begins to go to host memory, or to come back: nothing else is in its way."""
        if not self.workload.offload:
            return []
        seconds, places = part.copy[part.index[rank]], self.wires.places
        size = seconds * (places[rank].device.host_gb_per_s or 0.0) * GB
        transfer = Transfer("host copy", rank, rank, size, late=rank, wire="copies between device and host memory")
        self.wires.apart(transfer, seconds)
        return [transfer]

    def _backward(self, rank: int, part: _Part, where: tuple) -> Process:
        forwards, linears = passes(self.workload.recompute)
        seconds = part.linear[part.index[rank]]
        if linears > 1 + BACKWARD_LINEAR:
            yield self.noise.work(rank, "linear again", (linears - 1 - BACKWARD_LINEAR) * seconds)
        for repeat in range(1, forwards):
            yield from self._attention(rank, part, part.forward, (*where, "again", repeat))
        yield from self._attention(rank, part, part.backward, (*where, "backward"))
        yield self.noise.work(rank, "linear backward", BACKWARD_LINEAR * seconds)

    def _attention(self, rank: int, part: _Part, work: _Pass, where: tuple) -> Process:
        yield from self._exchange(rank, part, "all-to-all", work.into, (*where, "in"))
        across = self._ring if self.plan.exchange == "ring" else self._gathered
        yield from across(rank, part, work, where)
        yield from self._exchange(rank, part, "all-to-all", work.back, (*where, "out"))

    def _exchange(self, rank: int, part: _Part, kind: str, sizes: np.ndarray, where: tuple) -> Process:
        yield self._meet(rank, part, kind, sizes, where)

    def _ring(self, rank: int, part: _Part, work: _Pass, where: tuple) -> Process:
        i, g, ring = part.index[rank], part.group[rank], part.ring
        kv = next(kv for member, kv in ring.members[g] if member == rank)
        if kv[1] == kv[0]:
            return
        if where not in self._mail:
            self._mail[where] = part.mail(work.name)
        ticks = ring.total - ring.n[g]
        tick_seconds = work.foreign[i] / ticks if ticks else 0.0

        def call(block: range) -> Work:
            if not block.start:
                return self.noise.work(rank, f"own slots {work.name}", work.own[i], block)
            name = f"ticks {block.start}-{block.stop - 1} {work.name}"
            return self.noise.work(rank, name, tick_seconds * len(block), block)

        yield from ring_process(ring, self._mail[where], self.wires, g, rank, call, self.window, part.held[i])

    def _gathered(self, rank: int, part: _Part, work: _Pass, where: tuple) -> Process:
        i, g, ring = part.index[rank], part.group[rank], part.ring
        arriving = self._meet(rank, part, "kv", part.moved["kv"], (*where, "kv"))
        yield self.noise.work(rank, f"own slots {work.name}", work.own[i])
        yield arriving
        inner, outer = ring.total - ring.first[g] - ring.n[g], ring.first[g]
        for name, slots in (("inner", inner), ("outer", outer)):
            if slots and work.foreign[i]:
                seconds = work.foreign[i] * slots / (inner + outer)
                yield self.noise.work(rank, f"{name} groups {work.name}", seconds)
        if arriving:
            part.held[i].most = ring.foreign_slots(g)
        if work.name == "backward":
            yield from self._exchange(rank, part, "dkv return", part.moved["dkv"], (*where, "dkv"))

    def _meet(self, rank: int, part: _Part, kind: str, sizes: np.ndarray, where: tuple) -> list[Transfer]:
        """Post a rank's side of an all-to-all; all its transfers."""
        if where not in self._meetings:
            found: dict[int, list[Transfer]] = {member: [] for member in part.ranks}
            for a, b in zip(*(side.tolist() for side in np.nonzero(sizes)), strict=True):
                transfer = Transfer(kind, part.ranks[a], part.ranks[b], float(sizes[a, b]))
                found[transfer.sender].append(transfer)
                found[transfer.receiver].append(transfer)
            self._meetings[where] = found
        mine = self._meetings[where][rank]
        for transfer in mine:
            self.wires.post(transfer, rank)
        return mine

    def _collective(self, kind: str, layer: int) -> _Collective:
        """The gather of a layer's parameters, or the reduction of its gradients; -1 for embedding and head."""
        key = (kind, layer)
        if key not in self._collectives:
            size = self.parameter_bytes(kind.split()[0], layer)
            self._collectives[key] = _Collective(self.wires, kind.split()[0], self.circle, size)
        return self._collectives[key]

    def parameter_bytes(self, kind: str, layer: int) -> float:
        """Bytes on each wire of the circle."""
        model, ranks = self.workload.model, self.plan.world_size
        parameters = model.embedding_parameters if layer < 0 else model.layer_parameters
        element = self.workload.element_bytes if kind == "gather" else accumulator_bytes(self.workload)
        return parameters * element * (ranks - 1) / ranks


def _summary(
    plan: Plan,
    workload: Workload,
    kinds: Sequence[Workload],
    chain: Sequence[int],
    runs: Sequence[tuple[int, _MicroStep]],
    trace: bool,
) -> StepSimulation:
    """Put the step together: micro-steps that are alike, and layers beyond those simulated, are multiples."""
    extra = _extra_layers([kind.model for kind in kinds], chain)
    step = offset = 0.0
    world = plan.world_size
    busy, exchange = np.zeros(world), np.zeros(world)
    traced_busy, traced_exchange = np.zeros(world), np.zeros(world)
    stalls: dict[tuple[int, int, str, bool, str], float] = defaultdict(float)
    phases: list[Phase] = []
    spans: list[Span] = []
    for micro_step, (repeats, run) in enumerate(runs):
        names = run.phases()
        marks = np.array([log.marks for log in run.logs]).max(0).tolist()
        ends = [*marks[1:], run.seconds]
        more = np.array([extra[layer] if layer >= 0 else 0.0 for _, layer in names])
        step += repeats * (run.seconds + float(more @ np.subtract(ends, marks)))
        for (name, layer), start, end, times in zip(names, marks, ends, more.tolist(), strict=True):
            kind = "" if layer < 0 else "full" if kinds[chain[layer]].model.window is None else "window"
            phases.append(Phase(micro_step, name, layer, kind, start, end, 1 + times))
        for rank, log in enumerate(run.logs):
            busy[rank] += repeats * float((1 + more) @ log.busy)
            exchange[rank] += repeats * float((1 + more) @ log.exchange)
            traced_busy[rank] += sum(log.busy)
            traced_exchange[rank] += sum(log.exchange)
            for found, times in zip(log.stalls, more.tolist(), strict=True):
                for (peer, transfer, late, wire), seconds in found.items():
                    stalls[rank, peer, transfer, late, wire] += repeats * (1 + times) * seconds
        if trace:
            spans += _spans(run, offset)
        offset += run.seconds
    return StepSimulation(
        step_seconds=step,
        tokens_per_second=workload.tokens_per_step / step,
        ranks=_rank_times(busy, exchange, step),
        phases=tuple(phases),
        stalls=tuple(
            Stall(*cause, seconds) for cause, seconds in sorted(stalls.items(), key=lambda item: (-item[1], item[0]))
        ),
        buffers=tuple(
            tuple(
                max(max(part.held[part.index[shard.rank]].most for part in parts) for shard in group.shards)
                for group in replica.groups
            )
            for replica, parts in zip(plan.replicas, runs[-1][1].parts, strict=True)
        ),
        devices=plan.devices,
        spans=tuple(spans),
        traced=_rank_times(traced_busy, traced_exchange, offset) if trace else (),
    )


def _extra_layers(models: Sequence[ModelShape], chain: Sequence[int]) -> list[float]:
    """How many further layers each simulated one stands for: those that have neighbours of their kind on both sides."""
    extra = [0.0] * len(chain)
    for k, model in enumerate(models):
        places = [i for i, kind in enumerate(chain) if kind == k]
        for i in places[1:-1]:
            extra[i] = (model.layers - len(places)) / (len(places) - 2)
    return extra


def _rank_times(busy: np.ndarray, exchange: np.ndarray, step: float) -> tuple[RankTimes, ...]:
    found = []
    for worked, exchanged in zip(busy.tolist(), exchange.tolist(), strict=True):
        exchanged = min(exchanged, max(0.0, step - worked))
        found.append(RankTimes(worked, exchanged, max(0.0, step - worked - exchanged)))
    return tuple(found)


def _spans(run: _MicroStep, offset: float) -> Iterator[Span]:
    for rank, log in enumerate(run.logs):
        for name, start, end in log.spans or ():
            yield Span(rank, name, offset + start, offset + end)
    for t in run.wires.carried or ():
        if t.ended > t.began:
            yield Span(t.receiver, t.kind, offset + t.began, offset + t.ended, t.sender, t.size)

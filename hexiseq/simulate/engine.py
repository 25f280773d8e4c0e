"""A clock, processes that work and wait on it, and what carries the transfers between them."""

from __future__ import annotations

import abc
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hexiseq.cluster import Cluster, Place

GB = 1e9
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel call of so many seconds; of the ring also its ticks."""

    name: str
    seconds: float
    ticks: range | None = None


@dataclass(eq=False, slots=True)
class Transfer:
    """`size` bytes from one rank to another. It is on its way once both have posted it.

    Attributes:
        posted, late: when the second side posted it, and which rank that was.
        began, ended: from its first byte to its last.
        wire: the one that held it back at the end.
    """

    kind: str
    sender: int
    receiver: int
    size: float
    sides: int = 0
    posted: float = 0.0
    late: int = -1
    began: float = 0.0
    ended: float = 0.0
    wire: str = ""
    done: bool = False
    waiting: list[Callable[[Transfer], None]] = field(default_factory=list)


Process = Generator[Work | Sequence[Transfer], None, None]


class Log(Protocol):
    """What a rank did, as it is told by the clock."""

    def worked(self, work: Work, start: float, end: float) -> None: ...

    def waited(self, last: Transfer, start: float, end: float) -> None:
        """`last` is the transfer that ended the wait."""


class Clock:
    """What happens next, and processes: generators that yield `Work` or the transfers to wait for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.before_moving_on: list[Callable[[], None]] = []
        self._order = itertools.count()  # events of one instant happen in the order they were scheduled
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def run(self) -> None:
        while True:
            if not self._events or self._events[0][0] > self.now:
                for settle in self.before_moving_on:
                    settle()
                if not self._events:
                    return
            self.now, _, action = heapq.heappop(self._events)
            action()

    def start(self, process: Process, log: Log) -> None:
        def go_on() -> None:
            for wanted in process:
                if isinstance(wanted, Work):
                    end = self.now + wanted.seconds
                    log.worked(wanted, self.now, end)
                    self.at(end, go_on)
                    return
                missing = [transfer for transfer in wanted if not transfer.done]
                if missing:
                    wait_for(missing)
                    return

        def wait_for(missing: Sequence[Transfer]) -> None:
            start, left = self.now, len(missing)

            def arrived(transfer: Transfer) -> None:
                nonlocal left
                left -= 1
                if not left:
                    log.waited(transfer, start, self.now)
                    go_on()

            for transfer in missing:
                transfer.waiting.append(arrived)

        self.at(self.now, go_on)


class Carrier(abc.ABC):
    """Takes transfers from rank to rank: how fast is for its subclasses to say."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.carried: list[Transfer] | None = None  # a list to keep them in, for a trace

    def post(self, transfer: Transfer, rank: int) -> None:
        """One side is ready; at the second the transfer may begin."""
        transfer.sides += 1
        if transfer.sides == 2:
            self.carry(transfer, rank)

    def carry(self, transfer: Transfer, late: int) -> None:
        """Begin as soon as there is room; `late` made it wait until now."""
        transfer.posted, transfer.late = self.clock.now, late
        self._queue(transfer)

    def apart(self, transfer: Transfer, seconds: float) -> None:
        """Carry one now that shares its wire with no other."""
        transfer.posted = transfer.began = self.clock.now
        self.clock.at(self.clock.now + seconds, lambda: self._finish(transfer))

    @abc.abstractmethod
    def _queue(self, transfer: Transfer) -> None:
        """Begin the transfer as soon as its wires let it."""

    def _finish(self, transfer: Transfer) -> None:
        transfer.done, transfer.ended = True, self.clock.now
        if self.carried is not None:
            self.carried.append(transfer)
        for go_on in transfer.waiting:
            go_on(transfer)


class OwnLinks(Carrier):
    """A link of its own for each pair of ranks and direction; sizes are seconds, one transfer at a time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._free: dict[Edge, float] = defaultdict(float)

    def _queue(self, transfer: Transfer) -> None:
        edge = (transfer.sender, transfer.receiver)
        transfer.began = max(self.clock.now, self._free[edge])
        self._free[edge] = transfer.began + transfer.size
        self.clock.at(self._free[edge], lambda: self._finish(transfer))


class _Lane:
    """The transfers in flight over the same wires; each has moved `moved` bytes since the lane was last empty."""

    __slots__ = ("flying", "moved", "rate", "shared", "since", "version", "wire", "wires")

    def __init__(self, wires: tuple[int, ...]) -> None:
        self.wires, self.wire = wires, wires[0]
        self.flying: list[tuple[float, int, Transfer]] = []  # a heap by what `moved` will be at the end
        self.moved = self.rate = self.since = 0.0
        self.shared = self.version = 0  # transfers when wires were last shared


class SharedWires(Carrier):
    """The cluster's wires, shared fairly (max-min) by all transfers in flight; sizes are bytes.

    A transfer inside a node passes the sender's port and the receiver's, one between nodes both nodes' NICs and the
    link between them where that is special: the wires of `hexiseq.cost`. Transfers of one kind between two ranks go
    one after the other, as on a communicator.
    """

    def __init__(self, clock: Clock, cluster: Cluster, places: Sequence[Place]) -> None:
        super().__init__(clock)
        clock.before_moving_on.append(self._settle)
        self.cluster, self.places = cluster, places
        self.names: list[str] = []
        self._capacity: list[float] = []  # bytes a second
        self._lanes_on: list[dict[_Lane, None]] = []  # by wire, those with transfers in flight
        self._ids: dict[str, int] = {}
        self._lanes: dict[tuple[int, ...], _Lane] = {}
        self._lane_of: dict[Edge, _Lane] = {}
        self._queues: dict[tuple[str, int, int], deque[Transfer]] = defaultdict(deque)
        self._touched: dict[_Lane, None] = {}
        self._order = itertools.count()

    def _wire(self, name: str, gb_per_s: float) -> int:
        if name not in self._ids:
            self._ids[name] = len(self.names)
            self.names.append(name)
            self._capacity.append(gb_per_s * GB)
            self._lanes_on.append({})
        return self._ids[name]

    def _lane(self, edge: Edge) -> _Lane:
        if (lane := self._lane_of.get(edge)) is None:
            a, b = (self.places[rank] for rank in edge)
            if a.node == b.node:
                ports = a.node_class.intra_gb_per_s
                wires = [self._wire(f"port of rank {edge[0]}, out", ports),
                         self._wire(f"port of rank {edge[1]}, in", ports)]  # fmt: skip
            else:
                out, into = a.node_class.network_gb_per_s, b.node_class.network_gb_per_s
                wires = [self._wire(f"NIC of {a.node_name}, out", out), self._wire(f"NIC of {b.node_name}, in", into)]
                if (between := self.cluster.bandwidth_gb_per_s(a, b)) < min(out, into):
                    wires.append(self._wire(f"link from {a.node_name} to {b.node_name}", between))
            key = tuple(wires)
            lane = self._lane_of[edge] = self._lanes.setdefault(key, _Lane(key))
        return lane

    def _queue(self, transfer: Transfer) -> None:
        queue = self._queues[transfer.kind, transfer.sender, transfer.receiver]
        queue.append(transfer)
        if len(queue) == 1:
            self._begin(transfer)

    def _begin(self, transfer: Transfer) -> None:
        transfer.began = self.clock.now
        if transfer.size <= 0:
            self.clock.at(self.clock.now, lambda: self._arrive(transfer))
            return
        lane = self._lane((transfer.sender, transfer.receiver))
        self._advance(lane)
        for wire in lane.wires:
            self._lanes_on[wire][lane] = None
        heapq.heappush(lane.flying, (lane.moved + transfer.size, next(self._order), transfer))
        self._touched[lane] = None

    def _arrive(self, transfer: Transfer) -> None:
        queue = self._queues[transfer.kind, transfer.sender, transfer.receiver]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        self._finish(transfer)

    def _advance(self, lane: _Lane) -> None:
        now = self.clock.now
        lane.moved += lane.rate * (now - lane.since)
        lane.since = now

    def _settle(self) -> None:
        """Share the wires anew among all transfers that what has changed can matter to."""
        if not self._touched:
            return
        wires, lanes, seen = list[int](), dict[_Lane, None](), set[int]()
        for lane in self._touched:
            if len(lane.flying) != lane.shared:
                wires += [wire for wire in lane.wires if wire not in seen]
                seen.update(lane.wires)
            elif lane.flying:  # as many as before, so all keep their rates
                lane.version += 1
                self._expect(lane)
            lane.shared = len(lane.flying)
            if not lane.flying:
                lane.moved = lane.rate = 0.0
                for wire in lane.wires:
                    self._lanes_on[wire].pop(lane, None)
        touched, self._touched = self._touched, {}
        for wire in wires:  # grows as lanes lead to further wires
            for lane in self._lanes_on[wire]:
                if lane not in lanes:
                    lanes[lane] = None
                    for other in lane.wires:
                        if other not in seen:
                            seen.add(other)
                            wires.append(other)
        for lane, (rate, wire) in self._shares(wires, lanes).items():
            lane.wire = wire
            if rate != lane.rate or lane in touched:
                self._advance(lane)
                lane.rate = rate
                lane.version += 1
                self._expect(lane)

    def _expect(self, lane: _Lane) -> None:
        version = lane.version
        ends = max(self.clock.now, lane.since + (lane.flying[0][0] - lane.moved) / lane.rate)
        self.clock.at(ends, lambda: self._complete(lane, version))

    def _shares(self, wires: Sequence[int], lanes: dict[_Lane, None]) -> dict[_Lane, tuple[float, int]]:
        """Max-min fair: the wire with the least for each of its transfers gives it to them, and so on with the rest."""
        found: dict[_Lane, tuple[float, int]] = {}
        if len(lanes) == 1:
            (lane,) = lanes
            wire = min(lane.wires, key=self._capacity.__getitem__)
            return {lane: (self._capacity[wire] / len(lane.flying), wire)}
        left = {wire: self._capacity[wire] for wire in wires if self._lanes_on[wire]}
        count = {wire: sum(len(lane.flying) for lane in self._lanes_on[wire]) for wire in left}
        while len(found) < len(lanes):
            fullest = min(count, key=lambda wire: left[wire] / count[wire])
            share = left[fullest] / count[fullest]
            for lane in self._lanes_on[fullest]:
                if lane in found:
                    continue
                found[lane] = (share, fullest)
                number = len(lane.flying)
                for wire in lane.wires:
                    left[wire] = max(0.0, left[wire] - share * number)
                    count[wire] -= number
                    if not count[wire]:
                        del count[wire]
        return found

    def _complete(self, lane: _Lane, version: int) -> None:
        if version != lane.version:
            return
        self._advance(lane)
        # Those that end together do so whatever rounding says.
        lane.moved = max(lane.moved, lane.flying[0][0])
        done = []
        while lane.flying and lane.flying[0][0] <= lane.moved * (1 + 1e-12):
            done.append(heapq.heappop(lane.flying)[2])
        self._touched[lane] = None
        lane.version += 1
        name = self.names[lane.wire]
        for transfer in done:
            transfer.wire = name
            self._arrive(transfer)

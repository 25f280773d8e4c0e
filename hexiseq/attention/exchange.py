"""Everything ranks say to each other during attention: the uneven all-to-all in a group, and KV across groups.

Rows are the outermost dimension of every buffer, ``[rows, B, heads, D]``. The all-to-all blocks of the members then
follow one another as one tensor in token order, a slot's front half is a prefix of the slot, and consecutive slots are
one buffer and one kernel call. What a rank sends of its own is copied once, into the message; what arrives is computed
on, and passed on, where it arrived.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hexiseq.attention.clock import CLOCK
from hexiseq.attention.layout import OWN, SEND_LAG, Block, Message, Part, Route, Traffic
from hexiseq.plan import Plan

Group = dist.ProcessGroup
_REPORT_SECONDS = 3.0  # within which ranks that wait for the same one notice it


class Buffers:
    """Communication buffers, allocated once per plan and shape and used again by every call.

    On CUDA they come from PyTorch's caching allocator, which does just that, and shares the memory with what the rest
    of the model does meanwhile. A CPU allocation would be mapped and zeroed page by page each time.
    """

    _KEPT_CALLS = 256  # a size not asked for in so many calls is let go

    def __init__(self) -> None:
        self._free: dict[tuple, list[Tensor]] = defaultdict(list)
        self._last_use: dict[tuple, int] = {}
        self._calls = 0

    @contextlib.contextmanager
    def lease(self) -> Iterator[Lease]:
        """Buffers for one call. Its end returns them, unless it fails: a transfer may still be writing then."""
        lease = Lease(self._free)
        yield lease
        for key in lease.end():
            self._last_use[key] = self._calls
        self._calls += 1
        if self._calls % self._KEPT_CALLS == 0:
            for key in [k for k, last in self._last_use.items() if last < self._calls - self._KEPT_CALLS]:
                del self._free[key], self._last_use[key]


class Lease:
    """The buffers of one call: taken, handed back early where that saves memory, and in the end."""

    def __init__(self, free: dict[tuple, list[Tensor]]) -> None:
        self._free = free
        self._taken: dict[int, tuple[Tensor, tuple, Tensor]] = {}
        self._keys: set[tuple] = set()

    def take(
        self, like: Tensor, shape: Sequence[int], most: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """An uninitialised buffer of a shape, contiguous, of the dtype and device of `like`.

        Args:
            most: rows (size of the first dimension) that a call of this plan and these shapes may ever need; the memory
                is that large, so that shorter messages need no memory of their own.
        """
        dtype = dtype or like.dtype
        if like.is_cuda:
            return like.new_empty(shape, dtype=dtype)
        inner = math.prod(shape[1:])
        key = (like.device, dtype, inner * max(shape[0], most or 0))
        self._keys.add(key)
        if self._free[key]:
            flat = self._free[key].pop()
        else:
            with torch.inference_mode(False):  # else a later call could not write to it
                flat = torch.empty(key[-1], dtype=dtype, device=like.device)
        buffer = flat[: inner * shape[0]].view(*shape)
        self._taken[id(buffer)] = (buffer, key, flat)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Hand back a buffer that nothing uses any more."""
        taken = self._taken.pop(id(buffer), None)
        if taken is not None:
            self._free[taken[1]].append(taken[2])

    def end(self) -> set[tuple]:
        """Hand back everything. Returns the sizes that were in use."""
        for buffer, _, _ in list(self._taken.values()):
            self.give(buffer)
        return self._keys


@dataclass(frozen=True)
class Links:
    """The process groups of one rank, its buffers, and what is needed to name a peer that fails.

    ``kv`` and ``dkv`` are separate: their transfers are in flight together and must not be matched with each other.
    ``group`` has the members of the rank's group, the other two the ranks of its replica, in rank order.
    """

    plan: Plan
    rank: int
    timeout: timedelta
    group: Group | None
    kv: Group | None
    dkv: Group | None
    store: dist.Store
    buffers: Buffers = field(default_factory=Buffers)

    @property
    def replica_ranks(self) -> list[int]:
        return sorted(self.plan.replicas[self.plan.place(self.rank)[0]].ranks)

    def name(self, rank: int) -> str:
        device = self.plan.devices[rank]
        return f"rank {rank} ({device.type} on {device.node})"

    @contextlib.contextmanager
    def naming(self, what: str, peers: Sequence[int], kind: str = "exchange") -> Iterator[None]:
        """Raise RuntimeError naming `what` was exchanged with which `peers`, and who is missing, if that fails.

        On the clock it is a span of `kind`.
        """
        CLOCK.begin(kind, what)
        try:
            yield
            CLOCK.end()
        except RuntimeError as error:
            missing = ", ".join(map(self.name, self._missing()))
            raise RuntimeError(
                f"{self.name(self.rank)}: {what} with {', '.join(map(self.name, peers))} failed or took longer than "
                f"{self.timeout.total_seconds():g} s{f' (missing: {missing})' if missing else ''}: {error}"
            ) from error

    def _missing(self) -> list[int]:
        """Ranks of the replica that do not report a failed wait, as those do that wait for one another.

        A peer that has not answered may itself be waiting for a third; the one they all wait for is silent.
        """
        keys = {rank: f"hexiseq/stuck/{self.plan.digest()}/{rank}" for rank in self.replica_ranks}
        deadline = time.monotonic() + _REPORT_SECONDS
        with contextlib.suppress(RuntimeError):  # the store can be gone with the rank that kept it
            self.store.set(keys.pop(self.rank), "")
            while keys and time.monotonic() < deadline:
                keys = {rank: key for rank, key in keys.items() if not self.store.check([key])}
                time.sleep(0.05)
        return list(keys)


def to_heads(route: Route, links: Links, lease: Lease, tensors: Sequence[Tensor], kinds: str) -> list[Tensor]:
    """From own tokens and all heads to the group's tokens and own heads, in one all-to-all.

    Args:
        tensors: local shards ``[B, L, heads, D]``, of which the first tokens of the rank count (a dummy is dropped).
        kinds: a letter for each: ``q`` if it has query heads, ``k`` if KV heads.

    Returns:
        for each tensor ``[L_g, B, own heads, D]``, rows in the order of the group's run of tokens.
    """
    start, end = route.me.rows
    rows = [t[:, : end - start].transpose(0, 1) for t in tensors]
    if len(route.members) == 1:
        return [t if t.stride(-1) == 1 else t.contiguous() for t in rows]
    _, batch, _, dim = rows[0].shape

    def widths(member: int) -> list[int]:
        m = route.members[member]
        return [b - a for a, b in (m.heads if kind == "q" else m.kv for kind in kinds)]

    sizes = [(end - start) * batch * sum(widths(m)) * dim for m in range(len(route.members))]
    message = lease.take(rows[0], (sum(sizes),))
    for part, member in zip(message.split(sizes), route.members, strict=True):
        if part.numel():
            ranges = [member.heads if kind == "q" else member.kv for kind in kinds]
            part = part.view(end - start, batch, -1, dim)
            torch.cat([t[:, :, a:b] for t, (a, b) in zip(rows, ranges, strict=True)], dim=2, out=part)
    mine = widths(route.member)
    received = [(m.rows[1] - m.rows[0]) * batch * sum(mine) * dim for m in route.members]
    result = _all_to_all(route, links, lease, message, sizes, received)
    lease.give(message)
    return list(result.view(route.rows, batch, sum(mine), dim).split(mine, dim=2))


def from_heads(route: Route, links: Links, lease: Lease, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """From the group's tokens and own heads back to own tokens: ``[L_g, B, heads, D]`` to one block per member.

    Args:
        x: contiguous, if the group has more members than one; every row goes to the rank that owns it.
        widths: heads that each member sends.

    Returns:
        ``[own tokens, B, widths[m], D]`` from every member ``m``.
    """
    if len(route.members) == 1:
        return [x]
    _, batch, _, dim = x.shape
    own = route.me.rows[1] - route.me.rows[0]
    sizes = [(m.rows[1] - m.rows[0]) * batch * x.shape[2] * dim for m in route.members]
    received = [own * batch * width * dim for width in widths]
    result = _all_to_all(route, links, lease, x.view(-1), sizes, received)
    return [part.view(own, batch, w, dim) for part, w in zip(result.split(received), widths, strict=True)]


def _all_to_all(
    route: Route, links: Links, lease: Lease, message: Tensor, sends: list[int], receives: list[int]
) -> Tensor:
    result = lease.take(message, (sum(receives),))
    with links.naming("all-to-all", [m.rank for m in route.members if m.rank != route.rank]):
        dist.all_to_all_single(result, message, receives, sends, group=links.group)
    return result


def walk_kv(route: Route, links: Links, lease: Lease, k: Tensor, v: Tensor) -> Iterator[tuple[Block, Tensor | None]]:
    """Yield every block with its KV ``[rows, B, 2, own KV heads, D]``, the own block, first, with None.

    Each time it yields, transfers for later blocks are already on their way and proceed while the caller computes.

    Args:
        k, v: the own run, ``[L_g, B, own KV heads, D]``.
    """
    for block, kv in (_gather_kv if route.gathers else _ring_kv)(route, links, lease, k, v):
        CLOCK.begin("compute", f"{block.side} attention")
        yield block, kv
        CLOCK.end()


def gradients_home(
    route: Route, links: Links, lease: Lease, dk: Tensor, dv: Tensor
) -> RingGradients | GatheredGradients:
    """The way home for gradients of foreign KV. Its methods ``pass_on`` and ``come_home`` are called in that order.

    Args:
        dk, dv: gradients of the own run, ``[L_g, B, own KV heads, D]``; what comes home is added to them.
    """
    return (GatheredGradients if route.gathers else RingGradients)(route, links, lease, dk, dv)


class Mailbox:
    """Batched point-to-point transfers of one kind, ``KV`` or ``dKV``, in the order of the route's batches.

    A batch is issued as a whole; messages between two ranks are matched by that order alone (NCCL knows no tags).
    Buffers are held until their transfer has been waited for; those made for a message alone then go back.
    """

    def __init__(self, kind: str, links: Links, lease: Lease, group: Group | None) -> None:
        self.kind, self.links, self.lease, self.group = kind, links, lease, group
        self._sends: list[tuple[Message, dist.Work, Tensor]] = []
        self._receives: dict[Message, tuple[dist.Work, Tensor]] = {}

    def post(self, sends: Sequence[tuple[Message, Tensor]], receives: Sequence[tuple[Message, Tensor]]) -> None:
        """Issue one batch. Buffers are contiguous ``[rows, B, 2, heads, D]``."""
        if not sends and not receives:
            return
        ops = [dist.P2POp(dist.irecv, buffer, message.sender, self.group) for message, buffer in receives]
        ops += [dist.P2POp(dist.isend, buffer, message.receiver, self.group) for message, buffer in sends]
        message = (receives or sends)[0][0]
        with self.links.naming(f"{self.kind} batch {message.tick}", sorted({op.peer for op in ops})):
            works = dist.batch_isend_irecv(ops)
        if len(works) != len(ops):  # NCCL coalesces a batch into one piece of work
            works = [works[-1]] * len(ops)
        for (message, buffer), work in zip(receives, works, strict=False):
            self._receives[message] = (work, buffer)
        for (message, buffer), work in zip(sends, works[len(receives) :], strict=True):
            self._sends.append((message, work, buffer))

    def take(self, message: Message) -> Tensor:
        """Wait for a posted message and return its buffer."""
        work, buffer = self._receives.pop(message)
        self._wait(message, message.sender, work)
        return buffer

    def reap(self, tick: int | None = None) -> None:
        """Wait for the sends of all batches up to `tick` (all if None) and let go of their buffers."""
        while self._sends and (tick is None or self._sends[0][0].tick <= tick):
            message, work, buffer = self._sends.pop(0)
            self._wait(message, message.receiver, work)
            self.lease.give(buffer)

    def _wait(self, message: Message, peer: int, work: dist.Work) -> None:
        with self.links.naming(f"{self.kind} slot {message.source} at tick {message.tick}", [peer]):
            work.wait()


def _ring_kv(route: Route, links: Links, lease: Lease, k: Tensor, v: Tensor) -> Iterator[tuple[Block, Tensor | None]]:
    box = Mailbox("KV", links, lease, links.kv)
    place: dict[int, tuple[Block, Part]] = {
        t: (block, part) for block in route.blocks for t, part in zip(block.ticks, block.parts, strict=False)
    }
    shape = (k.shape[1], 2, *k.shape[2:])
    buffers: dict[int, Tensor] = {}
    passed: list[tuple[int, Tensor]] = []  # computed on, and perhaps still being sent
    staged: dict[Message, Tensor] = {}

    def receive(message: Message, t: int) -> tuple[Message, Tensor]:
        # Straight into the block's buffer where one sender has all heads: rows are outermost, so it is contiguous.
        block, part = place[t]
        if block.first not in buffers:
            buffers[block.first] = lease.take(k, (block.rows, *shape), block.most_rows)
        target = _heads(route, buffers[block.first][part.here], message)
        if target.is_contiguous():
            return message, target
        staged[message] = target
        return message, lease.take(k, target.shape, route.half * 2)

    def send(message: Message, t: int) -> tuple[Message, Tensor]:
        if t < route.slots:
            return message, _own_kv(route, lease, k, v, message)
        block, part = place[t]
        rows = buffers[block.first][part.start + message.rows[0] - part.rows[0] :][: message.rows[1] - message.rows[0]]
        source = _heads(route, rows, message)
        if source.is_contiguous():
            return message, source
        return message, lease.take(k, source.shape, route.half * 2).copy_(source)

    for block in route.blocks:
        for t in block.ticks if block.side != OWN else ():
            for message in route.kv.receives[t - route.slots]:
                buffer, target = box.take(message), staged.pop(message, None)
                if target is not None:
                    lease.give(buffer)
                    target.copy_(buffer)
        for t in block.ticks:
            sends = [send(message, t) for message in route.kv.sends[t]]
            box.post(sends, [receive(message, t + route.slots) for message in route.kv.receives[t]])
        box.reap(block.first - SEND_LAG)
        while passed and passed[0][0] <= block.first - SEND_LAG:
            lease.give(passed.pop(0)[1])
        yield block, None if block.side == OWN else buffers.get(block.first)
        if block.first in buffers:
            passed.append((block.ticks[-1], buffers.pop(block.first)))
    box.reap()
    for _, buffer in passed:
        lease.give(buffer)


class RingGradients:
    """Gradients of KV slots on their way home, summed up by every group they pass, in float32 or float64."""

    def __init__(self, route: Route, links: Links, lease: Lease, dk: Tensor, dv: Tensor) -> None:
        self.route, self.lease, self.dk, self.dv = route, lease, dk, dv
        self.box = Mailbox("dKV", links, lease, links.dkv)
        self._passed: list[tuple[int, Tensor]] = []
        for t in range(route.slots if route.blocks else 0):
            self.box.post([], self._receives(t))

    def pass_on(self, block: Block, grad: Tensor | None) -> None:
        """Add what earlier groups found for the block's slots to `grad`, and send the sums on.

        Args:
            grad: this rank's own share, ``[block.grad_rows, B, 2, own KV heads, D]``; None if it has no rows. Added to,
                and handed back to the lease.
        """
        route = self.route
        for t, part in zip(block.ticks, block.parts, strict=True):
            for message in route.dkv.receives[t - route.slots]:
                if route.owns(message.source):
                    continue  # an own slot's back half on its short way home from group 0
                received = self.box.take(message)
                assert grad is not None
                self._rows(grad, part, message).add_(received)
                self.lease.give(received)
            sends = []
            for message in route.dkv.sends[t]:
                assert grad is not None
                rows = self._rows(grad, part, message)
                if not rows.is_contiguous():
                    rows = self.lease.take(grad, rows.shape, route.half * 2).copy_(rows)
                sends.append((message, rows))
            self.box.post(sends, self._receives(t))
        if grad is not None:
            self._passed.append((block.ticks[-1], grad))
        self._reap(block.first - SEND_LAG)

    def come_home(self) -> None:
        """Wait for the own slots' gradients from elsewhere and add them, in batch and member order."""
        route = self.route
        for t in range(route.total if route.blocks else 0):
            for message in route.dkv.receives[t]:
                if route.owns(message.source):
                    received = self.box.take(message)
                    _add_own(route, self.dk, self.dv, message, received)
                    self.lease.give(received)
        self._reap(None)

    def _reap(self, tick: int | None) -> None:
        self.box.reap(tick)
        while self._passed and (tick is None or self._passed[0][0] <= tick):
            self.lease.give(self._passed.pop(0)[1])

    def _rows(self, grad: Tensor, part: Part, message: Message) -> Tensor:
        first = part.grad_start + message.rows[0] - part.grad_rows[0]
        return _heads(self.route, grad[first : first + message.rows[1] - message.rows[0]], message)

    def _receives(self, t: int) -> list[tuple[Message, Tensor]]:
        _, batch, _, dim = self.dk.shape
        most = self.route.half * 2
        return [
            (m, self.lease.take(self.dk, (_rows(m), batch, 2, m.heads[1] - m.heads[0], dim), most))
            for m in self.route.dkv.receives[t]
        ]


def _gather_kv(route: Route, links: Links, lease: Lease, k: Tensor, v: Tensor) -> Iterator[tuple[Block, Tensor | None]]:
    gathered = _Gathering("KV", links, lease, k, (k.shape[1], 2, k.shape[3]), route.kv, links.kv)
    for message, buffer in gathered.outgoing:
        _fill_own_kv(route, k, v, message, buffer)
    gathered.start()
    if not route.blocks:
        gathered.finish()
    for block in route.blocks:
        if block.side == OWN:
            yield block, None
            gathered.finish()
        else:
            yield block, _assembled(route, lease, k, block, gathered)


def _assembled(route: Route, lease: Lease, k: Tensor, block: Block, gathered: _Gathering) -> Tensor | None:
    """The KV of a block: where it was received if it lies there as one, a copy if heads came from several ranks."""
    if not block.rows:
        return None
    shape = (block.rows, k.shape[1], 2, *k.shape[2:])
    sources = {part.source for part in block.parts}
    chunks = [(message, chunk) for message, chunk in gathered.incoming if message.source in sources]
    whole = all(message.heads == route.me.kv for message, _ in chunks)
    order = [part.source for part in block.parts if part.rows[1] > part.rows[0]]
    if whole and [message.source for message, _ in chunks] == order and _adjacent([chunk for _, chunk in chunks]):
        return torch.as_strided(chunks[0][1], shape, _contiguous_strides(shape))
    buffer = lease.take(k, shape, block.most_rows)
    part_of = {part.source: part for part in block.parts}
    for message, chunk in chunks:
        _heads(route, buffer[part_of[message.source].here], message).copy_(chunk)
    return buffer


class GatheredGradients:
    """Gradients of gathered KV, back to its holders at the end, in one all-to-all; in float32 or float64."""

    def __init__(self, route: Route, links: Links, lease: Lease, dk: Tensor, dv: Tensor) -> None:
        self.route, self.links, self.lease, self.dk, self.dv = route, links, lease, dk, dv
        self._grads: dict[int, tuple[Tensor, Part]] = {}

    def pass_on(self, block: Block, grad: Tensor | None) -> None:
        """Keep this rank's share ``[block.grad_rows, B, 2, own KV heads, D]`` until the end."""
        if grad is not None:
            self._grads.update({part.source: (grad, part) for part in block.parts})

    def come_home(self) -> None:
        """Exchange, and add to the own gradients in rank order of the peers."""
        route = self.route
        shape = (self.dk.shape[1], 2, self.dk.shape[3])
        gathered = _Gathering("dKV", self.links, self.lease, self.dk, shape, route.dkv, self.links.dkv)
        for message, buffer in gathered.outgoing:
            grad, part = self._grads[message.source]
            buffer.copy_(_heads(route, grad[part.grad_here], message))
        gathered.start()
        gathered.finish()
        for message, chunk in gathered.incoming:
            _add_own(route, self.dk, self.dv, message, chunk)


class _Gathering:
    """One uneven all-to-all over the replica, of messages in rank order of their peers."""

    def __init__(
        self, kind: str, links: Links, lease: Lease, like: Tensor, shape: tuple[int, int, int],
        traffic: Traffic, group: Group | None,
    ) -> None:  # fmt: skip
        self.kind, self.links, self.lease, self.group = kind, links, lease, group
        batch, two, dim = shape
        ranks = links.replica_ranks

        def laid_out(messages: Sequence[Message], peers: list[int], most: int) -> tuple[Tensor, list[int], list]:
            sizes = [m.size * batch * two * dim for m in messages]
            flat = lease.take(like, (sum(sizes),), most * batch * two * dim)
            by_peer = dict.fromkeys(ranks, 0)
            for size, peer in zip(sizes, peers, strict=True):
                by_peer[peer] += size
            views = [
                (m, chunk.view(_rows(m), batch, two, m.heads[1] - m.heads[0], dim))
                for m, chunk in zip(messages, flat.split(sizes), strict=True)
            ]
            return flat, list(by_peer.values()), views

        sends, receives = traffic.sends[0], traffic.receives[0]
        self._message, self._sends, self.outgoing = laid_out(sends, [m.receiver for m in sends], traffic.most[0])
        self._result, self._receives, self.incoming = laid_out(receives, [m.sender for m in receives], traffic.most[1])
        self._peers = [rank for rank in ranks if rank != links.rank]

    def start(self) -> None:
        if self.group is None:
            return
        with self.links.naming(f"{self.kind} all-gather", self._peers):
            self._work = dist.all_to_all_single(
                self._result, self._message, self._receives, self._sends, group=self.group, async_op=True
            )

    def finish(self) -> None:
        if self.group is None:
            return
        with self.links.naming(f"{self.kind} all-gather", self._peers):
            self._work.wait()
        self.lease.give(self._message)


def _own_kv(route: Route, lease: Lease, k: Tensor, v: Tensor, message: Message) -> Tensor:
    """Rows of an own slot as they travel."""
    shape = (_rows(message), k.shape[1], 2, message.heads[1] - message.heads[0], k.shape[3])
    buffer = lease.take(k, shape, route.half * 2)
    _fill_own_kv(route, k, v, message, buffer)
    return buffer


def _fill_own_kv(route: Route, k: Tensor, v: Tensor, message: Message, buffer: Tensor) -> None:
    heads = _own_heads(route, message)
    for (start, end), first in route.own_rows(message.source, message.rows):
        rows = buffer[first : first + end - start]
        rows[:, :, 0].copy_(k[start:end, :, heads])
        rows[:, :, 1].copy_(v[start:end, :, heads])


def _add_own(route: Route, dk: Tensor, dv: Tensor, message: Message, grad: Tensor) -> None:
    heads = _own_heads(route, message)
    for (start, end), first in route.own_rows(message.source, message.rows):
        rows = grad[first : first + end - start]
        dk[start:end, :, heads].add_(rows[:, :, 0])
        dv[start:end, :, heads].add_(rows[:, :, 1])


def _rows(message: Message) -> int:
    return message.rows[1] - message.rows[0]


def _own_heads(route: Route, message: Message) -> slice:
    """The message's heads within the rank's own KV heads."""
    return slice(message.heads[0] - route.me.kv[0], message.heads[1] - route.me.kv[0])


def _heads(route: Route, rows: Tensor, message: Message) -> Tensor:
    """The message's heads of ``[rows, B, 2, own KV heads, D]``, a view."""
    return rows[:, :, :, _own_heads(route, message)]


def _adjacent(chunks: Sequence[Tensor]) -> bool:
    """Whether contiguous chunks of one buffer follow one another in memory."""
    ends = [chunk.storage_offset() + chunk.numel() for chunk in chunks]
    return all(chunk.storage_offset() == end for chunk, end in zip(chunks[1:], ends, strict=False))


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]

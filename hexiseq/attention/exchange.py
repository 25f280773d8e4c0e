"""Everything ranks say to each other during attention: the uneven all-to-all in a group, and the ring of KV slots.

Rows are the outermost dimension of every buffer, ``[rows, B, heads, D]``. The all-to-all blocks of the members then
follow one another as one tensor in token order, a slot's front half is a prefix of the slot, and consecutive slots are
one buffer and one kernel call. Nothing is copied to make it so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hexiseq.attention.layout import OWN, SEND_LAG, Block, Message, Route
from hexiseq.plan import Plan

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Links:
    """The process groups of one rank, and what is needed to name a peer that fails.

    ``kv`` and ``dkv`` are separate: their transfers are in flight together and must not be matched with each other.
    """

    plan: Plan
    rank: int
    timeout: timedelta
    group: Group | None
    kv: Group | None
    dkv: Group | None

    def name(self, rank: int) -> str:
        device = self.plan.devices[rank]
        return f"rank {rank} ({device.type} on {device.node})"

    @contextlib.contextmanager
    def naming(self, what: str, peers: Sequence[int]) -> Iterator[None]:
        """Raise RuntimeError naming `what` was exchanged with which `peers` if the communication inside fails."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name(self.rank)}: {what} with {', '.join(map(self.name, peers))} failed or took longer than "
                f"{self.timeout.total_seconds():g} s: {error}"
            ) from error


def to_heads(route: Route, links: Links, tensors: Sequence[Tensor], kinds: str) -> list[Tensor]:
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
    message = rows[0].new_empty(sum(sizes))
    for part, member in zip(message.split(sizes), route.members, strict=True):
        if part.numel():
            ranges = [member.heads if kind == "q" else member.kv for kind in kinds]
            part = part.view(end - start, batch, -1, dim)
            torch.cat([t[:, :, a:b] for t, (a, b) in zip(rows, ranges, strict=True)], dim=2, out=part)
    mine = widths(route.member)
    received = [(m.rows[1] - m.rows[0]) * batch * sum(mine) * dim for m in route.members]
    result = _all_to_all(route, links, message, sizes, received)
    return list(result.view(route.rows, batch, sum(mine), dim).split(mine, dim=2))


def from_heads(route: Route, links: Links, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """From the group's tokens and own heads back to own tokens: ``[L_g, B, heads, D]`` to one block per member.

    Args:
        x: contiguous; every row goes to the rank that owns it.
        widths: heads that each member sends.

    Returns:
        ``[own tokens, B, widths[m], D]`` from every member ``m``.
    """
    if len(route.members) == 1:
        return [x]
    _, batch, _, dim = x.shape
    own = route.me.rows[1] - route.me.rows[0]
    sizes = [(m.rows[1] - m.rows[0]) * x[0].numel() for m in route.members]
    received = [own * batch * width * dim for width in widths]
    result = _all_to_all(route, links, x.view(-1), sizes, received)
    return [part.view(own, batch, w, dim) for part, w in zip(result.split(received), widths, strict=True)]


def _all_to_all(route: Route, links: Links, message: Tensor, sends: list[int], receives: list[int]) -> Tensor:
    result = message.new_empty(sum(receives))
    with links.naming("all-to-all", [m.rank for m in route.members if m.rank != route.rank]):
        dist.all_to_all_single(result, message, receives, sends, group=links.group)
    return result


class Mailbox:
    """Batched point-to-point transfers of one kind, ``KV`` or ``dKV``, in the order of the route's batches.

    A batch is issued as a whole; messages between two ranks are matched by that order alone (NCCL knows no tags).
    Buffers are held until their transfer has been waited for.
    """

    def __init__(self, kind: str, links: Links, group: Group | None) -> None:
        self.kind, self.links, self.group = kind, links, group
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
            message, work, _ = self._sends.pop(0)
            self._wait(message, message.receiver, work)

    def _wait(self, message: Message, peer: int, work: dist.Work) -> None:
        with self.links.naming(f"{self.kind} slot {message.slot} at tick {message.tick}", [peer]):
            work.wait()


def kv_ring(route: Route, links: Links, kv: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Walk the circle of slots: yields every block of ticks with its KV ``[rows, B, 2, own KV heads, D]``.

    Each time it yields, transfers for later ticks are already on their way and proceed while the caller computes.

    Args:
        kv: the own block, ``[L_g, B, 2, own KV heads, D]``; yielded first.
    """
    box = Mailbox("KV", links, links.kv)
    block_of = {t: block for block in route.blocks for t in block.ticks}
    buffers: dict[int, Tensor] = {}
    staged: dict[Message, Tensor] = {}

    def rows_of(t: int) -> slice:
        block = block_of[t]
        return slice(block.starts[t - block.first], block.starts[t - block.first + 1])

    def receive(message: Message, t: int) -> tuple[Message, Tensor]:
        # Straight into the block's buffer where one sender has all heads: rows are outermost, so it is contiguous.
        block = block_of[t]
        if block.first not in buffers:
            buffers[block.first] = kv.new_empty(block.starts[-1], *kv.shape[1:])
        target = _heads(route, buffers[block.first][rows_of(t)], message)
        staged[message] = target
        return message, target if target.is_contiguous() else torch.empty_like(target, memory_format=_CONTIGUOUS)

    def send(message: Message, t: int) -> tuple[Message, Tensor]:
        rows = own_slot(route, kv, message) if t < route.slots else buffers[block_of[t].first][rows_of(t)]
        return message, _heads(route, rows[: message.rows[1]], message).contiguous()

    for block in route.blocks:
        for t in block.ticks if block.side != OWN else ():
            for message in route.kv.receives[t - route.slots]:
                buffer, target = box.take(message), staged.pop(message)
                if buffer is not target:
                    target.copy_(buffer)
        for t in block.ticks:
            sends = [send(message, t) for message in route.kv.sends[t]]
            box.post(sends, [receive(message, t + route.slots) for message in route.kv.receives[t]])
        box.reap(block.first - SEND_LAG)
        yield block, kv if block.side == OWN else buffers.pop(block.first)
    box.reap()


class GradientRing:
    """Gradients of KV slots on their way home, summed up by every group they pass, in float32 or float64.

    Args:
        own: gradient of the own slots, ``[L_g, B, 2, own KV heads, D]``; what comes home is added to it.
    """

    def __init__(self, route: Route, links: Links, own: Tensor) -> None:
        self.route, self.own = route, own
        self.box = Mailbox("dKV", links, links.dkv)
        for t in range(route.slots if route.blocks else 0):
            self.box.post([], self._receives(t))

    def pass_on(self, block: Block, grad: Tensor) -> None:
        """Add what earlier groups found for the block's slots to `grad`, and send the sums on.

        Args:
            grad: this rank's own share, ``[rows, B, 2, own KV heads, D]``, laid out as the block's KV; added to.
        """
        route = self.route
        for i, t in enumerate(block.ticks):
            rows = grad[block.starts[i] : block.starts[i + 1]]
            for message in route.dkv.receives[t - route.slots]:
                if message.slot != block.slots[i]:
                    continue  # an own slot's back half on its short way home from group 0
                _heads(route, rows[slice(*message.rows)], message).add_(self.box.take(message))
            sends = [(m, _heads(route, rows[slice(*m.rows)], m).contiguous()) for m in route.dkv.sends[t]]
            self.box.post(sends, self._receives(t))
        self.box.reap(block.first - SEND_LAG)

    def come_home(self) -> None:
        """Wait for the own slots' gradients from elsewhere and add them, in batch and member order."""
        route = self.route
        for t in range(route.total if route.blocks else 0):
            for message in route.dkv.receives[t]:
                if route.off <= message.slot < route.off + route.slots:
                    part, done = self.box.take(message), 0
                    # The message's rows, mapped onto the front and the back interval of the own run of tokens.
                    for (start, end), base in zip(route.own_rows(message.slot), (0, route.half), strict=True):
                        first, last = max(message.rows[0], base), min(message.rows[1], base + end - start)
                        if last > first:
                            rows = self.own[start + first - base : start + last - base]
                            _heads(route, rows, message).add_(part[done : done + last - first])
                            done += last - first
        self.box.reap()

    def _receives(self, t: int) -> list[tuple[Message, Tensor]]:
        _, batch, _, _, dim = self.own.shape
        return [
            (m, self.own.new_empty(m.rows[1] - m.rows[0], batch, 2, m.heads[1] - m.heads[0], dim))
            for m in self.route.dkv.receives[t]
        ]


_CONTIGUOUS = torch.contiguous_format


def own_slot(route: Route, kv: Tensor, message: Message) -> Tensor:
    """Rows of an own slot as they travel: front half, then the back half if the receiver needs it."""
    (a, b), (c, d) = route.own_rows(message.slot)
    return kv[a:b] if message.rows[1] <= route.half else torch.cat([kv[a:b], kv[c:d]])


def _heads(route: Route, rows: Tensor, message: Message) -> Tensor:
    """The message's heads of ``[rows, B, 2, own KV heads, D]``, a view."""
    first = route.me.kv[0]
    return rows[:, :, :, message.heads[0] - first : message.heads[1] - first]

"""A replica in arrays: what it costs hangs on these and on where its ranks are, not on plans, groups and shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from hexiseq.plan import Interval, Plan, Replica, fragments, fusion_width, interval_array

T = TypeVar("T")
# (slots, [(rank, tokens, query heads), ...]) per group, outermost first.
Counts = Sequence[tuple[int, Sequence[tuple[int, int, int]]]]


@dataclass(frozen=True)
class Held:
    """KV heads that ranks have, ``[first, last)``; ``below[g, k]`` of group g's, copies included, are before head k."""

    first: np.ndarray
    last: np.ndarray
    below: np.ndarray


def common_heads(mine: Held, ranks: np.ndarray, theirs: Held, others: np.ndarray) -> np.ndarray:
    """Heads that ranks have in common with others, pair by pair."""
    last = np.minimum(mine.last[ranks], theirs.last[others])
    return np.maximum(last - np.maximum(mine.first[ranks], theirs.first[others]), 0).astype(float)


class _shared(cached_property[T]):
    """Worked out once for a layout and all that differ from it in the way across groups alone."""

    def __get__(self, layout: Any, owner: Any = None) -> Any:
        if layout is None:
            return self
        known, name = layout.known, self.attrname
        if name not in known:
            known[name] = self.func(layout)
        layout.__dict__[name] = known[name]
        return known[name]


@dataclass(frozen=True, eq=False)
class Layout:
    """How one replica is laid out. Arrays of ranks are group after group, outermost first, in member order.

    Nothing is checked: that is for the `Plan` it ends in.

    Attributes:
        seq_len, num_heads, num_kv_heads, slot, fusion, exchange: as of a plan.
        sequences: of a micro-step.
        slots: of each group.
        home: group of each rank.
        ranks: what each rank is called.
        tokens: of each rank.
        first, last: query heads ``[first, last)`` of each rank.
        known: what is worked out by now and does not hang on `fusion`, `exchange` and `ranks`.
    """

    seq_len: int
    num_heads: int
    num_kv_heads: int
    slot: int
    fusion: int
    exchange: str
    sequences: int
    slots: np.ndarray
    home: np.ndarray
    ranks: np.ndarray
    tokens: np.ndarray
    first: np.ndarray
    last: np.ndarray
    known: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False)

    def crossing(self, *, exchange: str | None = None, fusion: int | None = None) -> Layout:
        """The layout with another way across groups."""
        return dataclasses.replace(self, exchange=exchange or self.exchange, fusion=fusion or self.fusion)

    def renamed(self, ranks: np.ndarray) -> Layout:
        """The layout with its ranks called so."""
        return dataclasses.replace(self, ranks=ranks)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What does not hang on fusion, exchange and ranks' names, worked out once."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    @_shared
    def gqa_ratio(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @_shared
    def heads(self) -> np.ndarray:
        """Query heads of each rank, as floats."""
        return (self.last - self.first).astype(float)

    @_shared
    def group_tokens(self) -> np.ndarray:
        """Tokens of each group."""
        return np.bincount(self.home, self.tokens)

    @_shared
    def begins(self) -> np.ndarray:
        """Where each group's ranks begin, and the last one's end."""
        return np.searchsorted(self.home, np.arange(len(self.slots) + 1))

    @cached_property
    def counts(self) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """The groups as `Counts`."""
        members = list(zip(self.ranks.tolist(), self.tokens.tolist(), (self.last - self.first).tolist(), strict=True))
        begins = self.begins.tolist()
        return [(n, members[a:b]) for n, a, b in zip(self.slots.tolist(), begins[:-1], begins[1:], strict=True)]

    @_shared
    def runs(self) -> np.ndarray:
        """Front and back interval of each group: ``[groups, 2, 2]``."""
        return interval_array(self.seq_len, self.slot, self.slots)

    @_shared
    def pieces(self) -> np.ndarray:
        """Each rank's kernel calls for one tile, zeros for a rank without heads: ``[5, ranks]``.

        How many there are, most query heads and most KV heads of one, query and KV heads of the last.
        """
        ranges = zip(self.first.tolist(), self.last.tolist(), strict=True)
        return np.array([_pieces(heads, self.gqa_ratio) for heads in ranges], float).T

    @_shared
    def held(self) -> Held:
        """The KV heads that each rank attends with."""
        first, last = self.first // self.gqa_ratio, -(-self.last // self.gqa_ratio)
        last = np.where(self.last > self.first, last, first)
        groups, heads = len(self.slots), self.num_kv_heads + 1
        more, fewer = (np.bincount(self.home * heads + edge, minlength=groups * heads) for edge in (first, last))
        below = np.zeros((groups, heads))
        below[:, 1:] = (more - fewer).reshape(groups, heads).cumsum(1)[:, :-1].cumsum(1)
        return Held(first, last, below)

    @_shared
    def claimed(self) -> Held:
        """Those that no earlier member of its group holds: a rank speaks for its group on these.

        A receiver takes each head from the one that claims it; a gradient goes to the one that claims its head.
        """
        # Ends so far, group after group.
        base = self.home * (self.num_kv_heads + 1)
        so_far = np.maximum.accumulate(np.append(0, self.held.last + base)[:-1]) - base
        first, last = np.maximum(self.held.first, so_far), np.maximum(self.held.last, so_far)
        return Held(first, last, np.broadcast_to(np.arange(self.num_kv_heads + 1.0), self.held.below.shape))

    @_shared
    def kv(self) -> np.ndarray:
        """KV heads that each rank attends with, as floats."""
        return (self.held.last - self.held.first).astype(float)

    @_shared
    def hops(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ranks with each rank of the group before theirs: both, KV heads that go there, and those of dKV back here."""
        before = (self.home - 1) % len(self.slots)
        width = np.diff(self.begins)[before]
        here = np.repeat(np.arange(len(self.home)), width)
        there = np.arange(len(here)) - np.repeat(np.cumsum(width) - width, width) + self.begins[before][here]
        sent = common_heads(self.claimed, here, self.held, there)
        returned = common_heads(self.held, here, self.claimed, there)
        return here, there, sent, returned

    @cached_property
    def width(self) -> np.ndarray:
        """Slots that each group fuses into one kernel call on the ring."""
        widths = {slots: fusion_width(self.fusion, slots) for slots in set(self.slots.tolist())}
        return np.array(list(map(widths.__getitem__, self.slots.tolist())))


@functools.lru_cache(maxsize=65536)
def _pieces(heads: Interval, gqa_ratio: int) -> tuple[int, int, int, int, int]:
    """`Layout.pieces` of a rank with these query heads."""
    cuts = [(q[1] - q[0], kv[1] - kv[0]) for q, kv in fragments(heads, gqa_ratio)]
    if not cuts:
        return 0, 0, 0, 0, 0
    return len(cuts), max(q for q, _ in cuts), max(kv for _, kv in cuts), *cuts[-1]


def make_layout(
    counts: Counts, seq_len: int, num_heads: int, num_kv_heads: int, slot: int, fusion: int, exchange: str,
    sequences: int,
) -> Layout:  # fmt: skip
    """The layout of these groups."""
    ranks, tokens, heads = np.array([member for _, members in counts for member in members]).T
    home = np.repeat(np.arange(len(counts)), [len(members) for _, members in counts])
    # Every group has all heads.
    last = np.cumsum(heads) - home * num_heads
    slots = np.array([slots for slots, _ in counts])
    return Layout(seq_len, num_heads, num_kv_heads, slot, fusion, exchange, sequences, slots, home, ranks, tokens,
                  last - heads, last)  # fmt: skip


def layout_of(plan: Plan, replica: Replica) -> Layout:
    """One of a plan's replicas as a layout."""
    counts = [
        (group.slots, [(shard.rank, shard.num_tokens, shard.num_heads) for shard in group.shards])
        for group in replica.groups
    ]
    return make_layout(counts, plan.seq_len, plan.num_heads, plan.num_kv_heads, plan.slot, plan.fusion,
                       plan.exchange, replica.sequences)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Replicas that are alike: laid out alike, on devices and nodes alike.

    Attributes:
        layout: of each; what its ranks are called does not matter.
        ranks: in the job, of all of them, in the order of the layout's ranks: ``[count, width]``.
    """

    layout: Layout
    ranks: np.ndarray


def alike_replicas(plan: Plan, signature: Callable[[Sequence[int]], Hashable]) -> list[list[Replica]]:
    """The plan's replicas by kind; those whose ranks differ in `signature` are of different kinds."""
    found: dict[Hashable, list[Replica]] = {}
    for replica in plan.replicas:
        layout = tuple(
            (group.slots, tuple((shard.num_tokens, shard.heads) for shard in group.shards)) for group in replica.groups
        )
        found.setdefault((replica.sequences, layout, signature(replica.ranks)), []).append(replica)
    return list(found.values())


def replica_kinds(plan: Plan, signature: Callable[[Sequence[int]], Hashable]) -> list[Kind]:
    """The same as `Kind`."""
    return [
        Kind(layout_of(plan, alike[0]), np.array([replica.ranks for replica in alike]))
        for alike in alike_replicas(plan, signature)
    ]

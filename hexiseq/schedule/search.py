"""The uneven split of one replica: groupings, then slots of groups, tokens and heads of ranks.

Two levels. Groupings are compared by an estimate that knows groups only by class (`Search.estimate`); the best few are
laid out in whole slots, tokens and heads, and judged by `hexiseq.cost`, never by an estimate or a program's objective.
Heads of a group are cut first, since they do not depend on how many tokens the group gets; that makes a group one
device with one attention rate. Memory that does not fit is turned into caps and solved again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hexiseq import cost
from hexiseq.cost import Counts, Kind, Layout
from hexiseq.plan import fits_slots, short_tokens
from hexiseq.schedule.estimate import (
    FUSED_TOKENS,
    Alike,
    Exchange,
    Job,
    Ring,
    attention_seconds,
    kind_of,
    moving,
)
from hexiseq.schedule.even import even_totals, exchanges, lay_out, slots_for
from hexiseq.schedule.groups import Grouping, Nodes
from hexiseq.schedule.local import cut_heads, deal_heads, share_tokens
from hexiseq.schedule.shares import GroupClass, Shares, best_slots, rank_totals, round_slots, share
from hexiseq.schedule.templates import Kinds, template_groupings

MOST_FUSED = 64  # slots of one call
MOST_SLOTS, SLOTS_PER_GROUP = 64, 16  # slots at most: of a ring of few groups, and on average of one of many
# Of more slots than that none is shorter, in tokens; and forward attention of a layer takes longer on each than a host
# may take to post its transfers.
SMALL_SLOT, POSTING_SECONDS = 512, 200e-6
FEW_RANKS = 6  # so few that coarse slots are tried, too
# Coarse slots of a group on average; numbers of them tried, and by how much their slowest group is late.
COARSE_SLOTS, MOST_COARSE, MOST_UNEVEN = 6, 12, 0.25
MOST_REORDERED, MOST_PERMUTED = 4, 4  # coarse plans tried with their groups in every order, and groups at most
NEAR_BEST = 1.02  # seconds over the best at which narrower calls are worth a look
NEARLY_FULL, MOST_RESCORED = 0.97, 24  # share of what a group can hold from which numbers of slots are worked out
MOST_ATTEMPTS = 12  # at shares that fit memory
CAP_GRAINS = 256  # of what a rank can hold at the very most: how fine caps are
GRACE_SECONDS = 4.0  # beyond the time limit, to find anything that fits
MOST_EXACT = 400_000  # slots, times the square of classes, up to which the best are sought
FAR = 0.02  # from the bound: a plan that is farther is worth a program over templates
JUDGED, REFINED = 4, 2  # groupings laid out, and of these refined


@dataclass(frozen=True)
class Options:
    """What a user left open or did not.

    Attributes:
        slot: ring transfer unit in tokens, or None.
        exchange: one of `EXCHANGES`, or None.
        deadline: of this thread's processor time, by which the search ends with what it has: others who keep the
            machine busy do not change the layout.
    """

    slot: int | None
    exchange: str | None
    deadline: float

    def late(self, found: bool = True) -> bool:
        """Whether the time is up; without anything found there is some more."""
        return time.thread_time() > self.deadline + (0.0 if found else GRACE_SECONDS)


class Search:
    """Best layout of a replica, of which the job has several that are alike."""

    def __init__(self, job: Job, alike: Alike, options: Options, *, even_heads: bool = False) -> None:
        self.job, self.alike, self.options, self.even_heads = job, alike, options, even_heads
        ranks = alike.ranks[0]
        self.places = [job.places[rank] for rank in ranks.tolist()]
        self.workload = dataclasses.replace(job.workload, sequences=alike.sequences)
        # Seconds of a micro-step: per token of a rank, and per token of its group and head of the rank.
        device, sequences = job.device[ranks], alike.sequences
        self.linear = sequences * job.linear[device]
        self.forward, self.backward = sequences * job.forward[device], sequences * job.backward[device]
        self.merge, self.launch = sequences * job.merge[device], job.launch[device]
        # Seconds of forward attention of a layer, if all ranks had a part by speed.
        model = self.workload.model
        self.layer_forward = self.workload.seq_len * model.heads / model.layers / float((1 / self.forward).sum())
        self.copying = float((job.copies / job.linear)[device].max())  # seconds, for one of a rank's tokens
        self.capacity = job.capacity[ranks] / sequences
        wires = job.wires.subset(ranks)
        self.port, self.node, self.nic = wires.port, wires.node, wires.nic
        self.exchange = Exchange(job, ranks)
        self._slower: dict[int, np.ndarray] = {}
        self._attention: dict[int, np.ndarray] = {}
        self._seen: dict[tuple, tuple[float, Grouping]] = {}
        self._weighed: tuple[Layout, float] | None = None  # the layout last asked for, which is often asked for again
        self.best: Layout | None = None
        self.seconds = math.inf  # of the job with these replicas alone
        self.misfit: Layout | None = None  # the layout that lacks least memory, to say what would fit
        self.lacking = math.inf

    def slower(self, groups: int) -> np.ndarray:
        """How much longer attention takes on each rank in so many groups than in large tiles."""
        if groups not in self._slower:
            self._slower[groups] = self.job.slower(groups)[self.job.device[self.alike.ranks[0]]]
        return self._slower[groups]

    def attention_in(self, groups: int) -> np.ndarray:
        """Seconds of a micro-step on each rank, per token of one of so many groups and head."""
        if groups not in self._attention:
            merging = (self.job.forwards + 1) * self.job.calls(self.workload.seq_len / groups) * self.merge
            passes = self.job.forwards * self.forward + self.backward
            self._attention[groups] = self.slower(groups) * passes + (merging if groups > 1 else 0.0)
        return self._attention[groups]

    def kind(self, layout: Layout) -> Kind:
        """These replicas, laid out so."""
        return kind_of(layout, self.alike.ranks)

    def run(self, refine: bool = True) -> Layout | None:
        """The best layout of one replica that fits memory, or None. Without `refine`, only by rounding."""
        judged: list[tuple[float, int, Grouping]] = []
        for index, (_, grouping) in enumerate(self.rank_groupings()):
            # Where memory is tight the best few may not fit.
            any_fits = self.best is not None
            if index and (self.options.late(any_fits) or index >= (JUDGED if any_fits else 3 * JUDGED)):
                break
            if (layout := self.settle(grouping, self.round_slots)) is not None:
                judged.append((self.by_width(layout)[0], index, grouping))
        judged.sort(key=lambda item: item[:2])
        coarse: list[tuple[float, int, Layout]] = []
        for _, _, grouping in judged if refine and len(self.places) <= FEW_RANKS else ():
            for layout in self.coarse(grouping):
                seconds, layout = self.by_width(layout)
                coarse.append((seconds, len(coarse), layout))
                if self.options.late():
                    break
        for _, _, layout in sorted(coarse, key=lambda item: item[:2])[:MOST_REORDERED]:
            for other in self.reordered(layout):
                if self.offer(other) < NEAR_BEST * self.seconds:
                    for narrow in self.narrower(other):
                        self.offer(narrow)
        for place, (_, _, grouping) in enumerate(judged[:REFINED] if refine else ()):
            for layout in self.refine(grouping, other_totals=place == 0):
                self.by_width(layout)
                if self.options.late():
                    break
        if refine:
            self.mix()
        # The search is for one exchange; where it is open, its outcome is judged with the other, too.
        if (found := self.best or self.misfit) is not None:
            for layout in exchanges(found, self.options.exchange)[1:]:
                self.offer(layout)
        return self.best

    def mix(self) -> None:
        """Try groupings by templates where the layout is far from what its devices could do, and memory is why."""
        layout = self.best or self.misfit
        if layout is None or len(self.places) == 1 or self.options.late(self.best is not None):
            return
        devices = self.job.wires.devices.subset(self.alike.ranks[0])
        if self.seconds < (1 + FAR) * cost.devices_bound(devices, self.workload):
            return
        room, alone = self.room(layout)
        if np.isinf(alone).any():
            return
        if self.best is not None and (layout.tokens < NEARLY_FULL * room[layout.ranks]).all():
            return
        model, below = self.workload.model, self.seconds / self.workload.accumulation
        moved = model.layers * model.head_dim * self.workload.element_bytes * self.workload.sequences
        kinds = self.kinds(layout, room, alone)
        tried: list[tuple[float, int, Grouping]] = []
        for grouping in template_groupings(
            kinds, model.heads, model.kv_heads, (self.job.forwards * moved, moved), self.workload.seq_len,
            FUSED_TOKENS[0], below, lambda: self.options.late(self.best is not None),
        ):  # fmt: skip
            if (layout := self.settle(grouping, self.exact_slots)) is not None:
                tried.append((self.by_width(layout)[0], len(tried), grouping))
        for _, _, grouping in sorted(tried, key=lambda item: item[:2])[:1]:
            for layout in self.refine(grouping[::-1], other_totals=True):
                self.by_width(layout)

    def kinds(self, layout: Layout, room: np.ndarray, alone: np.ndarray) -> Kinds:
        """The kinds of devices, with what a layout says of their memory."""
        ranks: dict[int, dict[int, list[int]]] = {}
        for rank, kind in enumerate(self.exchange.alike):
            ranks.setdefault(kind, {}).setdefault(int(self.node[rank]), []).append(rank)
        nodes = [list(found.values()) for found in ranks.values()]
        first = [found[0][0] for found in nodes]
        bare = np.where(alone < 0.99, room / (1 - np.minimum(alone, 0.99)), self.capacity)
        # Tokens fewer for a token of the group and head, of those that have heads.
        held = layout.group_tokens[layout.home] * layout.heads
        with_heads = np.flatnonzero(held)
        own = layout.ranks[with_heads]
        spent = dict(zip(own.tolist(), (alone[own] * bare[own] / held[with_heads]).tolist(), strict=True))
        everyone = float(np.mean(list(spent.values())))
        members = [[rank for node in found for rank in node] for found in nodes]
        head = [np.mean([spent[r] for r in own if r in spent] or [everyone]) for own in members]
        seats = np.bincount(self.node)
        return Kinds(
            nodes,
            self.linear[first],
            self.job.forwards * self.forward[first] + self.backward[first],
            (self.job.forwards + 1) * self.merge[first],
            np.array([bare[own].mean() for own in members]),
            np.array(head),
            self.port[first],
            self.nic[self.node[first]] / seats[self.node[first]],
        )

    def lay_out_groups(self, grouping: Grouping) -> Layout | None:
        """The layout with these groups, if it fits, by the faster exchange."""
        if (layout := self.settle(grouping, self.exact_slots)) is not None:
            for other in exchanges(layout, self.options.exchange):
                self.offer(other)
        return self.best

    def offer(self, layout: Layout) -> float:
        """Keep the layout if it fits and is the fastest so far; its step time, infinite when it does not fit."""
        seconds = self.job.judge([self.kind(layout)]).step_seconds
        # A tie within rounding keeps the earlier layout, so that results do not hang on the last bit.
        if self.best is not None and seconds >= self.seconds * (1 - 1e-9):
            return seconds
        if (lacking := self.over_gb(layout)) > 0:
            if self.best is None and lacking < self.lacking:
                self.misfit, self.lacking = layout, lacking
            return math.inf
        self.best, self.seconds = layout, seconds
        return seconds

    def by_width(self, layout: Layout) -> tuple[float, Layout]:
        """The faster of the layout and those with narrower calls, all of them offered, and its seconds.

        Compared by their widest calls alone, layouts of few large slots would lose for the gradients of their last one.
        """
        options = [layout, *(self.narrower(layout) if layout.exchange == "ring" else ())]
        seconds = [self.offer(one) for one in options]
        best = min(range(len(options)), key=seconds.__getitem__)
        return seconds[best], options[best]

    # Groupings -------------------------------------------------------------------------------------------------

    def glance(self) -> float:
        """Estimated seconds of the best grouping of groups of one size in all nodes."""
        return min(self.look(self.nodes.grouping(chosen)) for chosen in self.nodes.alike())

    @functools.cached_property
    def nodes(self) -> Nodes:
        return Nodes(self.places)

    def look(self, grouping: Grouping) -> float:
        """The estimate of a grouping, made once."""
        key = tuple(map(tuple, grouping))
        if key not in self._seen:
            self._seen[key] = self.estimate(grouping), grouping
        return self._seen[key][0]

    def rank_groupings(self) -> list[tuple[float, Grouping]]:
        """Groupings by estimated seconds, best first; the best splits of nodes are improved one kind at a time."""
        nodes, look = self.nodes, self.look
        starts = [(look(nodes.grouping(chosen)), chosen) for chosen in nodes.starts()]
        for grouping in nodes.across():
            if not self.options.late():
                look(grouping)
        for seconds, chosen in sorted(starts)[:1]:
            better = True
            while better and not self.options.late():
                better = False
                for other in nodes.neighbours(chosen):
                    if (now := look(nodes.grouping(other))) < seconds * (1 - 1e-9):
                        seconds, chosen, better = now, other, True

        def order() -> list[tuple[float, Grouping]]:
            return sorted(self._seen.values(), key=lambda item: (item[0], len(item[1]), item[1]))

        for _, grouping in order()[: 2 * JUDGED]:
            if not self.options.late():
                look(grouping[::-1])
        # Of those that are equally fast, by what limits them all, one is enough: that of the fewest groups.
        ranked = order()
        distinct = [item for i, item in enumerate(ranked) if i == 0 or item[0] > ranked[i - 1][0] * (1 + 1e-9)]
        return [item for item in distinct if item[0] < math.inf] or ranked

    def estimate(self, grouping: Grouping) -> float:
        """Seconds of a micro-step on the ring, with fractional shares; wires are counted as in `hexiseq.cost`."""
        parts = self.parts(grouping, self.capacity)
        shares = share(parts.classes, parts.counts, self.workload.seq_len) if parts is not None else None
        if parts is None or shares is None:
            return math.inf
        totals = self.totals(parts, shares.tokens)
        if not totals or totals[0][1] < len(grouping):
            return math.inf
        return self.estimated(parts, shares, totals[0][0])

    def estimated(self, parts: Parts, shares: Shares, rounding: float) -> float:
        """The estimate with these shares, of which the last group finishes so much later for whole slots."""
        # One group of each class: work of its members, and its all-to-all.
        members = [rank for ranks in parts.members for rank in ranks]
        sizes = list(map(len, parts.members))
        work = np.repeat(shares.tokens, sizes) * np.array([h for group in parts.classes for h in group.heads])
        all_to_all, heads = 0.0, []
        for tokens, group, ranks in zip(shares.tokens.tolist(), parts.classes, parts.members, strict=True):
            seconds, kv = self.exchange.of(ranks, group.heads)
            all_to_all = max(all_to_all, self.workload.sequences * tokens * seconds)
            heads.append(kv)
        ring, order = self.ring(parts.grouping, shares.tokens[parts.index], [heads[i] for i in parts.index])
        slower, merge = self.slower(len(parts.grouping))[members], self.merge[members]
        forward, backward = work * slower * self.forward[members], work * slower * self.backward[members]
        # The outermost and the innermost group of each class: one sums up gradients of more KV, one has more calls.
        before = np.cumsum(ring.tokens) - ring.tokens
        outer = np.empty((2, len(sizes)))
        outer[0, parts.index[::-1]], outer[1, parts.index] = before[::-1], before
        own, outer = np.repeat(shares.tokens, sizes), np.repeat(outer, sizes, axis=1)
        if len(parts.grouping) > 1:
            backward = backward + np.concatenate(heads) * self.job.summed(outer) * merge
        moved = moving(self.job, ring, self.port[order], self.nic).times(self.workload.sequences)
        smallest = float(shares.tokens.min())
        attention = attention_seconds(
            self.job, forward, backward, work * merge, own, outer, smallest, moved, later=rounding
        )
        linear = rounding * shares.linear_seconds
        return max(linear + all_to_all + attention, float(moved.nics.max()), self.copying * linear)

    def ring(self, grouping: Grouping, tokens: np.ndarray, heads: list[np.ndarray]) -> tuple[Ring, np.ndarray]:
        """The groups' ring, and the ranks in its order."""
        width = np.array([len(members) for members in grouping])
        begins = np.cumsum(width) - width
        home = np.repeat(np.arange(len(grouping)), width)
        following = np.roll(np.arange(len(grouping)), -1)[home]
        where = (np.arange(len(home)) - begins[home] + 0.5) / width[home]
        partner = begins[following] + (where * width[following]).astype(int)
        ranks = np.array([rank for members in grouping for rank in members])
        return Ring(home, partner, self.node[ranks], np.concatenate(heads), tokens), ranks

    # Layouts ---------------------------------------------------------------------------------------------------

    def refine(self, grouping: Grouping, other_totals: bool) -> Iterator[Layout]:
        """Plans with the best slots, for the best number of them and the next best."""
        for choice in range(2 if other_totals and len(grouping) > 1 and self.options.slot is None else 1):
            layout = self.settle(grouping, functools.partial(self.exact_slots, choice=choice))
            if layout is not None:
                yield layout

    def coarse(self, grouping: Grouping) -> Iterator[Layout]:
        """Plans with a slot or a few for every group: fewest calls and transfers, which can be worth uneven shares."""
        if len(grouping) == 1 or self.options.slot is not None:
            return
        parts = self.parts(grouping, self.capacity)
        shares = share(parts.classes, parts.counts, self.workload.seq_len) if parts is not None else None
        if parts is None or shares is None:
            return
        totals = slot_totals(self.workload.seq_len, len(grouping), COARSE_SLOTS * len(grouping))
        ranked = rank_totals(shares.tokens.tolist(), parts.counts, totals, 1)
        even_enough = [total for uneven, total in ranked if uneven < 1 + MOST_UNEVEN]
        for order in (grouping, grouping[::-1]) if len(parts.classes) > 1 else (grouping,):
            for total in even_enough[:MOST_COARSE]:
                layout = self.settle(order, functools.partial(self.round_slots, total=total))
                if layout is not None:
                    yield layout

    def narrower(self, layout: Layout) -> Iterator[Layout]:
        """The layout with narrower calls: they merge more, but gradients of the last one are fewer to wait for."""
        halves = [layout.fusion >> i for i in range(1, layout.fusion.bit_length())]
        for fusion in range(layout.fusion - 1, 0, -1) if len(self.places) <= FEW_RANKS else halves:
            yield layout.crossing(fusion=fusion)

    def reordered(self, layout: Layout) -> Iterator[Layout]:
        """Few groups in every order: which edges their last gradients wait for hangs on it."""
        groups = layout.counts
        if not 1 < len(groups) <= MOST_PERMUTED or self.options.late():
            return
        short = short_tokens(layout.seq_len, layout.slot, int(layout.slots.sum()))
        for order in itertools.permutations(groups):
            counts = []
            for slots, members in order:
                # Whoever is first lacks what the outermost half-slot is short of.
                lacking = (short if members is order[0][1] else 0) - (short if members is groups[0][1] else 0)
                largest = max(range(len(members)), key=lambda m: members[m][1])
                held = [(r, tokens - lacking * (m == largest), heads) for m, (r, tokens, heads) in enumerate(members)]
                counts.append((slots, held))
            if all(tokens >= 0 for _, members in counts for _, tokens, _ in members):
                yield lay_out(self.workload, counts, layout.slot, layout.fusion, layout.exchange)

    def settle(self, grouping: Grouping, slots_of: Callable[[Parts], tuple[int, list[int]] | None]) -> Layout | None:
        """Lay a grouping out with wide kernel calls; where memory limits shares, with narrow ones if that is faster."""
        best, free = self.fit(grouping, slots_of, FUSED_TOKENS[0])
        if best is None or free:
            return best
        seconds = math.inf if self.over_gb(best) > 0 else self.job.judge([self.kind(best)]).step_seconds
        for tokens in FUSED_TOKENS[1:]:
            if self.options.late(self.best is not None):
                break
            layout, _ = self.fit(grouping, slots_of, tokens)
            if layout is None or self.over_gb(layout) > 0:
                continue
            if (now := self.job.judge([self.kind(layout)]).step_seconds) >= seconds:
                break
            best, seconds = layout, now
        return best

    def fit(
        self, grouping: Grouping, slots_of: Callable[[Parts], tuple[int, list[int]] | None], fused_tokens: int
    ) -> tuple[Layout | None, bool]:
        """Share slots, lay out, and while a rank overflows cap what it may hold and share again.

        Returns:
            The layout, the last one where none fits, and whether no rank had to be capped.
        """
        caps, head_caps = self.capacity, np.full(len(self.places), self.workload.model.heads)
        layout = None
        for attempt in range(MOST_ATTEMPTS):
            parts = self.parts(grouping, caps, head_caps)
            found = slots_of(parts) if parts is not None else None
            if parts is None or found is None:
                break
            slot, slots = found
            counts = self.shares(parts, slot, slots, caps) or self.shares(parts, slot, slots, self.capacity)
            if counts is None:
                break
            fusion = max(1, min(round(fused_tokens / slot), widest_fusion(slots)))
            exchange = self.options.exchange or "ring"
            layout = lay_out(self.workload, counts, slot, fusion, exchange)
            if self.over_gb(layout) <= 0:
                return layout, attempt == 0
            room, alone = self.room(layout)
            if np.isinf(alone).any():
                break  # parameters leave a rank no room, whatever its share
            # What a rank can hold hangs on its heads and on its group's slots, not on who has the group's other tokens.
            if alone.max() <= 1 and (counts := self.shares(parts, slot, slots, room)) is not None:
                return lay_out(self.workload, counts, slot, fusion, exchange), False
            caps, head_caps = self.capped(layout, room, alone, head_caps)
        return layout, False

    def room(self, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
        """`cost.most_tokens` of the layout, by rank."""
        found = np.empty((2, len(self.places)))
        found[:, layout.ranks] = self.job.most_tokens(self.kind(layout))
        return found[0], found[1]

    def capped(
        self, layout: Layout, room: np.ndarray, alone: np.ndarray, head_caps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Caps of tokens and heads with which every group has room for all it gets.

        What a rank holds for its heads is in proportion to its group's tokens: so many fewer of these leave it more
        room for its own.

        Args:
            room, alone: of the layout, as `room` has them.
        """
        caps, head_caps = self.capacity.copy(), head_caps.copy()
        # Without heads there would be so much.
        bare = np.where(alone < 0.99, room / (1 - np.minimum(alone, 0.99)), self.capacity)
        for _, shares in layout.counts:
            members, held = [rank for rank, _, _ in shares], sum(tokens for _, tokens, _ in shares)
            scale = float(bare[members].sum() / (held + (bare * alone)[members].sum()))
            left = bare[members] * (1 - scale * alone[members])
            # Nearly equal caps are equal, so that groups alike stay alike.
            grain = self.capacity[members] / CAP_GRAINS + 1e-9
            caps[members] = np.clip(np.floor(left / grain) * grain, 0.0, self.capacity[members])
            for rank, _, heads in shares if len(members) > 1 else ():
                if (over := scale * float(alone[rank])) > 1 and heads:
                    head_caps[rank] = min(heads - 1, int(heads / over))
        return caps, head_caps

    def over_gb(self, layout: Layout) -> float:
        """Memory lacking on the rank that lacks most; at most 0 where all fit."""
        if self._weighed is None or self._weighed[0] is not layout:
            self._weighed = layout, float(self.job.lacking_gb([self.kind(layout)]).max())
        return self._weighed[1]

    def parts(self, grouping: Grouping, caps: np.ndarray, head_caps: np.ndarray | None = None) -> Parts | None:
        """The groups by class, or None when heads or tokens cannot fit.

        Args:
            head_caps: the most heads of each rank; None for no limit, and for heads cut by a rule of thumb.
        """
        rough = self.workload.seq_len / len(grouping)
        found: dict[tuple, int] = {}
        index: list[int] = []
        members_of: Grouping = []
        classes: list[GroupClass] = []
        free = caps is self.capacity and head_caps is None
        attention = self.attention_in(len(grouping))
        kind = self._kinds_at_most if free else _numbered(self.exchange.alike, caps, head_caps)
        for members in grouping:
            key = tuple(map(kind.__getitem__, members))
            if key not in found:
                cut = self.cut_heads(members, rough, head_caps)
                if cut is None:
                    return None
                found[key] = len(classes)
                members_of.append(members)
                classes.append(GroupClass(
                    cut,
                    float(max(h * attention[r] for h, r in zip(cut, members, strict=True))),
                    self.merging(members, cut) if len(grouping) > 1 else 0.0,
                    tuple(self.linear[members].tolist()),
                    tuple(np.floor(caps[members]).tolist()),
                ))  # fmt: skip
            index.append(found[key])
        counts = np.bincount(index)
        if sum(count * sum(c.caps) for count, c in zip(counts.tolist(), classes, strict=True)) < self.workload.seq_len:
            return None
        return Parts(grouping, classes, counts.tolist(), index, members_of)

    def merging(self, members: list[int], heads: tuple[int, ...]) -> float:
        """Seconds of a micro-step in which the slowest member of a group in the middle sums up gradients of KV."""
        _, kv = self.exchange.of(members, heads)
        return float((kv * self.merge[members]).max()) * self.job.summed(self.workload.seq_len / 2)

    @functools.cached_property
    def _kinds_at_most(self) -> list[int]:
        """A number for each kind of rank, when it may hold what it can at the very most."""
        return _numbered(self.exchange.alike, self.capacity, None)

    def cut_heads(self, members: list[int], tokens: float, head_caps: np.ndarray | None) -> tuple[int, ...] | None:
        """Heads of each member, for a group of about so many tokens."""
        model, calls = self.workload.model, 1 + self.workload.seq_len / FUSED_TOKENS[0]
        if self.even_heads:
            return (model.heads // len(members),) * len(members)
        groups = round(self.workload.seq_len / tokens)
        seconds = tuple((self.attention_in(groups)[members] * tokens).tolist())
        launch = tuple((self.launch[members] * calls).tolist())
        if head_caps is None:
            return deal_heads(model.heads, seconds, launch, (model.heads,) * len(members))
        most = np.minimum(head_caps[members], model.heads)
        return cut_heads(model.heads, model.kv_heads, seconds, launch, tuple(most.tolist()))

    # Slots -----------------------------------------------------------------------------------------------------

    def totals(self, parts: Parts, shares: np.ndarray) -> list[tuple[float, int]]:
        """Numbers of slots to try, and how much later than fractions they finish, best first.

        None when the sequence is too short for a slot per group.
        """
        groups, n = len(parts.grouping), self.workload.seq_len
        if self.options.slot is not None:
            totals = np.array([slots_for("hexiseq", n, self.options.slot)])
        elif groups == 1:
            return [(1.0, next(even_totals(n, 1)))]
        else:
            hidden = n // SMALL_SLOT
            if self.options.exchange != "allgather":  # which posts all at once
                hidden = min(hidden, int(self.layer_forward / POSTING_SECONDS))
            most = min(max(MOST_SLOTS, SLOTS_PER_GROUP * groups, hidden), n // 2)
            totals = slot_totals(n, 2 * groups if n >= 4 * groups else groups, most)
        ranked = rank_totals(shares.tolist(), parts.counts, totals, np.where(totals >= 2 * groups, 2, 1))
        caps = np.array([sum(c.caps) for c in parts.classes])
        if (shares < NEARLY_FULL * caps).all():
            return ranked
        # Whole slots of a group that memory limits are fewer, which leaves the others more.
        rescored = []
        for _, total in ranked[:MOST_RESCORED]:
            slot = self.size(total)
            slots = round_slots(
                shares[parts.index], (caps // slot)[parts.index], total, 2 if total >= 2 * groups else 1
            )
            rescored.append((round(float((np.array(slots) * slot / shares[parts.index]).max()), 3), total))
        return sorted(rescored)

    def size(self, total: int) -> int:
        return self.options.slot or 2 * -(-self.workload.seq_len // (2 * total))

    def round_slots(self, parts: Parts, total: int | None = None) -> tuple[int, list[int]] | None:
        """Slot and slots per group: fractional shares, rounded so that the largest finish time is least.

        Args:
            total: number of slots, of which a group may then have one; None for the best number.
        """
        shares = share(parts.classes, parts.counts, self.workload.seq_len)
        if shares is None:
            return None
        groups, given = len(parts.grouping), total is not None
        if total is None:
            total = next((total for _, total in self.totals(parts, shares.tokens)), 0)
        if total < groups:
            return None
        slot = self.size(total)
        room = np.array([sum(c.caps) // slot for c in parts.classes])
        # Two slots let a group's first foreign slot arrive while its own are computed.
        least = 2 if total >= 2 * groups and not given else 1
        return slot, round_slots(shares.tokens[parts.index], room[parts.index], total, least)

    def exact_slots(self, parts: Parts, choice: int = 0) -> tuple[int, list[int]] | None:
        """The best slots (`best_slots`), for the best (or `choice`-next) number of them."""
        shares = share(parts.classes, parts.counts, self.workload.seq_len)
        if shares is None or len(parts.grouping) == 1:
            return self.round_slots(parts)
        totals = [total for _, total in self.totals(parts, shares.tokens)]
        total = totals[min(choice, len(totals) - 1)] if totals else 0
        if total < len(parts.grouping):
            return None
        slot = self.size(total)
        # Of very many slots, which a user may want, one more or less does not matter.
        few = total * len(parts.classes) ** 2 <= MOST_EXACT
        sums = best_slots(parts.classes, parts.counts, total, slot) if few else None
        if sums is None:
            return self.round_slots(parts)
        left = [divmod(n, number) for n, number in zip(sums, parts.counts, strict=True)]
        counts, seen = [], [0] * len(left)
        for kind in parts.index:
            each, more = left[kind]
            counts.append(each + (seen[kind] < more))
            seen[kind] += 1
        return slot, counts

    # Tokens ----------------------------------------------------------------------------------------------------

    def shares(self, parts: Parts, slot: int, slots: list[int], caps: np.ndarray) -> Counts | None:
        if not fits_slots(self.workload.seq_len, slot, sum(slots)):
            return None
        short = sum(slots) * slot - self.workload.seq_len
        counts = []
        for g, members in enumerate(parts.grouping):
            tokens = slots[g] * slot - (short if g == 0 else 0)
            most = np.minimum(caps[members], tokens).astype(int)
            group = parts.classes[parts.index[g]]
            sizes = share_tokens(tokens, group.linear, tuple(most.tolist()))
            if sizes is None:
                return None
            counts.append((slots[g], list(zip(members, sizes, group.heads, strict=True))))
        return counts


def _numbered(alike: list[int], caps: np.ndarray, head_caps: np.ndarray | None) -> list[int]:
    """A number for each rank, the same for those of one kind with the same caps."""
    known: dict[tuple, int] = {}
    limits = [None] * len(alike) if head_caps is None else head_caps.tolist()
    return [known.setdefault(rank, len(known)) for rank in zip(alike, caps.tolist(), limits, strict=True)]


@dataclass(frozen=True)
class Parts:
    """Groups as sharing slots sees them.

    Attributes:
        classes, counts: the classes of groups, and how many groups are of each.
        index: class of each group.
        members: of one group of each class.
    """

    grouping: Grouping
    classes: list[GroupClass]
    counts: list[int]
    index: list[int]
    members: list[list[int]]


def widest_fusion(slots: Sequence[int]) -> int:
    """The most slots of a call, where groups have so many."""
    # A call wider than the slots that a neighbour keeps in flight would make it wait for gradients.
    return max(1, min(min(slots), max(slots) - 1, MOST_FUSED))


@functools.lru_cache(maxsize=256)
def slot_totals(seq_len: int, least: int, most: int) -> np.ndarray:
    """Numbers of slots that cover the sequence, from `least` to `most`; if there are none, the next one."""
    totals = np.arange(least, most + 1)
    slots = 2 * -(-seq_len // (2 * totals))
    found = totals[totals * slots - seq_len <= slots // 2]
    return found if len(found) else np.array(list(itertools.islice(even_totals(seq_len, most + 1), 1)), int)

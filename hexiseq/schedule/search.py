"""The uneven split: groupings, then slots of groups, tokens and heads of ranks.

Two levels. Heads of a group are cut first, since they do not depend on how many tokens the group gets; that makes a
group one device with one attention rate. A small integer program over classes of equal groups then shares the slots.
Heads and tokens inside a group come from `hexiseq.schedule.local`. Memory that does not fit is turned into caps and
solved again. Every candidate is judged by `hexiseq.cost.predict`, never by the program's own objective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import mip
import numpy as np

from hexiseq import cost
from hexiseq.cluster import Cluster, Place
from hexiseq.plan import Plan, fits_slots
from hexiseq.schedule.even import (
    Counts,
    IllegalPolicy,
    build_plan,
    even_grid,
    even_totals,
    exchanges,
    legal_widths,
    slots_for,
)
from hexiseq.schedule.local import MOST_NODES, NANOSECONDS, cut_heads, integer_program, share_tokens
from hexiseq.workload import Workload, all_pairs, attention_flops, head_flops, linear_flops

FUSED_TOKENS = 8192  # merging a call of fewer KV tokens costs more than a tenth of its attention
MOST_SLOTS = 64  # of a ring of few groups; grows with the number of groups
Grouping = list[list[int]]


class Search:
    """Best plan over exactly these places, one replica."""

    def __init__(
        self, cluster: Cluster, places: Sequence[Place], workload: Workload, slot: int | None, exchange: str | None
    ) -> None:
        self.cluster, self.places, self.workload = cluster, tuple(places), workload
        self.slot, self.exchange = slot, exchange
        model, batch = workload.model, workload.sequences
        devices = [place.device for place in self.places]
        forwards, linears = cost.passes(workload.recompute)
        per_token = model.layers * linears * linear_flops(model) + (1 + cost.BACKWARD_LINEAR) * head_flops(model)
        # Seconds of a micro-step: per token of a rank, and per token of its group and head of the rank.
        self.linear = np.array([batch * per_token / (device.gemm_tflops * 1e12) for device in devices])
        flops = batch * attention_flops(model, all_pairs(model, workload.seq_len) / workload.seq_len)
        merges = (1 + forwards) * (1 + workload.seq_len / (2 * FUSED_TOKENS))
        merged = model.layers * batch * merges * model.head_dim * (8 + workload.element_bytes)
        self.attention = np.array([
            flops * forwards / (device.attention_forward_tflops * 1e12)
            + flops * cost.BACKWARD_ATTENTION / (device.attention_backward_tflops * 1e12)
            + merged / (device.hbm_gb_per_s * 1e9)
            for device in devices
        ])  # fmt: skip
        self.launch = np.array([model.layers * (1 + forwards) * device.launch_us * 1e-6 for device in devices])
        self.capacity = np.array([cost.token_capacity(d, workload, len(devices)) for d in devices])
        self._programs: dict[tuple, dict[tuple, int] | None] = {}
        self.best: Plan | None = None
        self.misfit: Plan | None = None  # the plan that lacks least memory, to say what would fit

    def run(self, refine: bool = True) -> Plan | None:
        """The best plan that fits memory, or None. Without `refine`, only by rounding."""
        ranked: list[tuple[float, int, Grouping]] = []
        for index, grouping in enumerate(groupings(self.places)):
            plan = self.settle(grouping, self.round_slots)
            if plan is not None:
                ranked.append((self.offer(plan), index, grouping))
        for width in legal_widths(self.workload, len(self.places)):
            with contextlib.suppress(IllegalPolicy):  # the slot asked for may not suit this grid
                even = even_grid("hexiseq", self.workload, self.places, width, self.slot)
                for plan in exchanges(even, self.exchange):
                    self.offer(plan)
        ranked.sort(key=lambda item: item[:2])
        for _, _, grouping in ranked[:3] if refine else ():
            for order in self.orders(grouping):
                for plan in self.refine(order):
                    self.offer(plan)
        # The search is for one exchange; where it is open, its outcome is judged with the other, too.
        if (found := self.best or self.misfit) is not None:
            for plan in exchanges(found, self.exchange)[1:]:
                self.offer(plan)
        return self.best

    def offer(self, plan: Plan) -> float:
        """Keep the plan if it fits and is the fastest so far; its step time, infinite when it does not fit."""
        predicted = cost.predict(plan, self.cluster, self.workload, self.places)
        lacking = max(np.subtract(predicted.memory_gb, predicted.memory_limit_gb))
        if lacking > 0:
            worst = self.misfit.predicted if self.misfit else None
            if worst is None or lacking < max(np.subtract(worst.memory_gb, worst.memory_limit_gb)):
                self.misfit = dataclasses.replace(plan, predicted=predicted)
            return math.inf
        now = self.best.predicted if self.best else None
        # A tie within rounding keeps the earlier plan, so that results do not hang on the last bit.
        if now is None or predicted.step_seconds < now.step_seconds * (1 - 1e-9):
            self.best = dataclasses.replace(plan, predicted=predicted)
        return predicted.step_seconds

    def orders(self, grouping: Grouping) -> list[Grouping]:
        """The grouping as made (weak networks innermost), and with the nodes in reverse."""
        reverse = grouping[::-1]
        return [grouping] if len(grouping) < 3 else [grouping, reverse]

    def refine(self, grouping: Grouping) -> Iterator[Plan]:
        """Plans with slots from the integer program, for the best numbers of slots and fusion widths."""
        for choice in range(1 if len(grouping) == 1 or self.slot else 2):
            plan = self.settle(grouping, functools.partial(self.program_slots, choice=choice))
            if plan is None:
                continue
            yield plan
            most = max(group.slots for group in plan.replicas[0].groups)
            for fusion in sorted({1, 2, 4, 8} - {plan.fusion}):
                if fusion < most:
                    yield dataclasses.replace(plan, fusion=fusion)

    def settle(self, grouping: Grouping, share: Callable[[Parts], tuple[int, list[int]] | None]) -> Plan | None:
        """Share slots, lay out, and while a rank overflows cap what it may hold and share again."""
        caps, head_caps = self.capacity.copy(), np.full(len(self.places), self.workload.model.heads)
        plan = None
        for _ in range(12):
            parts = self.parts(grouping, caps, head_caps)
            found = share(parts) if parts is not None else None
            if parts is None or found is None:
                break
            slot, slots = found
            counts = self.lay_out(parts, slot, slots, caps)
            if counts is None:
                break
            # A call can only fuse slots that have arrived; a group holds about its own number of them.
            fusion = max(1, min(round(FUSED_TOKENS / slot), max(slots) - 1, 16))
            exchange = self.exchange or "ring"
            plan = build_plan("hexiseq", self.workload, self.places, counts, slot, fusion, exchange)
            if not self.tighten(plan, caps, head_caps):
                break
        return plan

    def tighten(self, plan: Plan, caps: np.ndarray, head_caps: np.ndarray) -> bool:
        """Lower the caps of ranks that overflow. False when all fit, or nothing is left to lower."""
        used, limit = cost.memory_gb(plan, self.workload, self.places)
        changed = False
        model, size = self.workload.model, self.workload.element_bytes
        kept, working = cost.token_bytes(self.workload)
        per_token = self.workload.sequences * (
            model.layers * kept + working + (3 * model.heads + 2 * model.kv_heads) * model.head_dim * size
        )
        for shard in plan.shards():
            over = (used - limit)[shard.rank] * 1e9
            if over <= 0:
                continue
            fewer = math.ceil(over / per_token) + 1
            group = plan.replicas[0].groups[plan.place(shard.rank)[1]]
            if shard.num_tokens > 0 and (len(group.shards) == 1 or fewer <= shard.num_tokens):
                caps[shard.rank] = max(0, min(caps[shard.rank], shard.num_tokens) - fewer)
                changed = True
            elif shard.num_heads > 0 and len(group.shards) > 1:
                caps[shard.rank] = 0
                head_caps[shard.rank] = shard.num_heads - 1
                changed = True
        return changed

    # Heads -----------------------------------------------------------------------------------------------------

    def parts(self, grouping: Grouping, caps: np.ndarray, head_caps: np.ndarray) -> Parts | None:
        """What sharing slots needs to know of each group, or None when heads or tokens cannot fit."""
        heads, rates = [], []
        rough = self.workload.seq_len / len(grouping)
        for members in grouping:
            cut = self.cut_heads(members, rough, head_caps)
            if cut is None:
                return None
            heads.append(cut)
            rates.append(max(h * self.attention[r] for h, r in zip(cut, members, strict=True)))
        if sum(float(caps[members].sum()) for members in grouping) < self.workload.seq_len:
            return None
        return Parts(
            grouping, heads, np.array(rates), [self.linear[members] for members in grouping],
            [np.floor(caps[members]) for members in grouping],
        )  # fmt: skip

    def cut_heads(self, members: list[int], tokens: float, head_caps: np.ndarray) -> tuple[int, ...] | None:
        """Heads of each member, for a group of about so many tokens."""
        model, calls = self.workload.model, 1 + self.workload.seq_len / FUSED_TOKENS
        seconds, launch = self.attention[members] * tokens, self.launch[members] * calls
        limits = np.minimum(head_caps[members], model.heads)
        return cut_heads(
            model.heads, model.kv_heads, tuple(seconds.tolist()), tuple(launch.tolist()), tuple(limits.tolist())
        )

    # Slots -----------------------------------------------------------------------------------------------------

    def totals(self, shares: np.ndarray) -> list[int]:
        """Numbers of slots to try, best first: shares of the sequence met closely, with few slots.

        None when the sequence is too short for a slot per group.
        """
        groups, n = len(shares), self.workload.seq_len
        if self.slot is not None:
            return [slots_for("hexiseq", n, self.slot)]
        if groups == 1:
            return [next(even_totals(n, 1))]
        most = min(max(MOST_SLOTS, 8 * groups), n // 2)
        # Slots go one by one to the group that would finish first, so the events in order are the finish times.
        multiples = np.sort((np.arange(1, most + 1)[:, None] / shares[None, :]).ravel())
        scored: list[tuple[float, int]] = []
        for total in even_totals(n, 2 * groups if n >= 4 * groups else groups):
            if total > most and scored:
                break
            least = 2 if total >= 2 * groups else 1
            finish = max(float(multiples[total - 1]), least / float(shares.min()))
            scored.append((finish * float(shares.sum()) / total, total))
        # Within a thousandth, fewer slots are better: each costs a launch and a transfer.
        scored.sort(key=lambda item: (round(item[0], 3), item[1]))
        return [total for _, total in scored]

    def size(self, total: int) -> int:
        return self.slot or 2 * -(-self.workload.seq_len // (2 * total))

    def round_slots(self, parts: Parts) -> tuple[int, list[int]] | None:
        """Slot and slots per group: fractional shares, rounded so that the largest finish time is least."""
        shares = parts.shares(self.workload.seq_len)
        if shares is None:
            return None
        total = next(iter(self.totals(shares)), 0)
        if total < len(shares):
            return None
        slot = self.size(total)
        room = np.array([cap.sum() // slot for cap in parts.caps])
        # Two slots let a group's first foreign slot arrive while its own are computed.
        counts = np.full(len(shares), 2 if total >= 2 * len(shares) else 1)
        for _ in range(total - int(counts.sum())):
            finish = np.where(counts < room, (counts + 1) / shares, np.inf)
            counts[int(finish.argmin())] += 1
        return slot, counts.tolist()

    def program_slots(self, parts: Parts, choice: int = 0) -> tuple[int, list[int]] | None:
        """Slots by the integer program, for the best (or `choice`-next) number of slots."""
        shares = parts.shares(self.workload.seq_len)
        if shares is None or len(shares) == 1:
            return self.round_slots(parts)
        totals = self.totals(shares)
        total = totals[min(choice, len(totals) - 1)] if totals else 0
        counts = self.program(parts, total, self.size(total)) if total >= len(shares) else None
        return None if counts is None else (self.size(total), counts)

    def program(self, parts: Parts, total: int, slot: int) -> list[int] | None:
        """Least (slowest attention + slowest linear) over integer slots, one row set per class of equal groups."""
        classes: dict[tuple, list[int]] = {}
        for g in range(len(parts.rates)):
            key = (float(parts.rates[g]), *parts.linear[g].tolist(), *parts.caps[g].tolist())
            classes.setdefault(key, []).append(g)
        # The order of the groups does not matter here, so other orders find the answer ready.
        question = (total, tuple(sorted((key, len(groups)) for key, groups in classes.items())))
        if question not in self._programs:
            self._programs[question] = self.solve_program(dict(question[1]), total, slot)
        sums = self._programs[question]
        if sums is None:
            return None
        counts = [0] * len(parts.rates)
        for key, groups in classes.items():
            for i, g in enumerate(groups):
                counts[g] = sums[key] // len(groups) + (i < sums[key] % len(groups))
        return counts

    def solve_program(self, classes: dict[tuple, int], total: int, slot: int) -> dict[tuple, int] | None:
        """Slots per class; a class is ``(attention seconds, *linear seconds, *caps)`` of a group, with its count."""
        least = 2 if total >= 2 * sum(classes.values()) else 1
        model = integer_program()
        linear, attention = model.add_var(name="linear"), model.add_var(name="attention")
        sums = []
        for (rate, *members), count in classes.items():
            half = len(members) // 2
            high = model.add_var(var_type=mip.INTEGER, lb=least, ub=total)
            summed = model.add_var(var_type=mip.INTEGER, lb=least * count, ub=total)
            model.add_constr(summed <= count * high)
            model.add_constr(attention >= rate * slot * NANOSECONDS * high)
            kinds: dict[tuple[float, float], int] = {}
            for pair in zip(members[:half], members[half:], strict=True):
                kinds[pair] = kinds.get(pair, 0) + 1
            tokens = []
            for (seconds, cap), alike in kinds.items():
                x = model.add_var(lb=0, ub=cap / slot)  # slots of one such rank
                model.add_constr(linear >= seconds * slot * NANOSECONDS * x)
                tokens.append(alike * x)
            model.add_constr(mip.xsum(tokens) >= high)
            sums.append(summed)
        model.add_constr(mip.xsum(sums) == total)
        model.objective = mip.minimize(linear + attention)
        model.optimize(max_nodes=MOST_NODES)
        if not model.num_solutions:
            return None
        # Rounding a solver's floats must not lose a slot.
        found = {key: round(summed.x) for key, summed in zip(classes, sums, strict=True)}
        return found if sum(found.values()) == total else None

    # Tokens ----------------------------------------------------------------------------------------------------

    def lay_out(self, parts: Parts, slot: int, slots: list[int], caps: np.ndarray) -> Counts | None:
        if not fits_slots(self.workload.seq_len, slot, sum(slots)):
            return None
        short = sum(slots) * slot - self.workload.seq_len
        counts: Counts = []
        for g, members in enumerate(parts.grouping):
            tokens = slots[g] * slot - (short if g == 0 else 0)
            most = np.minimum(caps[members], tokens).astype(int)
            sizes = share_tokens(tokens, tuple(self.linear[members].tolist()), tuple(most.tolist()))
            if sizes is None:
                return None
            counts.append((slots[g], list(zip(members, sizes, parts.heads[g], strict=True))))
        return counts


@dataclasses.dataclass(frozen=True)
class Parts:
    """Groups as sharing slots sees them: heads cut, attention seconds per group token, and per member linear seconds
    per token and the most tokens it can hold."""

    grouping: Grouping
    heads: list[tuple[int, ...]]
    rates: np.ndarray
    linear: list[np.ndarray]
    caps: list[np.ndarray]

    def shares(self, total: int) -> np.ndarray | None:
        """Fractional tokens of each group for the least (slowest attention + slowest linear), or None if too many.

        With ``ratio`` = attention time / linear time the sum is linear between the ratios at which some group is
        balanced in itself, so the optimum is at one of them.
        """
        balance = sorted({round(float(rate * (1 / lin).sum()), 15) for rate, lin in
                          zip(self.rates, self.linear, strict=True)})  # fmt: skip
        rates = np.array([(1 / lin).sum() for lin in self.linear])
        best: tuple[float, np.ndarray] | None = None
        for ratio in balance:
            high = total / float(np.minimum(ratio / self.rates, rates).sum())
            if self._held(high, ratio).sum() < total * (1 - 1e-12):  # some cap binds: the level is higher, by bisection
                low = high
                while self._held(high, ratio).sum() < total:
                    high *= 2
                    if high > 1e12:
                        return None
                for _ in range(60):
                    middle = (low + high) / 2
                    low, high = (low, middle) if self._held(middle, ratio).sum() >= total else (middle, high)
            held = self._held(high, ratio)
            time = high + float((held * self.rates).max())
            if best is None or time < best[0] * (1 - 1e-12):
                best = time, held
        return np.maximum(best[1], 1e-9) if best else None

    def _held(self, linear: float, ratio: float) -> np.ndarray:
        capacity = np.array(
            [np.minimum(cap, linear / lin).sum() for cap, lin in zip(self.caps, self.linear, strict=True)]
        )
        return np.minimum(capacity, ratio * linear / self.rates)


def groupings(places: Sequence[Place]) -> list[Grouping]:
    """Ways to form groups, ranks by index in `places`; weakly connected nodes innermost."""
    nodes: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place.node, []).append(rank)
    order = sorted(nodes, key=lambda node: (-places[nodes[node][0]].node_class.network_gb_per_s, node))
    kind = {node: tuple([places[nodes[node][0]].node_class.name, *(places[r].device.type for r in nodes[node])])
            for node in order}  # fmt: skip
    options = {signature: node_splits(signature[1:]) for signature in dict.fromkeys(kind.values())}
    found: list[Grouping] = []
    product = math.prod(len(choices) for choices in options.values())
    if product <= 64:
        combinations = list(itertools.product(*options.values()))
    else:  # too many kinds of nodes to mix freely: the same way of splitting everywhere
        widest = max(len(choices) for choices in options.values())
        combinations = [tuple(c[min(i, len(c) - 1)] for c in options.values()) for i in range(widest)]
    for combination in combinations:
        split = dict(zip(options, combination, strict=True))
        found.append([[nodes[node][i] for i in members] for node in order for members in split[kind[node]]])
    # Across nodes: mixed groups of equal strength, one device of each kind in turn, and wider runs.
    by_node = [rank for node in order for rank in nodes[node]]
    by_speed = sorted(range(len(places)), key=lambda r: (-places[r].device.attention_forward_tflops, r))
    if len(nodes) > 1:
        for count in (c for c in range(1, len(places)) if len(places) % c == 0 and len(places) // c <= 16):
            found.append([sorted(by_speed[i::count]) for i in range(count)])
            width = len(places) // count
            found.append([by_node[i * width : (i + 1) * width] for i in range(count)])
    unique = {tuple(tuple(members) for members in grouping): grouping for grouping in found}
    return list(unique.values())


def node_splits(types: Sequence[str]) -> list[list[list[int]]]:
    """Partitions of a node's devices: runs and strides of equal size, and one group per type."""
    n = len(types)
    kinds = sorted(range(n), key=lambda i: (types.index(types[i]), i))
    found: list[list[list[int]]] = []
    for count in (c for c in range(1, n + 1) if n % c == 0):
        width = n // count
        found.append([kinds[i * width : (i + 1) * width] for i in range(count)])
        if len(set(types)) > 1:
            found.append([sorted(kinds[i::count]) for i in range(count)])
    if len(set(types)) > 1:
        found.append([[i for i in range(n) if types[i] == kind] for kind in dict.fromkeys(types)])
    unique = {tuple(tuple(members) for members in split): split for split in found}
    return list(unique.values())

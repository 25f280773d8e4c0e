"""The scheduler against all plans there are: on clusters of 2 to 6 devices, none is faster by more than half a percent.

All plans are: every part of the devices, cut into groups in every way and order; members of a group in every order;
every cut of the heads; every share of a coarse number of slots; tokens inside a group by the best whole numbers that
fit memory, evenly and like the heads; both exchanges and several fusions. Devices alike on one node count as one kind.
What compute and all-to-alls alone make slower than the best so far is skipped; the rest is judged by `cost.predict`.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from hexiseq.cluster import Cluster, Link, Node, Seat
from hexiseq.cost import MEMORY_FRACTION, OutOfMemory, memory_gb, predict
from hexiseq.plan import table
from hexiseq.schedule import IllegalPolicy, solve
from hexiseq.workload import ModelShape, Workload

from .plans import between, group_tokens, make_device, plan_over, proportional, with_memory

WORSE = 0.005  # of its step time, what the scheduler may miss
MOST_PREDICTED = 200_000  # more than that is no test but a bad choice of case
SEQ_LEN = 40320  # divides into any number of slots up to 10, and 12, 14, 15, 16
ALL_TOTALS = tuple(total for total in range(1, 17) if SEQ_LEN % (2 * total) == 0)
PASSES = {"none": (3, 1), "selective": (4, 1), "full": (4, 2)}
BYTES = {"float32": 4, "bfloat16": 2}


def partitions(counts, most=None):
    """All ways to cut a multiset, as counts by kind, into parts: each way once, its parts descending."""
    if not any(counts):
        yield ()
        return
    for part in itertools.product(*(range(count, -1, -1) for count in counts)):
        if any(part) and (most is None or part <= most):
            for rest in partitions(tuple(c - p for c, p in zip(counts, part, strict=True)), part):
                yield (part, *rest)


def compositions(total, parts, least):
    """All ways to write a number as an ordered sum."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield (first, *rest)


def orders(items):
    """All distinct orders."""
    return set(itertools.permutations(items))


def best_shares(total, seconds, caps):
    """Whole numbers up to their caps with the least largest ``number * seconds``, or None when they do not fit."""
    if sum(caps) < total:
        return None
    low, high = 0.0, total * max(seconds)
    for _ in range(60):
        middle = (low + high) / 2
        held = sum(min(int(middle / s), cap) for s, cap in zip(seconds, caps, strict=True))
        low, high = (low, middle) if held >= total else (middle, high)
    # One by one from just below: to the member that would finish first.
    found = [min(int(low * (1 - 1e-12) / s), cap) for s, cap in zip(seconds, caps, strict=True)]
    for _ in range(total - sum(found)):
        taker = min((i for i, n in enumerate(found) if n < caps[i]), key=lambda i: (found[i] + 1) * seconds[i])
        found[taker] += 1
    return found


class Exhaustive:
    """All plans of one replica for a cluster and a workload, and the best of them."""

    def __init__(self, cluster, work, totals, fusions=(1, 2, 4, 8)):
        assert all(work.seq_len % (2 * total) == 0 for total in totals)  # no slot is short, which order would change
        self.cluster, self.work, self.totals, self.fusions = cluster, work, totals, fusions
        kinds = {}
        for place in cluster.places:
            kinds.setdefault((place.node, place.device.type), []).append(place)
        self.kinds = list(kinds.values())
        model, size, batch = work.model, BYTES[work.dtype], work.sequences * work.accumulation
        linears, forwards = PASSES[work.recompute]
        matrices = model.head_dim * model.hidden * (2 * model.heads + 2 * model.kv_heads)
        matrices += 3 * model.hidden * model.intermediate
        per_token = model.layers * linears * 2 * matrices + 6 * model.hidden * model.vocab
        turned = (model.heads + model.kv_heads) * model.head_dim
        elements = model.layers * linears * (22 * model.hidden + 12 * turned + 5 * model.intermediate)
        # Seconds of a step, of each kind: per token; per query head and token of the group.
        self.linear, self.attention = [], []
        for places in self.kinds:
            device = places[0].device
            hbm = device.hbm_gb_per_s * 1e9
            self.linear.append(
                batch * (per_token / device.gemm_tflops / 1e12 + (elements + 4 * model.hidden) * size / hbm)
            )
            pairs = (work.seq_len + 1) / 2
            flops = 4 * model.head_dim * pairs
            seconds = flops * forwards / (device.attention_forward_tflops * 1e12)
            seconds += 2.5 * flops / (device.attention_backward_tflops * 1e12)
            seconds += forwards * (model.head_dim * (8 + size) + 12) / hbm  # merging the own square alone
            seconds += model.head_dim * (8 + 3 * size) / hbm
            self.attention.append(batch * model.layers * seconds)
        self.parameters = work.accumulation * size * (
            (1 if work.keep_parameters else 2) * model.layers * model.layer_parameters + model.embedding_parameters
        ) + 4 * model.parameters  # fmt: skip
        self.symmetries = self.swaps()
        self.options = {}
        self.predicted = 0

    def best(self, below):
        """The fastest plan in less than so many seconds, with its seconds; None and `below` when there is none."""
        found, waiting = None, []
        for counts in itertools.product(*(range(len(places) + 1) for places in self.kinds)):
            if any(counts) and self.wires(counts) < below:
                waiting += self.shared(counts, below)
        for floor, total, groups in sorted(set(waiting)):
            if floor >= below:
                break
            for order in sorted(orders(groups)):
                for seconds, plan in self.plans(order, total, below):
                    if seconds < below:
                        below, found = seconds, plan
        return below, found

    def swaps(self):
        """Orders of the kinds that name the same cluster: nodes alike, between which no link is special."""
        if self.cluster.links:
            return [tuple(range(len(self.kinds)))]

        def signature(order):
            nodes = {}
            return [
                (nodes.setdefault(places[0].node, len(nodes)), places[0].device, len(places),
                 places[0].node_class.intra_gb_per_s, places[0].node_class.network_gb_per_s)
                for places in (self.kinds[k] for k in order)
            ]  # fmt: skip

        plain = tuple(range(len(self.kinds)))
        return [order for order in itertools.permutations(plain) if signature(order) == signature(plain)]

    def first_alike(self, groups):
        """The least of the groups that are the same but for names of nodes."""
        groups = tuple(groups)
        return min(tuple(sorted((tuple(part[k] for k in order), n) for part, n in groups)) for order in self.symmetries)

    def wires(self, counts):
        """Seconds of parameters over the weakest node's NICs."""
        used = {places[0].node: places[0].node_class for places, n in zip(self.kinds, counts, strict=True) if n}
        if len(used) == 1:
            return 0.0
        slowest = min(node.nics * node.nic_gb_per_s for node in used.values())
        return self.parameters * (sum(counts) - 1) / sum(counts) / (slowest * 1e9)

    def waiting(self, counts):
        """Seconds in which embedding, head and a layer pass the slowest wire and nothing is computed."""
        model, size, ranks = self.work.model, BYTES[self.work.dtype], sum(counts)
        on_node = {}
        for places, n in zip(self.kinds, counts, strict=True):
            if n:
                on_node.setdefault(places[0].node, []).extend([places[0].node_class] * n)
        rates = [nodes[0].intra_gb_per_s for nodes in on_node.values() if len(nodes) > 1]
        rates += [nodes[0].nics * nodes[0].nic_gb_per_s for nodes in on_node.values() if len(on_node) > 1]
        moved = (model.layer_parameters + model.embedding_parameters) * (self.work.accumulation * size + max(4, size))
        return moved * (ranks - 1) / ranks / (min(rates) * 1e9) if rates else 0.0

    def shared(self, counts, below):
        """Groups of so many devices of each kind with their slots, where compute alone is faster: ``(seconds, number of
        slots, ((devices of each kind, slots), ...))``."""
        caps, found, waiting = self.caps(counts), set(), self.waiting(counts)
        for parts in partitions(counts):
            rates = [self.cuts(part)[0][0] for part in parts]
            for total in self.totals if len(parts) > 1 else self.totals[:1]:  # one group has no ring
                if total < len(parts):
                    continue
                slot = self.work.seq_len // total
                levels = [
                    [self.level(part, n * slot, caps) for n in range(total + 1)] for part in parts
                ]  # linear seconds by slots
                for slots in compositions(total, len(parts), 1):
                    linear = max(level[n] for level, n in zip(levels, slots, strict=True))
                    attention = max(rate * n * slot for rate, n in zip(rates, slots, strict=True))
                    if (floor := linear + attention + waiting) < below:
                        found.add((floor, total, self.first_alike(zip(parts, slots, strict=True))))
        return found

    def caps(self, counts):
        """Tokens of a device of each kind that fit memory without attention and logits, among so many devices."""
        model, work, size, ranks = self.work.model, self.work, BYTES[self.work.dtype], sum(counts)
        everything = 2 * model.hidden * (max(4, size) + 2 * size) // size + 2 * model.heads * model.head_dim
        everything += 2 * model.kv_heads * model.head_dim + 4 * model.intermediate
        kept = {"none": everything, "selective": model.hidden + model.heads * model.head_dim, "full": model.hidden}
        there = (model.hidden if size >= 4 else 0) + model.heads * model.head_dim * (work.recompute == "selective")
        layer = (0 if work.recompute == "none" else everything - there) + 2 * (model.intermediate + model.hidden)
        per_token = work.sequences * size * (model.layers * kept[work.recompute] + layer)
        fixed, found = self.fixed(ranks), []
        for places in self.kinds:
            device = places[0].device
            free = (MEMORY_FRACTION * device.memory_gb - device.overhead_gb) * 1e9 - fixed
            found.append(math.floor(free / per_token) if free >= 0 else -1)
        return found

    def fixed(self, ranks):
        """Bytes that a rank holds at least, whatever its share."""
        model, size = self.work.model, BYTES[self.work.dtype]
        gathered = (2 * model.layer_parameters + 2 * model.embedding_parameters) * size if ranks > 1 else 0
        return 16 * model.parameters / ranks + gathered

    def level(self, part, tokens, caps):
        """Least linear seconds in which a group holds so many tokens, in fractions; infinite where it cannot."""
        members = sorted((caps[k] * self.linear[k], k) for k, n in enumerate(part) for _ in range(n))
        if any(caps[k] < 0 for _, k in members):
            return math.inf
        rate, held = sum(1 / self.linear[k] for _, k in members), 0.0
        for full, k in members:
            if held + rate * full >= tokens:
                return (tokens - held) / rate
            held, rate = held + caps[k], rate - 1 / self.linear[k]
        return math.inf

    def cuts(self, part):
        """All cuts of the heads over members in all orders: ``(seconds per group token, kinds, heads)``, ascending."""
        if part not in self.options:
            members = [k for k, n in enumerate(part) for _ in range(n)]
            found = set()
            for heads in compositions(self.work.model.heads, len(members), 0):
                for kinds in orders(members):
                    rate = max(h * self.attention[k] for h, k in zip(heads, kinds, strict=True))
                    found.add((rate, kinds, heads))
            self.options[part] = sorted(found)
        return self.options[part]

    def plans(self, groups, total, below) -> Iterator:
        """Step times and plans of these groups in this order, where they may be faster."""
        slot = self.work.seq_len // total
        counts = sums(groups)
        linear = max(self.level(part, n * slot, self.caps(counts)) for part, n in groups) + self.waiting(counts)
        choices = []
        for part, n in groups:
            limit = (below - linear) / (n * slot)
            choices.append([cut for cut in self.cuts(part) if cut[0] < limit])
        for cuts in itertools.product(*choices):
            seats, free = [], [list(places) for places in self.kinds]
            for _, kinds, _ in cuts:
                seats += [free[k].pop(0) for k in kinds]
            sizes = group_tokens(self.work.seq_len, slot, [n for _, n in groups])
            for tokens in self.token_cuts(cuts, sizes):
                yield from self.judged(groups, cuts, tokens, seats, slot, below)

    def token_cuts(self, cuts, sizes):
        """Tokens of every member: as fast as can be, evenly, and like the heads."""
        ways = []
        for (_, kinds, heads), size in zip(cuts, sizes, strict=True):
            best = best_shares(size, [self.linear[k] for k in kinds], [size] * len(kinds))
            ways.append((tuple(best), tuple(proportional(size, [1] * len(kinds))), tuple(proportional(size, heads))))
        return dict.fromkeys(zip(*ways, strict=True))

    def judged(self, groups, cuts, tokens, seats, slot, below):
        plan, most = None, max(n for _, n in groups)
        for exchange in ("ring", "allgather") if len(groups) > 1 else ("ring",):
            for fusion in self.fusions if exchange == "ring" else (1,):
                if fusion > max(1, most - 1):
                    continue
                floor = self.path(groups, cuts, tokens, slot, fusion if exchange == "ring" else None)
                if floor >= below:
                    continue
                plan = plan or self.build(groups, cuts, tokens, seats, slot)
                tried = dataclasses.replace(plan, exchange=exchange, fusion=fusion)
                self.predicted += 1
                assert self.predicted <= MOST_PREDICTED, "too many plans: choose a smaller case"
                predicted = predict(tried, self.cluster, self.work, seats)
                assert floor <= predicted.step_seconds * (1 + 1e-9), "plans are skipped that should not be"
                if predicted.step_seconds >= below:
                    continue
                if any(u > m for u, m in zip(predicted.memory_gb, predicted.memory_limit_gb, strict=True)):
                    tried = self.within_memory(tried, groups, cuts, tokens, seats, slot)
                    if tried is None:
                        continue
                    predicted = predict(tried, self.cluster, self.work, seats)
                if predicted.step_seconds < below:
                    below = predicted.step_seconds
                    yield below, dataclasses.replace(tried, predicted=predicted)

    def path(self, groups, cuts, tokens, slot, fusion):
        """Seconds of a step when nothing but matrices, attention, merges, launches, all-to-alls and the first and last
        parameters takes time.

        Args:
            fusion: None: gathered, a call for each side.
        """
        model, size = self.work.model, BYTES[self.work.dtype]
        wide, batch, dim, ratio = max(4, size), self.work.sequences, model.head_dim, model.heads // model.kv_heads
        forwards = PASSES[self.work.recompute][1]
        linear, slowest, swaps = 0.0, [0.0, 0.0], [0.0] * 4
        outer, inner = 0, sum(n for _, n in groups)
        for (_, n), (_, kinds, heads), sizes in zip(groups, cuts, tokens, strict=True):
            inner -= n
            width = 10**9 if fusion is None else max(1, min(fusion, n - 1))
            inner_calls, outer_calls, length = -(-inner // width), -(-outer // width), n * slot
            rows = length * (1 + outer_calls) + length / 2 * inner_calls
            keys = length + inner * slot + outer * slot / 2
            calls, outer, first, needs = 1 + inner_calls + outer_calls, outer + n, 0, []
            for k, h, tokens_held in zip(kinds, heads, sizes, strict=True):
                device = self.kinds[k][0].device
                hbm, launch = device.hbm_gb_per_s * 1e9, calls * device.launch_us * 1e-6 if h else 0.0
                held = -(-(first + h) // ratio) - first // ratio if h else 0
                first += h
                needs.append(held)
                flops = batch * h * 4 * dim * length * (self.work.seq_len + 1) / 2
                merged = batch * h * rows * (dim * (8 + size) + 12)
                back = batch * dim * (h * (rows * (8 + size) + 2 * size * length) + 2 * held * keys * (8 + size))
                linear = max(linear, tokens_held * self.linear[k])
                slowest[0] = max(slowest[0], flops / device.attention_forward_tflops / 1e12 + merged / hbm + launch)
                slowest[1] = max(
                    slowest[1], 2.5 * flops / device.attention_backward_tflops / 1e12 + back / hbm + launch
                )
            if len(kinds) > 1:
                partial = wide if sum(needs) > model.kv_heads else size
                unit = batch * dim
                for swap, weights in enumerate((
                    [unit * size * (h + 2 * k) for h, k in zip(heads, needs, strict=True)],
                    [unit * size * h for h in heads],
                    [unit * size * (3 * h + 2 * k) for h, k in zip(heads, needs, strict=True)],
                    [unit * partial * (h + 2 * k) for h, k in zip(heads, needs, strict=True)],
                )):  # fmt: skip
                    swaps[swap] = max(swaps[swap], self.busiest(kinds, sizes, weights))
        layer = forwards * (slowest[0] + swaps[0] + swaps[1]) + slowest[1] + swaps[2] + swaps[3]
        return linear + self.work.accumulation * model.layers * layer + self.waiting(sums(groups))

    def busiest(self, kinds, sizes, weights):
        """Seconds of a group's all-to-all of `weights` bytes for every one of the tokens, over ports and NICs alone."""
        outside, most = {}, 0.0
        places = [self.kinds[k][0] for k in kinds]
        for i, a in enumerate(places):
            sent = received = 0.0
            for j, b in enumerate(places):
                if i == j:
                    continue
                if a.node == b.node:
                    sent += sizes[i] * weights[j]
                    received += sizes[j] * weights[i]
                else:
                    outside[a.node, 0] = outside.get((a.node, 0), 0.0) + sizes[i] * weights[j]
                    outside[a.node, 1] = outside.get((a.node, 1), 0.0) + sizes[j] * weights[i]
            most = max(most, max(sent, received) / (a.node_class.intra_gb_per_s * 1e9))
        nics = {place.node: place.node_class.network_gb_per_s * 1e9 for place in places}
        return max([most, *(size / nics[at] for (at, _), size in outside.items())])

    def build(self, groups, cuts, tokens, seats, slot, **choices):
        laid, rank = [], 0
        for (_, n), (_, _, heads), sizes in zip(groups, cuts, tokens, strict=True):
            laid.append((n, [(rank + i, size, h) for i, (size, h) in enumerate(zip(sizes, heads, strict=True))]))
            rank += len(heads)
        work = self.work
        made = {"recompute": work.recompute, "dtype": work.dtype, **choices}
        return plan_over(seats, [(work.sequences, laid)], work.model, work.seq_len, slot, **made)

    def within_memory(self, plan, groups, cuts, tokens, seats, slot):
        """The plan with the best tokens that fit memory, or None.

        A rank's memory is some constant and near proportional to its tokens, so that shrinking them in proportion to
        all but the fixed part comes down to the most that fit and not below.
        """
        shares = [list(sizes) for sizes in tokens]
        caps = [[sum(sizes)] * len(sizes) for sizes in tokens]
        fixed = [seat.device.overhead_gb + self.fixed(len(seats)) / 1e9 for seat in seats]
        for _ in range(200):
            found = self.build(groups, cuts, shares, seats, slot, exchange=plan.exchange, fusion=plan.fusion)
            used, limit = memory_gb(found, self.work, seats)
            if (used <= limit).all():
                return found
            rank = 0
            for g, sizes in enumerate(shares):
                for i, held in enumerate(sizes):
                    if used[rank] > limit[rank]:
                        if held == 0 or limit[rank] <= fixed[rank]:
                            return None
                        part = (limit[rank] - fixed[rank]) / (used[rank] - fixed[rank])
                        caps[g][i] = min(held - 1, int(held * part))
                    rank += 1
                found = best_shares(sum(sizes), [self.linear[k] for k in cuts[g][1]], caps[g])
                if found is None:
                    return None
                shares[g] = found
        raise AssertionError("tokens do not settle")


def sums(groups):
    return tuple(map(sum, zip(*(part for part, _ in groups), strict=True)))


@dataclass(frozen=True)
class Case:
    """A job on a small cluster, and the numbers of slots to cut its sequence into."""

    cluster: Cluster
    work: Workload
    totals: tuple[int, ...]


FAST = make_device("fast", 800, 600, 560, 80.0, hbm_gb_per_s=3350.0, overhead_gb=2.0, launch_us=8.0)
SLOW = make_device("slow", 270, 190, 185, 80.0, overhead_gb=2.0, launch_us=8.0)
ODD = make_device("odd", 220, 190, 160, 48.0, hbm_gb_per_s=864.0, overhead_gb=2.0, launch_us=8.0)  # attends better


def node(name, *devices, intra=300.0, nic=25.0):
    return Node(name, tuple(Seat(device) for device in devices), intra, 1, nic)


def job(heads=(8, 8), seq_len=SEQ_LEN, layers=4, hidden=1024, intermediate=2816, **changes):
    model = ModelShape("m", layers, hidden, intermediate, *heads, 128, 32000)
    values = dict(dtype="bfloat16", recompute="selective", sequences=1, accumulation=1, keep_parameters=False)
    return Workload(model=model, seq_len=seq_len, **{**values, **changes})


def holding(device, gb):
    return dataclasses.replace(device, memory_gb=gb)


def of(*nodes, links=()):
    return Cluster("c", nodes, tuple(Link(names, gb_per_s) for names, gb_per_s in links))


PAIR = node("a", FAST, SLOW)
COARSE = (2, 3, 4, 5, 6, 8, 12)
CASES = {
    "two of a node": Case(of(PAIR), job(), ALL_TOTALS),
    "two nodes of one": Case(of(node("a", FAST), node("b", SLOW)), job((8, 2)), ALL_TOTALS),
    "fast and two slow": Case(of(node("a", FAST, SLOW, SLOW)), job((6, 2)), COARSE),
    "three types": Case(of(node("a", FAST, SLOW), node("b", ODD)), job((6, 6)), COARSE),
    "two and two": Case(of(node("a", FAST, FAST), node("b", SLOW, SLOW)), job((8, 2)), (2, 3, 4, 8, 12)),
    "mixed nodes": Case(of(PAIR, node("b", FAST, SLOW)), job((4, 4)), (2, 4)),
    "mixed nodes, fast network": Case(of(PAIR, node("b", FAST, SLOW, nic=400)), job((8, 2)), (2, 3, 4, 8, 12)),
    "a slow network": Case(of(node("a", FAST, FAST, nic=2), node("b", SLOW, SLOW, nic=2)), job((8, 2)), (2, 3, 4, 8)),
    "a slow link": Case(
        of(node("a", FAST), node("b", SLOW), node("c", ODD), links=[(("a", "b"), 3.0)]), job((4, 4)), COARSE
    ),
    "no fast device holds it alone": Case(of(node("a", holding(FAST, 6), SLOW)), job(), ALL_TOTALS),
    "hardly any memory": Case(
        of(node("a", holding(FAST, 4.2), holding(SLOW, 5)), node("b", ODD)), job((4, 2)), (3, 6)
    ),
    "memory where it is slow": Case(
        of(node("a", holding(FAST, 4), holding(FAST, 4), holding(SLOW, 12))), job((8, 2), recompute="none"), COARSE
    ),
    "everything recomputed": Case(of(node("a", FAST, SLOW), node("b", ODD)), job((8, 2), recompute="full"), COARSE),
    "parameters kept": Case(
        of(node("a", FAST, nic=10), node("b", SLOW, nic=10)),
        job((6, 2), accumulation=2, keep_parameters=True), ALL_TOTALS,
    ),
    "32 bits and a narrow MLP": Case(
        of(node("a", holding(FAST, 12), SLOW)), job((8, 8), hidden=512, intermediate=64, dtype="float32"), ALL_TOTALS
    ),
    "short": Case(of(node("a", FAST, SLOW, SLOW)), job((8, 2), seq_len=10080), COARSE),
    "long": Case(of(node("a", FAST, SLOW), node("b", ODD)), job((8, 2), seq_len=SEQ_LEN * 8), COARSE),
    "five on three nodes": Case(
        of(node("a", FAST, FAST), node("b", SLOW, SLOW), node("c", ODD)), job((4, 2)), (5,)
    ),
    "six of two types": Case(of(node("a", FAST, FAST, FAST), node("b", SLOW, SLOW, SLOW)), job((4, 2)), (6,)),
}  # fmt: skip
BIG_CASES = {
    "six of two types": Case(
        of(node("a", FAST, FAST, FAST), node("b", SLOW, SLOW, SLOW)), job((6, 2)), (4, 6, 8)
    ),
    "mixed nodes": Case(of(PAIR, node("b", FAST, SLOW)), job((8, 8)), (2, 3, 4, 8, 12)),
    "hardly any memory": Case(
        of(node("a", holding(FAST, 4.2), holding(SLOW, 5)), node("b", ODD)), job((8, 2)), COARSE
    ),
    "six of three types": Case(
        of(node("a", FAST, FAST), node("b", SLOW, SLOW), node("c", ODD, ODD)), job((4, 2)), (6,)
    ),
    "six mixed": Case(of(node("a", FAST, SLOW, SLOW), node("b", FAST, SLOW, SLOW, nic=400)), job((8, 2)), (6, 12)),
}  # fmt: skip


def draw_case(seed):
    """2 to 4 devices of two or three types; in some draws with little more memory than an even share takes."""
    rng = random.Random(seed)
    kinds = []
    for i in range(rng.randint(2, 3)):
        gemm = between(rng, 60, 900)
        forward = gemm * rng.uniform(0.4, 0.9)
        rest = dict(hbm_gb_per_s=between(rng, 600, 4000), overhead_gb=2.0, launch_us=8.0)
        kinds.append(make_device(f"d{i}", gemm, forward, forward * rng.uniform(0.7, 1.1), 80.0, **rest))
    left, nodes = rng.choice((2, 3, 3, 4)), []
    while left:
        width = rng.randint(1, min(left, 3))
        left -= width
        devices = [rng.choice(kinds) for _ in range(width)]
        nodes.append(node(f"n{len(nodes)}", *devices, intra=between(rng, 30, 500), nic=between(rng, 3, 100)))
    work = job(
        rng.choice(((8, 8), (8, 2), (6, 2), (4, 4), (6, 6))), rng.choice((10080, SEQ_LEN, SEQ_LEN, 4 * SEQ_LEN)),
        rng.choice((2, 4)), recompute=rng.choice(("none", "selective", "selective", "full")),
        accumulation=rng.choice((1, 2)), keep_parameters=rng.random() < 0.3,
    )  # fmt: skip
    cluster = of(*nodes)
    if rng.random() < 0.4:
        places = cluster.places
        replica = (1, [(1, [(i, n, h) for i, (n, h) in enumerate(zip(
            proportional(work.seq_len, [1] * len(places)), proportional(work.model.heads, [1] * len(places)),
            strict=True))])])  # fmt: skip
        even = plan_over(places, [replica], work.model, work.seq_len, work.seq_len, recompute=work.recompute,
                         dtype=work.dtype)  # fmt: skip
        need = max(memory_gb(even, work, places)[0])
        cluster = with_memory(cluster, {kind.type: float(need) * rng.uniform(0.9, 1.8) for kind in kinds})
    return Case(cluster, work, COARSE if len(cluster.places) > 2 else ALL_TOTALS)


# Of the first 60 draws, 14 in which plans were once missed, others that take a second or less, and those that take some
# more; the rest takes minutes each.
SEEDS = (1, 5, 12, 16, 17, 18, 20, 28, 42, 43, 47, 49, 51, 59)
MORE_SEEDS = (0, 3, 4, 7, 8, 10, 11, 13, 15, 21, 24, 26, 27, 29, 30, 31, 33, 34, 36, 38, 39, 40, 41, 45, 46, 50, 52, 54,
              55, 56, 58)  # fmt: skip
BIG_SEEDS = (2, 22, 25, 35, 37, 57)


def check(case):
    """Solve, then look for a plan that is faster by more than `WORSE`."""
    try:
        solved = solve(case.cluster, case.work, rivals=False, time_limit_seconds=600)
    except (OutOfMemory, IllegalPolicy):
        solved = None
    below = (1 - WORSE) * solved.predicted.step_seconds if solved else math.inf
    seconds, winner = Exhaustive(case.cluster, case.work, case.totals).best(below)
    assert solved is not None or winner is None, f"there is a plan that fits:\n{winner and table(winner)}"
    assert winner is None, (
        f"a plan is {solved.predicted.step_seconds / seconds - 1:.2%} faster:\n{table(winner)}\n"
        f"than the scheduler's:\n{table(solved)}"
    )


@pytest.mark.parametrize("name", CASES)
def test_no_plan_is_faster(name):
    check(CASES[name])


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_is_faster_on_clusters_drawn(seed):
    check(draw_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG_CASES)
def test_no_plan_is_faster_among_more(name):
    check(BIG_CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_no_plan_is_faster_on_more_clusters_drawn(seed):
    check(draw_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", BIG_SEEDS)
def test_no_plan_is_faster_on_larger_clusters_drawn(seed):
    check(draw_case(seed))


def by_force(enumeration):
    """The fastest of all plans, each one predicted, by another enumeration: devices in every order, cut anywhere."""
    cluster, work, best = enumeration.cluster, enumeration.work, math.inf
    kind_of = {place.index: k for k, places in enumerate(enumeration.kinds) for place in places}
    for count in range(1, len(cluster.places) + 1):
        for seats in itertools.permutations(cluster.places, count):
            for cuts in itertools.product((False, True), repeat=count - 1):
                edges = [0, *(i + 1 for i, here in enumerate(cuts) if here), count]
                widths = [b - a for a, b in itertools.pairwise(edges)]
                for total, slots in ((t, n) for t in enumeration.totals for n in compositions(t, len(widths), 1)):
                    slot = work.seq_len // total
                    for heads in itertools.product(*(compositions(work.model.heads, w, 0) for w in widths)):
                        kinds = [[kind_of[seat.index] for seat in seats[a:b]] for a, b in itertools.pairwise(edges)]
                        groups = [(None, n) for n in slots]
                        chosen = [(0.0, tuple(k), h) for k, h in zip(kinds, heads, strict=True)]
                        for tokens in enumeration.token_cuts(chosen, group_tokens(work.seq_len, slot, slots)):
                            plan = enumeration.build(groups, chosen, tokens, seats, slot)
                            for exchange, fusion in itertools.product(("ring", "allgather"), enumeration.fusions):
                                tried = dataclasses.replace(plan, exchange=exchange, fusion=fusion)
                                predicted = predict(tried, cluster, work, seats)
                                if max(np.subtract(predicted.memory_gb, predicted.memory_limit_gb)) <= 0:
                                    best = min(best, predicted.step_seconds)
    return best


@pytest.mark.parametrize(
    ("cluster", "work"),
    [
        (of(PAIR), job((4, 2))),
        (of(node("a", FAST, nic=3), node("b", SLOW, nic=3)), job((3, 3), seq_len=10080)),
        (of(node("a", FAST), node("b", SLOW), node("c", FAST)), job((2, 1), seq_len=10080)),
    ],
)
def test_what_is_skipped_is_slower(cluster, work):
    enumeration = Exhaustive(cluster, work, (1, 2, 4) if len(cluster.places) == 2 else (3,), fusions=(1,))
    seconds, plan = enumeration.best(math.inf)
    assert seconds == pytest.approx(by_force(enumeration), rel=1e-12)
    assert plan.predicted.step_seconds == seconds

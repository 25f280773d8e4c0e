"""The cost model against a second one, written from `docs/cost-model.md` and the routes the runtime executes.

Device by device, message by message, query by query, in plain loops: slow, and without a line of `hexiseq.cost` but
the prediction that it judges.
"""

import dataclasses
import functools
import math
from collections import Counter, defaultdict

import pytest

from hexiseq.attention.layout import routes
from hexiseq.attention.tiles import Mask
from hexiseq.cluster import Cluster, Node, Seat
from hexiseq.cost import predict
from hexiseq.workload import ModelShape

from .plans import draw_small, group_tokens, make_device, plan_over, workload_of

SEEDS = range(120)
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
# How often the linear part counts, and how often attention with its traffic runs forward.
PASSES = {"none": (3, 1), "selective": (4, 1), "full": (4, 2)}


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a rank sits: its device, its node by name, and the class of that node."""

    device: object
    node: str
    kind: Node


def sites(plan, cluster):
    """By rank: the device and node that the plan names."""
    found = []
    for wanted in plan.devices:
        for kind in cluster.nodes:
            names = [kind.name] if kind.count == 1 else [f"{kind.name}-{i}" for i in range(kind.count)]
            if wanted.node in names:
                device = next(seat.device for seat in kind.seats if seat.device.type == wanted.type)
                found.append(Site(device, wanted.node, kind))
    return found


def link_gb_per_s(cluster, a, b):
    """What the link between two nodes carries, if one was named: by the nodes' names, or by those of their classes."""
    for link in cluster.links:
        for x, y in (link.nodes, link.nodes[::-1]):
            if x in (a.node, a.kind.name) and y in (b.node, b.kind.name):
                return link.gb_per_s
    return None


class Transfers:
    """Bytes on every wire: each rank's port inside its node, each node's NICs, links between two nodes; out and in.

    `own`: the ranks that exchange something; of NICs and links they have their part, by ranks on a node.
    """

    def __init__(self, cluster, placed, own=None):
        self.cluster, self.placed = cluster, placed
        self.own = range(len(placed)) if own is None else own
        self.carried = defaultdict(float)

    def part(self, node):
        there = [rank for rank, site in enumerate(self.placed) if site.node == node]
        return sum(rank in self.own for rank in there) / len(there)

    def send(self, sender, receiver, size):
        a, b = self.placed[sender], self.placed[receiver]
        if a.node == b.node:
            self.carried["port out", sender] += size
            self.carried["port in", receiver] += size
        else:
            self.cross(a, b, size)

    def cross(self, a, b, size):
        self.carried["nic out", a.node] += size
        self.carried["nic in", b.node] += size
        self.carried["link", a.node, b.node] += size

    def circle(self, size):
        """`size` bytes on every wire of a circle of all ranks, node after node as the cluster has them."""
        names = [place.node_name for place in self.cluster.places]
        nodes = sorted({site.node: site for site in self.placed}.items(), key=lambda item: names.index(item[0]))
        for rank, site in enumerate(self.placed):
            if sum(other.node == site.node for other in self.placed) > 1:
                self.carried["port out", rank] += size
                self.carried["port in", rank] += size
        if len(nodes) > 1:
            for (_, a), (_, b) in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
                self.cross(a, b, size)

    def seconds(self):
        return max((size / self.rate(*wire) for wire, size in self.carried.items()), default=0.0)

    def rate(self, kind, *ends):
        """Bytes a second."""
        if kind.startswith("port"):
            return self.placed[ends[0]].kind.intra_gb_per_s * 1e9
        at = {site.node: site for site in self.placed}
        nics = [at[node].kind.nics * at[node].kind.nic_gb_per_s for node in ends]
        if kind.startswith("nic"):
            return nics[0] * 1e9 * self.part(ends[0])
        special = link_gb_per_s(self.cluster, *(at[node] for node in ends))
        return (min(nics) if special is None else special) * 1e9 * max(map(self.part, ends))


def kv_of(heads, ratio):
    """KV heads that a range of query heads needs."""
    return sorted({q // ratio for q in range(*heads)})


def runs_of(heads, ratio):
    """Runs of query heads on whole KV groups or on a part of one: a kernel call each."""
    whole = [k for k in kv_of(heads, ratio) if all(heads[0] <= q < heads[1] for q in range(k * ratio, (k + 1) * ratio))]
    return len(kv_of(heads, ratio)) - len(whole) + (1 if whole else 0)


@functools.cache
def attended(group, window):
    """(query, key) pairs of a group's queries, one by one: with keys of its own, with those of others."""
    positions = [p for shard in group.shards for start, end in shard.tokens for p in range(start, end)]
    mine, own, others = set(positions), 0, 0
    for query in positions:
        for key in range(0 if window is None else max(0, query - window + 1), query + 1):
            if key in mine:
                own += 1
            else:
                others += 1
    return own, others


def reached(curve, edge):
    """Fraction of its rate a device reaches in tiles of such an edge, linear in the logarithm between two points."""
    if not curve:
        return 1.0
    edge = min(max(edge, curve[0][0]), curve[-1][0])
    below = max(point for point in curve if point[0] <= edge)
    above = min(point for point in curve if point[0] >= edge)
    part = math.log(edge / below[0]) / math.log(above[0] / below[0]) if above > below else 0.0
    return below[1] + part * (above[1] - below[1])


def reached_in_square(device, edge):
    """The same of a causal square. Beyond the curve's end what is lost is along the diagonal, in proportion to the edge
    and not to its square; but it is no faster than a full tile."""
    if not device.causal_curve:
        return reached(device.attention_curve, edge)
    last, fraction = device.causal_curve[-1]
    if edge <= last:
        return reached(device.causal_curve, edge)
    lost = (last**2 / fraction - last**2) * edge / last
    return max(fraction, min(edge**2 / (edge**2 + lost), reached(device.attention_curve, edge)))


@dataclasses.dataclass
class Kernels:
    """Seconds of one rank's own square and of its other calls, one pass."""

    own: float = 0.0
    others: float = 0.0


def kernels(plan, replica, shard, group, route, window, site, model, backward):
    """One layer's attention on a rank, call by call."""
    device, size, dim, batch = site.device, BYTES[plan.dtype], model.head_dim, replica.sequences
    heads, kv = shard.num_heads, len(kv_of(shard.heads, plan.gqa_ratio))
    own_pairs, other_pairs = attended(group, window)
    rate = (device.attention_backward_tflops if backward else device.attention_forward_tflops) * 1e12
    flops = batch * heads * 4 * dim * (2.5 if backward else 1.0)
    # How much longer than in large tiles the calls take, as they are without a window.
    plain = longer = 0.0
    for block in route.blocks:
        for call in block.calls if block.side != "own" else ():
            tile = (call.queries.stop - call.queries.start) * (call.keys.stop - call.keys.start)
            plain, longer = plain + tile, longer + tile / reached(device.attention_curve, tile**0.5)
    found = Kernels(
        flops * own_pairs / rate / reached_in_square(device, (2 * own_pairs) ** 0.5),
        flops * other_pairs / rate * (longer / plain if plain else 1.0),
    )
    # A sum is read and written in fp32, a part read; two log-sum-exps read and one written.
    for block in route.blocks:
        for call in block.calls:
            rows, keys = call.queries.stop - call.queries.start, call.keys.stop - call.keys.start
            moved = 0.0
            if backward:
                moved += batch * dim * (heads * rows * (8 + size) + 2 * kv * keys * (8 + size))
                moved += batch * dim * heads * 2 * size * group.num_tokens if block.side == "own" else 0  # delta
            else:
                moved += batch * heads * rows * (dim * (8 + size) + 12)
            seconds = moved / (device.hbm_gb_per_s * 1e9) + len(route.fragments) * device.launch_us * 1e-6
            if block.side == "own":
                found.own += seconds
            else:
                found.others += seconds
    return found


def all_to_alls(plan, replica, model):
    """Messages ``(sender, receiver, bytes)`` of a layer: q, k, v to heads; out back; and backward's two."""
    size, unit = BYTES[plan.dtype], model.head_dim * replica.sequences
    found = {"heads in": [], "heads out": [], "grads in": [], "grads out": []}
    for group in replica.groups:
        held = [k for shard in group.shards for k in kv_of(shard.heads, plan.gqa_ratio)]
        partial = max(4, size) if len(held) > len(set(held)) else size
        for a in group.shards:  # has tokens
            for b in group.shards:  # has heads
                if a is b:
                    continue
                rows, q, k = unit * a.num_tokens, b.num_heads, len(kv_of(b.heads, plan.gqa_ratio))
                found["heads in"].append((a.rank, b.rank, rows * (q + 2 * k) * size))
                found["heads out"].append((b.rank, a.rank, rows * q * size))
                found["grads in"].append((a.rank, b.rank, rows * (3 * q + 2 * k) * size))
                found["grads out"].append((b.rank, a.rank, rows * (q + 2 * k) * partial))
    return found


def across_groups(plan, replica, model, routed):
    """Messages of KV and of dKV, as the runtime sends them."""
    size = BYTES[plan.dtype]
    unit, found = 2 * model.head_dim * replica.sequences, {"kv": [], "dkv": [], "late": []}
    for rank in replica.ranks:
        for name, traffic, width in (("kv", routed[rank].kv, size), ("dkv", routed[rank].dkv, max(4, size))):
            for tick, batch in enumerate(traffic.sends):
                for message in batch:
                    rows, heads = message.rows[1] - message.rows[0], message.heads[1] - message.heads[0]
                    sent = rank, message.receiver, unit * width * rows * heads
                    found[name].append(sent)
                    # What the last call computes leaves after it; gathered, all of it does.
                    if name == "dkv" and (plan.exchange == "allgather" or tick in routed[rank].blocks[-1].ticks):
                        found["late"].append(sent)
    return found


def evaluate(plan, cluster, work):
    """All that `predict` says but memory; per replica, by path, what depends on which of them is slowest."""
    placed, model, size = sites(plan, cluster), work.model, BYTES[plan.dtype]
    linears, forwards = PASSES[work.recompute]
    world, notes = len(placed), Counter()
    everything = Transfers(cluster, placed)
    kinds = [(model.layers - model.full_layers, model.window), (model.full_layers, None)]
    plain = routes(plan)
    attention_weights = model.head_dim * model.hidden * (2 * model.heads + 2 * model.kv_heads)
    matrices = attention_weights + 3 * model.hidden * model.intermediate
    # Elements: of norms and residuals, of rotary embedding, of the activation.
    elementwise = size * (22 * model.hidden + 12 * (model.heads + model.kv_heads) * model.head_dim
                          + 5 * model.intermediate)  # fmt: skip

    def together(*lists):
        moving = Transfers(cluster, placed, replica.ranks)
        for message in (m for messages in lists for m in messages):
            moving.send(*message)
        return moving.seconds()

    paths = []
    for replica in plan.replicas:
        step = {"path": 0.0, "compute": 0.0, "all_to_all": 0.0, "ring": 0.0, "copies": 0.0}
        batch = replica.sequences
        for layers, window in kinds:
            if not layers:
                continue
            routed = routes(plan, Mask(window=window)) if window else plain
            linear = max(
                batch * max(shard.num_tokens, 1) * (2 * matrices / (placed[shard.rank].device.gemm_tflops * 1e12)
                                                    + elementwise / (placed[shard.rank].device.hbm_gb_per_s * 1e9))
                for group in replica.groups for shard in group.shards
            )  # fmt: skip
            passes = {
                backward: [
                    kernels(plan, replica, shard, group, plain[shard.rank], window, placed[shard.rank], model, backward)
                    for group in replica.groups for shard in group.shards
                ]
                for backward in (False, True)
            }  # fmt: skip
            swaps, kv = all_to_alls(plan, replica, model), across_groups(plan, replica, model, routed)
            swapping = {
                False: together(swaps["heads in"]) + together(swaps["heads out"]),
                True: together(swaps["grads in"]) + together(swaps["grads out"]),
            }
            took = {}
            for backward, calls in passes.items():
                repeats = layers * (1 if backward else forwards)
                busy = max(call.own + call.others for call in calls)
                home = together(kv["late"]) if backward else 0.0
                if plan.exchange == "ring":
                    moving = together(kv["kv"], kv["dkv"]) if backward else together(kv["kv"])
                    across = max(busy + home, moving)
                    notes["ring is slower than kernels"] += moving > busy + home
                    notes["the last gradients of a ring are waited for"] += home > 0 and busy + home > moving
                else:
                    gather = together(kv["kv"])
                    moving = gather + home
                    across = max(max(call.own, gather) + call.others for call in calls) + home
                    notes["gather is slower than the own call"] += any(gather > call.own > 0 for call in calls)
                took[backward] = swapping[backward] + across
                step["compute"] += repeats * busy
                step["all_to_all"] += repeats * swapping[backward]
                step["ring"] += repeats * moving
            # With offload a layer's input leaves while the layer is worked on, and comes back one layer early.
            copy = max(
                batch * max(shard.num_tokens, 1) * model.hidden * size
                / (placed[shard.rank].device.host_gb_per_s * 1e9)
                for group in replica.groups for shard in group.shards
            ) if work.offload else 0.0  # fmt: skip
            there = linear + took[False]
            back = (linears - 1) * linear + (forwards - 1) * took[False] + took[True]
            notes["a copy is slower than forward"] += copy > there
            notes["a copy is slower than backward"] += copy > back
            step["path"] += layers * (max(there, copy) + max(back, copy))
            step["copies"] += 2 * layers * copy
            step["compute"] += layers * linears * linear
            # Everything the step puts on the wires.
            often = {"heads in": forwards, "heads out": forwards, "grads in": 1, "grads out": 1,
                     "kv": forwards + 1, "dkv": 1}  # fmt: skip
            for name, messages in {**swaps, **kv}.items():
                for sender, receiver, sent in messages if name in often else ():
                    everything.send(sender, receiver, work.accumulation * layers * often[name] * sent)
        loss = max(
            batch * max(shard.num_tokens, 1)
            * (3 * 2 * model.hidden * model.vocab / (placed[shard.rank].device.gemm_tflops * 1e12)
               + 4 * model.hidden * size / (placed[shard.rank].device.hbm_gb_per_s * 1e9))
            for group in replica.groups for shard in group.shards
        )  # fmt: skip
        step["path"] += loss
        step["compute"] += loss
        paths.append({name: work.accumulation * seconds for name, seconds in step.items()})

    layer_parameters = matrices + 2 * model.hidden
    ends = model.vocab * model.hidden * (1 if model.tied_embeddings else 2) + model.hidden
    parameters = model.layers * layer_parameters + ends
    gathers = 1 if work.keep_parameters else 2
    circle = work.accumulation * size * (gathers * model.layers * layer_parameters + ends)
    circle = (circle + max(4, size) * parameters) * (world - 1) / world
    # Nothing else happens while embedding, head and first layer are gathered, and at the end their gradients reduced.
    exposed = (work.accumulation * size + max(4, size)) * (layer_parameters + ends) * (world - 1) / world
    alone, waiting = Transfers(cluster, placed), Transfers(cluster, placed)
    states = 16 * parameters / world * (2 if size == 8 else 1)
    optimizer = max(2 * states / (site.device.hbm_gb_per_s * 1e9) for site in placed)
    if world > 1:
        everything.circle(circle)
        alone.circle(circle)
        waiting.circle(exposed)

    slowest = max(path["path"] for path in paths)
    whole, network = slowest + waiting.seconds() + optimizer, everything.seconds()
    notes["the network is slower"] += network > whole
    notes["the path is slower"] += network < whole
    return {
        "step": max(whole, network),
        "parameters": alone.seconds(),
        "optimizer": optimizer,
        # Where two are equally slow, either's parts will do.
        "slowest": [path for path in paths if path["path"] >= slowest * (1 - 1e-12)],
    }, notes


def close(a, b):
    return a == pytest.approx(b, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_second_is_accounted_for(seed):
    plan, cluster, work = draw_small(seed)
    expected, _ = evaluate(plan, cluster, work)
    found = predict(plan, cluster, work)
    assert found.step_seconds == pytest.approx(expected["step"], rel=1e-9)
    tokens = plan.seq_len * work.accumulation * sum(replica.sequences for replica in plan.replicas)
    assert found.tokens_per_second == pytest.approx(tokens / expected["step"], rel=1e-9)
    assert found.parameter_seconds == pytest.approx(expected["parameters"], rel=1e-9)
    parts = (found.compute_seconds, found.all_to_all_seconds, found.ring_seconds, found.host_copy_seconds)
    candidates = [
        (path["compute"] + expected["optimizer"], path["all_to_all"], path["ring"], path["copies"])
        for path in expected["slowest"]
    ]
    assert any(all(map(close, parts, candidate)) for candidate in candidates), (parts, candidates)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_replicas_alike_on_nodes_with_more_ranks_of_others_are_not_alike(order):
    device = make_device("d", 1e-2, 1e-2, 1e-2)
    nodes = (Node("a", (Seat(device),) * 4, 1.0, 1, 0.01, count=2), Node("b", (Seat(device),) * 4, 1.0, 1, 10.0))
    cluster, n = Cluster("three", nodes), 400
    model = ModelShape("small", 8, 8, 8, 4, 4, 16, 20)
    # All of a-0 takes part, and one rank of a-1: the first two replicas have one rank on either, and one on b.
    seats = [place for place in cluster.places if place.node_name != "a-1"]
    seats.insert(4, next(place for place in cluster.places if place.node_name == "a-1"))
    first, second = group_tokens(n, 200, [1, 1])
    replicas = [
        (1, [(1, [(0, first, 4)]), (1, [(5, second, 4)])]),
        (1, [(1, [(4, first, 4)]), (1, [(6, second, 4)])]),
        (1, [(1, [(1, first, 2), (2, 0, 1), (3, 0, 1)]), (1, [(7, second, 2), (8, 0, 2)])]),
    ]
    plan = plan_over(seats, [replicas[i] for i in order], model, n, 200)
    work = workload_of(plan, model)
    assert predict(plan, cluster, work).step_seconds == pytest.approx(
        evaluate(plan, cluster, work)[0]["step"], rel=1e-9
    )


def test_the_plans_drawn_have_all_there_is():
    """Otherwise the test above would judge less than it says."""
    seen = Counter()
    for seed in SEEDS:
        plan, cluster, work = draw_small(seed)
        placed = sites(plan, cluster)
        seen[f"{len(plan.replicas)} replicas"] += 1
        homes = [{placed[rank].node for rank in replica.ranks} for replica in plan.replicas]
        seen["replicas share a node"] += sum(map(len, homes)) > len(set().union(*homes))
        seen["uneven sequences"] += len({replica.sequences for replica in plan.replicas}) > 1
        for replica in plan.replicas:
            seen[f"{len(replica.groups)} groups"] += 1
            for group in replica.groups:
                seen[f"{len(group.shards)} ranks"] += 1
        seen["no heads"] += any(not shard.num_heads for shard in plan.shards())
        seen["no tokens"] += any(not shard.num_tokens for shard in plan.shards())
        seen["three fragments"] += any(runs_of(shard.heads, plan.gqa_ratio) == 3 for shard in plan.shards())
        seen[f"ratio {plan.gqa_ratio}"] += 1
        seen["node classes"] += len({site.kind.name for site in placed}) > 1
        seen["two of a class"] += len({site.node for site in placed}) > len({site.kind.name for site in placed})
        seen["devices left out"] += len(placed) < len(cluster.places)
        ends = {site.node: site for site in placed}.values()
        seen["special link"] += any(link_gb_per_s(cluster, a, b) for a in ends for b in ends if a is not b)
        seen[work.recompute] += 1
        seen[f"{work.recompute}, offload"] += work.offload
        seen[work.dtype] += 1
        seen[plan.exchange] += 1
        seen[f"kept {work.keep_parameters}"] += 1
        seen["accumulation"] += work.accumulation > 1
        seen["window"] += work.model.window is not None
        seen["layers with and without"] += work.model.full_layers > 0
        seen["fused"] += plan.fusion > 1
        seen["one rank"] += len(placed) == 1
        for site in placed:
            seen["slower in small tiles"] += bool(site.device.attention_curve)
            seen["slower in causal squares"] += bool(site.device.causal_curve)
            seen["the same in all tiles"] += not site.device.curved
        seen.update(evaluate(plan, cluster, work)[1])
    counted = {f"{n} replicas" for n in (1, 2, 3)} | {f"{n} groups" for n in range(1, 7)} | {
        f"{n} ranks" for n in range(1, 5)} | {f"ratio {n}" for n in range(1, 5)}  # fmt: skip
    wanted = counted | {name for name in seen if not name[0].isdigit()} - {"none, offload"}
    assert not {name: seen[name] for name in wanted if seen[name] < 3}


@pytest.mark.parametrize("seed", SEEDS)
def test_fragments_and_calls_are_the_runtimes(seed):
    """What the evaluator takes from routes is what the documents say: one square, `ceil(slots / f)` calls a side."""
    plan, _, _ = draw_small(seed)
    for route in routes(plan):
        shard, (r, g, _) = plan.shard(route.rank), plan.place(route.rank)
        assert len(route.fragments) == runs_of(shard.heads, plan.gqa_ratio)
        if not shard.num_heads:
            assert not route.blocks
            continue
        slots = [group.slots for group in plan.replicas[r].groups]
        fused = max(1, min(plan.fusion, slots[g] - 1)) if plan.exchange == "ring" else 10**9
        calls = Counter(block.side for block in route.blocks for _ in block.calls)
        back = route.rows > route.front
        assert calls["own"] == 1
        assert calls["inner"] == (-(-sum(slots[g + 1 :]) // fused) if back else 0)
        assert calls["outer"] == -(-sum(slots[:g]) // fused)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_memory_that_no_share_causes(world, keep, accumulation, dtype):
    """A rank without tokens and heads holds states, gathered parameters, gradients and overhead, nothing else."""
    model = ModelShape("m", 3, 64, 96, 4, 2, 8, 300)
    cluster = Cluster("c", (Node("n", tuple(Seat(make_device("d", 1, 1, 1)) for _ in range(world)), 1, 1, 1),))
    members = [(0, 64, 4), *((rank, 0, 0) for rank in range(1, world))]
    plan = plan_over(cluster.places, [(1, [(4, members)])], model, 64, 16, dtype=dtype)
    work = workload_of(plan, model, keep_parameters=keep, accumulation=accumulation)
    size = BYTES[dtype]
    wide = max(4, size)
    layer = 64 * 8 * (2 * 4 + 2 * 2) + 3 * 64 * 96 + 2 * 64
    ends = 2 * 300 * 64 + 64
    total = 3 * layer + ends
    used = 16 * total / world * (2 if dtype == "float64" else 1)
    if world == 1:
        used += layer * size  # nothing is gathered, and gradients are the states'
    else:
        used += ((3 if keep else 2) * layer + ends) * size
        used += layer * (size + wide) + ends * size
        used += wide * total if accumulation > 1 else 0
    found = predict(plan, cluster, work).memory_gb
    if world > 1:
        assert found[-1] == pytest.approx(1.0 + used / 1e9, rel=1e-12)
    assert min(found) >= (1.0 + used / 1e9) * (1 - 1e-12)

"""The cost model against a slow evaluator that counts token by token, against the routes, and against its bound."""

import dataclasses
import itertools
import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hexiseq.attention.layout import routes
from hexiseq.attention.tiles import Mask
from hexiseq.cluster import Cluster, Device, Link, Node, Seat
from hexiseq.cost import (
    Flow,
    OutOfMemory,
    Wires,
    attention_bytes,
    check_memory,
    check_workload,
    lower_bound,
    match_places,
    predict,
    replica_cost,
    token_bytes,
    with_prediction,
)
from hexiseq.plan import Plan, RankDevice, make_replica
from hexiseq.testing import draw_plan
from hexiseq.workload import ModelShape, Workload

from .plans import with_hosts


def device(name="gpu", gemm=100.0, forward=80.0, backward=60.0, memory=80.0, **changes):
    values = dict(
        type=name, vendor="nvidia", peak_tflops=200, gemm_tflops=gemm, attention_forward_tflops=forward,
        attention_backward_tflops=backward, memory_gb=memory, hbm_gb_per_s=2000, overhead_gb=1.0, launch_us=5.0,
        dtypes=("bfloat16", "float32", "float64"), kernel="torch_flash", source="test",
    )  # fmt: skip
    return Device(**{**values, **changes})


def cluster_of(types, per_node=2, memory=1e6):
    """One node per `per_node` ranks; `types` are speeds."""
    nodes = []
    for i in range(0, len(types), per_node):
        seats = tuple(
            Seat(device(f"d{speed}", 100 * speed, 80 * speed, 60 * speed**0.5, memory))
            for speed in types[i : i + per_node]
        )
        nodes.append(Node(f"n{len(nodes)}", seats, 100.0 + len(nodes), 1, 10.0 + len(nodes)))
    return Cluster("test", tuple(nodes))


def seated(plan, cluster):
    devices = tuple(RankDevice(p.device.type, p.node_name, p.device.kernel) for p in cluster.places)
    return dataclasses.replace(plan, devices=devices)


def workload_for(plan, dtype="float64", recompute="none", accumulation=1, layers=3, keep=False):
    model = ModelShape("m", layers, 64, 96, plan.num_heads, plan.num_kv_heads, 8, 300)
    return Workload(model, plan.seq_len, dtype, recompute, plan.sequences, accumulation, keep)


def needed(shard, ratio):
    return sorted({q // ratio for q in range(*shard.heads)})


def hop(groups, ratio, take):
    """From group a to group b: (sender, receiver) for every KV head; with `take`, from the first that holds it."""

    def lowest(group, head):
        return next(s.rank for s in groups[group].shards if head in needed(s, ratio))

    return {
        (a, b): [(lowest(a, k), s.rank) for s in groups[b].shards for k in needed(s, ratio)] if take
        else [(s.rank, lowest(b, k)) for s in groups[a].shards for k in needed(s, ratio)]
        for a in range(len(groups)) for b in range(len(groups))
    }  # fmt: skip


def homes(groups, window):
    """Every token with its group, and the groups that attend to it."""
    positions = [[p for s in group.shards for p in s.positions().tolist()] for group in groups]
    for home, own in enumerate(positions):
        for position in own:
            users = [g for g, theirs in enumerate(positions) if g != home and any(0 <= p - position < window
                     for p in theirs)]  # fmt: skip
            yield position, home, users


def slow_ring(plan, replica, kv_size, dkv_size, window):
    """Bytes (sender, receiver) of KV and dKV, following each token hop by hop."""
    groups, count = replica.groups, len(replica.groups)
    fetch, give = (hop(groups, plan.gqa_ratio, take) for take in (True, False))
    kv, dkv = defaultdict(float), defaultdict(float)
    middle = replica.slots * plan.slot // 2
    for position, home, users in homes(groups, window):
        if not users:
            continue
        stops = [(home - 1 - i) % count for i in range(count - 1)]
        if position >= middle:  # a back half leaves the ring at group 0, since no inner group attends to it
            stops = stops[: stops.index(0) + 1]
        wanted = [i for i, g in enumerate(stops) if g in users]
        for here, following in itertools.pairwise([home, *stops[: wanted[-1] + 1]]):
            for pair in fetch[here, following]:
                kv[pair] += kv_size
        for here, following in itertools.pairwise([*stops[wanted[0] :], home]):
            for pair in give[here, following]:
                dkv[pair] += dkv_size
    return kv, dkv


def slow_gather(plan, replica, kv_size, dkv_size, window):
    """The same when every token of KV comes straight from its home, and dKV goes straight back."""
    groups = replica.groups
    fetch, give = (hop(groups, plan.gqa_ratio, take) for take in (True, False))
    kv, dkv = defaultdict(float), defaultdict(float)
    for _, home, users in homes(groups, window):
        for user in users:
            for pair in fetch[home, user]:
                kv[pair] += kv_size
            for pair in give[user, home]:
                dkv[pair] += dkv_size
    return kv, dkv


SLOW = {"ring": slow_ring, "allgather": slow_gather}


def as_matrix(pairs, ranks):
    at = {rank: i for i, rank in enumerate(ranks.tolist())}
    matrix = np.zeros((len(ranks), len(ranks)))
    for (a, b), size in pairs.items():
        matrix[at[a], at[b]] += size
    return matrix


@pytest.mark.parametrize("exchange", SLOW)
@pytest.mark.parametrize("seed", range(40))
def test_bytes_and_flops_token_by_token(seed, exchange):
    plan = dataclasses.replace(draw_plan(seed), exchange=exchange)
    cluster = cluster_of([1 + seed % 3] * plan.world_size)
    plan = seated(plan, cluster)
    dtype, size, wide = ("float64", 8, 8) if seed % 2 else ("bfloat16", 2, 4)
    plan = dataclasses.replace(plan, dtype=dtype)
    work = workload_for(plan, dtype)
    for replica in plan.replicas:
        cost = replica_cost(plan, replica, work, cluster.places)
        unit = 2 * 8 * replica.sequences  # K and V, head dim
        kv, dkv = SLOW[exchange](plan, replica, unit * size, unit * wide, plan.seq_len)
        np.testing.assert_array_equal(cost.kv.matrix()[0], as_matrix(kv, cost.ranks))
        np.testing.assert_array_equal(cost.dkv.matrix()[0], as_matrix(dkv, cost.ranks))

        into, back, grads_into, grads_back = (defaultdict(float) for _ in range(4))
        flops = {}
        for group in replica.groups:
            positions = [p for s in group.shards for p in s.positions().tolist()]
            held = [k for s in group.shards for k in needed(s, plan.gqa_ratio)]
            gradient = wide if len(held) > len(set(held)) else size
            for a in group.shards:
                flops[a.rank] = sum(4 * 8 * (p + 1) for p in positions) * a.num_heads * replica.sequences
                for b in group.shards:
                    if a is b:
                        continue
                    for _ in a.positions():
                        q, k = b.num_heads, len(needed(b, plan.gqa_ratio))
                        into[a.rank, b.rank] += (q + k + k) * 8 * size
                        back[b.rank, a.rank] += q * 8 * size
                        grads_into[a.rank, b.rank] += (q + k + k + q + q) * 8 * size
                        grads_back[b.rank, a.rank] += (q + k + k) * 8 * gradient
        for found, pairs in zip(cost.exchange.matrix(), (into, back, grads_into, grads_back), strict=True):
            np.testing.assert_allclose(found, as_matrix(pairs, cost.ranks), rtol=1e-9)
        speed = 1 + seed % 3
        expected = [flops[rank] / (80e12 * speed) for rank in cost.ranks.tolist()]
        np.testing.assert_allclose(cost.attention_forward, expected, rtol=1e-9)
        expected = [2.5 * flops[rank] / (60e12 * speed**0.5) for rank in cost.ranks.tolist()]
        np.testing.assert_allclose(cost.attention_backward, expected, rtol=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_windowed_bytes_token_by_token(seed):
    """Gathered, exactly what is attended to. The ring moves a slot's tokens as one piece, so it may move more."""
    plan = draw_plan(seed)
    plan = seated(plan, cluster := cluster_of([1] * plan.world_size))
    window = random.Random(seed).randint(1, plan.seq_len)
    work = workload_for(plan)
    work = dataclasses.replace(work, model=dataclasses.replace(work.model, window=window))
    for replica in plan.replicas:
        unit = 2 * 8 * replica.sequences * 8
        for exchange, slow in SLOW.items():
            cost = replica_cost(dataclasses.replace(plan, exchange=exchange), replica, work, cluster.places)
            for flow, pairs in zip((cost.kv, cost.dkv), slow(plan, replica, unit, unit, window), strict=True):
                found, least = flow.matrix()[0], as_matrix(pairs, cost.ranks)
                assert (found == least).all() if exchange == "allgather" else (found >= least).all()


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("exchange", SLOW)
@pytest.mark.parametrize("seed", range(40, 70))
def test_exchange_is_charged_what_the_routes_move(seed, exchange, windowed):
    plan = dataclasses.replace(draw_plan(seed), exchange=exchange)
    cluster = cluster_of([1] * plan.world_size)
    plan = seated(plan, cluster)
    kv, dkv, late = (defaultdict(float) for _ in range(3))
    window = random.Random(seed).randint(1, plan.seq_len) if windowed else None
    work = workload_for(plan)
    work = dataclasses.replace(work, model=dataclasses.replace(work.model, window=window))
    for route in routes(plan, Mask(window=window)):
        for total, traffic in ((kv, route.kv), (dkv, route.dkv)):
            for tick, batch in enumerate(traffic.sends):
                for message in batch:
                    total[message.sender, message.receiver] += message.size * 2 * 8 * 8
                    if total is dkv and (exchange == "allgather" or tick in route.blocks[-1].ticks):
                        late[message.sender, message.receiver] += message.size * 2 * 8 * 8
    for replica in plan.replicas:
        cost = replica_cost(plan, replica, work, cluster.places)
        inside = set(cost.ranks.tolist())
        for matrix, pairs in zip((*cost.kv.matrix(), *cost.dkv.matrix()), (kv, dkv, late), strict=True):
            mine = {pair: size for pair, size in pairs.items() if pair[0] in inside}
            np.testing.assert_allclose(matrix, as_matrix(mine, cost.ranks), rtol=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_pairs_within_a_window_one_by_one(seed):
    plan = draw_plan(seed)
    rng = random.Random(seed)
    window = rng.choice((1, 2, 3, rng.randint(1, plan.seq_len), plan.seq_len, 10**6))
    free = dataclasses.replace(device(), hbm_gb_per_s=1e15, launch_us=0.0)  # merges cost next to nothing
    cluster = Cluster("free", (Node("n", (Seat(free),) * plan.world_size, 100.0, 1, 10.0),))
    plan = seated(plan, cluster)
    work = workload_for(plan)
    work = dataclasses.replace(work, model=dataclasses.replace(work.model, window=window))
    for replica in plan.replicas:
        cost = replica_cost(plan, replica, work, cluster.places)
        pairs, own = {}, {}
        for group in replica.groups:
            positions = {p for s in group.shards for p in s.positions().tolist()}
            for shard in group.shards:
                attended = [k for p in positions for k in range(max(0, p - window + 1), p + 1)]
                pairs[shard.rank] = shard.num_heads * len(attended)
                own[shard.rank] = shard.num_heads * sum(k in positions for k in attended)
        unit = 4 * 8 * replica.sequences / 80e12
        expected = [unit * pairs[rank] for rank in cost.ranks.tolist()]
        np.testing.assert_allclose(cost.attention_forward, expected, rtol=1e-9)
        expected = [unit * own[rank] for rank in cost.ranks.tolist()]
        np.testing.assert_allclose(cost.own_forward, expected, rtol=1e-3)


def test_layers_with_and_without_a_window_add_up():
    cluster = cluster_of([3, 1])
    for exchange in SLOW:
        plan = two_rank_plan("selective", exchange=exchange)
        work = workload_for(plan, "float32", "selective", layers=5)

        def steps(window, full, layers=5, work=work, plan=plan):
            model = dataclasses.replace(work.model, window=window, full_layers=full, layers=layers)
            mixed = dataclasses.replace(work, model=model)
            found = predict(plan, cluster, mixed)
            assert found.step_seconds >= lower_bound(cluster, mixed)
            return found.compute_seconds, lower_bound(cluster, mixed)

        full, windowed, mixed = steps(None, 0), steps(16, 0), steps(16, 2)
        assert windowed[0] < mixed[0] < full[0]
        assert windowed[1] < mixed[1] < full[1]
        assert mixed[0] == pytest.approx((3 * windowed[0] + 2 * full[0]) / 5, rel=1e-9)
        assert steps(1024, 0) == steps(None, 0)
    with pytest.raises(AssertionError, match="of which kind"):
        replica_cost(plan, plan.replicas[0], dataclasses.replace(work, model=dataclasses.replace(
            work.model, window=16, full_layers=2)), cluster.places)  # fmt: skip


def two_rank_plan(recompute="none", dtype="float32", seq_len=1024, exchange="ring"):
    replica = make_replica(seq_len, seq_len // 4, [(3, [(0, seq_len * 3 // 4, 4)]), (1, [(1, seq_len // 4, 4)])])
    return Plan(
        "manual", seq_len, 4, 2, seq_len // 4, 1, exchange, recompute, dtype, (replica,),
        (RankDevice("d3", "n0", "torch_flash"), RankDevice("d1", "n0", "torch_flash")),
    )  # fmt: skip


@pytest.mark.parametrize(("recompute", "linears", "forwards"), [("none", 3, 1), ("selective", 4, 1), ("full", 4, 2)])
def test_a_step_by_hand(recompute, linears, forwards):
    cluster = cluster_of([3, 1])
    plan = two_rank_plan(recompute)
    work = dataclasses.replace(workload_for(plan, "float32", recompute, accumulation=2))
    n, layers, d, hidden = 1024, 3, 8, 64
    per_layer = 2 * (hidden * d * (2 * 4 + 2 * 2) + 3 * hidden * 96)
    elementwise = 4 * (22 * hidden + 12 * d * (4 + 2) + 5 * 96)
    linear = max(768 * (per_layer / 300e12 + elementwise / 2e12), 256 * (per_layer / 100e12 + elementwise / 2e12))
    loss = max(
        768 * (6 * hidden * 300 / 300e12 + 16 * hidden / 2e12), 256 * (6 * hidden * 300 / 100e12 + 16 * hidden / 2e12)
    )

    def pairs(start, end):
        return (end * (end + 1) - start * (start + 1)) / 2

    # Rank 0 owns [0, 384) and [640, 1024), rank 1 the middle 256. Rank 0 meets one inner slot with its 384 back rows;
    # rank 1 three outer slots one by one with all its rows.
    forward0 = (
        4 * 4 * d * (pairs(0, 384) + pairs(640, 1024)) / 240e12 + 4 * (768 + 384) * (d * 12 + 12) / 2e12 + 2 * 5e-6
    )
    forward1 = 4 * 4 * d * pairs(384, 640) / 80e12 + 4 * 256 * 4 * (d * 12 + 12) / 2e12 + 4 * 5e-6
    backward0 = 2.5 * 4 * 4 * d * (pairs(0, 384) + pairs(640, 1024)) / (60e12 * 3**0.5) + 2 * 5e-6
    backward0 += d * (4 * ((768 + 384) * 12 + 768 * 8) + 4 * (768 + 256) * 12) / 2e12
    backward1 = 2.5 * 4 * 4 * d * pairs(384, 640) / 60e12 + 4 * 5e-6
    backward1 += d * (4 * (256 * 4 * 12 + 256 * 8) + 4 * (256 + 384) * 12) / 2e12
    kv0, kv1 = 2 * 2 * d * 4 * 256, 2 * 2 * d * 4 * 384  # what rank 0 and rank 1 receive
    dkv0, dkv1 = 2 * 2 * d * 4 * 384, 2 * 2 * d * 4 * 256
    ring = max(kv0, kv1) / 100e9
    ring_back = max(kv0 + dkv0, kv1 + dkv1) / 100e9
    # Rank 0's only foreign call is for a whole slot, whose dKV leaves after it; rank 1's last one for a front half.
    late = 2 * 2 * d * 4 * 256 / 100e9
    layer = linears * linear + forwards * max(max(forward0, forward1), ring)
    layer += max(max(backward0, backward1) + late, ring_back)
    parameters = work.model.parameters
    optimizer = 2 * 16 * parameters / 2 / 2e12
    # Of two micro-steps the first parameters in the job's dtype, of the step the last gradients in fp32.
    first = work.model.layer_parameters + work.model.embedding_parameters
    path = 2 * (layers * layer + loss) + (2 * 4 + 4) * first / 2 / 100e9 + optimizer
    gathered = 2 * (2 * layers * work.model.layer_parameters + work.model.embedding_parameters) * 4
    wires = (gathered + 4 * parameters) / 2
    carried = 2 * layers * (forwards + 1) * kv1 + 2 * layers * dkv1
    carried_back = 2 * layers * (forwards + 1) * kv0 + 2 * layers * dkv0
    expected = max(path, (wires + max(carried, carried_back)) / 100e9)
    found = predict(plan, cluster, work)
    assert found.step_seconds == pytest.approx(expected, rel=1e-9)
    assert found.tokens_per_second == pytest.approx(2 * n / expected, rel=1e-9)
    assert found.parameter_seconds == pytest.approx(wires / 100e9, rel=1e-9)
    assert found.all_to_all_seconds == 0


@pytest.mark.parametrize("wire", [1.0, 1e9])
def test_a_gathered_step_by_hand(wire):
    plan, layers, d = two_rank_plan("full", exchange="allgather"), 3, 8
    (node,) = cluster_of([3, 1]).nodes
    cluster = Cluster("wire", (dataclasses.replace(node, intra_gb_per_s=wire),))
    work = workload_for(plan, "float32", "full")
    cost = replica_cost(plan, plan.replicas[0], work, cluster.places)

    def forward(pairs, rows, speed):
        return 4 * 4 * d * pairs / (80e12 * speed) + 4 * rows * (d * 12 + 12) / 2e12 + 5e-6

    def backward(pairs, rows, own, kv, speed):
        merged = d * (4 * (rows * 12 + own * 8) + 4 * kv * 12) / 2e12
        return 2.5 * 4 * 4 * d * pairs / (60e12 * speed**0.5) + merged + 5e-6

    # The own square; then rank 0's 384 back rows on the 256 inner tokens, all 256 of rank 1 on the 384 in front.
    squares = np.array([forward(768 * 769 / 2, 768, 3), forward(256 * 257 / 2, 256, 1)])
    rest = np.array([forward(384 * 256, 384, 3), forward(256 * 384, 256, 1)])
    squares_back = np.array([backward(768 * 769 / 2, 768, 768, 768, 3), backward(256 * 257 / 2, 256, 256, 256, 1)])
    rest_back = np.array([backward(384 * 256, 384, 0, 256, 3), backward(256 * 384, 256, 0, 384, 1)])
    np.testing.assert_allclose(cost.own_forward, squares, rtol=1e-9)
    np.testing.assert_allclose(cost.own_backward, squares_back, rtol=1e-9)
    np.testing.assert_allclose(cost.attention_forward + cost.merge_forward, squares + rest, rtol=1e-9)
    np.testing.assert_allclose(cost.attention_backward + cost.merge_backward, squares_back + rest_back, rtol=1e-9)

    moved = 2 * 2 * d * 4 * 384  # KV to rank 1, and dKV back from it; less goes the other way
    gather = moved / (wire * 1e9)
    layer = (
        2 * (np.maximum(squares, gather) + rest).max() + (np.maximum(squares_back, gather) + rest_back).max() + gather
    )
    optimizer = 2 * 16 * work.model.parameters / 2 / 2e12
    first = work.model.layer_parameters + work.model.embedding_parameters
    path = layers * (4 * cost.linear.max() + layer) + cost.loss.max() + (4 + 4) * first / 2 / (wire * 1e9) + optimizer
    found = predict(plan, cluster, work)
    busiest = found.parameter_seconds + layers * (3 * moved + 2 * 2 * d * 4 * 256) / (wire * 1e9)
    assert found.step_seconds == pytest.approx(max(path, busiest), rel=1e-9)
    assert found.ring_seconds == pytest.approx(layers * 4 * gather, rel=1e-9)
    # With wires for nothing fewer calls win; with slow ones the ring hides more.
    ring = predict(dataclasses.replace(plan, exchange="ring"), cluster, work)
    assert (found.step_seconds < ring.step_seconds) == (wire > 1)


def test_memory_of_gathered_kv_by_hand():
    plan, d = two_rank_plan("selective", exchange="allgather"), 8
    forward, backward = attention_bytes(plan, workload_for(plan, "bfloat16", "selective"))
    head, kv = 4 * d, 2 * 2 * d  # all heads everywhere: 4 of queries, 2 of K and of V
    own, foreign = np.array([768, 256]), np.array([256, 384])
    returned = np.array([384, 256])  # from the one rank that attends to the own fronts, or to all own tokens
    rows = np.array([384, 256])  # of queries in the call for the foreign tokens
    # The running sum, both ways' messages, and the part being merged: as it came, in fp32, and its log-sum-exps.
    merging = own * head * 4 + (foreign + returned) * kv * 2 + rows * (head * (2 + 4) + 8 * 4 * 4)
    np.testing.assert_array_equal(forward, merging - own * head * 2)
    # The sums and their copy for the tokens; what the last call was given and returned.
    np.testing.assert_array_equal(backward, 2 * own * (head + kv) * 4 + foreign * kv * (2 + 4 + 2) + rows * head * 2)


def test_memory_of_the_ring_by_hand():
    """Groups of one in fp32 add to what their own call returns, so that buffers and parts are all there is."""
    forward, backward = attention_bytes(two_rank_plan("selective"), workload_for(two_rank_plan(), "float32"))
    # Rank 0 merging its one call's 384 rows: an own front half is still being sent, the inner slot is there.
    # Rank 1 merging the 256 rows of its first: its own slot is still being sent, two front halves are there.
    rows, buffers = np.array([384, 256]), np.array([128 + 256, 256 + 2 * 128])
    np.testing.assert_array_equal(forward, (buffers + rows) * 32 * 4 + rows * 8 * 4 * 4)
    # Rank 0 after its one call: KV of that slot and a half, its dKV, three fronts' dKV on their way home, the results.
    # Rank 1 in its second and third call: KV and dKV of three slots, and the results of two calls.
    inner, outer = 256 + 128 + 256 + 3 * 128 + 384 + 256, 3 * 128 + 2 * 128 + 2 * (256 + 128)
    np.testing.assert_array_equal(backward, np.array([inner, outer]) * 32 * 4)


def test_memory_by_hand():
    cluster = cluster_of([3, 1], memory=10.0)
    work = workload_for(two_rank_plan(), "float32", "selective")

    def fixed(model):
        layer, embedding = model.layer_parameters, model.embedding_parameters
        return 1e9 + 16 * model.parameters / 2 + (2 * layer + embedding) * 4 + layer * 8 + embedding * 4

    def share(tokens, attention, model):
        kept = 3 * tokens * (model.hidden + 4 * 8) * 4
        lse = 3 * tokens * 4 * 4
        working = tokens * (5 * model.hidden + 4 * 8 + 2 * 2 * 8 + 4 * model.intermediate) * 4  # the rest is kept
        mlp = tokens * (2 * model.intermediate + 2 * model.hidden) * 4
        attending = tokens * (3 * model.hidden + 2 * (2 * 4 * 8 + 2 * 2 * 8)) * 4
        loss = min(tokens, 1024) * model.vocab * 8 + tokens * model.hidden * 4
        return kept + lse + max(working + mlp, attending + attention, loss)

    # A layer takes most at its MLP; a narrow one, at its attention.
    for narrow in (False, True):
        model = dataclasses.replace(work.model, hidden=8, intermediate=8, vocab=8) if narrow else work.model
        job = dataclasses.replace(work, model=model)
        attention = np.max(attention_bytes(two_rank_plan("selective"), job), axis=0)
        shares = [share(tokens, size, model) for tokens, size in zip((768, 256), attention, strict=True)]
        assert (shares > [share(tokens, 0, model) for tokens in (768, 256)]) == narrow
        found = predict(two_rank_plan("selective"), cluster, job)
        assert found.memory_gb == pytest.approx([(fixed(model) + size) / 1e9 for size in shares], rel=1e-12)
        assert found.memory_limit_gb == (9.5, 9.5)
    # In 16 bits a norm keeps a copy of its input in fp32.
    half = dataclasses.replace(work, dtype="bfloat16", recompute="none")
    assert token_bytes(half)[0] == 3 * (2 * 64 * (4 + 2 + 2) + (2 * 4 * 8 + 2 * 2 * 8 + 4 * 96) * 2)
    # With offload the inputs are in host memory, but for two; the results of attention stay.
    cluster = with_hosts(cluster, 100.0, 1.0)
    for recompute, outputs in (("selective", 3 * 4 * 8), ("full", 0)):
        job = dataclasses.replace(work, recompute=recompute)
        plan, moved = two_rank_plan(recompute), dataclasses.replace(job, offload=True)
        stays, goes = predict(plan, cluster, job), predict(dataclasses.replace(plan, offload=True), cluster, moved)
        freed = [tokens * 64 * 4 for tokens in (768, 256)]
        assert np.subtract(stays.memory_gb, goes.memory_gb) == pytest.approx([size / 1e9 for size in freed])
        assert goes.host_memory_gb == pytest.approx([3 * size / 1e9 for size in freed])
        assert stays.host_memory_gb == ()
        assert token_bytes(moved)[0] == (2 * 64 + outputs) * 4
    found, waiting = (
        predict(two_rank_plan("selective"), cluster, dataclasses.replace(work, accumulation=times)) for times in (1, 2)
    )
    assert waiting.memory_gb[0] - found.memory_gb[0] == pytest.approx(4 * work.model.parameters / 1e9)


def test_wires_add_up_at_the_nic_and_respect_special_links():
    class Sent(Flow):
        def __init__(self, *messages):
            super().__init__()
            self.sent = np.zeros((1, 4, 4))
            for sender, receiver, size in messages:
                self.sent[0, sender, receiver] = size
            self.out, self.into = self.sent.sum(2), self.sent.sum(1)

        def between(self, sender, receiver):
            return self.sent[:, sender, receiver]

    def seconds(cluster, *messages):
        wires = Wires(cluster, cluster.places)
        return wires.seconds(wires.load(Sent(*messages)))[0]

    cluster = cluster_of([1, 1, 1, 1])
    inside = (0, 1, 50e9)  # inside n0 at 100 GB/s
    assert seconds(cluster, inside) == pytest.approx(0.5)
    leaving = (0, 2, 10e9), (1, 3, 10e9)  # both leave n0 through one NIC of 10 GB/s
    assert seconds(cluster, inside, *leaving) == pytest.approx(2.0)
    slow = dataclasses.replace(cluster, links=(Link(("n0", "n1"), 4.0),))
    assert seconds(slow, inside, *leaving) == pytest.approx(5.0)
    wires = Wires(cluster, cluster.places)
    load = wires.load(Sent(inside, *leaving))
    assert wires.seconds(load + 5e9 * wires.circle) == pytest.approx([2.5])
    assert wires.around(5e9) == wires.seconds(5e9 * wires.circle[None])[0] == pytest.approx(0.5)


@pytest.mark.parametrize("exchange", SLOW)
@pytest.mark.parametrize("special", [False, True])
def test_loads_are_what_the_bytes_from_rank_to_rank_put_on_each_wire(exchange, special):
    for seed in range(30):
        plan = dataclasses.replace(draw_plan(seed), exchange=exchange)
        cluster = cluster_of([1] * plan.world_size, per_node=1 + seed % 4)
        if special and len(cluster.nodes) > 1:
            cluster = dataclasses.replace(cluster, links=(Link(("n0", "n1"), 4.0),))
        plan = seated(plan, cluster)
        everyone, found = Wires(cluster, cluster.places), 0.0
        ports, nics = np.zeros((2, plan.world_size)), np.zeros((2, len(everyone.nic)))
        links = np.zeros((len(everyone.nic),) * 2)
        for replica in plan.replicas:
            cost = replica_cost(plan, replica, workload_for(plan), cluster.places)
            near = everyone.subset(cost.ranks)
            for flow in (cost.exchange, cost.kv, cost.dkv):
                matrices = flow.matrix()
                assert (flow.out == matrices.sum(2)).all()
                assert (flow.into == matrices.sum(1)).all()
                found = found + everyone.spread(near.load(flow).sum(0), cost.ranks[None])
                for (i, j), size in np.ndenumerate(matrices.sum(0)):
                    a, b = cost.ranks[i], cost.ranks[j]
                    m, n = everyone.node[a], everyone.node[b]
                    if m == n:
                        ports[0, a] += size
                        ports[1, b] += size
                    else:
                        nics[0, m] += size
                        nics[1, n] += size
                        links[m, n] += size
        expected = [*ports, *nics] + ([links.ravel()] if everyone.link is not None else [])
        np.testing.assert_array_equal(found, np.concatenate(expected))


def test_zero_shares_are_legal():
    replica = make_replica(64, 16, [(2, [(0, 32, 0), (1, 0, 4)]), (2, [(2, 32, 4)])])
    cluster = cluster_of([1, 1, 1])
    devices = tuple(RankDevice(p.device.type, p.node_name, p.device.kernel) for p in cluster.places)
    plan = Plan("manual", 64, 4, 2, 16, 1, "ring", "selective", "float32", (replica,), devices)
    cost = replica_cost(plan, replica, workload_for(plan, "float32", "selective"), cluster.places)
    assert cost.attention_forward[0] == 0
    assert cost.merge_forward[0] == 0
    assert cost.linear[1] == pytest.approx(cost.linear[0] / 32)  # the dummy token
    assert cost.exchange.matrix()[0, 0, 1] > 0
    assert cost.exchange.matrix()[0, 1, 0] == 0
    assert predict(plan, cluster, workload_for(plan, "float32", "selective")).step_seconds > 0


@pytest.mark.parametrize("seed", range(70, 90))
def test_more_of_anything_never_costs_less(seed):
    plan = draw_plan(seed)
    cluster = cluster_of([1] * plan.world_size)
    plan = seated(plan, cluster)
    base = predict(plan, cluster, workload_for(plan))
    assert predict(plan, cluster, workload_for(plan, accumulation=3)).step_seconds > base.step_seconds
    fuller = dataclasses.replace(plan, recompute="full")
    assert predict(fuller, cluster, workload_for(plan, recompute="full")).step_seconds >= base.step_seconds
    assert max(predict(fuller, cluster, workload_for(plan, recompute="full")).memory_gb) <= max(base.memory_gb)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), recompute=st.sampled_from(["none", "selective", "full"]), keep=st.booleans())
def test_no_feasible_plan_beats_the_bound(seed, recompute, keep):
    rng = random.Random(seed)
    plan = dataclasses.replace(draw_plan(seed), recompute=recompute, exchange=rng.choice(("ring", "allgather")))
    assume(plan.seq_len >= 2)  # a workload has at least one token to predict
    memory = rng.choice((1e6, 1.0526316 * (1.0 + 10 ** rng.uniform(-3.5, -1.5))))
    cluster = cluster_of([rng.choice((0.25, 1, 3)) for _ in range(plan.world_size)], memory=memory)
    plan = seated(plan, cluster)
    work = workload_for(plan, recompute=recompute, keep=keep)
    window = rng.choice((None, rng.randint(1, plan.seq_len)))
    full = rng.randint(0, 2) if window else 0
    work = dataclasses.replace(work, model=dataclasses.replace(work.model, window=window, full_layers=full))
    try:
        check_memory(plan, cluster, work)
    except OutOfMemory:
        return
    filled = with_prediction(plan, cluster, work)
    assert filled.predicted.step_seconds >= lower_bound(cluster, work) * (1 - 1e-12)
    assert filled.gap >= -1e-12


def test_the_bound_is_reached_by_a_perfect_split_of_pure_compute():
    cluster = cluster_of([3, 3, 1, 1], per_node=4)
    ideal = {"hbm_gb_per_s": 1e9, "launch_us": 0.0}
    seats = tuple(
        Seat(dataclasses.replace(s.device, attention_backward_tflops=s.device.gemm_tflops, **ideal))
        for s in cluster.nodes[0].seats
    )
    fast = Cluster("fast", (dataclasses.replace(cluster.nodes[0], intra_gb_per_s=1e9, seats=seats),))
    replica = make_replica(
        8192, 1024, [(3, [(0, 3072, 4)]), (3, [(1, 3072, 4)]), (1, [(2, 1024, 4)]), (1, [(3, 1024, 4)])]
    )
    devices = tuple(RankDevice(p.device.type, p.node_name, p.device.kernel) for p in fast.places)
    plan = Plan("manual", 8192, 4, 2, 1024, 1, "ring", "none", "float32", (replica,), devices)
    filled = with_prediction(plan, fast, workload_for(plan, "float32"))
    assert 0 <= filled.gap < 1e-3


def test_out_of_memory_names_the_device_and_a_length_that_fits():
    cluster = cluster_of([3, 1], memory=1.2)
    big = two_rank_plan("selective", seq_len=1 << 20)
    work = workload_for(big, "float32", "selective")
    with pytest.raises(
        OutOfMemory, match=r"rank 0, a d3 on node n0, needs .* GB too much.*seq_len [\d,]+ would fit"
    ) as caught:
        check_memory(big, cluster, work)
    assert "recompute=full" in str(caught.value)
    fits = caught.value.fits_seq_len // 8 * 8
    assert 0 < fits < 1 << 20
    small = two_rank_plan("selective", seq_len=fits)
    check_memory(small, cluster, workload_for(small, "float32", "selective"))
    with pytest.raises(OutOfMemory, match="more devices or a smaller model"):
        check_memory(small, cluster_of([3, 1], memory=1.0), workload_for(small, "float32", "selective"))


def test_offload_is_a_remedy_where_it_fits_and_hosts_have_room():
    plan = two_rank_plan("selective", seq_len=1 << 20)
    cluster, work = cluster_of([3, 1], memory=6.82), workload_for(plan, "float32", "selective", layers=8)
    with pytest.raises(OutOfMemory) as unknown:
        check_memory(plan, cluster, work)
    assert "offload" not in str(unknown.value)
    with pytest.raises(
        OutOfMemory, match=r"seq_len [\d,]+ would fit; recompute=full needs less; offload=true would fit"
    ):
        check_memory(plan, with_hosts(cluster, 100.0, 1.0), work)
    moved, lighter = dataclasses.replace(plan, offload=True), dataclasses.replace(work, offload=True)
    check_memory(moved, with_hosts(cluster, 100.0, 1.0), lighter)
    with pytest.raises(ValueError, match="offload: device type d3 has no host_gb_per_s"):
        check_memory(moved, cluster, lighter)
    with pytest.raises(OutOfMemory, match="GB too much") as small:
        check_memory(plan, with_hosts(cluster, 2.0, 1.0), work)
    assert "offload" not in str(small.value)
    # Eight layers' inputs of 1,048,576 tokens, 64 elements of 4 bytes: both ranks are on one node.
    problem = (
        r"node n0 keeps 2.15 GB of layers' inputs in its host's memory, of 1.6 GB usable \(2 GB\), 0.547 GB too much"
    )
    with pytest.raises(OutOfMemory, match=problem) as host:
        check_memory(moved, with_hosts(cluster, 2.0, 1.0), lighter)
    # Other recompute takes as much of a host; where devices have room, they may keep the inputs.
    assert str(host.value).endswith("a host with more memory holds more; offload=false with recompute=full would fit")
    with pytest.raises(OutOfMemory, match="a host with more memory holds more; offload=false would fit"):
        check_memory(moved, with_hosts(cluster_of([3, 1], memory=64.0), 2.0, 1.0), lighter)
    with pytest.raises(OutOfMemory, match="no sequence fits there: use hosts with more memory, or offload=false"):
        check_memory(moved, with_hosts(cluster_of([3, 1], memory=6.1), 1e-9, 1.0), lighter)
    # Where devices lack memory, too, the error names both, and what would suit both.
    tight = with_hosts(cluster_of([3, 1], memory=4.0), 1.0, 1.0)
    with pytest.raises(
        OutOfMemory, match=rf"^rank 0, a d3 on node n0, needs .* of 1,048,576 tokens, and {problem[:60]}"
    ) as both:
        check_memory(moved, tight, lighter)
    assert str(both.value).endswith(" would fit; recompute=full needs less of devices alone")
    fits = both.value.fits_seq_len // 8 * 8
    small = dataclasses.replace(two_rank_plan("selective", seq_len=fits), offload=True)
    check_memory(small, tight, dataclasses.replace(lighter, seq_len=fits))
    fits = host.value.fits_seq_len // 8 * 8
    assert fits == pytest.approx((1 << 20) * 1.6 / 2.147, rel=1e-3)
    small = dataclasses.replace(two_rank_plan("selective", seq_len=fits), offload=True)
    check_memory(small, with_hosts(cluster, 2.0, 1.0), dataclasses.replace(lighter, seq_len=fits))


def test_remedies_for_a_manual_plan_are_changes_to_it():
    plan = two_rank_plan("selective", seq_len=1 << 20)
    cluster = with_hosts(cluster_of([3, 1], memory=6.82), 100.0, 1.0)
    work = workload_for(plan, "float32", "selective", layers=8)
    with pytest.raises(OutOfMemory) as light:
        check_memory(plan, cluster, work, manual=True)
    there = "recompute=full in the plan needs less; offload=true in the plan would fit"
    assert str(light.value).endswith(
        f"; a new plan may fit, and with seq_len {light.value.fits_seq_len:,} would; {there}"
    )
    # Kept parameters are no part of a plan.
    most = max(predict(plan, cluster_of([3, 1]), work).memory_gb) / 0.95 * (1 + 1e-9)
    check_memory(plan, cluster_of([3, 1], memory=most), work)
    with pytest.raises(OutOfMemory, match=r"; keep_parameters=false would fit$"):
        check_memory(
            plan, cluster_of([3, 1], memory=most), dataclasses.replace(work, keep_parameters=True), manual=True
        )


def test_a_plan_for_another_job_is_refused():
    plan = two_rank_plan()
    work = workload_for(plan, "float32")
    with pytest.raises(ValueError, match="seq_len is 1024, the workload's 2048"):
        check_workload(plan, dataclasses.replace(work, seq_len=2048))
    moved = dataclasses.replace(two_rank_plan("full"), offload=True)
    with pytest.raises(ValueError) as other:
        check_workload(moved, dataclasses.replace(work, recompute="selective"))
    assert str(other.value) == (
        "the plan's recompute is full, the workload's selective, and the plan's offload is True, the workload's False; "
        "set strategy.recompute=full strategy.offload=true, or make a new plan for this job"
    )
    with pytest.raises(ValueError, match="recompute is none"):
        predict(plan, cluster_of([3, 1]), dataclasses.replace(work, recompute="full"))
    with pytest.raises(ValueError, match="wants a d1 on node n0 for rank 1; cluster 'test' has 0 there"):
        match_places(plan, cluster_of([3, 3]))

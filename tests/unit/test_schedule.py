"""The scheduler: legal, repeatable plans that fit, beat every rival, and say why not when there is none."""

import dataclasses
import itertools
import math
import random
import time

import mip
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiseq import cost
from hexiseq.attention.layout import routes
from hexiseq.cluster import Cluster, Device, Node, Seat
from hexiseq.cost import OutOfMemory
from hexiseq.plan import EXCHANGES, Plan, fits_slots, fragments
from hexiseq.schedule import IllegalPolicy, solve
from hexiseq.schedule.drafts import Draft, written
from hexiseq.schedule.estimate import Alike, Job, kind_of
from hexiseq.schedule.even import even_grid, even_totals, legal_widths
from hexiseq.schedule.groups import Nodes
from hexiseq.schedule.local import PIECE, cut_heads, deal_heads, integer_program, share_tokens, solved
from hexiseq.schedule.search import Options, Search
from hexiseq.schedule.shares import GroupClass, best_slots, share
from hexiseq.workload import ModelShape, Workload


def gpu(name, gemm, forward, backward, memory=80.0, hbm=2000.0, **changes):
    values = dict(
        type=name, vendor="nvidia", peak_tflops=gemm * 1.3, gemm_tflops=gemm, attention_forward_tflops=forward,
        attention_backward_tflops=backward, memory_gb=memory, hbm_gb_per_s=hbm, overhead_gb=2.0, launch_us=10.0,
        dtypes=("bfloat16", "float16", "float32"), kernel="torch_flash", source="test",
    )  # fmt: skip
    return Device(**{**values, **changes})


H100 = gpu("h100_sxm", 790, 616, 560, hbm=3350)
A100 = gpu("a100_80", 271, 193, 187)
L40S = gpu("l40s", 220, 190, 160, memory=48, hbm=864)
LLAMA = ModelShape("llama3_8b", 32, 4096, 14336, 32, 8, 128, 128256)
SMALL = ModelShape("small", 4, 288, 768, 9, 3, 64, 4096)
CPU = {"vendor": "cpu", "memory": 4.0, "overhead_gb": 0.4, "dtypes": ("float32", "float64"), "kernel": "cpu"}
CORE = gpu("cpu_core", 0.07, 0.05, 0.038, hbm=8, **CPU)
HALF = gpu("cpu_half_core", 0.035, 0.025, 0.019, hbm=4, **CPU)
CPU_MIXED = Cluster("cpu_mixed", (Node("local", (Seat(CORE), Seat(HALF), Seat(HALF)), 1.0, 1, 1.0),))


def mixed(per_node=4, nic=25.0):
    return Cluster(
        "h100_a100",
        (Node("h100", (Seat(H100),) * per_node, 450, 1, nic), Node("a100", (Seat(A100),) * per_node, 300, 1, nic)),
    )


def job(model=LLAMA, seq_len=65536, dtype="bfloat16", recompute="selective", sequences=1):
    return Workload(model, seq_len, dtype, recompute, sequences, 1, False)


def small_job(seq_len=4096, **changes):
    return job(SMALL, seq_len, "float32", **changes)


def test_fast_devices_get_more_and_nothing_beats_the_bound():
    plan = solve(mixed(), job(seq_len=262144))
    assert plan.policy == "hexiseq"
    fast, slow = plan.shard(0), plan.shard(plan.world_size - 1)
    assert plan.devices[0].type == "h100_sxm"
    assert plan.devices[-1] == dataclasses.replace(plan.devices[-1], type="a100_80", node="a100")
    assert 2.5 < fast.num_tokens / slow.num_tokens < 3.5
    assert all(u <= m for u, m in zip(plan.predicted.memory_gb, plan.predicted.memory_limit_gb, strict=True))
    assert plan.predicted.step_seconds == pytest.approx(plan.bound.step_seconds * (1 + plan.gap))
    assert 0 <= plan.gap < 0.05
    rows = {rival.name: rival for rival in plan.rivals}
    assert list(rows) == ["fast_only", "even", "ring", "ulysses", "usp", "loongtrain", "hexiseq"]
    assert rows["hexiseq"].step_seconds == plan.predicted.step_seconds
    assert rows["usp"].step_seconds > 1.5 * plan.predicted.step_seconds
    assert rows["even"].step_seconds == min(r.step_seconds for n, r in rows.items() if n in ("ring", "ulysses", "usp"))
    assert rows["fast_only"].status == "out_of_memory"
    assert "h100_sxm" in rows["fast_only"].reason


def test_uneven_devices_of_one_node():
    plan = solve(CPU_MIXED, small_job())
    shares = [shard.num_tokens / 4096 for shard in plan.shards()]
    heads = [shard.num_heads for shard in plan.shards()]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.02) or len(set(heads)) > 1
    assert plan.gap < 0.05
    rows = {rival.name: rival.step_seconds for rival in plan.rivals}
    assert rows["ring"] > 1.25 * plan.predicted.step_seconds


def test_even_policies_are_what_real_systems_do():
    ring = solve(mixed(), job(seq_len=65536), "ring", rivals=False)
    assert [s.num_tokens for s in ring.shards()] == [8192] * 8
    assert all(len(group.shards) == 1 and group.slots == 1 for group in ring.replicas[0].groups)
    assert ring.shard(0).tokens == ((0, 4096), (61440, 65536))  # zigzag
    ulysses = solve(mixed(), job(seq_len=65536), "ulysses", rivals=False)
    assert [s.num_tokens for s in ulysses.shards()] == [8192] * 8
    assert [s.num_heads for s in ulysses.shards()] == [4] * 8
    usp = solve(mixed(), job(seq_len=65536), "usp", rivals=False)
    assert usp.predicted.step_seconds <= min(ring.predicted.step_seconds, ulysses.predicted.step_seconds)
    odd = solve(mixed(), job(seq_len=65537), "ring", rivals=False)
    assert max(s.num_tokens for s in odd.shards()) <= 2 * -(-65537 // 16)  # as if padded, without the padding


def test_illegal_policies_name_limit_and_remedy():
    with pytest.raises(IllegalPolicy, match=r"policy ulysses on 2 ranks: 9 query heads.*usp with groups of 1, or hexi"):
        solve(Cluster("two", (Node("n", (Seat(CORE),) * 2, 1, 1, 1),)), small_job(), "ulysses")
    with pytest.raises(IllegalPolicy, match=r"3 KV heads do not divide over 9 ranks|policy ulysses on 6 ranks"):
        solve(Cluster("six", (Node("n", (Seat(CORE),) * 6, 1, 1, 1),)), small_job(), "ulysses")
    with pytest.raises(IllegalPolicy, match=r"3 tokens are too few.*at least 6"):
        solve(CPU_MIXED, small_job(3), "ring")
    with pytest.raises(IllegalPolicy, match=r"slots of 1000 tokens do not cover 4096.*use a slot of"):
        solve(CPU_MIXED, small_job(), "ring", slot=1000)
    with pytest.raises(ValueError, match="'best' is not one of"):
        solve(CPU_MIXED, small_job(), "best")
    with pytest.raises(ValueError, match=r"cpu_core on node local cannot run bfloat16.*float32"):
        solve(CPU_MIXED, job(SMALL, 4096))
    plan = solve(Cluster("two", (Node("n", (Seat(CORE),) * 2, 1, 1, 1),)), small_job())
    row = next(rival for rival in plan.rivals if rival.name == "ulysses")
    assert row.status == "illegal"
    assert "9 query heads" in row.reason
    assert row.step_seconds is None


def wired(gb_per_s, memory=80.0, launch_us=10.0):
    """Eight devices of one type on one node."""
    seat = Seat(dataclasses.replace(A100, memory_gb=memory, launch_us=launch_us))
    return Cluster("wired", (Node("n", (seat,) * 8, gb_per_s, 1, 25),))


@pytest.mark.parametrize("policy", ["hexiseq", "ring", "usp"])
def test_the_exchange_is_the_faster_one(policy):
    # Gathered KV needs fewer kernel calls; the ring hides more of the transfer.
    for cluster, better in ((wired(100.0), "ring"), (wired(10_000.0, launch_us=2000.0), "allgather")):
        plans = {e: solve(cluster, job(seq_len=65536), policy, exchange=e) for e in (None, "auto", *EXCHANGES)}
        assert {e: plans[e].exchange for e in EXCHANGES} == {e: e for e in EXCHANGES}
        assert plans["auto"].predicted == plans[None].predicted
        seconds = {e: plan.predicted.step_seconds for e, plan in plans.items()}
        if policy == "ring":
            assert plans[None].exchange == better
            assert seconds[None] == seconds[better] < max(seconds[e] for e in EXCHANGES)
        assert seconds[None] <= seconds["ring"]
        rows = {e: {r.name: r.step_seconds for r in plan.rivals} for e, plan in plans.items()}
        for name in ("ring", "usp"):
            assert rows[None][name] == min(rows[e][name] for e in EXCHANGES)
        for plan in plans.values():
            assert all(plan.predicted.step_seconds <= r.step_seconds * (1 + 1e-9) for r in plan.rivals
                       if policy == "hexiseq" and r.step_seconds)  # fmt: skip


def test_an_exchange_that_does_not_fit_is_not_chosen():
    work = job(seq_len=262144)
    cluster = wired(10_000.0, launch_us=2000.0)
    needs = {e: max(solve(cluster, work, "ring", exchange=e, rivals=False).predicted.memory_gb) for e in EXCHANGES}
    assert needs["ring"] < needs["allgather"]
    between = (needs["ring"] + needs["allgather"]) / 2 / cost.MEMORY_FRACTION
    tight = wired(10_000.0, between, launch_us=2000.0)
    assert solve(cluster, work, "ring", rivals=False).exchange == "allgather"
    assert solve(tight, work, "ring", rivals=False).exchange == "ring"
    with pytest.raises(OutOfMemory, match="would fit"):
        solve(tight, work, "ring", exchange="allgather", rivals=False)
    found = solve(tight, work, rivals=False)
    assert all(u <= m for u, m in zip(found.predicted.memory_gb, found.predicted.memory_limit_gb, strict=True))


def test_mistaken_exchanges_are_named():
    with pytest.raises(ValueError, match=r"strategy\.exchange 'mail' is not one of auto, ring, allgather"):
        solve(CPU_MIXED, small_job(), exchange="mail")
    plan = solve(CPU_MIXED, small_job(), "ring", exchange="allgather", rivals=False)
    for wanted in (None, "auto", "allgather"):
        again = solve(CPU_MIXED, small_job(), "manual", manual=plan, exchange=wanted, rivals=False)
        assert again.digest() == plan.digest()
    with pytest.raises(ValueError, match=r"strategy\.exchange is ring, the manual plan's exchange allgather"):
        solve(CPU_MIXED, small_job(), "manual", manual=plan, exchange="ring")
    with pytest.raises(ValueError, match=rf"strategy\.slot is 2, the manual plan's slot {plan.slot}"):
        solve(CPU_MIXED, small_job(), "manual", manual=plan, slot=2)


def test_very_many_slots_are_shared_without_looking_for_the_best(monkeypatch):
    monkeypatch.setattr("hexiseq.schedule.search.best_slots", None)  # not called
    plan = solve(mixed(), job(seq_len=262144), slot=2, rivals=False)
    assert sum(group.slots for group in plan.replicas[0].groups) == 131072


SMALL_MEMORY = Cluster(
    "big_small",
    (Node("big", (Seat(H100),) * 4, 450, 1, 25), Node("small", (Seat(L40S),) * 4, 31, 1, 25)),
)


def test_memory_is_split_where_even_shares_do_not_fit():
    work = job(seq_len=262144)
    plan = solve(SMALL_MEMORY, work, drop_devices=False)
    rows = {rival.name: rival for rival in plan.rivals}
    assert {rows[name].status for name in ("even", "ring", "ulysses", "usp")} == {"out_of_memory"}
    assert rows["hexiseq"].status == "ok"
    assert plan.world_size == 8
    cost.check_memory(plan, SMALL_MEMORY, work)
    assert all(u <= m for u, m in zip(plan.predicted.memory_gb, plan.predicted.memory_limit_gb, strict=True))


def test_a_device_without_room_is_clamped_and_the_rest_take_over():
    tight = Cluster("tight", (Node("n", (Seat(H100),) * 3 + (Seat(dataclasses.replace(H100, type="h100_half",
                    memory_gb=44)),), 450, 1, 25),))  # fmt: skip
    plan = solve(tight, job(seq_len=81920), drop_devices=False)
    tokens = [shard.num_tokens for shard in plan.shards()]
    assert tokens[3] < tokens[0]
    assert plan.predicted.memory_gb[3] <= 0.95 * 44
    assert plan.predicted.memory_gb[3] > 0.6 * 44  # clamped, not emptied


def test_out_of_memory_says_what_would_fit():
    with pytest.raises(OutOfMemory, match=r"GB too much.*seq_len [\d,]+ would fit; recompute=full") as caught:
        solve(mixed(), job(seq_len=1 << 20))
    fits = caught.value.fits_seq_len
    assert 0 < fits < 1 << 20
    solve(mixed(), job(seq_len=fits), rivals=False)
    with pytest.raises(OutOfMemory, match="would fit") as even:
        solve(mixed(), job(seq_len=1 << 20), "ring")
    assert even.value.fits_seq_len <= fits
    solve(mixed(), job(seq_len=even.value.fits_seq_len), "ring", rivals=False)
    with pytest.raises(OutOfMemory, match="more devices or a smaller model"):
        solve(Cluster("one", (Node("n", (Seat(A100),), 1, 1, 1),)), job(seq_len=4096))


def test_a_slow_network_is_part_of_the_bound():
    plan = solve(mixed(8), job(seq_len=65536))
    assert {device.type for device in plan.excluded} == {"a100_80"}  # 16 devices would wait for their parameters
    assert 0 <= plan.gap < 0.1
    assert plan.bound.step_seconds > 1.2 * cost.devices_bound(cost.Devices.of(mixed(8).places), job(seq_len=65536))


def test_slow_devices_are_dropped_when_that_is_faster():
    snail = gpu("snail", 5, 4, 4)
    cluster = Cluster(
        "drag", (Node("fast", (Seat(H100),) * 4, 450, 1, 0.05), Node("slow", (Seat(snail),) * 2, 5, 1, 0.05))
    )
    plan = solve(cluster, job(seq_len=65536))
    assert plan.world_size == 4
    assert [device.type for device in plan.excluded] == ["snail"] * 2
    assert "slower with it" in plan.excluded[0].reason
    kept = solve(cluster, job(seq_len=65536), drop_devices=False)
    assert kept.world_size == 6
    assert kept.excluded == ()
    assert kept.predicted.step_seconds > plan.predicted.step_seconds
    fast_only = next(rival for rival in plan.rivals if rival.name == "fast_only")
    assert plan.predicted.step_seconds <= fast_only.step_seconds


def test_manual_plans_are_checked():
    work, cluster = job(seq_len=65536), mixed()
    plan = solve(cluster, work, rivals=False)
    again = solve(cluster, work, "manual", manual=plan)
    assert again.policy == "manual"
    assert again.digest() == plan.digest()
    assert again.predicted == plan.predicted
    assert next(r for r in again.rivals if r.name == "hexiseq").step_seconds == plan.predicted.step_seconds
    with pytest.raises(ValueError, match="seq_len is 65536, the workload's 32768"):
        solve(cluster, job(seq_len=32768), "manual", manual=plan)
    with pytest.raises(ValueError, match="num_heads is 32, the workload's 9"):
        solve(cluster, job(SMALL), "manual", manual=plan)
    with pytest.raises(ValueError, match="wants a h100_sxm on node h100 for rank 2; cluster 'h100_a100' has 2 there"):
        solve(mixed(2), work, "manual", manual=plan)
    with pytest.raises(ValueError, match="go together"):
        solve(cluster, work, "manual")
    big = job(seq_len=1 << 20)
    ring = kind_of(even_grid("ring", big, len(cluster.places), 1), np.arange(len(cluster.places))[None])
    with pytest.raises(OutOfMemory, match=r"a new plan may fit, and with .* recompute=full in the plan needs less"):
        solve(cluster, big, "manual", manual=written(Draft(Job(cluster, cluster.places, big), (ring,)), "ring"))


def without_time(plan: Plan) -> Plan:
    return dataclasses.replace(plan, solve_seconds=None)


@pytest.mark.parametrize("policy", ["hexiseq", "usp"])
def test_the_same_input_gives_the_same_plan(policy):
    first, second = (without_time(solve(mixed(), job(seq_len=131072), policy)) for _ in range(2))
    assert first == second
    assert first.to_dict() == second.to_dict()


@pytest.mark.parametrize("seq_len", [6, 7, 11, 13, 97, 1999, 4093, 4096, 4099, 65537])
def test_awkward_lengths(seq_len):
    plan = solve(CPU_MIXED, small_job(seq_len), drop_devices=False)
    assert sum(s.num_tokens for s in plan.shards()) == seq_len
    assert plan.replicas[0].slots <= 64
    assert len(routes(plan)) == 3


@pytest.mark.parametrize(
    "model", [SMALL, dataclasses.replace(SMALL, heads=12, kv_heads=12), dataclasses.replace(SMALL, heads=7, kv_heads=1)]
)
@pytest.mark.parametrize("slot", [None, 128, 512])
def test_any_heads_and_slots(model, slot):
    plan = solve(CPU_MIXED, job(model, 4096, "float32"), slot=slot)
    assert slot in (None, plan.slot)
    assert plan.num_heads == model.heads


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_never_worse_than_a_rival_on_any_cluster(seed):
    rng = random.Random(seed)
    kinds = [gpu(f"g{i}", rng.uniform(50, 800), rng.uniform(40, 600), rng.uniform(40, 500), rng.choice((2.5, 3, 80)))
             for i in range(3)]  # fmt: skip
    nodes = tuple(
        Node(f"n{i}", tuple(Seat(rng.choice(kinds)) for _ in range(rng.randint(1, 4))), rng.choice((30, 300)), 1,
             rng.choice((1, 25)))
        for i in range(rng.randint(1, 3))
    )  # fmt: skip
    heads = rng.choice(((9, 3), (8, 8), (16, 2), (12, 4)))
    model = ModelShape("m", 4, 512, 1024, *heads, 64, 1000)
    model = dataclasses.replace(model, window=rng.choice((None, 500, 5000)))
    work = job(model, rng.choice((1000, 4096, 30011, 65536)), "bfloat16", rng.choice(("none", "selective", "full")))
    cluster = Cluster("random", nodes)
    try:
        plan = solve(cluster, work)
    except OutOfMemory:
        for policy in ("ring", "usp"):
            with pytest.raises(ValueError):
                solve(cluster, work, policy, rivals=False)
        return
    for rival in plan.rivals:
        assert rival.step_seconds is None or plan.predicted.step_seconds <= rival.step_seconds * (1 + 1e-9), rival
    assert plan.predicted.step_seconds >= plan.bound.step_seconds * (1 - 1e-12)
    assert cost.predict(plan, cluster, work) == plan.predicted
    assert len(routes(plan)) == plan.world_size  # asserts that no rank can wait for ever
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.world_size + len(plan.excluded) == len(cluster.places)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seconds=st.lists(st.floats(0.1, 10), min_size=1, max_size=4), total=st.integers(0, 12), data=st.data())
def test_tokens_are_rounded_to_the_least_finish_time(seconds, total, data):
    caps = tuple(data.draw(st.integers(0, 12)) for _ in seconds)
    found = share_tokens(total, tuple(seconds), caps)
    options = [[]]
    for cap in caps:
        options = [[*o, n] for o in options for n in range(int(min(cap, total)) + 1)]
    legal = [o for o in options if sum(o) == total]
    if not legal:
        assert found is None
        return
    assert sum(found) == total
    assert all(n <= cap for n, cap in zip(found, caps, strict=True))

    def finish(sizes):
        return max(n * s for n, s in zip(sizes, seconds, strict=True))

    assert finish(found) == pytest.approx(min(map(finish, legal)))


def rounded_level(total, seconds, caps):
    """Least largest ``tokens * seconds`` by bisection over the level."""
    low, high = 0.0, total * max(seconds)
    for _ in range(100):
        middle = (low + high) / 2
        held = np.minimum(np.floor(middle / np.array(seconds)), caps).sum()
        low, high = (low, middle) if held >= total else (middle, high)
    return high


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_long_sequences_are_shared_as_well_as_by_bisection(seed):
    rng = random.Random(seed)
    kinds = [rng.uniform(0.3e-6, 3e-6) for _ in range(rng.choice((1, 2, 3, 8)))]
    seconds = tuple(rng.choice(kinds) for _ in range(rng.choice((2, 3, 8, 16))))
    total = rng.choice((1000, 30011, 1 << 20))
    caps = tuple(rng.choice((total, total // len(seconds), total // 2)) for _ in seconds)
    found = share_tokens(total, seconds, caps)
    if sum(caps) < total:
        assert found is None
        return
    assert sum(found) == total
    assert all(0 <= n <= cap for n, cap in zip(found, caps, strict=True))
    # The solver's gap: a millionth.
    assert max(np.multiply(found, seconds)) <= rounded_level(total, seconds, caps) * (1 + 2e-6)


def head_costs(total, kv_heads, seconds, launch, limits):
    """Per member, by first and last head: finish time (infinite where illegal); and fragments plus KV copies."""
    ratio, edges = total // kv_heads, range(total + 1)
    pieces = np.array([
        [len(fragments((a, b), ratio)) + -(-b // ratio) - a // ratio if b > a else 0 for b in edges] for a in edges
    ])  # fmt: skip
    calls = np.array([[len(fragments((a, b), ratio)) for b in edges] for a in edges])
    size = np.arange(total + 1)[None, :] - np.arange(total + 1)[:, None]
    times = [
        np.where((size < 0) | (size > limit), np.inf, size * one + calls * call)
        for one, call, limit in zip(seconds, launch, limits, strict=True)
    ]
    return times, pieces


def best_cut(times, pieces, piece):
    """Least ``finish + piece * pieces`` over all cuts: for every finish time, the fewest pieces by dynamic program."""
    total = len(pieces) - 1
    origin = np.where(np.arange(total + 1) == 0, 0.0, np.inf)
    best = np.inf
    for level in np.unique(np.concatenate([spent[np.isfinite(spent)] for spent in times])):
        fewest = origin
        for spent in times:
            fewest = (fewest[:, None] + np.where(spent <= level, pieces, np.inf)).min(0)
        best = min(best, level + piece * fewest[total])
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_heads_are_cut_as_well_as_by_the_dynamic_program(seed):
    rng = random.Random(seed)
    total, kv_heads = rng.choice(((32, 8), (9, 3), (7, 1), (12, 12), (16, 2)))
    kinds = [rng.uniform(0.3, 3) for _ in range(rng.choice((1, 2, 3, 8)))]
    seconds = tuple(rng.choice(kinds) for _ in range(rng.choice((2, 3, 4, 8))))
    call = rng.choice((0.0, 0.001, 0.05))
    launch = tuple(call * rng.uniform(0.5, 1.5) for _ in seconds)
    limits = tuple(total if seed % 2 else rng.randint(0, total) for _ in seconds)
    found = cut_heads(total, kv_heads, seconds, launch, limits)
    if sum(limits) < total:
        assert found is None
        return
    assert sum(found) == total
    edges = np.cumsum([0, *found])
    times, pieces = head_costs(total, kv_heads, seconds, launch, limits)
    piece = PIECE * total / sum(1 / one for one in seconds)
    ranges = list(itertools.pairwise(edges))
    finish = max(spent[ends] for spent, ends in zip(times, ranges, strict=True))
    value = finish + piece * sum(pieces[ends] for ends in ranges)
    assert value == pytest.approx(best_cut(times, pieces, piece), rel=1e-5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_shares_are_those_of_a_linear_program(seed):
    rng = random.Random(seed)
    numbers = [rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2, 3, 5)))]
    classes = [
        GroupClass((1,) * width, rng.uniform(0.5, 4), rng.choice((0.0, rng.uniform(0, 30))),
                   tuple(rng.uniform(0.5, 4) for _ in range(width)),
                   tuple(float(rng.choice((30, 60, 500))) for _ in range(width)))
        for width in (rng.choice((1, 2, 4)) for _ in numbers)
    ]  # fmt: skip
    total = rng.choice((60, 120, 300))
    program = integer_program()
    attention, linear = program.add_var(), program.add_var()
    held = []
    for number, group in zip(numbers, classes, strict=True):
        tokens = [program.add_var(ub=cap) for cap in group.caps]
        for x, seconds in zip(tokens, group.linear, strict=True):
            program.add_constr(seconds * x <= linear)
        program.add_constr(group.attention * mip.xsum(tokens) + group.merging <= attention)
        held.append(number * mip.xsum(tokens))
    program.add_constr(mip.xsum(held) == total)
    program.objective = mip.minimize(attention + linear)
    found = share(classes, numbers, total)
    if not solved(program):
        assert found is None
        return
    assert np.array(numbers) @ found.tokens == pytest.approx(total)
    slowest = max(group.attention * n + group.merging for group, n in zip(classes, found.tokens, strict=True))
    assert found.linear_seconds + slowest == pytest.approx(program.objective_value, rel=1e-6)


@pytest.mark.parametrize("broken", ["mip.Model", "mip.Model.add_var", "mip.Model.add_constr", "mip.Model.optimize",
                                    "mip.Model.num_solutions", "mip.Var.x"])  # fmt: skip
def test_a_solver_that_fails_anywhere_is_a_warning_and_heads_are_dealt(broken, monkeypatch):
    def fails(*_, **__):
        raise NameError("name 'cbclib' is not defined")

    seconds, launch, limits = (1.4, 1.9, 3.2, 3.5, 1.2, 2.8), (1e-3,) * 6, (64,) * 6
    cut_heads.cache_clear()
    monkeypatch.setattr(broken, property(fails) if broken.endswith(("num_solutions", ".x")) else fails)
    with pytest.warns(UserWarning, match="solver failed.*cbclib.*made by rounding"):
        assert cut_heads(64, 8, seconds, launch, limits) == deal_heads(64, seconds, launch, limits)
    cut_heads.cache_clear()


def test_equal_members_and_even_cuts_need_no_solver(monkeypatch):
    monkeypatch.setattr("hexiseq.schedule.local.integer_program", None)
    assert cut_heads(32, 8, (1.0,) * 4, (0.1,) * 4, (32,) * 4) == (8,) * 4
    assert cut_heads(32, 8, (1.5,), (0.1,), (32,)) == (32,)
    assert share_tokens(11, (1.0,) * 4, (100,) * 4) == (3, 3, 3, 2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_slots_are_the_best_there_are_and_shares_respect_caps(seed):
    rng = random.Random(seed)
    widths, numbers = (1, 2, 1), [rng.choice((1, 2, 3)) for _ in range(3)]
    rates = np.array([rng.uniform(0.5, 4) for _ in widths])
    linear = [np.array([rng.uniform(0.5, 4) for _ in range(width)]) for width in widths]
    caps = [np.array([float(rng.choice((30, 60, 500))) for _ in range(width)]) for width in widths]
    merging = np.array([rng.uniform(0, 100) for _ in widths])
    classes = [GroupClass((9,) * width, float(rate), float(least), tuple(lin.tolist()), tuple(cap.tolist()))
               for width, rate, least, lin, cap in zip(widths, rates, merging, linear, caps, strict=True)]  # fmt: skip
    slot, total = 10, rng.choice((12, 20))
    least = 2 if total >= 2 * sum(numbers) else 1

    def finish(sums):
        slowest = []
        counts = [-(-n // number) for n, number in zip(sums, numbers, strict=True)]
        for n, lin, cap in zip(counts, linear, caps, strict=True):
            fine = (100 * cap).astype(int)  # a hundredth of a token is fine enough
            held = share_tokens(100 * n * slot, tuple(lin.tolist()), tuple(fine.tolist()))
            if held is None:
                return np.inf
            slowest.append(max(np.array(held) / 100 * lin))
        return max(slowest) + max(np.array(counts) * slot * rates + merging)

    few = [range(least * number, total + 1) for number in numbers]
    options = [(a, b, total - a - b) for a in few[0] for b in few[1] if total - a - b in few[2]]
    best = min(map(finish, options))
    found = best_slots(classes, numbers, total, slot)
    if np.isinf(best):
        assert found is None
        return
    assert sum(found) == total
    assert all(n >= least * number for n, number in zip(found, numbers, strict=True))
    assert finish(found) == pytest.approx(best, rel=1e-3)
    fractions = share(classes, numbers, total * slot)
    shares = fractions.tokens
    assert numbers @ shares == pytest.approx(total * slot)
    assert fractions.linear_seconds + max(shares * rates + merging) <= best * (1 + 1e-3)
    assert all(tokens <= cap.sum() * (1 + 1e-9) for tokens, cap in zip(shares, caps, strict=True))


@pytest.mark.parametrize(("rates", "expected"), [((1.0, 1.0, 1.0), [3, 3, 3]), ((1.0, 0.5, 0.25), [1, 3, 5])])
def test_heads_follow_attention_speed(rates, expected):
    job = Job(CPU_MIXED, CPU_MIXED.places, small_job())
    search = Search(job, Alike(np.arange(3)[None], 1), Options(None, None, math.inf))
    search.attention_in = lambda groups: np.array(rates)
    search.launch = np.zeros(3)
    found = search.cut_heads([0, 1, 2], 1000.0, np.full(3, 9))
    assert max(np.array(found) * rates) == max(np.array(expected) * rates)
    limited = search.cut_heads([0, 1, 2], 1000.0, np.array([9, 2, 2]))
    assert limited is not None
    assert limited[1] <= 2
    assert limited[2] <= 2
    assert search.cut_heads([0, 1, 2], 1000.0, np.array([2, 2, 2])) is None


def test_slots_exist_for_every_length():
    for seq_len in range(2, 400):
        for total in list(even_totals(seq_len, 1))[:20]:
            assert fits_slots(seq_len, 2 * -(-seq_len // (2 * total)), total)
        assert next(even_totals(seq_len, 1), None) is not None or seq_len < 4
    assert legal_widths(job(), 8) == [1, 2, 4, 8]
    assert legal_widths(small_job(), 3) == [1, 3]
    nodes = Nodes(mixed().places)
    seen = [*(nodes.grouping(chosen) for chosen in nodes.starts()), *nodes.across()]
    assert [[0, 1, 2, 3], [4, 5, 6, 7]] in seen
    assert [[i] for i in range(8)] in seen
    assert all(sorted(r for group in grouping for r in group) == list(range(8)) for grouping in seen)


def test_small_tiles_that_are_slow_make_groups_wider():
    """The search takes notice of curves: what it finds is faster by the cost model than the plan made without them."""
    curve = ((512, 0.2), (2048, 0.5), (8192, 1.0))
    flat, work = mixed(nic=200.0), job(dataclasses.replace(LLAMA, layers=8), 16384)
    nodes = tuple(
        dataclasses.replace(node, seats=(Seat(dataclasses.replace(node.seats[0].device, attention_curve=curve)),) * 4)
        for node in flat.nodes
    )
    curved = Cluster("curved", nodes)
    before, after = solve(flat, work, rivals=False), solve(curved, work, rivals=False)
    widths = [max(len(group.shards) for group in plan.replicas[0].groups) for plan in (before, after)]
    assert widths[0] < widths[1]
    assert after.predicted.step_seconds < 0.98 * cost.predict(before, curved, work).step_seconds
    assert before.predicted.step_seconds < after.predicted.step_seconds


def test_sixteen_devices_are_solved_fast():
    solve(mixed(8), job(seq_len=262144))
    start = time.process_time()
    plan = solve(mixed(8), job(seq_len=524288))
    assert time.process_time() - start < 2.0  # 0.4 s on an idle core
    assert plan.gap < 0.05


@pytest.mark.parametrize("slot", ["x", 2.0, True, 0, 3, -2, 1_000_000_000])
def test_slots_are_checked_at_once(slot):
    with pytest.raises(ValueError, match=r"strategy\.slot must be an even number .* 4096, .*got"):
        solve(CPU_MIXED, small_job(), slot=slot)


@pytest.mark.parametrize("policy", ["hexiseq", "ring", "usp"])
def test_what_would_fit_does_not_depend_on_the_request(policy):
    found = []
    for seq_len in (1_000_000, 5_000_000, 50_000_000):
        start = time.process_time()
        with pytest.raises(OutOfMemory, match="would fit") as caught:
            solve(mixed(), job(seq_len=seq_len), policy, rivals=False)
        assert time.process_time() - start < 2.0  # 0.7 s on an idle core
        found.append(caught.value.fits_seq_len)
    assert max(found) <= 1.02 * min(found)
    solve(mixed(), job(seq_len=min(found)), policy, rivals=False)
    with pytest.raises(OutOfMemory):
        solve(mixed(), job(seq_len=int(1.02 * max(found)) // 2 * 2), policy, rivals=False)


def test_recompute_is_no_remedy_where_nothing_fits():
    one = Cluster("one", (Node("n", (Seat(A100),), 1, 1, 1),))
    with pytest.raises(OutOfMemory, match="no sequence fits") as caught:
        solve(one, job(seq_len=4096), rivals=False)
    assert "recompute" not in str(caught.value)


def test_manual_plans_want_kernels_their_devices_run():
    for cluster, work, kernel in ((mixed(), job(seq_len=65536), "cpu"), (CPU_MIXED, small_job(), "torch_flash")):
        plan = solve(cluster, work, rivals=False, drop_devices=False)

        def manual(kernel, plan=plan):
            return dataclasses.replace(plan, devices=tuple(dataclasses.replace(d, kernel=kernel) for d in plan.devices))

        with pytest.raises(ValueError, match=f"wants kernel {kernel} for rank 0; its device, a .* can run .*dense"):
            solve(cluster, work, "manual", manual=manual(kernel), rivals=False)
        solve(cluster, work, "manual", manual=manual("dense"), rivals=False)

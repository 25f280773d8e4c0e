"""Attention over uneven plans against one process: results, gradients, checkpointing, failures."""

from __future__ import annotations

import dataclasses

import attention_cases as cases
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexiseq.cluster import Cluster, Device, Node, Place, Seat
from hexiseq.cost import attention_bytes, replica_cost
from hexiseq.plan import DTYPES, EXCHANGES, Plan, RankDevice
from hexiseq.testing import Pool, WorkerError, draw_mask, draw_plan
from hexiseq.workload import ModelShape, Workload

SEEDS = range(264)
HALF_TYPES = ("bfloat16", "float16")
# Uneven in every respect: heads cut inside a KV group, a rank without heads, a group of one, a short last half-slot.
MIXED = cases.simple_plan(
    [(3, [(17, 4), (12, 2)]), (1, [(10, 6)]), (2, [(20, 0), (0, 6)])], seq_len=59, heads=6, kv=2, slot=10
)
PAIR = cases.simple_plan([(2, [(8, 4)]), (1, [(4, 4)])], seq_len=12, heads=4, kv=2, slot=4)


def plan_of(seed: int) -> Plan:
    return draw_plan(seed, exchange=EXCHANGES[seed // 2 % 2])


def check_against_one_process(pools, seed: int) -> None:
    """One case: plan, exchange, batch, documents and window follow from the seed."""
    plan, batch = plan_of(seed), 1 + seed % 3
    mask = draw_mask(seed, plan.seq_len, batch)
    dtypes = ("float64", ("float32", "float32", *HALF_TYPES)[seed % 4])
    results = pools(plan.world_size).run(cases.errors, plan, dtypes, batch, 8, seed, mask)
    for rank, by_dtype in enumerate(results):
        for dtype, (errors, single) in by_dtype.items():
            for name, error, kernel_error in zip(cases.NAMES, errors, single, strict=True):
                # A kernel can be exact by luck on a few tokens; rounding its result costs half an eps at worst.
                half = 3 * max(kernel_error, torch.finfo(getattr(torch, dtype)).eps / 2)
                limit = {"float64": 1e-12, "float32": 2e-5}.get(dtype, half)
                assert error <= limit, f"{name} of rank {rank} in {dtype}, {mask}: {plan.to_dict()}"


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plan_equals_one_process(pools, seed):
    check_against_one_process(pools, seed)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(1000, 2**31))
def test_any_plan_equals_one_process(pools, seed):
    check_against_one_process(pools, seed)


def test_seeds_cover_what_plans_can_be():
    plans = [plan_of(seed) for seed in SEEDS]
    shards = [shard for plan in plans for shard in plan.shards()]
    assert {plan.world_size for plan in plans} == {1, 2, 3, 4, 5, 6}
    assert {plan.gqa_ratio for plan in plans} == {1, 2, 3, 8}
    assert {plan.fusion for plan in plans} == {1, 2, 3, 4}
    assert {len(g.shards) for p in plans for r in p.replicas for g in r.groups} == {1, 2, 3, 4}
    assert {0, 1} <= {shard.num_tokens for shard in shards}
    assert {0, 1} <= {shard.num_heads for shard in shards}
    assert any(len(plan.replicas) == 2 for plan in plans)
    assert any(plan.num_kv_heads < plan.world_size for plan in plans)
    assert any(plan.seq_len % plan.slot for plan in plans)
    assert any(len(replica.groups) >= 4 for plan in plans for replica in plan.replicas)
    cut = [
        s for p in plans for s in p.shards() if s.num_heads and (s.heads[0] % p.gqa_ratio or s.heads[1] % p.gqa_ratio)
    ]
    assert len(cut) > 20


def test_ranks_with_different_kernels(pools):
    devices = tuple(RankDevice("cpu", "here", ("cpu", "dense")[rank % 2]) for rank in range(5))
    for by_dtype in pools(5).run(cases.errors, dataclasses.replace(MIXED, devices=devices), ("float64",), 2, 8, 0, {}):
        assert max(by_dtype["float64"][0]) <= 1e-12


def test_result_repeats_bit_by_bit(pools):
    assert all(pools(5).run(cases.repeated, dataclasses.replace(MIXED, dtype="bfloat16"), 2, 8, 0))


@pytest.mark.parametrize("seed", range(100, 106))
def test_ranks_of_any_pace_stay_matched(pools, seed):
    plan = draw_plan(seed)
    for errors in pools(plan.world_size).run(cases.jittered, plan, seed):
        assert max(errors) <= 1e-12


def test_any_strides_and_scale(pools):
    for found in pools(5).run(cases.layouts, MIXED, 0.3):
        assert max(found.values()) <= 1e-13, found


def test_checkpointing_keeps_attention_or_runs_it_again(pools):
    plan = dataclasses.replace(MIXED, dtype="float32")
    for found in pools(5).run(cases.checkpointed, plan):
        assert found == {"none": (1, True), "selective": (1, True), "full": (2, True)}


def test_plans_side_by_side_share_process_groups(pools):
    recut = cases.simple_plan(
        [(2, [(2, 1), (17, 5)]), (3, [(30, 6)]), (1, [(10, 5), (0, 1)])], seq_len=59, heads=6, kv=2, slot=10
    )
    for rank, (worst, groups) in enumerate(pools(5).run(cases.interleaved, MIXED, recut)):
        assert worst <= 1e-12
        assert groups == (3 if rank == 2 else 4)  # replica, KV, dKV, and the own group unless alone


def test_transfers_are_under_way_before_the_kernel_that_hides_them(pools):
    """Groups of 4, 1 and 2 slots, fusion 2. The batches of all own ticks precede the own call, those of later ticks
    theirs; and slots are fused: group 0 calls for ticks 4-5 and 6, group 1 for each tick alone."""
    plan = cases.simple_plan([(4, [(16, 1)]), (1, [(4, 1)]), (2, [(8, 1)])], seq_len=28, heads=1, kv=1, slot=4)
    logs = pools(3).run(cases.order_of_work, plan)
    kernel = "kernel"
    batch = [("batch", t) for t in range(7)]
    # Group 0 has nothing to send after tick 4: slots 5 and 6 are home at its neighbour.
    assert logs[0] == [*batch[:4], (kernel, 16), batch[4], (kernel, 8), (kernel, 8)]
    inner, outer = (kernel, 2), (kernel, 4)
    order = [outer, inner, inner, *[outer] * 4]  # the own square, two inner slots, four outer ones
    assert [entry for entry in logs[1] if entry[0] == kernel] == order
    for t in range(6):
        later = logs[1][logs[1].index(batch[t]) :]
        assert later.count(inner) + later.count(outer) == 7 - t
    assert [size for what, size in logs[2] if what == kernel] == [8] * 6  # outer slots only, one by one


def test_operator_has_right_fake_outputs(pools):
    assert all(pools(5).run(cases.fake_shapes, MIXED))


def test_one_rank_alone():
    plan = cases.simple_plan([(3, [(11, 6)])], seq_len=11, heads=6, kv=2, slot=4)
    with Pool(1) as pool:
        assert pool.run(cases.alone, plan)[0] <= 1e-12


def test_closed_runtime_says_so_and_attention_makes_another(pools):
    for said in pools(2).run(cases.closed, PAIR):
        assert "has been closed" in said


def test_wrong_tensors_are_refused_before_communicating(pools):
    said = pools(2).run(cases.refused, PAIR)[0]
    assert "q has 9 tokens, the plan 8" in said["tokens"]
    assert "q has 3 heads, the plan 4" in said["q heads"]
    assert "k has 4 heads, the plan 2" in said["kv heads"]
    assert "v has 1 heads, the plan 2" in said["v heads"]
    assert "k is float32, the plan float64" in said["dtype"]
    assert "v has shape (2, 8, 2, 8), q (1, 8, 4, 8)" in said["batch"]
    assert "k has shape (1, 8, 2, 7), q (1, 8, 4, 8)" in said["dim"]
    assert "q has shape (8, 4, 8), needs [B, L, 4, D]" in said["rank"]
    assert "v is on meta, the plan's kernel 'cpu' needs cpu" in said["device"]
    assert "v must be a dense tensor, got NoneType" in said["no tensor"]
    assert "k must be a dense tensor, got torch.sparse_coo" in said["sparse"]
    assert "q has shape (1, 8, 4, 0), needs [B, L, 4, D]" in said["no dim"]
    assert "scale must be a positive number, got 0.0" in said["scale"]
    assert "documents must be a list of whole numbers for each sequence, such as [[0, 12]]" in said["documents"]
    assert "documents must be a list of whole numbers for each sequence, such as [[0, 12]]" in said["fraction"]


def test_different_plans_are_refused_by_all(pools):
    other = dataclasses.replace(PAIR, recompute="full")
    for said in pools(2).run(cases.runtime_error, [PAIR, other]):
        assert "ranks [1] run another plan than rank 0" in said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("batch", "batch is 1 on rank 0, 2 on rank 4"),
        ("scale", "scale is 0.3535533905932738 on rank 0, 0.5 on rank 4"),
        ("window", "window is 0 on rank 0, 3 on rank 4"),
        ("causal", "causal is 1 on rank 0, 0 on rank 4"),
        ("documents", "documents_checksum is "),
    ],
)
def test_ranks_that_call_differently_find_out_before_they_communicate(pools, what, said):
    for told in pools(5).run(cases.disagreement, MIXED, what):
        assert told.startswith("ranks call attend differently: " + said)


def test_ranks_out_of_step_find_out(pools):
    first, last = pools(2).run(cases.out_of_step, PAIR)
    assert first[0].startswith("ranks call attend differently: number is 1 on rank 0, 2 on rank 1")
    assert first[1].startswith("ranks call attend differently: number is 2 on rank 0, 1 on rank 1")
    assert last[2].startswith("rank 1: q is float32, the plan float64")
    assert first[2].startswith("ranks call attend differently: number is 3 on rank 0, 4 on rank 1")
    assert last[3] == first[2]


def test_ranks_with_different_known_plans_find_out(pools):
    for other in (dataclasses.replace(PAIR, exchange="allgather"), dataclasses.replace(PAIR, fusion=3)):
        for said in pools(2).run(cases.other_plan, PAIR, other):
            assert said.startswith("ranks call attend differently: plan is ")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_inference_and_second_derivatives(pools, exchange):
    assert max(pools(5).run(cases.modes, dataclasses.replace(MIXED, exchange=exchange))) <= 1e-12


def test_no_call_follows_a_failed_one():
    with Pool(2) as pool:
        for first, second in pool.run(cases.fails_within, PAIR):
            assert first == "MemoryError: none left"
            assert second == (
                "RuntimeError: an earlier attention call of this plan failed; restart the job. It said: " + first
            )


@pytest.mark.parametrize("seed", range(40))
def test_bytes_sent_are_those_of_the_cost_model(pools, seed):
    batch, dim = 1 + seed % 2, 8
    plan = plan_of(seed)
    plan = dataclasses.replace(plan, dtype=("bfloat16", "float32", "float64")[seed % 3], replicas=tuple(
        dataclasses.replace(replica, sequences=batch) for replica in plan.replicas))  # fmt: skip
    sent = np.array(pools(plan.world_size).run(cases.bytes_sent, plan, batch, dim))
    forward, backward = np.zeros((2, plan.world_size, plan.world_size))
    places, workload = places_and_workload(plan, dim)
    for replica in plan.replicas:
        cost = replica_cost(plan, replica, workload, places)
        (heads_in, heads_out, grads_in, grads_out), kv = cost.exchange.matrix(), cost.kv.matrix()[0]
        forward[np.ix_(cost.ranks, cost.ranks)] += heads_in + heads_out + kv
        backward[np.ix_(cost.ranks, cost.ranks)] += grads_in + grads_out + kv + cost.dkv.matrix()[0]
    assert (sent[:, 0] == forward).all()
    assert (sent[:, 1] == backward).all()


def places_and_workload(plan: Plan, dim: int) -> tuple[tuple[Place, ...], Workload]:
    device = Device(
        type="cpu", vendor="cpu", peak_tflops=1, gemm_tflops=1, attention_forward_tflops=1,
        attention_backward_tflops=1, memory_gb=1, hbm_gb_per_s=1, overhead_gb=0, launch_us=1,
        dtypes=("bfloat16", "float32", "float64"), kernel="cpu", source="test",
    )  # fmt: skip
    cluster = Cluster("test", (Node("here", (Seat(device),) * plan.world_size, 1.0, 1, 1.0),))
    model = ModelShape("m", 1, 64, 96, plan.num_heads, plan.num_kv_heads, dim, 300)
    return cluster.places, Workload(model, plan.seq_len, plan.dtype, plan.recompute, plan.sequences, 1, False)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_collectives_of_a_call_are_as_few_as_designed(pools, exchange):
    """Two all-to-alls a pass inside a group; across groups a batch per tick that has messages, or one all-gather."""
    compared = {"all_gather_single": 1}  # ranks on CPUs compare their calls and their backward passes first
    alone = cases.simple_plan([(4, [(20, 3), (12, 1)])], 32, 4, 4, 8, dtype="float32", exchange=exchange)
    assert pools(2).run(cases.collectives, alone) == [[{**compared, "all_to_all_single": 2}] * 2] * 2
    across = cases.simple_plan([(3, [(24, 4)]), (2, [(16, 4)])], 40, 4, 4, 8, dtype="float32", exchange=exchange)
    found = pools(2).run(cases.collectives, across)
    if exchange == "allgather":
        assert found == [[{**compared, "all_to_all_single": 1}, {**compared, "all_to_all_single": 2}]] * 2
    else:
        # KV leaves at ticks 0 to 2 of the one and 0 and 1 of the other, dKV at ticks 3 and 4, and 2 to 4.
        assert found == [[{**compared, "batch_isend_irecv": 3}, {**compared, "batch_isend_irecv": 3 + 3}]] * 2
    both = cases.simple_plan([(3, [(12, 3), (12, 1)]), (2, [(16, 4)])], 40, 4, 4, 8, dtype="float32", exchange=exchange)
    outer, _, inner = pools(3).run(cases.collectives, both)
    assert outer[0]["all_to_all_single"] - inner[0].get("all_to_all_single", 0) == 2
    assert outer[1]["all_to_all_single"] - inner[1].get("all_to_all_single", 0) == 2


def test_nothing_is_copied_but_messages():
    """Ring of groups of one in fp32: own KV into its messages, and in backward each block's dKV into its sums."""
    dim = 24
    plan = cases.simple_plan([(4, [(32, 4)]), (4, [(32, 4)])], 64, 4, 2, 8, dtype="float32")
    with Pool(2) as pool:
        outer, inner = pool.run(cases.copied, plan, 1, dim)
    token = 2 * 2 * dim * 4  # bytes of K and V of a token
    # The inner group needs the outer one's front halves, the outer one all of the inner's slots.
    assert outer == [16 * token, (16 + 32) * token]
    assert inner == [32 * token, (32 + 16) * token]


def test_all_to_all_copies_into_messages_and_out_of_them():
    dim = 16
    plan = cases.simple_plan([(2, [(20, 3), (12, 1)])], 32, 4, 4, 16, dtype="float32")
    with Pool(2) as pool:
        found = pool.run(cases.copied, plan, 1, dim)
    for (forward, backward), tokens, heads in zip(found, (20, 12), (3, 1), strict=True):
        unit = dim * 4
        # q, k, v into the message; the kernel's result into out; out to where it belongs.
        assert forward == (tokens * 12 + 32 * heads + tokens * 4) * unit
        # q, k, v, out, dout into the message; dq, dk, dv of the kernel into theirs, and to where they belong.
        assert backward == (tokens * 20 + 3 * 32 * heads + tokens * 12) * unit


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_memory_does_not_grow_over_calls(pools, exchange):
    plan = dataclasses.replace(PAIR, exchange=exchange)
    for growth, before, after in pools(2).run(cases.memory_over_calls, plan, 50, 200, timeout=300):
        assert before == after > 0
        assert growth < 3e6


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_surrounding_layer_compiles(pools, exchange):
    assert max(pools(5).run(cases.compiled, dataclasses.replace(MIXED, exchange=exchange), timeout=180)) <= 1e-12


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a kernel that cannot run here")
def test_unusable_kernel_is_named_by_all(pools):
    devices = (PAIR.devices[0], RankDevice("V100", "node1", "torch_efficient"))
    first, second = pools(2).run(cases.runtime_error, [dataclasses.replace(PAIR, devices=devices)] * 2)
    assert "rank 1 cannot run its kernel 'torch_efficient'" in first
    assert "rank 1 (V100 on node1): kernel 'torch_efficient' cannot run here: it needs a CUDA device" in second


@pytest.mark.parametrize("backward", [False, True])
def test_dead_peer_is_named(backward):
    with Pool(2) as pool, pytest.raises(WorkerError) as caught:
        pool.run(cases.peer_fails, PAIR, 1, "dies", backward)
    text = str(caught.value)
    assert "rank 1 died: signal SIGKILL" in text
    assert f"rank 0 (cpu on node0): {'KV ' if backward else 'comparing calls'}" in text
    assert "with rank 1 (cpu on node1) failed or took longer than 2 s (missing: rank 1 (cpu on node1))" in text


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_silent_peer_is_named_after_the_timeout(exchange):
    with Pool(2) as pool:
        said = pool.run(cases.peer_fails, dataclasses.replace(PAIR, exchange=exchange), 1, "sleeps", True)
    what = "KV slot 2 at tick 0" if exchange == "ring" else "KV all-gather"
    assert said[0].startswith(f"rank 0 (cpu on node0): {what} with rank 1 (cpu on node1)")
    assert said[1] == "slept"


def test_silent_group_member_is_named_after_the_timeout():
    plan = cases.simple_plan([(1, [(4, 2), (4, 2)])], seq_len=8, heads=4, kv=2, slot=8)
    with Pool(2) as pool:
        said = pool.run(cases.peer_fails, plan, 1, "sleeps", True)
    assert said[0].startswith("rank 0 (cpu on node0): all-to-all with rank 1 (cpu on node1)")


def test_who_is_missing_is_told_from_who_waits():
    """Rank 0 waits for rank 1, which waits for rank 2, which is silent."""
    plan = cases.simple_plan([(2, [(8, 1)])] * 4, seq_len=32, heads=1, kv=1, slot=4)
    with Pool(4) as pool:
        said = pool.run(cases.peer_fails, plan, 2, "sleeps", True)
    for rank in (0, 1, 3):
        assert "(missing: rank 2 (cpu on node2))" in said[rank]


def test_pool_names_who_raised_or_hung_and_starts_afresh():
    with Pool(2) as pool:
        with pytest.raises(WorkerError, match=r"(?s)^rank 1 raised:.*KeyError: 'a mistake'"):
            pool.run(cases.raise_on, 1)
        assert pool.run(cases.raise_on, 5) == [0, 1]
        with pytest.raises(WorkerError, match=r"^rank 0 hung: no answer within 1 s"):
            pool.run(cases.hang_on, 0, timeout=1)


# Slots of 32 to 512 tokens; groups of one, of two with uneven heads, and both; MHA and GQA.
MEMORY_PLANS = {
    "ring": ([(8, [(512, 8)]), (8, [(512, 8)])], 1024, 8, 4, 64, {}),
    "ring in 16 bits": ([(8, [(512, 8)]), (8, [(512, 8)])], 1024, 8, 8, 64, {"dtype": "bfloat16"}),
    "uneven slots": ([(16, [(512, 8)]), (10, [(320, 8)]), (6, [(192, 8)])], 1024, 8, 2, 32, {"fusion": 4}),
    "large slots": ([(2, [(1024, 4)]), (1, [(512, 4)]), (1, [(512, 4)])], 2048, 4, 2, 512, {"fusion": 1}),
    "one group": ([(16, [(700, 6), (324, 2)])], 1024, 8, 8, 64, {}),
    "one group in 16 bits": ([(16, [(700, 6), (324, 2)])], 1024, 8, 8, 64, {"dtype": "bfloat16"}),
    "mixed": ([(8, [(400, 6), (112, 2)]), (8, [(512, 8)])], 1024, 8, 8, 64, {"fusion": 3}),
    "gathered": ([(16, [(512, 8)]), (8, [(256, 8)]), (8, [(256, 8)])], 1024, 8, 2, 32, {"exchange": "allgather"}),
    "mixed, gathered": ([(8, [(400, 6), (112, 2)]), (8, [(512, 8)])], 1024, 8, 8, 64,
                        {"exchange": "allgather", "dtype": "bfloat16"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY_PLANS)
def test_memory_is_what_the_cost_model_says(pools, name):
    dim, (groups, seq_len, heads, kv, slot, options) = 128, MEMORY_PLANS[name]
    plan = cases.simple_plan(groups, seq_len, heads, kv, slot, **{"dtype": "float32", **options})
    measured = pools(plan.world_size).run(cases.peak_bytes, plan, 1, dim)
    expected = attention_bytes(plan, places_and_workload(plan, dim)[1])
    for rank, shard in enumerate(plan.shards()):
        group = plan.replicas[0].groups[plan.place(rank)[1]]
        token = shard.num_tokens * dim * DTYPES[plan.dtype]
        results = (token * heads + group.num_tokens * shard.num_heads * 4, token * (heads + 2 * kv))
        for what, found, result, model in zip(("forward", "backward"), measured[rank], results, expected, strict=True):
            assert found - result == pytest.approx(model[rank], rel=0.1), f"{what} of rank {rank}"

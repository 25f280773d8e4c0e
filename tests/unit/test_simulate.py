"""The ring's event simulation: its messages and blocks are the runtime's, and its times those known by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from hexiseq.attention.layout import routes
from hexiseq.attention.tiles import Mask
from hexiseq.plan import Plan, RankDevice, group_intervals, make_replica
from hexiseq.simulate import SEND_LAG, RingTimes, ring_blocks, ring_messages, simulate_ring
from hexiseq.testing import draw_plan


def plan_of(slots: list[int], fusion: int = 1, slot: int = 8, missing: int = 0) -> Plan:
    """Groups of one rank with these slots; `missing` tokens of the last half-slot."""
    seq_len = sum(slots) * slot - missing
    counts = [(n, [(rank, n * slot - (0 if rank else missing), 2)]) for rank, n in enumerate(slots)]
    return Plan(
        policy="manual", seq_len=seq_len, num_heads=2, num_kv_heads=1, slot=slot, fusion=fusion, exchange="ring",
        recompute="none", dtype="float32", replicas=(make_replica(seq_len, slot, counts),),
        devices=tuple(RankDevice("cpu", "here", "cpu") for _ in slots),
    )  # fmt: skip


def has_all_backs(plan: Plan) -> bool:
    """Whether every group has a back interval: one without attends to no inner slot, and some are not sent to it."""
    return all(
        back[1] > back[0]
        for replica in plan.replicas
        for _, back in group_intervals(plan.seq_len, plan.slot, [group.slots for group in replica.groups])
    )


def constant_rate(slots: list[int], transfer: float, backward: bool = False) -> RingTimes:
    """A tick of 1 s on every rank, a slot's transfer of `transfer` s on every link."""
    edges = {(s, r): transfer for s in range(len(slots)) for r in range(len(slots)) if s != r}
    return RingTimes([float(n) for n in slots], [1.0] * len(slots), edges, edges if backward else None)


def test_send_lag_is_the_runtimes() -> None:
    from hexiseq.attention import layout

    assert SEND_LAG == layout.SEND_LAG


@pytest.mark.parametrize("causal", [True, False])
def test_messages_and_blocks_are_the_runtimes(causal: bool) -> None:
    checked = 0
    for seed in range(60):
        plan = draw_plan(seed)
        if not has_all_backs(plan):
            continue
        checked += 1
        made = routes(plan, Mask(causal=causal))
        for rank, route in enumerate(made):
            assert [list(block) for block in ring_blocks(plan, rank, causal=causal)] == [
                list(block.ticks) for block in route.blocks
            ], (seed, rank)
        messages = ring_messages(plan, causal=causal, backward=True)
        for kind in ("kv", "dkv"):
            expected = Counter(
                (m.tick, m.source, m.rows[1] - m.rows[0], m.sender, m.receiver)
                for route in made for batch in getattr(route, kind).sends for m in batch
            )  # fmt: skip
            found = Counter((m.tick, m.slot, m.rows, m.sender, m.receiver) for m in messages if m.kind == kind)
            assert found == expected, (seed, kind)
    assert checked > 40


def test_one_rank_is_its_own_call() -> None:
    result = simulate_ring(plan_of([4]), RingTimes([2.5], [1.0], {}, None))
    (rank,) = result.ranks
    assert [(b.first, b.ticks, b.start, b.end) for b in rank.blocks] == [(0, 4, 0.0, 2.5)]
    assert (result.seconds, rank.busy_seconds, rank.stall_seconds) == (2.5, 2.5, 0.0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fusion", [1, 3])
def test_equal_ranks_without_transfer_time_are_the_sum_of_their_calls(fusion: int, backward: bool) -> None:
    result = simulate_ring(plan_of([4, 4], fusion), constant_rate([4, 4], 0.0, backward))
    for rank in result.ranks:
        assert (rank.finished, rank.stall_seconds) == (8.0, 0.0)
        assert [b.first for b in rank.blocks] == ([0, 4, 5, 6, 7] if fusion == 1 else [0, 4, 7])


def test_two_ranks_by_hand() -> None:
    # One slot each. Rank 1 sends its whole slot (3 s), rank 0 the front half of its own (1.5 s); both post at 0. Rank 0
    # is done with its own call at 1 and waits until 3; rank 1 waits from 1 to 1.5.
    edges = {(1, 0): 3.0, (0, 1): 3.0}
    result = simulate_ring(plan_of([1, 1]), RingTimes([1.0, 1.0], [2.0, 2.0], edges, None))
    first, second = result.ranks
    assert [(b.start, b.end) for b in first.blocks] == [(0.0, 1.0), (3.0, 5.0)]
    assert [(b.start, b.end) for b in second.blocks] == [(0.0, 1.0), (1.5, 3.5)]
    assert (first.stall_seconds, second.stall_seconds) == (2.0, 0.5)
    assert result.seconds == 5.0


def test_gradients_come_home() -> None:
    # As above, then the gradients: rank 0 sends that of rank 1's slot at 5, home at 5 + 4; rank 1 that of a front half.
    edges, gradients = {(1, 0): 3.0, (0, 1): 3.0}, {(1, 0): 4.0, (0, 1): 4.0}
    result = simulate_ring(plan_of([1, 1]), RingTimes([1.0, 1.0], [2.0, 2.0], edges, gradients))
    assert [rank.finished for rank in result.ranks] == [9.0, 9.0]
    assert result.ranks[0].blocks[-1].end == 5.0


def test_a_link_carries_one_transfer_at_a_time() -> None:
    # Rank 1's two slots are posted together and arrive one after the other.
    plan = plan_of([2, 2])
    times = RingTimes([0.0, 0.0], [0.0, 0.0], {(1, 0): 5.0, (0, 1): 0.0}, None)
    starts = [b.start for b in simulate_ring(plan, times).ranks[0].blocks]
    assert starts == [0.0, 5.0, 10.0]


def test_a_short_slot_takes_less() -> None:
    plan, times = plan_of([1, 1], missing=3), RingTimes([0.0, 0.0], [0.0, 0.0], {(1, 0): 8.0, (0, 1): 8.0}, None)
    whole = simulate_ring(plan, times, causal=False)
    assert whole.ranks[1].finished == 8.0  # waits for its own send
    assert whole.ranks[1].blocks[-1].start == 5.0  # 5 of 8 tokens are there


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("slots", [[3, 3, 1, 1], [6, 6, 2, 2, 1, 1, 3, 3]])
def test_constant_rate_ring_hides_transfers_of_nearly_a_tick(slots: list[int], backward: bool) -> None:
    ideal = float(sum(slots))
    forward = simulate_ring(plan_of(slots), constant_rate(slots, 0.9))
    assert ideal <= forward.seconds <= 1.03 * ideal
    if backward:  # KV and gradients share each link, and the last gradient has to come home
        both = simulate_ring(plan_of(slots), constant_rate(slots, 0.45, backward=True))
        assert ideal <= both.seconds <= 1.10 * ideal


@pytest.mark.parametrize("slots", [[4, 4], [3, 3, 1, 1], [6, 6, 2, 2, 1, 1, 3, 3]])
def test_a_receive_window_of_one_slot_is_slower(slots: list[int]) -> None:
    # The transfers of a link with half and whole slots take less than a tick on average, a whole slot's takes more:
    # posted early, they even out.
    plan, times = plan_of(slots), constant_rate(slots, 1.2)
    assert simulate_ring(plan, times, window=1).seconds > 1.03 * simulate_ring(plan, times).seconds


def test_a_fused_call_needs_a_window_as_wide() -> None:
    with pytest.raises(ValueError, match="a receive window of 1 slots is too small"):
        simulate_ring(plan_of([4, 4], fusion=3), constant_rate([4, 4], 0.5), window=1)
    assert simulate_ring(plan_of([4, 4], fusion=3), constant_rate([4, 4], 0.5), window=3).seconds >= 8.0


def test_fusion_waits_for_all_its_slots() -> None:
    times = constant_rate([4, 4], 1.5)
    one, fused = (simulate_ring(plan_of([4, 4], fusion), times).ranks[0].blocks for fusion in (1, 3))
    assert one[1].start < fused[1].start
    assert fused[1].start >= fused[0].start + 3 * 0.75  # three front halves at least


def test_mixed_groups_and_repeatable() -> None:
    for seed in range(20):
        plan = draw_plan(seed)
        edges = {(s, r): 0.3 for s in range(plan.world_size) for r in range(plan.world_size)}
        times = RingTimes([1.0] * plan.world_size, [0.5] * plan.world_size, edges, edges)
        first, second = simulate_ring(plan, times), simulate_ring(plan, times)
        assert first == second
        for rank, span in enumerate(first.ranks):
            assert len(span.blocks) == len(ring_blocks(plan, rank))
            ends = [0.0, *(b.end for b in span.blocks)]
            assert all(b.start >= end for b, end in zip(span.blocks, ends, strict=False))


def test_refusals() -> None:
    plan, times = plan_of([2, 2]), constant_rate([2, 2], 0.1)
    with pytest.raises(ValueError, match="own_seconds has 1 values, the plan 2 ranks"):
        simulate_ring(plan, dataclasses.replace(times, own_seconds=[1.0]))
    with pytest.raises(ValueError, match=r"tick_seconds must not be negative, got -1\.0 for rank 1"):
        simulate_ring(plan, dataclasses.replace(times, tick_seconds=[1.0, -1.0]))
    with pytest.raises(ValueError, match="kv_seconds lacks the link from rank 1 to rank 0"):
        simulate_ring(plan, dataclasses.replace(times, kv_seconds={(0, 1): 1.0}))
    with pytest.raises(ValueError, match="at least 1 slot"):
        simulate_ring(plan, times, window=0)
    with pytest.raises(ValueError, match="exchange allgather"):
        simulate_ring(dataclasses.replace(plan, exchange="allgather"), times)

"""Routes of whole plans, checked without starting a process."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

import numpy as np
import pytest

from hexiseq.attention.layout import INNER, OUTER, OWN, SEND_LAG, Route, fragments, fusion_width, route, routes
from hexiseq.plan import Plan, RankDevice, kv_heads, make_replica
from hexiseq.testing import draw_plan

CASES = [(seed, causal) for seed in range(60) for causal in (True, False)]


def ring_plan(slots: list[int], slot: int = 4, short: int = 0, fusion: int = 1) -> Plan:
    """Groups of one rank, one head."""
    seq_len = sum(slots) * slot - short
    tokens = [n * slot - (short if g == 0 else 0) for g, n in enumerate(slots)]
    groups = [(n, [(g, tokens[g], 1)]) for g, n in enumerate(slots)]
    return Plan(
        policy="manual", seq_len=seq_len, num_heads=1, num_kv_heads=1, slot=slot, fusion=fusion, exchange="ring",
        recompute="none", dtype="float32", replicas=(make_replica(seq_len, slot, groups),),
        devices=(RankDevice("cpu", "here", "cpu"),) * len(slots),
    )  # fmt: skip


def slot_rows(plan: Plan, slot: int) -> int:
    """Rows of a slot of the first replica."""
    return plan.slot - (plan.replicas[0].slots * plan.slot - plan.seq_len if slot == 0 else 0)


def owner(plan: Plan, rank: int, slot: int) -> int:
    replica = plan.replicas[plan.place(rank)[0]]
    return int(np.searchsorted(np.cumsum([g.slots for g in replica.groups]), slot, side="right"))


def attended_rows(plan: Plan, rank: int, slot: int, causal: bool) -> int:
    """Rows of a foreign slot that some query of the rank's group attends to, from the definition of the layout."""
    outer = owner(plan, rank, slot) < plan.place(rank)[1]
    return plan.slot // 2 if causal and outer else slot_rows(plan, slot)


@pytest.mark.parametrize(("seed", "causal"), CASES)
def test_every_send_has_one_receive_in_the_same_batch(seed, causal):
    made = routes(draw_plan(seed), causal)
    for kind in ("kv", "dkv"):
        for t in range(made[0].total):
            sends = [m for r in made for m in getattr(r, kind).sends[t]]
            receives = [m for r in made for m in getattr(r, kind).receives[t]]
            assert Counter(sends) == Counter(receives)
            assert all(count == 1 for count in Counter(sends).values())
            assert all(m.size > 0 and m.sender != m.receiver and m.tick == t for m in sends)
        for r in made:
            assert all(m.sender == r.rank for batch in getattr(r, kind).sends for m in batch)
            assert all(m.receiver == r.rank for batch in getattr(r, kind).receives for m in batch)


@pytest.mark.parametrize(("seed", "causal"), CASES)
def test_every_rank_gets_the_kv_it_attends_to_once_and_in_time(seed, causal):
    plan = draw_plan(seed)
    made = routes(plan, causal)
    for r in made:
        k0, k1 = r.me.kv
        got = {}
        for t, batch in enumerate(r.kv.receives):
            for m in batch:
                # Batch t is needed n_g ticks later, which is the tick of its slot.
                assert (r.off + t + r.slots) % r.total == m.slot
                seen = got.setdefault(m.slot, np.zeros((plan.slot, plan.num_kv_heads), int))
                seen[slice(*m.rows), slice(*m.heads)] += 1
        foreign = [s for s in range(r.total) if not r.off <= s < r.off + r.slots] if k1 > k0 else []
        assert sorted(got) == foreign
        for slot, seen in got.items():
            expected = np.zeros_like(seen)
            expected[: attended_rows(plan, r.rank, slot, causal), k0:k1] = 1
            assert (seen == expected).all()


@pytest.mark.parametrize(("seed", "causal"), CASES)
def test_ranks_only_send_what_they_hold(seed, causal):
    plan = draw_plan(seed)
    for r in routes(plan, causal):
        for kind in (r.kv, r.dkv):
            for t, batch in enumerate(kind.sends):
                slot = (r.off + t) % r.total
                own = t < r.slots
                held = slot_rows(plan, slot) if own else attended_rows(plan, r.rank, slot, causal)
                for m in batch:
                    assert m.slot == slot
                    assert m.rows[1] <= held
                    assert r.me.kv[0] <= m.heads[0] < m.heads[1] <= r.me.kv[1]


@pytest.mark.parametrize(("seed", "causal"), CASES)
def test_every_gradient_partial_comes_home_once(seed, causal):
    """Follow how often each rank's own part is contained in every sum, row by row and head by head."""
    plan = draw_plan(seed)
    made = routes(plan, causal)
    shape = (plan.slot, plan.num_kv_heads, plan.world_size)
    home = {(r.rank, s): np.zeros(shape, int) for r in made for s in range(r.off, r.off + r.slots)}
    arrived: dict[tuple[int, int], np.ndarray] = {}
    for t in range(made[0].total):
        for r in made:
            slot = (r.off + t) % r.total
            if t < r.slots:
                assert not r.dkv.sends[t]
                continue
            total = arrived.pop((r.rank, slot), np.zeros(shape, int))
            total[: attended_rows(plan, r.rank, slot, causal), slice(*r.me.kv), r.rank] += 1
            for m in r.dkv.sends[t]:
                peer = made[m.receiver]
                part = np.zeros(shape, int)
                part[slice(*m.rows), slice(*m.heads)] = total[slice(*m.rows), slice(*m.heads)]
                total[slice(*m.rows), slice(*m.heads)] = 0
                own = peer.off <= slot < peer.off + peer.slots
                if own:
                    home[peer.rank, slot] += part
                else:
                    # Batch t of a neighbour is added n_g ticks later, to the slot that is worked on then.
                    assert (peer.off + t + peer.slots) % peer.total == slot
                    key = (peer.rank, slot)
                    arrived[key] = arrived.get(key, np.zeros(shape, int)) + part
            assert not total.any(), "a partial sum stays behind"
    assert not arrived
    for replica in plan.replicas:
        ranks = set(replica.ranks)
        first = 0
        for group in replica.groups:
            for slot in range(first, first + group.slots):
                found = sum(home[rank, slot] for rank in group.ranks)
                for rank in range(plan.world_size):
                    expected = np.zeros(shape[:2], int)
                    if rank in ranks and rank not in group.ranks:
                        rows = attended_rows(plan, rank, slot, causal)
                        expected[:rows, slice(*kv_heads(plan.shard(rank).heads, plan.gqa_ratio))] = 1
                    assert (found[:, :, rank] == expected).all()
                for rank in group.ranks:  # what reaches a member, it holds
                    k0, k1 = made[rank].me.kv
                    assert not home[rank, slot][:, :k0].any()
                    assert not home[rank, slot][:, k1:].any()
            first += group.slots


@pytest.mark.parametrize(("seed", "causal"), CASES)
def test_blocks_walk_all_slots_and_stay_on_one_side(seed, causal):
    plan = draw_plan(seed)
    for r in routes(plan, causal):
        if r.me.heads[0] == r.me.heads[1]:
            assert not r.blocks
            continue
        assert [t for block in r.blocks for t in block.ticks] == list(range(r.total))
        assert [s for block in r.blocks for s in block.slots] == [(r.off + t) % r.total for t in range(r.total)]
        assert r.blocks[0].side == OWN
        assert len(r.blocks[0].slots) == r.slots
        for block in r.blocks[1:]:
            assert len(block.slots) <= max(1, min(plan.fusion, r.slots - 1))
            rows = [attended_rows(plan, r.rank, slot, causal) for slot in block.slots]
            assert np.diff(block.starts).tolist() == rows
            if causal:
                assert {OUTER if slot < r.off else INNER for slot in block.slots} == {block.side}


def run_events(made: list[Route]) -> list[int]:
    """Play forward and backward of all ranks with rendezvous transfers; ranks that are left unfinished.

    A batch is posted without waiting, as in `exchange`. A transfer is done when both sides have posted.
    """
    posted: set = set()

    def program(r: Route):
        for block in r.blocks:
            if block.side != OWN:
                for t in block.ticks:
                    yield [("kv", "send", m) for m in r.kv.receives[t - r.slots]]
            for t in block.ticks:
                posted.update(("kv", "send", m) for m in r.kv.sends[t])
                posted.update(("kv", "receive", m) for m in r.kv.receives[t])
            yield [("kv", "receive", m) for t in range(max(0, block.first - SEND_LAG + 1)) for m in r.kv.sends[t]]
            for t in block.ticks:
                if block.side != OWN:
                    slot = (r.off + t) % r.total
                    yield [("dkv", "send", m) for m in r.dkv.receives[t - r.slots] if m.slot == slot]
                posted.update(("dkv", "send", m) for m in r.dkv.sends[t])
                posted.update(("dkv", "receive", m) for m in r.dkv.receives[t])
            yield [("dkv", "receive", m) for t in range(max(0, block.first - SEND_LAG + 1)) for m in r.dkv.sends[t]]
        yield [("kv", "receive", m) for batch in r.kv.sends for m in batch]
        yield [("dkv", "send", m) for batch in r.dkv.receives for m in batch]
        yield [("dkv", "receive", m) for batch in r.dkv.sends for m in batch]

    running = {r.rank: (program(r), deque()) for r in made}
    moved = True
    while moved and running:
        moved = False
        for rank, (steps, waiting) in list(running.items()):
            while True:
                while waiting and waiting[0] in posted:
                    waiting.popleft()
                    moved = True
                if waiting:
                    break
                try:
                    waiting.extend(next(steps))
                    moved = True
                except StopIteration:
                    del running[rank]
                    break
    return sorted(running)


@pytest.mark.parametrize(("seed", "causal"), CASES)
def test_no_deadlock_whatever_the_groups(seed, causal):
    assert run_events(routes(dataclasses.replace(draw_plan(seed), fusion=8), causal)) == []


@pytest.mark.parametrize("slots", [[1, 1], [8, 1], [1, 8], [1] * 9, [9, 1, 1, 1], [1, 1, 1, 9], [3, 7, 2, 5, 1]])
def test_no_deadlock_with_extreme_groups(slots):
    assert run_events(routes(ring_plan(slots, fusion=4))) == []


def test_event_model_finds_a_deadlock(monkeypatch):
    """Calls as wide as the window and one more wait for a slot that is only sent after them: caught twice over."""
    monkeypatch.setattr("hexiseq.attention.layout.fusion_width", lambda fusion, slots: slots + 1)
    plan = ring_plan([2, 2, 2])
    with pytest.raises(AssertionError, match="waits for a later send"):
        route(plan, 0, causal=False)
    monkeypatch.setattr("hexiseq.attention.layout._check_progress", lambda ring, group: None)
    assert run_events(routes(plan, causal=False)) == [0, 1, 2]


def test_only_front_halves_pass_the_wrap():
    """Groups of 3, 1 and 2 slots of 4 tokens. Rows received by each group, from the rule in the design."""
    made = routes(ring_plan([3, 1, 2]))

    def rows(kind: str, rank: int, peer: int) -> int:
        return sum(m.size for batch in getattr(made[rank], kind).receives for m in batch if m.sender == peer)

    assert rows("kv", 0, 1) == 4 * 3  # all foreign slots, inner: whole
    assert rows("kv", 1, 2) == 4 * 2 + 2 * 3  # two inner slots whole, three outer ones half
    assert rows("kv", 2, 0) == 2 * 4  # four outer slots, half
    assert rows("dkv", 2, 0) == 2 * 1 + 4 * 2  # half of group 1's slot travels on; its own two come home whole
    assert rows("dkv", 1, 0) == 2 * 1  # the back half of group 1's slot, straight home
    assert rows("dkv", 1, 2) == 2 * 1 + 2 * 3  # the front half comes home; three outer slots pass
    assert rows("dkv", 0, 1) == 4 * 2 + 2 * 3  # two inner slots pass whole; three front halves come home
    full = routes(ring_plan([3, 1, 2]), causal=False)
    assert sum(m.size for r in full for batch in r.kv.sends for m in batch) == 4 * (3 + 5 + 4)


def test_short_outermost_half_slot():
    plan = ring_plan([2, 1], slot=4, short=1)
    r = route(plan, 0)
    assert (r.rows, r.front) == (7, 4)
    assert r.own_rows(0) == ((0, 2), (6, 7))
    assert r.own_rows(1) == ((2, 4), (4, 6))
    gone = route(ring_plan([1, 1], slot=4, short=2), 0)
    assert gone.own_rows(0) == ((0, 2), (2, 2))
    whole = routes(plan, causal=False)[1]
    assert [m.rows for batch in whole.kv.receives for m in batch] == [(0, 3), (0, 4)]


@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
def test_fragments_are_whole_ratios_of_the_right_heads(ratio):
    for h0 in range(4 * ratio + 1):
        for h1 in range(h0, 4 * ratio + 1):
            made, k0 = fragments((h0, h1), ratio), kv_heads((h0, h1), ratio)[0]
            assert len(made) <= 3
            pairs = []
            for f in made:
                n, count = f.q.stop - f.q.start, f.kv.stop - f.kv.start
                assert n % count == 0
                pairs += [(h0 + f.q.start + i, k0 + f.kv.start + i // (n // count)) for i in range(n)]
            assert pairs == [(h, h // ratio) for h in range(h0, h1)]


def test_whole_groups_make_one_fragment():
    assert len(fragments((3, 9), 3)) == 1
    assert len(fragments((4, 5), 3)) == 1
    assert len(fragments((2, 7), 3)) == 3


def test_fusion_leaves_a_tick_of_the_window_for_the_transfer():
    assert [fusion_width(4, n) for n in (1, 2, 3, 5, 9)] == [1, 1, 2, 4, 4]
    assert fusion_width(1, 9) == 1


def test_kv_head_held_twice_is_taken_from_the_lowest_holder():
    """Two query heads share the one KV head; both groups cut between them."""
    replica = make_replica(16, 4, [(2, [(0, 8, 1), (1, 0, 1)]), (2, [(2, 4, 1), (3, 4, 1)])])
    plan = Plan(
        policy="manual", seq_len=16, num_heads=2, num_kv_heads=1, slot=4, fusion=1, exchange="ring", recompute="none",
        dtype="float32", replicas=(replica,), devices=(RankDevice("cpu", "here", "cpu"),) * 4,
    )  # fmt: skip
    made = routes(plan)
    pairs = {(m.sender, m.receiver) for r in made for batch in r.kv.sends for m in batch}
    assert pairs == {(0, 2), (0, 3), (2, 0), (2, 1)}
    gradients = {(m.sender, m.receiver) for r in made for batch in r.dkv.sends for m in batch}
    assert gradients == {(0, 2), (1, 2), (2, 0), (3, 0)}
    assert all(r.shared_kv for r in made)

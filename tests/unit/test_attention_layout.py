"""Routes of whole plans, checked without starting a process."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, deque

import numpy as np
import pytest

from hexiseq.attention.layout import INNER, OUTER, OWN, SEND_LAG, Route, route, routes
from hexiseq.attention.tiles import Mask, rows_from, tiles
from hexiseq.plan import EXCHANGES, Interval, Plan, RankDevice, group_intervals, kv_heads, make_replica
from hexiseq.testing import draw_mask, draw_plan

SEEDS = range(150)
SEQUENCES = 2


def draw(seed: int, exchange: str = "ring") -> tuple[Plan, Mask]:
    plan = draw_plan(seed, exchange=exchange)
    return plan, Mask.checked(plan.seq_len, SEQUENCES, **draw_mask(seed, plan.seq_len, SEQUENCES))


def positions(run: tuple[Interval, ...]) -> np.ndarray:
    return np.concatenate([np.arange(*interval) for interval in run])


def runs(plan: Plan, rank: int) -> tuple[list, list]:
    """The runs of the groups, and of the slots, of the rank's replica."""
    groups = [group.slots for group in plan.replicas[plan.place(rank)[0]].groups]
    cut = [group_intervals(plan.seq_len, plan.slot, n) for n in (groups, [1] * sum(groups))]
    return cut[0], cut[1]


def allowed(queries: np.ndarray, keys: np.ndarray, mask: Mask, edges: tuple[int, ...] | None) -> np.ndarray:
    """Which queries attend to which keys, pair by pair from the definitions."""
    found = np.ones((len(queries), len(keys)), bool)
    if mask.causal:
        found &= keys <= queries[:, None]
    if mask.window is not None:
        found &= keys > queries[:, None] - mask.window
    if edges is not None:
        found &= np.searchsorted(edges, keys, "right") == np.searchsorted(edges, queries, "right")[:, None]
    return found


def pairs(shape: tuple[int, int], mask: str) -> np.ndarray:
    """How often a kernel call computes each pair of rows."""
    if mask == "full":
        return np.ones(shape, int)
    assert shape[0] == shape[1]
    return np.tril(np.ones(shape, int)) if mask == "causal" else np.triu(np.ones(shape, int))


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


def attended_rows(plan: Plan, rank: int, slot: int, mask: Mask) -> np.ndarray:
    """Rows of a foreign slot that some query of the rank's group attends to in some sequence, pair by pair."""
    groups, slots = runs(plan, rank)
    own, foreign = positions(groups[plan.place(rank)[1]]), positions(slots[slot])
    every = mask.documents or [None] * SEQUENCES
    found = np.any([allowed(own, foreign, mask, edges).any(0) for edges in every], axis=0)
    return np.ones_like(found) if not mask.causal else found


@pytest.mark.parametrize("seed", SEEDS)
def test_every_send_has_one_receive_in_the_same_batch(seed):
    made = routes(*draw(seed))
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


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_gets_the_kv_it_attends_to_once_and_in_time(seed):
    plan, mask = draw(seed)
    plain = mask.window is None and mask.documents is None
    for r in routes(plan, mask):
        k0, k1 = r.me.kv
        got = {}
        for t, batch in enumerate(r.kv.receives):
            for m in batch:
                # Batch t is needed n_g ticks later, which is the tick of its slot.
                assert (r.off + t + r.slots) % r.total == m.source
                seen = got.setdefault(m.source, np.zeros((plan.slot, plan.num_kv_heads), int))
                seen[slice(*m.rows), slice(*m.heads)] += 1
        for slot in range(r.total) if k1 > k0 else ():
            if r.owns(slot):
                assert slot not in got
                continue
            rows = attended_rows(plan, r.rank, slot, mask)
            seen = got.get(slot, np.zeros((plan.slot, plan.num_kv_heads), int))
            assert not seen[:, :k0].any()
            assert not seen[:, k1:].any()
            assert seen.max() <= 1
            assert seen[: len(rows)][rows, k0:k1].all()
            if plain:  # with documents or a window others further along may need more
                assert not seen[: len(rows)][~rows].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_only_send_kv_they_hold(seed):
    plan, mask = draw(seed)
    for r in routes(plan, mask):
        held = {m.source: m.rows for batch in r.kv.receives for m in batch}
        for t, batch in enumerate(r.kv.sends):
            slot = (r.off + t) % r.total
            rows = (0, slot_rows(plan, slot)) if t < r.slots else held.get(slot, (0, 0))
            for m in batch:
                assert m.source == slot
                assert rows[0] <= m.rows[0] < m.rows[1] <= rows[1]
                assert r.me.kv[0] <= m.heads[0] < m.heads[1] <= r.me.kv[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_gradient_partial_comes_home_once(seed):
    """Follow how often each rank's own part is contained in every sum, row by row and head by head."""
    plan, mask = draw(seed)
    made = routes(plan, mask)
    shape = (plan.slot, plan.num_kv_heads, plan.world_size)
    home = {(r.rank, s): np.zeros(shape, int) for r in made for s in range(r.off, r.off + r.slots)}
    arrived: dict[tuple[int, int], np.ndarray] = {}

    def own_part(rank: int, slot: int, heads: Interval) -> np.ndarray:
        part, rows = np.zeros(shape[:2], int), attended_rows(plan, rank, slot, mask)
        part[: len(rows), slice(*heads)] = rows[:, None]
        return part

    for t in range(made[0].total):
        for r in made:
            slot = (r.off + t) % r.total
            if t < r.slots:
                assert not r.dkv.sends[t]
                continue
            total = arrived.pop((r.rank, slot), np.zeros(shape, int))
            total[:, :, r.rank] += own_part(r.rank, slot, r.me.kv)
            for m in r.dkv.sends[t]:
                peer = made[m.receiver]
                part = np.zeros(shape, int)
                part[slice(*m.rows), slice(*m.heads)] = total[slice(*m.rows), slice(*m.heads)]
                total[slice(*m.rows), slice(*m.heads)] = 0
                if peer.owns(slot):
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
                        expected = own_part(rank, slot, kv_heads(plan.shard(rank).heads, plan.gqa_ratio))
                    assert (found[:, :, rank] == expected).all()
                for rank in group.ranks:  # what reaches a member, it holds
                    k0, k1 = made[rank].me.kv
                    assert not home[rank, slot][:, :k0].any()
                    assert not home[rank, slot][:, k1:].any()
            first += group.slots


@pytest.mark.parametrize("seed", SEEDS)
def test_gathered_kv_is_complete_and_gradients_go_back_the_same_way(seed):
    plan, mask = draw(seed, "allgather")
    made = routes(plan, mask)
    kv, dkv = ([m for r in made for m in getattr(r, kind).sends[0]] for kind in ("kv", "dkv"))
    assert Counter((m.sender, m.receiver, m.source, m.rows, m.heads) for m in kv) == Counter(
        (m.receiver, m.sender, m.source, m.rows, m.heads) for m in dkv
    )
    for r in made:
        groups, _ = runs(plan, r.rank)
        assert list(r.kv.sends[0]) == sorted(r.kv.sends[0], key=lambda m: m.receiver)
        assert list(r.kv.receives[0]) == sorted(r.kv.receives[0], key=lambda m: m.sender)
        assert sum(m.size for m in r.kv.sends[0]) <= r.kv.most[0]
        assert sum(m.size for m in r.kv.receives[0]) <= r.kv.most[1]
        seen = [np.zeros((len(positions(run)), plan.num_kv_heads), int) for run in groups]
        for m in r.kv.receives[0]:
            seen[m.source][slice(*m.rows), slice(*m.heads)] += 1
            assert made[m.sender].me.kv[0] <= m.heads[0] < m.heads[1] <= made[m.sender].me.kv[1]
        every = mask.documents or [None] * SEQUENCES
        for g, run in enumerate(groups):
            pieces = [allowed(positions(groups[r.group]), positions(run), mask, edges).any(0) for edges in every]
            expected = np.zeros_like(seen[g])
            if g != r.group:
                rows = np.any(pieces, axis=0) | (not mask.causal)
                expected[:, slice(*r.me.kv)] = rows[:, None]
            assert (seen[g] == expected).all()


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_compute_every_allowed_pair_once_and_no_other(seed, exchange):
    plan, mask = draw(seed, exchange)
    every = mask.documents or [None] * SEQUENCES
    for r in routes(plan, mask):
        if r.me.heads[0] == r.me.heads[1]:
            assert not r.blocks
            continue
        groups, slots = runs(plan, r.rank)
        own = positions(groups[r.group])
        counts = np.zeros((SEQUENCES, len(own), plan.seq_len), int)
        for block in r.blocks:
            keys = grads = own
            if block.side != OWN:
                sources = groups if r.gathers else slots
                keys = np.concatenate([positions(sources[p.source])[slice(*p.rows)] for p in block.parts])
                grads = np.concatenate([positions(sources[p.source])[slice(*p.grad_rows)] for p in block.parts])
            assert (len(keys), len(grads)) == (block.rows, block.grad_rows)
            assert max(block.rows, block.grad_rows) <= block.most_rows
            for call in block.calls:
                count = pairs((len(own[call.queries]), len(keys[call.keys])), call.mask)
                assert count.size
                for sequence in range(SEQUENCES)[call.sequences]:
                    counts[sequence][np.ix_(np.arange(len(own))[call.queries], keys[call.keys])] += count
                for source, target in call.grads:
                    assert (keys[call.keys][source] == grads[target]).all()
                assert sum(source.stop - source.start for source, _ in call.grads) == len(keys[call.keys])
        for sequence, edges in enumerate(every):
            expected = allowed(own, np.arange(plan.seq_len), mask, edges)
            assert (counts[sequence] == expected).all()
        for sequence in range(SEQUENCES):  # the calls that set a row come once to each, before all others
            setting = [
                call for call in r.blocks[0].calls if call.first and sequence in range(SEQUENCES)[call.sequences]
            ]
            assert sorted(i for call in setting for i in range(len(own))[call.queries]) == list(range(len(own)))
        firsts = [call.first for block in r.blocks for call in block.calls]
        assert firsts == sorted(firsts, reverse=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_walk_all_slots_and_stay_on_one_side(seed):
    plan, mask = draw(seed)
    for r in routes(plan, mask):
        if not r.blocks:
            continue
        assert [t for block in r.blocks for t in block.ticks] == list(range(r.total))
        assert [p.source for block in r.blocks for p in block.parts] == [
            (r.off + t) % r.total for t in range(r.slots, r.total)
        ]
        assert r.blocks[0].side == OWN
        assert len(r.blocks[0].ticks) == r.slots
        for block in r.blocks[1:]:
            assert len(block.ticks) == len(block.parts) <= max(1, min(plan.fusion, r.slots - 1))
            if mask.causal:
                assert {OUTER if p.source < r.off else INNER for p in block.parts} == {block.side}


def test_plain_slots_make_one_call_a_block():
    for r in routes(ring_plan([6, 4, 5], fusion=3)):
        assert all(len(block.calls) == 1 and (block.side == OWN or block.covered) for block in r.blocks)


def test_documents_and_windows_leave_out_tiles_and_messages():
    """Two groups of 4 slots of 4 tokens: [0, 8) and [24, 32) around [8, 24)."""
    plan = ring_plan([4, 4])
    apart = routes(plan, Mask(documents=((0, 8, 16, 24, 32),)))
    assert not any(m for r in apart for kind in (r.kv, r.dkv) for batch in kind.sends for m in batch)
    assert [[(c.queries, c.mask) for c in b.calls] for b in apart[0].blocks if b.calls] == [
        [(slice(0, 8), "causal"), (slice(8, 16), "causal")]
    ]
    # A document from 20 to 28: of the inner group's slots only [20, 22) and [22, 24) cross, to queries [24, 28).
    spanning = routes(plan, Mask(documents=((0, 20, 28, 32),)))
    sent = [(m.source, m.rows) for batch in spanning[1].kv.sends for m in batch]
    assert sent == [(4, (2, 4)), (5, (2, 4))]
    crossing = [c for b in spanning[0].blocks[1:] for c in b.calls]
    assert all((c.queries, c.mask) == (slice(8, 12), "full") for c in crossing)
    # A window of 3 reaches 2 tokens back across the boundary at 24 and 2 across the one at 8.
    windowed = routes(plan, Mask(window=3))
    assert [m.rows for batch in windowed[1].kv.sends for m in batch] == [(2, 4)]
    assert [m.rows for batch in windowed[0].kv.sends for m in batch] == [(0, 2)]


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
                    yield [("dkv", "send", m) for m in r.dkv.receives[t - r.slots] if not r.owns(m.source)]
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


@pytest.mark.parametrize("seed", SEEDS)
def test_no_deadlock_whatever_the_groups(seed):
    plan, mask = draw(seed)
    assert run_events(routes(dataclasses.replace(plan, fusion=8), mask)) == []


@pytest.mark.parametrize("slots", [[1, 1], [8, 1], [1, 8], [1] * 9, [9, 1, 1, 1], [1, 1, 1, 9], [3, 7, 2, 5, 1]])
def test_no_deadlock_with_extreme_groups(slots):
    assert run_events(routes(ring_plan(slots, fusion=4))) == []


def test_event_model_finds_a_deadlock(monkeypatch):
    """Calls as wide as the window and one more wait for a slot that is only sent after them: caught twice over."""
    monkeypatch.setattr("hexiseq.attention.layout.fusion_width", lambda fusion, slots: slots + 1)
    plan = ring_plan([2, 2, 2])
    with pytest.raises(AssertionError, match="waits for a later send"):
        route(plan, 0, Mask(causal=False))
    monkeypatch.setattr("hexiseq.attention.layout._check_progress", lambda ring, group: None)
    assert run_events(routes(plan, Mask(causal=False))) == [0, 1, 2]


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
    full = routes(ring_plan([3, 1, 2]), Mask(causal=False))
    assert sum(m.size for r in full for batch in r.kv.sends for m in batch) == 4 * (3 + 5 + 4)


def test_short_outermost_half_slot():
    plan = ring_plan([2, 1], slot=4, short=1)
    r = route(plan, 0)
    assert (r.rows, r.front) == (7, 4)
    assert r.own_rows(0, (0, 3)) == [((0, 2), 0), ((6, 7), 2)]
    assert r.own_rows(1, (0, 4)) == [((2, 4), 0), ((4, 6), 2)]
    assert r.own_rows(1, (1, 3)) == [((3, 4), 0), ((4, 5), 1)]
    assert r.own_rows(1, (2, 4)) == [((4, 6), 0)]
    gone = route(ring_plan([1, 1], slot=4, short=2), 0)
    assert gone.own_rows(0, (0, 2)) == [((0, 2), 0)]
    whole = routes(plan, Mask(causal=False))[1]
    assert [m.rows for batch in whole.kv.receives for m in batch] == [(0, 3), (0, 4)]


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


@pytest.mark.parametrize("seed", range(400))
def test_tiles_are_exactly_the_allowed_pairs(seed):
    plan, mask = draw(seed)
    groups, slots = runs(plan, 0)
    for g, queries in enumerate(groups):
        for keys in (*slots, queries):
            own = keys is queries
            if not own and any(a < d and c < b for a, b in queries for c, d in keys):
                continue
            for edges in mask.documents or [None]:
                at, of = positions(queries), positions(keys)
                found = np.zeros((len(at), len(of)), int)
                for tile in tiles(queries, keys, mask, edges):
                    here = found[slice(*tile.queries), slice(*tile.keys)]
                    here += pairs(here.shape, tile.mask)
                assert (found == allowed(at, of, mask, edges)).all(), (g, queries, keys)


def test_first_row_at_or_after_a_position():
    run = ((4, 8), (20, 23))
    assert [rows_from(run, p) for p in (0, 4, 6, 8, 15, 20, 22, 23, 99)] == [0, 0, 2, 4, 4, 4, 6, 7, 7]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"window": 0}, "window must be None or a whole number of tokens, at least 1, got 0"),
        ({"window": True}, "window must be None or a whole number of tokens, at least 1, got True"),
        ({"window": 4, "causal": False}, "window=4 needs causal attention"),
        ({"documents": [[0, 16]]}, "documents has boundaries of 1 sequences, the batch 2"),
        (
            {"documents": [[0, 16], [0, 15]]},
            "documents[1] must run from 0 to the plan's 16 tokens, it runs over 0 to 15",
        ),
        ({"documents": [[0, 16], []]}, "documents[1] must run from 0 to the plan's 16 tokens, it runs over nothing"),
        ({"documents": [[0, 9, 9, 16], [0, 16]]}, "documents[0] must ascend strictly, it has 9 before 9"),
    ],
)
def test_wrong_masks_are_refused(arguments, said):
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        Mask.checked(16, 2, **{"causal": True, "window": None, "documents": None, **arguments})


def test_masks_take_their_simplest_form():
    assert Mask.checked(16, 2, True, 16, [[0, 16], [0, 16]]) == Mask()
    assert Mask.checked(16, 1, True, 15, None) == Mask(window=15)

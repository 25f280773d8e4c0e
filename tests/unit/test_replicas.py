"""Data parallelism around CP-HP: replicas cover all devices, strong ones take more sequences, rivals have them too."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings

import numpy as np
import pytest

from hexiseq import cost
from hexiseq.cluster import Cluster, Link, Node, Seat
from hexiseq.plan import Plan, table
from hexiseq.schedule import IllegalPolicy, modes, solve, solve_modes
from hexiseq.schedule.estimate import Alike, Job, even_estimate, kind_of
from hexiseq.schedule.even import CONTEXT_FIRST, HEAD_FIRST, even_grid, exchanges, legal_widths
from hexiseq.schedule.replicas import divisions, replica_numbers
from hexiseq.schedule.solve import EVEN_POLICIES, even_rivals
from hexiseq.workload import ModelShape, Workload
from tests.unit.plans import with_hosts
from tests.unit.test_schedule import A100, H100, L40S, LLAMA, job, mixed


def classes(**counts: int) -> Cluster:
    """So many nodes of eight of each type."""
    types = {"h100": (H100, 450), "a100": (A100, 300), "l40s": (L40S, 31)}
    nodes = tuple(
        Node(name, (Seat(types[name][0]),) * 8, types[name][1], 4, 25, count) for name, count in counts.items()
    )
    return Cluster("classes", nodes)


def check(plan: Plan, cluster: Cluster, workload) -> None:
    """Whole, within memory, above the bound, and predicted as anybody would predict it."""
    assert plan.sequences == workload.sequences
    assert plan.world_size + len(plan.excluded) == len(cluster.places)
    assert all(
        used <= limit for used, limit in zip(plan.predicted.memory_gb, plan.predicted.memory_limit_gb, strict=True)
    )
    assert plan.gap >= -1e-9
    again = cost.predict(plan, cluster, workload)
    assert again.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    assert again.memory_gb == pytest.approx(plan.predicted.memory_gb, rel=1e-9)


def test_short_sequences_get_replicas_and_strong_ones_more_sequences():
    cluster, workload = classes(h100=2, a100=2), job(seq_len=16384, sequences=24)
    plan = solve(cluster, workload)
    check(plan, cluster, workload)
    assert len(plan.replicas) > 1
    one = {r.name: r.step_seconds for r in plan.rivals}
    assert plan.predicted.step_seconds < one["even"]
    alone = {}
    for replica in plan.replicas:
        types = {plan.devices[rank].type for rank in replica.ranks}
        if len(types) == 1:
            alone.setdefault(types.pop(), []).append(replica.sequences / len(replica.ranks))
    if len(alone) == 2:  # replicas of one type each: sequences by speed
        assert min(alone["h100_sxm"]) > max(alone["a100_80"])


def test_one_sequence_is_one_replica():
    plan = solve(mixed(), job(seq_len=65536))
    assert len(plan.replicas) == 1
    assert plan.replicas[0].sequences == 1


@pytest.mark.parametrize("counts", [{"h100": 2, "a100": 2}, {"h100": 3, "a100": 2, "l40s": 1}, {"a100": 5}])
@pytest.mark.parametrize("sequences", [1, 2, 3, 8, 17])
def test_divisions_use_every_device_once_and_share_all_sequences(counts, sequences):
    cluster = classes(**counts)
    place = Job(cluster, cluster.places, job(seq_len=32768, sequences=sequences))
    found = list(divisions(place))
    assert found
    for division in found:
        ranks = np.concatenate([alike.ranks.ravel() for alike in division])
        assert sorted(ranks.tolist()) == list(range(len(cluster.places)))
        assert sum(alike.sequences * len(alike.ranks) for alike in division) == sequences
        for alike in division:
            assert len({place.wires.signature(row.tolist()) for row in alike.ranks}) == 1


def test_replicas_of_a_part_of_each_kind_of_device_stay_inside_nodes():
    cluster, workload = classes(h100=2, a100=2, l40s=2), job(seq_len=65536, sequences=8)
    plan = solve(cluster, workload)
    check(plan, cluster, workload)
    held = [sorted(plan.devices[rank].type for rank in replica.ranks) for replica in plan.replicas]
    assert held == [["a100_80"] * 2 + ["h100_sxm"] * 2 + ["l40s"] * 2] * 8
    assert all(len({plan.devices[rank].node for rank in replica.ranks}) == 3 for replica in plan.replicas)
    assert plan.gap < 0.08


def test_numbers_of_replicas():
    assert replica_numbers(8, 1) == [1]
    assert replica_numbers(8, 6) == [1, 2, 3, 4, 6]
    assert replica_numbers(10240, 160)[0] * 512 >= 10240
    assert replica_numbers(10240, 4) == [4]  # larger than one would like, but there are no more sequences
    assert len(replica_numbers(4096, 4096)) <= 8


def test_many_devices_are_as_quick_as_their_kinds():
    workload = job(seq_len=131072, sequences=32, recompute="full")
    cluster = classes(h100=32, a100=32)  # 512 devices
    plan = solve(cluster, workload, time_limit_seconds=60)
    check(plan, cluster, workload)
    assert len(plan.replicas) > 1
    assert plan.gap < 0.15
    assert {r.name: r.status for r in plan.rivals}["usp"] == "ok"


@pytest.mark.parametrize("policy", ["ring", "usp", "loongtrain", "even", "fast_only"])
def test_even_policies_have_equal_replicas(policy):
    cluster, workload = classes(h100=1, a100=1), job(seq_len=32768, sequences=4, recompute="full")
    plan = solve(cluster, workload, policy)
    check(plan, cluster, workload)
    assert plan.policy == policy
    assert len({(len(replica.ranks), replica.sequences) for replica in plan.replicas}) == 1
    for replica in plan.replicas:
        tokens = [shard.num_tokens for group in replica.groups for shard in group.shards]
        assert max(tokens) - min(tokens) <= 1
    if policy == "fast_only":
        assert {device.type for device in plan.devices} == {"h100_sxm"}
        assert len(plan.excluded) == 8
    row = next(rival for rival in plan.rivals if rival.name == policy)
    assert row.step_seconds == plan.predicted.step_seconds
    hexiseq = next(rival for rival in plan.rivals if rival.name == "hexiseq")
    assert hexiseq.step_seconds <= min(r.step_seconds for r in plan.rivals if r.step_seconds) * (1 + 1e-9)


def test_wider_policies_are_never_slower_than_those_they_contain():
    for cluster in (mixed(), classes(h100=1, a100=1, l40s=1), classes(h100=2, a100=1)):
        for sequences in (1, 4):
            workload = job(seq_len=65536, sequences=sequences, recompute="full")
            rows = {r.name: r.step_seconds or math.inf for r in solve(cluster, workload).rivals}
            assert tuple(rows) == (*EVEN_POLICIES, "hexiseq")
            assert rows["usp"] <= min(rows["ring"], rows["ulysses"])
            assert rows["loongtrain"] <= rows["usp"]
            assert rows["even"] <= rows["loongtrain"]
            assert rows["hexiseq"] <= min(rows["even"], rows["fast_only"])


def test_placements_differ_in_who_is_whose_neighbour():
    heads = even_grid("usp", job(), 8, 4, None, HEAD_FIRST)
    context = even_grid("loongtrain", job(), 8, 4, None, CONTEXT_FIRST)
    assert heads.ranks.reshape(2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert context.ranks.reshape(2, 4).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("cluster", [classes(h100=2, a100=2), classes(h100=1, a100=1, l40s=2)])
def test_estimates_of_even_grids_are_near(cluster):
    workload = job(LLAMA, seq_len=262144, recompute="full")
    place = Job(cluster, cluster.places, workload)
    alike = Alike(np.arange(len(cluster.places))[None], 1)
    for width in legal_widths(workload, len(cluster.places)):
        for placement in (HEAD_FIRST, CONTEXT_FIRST):
            grid = even_grid("usp", workload, len(cluster.places), width, None, placement)
            judged = min(place.judge([kind_of(one, alike.ranks)]).step_seconds for one in exchanges(grid, None))
            estimate = even_estimate(place, alike, width, placement == HEAD_FIRST)
            assert 0.85 * judged < estimate < 1.25 * judged


def test_gains_multiply_to_the_whole_and_are_printed():
    for cluster, workload in (
        (mixed(), job(seq_len=131072)),
        (classes(h100=1, a100=1), job(seq_len=16384, sequences=8)),
    ):
        plan = solve(cluster, workload)
        even = next(r for r in plan.rivals if r.name == "even").step_seconds
        assert [gain.source for gain in plan.gains] == ["tokens", "heads", "grouping", "devices"]
        assert all(gain.factor >= 1 for gain in plan.gains)
        assert math.prod(g.factor for g in plan.gains) == pytest.approx(even / plan.predicted.step_seconds, rel=1e-9)
        assert "gain over the best even plan" in table(plan)
        assert Plan.from_dict(plan.to_dict()) == plan
        assert dataclasses.replace(plan, gains=()).digest() == plan.digest()
    same = classes(a100=1)
    assert solve(same, job(seq_len=65536)).gains[0].factor < 1.05  # alike devices: next to nothing to gain


def test_a_failing_solver_is_a_warning_and_a_plan(monkeypatch):
    expected = solve(mixed(3), job(seq_len=100_000))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no licence")

    monkeypatch.setattr("mip.Model.optimize", fail)
    from hexiseq.schedule import local

    for cached in (local.cut_heads, local.share_tokens):
        cached.cache_clear()
    with pytest.warns(UserWarning, match=r"solver failed \(RuntimeError: no licence\)"):
        plan = solve(mixed(3), job(seq_len=100_000))
    for cached in (local.cut_heads, local.share_tokens):
        cached.cache_clear()
    check(plan, mixed(3), job(seq_len=100_000))
    assert plan.predicted.step_seconds < 1.1 * expected.predicted.step_seconds


def test_a_short_time_limit_still_gives_a_plan():
    cluster, workload = classes(h100=2, a100=2, l40s=2), job(seq_len=131072, recompute="full")
    quick = solve(cluster, workload, time_limit_seconds=1e-6)
    check(quick, cluster, workload)
    even = next(r for r in quick.rivals if r.name == "even").step_seconds
    assert (
        solve(cluster, workload, time_limit_seconds=60).predicted.step_seconds <= quick.predicted.step_seconds <= even
    )
    for wrong in (0, -1, math.inf, "x", True):
        with pytest.raises(ValueError, match=r"strategy\.time_limit_seconds must be a positive number"):
            solve(cluster, workload, time_limit_seconds=wrong)


def test_links_that_contradict_are_refused():
    nodes = mixed().nodes
    Cluster("twice", nodes, (Link(("h100", "a100"), 5.0), Link(("a100", "h100"), 5.0)))
    with pytest.raises(ValueError, match=r"two links join a100 and h100, of 5 and 9 GB/s.*give it once"):
        Cluster("contradiction", nodes, (Link(("h100", "a100"), 5.0), Link(("a100", "h100"), 9.0)))


def test_plans_of_many_replicas_are_the_same_every_time():
    cluster, workload = classes(h100=3, a100=2, l40s=1), job(seq_len=16384, sequences=12, recompute="full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, other = (solve(cluster, workload, time_limit_seconds=60) for _ in range(2))
    assert dataclasses.replace(one, solve_seconds=None) == dataclasses.replace(other, solve_seconds=None)
    check(one, cluster, workload)


def test_too_many_sequences_for_even_replicas_are_said_to_be():
    # Seven sequences do not divide over eight ranks but in one replica, which Ulysses cannot cut nine heads for.
    from tests.unit.test_schedule import CORE, small_job

    cluster = Cluster("eight", (Node("n", (Seat(CORE),) * 8, 1, 1, 1),))
    with pytest.raises(IllegalPolicy, match="policy ulysses on 8 ranks"):
        solve(cluster, small_job(sequences=7), "ulysses")


def test_the_mode_is_the_fastest_that_fits_and_rivals_have_their_own(monkeypatch):
    cluster, workload = classes(h100=1, a100=1), job(seq_len=131072)
    searched = []

    def noted(cluster, workload, *args, **options):
        searched.append(workload)
        return solve(cluster, workload, *args, **options)

    monkeypatch.setattr(sys.modules[solve_modes.__module__], "solve", noted)
    every = modes(workload, None, None)
    assert [(w.recompute, w.keep_parameters) for w in every][:3] == [
        ("none", False),
        ("none", True),
        ("selective", False),
    ]
    plan, chosen = solve_modes(cluster, every, time_limit_seconds=60)
    check(plan, cluster, chosen)
    alone = {}
    for mode in every:
        try:
            alone[mode] = solve(cluster, mode, time_limit_seconds=60)
        except cost.OutOfMemory:
            continue
    assert plan.recompute == chosen.recompute
    assert plan.predicted.step_seconds == min(p.predicted.step_seconds for p in alone.values())
    for row in plan.rivals:
        times = [r.step_seconds for p in alone.values() for r in p.rivals if r.name == row.name and r.step_seconds]
        assert row.step_seconds == min(times, default=None)
    even = next(r.step_seconds for r in plan.rivals if r.name == "even")
    if plan.gains:
        assert plan.gains[0].source == "modes"
        assert math.prod(g.factor for g in plan.gains) == pytest.approx(even / plan.predicted.step_seconds, rel=1e-9)
    # What cannot win is not searched, but rivals may have it.
    left = [mode for mode in every if mode not in searched]
    assert [mode.recompute for mode in left] == ["full", "full"]
    assert all(cost.lower_bound(cluster, mode) >= plan.predicted.step_seconds for mode in left)
    quick, same = solve_modes(cluster, every, rivals=False, time_limit_seconds=60)
    assert (quick.predicted, same, quick.rivals) == (plan.predicted, chosen, ())


def test_offload_is_tried_where_memory_binds(monkeypatch):
    cluster = with_hosts(classes(a100=1), 1000.0, 25.0)
    assert [(w.recompute, w.keep_parameters, w.offload) for w in modes(job(), None, None, None)] == [
        (recompute, keep, offload)
        for recompute in ("none", "selective", "full") for offload in (False, True) for keep in (False, True)
        if recompute != "none" or not offload
    ]  # fmt: skip
    with pytest.raises(ValueError, match="use recompute selective or full"):
        modes(job(), "none", False, True)
    tried = []

    def counted(cluster, workload, *args, **options):
        tried.append(workload.offload)
        return solve(cluster, workload, *args, **options)

    monkeypatch.setattr(sys.modules[solve_modes.__module__], "solve", counted)
    plan, chosen = solve_modes(cluster, modes(job(seq_len=65536), "full", False, None))
    assert (tried, plan.offload, chosen.offload) == ([False], False, False)
    # More than fits without, and less than the hosts hold.
    long = job(seq_len=1_300_000)
    plan, chosen = solve_modes(cluster, modes(long, "full", False, None))
    assert (tried, plan.offload, chosen) == ([False] * 2 + [True], True, modes(long, "full", False, True)[0])
    check(plan, cluster, chosen)
    assert sum(plan.predicted.host_memory_gb) == pytest.approx(1_300_000 * 32 * 4096 * 2 / 1e9)
    assert all(row.status == "ok" for row in plan.rivals if row.name in ("even", "ulysses"))  # they have it, too
    with pytest.raises(cost.OutOfMemory, match="offload=true would fit"):
        solve(cluster, modes(long, "full", False)[0])
    # Hosts that hold less than half of it, for certain without any device that is full.
    with pytest.raises(cost.OutOfMemory, match=r"node a100 keeps .* GB of layers' inputs in its host's memory"):
        solve(with_hosts(cluster, 150.0), chosen)
    with pytest.raises(ValueError, match="offload: device type a100_80 has no host_gb_per_s"):
        solve(classes(a100=1), chosen)


def test_rivals_may_have_offload_in_a_mode_that_cannot_win():
    # Every even policy fits with full recompute as it is, but faster grids of theirs with offload alone.
    small = dataclasses.replace(H100, type="small", memory_gb=15.5)
    model = ModelShape("eight heads", 8, 1024, 2048, 8, 8, 128, 32000)
    node = Node("one", (*(Seat(H100),) * 6, *(Seat(small),) * 2), 5.0, 1, 25.0)
    cluster = with_hosts(Cluster("eight", (node,)), 1000.0, 60.0)
    every = modes(Workload(model, 1_132_288, "bfloat16", "full", 1, 1, False), None, False, None)
    plan, chosen = solve_modes(cluster, every, time_limit_seconds=60)
    assert (chosen.recompute, chosen.offload) == ("selective", True)
    assert all(cost.lower_bound(cluster, mode) >= plan.predicted.step_seconds for mode in every[-2:])
    without, with_offload = (even_rivals(cluster, mode, time_limit_seconds=60) for mode in every[-2:])
    assert all(row.status == "ok" for row in without)
    for row, a, b in zip(plan.rivals, without, with_offload, strict=False):
        assert row.step_seconds <= min(a.step_seconds, b.step_seconds)
    assert any(b.step_seconds < a.step_seconds for a, b in zip(without, with_offload, strict=True))


def test_modes_asked_for_are_not_changed_and_none_that_fits_is_an_error():
    cluster = classes(a100=1)
    workload = job(seq_len=131072)
    assert modes(workload, "full", True) == [dataclasses.replace(workload, recompute="full", keep_parameters=True)]
    with pytest.raises(cost.OutOfMemory, match="would fit"):
        solve_modes(cluster, modes(job(seq_len=50_000_000), None, None))
    # A mode that cannot win must be one that can run.
    two = [modes(workload, "selective", False)[0], modes(workload, "full", False, True)[0]]
    for rivals in (True, False):
        with pytest.raises(ValueError, match="offload: device type a100_80 has no host_gb_per_s"):
            solve_modes(cluster, two, rivals=rivals)


def test_even_replicas_divide_devices_and_sequences():
    assert replica_numbers(24, 16, even=True) == [1, 2, 4, 8]
    assert replica_numbers(1000, 7, even=True) == [1]  # nothing smaller is even
    for ranks, sequences in ((96, 36), (1536, 768), (7, 7)):
        assert all(ranks % n == sequences % n == 0 for n in replica_numbers(ranks, sequences, even=True))

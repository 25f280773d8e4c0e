"""Groups by template: what the program says is best, whose devices they are, and clusters that need it."""

import dataclasses
import itertools

import numpy as np
import pytest

from hexiseq.cluster import Cluster, Node, Seat
from hexiseq.cost import MEMORY_FRACTION, Kind, Wires, check_memory, match_places, memory_gb, most_tokens
from hexiseq.cost.layout import layout_of
from hexiseq.plan import make_replica
from hexiseq.schedule import solve
from hexiseq.schedule.search import Search
from hexiseq.schedule.templates import WHOLE, Kinds, Templates, _best_numbers, _seated, template_groupings
from hexiseq.workload import ModelShape, Workload

from .plans import draw_large, with_hosts, with_memory
from .test_schedule import A100, H100, L40S, gpu, without_time

A40 = gpu("a40", 115, 80, 75, memory=48, hbm=696)
SHAPE = ModelShape("shape_32b", 16, 5120, 27648, 40, 8, 128, 152064)
PORTS = ((H100, 450, 3), (A100, 300, 2), (A40, 31, 5), (L40S, 31, 3))
# Two devices a node keep it small: 3, 2, 5 and 3 nodes of a type, and a sequence that all of them just hold.
AWKWARD = Cluster(
    "awkward", tuple(Node(gpu.type, (Seat(gpu),) * 2, port, 8, 25.0, count=count) for gpu, port, count in PORTS)
)
LONG = Workload(SHAPE, 1_500_000, "bfloat16", "full", 1, 1, False)


def solved(**changes):
    return without_time(solve(AWKWARD, LONG, rivals=False, time_limit_seconds=60, **changes))


def test_awkward_nodes_with_little_memory_are_mixed(monkeypatch):
    found = solved()
    check_memory(found, AWKWARD, LONG)
    assert found.gap < 0.1
    assert solved() == found
    monkeypatch.setattr("hexiseq.schedule.templates.solved", lambda program: False)  # a solver that fails
    failed = solved()
    monkeypatch.setattr(Search, "mix", lambda self: None)
    without = solved()
    assert failed == without
    assert without.gap > 0.15


def test_offload_leaves_room_to_recompute_less():
    hosted, without = with_hosts(AWKWARD, 1000.0, 25.0), solved().predicted.step_seconds
    for recompute, gap, faster in (("full", 0.06, 1.02), ("selective", 0.1, 1.2)):
        work = dataclasses.replace(LONG, recompute=recompute, offload=True)
        found = solve(hosted, work, rivals=False, time_limit_seconds=60)
        check_memory(found, hosted, work)
        assert found.gap < gap
        assert without > faster * found.predicted.step_seconds


def kinds_of(*nodes):
    """Kinds with so many nodes of so many devices each, the first ones fast, the last ones with room."""
    count, rank, ranks = len(nodes), itertools.count(), []
    for number, seats in nodes:
        ranks.append([[next(rank) for _ in range(seats)] for _ in range(number)])
    speed = np.arange(1.0, count + 1)
    return Kinds(ranks, 1e-6 * speed, 1e-7 * speed, 0 * speed, 400 * speed, 0.02 / speed, 1e11 / speed, 1e9 / speed)


def test_the_program_finds_the_best_numbers():
    devices = np.array([[1, 0], [0, 1], [1, 1], [2, 1], [1, 3]])
    for counts, seed in ((np.array([5, 4]), 1), (np.array([3, 7]), 2), (np.array([6, 6]), 3)):
        held = np.random.default_rng(seed).uniform(0.5, 2.0, len(devices)) * devices.sum(1)
        templates = Templates(devices, devices * 0, held)
        ranges = [range(8)] * len(devices)
        ways = [np.array(way) for way in itertools.product(*ranges) if (np.array(way) @ devices <= counts).all()]
        best = max(float(way @ held) for way in ways)
        found = _best_numbers(templates, held * WHOLE / best * (1 + 1e-9), counts)
        assert float(found @ held) == pytest.approx(best)
        assert (found @ devices <= counts).all()
        assert _best_numbers(templates, held * WHOLE / best * 0.99, counts) is None


def test_the_program_finds_numbers_that_a_row_for_the_least_would_hide():
    devices, held = np.array([[2], [3]]), np.array([32453.403301558603, 52684.21052631578])
    assert _best_numbers(Templates(devices, devices * 0, held), held, np.array([57])).tolist() == [0, 19]


def test_groupings_use_every_device_once():
    kinds = kinds_of((2, 4), (3, 4), (1, 2))
    seen = list(template_groupings(kinds, 16, 8, (1.0, 1.0), 9000, 4000, 1e9, lambda: False))
    assert seen
    for grouping in seen:
        assert sorted(rank for group in grouping for rank in group) == list(range(22))
    assert not list(template_groupings(kinds, 16, 8, (1.0, 1.0), 9000, 4000, 1e9, lambda: True))
    assert not list(template_groupings(kinds, 16, 8, (1.0, 1.0), 9000, 4000, 1e-9, lambda: False))
    groups = _seated(kinds, np.array([[4, 0, 0], [4, 0, 0], [0, 4, 0], [0, 4, 0], [0, 2, 1], [0, 2, 1]]))
    homes = [{rank // 4 for rank in group if rank < 20} for group in groups]
    assert all(len(home) == 1 for home in homes)  # nobody's group is on two nodes of a kind


def test_ranks_without_room_for_their_parameters_are_left_out():
    work = dataclasses.replace(LONG, seq_len=200_000)
    small = Node("small", (Seat(dataclasses.replace(A40, type="small", memory_gb=8.0)),) * 2, 31, 8, 25.0)
    found = solve(dataclasses.replace(AWKWARD, nodes=(*AWKWARD.nodes[:2], small)), work, rivals=False)
    assert {device.type for device in found.excluded} >= {"small"}
    assert found.predicted is not None


def moved(plan, rank, tokens):
    """The plan with so many tokens of its group on a rank of its first replica, and all others on another member."""
    first, groups = plan.replicas[0], []
    for group in first.groups:
        held = {shard.rank: shard.num_tokens for shard in group.shards}
        if rank in held:
            held = {r: tokens if r == rank else 0 for r in held}
            held[next(r for r in held if r != rank)] = group.num_tokens - tokens
        groups.append((group.slots, [(shard.rank, held[shard.rank], shard.num_heads) for shard in group.shards]))
    made = make_replica(plan.seq_len, plan.slot, groups, first.sequences)
    return dataclasses.replace(plan, replicas=(made, *plan.replicas[1:]))


def test_the_most_tokens_that_fit_fit_and_one_more_does_not():
    checked = 0
    for seed in range(80):
        cluster, layout, work = draw_large(seed)
        plan = layout.plan()
        first = plan.replicas[0]
        used = memory_gb(plan, work, match_places(plan, cluster))[0]
        half = {device.type: 1.000001 * float(np.median(used)) / MEMORY_FRACTION for device in cluster.devices}
        tight = with_memory(cluster, half)
        places = match_places(plan, tight)
        most, alone = most_tokens(Kind(layout_of(plan, first), np.array([first.ranks])), work, Wires(tight, places))
        assert ((most < 0) == (alone > 1)).all()
        for index, rank in enumerate(first.ranks):
            group = next(group for group in first.groups if rank in group.ranks)
            if len(group.shards) == 1:
                continue
            for tokens, fits in ((int(most[index]), True), (int(most[index]) + 1, False)):
                if 0 <= tokens <= group.num_tokens:
                    need, limit = memory_gb(moved(plan, rank, tokens), work, places)
                    assert (need[rank] <= limit[rank]) == fits
                    checked += 1
    assert checked > 100

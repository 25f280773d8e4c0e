"""Pictures: every device has a row, bars are what the cost model and the simulation say, and no run fails for them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from hexiseq import picture
from hexiseq.cluster import Cluster, Node, Seat
from hexiseq.cost import Wires, match_places, predict, replica_cost
from hexiseq.cost.step import layer_seconds
from hexiseq.picture.comparison import Comparison
from hexiseq.picture.rows import busy_seconds, kinds_of, rows, runs
from hexiseq.picture.timeline import PASSES, Timeline, measured, predicted
from hexiseq.plan import Bound, ExcludedDevice
from hexiseq.simulate import simulate_step
from hexiseq.workload import ModelShape
from tests.unit.plans import draw_small, group_tokens, make_device, plan_over, proportional, workload_of
from tests.unit.test_simulate_step import dealt

MODEL = ModelShape("toy<8>", 4, 64, 96, 12, 4, 16, 300)
FAST, SLOW = (
    make_device("fast", 400.0, 300.0, 200.0, memory=80.0),
    make_device("slow", 200.0, 150.0, 100.0, memory=40.0),
)


def text_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def job(nodes: int, replicas: int = 1, group: int = 4, heads=(5, 5, 1, 1)):
    """A plan for `nodes` nodes, fast and slow ones in turn, of two devices each, with groups over two nodes each."""
    pair = (Node("fast", (Seat(FAST),) * 2, 300.0, 1, 25.0, nodes // 2), Node("slow", (Seat(SLOW),) * 2, 200.0, 1, 25.0,
                                                                            nodes // 2))  # fmt: skip
    cluster = Cluster("c", pair)
    world = len(cluster.places)
    ranks = list(np.array([*range(world // 2)]).reshape(-1, 2).tolist())
    groups = [[*fast, *(world // 2 + rank for rank in fast)] for fast in ranks]
    per = len(groups) // replicas
    slots = [1] * per
    laid = []
    for r in range(replicas):
        sizes = group_tokens(64 * per, 64, slots)
        members = [
            (1, [(rank, *share) for rank, share in zip(found, zip(proportional(size, (2, 2, 1, 1)), heads, strict=True),
                                                       strict=True)])
            for found, size in zip(groups[r * per : (r + 1) * per], sizes, strict=True)
        ]  # fmt: skip
        laid.append((1, members))
    plan = plan_over(cluster.places, laid, MODEL, 64 * per, 64)
    work = workload_of(plan, MODEL)
    return plan.annotated(predicted=predict(plan, cluster, work), bound=Bound(1e-9), gap=0.25), cluster, work


@pytest.mark.parametrize(
    ("nodes", "replicas", "count"),
    [(2, 1, 4), (8, 1, 16), (8, 4, 16), (32, 2, 64), (64, 1, 2), (64, 8, 16), (512, 8, 2)],
)
def test_every_device_is_in_one_row(nodes: int, replicas: int, count: int) -> None:
    plan, _, _ = job(nodes, replicas)
    shown = rows(plan, kinds_of(plan), each=64, most=32)
    assert sum(row.devices for row in shown) == plan.world_size == 2 * nodes
    assert len(shown) == count
    for replica in {row.replica for row in shown}:
        mine = [row for row in shown if row.replica == replica]
        tokens = sorted(interval for row in mine for owned in row.tokens for interval in owned)
        assert [a for a, _ in tokens] == [0, *(b for _, b in tokens[:-1])]
        assert tokens[-1][1] == plan.seq_len
    for row in shown:
        assert {plan.devices[rank].type for rank in row.ranks} == {row.type}
        assert [plan.shard(rank).heads for rank in row.ranks] == list(row.heads)
        assert {plan.place(rank)[1] for rank in row.ranks} == set(row.groups)


def test_replicas_of_many_kinds_come_down_to_device_types() -> None:
    rng = random.Random(1)
    plan, _, _ = job(128, 64)
    replicas = []
    for replica in plan.replicas:
        (group,) = replica.groups
        heads = [0, *sorted(rng.sample(range(1, 12), 3)), 12]
        shards = tuple(
            dataclasses.replace(shard, heads=(heads[i], heads[i + 1])) for i, shard in enumerate(group.shards)
        )
        replicas.append(dataclasses.replace(replica, groups=(dataclasses.replace(group, shards=shards),)))
    plan = dataclasses.replace(plan, replicas=tuple(replicas))
    shown = rows(plan, kinds_of(plan), each=64, most=32)
    assert sum(row.devices for row in shown) == plan.world_size
    assert len(shown) == 2 * len(kinds_of(plan))
    text = text_of(picture.plan_svg(plan))
    assert f"... and {256 - sum(row.devices for row in shown[:64])} devices in replicas of other kinds" in text


def test_plan_picture_says_what_the_plan_is(tmp_path: Path) -> None:
    plan, cluster, work = job(4)
    left_out = tuple(ExcludedDevice("slow", f"spare-{i}", "too <slow> & small") for i in range(3))
    plan = dataclasses.replace(plan, excluded=left_out)
    picture.draw(tmp_path, plan, cluster, work, rehearsal=True)
    svg = (tmp_path / "plan.svg").read_text()
    text = text_of(svg)
    assert "manual: toy<8>, 128 tokens on 8 devices" in text
    assert any(
        "25.0% above the bound" in line and f"{plan.predicted.step_seconds:.3g} s a step" in line for line in text
    )
    assert {"fast-0", "fast-1", "slow-0", "slow-1"} <= set(text)
    assert {"4 fast", "4 slow", "left out: 3 x slow on spare: too <slow> & small"} <= set(text)
    assert text.count("5") >= 4  # query heads of the fast ones
    assert any("rehearsed" in line for line in text)
    assert picture.pictures(tmp_path) == [tmp_path / "plan.svg", tmp_path / "timeline.svg"]
    again = tmp_path / "again"
    again.mkdir()
    picture.draw(again, plan, cluster, work, rehearsal=True)
    for path in picture.pictures(tmp_path):
        assert path.read_text() == (again / path.name).read_text()
        assert "date" not in path.read_text()
        assert path.stat().st_size < 60_000


def test_plan_without_prediction_is_drawn() -> None:
    plan, _, _ = job(2)
    text = text_of(picture.plan_svg(plan.annotated(predicted=None, gap=None)))
    assert "tokens of the sequence" in text
    assert not any("memory" in line or "predicted" in line for line in text)


@pytest.mark.parametrize("seed", range(6))
def test_busy_time_is_that_of_the_simulation(seed: int) -> None:
    plan, cluster, work = draw_small(seed)
    simulated = [times.busy for times in simulate_step(plan, cluster, work).ranks]
    # A rank without heads still launches its calls in the cost model; it has none in the simulation.
    with_heads = [shard.rank for shard in plan.shards() if shard.num_heads]
    found = busy_seconds(plan, cluster, work)
    assert found[with_heads] == pytest.approx([simulated[rank] for rank in with_heads], rel=1e-9)


def lengths(timeline: Timeline, name: str) -> tuple[float, list[float]]:
    """When a layer's pass ends; how much of it each lane computes."""
    lanes = [getattr(lane, name) for lane in timeline.lanes]
    return max(bar[3] for lane in lanes for bar in lane), [
        sum(end - start for kind, _, start, end in lane if kind == "compute") for lane in lanes
    ]


def test_layer_is_filled_with_work_exchange_and_waiting() -> None:
    plan, cluster, work = job(4)
    timeline = predicted(plan, cluster, work)
    assert "simulated" in timeline.source
    assert len(timeline.lanes) == 8
    for name in PASSES:
        end, _ = lengths(timeline, name)
        for lane in timeline.lanes:
            bars = [bar for bar in getattr(lane, name) if bar[0] != "travel"]
            assert {bar[0] for bar in bars} <= {"compute", "exchange", "wait"}
            for (*_, before), (_, _, start, _) in itertools.pairwise(bars):
                assert before <= start + 1e-12
            assert sum(b - a for _, _, a, b in bars) == pytest.approx(end, rel=0.01)
    cost = replica_cost(plan, plan.replicas[0], work, match_places(plan, cluster))
    _, computed = lengths(timeline, "backward")
    expected = 2 * cost.linear + cost.attention_backward + cost.merge_backward
    ranks = [int(lane.label.split(",")[0].removeprefix("rank ")) for lane in timeline.lanes]
    by_rank = dict(zip(cost.ranks.tolist(), expected.tolist(), strict=True))
    assert computed == pytest.approx([by_rank[rank] for rank in ranks], rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_layer_too_large_to_simulate_takes_what_the_cost_model_says(recompute: str) -> None:
    plan, cluster, _ = job(64)
    plan = dataclasses.replace(plan, recompute=recompute)
    work = workload_of(plan, MODEL)
    timeline = predicted(plan, cluster, work)
    assert "cost model" in timeline.source
    places = match_places(plan, cluster)
    cost = replica_cost(plan, plan.replicas[0], work, places)
    wires = Wires(cluster, [places[rank] for rank in cost.ranks.tolist()])
    path = layer_seconds(cost, wires).path
    assert sum(lengths(timeline, name)[0] for name in PASSES) == pytest.approx(path)
    assert 0 < len(timeline.lanes) <= 16


def test_one_of_many_replicas_alike_is_simulated() -> None:
    plan, cluster, work = job(128, 64)
    timeline = predicted(plan, cluster, work)
    assert "simulated" in timeline.source
    assert all(lane.label.endswith("64 replicas") for lane in timeline.lanes)


def test_one_of_many_replicas_on_shared_nodes_has_its_part_of_the_nics() -> None:
    shown = {
        count: predicted(*dealt(count, "ring", 25.0 * count)) for count in (12, 24)
    }  # as much for each of its devices
    assert all("cost model" in timeline.source for timeline in shown.values())
    for name in PASSES:
        assert lengths(shown[12], name)[0] == pytest.approx(lengths(shown[24], name)[0])


def split(ranks: int) -> dict:
    layer = {
        "forward": [["compute", "linear", 0.0, 0.25], ["exchange", "heads", 0.25, 0.5], ["wait", "meeting", 0.5, 1.0]],
        "backward": [["compute", "own attention", 0.0, 1.0]],
    }
    return {
        "step": 7,
        "step_seconds": 3.0,
        "ranks": [
            {"rank": r, "device": "fast", "node": f"n{r // 4}", "compute_seconds": float(r % 3), "layer": layer,
             "exchange_seconds": 0.5, "wait_seconds": 0.5, "memory_gb": 1.0} for r in range(ranks)
        ],
    }  # fmt: skip


def test_measured_layer_is_drawn_beside_the_predicted_one(tmp_path: Path) -> None:
    plan, cluster, work = job(2)
    picture.draw(tmp_path, plan, cluster, work)
    before = (tmp_path / "timeline.svg").read_text()
    picture.draw_measured(tmp_path)
    assert (tmp_path / "timeline.svg").read_text() == before  # nothing was measured
    (tmp_path / "step_split.json").write_text(json.dumps(split(4)))
    picture.draw_measured(tmp_path)
    text = text_of((tmp_path / "timeline.svg").read_text())
    assert "measured, step 7" in text
    assert any("simulated" in line for line in text)
    assert text.count("62%") == 4  # 1.25 of 2 s
    (tmp_path / "plan.target.json").write_text("{}")
    picture.draw_measured(tmp_path)
    text = text_of((tmp_path / "timeline.svg").read_text())
    assert any("measured, step 7 of the rehearsal" in line for line in text)
    assert "rank 3, CPU in place of fast" in text


def test_measured_ranks_share_rows_when_there_are_many() -> None:
    timeline = measured(split(24), rehearsal=False)
    assert [lane.label for lane in timeline.lanes][:2] == [
        "rank 2, fast on n0, busiest of 4",
        "rank 5, fast on n1, busiest of 4",
    ]
    assert len(timeline.lanes) == 6


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, cluster, work = job(2)
    elsewhere = Cluster("d", (Node("other", (Seat(FAST),), 300.0, 1, 25.0),))
    picture.draw(tmp_path, plan, elsewhere, work)
    picture.draw(tmp_path / "nowhere", plan, cluster, work)
    (tmp_path / "step_split.json").write_text('{"ranks": [{"layer": 1}]}')
    picture.draw_measured(tmp_path)
    # matplotlib, too, may have something to say, of its fonts.
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.split(" was not drawn: ")[0] for line in lines] == [
        "warning: plan.svg",
        "warning: timeline.svg",
    ] * 2 + ["warning: timeline.svg"]
    assert picture.pictures(tmp_path) == []


def test_comparison_names_jobs_and_their_problems() -> None:
    svg = picture.comparison_svg(
        Comparison("All", ["a<b>", "c"], ["ring", "hexiseq"], {"tokens/s": [None, 1234.0]}, ["out of memory", ""])
    )
    assert {"All", "a<b>", "c", "1,234", "out of memory", "tokens/s"} <= set(text_of(svg))


def test_numbers_in_runs() -> None:
    assert runs([3, 1, 2, 7]) == "1-3, 7"
    assert runs([0, 2, 4, 6]) == "0, 2, ..."

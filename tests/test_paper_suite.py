"""The paper suite: its rows, its traffic count, its tables, and a row from end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import yaml

from benchmarks import paper_report as report
from benchmarks import paper_settings as settings
from benchmarks import paper_suite as suite
from hexiseq.cluster import Cluster
from hexiseq.cost import busy_seconds, predict
from hexiseq.plan import Prediction
from hexiseq.workload import Workload
from recipes.compose import composed
from recipes.job import CONF, workload_of

SMALL = settings.Row("testbed", "paper_testbed_8", "llama_3b", 8192, 1, 1)


def setting(row: settings.Row, *overrides: str) -> tuple[Cluster, Workload]:
    config = composed([*row.overrides, *overrides])
    cluster = Cluster.from_config(config["cluster"])
    return cluster, workload_of(config, cluster)


def test_rows_are_complete_and_unique() -> None:
    rows = settings.all_rows()
    assert len({row.key for row in rows}) == len(rows)
    counts = {family: sum(row.family == family for row in rows) for family in settings.FAMILIES}
    nics = len(settings.NICS)
    assert counts == {"testbed": 3 * 3 * 6 * nics, "simulation": 3 * 2 * 4 * nics, "flops": 4 * 2 * 4 * nics,
        "batch": 3 * 2 * 2 * nics,
    }  # fmt: skip
    # Every cluster written for the suite is in it, and each row's own NICs come first.
    assert {row.cluster for row in rows} == {path.stem for path in (CONF / "cluster").glob("paper_*.yaml")}
    firsts = [row.nics == settings.main_nics(row.cluster) for row in rows]
    assert firsts == sorted(firsts, reverse=True)
    assert sum(firsts) == len(rows) / nics
    assert set(settings.MATCHED) | set(settings.MATCHED.values()) == {r.cluster for r in rows if r.family == "flops"}


def test_clusters_are_those_of_the_paper() -> None:
    expected = {
        "paper_testbed_8": {"h100_sxm": 4, "a100_80": 4},
        "paper_testbed_12": {"h100_sxm": 4, "a100_80": 8},
        "paper_testbed_16": {"h100_sxm": 8, "a100_80": 8},
        "paper_sim_32": {"h100_sxm": 16, "a100_80": 8, "a800": 8},
        "paper_sim_64": {"h100_sxm": 16, "a100_80": 16, "a800": 16, "l40s": 16},
        "paper_sim_128": {"h100_sxm": 32, "a100_80": 32, "a800": 32, "l40s": 32},
        "paper_flops_56": {"h100_sxm": 48, "a100_80": 8},
        "paper_flops_152": {"a100_80": 152},
        "paper_flops_64": {"h100_sxm": 52, "a100_80": 4, "a800": 8},
        "paper_flops_168": {"a100_80": 168},
    }
    for name, counts in expected.items():
        written = yaml.safe_load((CONF / "cluster" / f"{name}.yaml").read_text())
        assert (written["cluster"]["name"], written["paper"]["nics"]) == (name, settings.main_nics(name))
        found = dict.fromkeys(counts, 0)
        for node in written["cluster"]["nodes"]:
            assert (node["nics"], node["nic_gb_per_s"]) == ("${paper.nics}", 25)
            for device in node["devices"]:
                found[device["type"]] += node.get("count", 1) * device["count"]
        assert found == counts


def test_rows_compose() -> None:
    rows = settings.all_rows()
    for row in rows[:: len(rows) // 4]:
        cluster, workload = setting(row)
        assert (cluster.name, workload.model.name, workload.seq_len) == (row.cluster, row.model, row.seq_len)
        assert {node.network_gb_per_s for node in cluster.nodes} == {25.0 * row.nics}
        assert workload.sequences == row.sequences


def test_traffic_between_models_by_hand() -> None:
    """Two groups of an H100 and an A100 each: half of the all-to-all and all of the ring's cross hops."""
    cluster, workload = setting(SMALL, "strategy.recompute=selective")
    h100, a100 = cluster.places[0], cluster.places[4]
    plan = next(
        plan
        for plan in suite.even_grids(workload, [h100, a100])
        if len(plan.replicas[0].groups) == 1 and plan.exchange == "ring"
    )
    model, tokens, heads = workload.model, 4096, 12
    # Forward q, k, v there and out back; backward q, k, v, out, dout there and dq, dk, dv back; both ways; 2 bytes.
    moved = 2 * tokens * heads * model.head_dim * 2 * (3 + 1 + 5 + 3)
    assert suite.traffic_between_models(plan, workload, [h100, a100]) == model.layers * moved
    assert suite.traffic_between_models(plan, workload, [h100, h100]) == 0
    # With full recompute the forward part runs twice.
    full = dataclasses.replace(workload, recompute="full")
    again = dataclasses.replace(plan, recompute="full")
    assert suite.traffic_between_models(again, full, [h100, a100]) == model.layers * moved * (12 + 4) / 12

    # Gathered KV between two groups: a front half one way, everything the other way; dKV in fp32 back.
    gathered = next(
        plan
        for plan in suite.even_grids(workload, [h100, a100])
        if len(plan.replicas[0].groups) == 2 and plan.exchange == "allgather"
    )
    kv = (tokens / 2 + tokens) * 2 * model.kv_heads * model.head_dim
    assert suite.traffic_between_models(gathered, workload, [h100, a100]) == model.layers * kv * (2 + 2 + 4)


def test_even_grids_are_the_legal_ones() -> None:
    cluster, workload = setting(dataclasses.replace(SMALL, cluster="paper_testbed_12", model="llama_7b"))
    grids = list(suite.even_grids(workload, cluster.places))
    widths = [len(plan.replicas[0].groups[0].shards) for plan in grids]
    # 32 heads on 12 ranks: groups of 1, 2 and 4, under either exchange.
    assert widths == [1, 1, 2, 2, 4, 4]
    assert all(sum(shard.num_tokens for shard in plan.shards()) == 8192 for plan in grids)
    twice = dataclasses.replace(workload, sequences=2)
    assert {len(plan.replicas) for plan in suite.even_grids(twice, cluster.places)} == {1, 2}


def test_devices_are_dealt_out_in_turns() -> None:
    cluster, _ = setting(dataclasses.replace(SMALL, cluster="paper_testbed_12"))
    dealt = suite.round_robin(cluster.places)
    assert [p.device.type for p in dealt] == ["h100_sxm", "a100_80"] * 4 + ["a100_80"] * 4
    assert sorted(p.index for p in dealt) == list(range(12))


def test_step_without_parameter_traffic() -> None:
    cluster, workload = setting(SMALL)
    grids = {plan.exchange: plan for plan in suite.even_grids(workload, cluster.places)}

    def seconds(step: float, ring: float, parameters: float, exchange: str = "ring", exposed: float = 0.0) -> float:
        predicted = Prediction(step, 1.0, 6.0, 1.0, ring, parameters, (1.0,) * 8, (2.0,) * 8)
        return suite.without_parameters(dataclasses.replace(grids[exchange], predicted=predicted), exposed)

    assert seconds(8.0, 2.0, 4.0) == 8.0  # compute decides: 1 + 2 + 4 < 8
    assert seconds(8.0, 2.0, 4.0, exposed=0.5) == 7.5
    assert seconds(12.0, 2.0, 10.0) == 7.0  # the wires may: what compute takes by itself
    assert seconds(40.0, 9.0, 30.0) == 10.0  # the wires do even without parameters: 1 + 9
    # Gathered: of 2 gathers and a return of twice the bytes, the return is not hidden.
    assert seconds(12.0, 2.0, 10.0, "allgather") == 8.0
    assert seconds(7.5, 2.0, 10.0, "allgather") == 7.5


def test_row_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "MODES", {mode: suite.MODES[mode] for mode in ("selective, kept", "full")})
    options = ["--rows", "testbed_8 llama_3b", "--nics", "1", "--out", str(tmp_path)]
    rows = suite.parse(options)[1]
    assert [row.seq_len for row in rows] == [8192 << i for i in range(6)]
    suite.main([*options, "--rows", SMALL.key])
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == [SMALL.key]
    record = results[SMALL.key]
    assert set(record["modes"]) == set(suite.MODES)
    for mode in record["modes"].values():
        assert mode["status"] == "ok"
        assert mode["bound_seconds"] <= mode["ours"]["step_seconds"]
        assert 0 < mode["ours"]["balance"] <= 1
        assert 0 < mode["ours"]["memory_fraction"] <= 0.95
        assert mode["even"]["step_seconds"] == mode["rivals"][mode["even"]["name"]]["step_seconds"]
        assert mode["round_robin"]["between_models_gb"] > 0
        for rival in mode["rivals"].values():
            assert rival["status"] != "ok" or rival["step_seconds"] >= mode["ours"]["step_seconds"] * (1 - 1e-9)
    assert "solve" in capsys.readouterr().out
    assert (tmp_path / "results.csv").read_text().count("\n") == 2
    # A second run has nothing to do.
    suite.main([*options, "--rows", SMALL.key])
    assert "1 rows, 0 to solve" in capsys.readouterr().out


def test_figures_agree_with_the_cost_model() -> None:
    cluster, workload = setting(SMALL)
    plan = suite.predicted_grids(cluster, workload, cluster.places)[0]
    found = suite.figures(plan, cluster, workload)
    assert found["step_seconds"] == predict(plan, cluster, workload).step_seconds
    busy = busy_seconds(plan, cluster, workload)
    # An A100 takes about two and a half times as long as an H100 for the same share.
    assert 2.2 < busy[4:].min() / busy[:4].max() < 3.5
    assert busy.max() <= found["step_seconds"]


def record(row: settings.Row, ours: float | None, rivals: dict[str, float | str]) -> settings.Record:
    """A solved row of one mode with made-up steps; a rival's text is its status."""
    free = dict.fromkeys(("even_without_parameters_seconds", "fast_only_without_parameters_seconds"))
    mode: settings.Record = {"status": "out_of_memory", "reason": "", "bound_seconds": 1.0, **free}
    if ours is not None:
        figures = {
            "step_seconds": ours, "without_parameters_seconds": ours / 2, "balance": 0.9, "memory_fraction": 0.5,
            "between_models_gb": 3.0, "replicas": 1, "groups": 2, "exchange": "ring", "devices": 8, "gap": 0.1,
            "excluded": 0, "dealt_gb": 4.0,
        }  # fmt: skip
        listed = {
            name: {"status": "ok", "step_seconds": value} if isinstance(value, float) else
            {"status": value, "step_seconds": None}
            for name, value in rivals.items()
        }  # fmt: skip
        mode |= {"status": "ok", "ours": figures, "solve_seconds": 0.1, "rivals": listed,
                 "even_without_parameters_seconds": 1.0,
                 "fast_only_without_parameters_seconds": 0.6, "round_robin": {"between_models_gb": 6.0}}  # fmt: skip
        if name := suite.best_even(listed):
            mode["even"] = {"name": name, "step_seconds": rivals[name], "balance": 0.6, "memory_fraction": 0.7}
    return {**dataclasses.asdict(row), "modes": {"selective": mode}, "seconds": 1.0}


def test_best_even_split_leaves_ours_and_parts_of_the_cluster_out() -> None:
    listed = {
        "fast_only": {"status": "ok", "step_seconds": 1.0},
        "even": {"status": "ok", "step_seconds": 3.0},
        "usp": {"status": "ok", "step_seconds": 3.0},
        "ring": {"status": "out_of_memory", "step_seconds": None},
        "hexiseq": {"status": "ok", "step_seconds": 0.5},
    }
    assert suite.best_even(listed) == "usp"
    assert suite.best_even({"hexiseq": listed["hexiseq"], "ring": listed["ring"]}) is None


def test_outcomes_keep_rows_with_lacking_memory_apart() -> None:
    lengths = itertools.count(8192)

    def view(ours: float | None, **rivals: float | str) -> settings.Record:
        row = dataclasses.replace(SMALL, seq_len=next(lengths))
        return report.summary(record(row, ours, rivals))

    fit = view(1.0, usp=1.5, ring=2.0, ulysses="illegal", fast_only=1.2, hexiseq=1.0)
    assert (fit["outcome"], fit["gain"], fit["gain_any"], fit["even"]) == ("all fit", 1.5, 1.2, "usp")
    assert (fit["gain_free"], fit["gain_any_free"]) == (2.0, 1.2)
    assert (fit["traffic"], fit["traffic_dealt"]) == (0.5, 0.75)
    partly = view(1.0, usp=1.5, ulysses="out_of_memory", fast_only="out_of_memory")
    assert (partly["outcome"], partly["gain"]) == ("a rival does not fit", 1.5)
    only = view(1.0, usp="out_of_memory", ring="out_of_memory")
    assert (only["outcome"], only["gain"]) == ("no even split fits", None)
    assert view(None)["outcome"] == "nothing fits"

    rows = [
        record(dataclasses.replace(SMALL, seq_len=8192 << i), *given)
        for i, given in enumerate(
            [
                (1.0, {"usp": 1.5, "ring": 2.0}),
                (1.0, {"usp": 1.1}),
                (1.0, {"usp": 9.0, "ring": "out_of_memory"}),
                (1.0, {"usp": "out_of_memory"}),
                (None, {}),
            ]
        )
    ]
    cells = report.gains_table(rows).splitlines()[-1].strip("| ").split(" | ")
    gains = [*["1.300 / 1.500"] * 3, "–", "2.000 / 2.000", "1.200 / 1.200"]
    assert cells == ["testbed", "1 (main)", "2", *gains, "1: 9.000 / 9.000", "1", "1"]


def test_flop_matched_pairs() -> None:
    mixed, alone = (
        settings.Row("flops", name, "llama_13b", 2**18, 1, 8) for name in next(iter(settings.MATCHED.items()))
    )
    results = [record(mixed, 2.1, {"usp": 3.0}), record(alone, 2.5, {"usp": 2.0})]
    (pair,) = report.pairs([report.summary(r) for r in results])
    assert pair[2] == pytest.approx(1.05)  # against the best on the partner, an even split here
    assert "| flops_56 / flops_152 | llama_13b | 256k | 2.1 | 2.5 | 1.050 | 1.000 | 1.429 |" in report.pairs_table(
        results
    )
    # The partner is no mixed cluster: it takes no part in the gains.
    assert "| flops | 8 (main) | 1 | 1.429 / 1.429 | 1.429 / 1.429 |" in report.gains_table(results)


def test_tables_go_between_their_markers() -> None:
    text = "a\n<!-- begin one -->\nold\n<!-- end one -->\nb\n"
    once = report.fill(text, {"one": "| new |"})
    assert once == "a\n<!-- begin one -->\n| new |\n<!-- end one -->\nb\n"
    assert report.fill(once, {"one": "| new |"}) == once
    for broken, parts in ((text, {"two": ""}), (text + text, {"one": ""}), (text, {})):
        with pytest.raises(ValueError, match=r"markers|needs the lines"):
            report.fill(broken, parts)


def test_document_has_the_tables_of_the_suite() -> None:
    results = [record(SMALL, 1.0, {"usp": 1.5})]
    filled = report.fill(suite.DOCS.read_text(), report.tables(results))
    for line in report.against_paper(results).splitlines():
        assert line in filled


def test_pictures(tmp_path: Path) -> None:
    rows = [dataclasses.replace(SMALL, seq_len=8192 << i) for i in range(3)]
    results = [record(row, 1.0, {"usp": 1.5 + i}) for i, row in enumerate(rows)]
    mixed, alone = (
        settings.Row("flops", name, "llama_13b", 2**18, 1, 8) for name in next(iter(settings.MATCHED.items()))
    )
    results += [record(mixed, 2.1, {"usp": 3.0}), record(alone, 2.0, {"usp": 2.0})]
    report.pictures(results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "balance.png", "gain.png", "memory.png", "pairs.png", "traffic.png",
    ]  # fmt: skip


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        suite.parse(["--rows", "llama_9b"])
    assert "no row has llama_9b; a row's name is like 'paper_testbed_8" in capsys.readouterr().err

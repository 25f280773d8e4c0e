"""The harness that puts predictions on trial: its beds can be built, its fit finds what it should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import beds, prediction
from benchmarks.beds import BEDS, Setting, cluster_config, core_rates, job_config
from benchmarks.prediction import REFERENCE, SETTINGS, STEPS, TERMS, calibrate, forecast
from hexiseq.cluster import Cluster
from recipes.job import solve_config


def test_settings_cover_what_they_should() -> None:
    judged = [setting for setting in SETTINGS if not setting.calibrates]
    assert len(judged) >= 11
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    for chosen in (SETTINGS, judged):
        assert {len(BEDS[s.bed]) for s in chosen} == {2, 3, 4, 5}
        assert {s.policy for s in chosen} == {"ring", "ulysses", "usp", "hexiseq"}
        assert {s.exchange for s in chosen} == {"ring", "allgather"}
        assert {s.kv_heads for s in chosen} == {2, 8}
        assert any(s.bed.startswith("slow") for s in chosen)
    assert {min(s.seq_len for s in SETTINGS), max(s.seq_len for s in SETTINGS)} == {2048, 16384}


@pytest.mark.parametrize("bed", BEDS)
def test_beds_hold_on_two_cores(bed: str) -> None:
    cluster = Cluster.from_config(cluster_config(BEDS[bed], core_rates(None)))  # refuses quotas beyond a core
    assert {core for place in cluster.places for core in place.seat.cores} == {0, 1}
    rates = np.array([place.device.gemm_tflops for place in cluster.places])
    assert rates / rates[0] == pytest.approx([rank.share / BEDS[bed][0].share for rank in BEDS[bed]])
    assert cluster.namespaces == bed.startswith("slow")


def record(name: str, truth: dict[str, float]) -> dict:
    """What a run would leave if it went exactly as the model says with the calibration `truth`."""
    setting = next(s for s in SETTINGS if s.name == name)
    config = job_config(setting, cluster_config(BEDS[setting.bed], core_rates(None)), STEPS)
    made = {"config": config, "plan": solve_config(config)[2].to_dict(), "calibrates": setting.calibrates}
    said = forecast(made, truth)
    steps = [
        [{"cpu": cpu, "wall": 0.0, "sent": {"attention": sent}}] * STEPS
        for cpu, sent in zip(said.cpu_seconds, said.attention_bytes, strict=True)
    ]
    ranks = [{"steps": s, "peak_bytes": m} for s, m in zip(steps, said.memory_bytes.tolist(), strict=True)]
    return {**made, "step_seconds": [said.step_seconds] * STEPS, "ranks": ranks, "pace": 1.0}


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_the_fit_foretells_what_it_has_not_seen(clock: str) -> None:
    start = {name: 1.0 for name in prediction.FACTORS} | TERMS
    truth = {**start, "gemm": 0.8, "attention": 0.8, "hbm": 0.7, "step_ms": 120.0}
    records = [record(name, truth) for name in ("1:1 mha 2k ring ring", "1:1 gqa 8k ulysses ring",
                                                "1:.5:.5 mha 4k hexiseq allgather")]  # fmt: skip
    found = calibrate(records, clock)
    # Matrix products and elementwise work both go by tokens: with one model, only their sum can be told.
    assert found["attention"] == pytest.approx(0.8, rel=0.1)
    unseen = record("1:.5:.5 gqa 8k hexiseq ring", truth)
    row = prediction._row(unseen, found, clock)
    assert abs(row["error"]) < 0.02
    assert abs(row["model"] / row["measured"] - 1) > 0.05
    assert row["bytes_exact"]
    assert row["memory_error"] == 0.0


def finished(seconds: float) -> dict:
    rank = {"steps": [{"cpu": seconds, "wall": seconds, "sent": {}}] * STEPS, "peak_bytes": 1}
    return {"step_seconds": [seconds] * STEPS, "ranks": [rank] * 2}


def test_groups_hold_so_many_ranks_and_the_reference() -> None:
    made = prediction.groups(prediction._by_turns(SETTINGS), 20)
    assert sorted(s.name for group in made for s in group[1:]) == sorted({s.name for s in SETTINGS} - {REFERENCE.name})
    for group in made:
        assert group[0] == REFERENCE
        assert len({s.name for s in group}) == len(group)
        assert {s.calibrates for s in group[1:]} == {True, False}
        assert sum(len(BEDS[s.bed]) for s in group) <= 20
    assert [len(group) for group in prediction.groups(SETTINGS, 1)] == [2] * (len(SETTINGS) - 1)  # one at least
    assert prediction.groups([REFERENCE], 20) == [[REFERENCE]]
    assert prediction.groups([], 20) == []


def test_what_is_in_the_file_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rates, runs = tmp_path / "found.json", core_rates(None), []

    def train(settings: dict, steps: int, profile: bool) -> dict:
        assert (steps, profile) == (STEPS, False)
        runs.append(list(settings))
        if "1:1 mha 16k ring ring" in settings:
            raise RuntimeError("1:1 mha 16k ring ring: it failed")
        return {name: finished(1.0) for name in settings}

    monkeypatch.setattr(prediction, "train", train)
    monkeypatch.setattr(prediction.testbed, "lacks_quotas", lambda: "no quotas here")
    monkeypatch.setattr(prediction, "memory", lambda _: (64.0, 4 * prediction.RANK_GB))  # one with the reference
    small, long, quota = "1:1 mha 2k ring ring", "1:1 mha 16k ring ring", "1:.25 gqa 4k hexiseq ring"
    with pytest.raises(RuntimeError, match="16k ring ring: it failed"):
        prediction.run(path, [small, long, quota], rates, profile=False)
    assert runs == [[REFERENCE.name, small], [REFERENCE.name, long]]
    found = json.loads(path.read_text())["settings"]
    assert {name: record["status"] for name, record in found.items()} == {
        REFERENCE.name: "ok",
        small: "ok",
        quota: "skipped",
    }
    assert found[quota]["reason"] == "no quotas here"
    prediction.run(path, [small, quota, REFERENCE.name], rates, profile=False)
    assert len(runs) == 2
    prediction.run(path, [small], {**rates, "gemm_tflops": 1.0}, profile=False)
    assert len(runs) == 3


def test_a_group_that_ran_on_a_slower_machine_is_judged_by_the_reference() -> None:
    records = {str(i): {**finished(seconds), "status": "ok", "reference_seconds": reference}
               for i, (seconds, reference) in enumerate(((3.0, 2.0), (6.0, 4.0), (3.0, 2.0)))}  # fmt: skip
    prediction.pace(records.values())
    assert [prediction.measured_seconds(record) for record in records.values()] == [3.0] * 3
    assert prediction.measured_cpu(records["1"]).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("text", ["", "cluster: {}", "cluster: {gpus: {}}", "a: [", "- 1"])
def test_rates_that_are_no_cluster_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rates.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a cluster that recipe=profile wrote"):
        core_rates(path)


@pytest.mark.slow
def test_jobs_are_trained_by_turns_and_end_with_the_one_that_fails() -> None:
    cluster = cluster_config(BEDS["1:1"], core_rates(None))
    ring, ulysses = (Setting("1:1", beds.GQA, 512, policy, "ring") for policy in ("ring", "ulysses"))
    records = beds.train({"one": (ring, cluster), "other": (ulysses, cluster)}, beds.UNTIMED + 1)
    for record in records.values():
        assert [len(rank["steps"]) for rank in record["ranks"]] == [beds.UNTIMED + 1] * 2
        assert record["step_seconds"][-1] == max(rank["steps"][-1]["wall"] for rank in record["ranks"])
        assert all(rank["peak_bytes"] > 0 and rank["steps"][-1]["cpu"] > 0 for rank in record["ranks"])
        said = forecast({**record, "calibrates": True}, {})
        assert prediction.measured_bytes(record, "attention").tolist() == said.attention_bytes.tolist()
    illegal = Setting("1:.5:.5", beds.MHA, 512, "ulysses", "ring"), cluster_config(BEDS["1:.5:.5"], core_rates(None))
    with pytest.raises(RuntimeError, match="other: policy ulysses on 3 ranks: 8 query heads do not divide"):
        beds.train({"one": (ring, cluster), "other": illegal}, beds.UNTIMED + 1)

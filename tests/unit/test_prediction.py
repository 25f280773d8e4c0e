"""The harness that puts predictions on trial: its beds can be built, its fit finds what it should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import prediction
from benchmarks.prediction import BEDS, SETTINGS, TERMS, calibrate, cluster_config, core_rates, forecast, job_config
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
    config = job_config(setting, cluster_config(BEDS[setting.bed], core_rates(None)))
    made = {"config": config, "plan": solve_config(config)[2].to_dict(), "calibrates": setting.calibrates}
    said = forecast(made, truth)
    steps = [
        [{"cpu": cpu, "wall": 0.0, "sent": {"attention": sent}}] * prediction.STEPS
        for cpu, sent in zip(said.cpu_seconds, said.attention_bytes, strict=True)
    ]
    ranks = [{"steps": s, "peak_bytes": m} for s, m in zip(steps, said.memory_bytes.tolist(), strict=True)]
    return {**made, "step_seconds": [said.step_seconds] * prediction.STEPS, "ranks": ranks}


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


@pytest.mark.parametrize(("first", "again"), [("ok", False), ("skipped", False), ("failed", True)])
def test_what_has_been_tried_is_tried_again_only_if_it_failed_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, again: bool
) -> None:
    setting, path, rates = SETTINGS[0], tmp_path / "found.json", core_rates(None)
    left = [first, "ok", "ok"]
    monkeypatch.setattr(prediction, "in_a_process", lambda *_: {"status": left.pop(0), "reason": "why"})
    for _ in range(2):
        prediction.run(path, [setting.name], rates, profile=False)
    assert len(left) == (1 if again else 2)
    record = json.loads(path.read_text())["settings"][setting.name]
    assert (record["status"], record["calibrates"]) == ("ok" if again else first, True)
    prediction.run(path, [setting.name], {**rates, "gemm_tflops": 1.0}, profile=False)
    assert len(left) == (0 if again else 1)

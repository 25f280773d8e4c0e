"""``recipe=simulate``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes import simulate
from tests.test_configs import composed

SMALL = ("recipe=simulate", "+cluster=cpu_mixed", "data.seq_len=512")
JOB = ("recipe=simulate", "+cluster=h100_a100", "model=llama3_8b", "data.seq_len=32768")


def test_prints_and_writes_what_was_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate.run(composed(*JOB, "recipe.stragglers={0: 2}", "recipe.jitter=0.01", "recipe.show=3"), tmp_path)
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "simulation.json").read_text())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert f"{found['tokens_per_second']:,.0f} tokens/s" in out
    assert f"predicted: {plan['predicted']['step_seconds']:.4g} s" in out
    assert f"utilisation {found['utilisation']:.1%}" in out
    stalls = out.split("longest stalls:")[1].splitlines()[1:4]
    assert all(" waited up to " in line for line in stalls)
    assert "rank 0 (h100_sxm on h100) still at work" in stalls[0]
    assert found["simulated_over_predicted"] > 1.3
    assert found["settings"]["stragglers"] == {"0": 2}
    assert len(found["ranks"]) == len(plan["devices"])
    assert {"rank", "peer", "kind", "late", "wire", "seconds"} == set(found["stalls"][0])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_trace_can_be_left_out(tmp_path: Path) -> None:
    simulate.run(composed(*SMALL, "recipe.trace=false"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "simulation.json"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe.jitter=2", "recipe=simulate: jitter must be a number from 0 to 1, got 2"),
        ("recipe.stragglers={99: 2}", "straggler 99 is not a rank of the plan"),
        ("recipe.stragglers={0: slow}", "the factor of straggler 0 must be a positive number, got 'slow'"),
        ("recipe.window=0", "a receive window is at least 1 slot, got 0"),
        ("recipe.layers=1", "layers to simulate must be an integer of at least 3, got 1"),
        ("recipe.trace=maybe", "recipe.trace must be true or false, got 'maybe'"),
        ("recipe.show=-1", "recipe.show must be an integer of at least 0, got -1"),
        ("data.seq_len=0", "data.seq_len must be an integer of at least 2, got 0"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate.run(composed(*SMALL, override), tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""``report.html``: what it says of a sweep's jobs, whatever has become of them."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import train
from hexiseq.plan import Plan
from recipes import plan, report, simulate
from tests.test_configs import composed

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("+cluster=cpu_mixed", "data.seq_len=512")


def add(sweep: Path, number: int, overrides: str, status: str = "ok", reason: str = "") -> Path:
    run_dir = sweep / str(number)
    train.write_row(sweep / "summary.csv", run_dir, number, overrides, status, reason)
    return run_dir


def planned(sweep: Path, number: int, strategy: str, recipe=plan, task: str = "") -> Path:
    recipe.run(
        composed(f"recipe={recipe.__name__.split('.')[-1]}", *SMALL, f"strategy={strategy}"), sweep / str(number)
    )
    return add(sweep, number, f"+cluster=cpu_mixed strategy={strategy}{task}")


def measure(run_dir: Path, seconds: list[float], **last: float) -> None:
    with (run_dir / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "step_seconds", "tokens_per_second", *last])
        writer.writeheader()
        for step, taken in enumerate(seconds):
            writer.writerow({"step": step, "step_seconds": taken, "tokens_per_second": 511 / taken, **last})


def read(sweep: Path) -> tuple[ElementTree.Element, list[dict[str, str]], str]:
    """The page, its table's rows by column, its text."""
    path = report.write_report(sweep)
    text = path.read_text()
    root = ElementTree.fromstring(text)
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    table = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]] if rows else []
    return root, table, text


def self_contained(text: str) -> bool:
    # Names of XML's vocabularies are no addresses that anything is loaded from.
    loads = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    ids = re.findall(r'\bid="([^"]*)"', text)
    return "<script" not in text and "http" not in loads and len(ids) == len(set(ids))


def test_policies_are_compared(tmp_path: Path) -> None:
    ring = planned(tmp_path, 0, "ring")
    best = planned(tmp_path, 1, "hexiseq")
    add(tmp_path, 2, "+cluster=cpu_mixed strategy=ulysses", "illegal", "9 heads <do> not & divide")
    add(tmp_path, 3, "+cluster=cpu_mixed strategy=usp", "out_of_memory", "needs 99 GB")
    measure(ring, [9.0, 3.0, 3.2, 2.8], mfu=0.21, balance=0.5)
    root, table, text = read(tmp_path)
    assert self_contained(text)
    assert [row["policy"] for row in table] == ["ring", "hexiseq", "ulysses", "usp"]
    assert [row["status"] for row in table] == [
        "ok",
        "ok",
        "illegal9 heads <do> not & divide",
        "out of memoryneeds 99 GB",
    ]
    predicted = [Plan.load(run / "plan.json").predicted for run in (ring, best)]
    assert table[1]["predicted step, s"] == f"{predicted[1].step_seconds:.4g}"
    assert table[1]["predicted speed-up"] == f"{predicted[0].step_seconds / predicted[1].step_seconds:.3f}x"
    assert table[0]["measured step, s"] == "3"  # the median without the first
    assert (table[0]["MFU"], table[0]["balance"]) == ("21.0%", "0.500")
    assert table[1]["measured step, s"] == table[2]["predicted step, s"] == ""
    assert "simulated step, s" not in table[0]
    assert " GB (rank " in table[1]["fullest device"]
    details = list(root.iter("details"))
    assert len(details) == 2
    assert all(len(list(one.iter("{http://www.w3.org/2000/svg}svg"))) == 2 for one in details)
    assert "All with <code>+cluster=cpu_mixed</code>" in text
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"illegal", "out of memory", "predicted tokens/s", "measured tokens/s"} <= set(words)


def test_speed_up_is_over_the_same_task(tmp_path: Path) -> None:
    for number, (strategy, task) in enumerate([("ring", " a=1"), ("hexiseq", " a=1"), ("hexiseq", " a=2")]):
        planned(tmp_path, number, strategy, task=task)
    _, table, _ = read(tmp_path)
    assert table[0]["predicted speed-up"] == "1.000x"
    assert table[1]["predicted speed-up"] > "1.1"
    assert table[2]["predicted speed-up"] == ""


def test_simulated_time_has_its_own_column(tmp_path: Path) -> None:
    planned(tmp_path, 0, "ring", simulate)
    with (tmp_path / "summary.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["step_seconds"] == row["tokens_per_second"] == ""
    assert float(row["simulated_step_seconds"]) == pytest.approx(float(row["predicted_step_seconds"]), rel=0.5)
    _, table, text = read(tmp_path)
    assert table[0]["simulated step, s"] == f"{float(row['simulated_step_seconds']):.4g}"
    assert "measured step, s" not in table[0]
    assert "<details>" in text  # the plan is drawn from plan.json


def test_rehearsals_are_told_apart(tmp_path: Path) -> None:
    run_dir = planned(tmp_path, 0, "hexiseq")
    shutil.copy(run_dir / "plan.json", run_dir / "plan.target.json")
    measure(run_dir, [1.0, 1.0])
    _, table, text = read(tmp_path)
    assert table[0]["status"] == "rehearsed"
    assert "says nothing of those devices" in text
    assert "measured tokens/s, rehearsal on CPUs" in text


def test_sweep_in_which_all_failed(tmp_path: Path) -> None:
    for number, strategy in enumerate(("ring", "usp")):
        add(tmp_path, number, f"strategy={strategy} note=<script>alert(1)</script>", "failed", "RuntimeError: <b>'\"&")
    _, table, text = read(tmp_path)
    assert self_contained(text)
    assert [row["status"] for row in table] == ["failedRuntimeError: <b>'\"&"] * 2
    assert "2 jobs, 0 ran" in text
    assert "<details>" not in text


def test_sweep_can_be_moved_and_reported_again(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    planned(tmp_path / "old", 0, "ring")
    moved = (tmp_path / "old").rename(tmp_path / "new")
    assert report.main([str(moved)]) == 0
    assert "<details>" in (moved / "report.html").read_text()


def test_no_sweep_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "has no summary.csv; name the folder of a sweep" in capsys.readouterr().err
    assert report.main([]) == 2


def test_command_line_sweep_ends_with_its_report(tmp_path: Path) -> None:
    jobs = ("recipe=plan", *SMALL, "strategy=ulysses,hexiseq", "model.config.num_attention_heads=8",
            "model.config.num_key_value_heads=8", f"hydra.sweep.dir={tmp_path}")  # fmt: skip
    done = subprocess.run([sys.executable, ROOT / "train.py", "-m", *jobs], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"written: {tmp_path / 'report.html'}" in done.stdout
    text = (tmp_path / "report.html").read_text()
    assert "2 jobs, 1 ran" in text
    assert "illegal" in text

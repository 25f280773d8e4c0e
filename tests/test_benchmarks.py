"""Benchmarks at tiny size: they run, check what they time, and write what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import attention, memory, peers, posting, scheduler, turns

ROOT = Path(__file__).resolve().parent.parent
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks are pinned to two cores")


def benchmark(name: str, path: Path, *options: str) -> tuple[str, dict]:
    """What the script prints, and what it writes."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((path / "out.json").read_text())


def check_seconds(data: dict, names: set[str], rounds: int) -> None:
    assert set(data["seconds"]) == names
    for passes in data["seconds"].values():
        assert set(passes) == {"forward", "backward", "both"}
        for clocks in passes.values():
            assert all(len(clocks[clock]) == rounds and min(clocks[clock]) > 0 for clock in ("wall", "cpu"))


@pytest.mark.slow
@two_cores
def test_attention_against_peers(tmp_path: Path) -> None:
    said, data = benchmark(
        "attention", tmp_path, "--seq", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--rounds", "2",
        "--exchange", "ring", "allgather",
    )  # fmt: skip
    there = {name for name in peers.NAMES if not peers.not_installed(name)}
    assert {"torch-allgather", "torch-alltoall"} <= there
    ours = {"ours-ring", "ours-allgather", "ours-ulysses"}
    check_seconds(data, ours | there | {"one-process"}, rounds=2)
    assert set(data["errors"]) == ours | there
    assert max(data["errors"].values()) < 1e-5
    assert set(data["absent"]) == set(peers.NAMES) - there
    assert {f"{a} / {b}" for a in ours for b in there} <= set(data["ratios"])
    assert set(data["efficiency"]) == ours | there
    assert "2 ranks on 2 cores, 256 tokens" in said


@pytest.mark.slow
@two_cores
def test_attention_in_bfloat16_on_three_ranks(tmp_path: Path) -> None:
    _, data = benchmark(
        "attention", tmp_path, "--ranks", "3", "--seq", "192", "--heads", "4", "--head-dim", "16", "--rounds", "1",
        "--dtype", "bfloat16",
    )  # fmt: skip
    assert "4 query heads do not divide over 3 ranks" in data["absent"]["ours-ulysses"]
    assert "do not divide" in data["absent"]["ulysses"] or "not installed" in data["absent"]["ulysses"]
    assert data["efficiency"]["ours-ring"][0] == pytest.approx(2 / 3, rel=0.01)


@pytest.mark.slow
@two_cores
def test_uneven_plan_against_even_one(tmp_path: Path) -> None:
    said, data = benchmark("attention", tmp_path, "--uneven", "--seq", "384", "--head-dim", "16", "--rounds", "2")
    check_seconds(data, {"even-ring", "fitting-ring", "one-process"}, rounds=2)
    assert list(data["ratios"]) == ["even-ring / fitting-ring"]
    shares = {name: values[0] for name, values in data["efficiency"].items()}
    assert shares == {"even-ring": pytest.approx(2 / 3, rel=0.01), "fitting-ring": pytest.approx(1 / 2, rel=0.01)}
    assert "even-ring / fitting-ring" in said


@pytest.mark.slow
@two_cores
def test_documents_and_window(tmp_path: Path) -> None:
    said, data = benchmark(
        "attention", tmp_path, "--documents", "64", "--window", "40", "--seq", "512", "--head-dim", "16",
        "--rounds", "1",
    )  # fmt: skip
    check_seconds(data, {"ours-ring", "ours-ring/masked", "one-process", "one-process/masked"}, rounds=1)
    assert list(data["ratios"]) == ["ours-ring/masked / ours-ring", "2 * ours-ring/masked / one-process/masked"]
    assert 0 < data["work"] < 0.2
    assert "window 40" in said


@pytest.mark.slow
@two_cores
@pytest.mark.parametrize("direction", [[], ["--backward"]], ids=["forward", "backward"])
def test_ring_against_simulation(tmp_path: Path, direction: list[str]) -> None:
    said, data = benchmark(
        "ring", tmp_path, "--slots", "4", "2", "2", "--seq", "512", "--head-dim", "16", "--rounds", "2", *direction
    )
    assert [rank for rank, *_ in data["ranks"]] == [0, 1, 2]
    for rank, own in enumerate((4, 2, 2)):
        blocks = [block[1:] for block in data["blocks"] if block[0] == rank]
        assert [(first, ticks) for first, ticks, *_ in blocks] == [(0, own), *((t, 1) for t in range(own, 8))]
        for _, _, start, end, simulated_start, simulated_end in blocks:
            assert start < end
            assert simulated_start < simulated_end
    assert ("backward" if direction else "forward") in said


def test_documents_cover_the_sequence() -> None:
    edges = attention.draw_documents(10_000, 500)
    lengths = np.diff(edges)
    assert (edges[0], edges[-1]) == (0, 10_000)
    assert all(0 < length <= 875 for length in lengths)
    assert min(lengths[:-1]) >= 125
    assert 300 < lengths.mean() < 700
    assert edges == attention.draw_documents(10_000, 500)


@pytest.mark.parametrize(("documents", "window"), [(None, None), (12, None), (None, 5), (12, 5)])
def test_pairs_and_shares_are_counted_right(documents: int | None, window: int | None) -> None:
    options = ["--seq", "64", "--slot", "8"]
    options += [] if documents is None else ["--documents", str(documents)]
    options += [] if window is None else ["--window", str(window)]
    _, contest, _ = attention.parse([*options, "--cores", "1"])
    edges = contest.documents or (0, 64)
    i, document = np.arange(64), np.searchsorted(edges, np.arange(64), side="right")
    seen = (i[:, None] >= i) & (document[:, None] == document) & (i[:, None] - i < (window or 64))
    for rank in range(2):
        positions = contest.plan.shard(rank).positions()
        assert attention.pairs(contest, positions, True) == seen[positions].sum()
        assert attention.pairs(contest, positions, False) == sum(p + 1 for p in positions)
    assert attention.largest_share(contest, next(iter(contest.plans))) == 1.0  # one core does it all


def test_live_storages_against_the_cost_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(["--seq", "100", "--layers", "2", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["dtype"], row["recompute"]) for row in rows] == [
        (dtype, recompute) for dtype in ("float32", "bfloat16") for recompute in ("none", "selective", "full")
    ]
    assert all(0.9 < row["predicted"] / row["backward"] < 1.1 for row in rows)
    assert all(row["forward"] < row["backward"] for row in rows)
    assert "tiny_llama, 2 layers, 100 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        memory.parse(["--seq", "288"])
    assert "none of the model's own sizes, [96, 288, 320, 768], got 288" in capsys.readouterr().err


def test_a_plan_is_timed_and_held_against_fractions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    try:
        scheduler.main(["--gpus", "16", "--runs", "1", "--json", str(tmp_path / "out.json")])
    finally:
        os.sched_setaffinity(0, cores)
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["gain"] > 1
    assert -0.01 < row["rounding"] < 0.02  # both sides are estimates
    assert abs(row["beyond_estimate"]) < 0.02
    assert "16" in capsys.readouterr().out
    assert {(row.cluster, row.model) for row in scheduler.paper_rows()} == {
        (cluster, model) for cluster in ("paper_sim_64", "paper_sim_128") for model in ("llama_13b", "llama3_70b")
    }


def test_jobs_take_turns_one_step_at_a_time(tmp_path: Path) -> None:
    log: list[tuple[int, int]] = []

    def rank(number: int, first: bool, meet: threading.Barrier) -> None:
        seat = turns.Seat(tmp_path, number, 2)
        if first:
            seat.ready()
        for step in range(3):
            seat.wait(2 * step + number)
            log.append((step, number))
            meet.wait()
            if first:  # its fellows may look for their next turn before it has given this one away
                time.sleep(3 * turns.POLL_SECONDS)
                seat.pass_on()
        seat.wait(6)

    meetings = [threading.Barrier(2) for _ in range(2)]
    ranks = [
        threading.Thread(target=rank, args=(job, first, meetings[job])) for job in (0, 1) for first in (True, False)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert log == [(step, number) for step in range(3) for number in (0, 0, 1, 1)]
    late = turns.Seat(tmp_path, 1, 3)
    (tmp_path / turns.FAILED).touch()
    with pytest.raises(RuntimeError, match="job 1 of 3 waited for another that failed"):
        late.wait(7)
    assert turns.Seat.from_arguments(["profile", late.to_argument()]) == late
    assert turns.Seat.from_arguments(["profile"]) is None


@pytest.mark.slow
def test_posting_is_timed_on_both_ends_of_the_ring(capsys: pytest.CaptureFixture[str]) -> None:
    setting = ["+cluster=paper_testbed_16", "model=llama_7b", "data.seq_len=65536", "strategy.exchange=ring"]
    posting.main([*setting, "strategy=ring"])
    header, first, second = capsys.readouterr().out.splitlines()[1:]
    assert "forward, us a tick" in header
    ticks = {line.split()[2] for line in (first, second)}
    assert ticks == {"16"}
    with pytest.raises(SystemExit, match="the plan has no ring"):
        posting.main([*setting, "strategy=ulysses"])


def test_wrong_options_end_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for options, reason in (
        (["--uneven", "--window", "8"], "--uneven compares causal plans of 3 ranks"),
        (["--seq", "64", "--slot", "24"], "3 slots of 24 tokens do not divide into 2 equal parts"),
        (["--documents", "2"], "--documents is a mean length from 4 to 8192 tokens, got 2"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--cores", "1000"], "--cores 1000: this process may use"),
    ):
        with pytest.raises(SystemExit, match="2"):
            attention.parse(options)
        assert reason in capsys.readouterr().err

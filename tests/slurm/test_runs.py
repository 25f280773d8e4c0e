"""Jobs over nodes that differ, run by a real Slurm: ranks on CPUs in place of the nodes' GPUs, all else as it is."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm.jobs import (
    NODES,
    SECONDS,
    STEPS,
    TWO_AND_ONE,
    await_steps,
    checkout_in,
    finish,
    first_steps,
    kinds,
    losses,
    write,
)
from tests.slurm.mini import Mini

pytestmark = pytest.mark.slurm


def test_twelve_ranks_of_torchrun_on_two_nodes_make_a_step(
    slurm: Mini, plain: dict[int, float], early: dict[str, tuple[int, Path]]
) -> None:
    job, folder = early["twelve"]
    state, output = finish(slurm, job, folder)
    assert state == "COMPLETED", output
    assert "step 1/1" in output
    (run_dir,) = (folder / "outputs").iterdir()
    assert losses(run_dir) == pytest.approx({1: plain[1]}, rel=1e-5)
    assert kinds(run_dir) == ["h100_sxm"] * 8 + ["a100_80"] * 4
    assert len(list((run_dir / "logs").glob("rank*.log"))) == 12


def test_jobs_that_are_not_the_cluster_and_a_first_node_that_cannot_be_reached(
    slurm: Mini, plain: dict[int, float], early: dict[str, tuple[int, Path]]
) -> None:
    ends = {name: finish(slurm, job, folder) for name, (job, folder) in early.items() if name != "twelve"}
    assert {name: state for name, (state, _) in ends.items() if state != "FAILED"} == {"replanned": "COMPLETED"}, ends
    said = {name: output for name, (_, output) in ends.items()}
    for name, ranks in (("smaller", 2), ("larger", 4), ("absent", 3)):
        assert f"error: the job's {ranks} ranks are not the 3 devices of cluster 'h100_a100'" in said[name]
        assert re.search(r"^\d: +rank +node|^rank +node", said[name], re.MULTILINE), said[name]
    assert "has no l40s" in said["absent"]
    assert "planning for what is there" in said["replanned"]
    (run_dir,) = (early["replanned"][1] / "outputs").iterdir()
    assert losses(run_dir) == pytest.approx(first_steps(plain), rel=1e-5)
    assert kinds(run_dir) == ["h100_sxm", "a100_80"]
    assert re.search(r"a100-\d.* did not answer", said["unreachable"]), said["unreachable"]
    assert "Traceback" not in "".join(said.values())


@pytest.fixture(scope="module")
def preempted(slurm: Mini, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A job that had to make room for another, and is back in the queue: its number and its folder."""
    folder = checkout_in(tmp_path_factory.mktemp("preempted"))
    # The small node first.
    path = write(folder, TWO_AND_ONE, change=lambda parts: [replace(part, partition="scav") for part in parts[::-1]])
    job = slurm.submit(path, cwd=folder)
    await_steps(slurm, job, folder, 2)
    (folder / "other").write_text("#!/bin/sh\n")
    # It wants all of one component's GPUs.
    other = slurm.submit("other", "--partition=h100", f"--nodes={NODES}", "--gres=gpu:h100:8", cwd=folder)
    assert slurm.wait(other, SECONDS) == ["COMPLETED"]
    return job, folder


def test_a_rank_that_dies_ends_the_job_within_a_minute(
    slurm: Mini, checkout: Path, plain: dict[int, float], preempted: tuple[int, Path]
) -> None:
    # The preempted job goes on beside it. Nodes sort as a100-1, h100-1, ranks do not.
    job = slurm.submit(write(checkout, [*TWO_AND_ONE, "trainer.max_steps=100000"]), cwd=checkout)
    run_dir = await_steps(slurm, job, checkout, 3)
    os.kill(slurm.processes(job)[2], signal.SIGKILL)
    began = time.monotonic()
    state, output = finish(slurm, job, checkout)
    assert time.monotonic() - began < 60
    assert state == "FAILED", output
    assert re.search(r"error: rank 2 \(a100_80 on a100-\d\) was killed by SIGKILL", output), output
    assert first_steps(run_dir) == pytest.approx(first_steps(plain), rel=1e-5)
    assert kinds(run_dir) == ["h100_sxm", "h100_sxm", "a100_80"]


def test_a_preempted_job_goes_on_as_if_it_had_not_been(
    slurm: Mini, plain: dict[int, float], preempted: tuple[int, Path]
) -> None:
    job, folder = preempted
    state, output = finish(slurm, job, folder)
    assert state == "COMPLETED", output
    assert "goes back into the queue" in output
    assert re.findall(r"job \d+, start (\d)", output) == ["1", "2"]
    run_dir = folder / "outputs" / f"slurm-{job}"
    steps = sorted(int(step.name.removeprefix("step-")) for step in (run_dir / "checkpoints").iterdir())
    assert len(steps) == 2
    assert 2 <= steps[0] < steps[1] == STEPS
    assert losses(run_dir) == pytest.approx(plain, rel=1e-5)
    assert kinds(run_dir) == ["a100_80", "h100_sxm", "h100_sxm"]

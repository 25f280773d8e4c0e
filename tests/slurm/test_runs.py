"""Jobs over nodes that differ, run by a real Slurm: ranks on CPUs in place of the nodes' GPUs, all else as it is."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hexiseq.cluster import Cluster
from hexiseq.plan import Plan
from recipes import slurm as recipe
from recipes.slurm import Component
from tests.slurm.conftest import ROOT, SECONDS
from tests.slurm.mini import Mini
from tests.test_configs import composed
from tests.test_slurm_recipe import WALLTIME

pytestmark = pytest.mark.slurm

NODE = "{{name: {0}, devices: [{{type: {1}, count: {2}}}], intra_gb_per_s: 300, nics: 1, nic_gb_per_s: 25}}"
STEPS = 30


def cluster(h100: int, a100: int) -> list[str]:
    """The command line of a job for a node of either kind with so many GPUs."""
    nodes = ",".join((NODE.format("fast", "h100_sxm", h100), NODE.format("slow", "a100_80", a100)))
    return ["+cluster=h100_a100", f"cluster.nodes=[{nodes}]", "model=tiny_llama", "data=synthetic", "data.seq_len=256",
            "trainer.validation_sequences=0", "trainer.validate_every=null", "launch.timeout_seconds=60",
            "strategy.drop_devices=false"]  # fmt: skip


TWO_AND_ONE = [*cluster(2, 1), f"trainer.max_steps={STEPS}", f"recipe.optimizer.total_steps={STEPS}"]
FIRST_STEPS = [*TWO_AND_ONE, "trainer.max_steps=3"]


def write(
    folder: Path,
    arguments: Sequence[str],
    start: str = "agents",
    change: Callable[[list[Component]], list[Component]] = list,
) -> Path:
    """The file for these arguments; `change` makes its components others than the cluster's."""
    config = composed("recipe=slurm", f"recipe.start={start}", *arguments)
    parts = recipe.components(Cluster.from_config(config["cluster"]), config["slurm"], start)
    path = folder / "job.sbatch"
    path.write_text(recipe.script(config, "job", change(parts), WALLTIME, arguments))
    return path


def losses(run_dir: Path) -> dict[int, float]:
    """By step."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row["loss"]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same job in three ranks of one machine, without Slurm and without a break."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, str(ROOT / "train.py"), *TWO_AND_ONE, f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=SECONDS)
    return losses(folder)


def finish(slurm: Mini, job: int, folder: Path) -> tuple[str, str]:
    """Wait for a job's end: the state of its components, which is one, and its output."""
    states = set(slurm.wait(job, SECONDS))
    output = (folder / f"job-{job}.out").read_text()
    assert len(states) == 1, output
    return states.pop(), output


def await_steps(slurm: Mini, job: int, folder: Path, steps: int) -> Path:
    """Wait until a job has made so many steps: its run folder."""
    run_dir, deadline = folder / "outputs" / f"slurm-{job}", time.monotonic() + SECONDS
    while not (run_dir / "metrics.csv").exists() or len(losses(run_dir)) < steps:
        assert slurm.waiting(job), (folder / f"job-{job}.out").read_text()
        assert time.monotonic() < deadline, f"job {job} made no {steps} steps in {SECONDS} s\n{slurm.show(job)}"
        time.sleep(0.1)
    return run_dir


@pytest.mark.parametrize(("start", "small_first"), [("agents", True), ("tasks", False), ("torchrun", False)])
def test_three_ranks_on_two_nodes_compute_what_three_on_one_do(
    slurm: Mini, checkout: Path, plain: dict[int, float], start: str, small_first: bool
) -> None:
    # Nodes sort as a100-1, h100-1: where the large one comes first that is not the order of the ranks.
    path = write(checkout, FIRST_STEPS, start, lambda parts: parts[::-1] if small_first else parts)
    state, output = finish(slurm, slurm.submit(path, cwd=checkout), checkout)
    assert state == "COMPLETED", output
    (run_dir,) = (checkout / "outputs").iterdir()
    assert losses(run_dir) == pytest.approx({step: plain[step] for step in (1, 2, 3)}, rel=1e-5)
    kinds = ["a100_80", "h100_sxm", "h100_sxm"] if small_first else ["h100_sxm", "h100_sxm", "a100_80"]
    assert [device.type for device in Plan.load(run_dir / "plan.json").devices] == kinds
    assert len(list((run_dir / "logs").glob("rank*.log"))) == 3


def test_a_preempted_job_goes_on_as_if_it_had_not_been(slurm: Mini, checkout: Path, plain: dict[int, float]) -> None:
    path = write(checkout, TWO_AND_ONE, change=lambda parts: [replace(part, partition="scav") for part in parts])
    job = slurm.submit(path, cwd=checkout)
    run_dir = await_steps(slurm, job, checkout, 2)
    (checkout / "other").write_text("#!/bin/sh\n")
    # It wants all of one component's GPUs.
    other = slurm.submit("other", "--partition=h100", "--nodes=2", "--gres=gpu:h100:8", cwd=checkout)
    state, output = finish(slurm, job, checkout)
    assert state == "COMPLETED", output
    assert slurm.states(other) == ["COMPLETED"]
    assert "back in the queue" in output
    assert re.findall(r"job \d+, start (\d)", output) == ["1", "2"]
    steps = sorted(int(folder.name.removeprefix("step-")) for folder in (run_dir / "checkpoints").iterdir())
    assert len(steps) == 2
    assert 2 <= steps[0] < steps[1] == STEPS
    assert losses(run_dir) == pytest.approx(plain, rel=1e-5)


def test_a_rank_that_dies_ends_the_job_within_a_minute(slurm: Mini, checkout: Path) -> None:
    job = slurm.submit(write(checkout, [*TWO_AND_ONE, "trainer.max_steps=100000"]), cwd=checkout)
    await_steps(slurm, job, checkout, 1)
    os.kill(slurm.processes(job)[2], signal.SIGKILL)
    began = time.monotonic()
    state, output = finish(slurm, job, checkout)
    assert time.monotonic() - began < 60
    assert state == "FAILED", output
    assert re.search(r"error: rank 2 \(a100_80 on a100-\d\) was killed by SIGKILL", output), output


def test_twelve_ranks_on_two_nodes_make_a_step(slurm: Mini, checkout: Path) -> None:
    arguments = [*cluster(8, 4), "trainer.max_steps=1"]
    state, output = finish(slurm, slurm.submit(write(checkout, arguments), cwd=checkout), checkout)
    assert state == "COMPLETED", output
    assert "step 1/1" in output


@pytest.fixture
def cut_off(slurm: Mini) -> Iterator[int]:
    """A port at which nodes with A100s reach nobody."""
    port, nodes = 23456, ("a100-1", "a100-2")
    rule = ("to", "0.0.0.0/0", "ipproto", "tcp", "dport", str(port), "prohibit")
    for node in nodes:
        slurm.call("ip", "rule", "add", *rule, node=node)
    yield port
    for node in nodes:
        slurm.call("ip", "rule", "delete", *rule, node=node)


def test_jobs_that_are_not_the_cluster_and_a_first_node_that_cannot_be_reached(
    slurm: Mini, tmp_path: Path, cut_off: int
) -> None:
    """All at once: most of them is waiting."""

    def other(number: int, **what: Any) -> Callable[[list[Component]], list[Component]]:
        return lambda parts: [replace(part, **what) if i == number else part for i, part in enumerate(parts)]

    changes: dict[str, tuple[Callable[[list[Component]], list[Component]], list[str]]] = {
        "smaller": (other(0, gpus={"h100": 1}), []),
        "larger": (other(0, gpus={"h100": 3}), []),
        "absent": (other(1, partition="l40s", gpus={"l40s": 1}), []),
        "replanned": (other(0, gpus={"h100": 1}), ["launch.mismatch=replan"]),
        "unreachable": (list, ["launch.timeout_seconds=20"]),
    }
    jobs: dict[str, tuple[int, Path]] = {}
    for name, (change, arguments) in changes.items():
        (folder := tmp_path / name).mkdir()
        (folder / "train.py").symlink_to(ROOT / "train.py")
        path = write(folder, [*FIRST_STEPS, *arguments], change=change)
        env = {"MASTER_PORT": str(cut_off)} if name == "unreachable" else {}
        jobs[name] = slurm.submit(path, cwd=folder, env=env), folder
    ends = {name: finish(slurm, job, folder) for name, (job, folder) in jobs.items()}
    assert {name: state for name, (state, _) in ends.items() if state != "FAILED"} == {"replanned": "COMPLETED"}, ends
    said = {name: output for name, (_, output) in ends.items()}
    for name, ranks in (("smaller", 2), ("larger", 4), ("absent", 3)):
        assert f"error: the job's {ranks} ranks are not the 3 devices of cluster 'h100_a100'" in said[name]
        assert re.search(r"^\d: +rank +node|^rank +node", said[name], re.MULTILINE), said[name]
    assert "has no l40s" in said["absent"]
    assert "planning for what is there" in said["replanned"]
    assert "step 3/3" in said["replanned"]
    assert re.search(r"a100-\d.* did not answer", said["unreachable"]), said["unreachable"]
    assert "Traceback" not in "".join(said.values())

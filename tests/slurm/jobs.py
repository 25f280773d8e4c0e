"""Jobs of the mini Slurm: their files, their ends, and what they found."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hexiseq.cluster import Cluster
from hexiseq.plan import Plan
from recipes import slurm as recipe
from recipes.slurm import Component
from tests.slurm.mini import Mini
from tests.test_configs import composed
from tests.test_slurm_recipe import WALLTIME

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 400  # that a job may take on a busy machine
NODES = 3  # with GPUs of a type
LAYOUT = f"h100:{NODES}:8 a100:{NODES}:4 l40s:1:2"
NODE = "{{name: {0}, devices: [{{type: {1}, count: {2}}}], intra_gb_per_s: 300, nics: 1, nic_gb_per_s: 25}}"
STEPS = 30


def cluster(h100: int, a100: int) -> list[str]:
    """The command line of a job for a node of either kind with so many GPUs, of the same tokens whatever the plan.

    A rehearsal has a whole number of slots, as its plan does.
    """
    nodes = ",".join((NODE.format("fast", "h100_sxm", h100), NODE.format("slow", "a100_80", a100)))
    return ["+cluster=h100_a100", f"cluster.nodes=[{nodes}]", "model=tiny_llama", "data=synthetic", "data.seq_len=256",
            "trainer.validation_sequences=0", "trainer.validate_every=null", "launch.timeout_seconds=60",
            "strategy.drop_devices=false", "strategy.slot=16"]  # fmt: skip


TOTAL_STEPS = f"recipe.optimizer.total_steps={STEPS}"
TWO_AND_ONE = [*cluster(2, 1), f"trainer.max_steps={STEPS}", TOTAL_STEPS]
FIRST_STEPS = [*TWO_AND_ONE, "trainer.max_steps=3"]


def checkout_in(folder: Path) -> Path:
    """The folder, to submit from as from a checkout of the repository."""
    for name in ("train.py", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    return folder


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


def first_steps(found: Path | dict[int, float]) -> dict[int, float]:
    """Three losses, of a run folder or of those given."""
    known = losses(found) if isinstance(found, Path) else found
    return {step: known[step] for step in (1, 2, 3)}


def kinds(run_dir: Path) -> list[str]:
    """The type of each rank's device."""
    return [device.type for device in Plan.load(run_dir / "plan.json").devices]


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

"""The files one submits, judged and run by a real Slurm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hexiseq.cluster import Cluster, gres_of
from recipes import slurm as recipe
from recipes.slurm import Component
from tests.slurm.jobs import NODES, ROOT, SECONDS
from tests.slurm.mini import NODE_CPUS, Mini
from tests.test_configs import composed, names
from tests.test_slurm_recipe import WALLTIME

# These keep one core busy at most: jobs that other tests wait for run beside them.
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("early")]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("h100_a100", "gpu:a100:4", "gpu:a100:9"),
        ("h100_a100", "--partition=h100 --nodes=1", f"--partition=h100 --nodes={NODES + 1}"),
        ("single_partition", "[h100*1&a100*1]", "[h100*1&v100*1]"),
        ("rehearse", "--cpus-per-task=8", f"--cpus-per-task={NODE_CPUS + 1}"),
        ("sweep", "--nodes=1", "--partition=b200"),
    ],
)
def test_files_of_the_repository_are_accepted_and_impossible_ones_refused(
    slurm: Mini, tmp_path: Path, name: str, old: str, new: str
) -> None:
    text = (ROOT / "slurm" / f"{name}.sbatch").read_text()
    assert old in text
    (tmp_path / "job.sbatch").write_text(text.replace(old, new))
    assert slurm.refusal(ROOT / "slurm" / f"{name}.sbatch") is None
    assert "allocation failure" in (slurm.refusal(tmp_path / "job.sbatch") or "")


@pytest.mark.parametrize("name", names("cluster"))
def test_what_a_cluster_asks_for_is_what_slurm_of_its_shape_can_give(asleep, tmp_path: Path, name: str) -> None:
    config = composed("recipe=slurm", f"+cluster={name}")
    cluster = Cluster.from_config(config["cluster"])
    gpus = any(device.vendor != "cpu" for device in cluster.devices)
    shape = [f"{gres_of(node.seats[0].device.type, {})}:{node.count}:{len(node.seats)}" for node in cluster.nodes]
    mini = asleep(" ".join(shape) if gpus else "cpu:1:0")
    path = tmp_path / "job.sbatch"

    def refusal(*parts: Component) -> str | None:
        path.write_text(recipe.script(config, name, parts, WALLTIME, []))
        return mini.refusal(path)

    for start in recipe.STARTS:
        config["recipe"]["start"] = start
        *others, last = recipe.components(cluster, config["slurm"], start)
        assert refusal(*others, last) is None
    assert refusal(*others, replace(last, nodes=(last.nodes or 0) + 1))
    kind, count = next(iter(last.gpus.items()), ("h100", 0))
    assert refusal(*others, replace(last, gpus={kind: count + 1}))
    assert refusal(*others, replace(last, partition="nowhere"))


def test_a_sweep_gives_every_line_a_task_of_its_own(slurm: Mini, checkout: Path) -> None:
    lines = (
        "recipe=plan +cluster=cpu_mixed data.seq_len=256",
        "recipe=simulate '+cluster=cpu_mixed' data.seq_len=512 'recipe.stragglers={0: 2}'",
    )
    (checkout / "list.txt").write_text("\n".join(lines) + "\n")
    job = slurm.submit("slurm/sweep.sbatch", "--array=1-3", "--", "list.txt", cwd=checkout)
    states = slurm.wait(job, SECONDS)
    outputs = [(checkout / f"sweep-{job}_{task}.out").read_text() for task in (1, 2, 3)]
    assert sorted(states) == ["COMPLETED", "COMPLETED", "FAILED"], outputs
    assert "error: list.txt has no line 3" in outputs[2]
    folder = checkout / "outputs" / f"slurm-{job}"
    assert json.loads((folder / "1" / "plan.json").read_text())["seq_len"] == 256
    assert json.loads((folder / "2" / "simulation.json").read_text())["settings"]["stragglers"] == {"0": 2}

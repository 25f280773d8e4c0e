"""``recipe=slurm``: the file it makes for a cluster, and what it finds wrong with another."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hexiseq.cluster import Cluster, gres_of
from recipes import slurm
from tests.test_configs import composed, names

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "slurm"
# What has no GPUs, and starts at once.
SMALL = ("recipe=slurm", "+cluster=cpu_mixed", "data.seq_len=256")


STEP_SECONDS = 2.5
WALLTIME = slurm.Walltime(STEP_SECONDS, 30, 86400)


@cache
def described(name: str) -> tuple[dict[str, Any], Cluster]:
    config = composed("recipe=slurm", f"+cluster={name}")
    return config, Cluster.from_config(config["cluster"])


def made(name: str, start: str = "agents", **site: Any) -> str:
    config, cluster = described(name)
    config = {**config, "recipe": {**config["recipe"], "start": start}, "slurm": {**config["slurm"], **site}}
    parts = slurm.components(cluster, config["slurm"], start)
    return slurm.script(config, name, parts, WALLTIME, ["recipe=slurm", f"+cluster={name}"])


def wrong(text: str, name: str, folder: Path, **site: Any) -> list[str]:
    """What `slurm.check` says of a text, line by line."""
    config, cluster = described(name)
    path = folder / "job.sbatch"
    path.write_text(text)
    try:
        slurm.check(path, slurm.components(cluster, {**config["slurm"], **site}, "agents"), name, STEP_SECONDS, 30)
    except ValueError as error:
        return str(error).splitlines()[1:-1]
    return []


@pytest.mark.parametrize("name", names("cluster"))
def test_every_cluster_gives_a_file_that_agrees_with_it(name: str, tmp_path: Path) -> None:
    _, cluster = described(name)
    gpus = any(device.vendor != "cpu" for device in cluster.devices)
    for start in slurm.STARTS:
        text = made(name, start)
        assert not wrong(text, name, tmp_path)
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        assert text.count("--partition=") == text.count("hetjob\n") + 1 == (len(cluster.nodes) if gpus else 1)
        assert text.count("--gres=gpu:") == (len(cluster.nodes) if gpus else 0)
        assert ("--het-group=" in text) == (text.count("--partition=") > 1)
        asked = slurm.asked(slurm._directives(text))
        per_node = [len(node.seats) for node in cluster.nodes] if gpus else [len(cluster.places)]
        assert [part.tasks for part in asked] == [count if start == "tasks" else 1 for count in per_node]


def test_host_memory_is_asked_for_where_inputs_go_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [f"+cluster.nodes.{node}.host_memory_gb=1000" for node in (0, 1)]
    job = ["recipe=slurm", "+cluster=h100_a100", "strategy.offload=true", *hosts]
    slurm.run(composed(*job), tmp_path, job)
    assert "warning: node h100 keeps 3.22 GB of layers' inputs a GPU in host memory" in capsys.readouterr().err
    slurm.run(composed(*job, "slurm.memory_gb_per_gpu=16"), tmp_path, job)
    assert "keeps" not in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"3.22 GB .* and slurm\.memory_gb_per_gpu asks for 2; ask for more"):
        slurm.run(composed(*job, "slurm.memory_gb_per_gpu=2"), tmp_path, job)


def test_files_of_the_repository_are_those_it_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["recipe=slurm", "+cluster=h100_a100", "recipe.file=slurm/h100_a100.sbatch"]
    slurm.run(composed(*arguments[:2]), tmp_path, arguments)
    # What the plan predicts may change with the cost model; the file says how it is made anew.
    there, now = (re.sub(r"[\d.]+ \w+ a step .*;", "...;", text) for text in (
        (FILES / "h100_a100.sbatch").read_text(), capsys.readouterr().out
    ))  # fmt: skip
    assert there == now
    assert not wrong((FILES / "single_partition.sbatch").read_text(), "h100_a100", tmp_path)
    core = [slurm.Component("cpu", "", 1, {}, 1, 1)]
    for name in ("rehearse", "sweep"):
        assert not slurm.disagreements(slurm.asked(slurm._directives((FILES / f"{name}.sbatch").read_text())), core)
    for path in FILES.glob("*.sbatch"):
        subprocess.run(["bash", "-n", path], check=True)


def test_lines_of_the_sweeps_list_compose() -> None:
    lines = (FILES / "sweep.txt").read_text().splitlines()
    assert [composed(*shlex.split(line))["recipe"]["name"] for line in lines] == ["plan"] * 2 + ["simulate"] * 2
    assert f"--array=1-{len(lines)}\n" in (FILES / "sweep.sbatch").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("--nodes=1", "--nodes=2", "component 0, for node class h100: 2 nodes, the cluster has 1"),
        ("--nodes=1", "-N 1-3", "an unknown number of nodes, the cluster has 1"),
        ("gpu:h100:4", "gpu:h100:2", "2 GPUs per node, the cluster has 4"),
        ("gpu:h100:4", "gpu:h100", "1 GPUs per node, the cluster has 4"),
        ("gpu:h100:4", "gpu:h200:4", "gres gpu:h200:4, the cluster has gpu:h100:4"),
        ("--gres=gpu:h100:4", "--mem=4G", "0 GPUs per node, the cluster has 4"),
        ("--partition=a100", "-p scav", "component 1, for node class a100: partition scav, its GPUs are in a100"),
        ("--partition=h100 ", "", "partition is not given, its GPUs are in h100"),
        ("--ntasks-per-node=1", "--ntasks-per-node=3", "3 tasks per node, where it takes 1"),
        ("--ntasks-per-node=1", "-n 4", "some components have a task per rank, others one per node"),
        ("--ntasks-per-node=1", "--ntasks-per-node=x", "--ntasks-per-node 'x' is not a number"),
        ("#SBATCH hetjob", "#", "no component for node class"),
        ("#SBATCH hetjob", "#SBATCH hetjob\n#SBATCH -p l40s -G 2\n#SBATCH hetjob", "gpu:2), partition l40s: no node"),
        ("--time=1-00:00:00", "--time=0:01", "--time: a time limit of 1 s is shorter than one step"),
        ("--time=1-00:00:00", "-t x", "a time limit is minutes, M:S"),
        ("#SBATCH --time=1-00:00:00\n", "", "no --time"),
    ],
)  # fmt: skip
def test_what_disagrees_is_named(old: str, new: str, words: str, tmp_path: Path) -> None:
    text = made("h100_a100")
    assert old in text
    assert words in "\n".join(wrong(text.replace(old, new, 1), "h100_a100", tmp_path))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--gres=gpu:h100:4", "--gpus-per-node=h100:4"),
        ("--gres=gpu:h100:4", "--gpus-per-node=4"),
        ("--gres=gpu:h100:4", "--gres=lscratch:100,gpu:4 --constraint=h100"),
        ("--ntasks-per-node=1 --gres=gpu:h100:4", "--ntasks-per-node=4 --gpus-per-task=1"),
        ("--ntasks-per-node=1 --gres=gpu:a100:4", "-n1 -G a100:4"),
        ("--partition=h100 --nodes=1", "-p h100 -N1"),
        ("set -euo pipefail", "set -euo pipefail\n#SBATCH --nodes=7"),
    ],
)
def test_other_ways_to_ask_for_the_same_agree(old: str, new: str, tmp_path: Path) -> None:
    text = made("h100_a100")
    assert old in text
    text = text.replace(old, new, 1)
    if "per-task" in new:
        text = text.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
    assert not wrong(text, "h100_a100", tmp_path)


def test_components_may_come_in_another_order(tmp_path: Path) -> None:
    lines = made("paper_flops_64").splitlines()
    first, last = (i for i in range(len(lines)) if "h100:8" in lines[i] or "h100:4" in lines[i])
    lines[first], lines[last] = lines[last], lines[first]
    assert not wrong("\n".join(lines), "paper_flops_64", tmp_path)


def test_one_allocation_is_its_features(tmp_path: Path) -> None:
    text = (FILES / "single_partition.sbatch").read_text()
    assert not wrong(text, "h100_a100", tmp_path)
    (line,) = wrong(text.replace("a100*1", "a100*2"), "h100_a100", tmp_path)
    assert "--nodes=2, its constraint" in line
    text = text.replace("a100*1", "a100*2").replace("--nodes=2", "--nodes=3")
    assert wrong(text, "h100_a100", tmp_path) == ["  the job, a100, for node class a100: 2 nodes, the cluster has 1"]


def test_names_and_amounts_of_the_site(tmp_path: Path) -> None:
    site = {
        "partition": {"h100_sxm": "gpu", "a100_80": "gpu"},
        "gres": {"a100_80": "nvidia_a100"},
        "account": "lab",
        "cpus_per_gpu": 12,
        "memory_gb_per_gpu": 100,
        "setup": ["module load cuda"],
        "srun": ["--mpi=none", "--container-image=a b"],
    }
    text = made("h100_a100", "tasks", **site)
    for words in (
        "#SBATCH --account=lab\n",
        "--partition=gpu --nodes=1 --ntasks-per-node=4 --gres=gpu:nvidia_a100:4 --cpus-per-task=12 --mem=381470M",
        "\nmodule load cuda\n# --- end of site",
        " --mpi=none '--container-image=a b' ",
    ):
        assert words in text
    assert "--cpus-per-task=48 " in made("h100_a100", **site)
    assert not wrong(text, "h100_a100", tmp_path, **site)
    assert len(wrong(text, "h100_a100", tmp_path)) == 3  # two partitions, one gres
    assert [gres_of(kind, site["gres"]) for kind in ("h100_sxm", "a100_80", "l40s")] == ["h100", "nvidia_a100", "l40s"]


def test_types_that_slurm_could_confuse_are_refused() -> None:
    config = composed(
        "recipe=slurm",
        "+cluster=h100_a100",
        "+gpu@cluster.gpus.a100_40=a100_40",
        "cluster.nodes.0.devices.0.type=a100_40",
    )
    cluster = Cluster.from_config(config["cluster"])
    with pytest.raises(ValueError, match="a100_40 and a100_80 are both gres 'a100' in partition 'a100'"):
        slurm.components(cluster, config["slurm"], "agents")
    slurm.components(cluster, {**config["slurm"], "gres": {"a100_40": "a100.40"}}, "agents")


def test_the_job_gets_what_was_asked_for_and_the_site_lines_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.sbatch"
    given = [
        *SMALL,
        "recipe.optimizer.lr=0.1",
        "+slurm.gres.x=y",
        "slurm.account=lab",
        f"recipe.file={path}",
        "ckpt_path=a b",
    ]
    config = composed(*given)
    slurm.run(config, tmp_path, given)
    assert f"submit it with: sbatch {path}" in capsys.readouterr().out
    text = path.read_text()
    job = "+cluster=cpu_mixed data.seq_len=256 recipe.optimizer.lr=0.1 +slurm.gres.x=y"
    assert f'train.py {job} hydra.run.dir=outputs/slurm-$SLURM_JOB_ID ckpt_path="$start"\n' in text
    assert "start=auto \\\n  || start='a b'\n" in text
    path.write_text(text.replace("# module load cuda", "module load mine").replace("--nodes=1", "--nodes=2"))
    slurm.run(config, tmp_path, given)
    assert path.read_text() == text.replace("# module load cuda", "module load mine")
    path.write_text("#!/bin/bash\n")
    with pytest.raises(ValueError, match="has no lines"):
        slurm.run(config, tmp_path, given)
    assert path.read_text() == "#!/bin/bash\n"


def test_time_limits_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.run(composed(*SMALL, "trainer.max_steps=100000000"), tmp_path, SMALL)
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n")
    assert "100,000,000 steps about" in out
    assert err.startswith("warning: ")
    assert "each requeued and resumed" in err
    small = ("recipe=slurm", "+cluster=h100_a100", "model=tiny_llama", "data.seq_len=256")
    slurm.run(composed(*small), tmp_path, small)
    assert "warning: the fast devices alone are predicted to take" in capsys.readouterr().err
    limits = ("data.seq_len=32768", "recipe.time='0:02'", "recipe.signal_seconds=1")
    with pytest.raises(ValueError, match=r"recipe\.time: a time limit of 2 s is shorter than one step"):
        slurm.run(composed(*SMALL, *limits), tmp_path, SMALL)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(30, 1800), ("90:30", 5430), ("2:00:00", 7200), ("1-12", 129600), ("1-2:30", 95400), ("1-00:00:01", 86401),
     ("UNLIMITED", math.inf), (0, math.inf)],
)  # fmt: skip
def test_a_time_limit_is_read_as_sbatch_does(text: Any, seconds: float) -> None:
    assert slurm.seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("recipe.start=mpi",), "recipe.start 'mpi' is not one of agents, tasks, torchrun"),
        (("recipe.time=tomorrow",), "a time limit is minutes, M:S, H:M:S"),
        (("recipe.time=2",), "recipe.signal_seconds must be an integer from 1 to 65535 and less than the time limit"),
        (("slurm.cpus_per_gpu=0",), "slurm.cpus_per_gpu must be a positive number or null, got 0"),
        (("slurm.partition=h100",), "slurm.partition must map device types to names, got 'h100'"),
        (("slurm.setup=module",), "slurm.setup must be a list of texts, got 'module'"),
        (("strategy=fast_only",), "strategy=fast_only leaves out devices of type cpu_half_core"),
        (("recipe.check=nowhere",), "recipe.check nowhere cannot be read: No such file"),
        (("recipe.file=nowhere/x",), "recipe.file nowhere/x cannot be written: No such file"),
        (("~cluster",), r"name one with \+cluster=NAME"),
    ],
)
def test_mistakes_are_named(overrides: tuple[str, ...], words: str, tmp_path: Path) -> None:
    config = composed(*SMALL, *(text for text in overrides if text[0] != "~"))
    if "~cluster" in overrides:
        del config["cluster"]
    with pytest.raises(ValueError, match=words):
        slurm.run(config, tmp_path, SMALL)


def test_command_line(call) -> None:
    code, out, _ = call(*SMALL, "recipe.time=90")
    assert code == 0
    assert "train.py +cluster=cpu_mixed data.seq_len=256 hydra.run.dir=" in out
    Path("job.sbatch").write_text(out)
    for key in ("check", "recipe.check"):
        code, out, _ = call(*SMALL, f"{key}=job.sbatch")
        assert (code, out.count("\n")) == (0, 1)
        assert "job.sbatch agrees with cluster 'cpu_mixed'" in out
    code, out, err = call("recipe=slurm", "+cluster=h100_a100", "check=job.sbatch")
    assert (code, out) == (2, "")
    assert err.startswith("error: job.sbatch disagrees with cluster 'h100_a100', which is h100 (1 node, gpu:h100:4), ")

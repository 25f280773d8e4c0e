"""Slurm's facts, from environments and answers that were recorded in real jobs of a small cluster.

``two``: a heterogeneous job, 2 ranks on h100-1 and 1 on each of two A100 nodes. ``three``: one of three components, its
first on a node that sorts second. ``unequal``: an array's task with 2 and 1 tasks on two nodes; ``single`` a one-task
step in it. ``salloc``: an interactive shell; ``insalloc``: a step started from it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hexiseq import launch
from hexiseq.launch import slurm

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "slurm_recordings.json").read_text())
ENVIRONMENTS = RECORDED["environments"]


@pytest.mark.parametrize(
    ("name", "nodes", "tasks", "partitions"),
    [
        ("two", ("h100-1", "a100-1", "a100-2"), (2, 1, 1), ("h100", "a100", "a100")),
        ("three", ("a100-2", "h100-1", "a100-1"), (1, 3, 2), ("a100", "h100", "all")),
        ("unequal", ("a100-1", "h100-1"), (2, 1), ("all", "all")),
        ("single", ("a100-1",), (1,), ("all",)),
        ("insalloc", ("a100-1", "a100-2"), (1, 1), ("a100", "a100")),
    ],
)
def test_every_task_knows_its_place(
    name: str, nodes: tuple[str, ...], tasks: tuple[int, ...], partitions: tuple[str, ...]
) -> None:
    places = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    first = launch.party(ENVIRONMENTS[f"{name}.0"])
    assert first is not None
    for number, (node, local) in enumerate(places):
        environment = ENVIRONMENTS[f"{name}.{number}"]
        task = slurm.task(environment)
        assert task is not None
        assert (task.number, task.node, task.local, task.size) == (number, node, local, len(places))
        assert (task.nodes, task.tasks, task.partitions) == (nodes, tasks, partitions)
        assert task.nodes[task.node] == environment["SLURMD_NODENAME"]
        own = launch.party(environment)
        assert own is not None
        # The first rank's node, whatever name sorts first; agents where there is one task a node.
        assert (own.address, own.agents) == (nodes[0], max(tasks) == 1)
        assert own.port == first.port


@pytest.mark.parametrize("name", ["two.batch", "three.batch", "unequal.batch", "salloc"])
def test_a_batch_script_or_shell_is_no_task(name: str) -> None:
    assert slurm.task(ENVIRONMENTS[name]) is None
    assert launch.party(ENVIRONMENTS[name]) is None
    assert slurm.nodes_of_job(ENVIRONMENTS[name]) == {"two.batch": 3, "three.batch": 3}.get(name, 2)


def test_torchrun_inside_a_job_is_torchruns() -> None:
    launched = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "h100-1", "MASTER_PORT": "29400"}
    own = launch.party({**ENVIRONMENTS["two.2"], **launched})
    assert own is not None
    assert (own.number, own.size, own.agents, own.address, own.port) == (3, 4, False, "h100-1", 29400)


def test_jobs_are_known_by_what_scontrol_takes() -> None:
    assert slurm.job_id(ENVIRONMENTS["unequal.0"]) == "10_3"
    assert slurm.job_id(ENVIRONMENTS["three.5"]) == "7"  # the leader's, in every component
    assert slurm.job_id({}) is None


def test_components_that_share_a_node_are_refused() -> None:
    shared = {**ENVIRONMENTS["two.0"], "SLURM_JOB_NODELIST_HET_GROUP_1": "h100-1,a100-[1-2]"}
    with pytest.raises(ValueError, match=r"share h100-1; ask for each on nodes of its own"):
        slurm.task(shared)


def test_host_lists() -> None:
    assert slurm.expand_hosts("a[1-3,07-08],b,c-[1-2]-x,r[1-2]n[1-2]") == [
        "a1", "a2", "a3", "a07", "a08", "b", "c-1-x", "c-2-x", "r1n1", "r1n2", "r2n1", "r2n2",
    ]  # fmt: skip
    assert slurm.expand_hosts("node[098-101]") == ["node098", "node099", "node100", "node101"]
    assert slurm.expand_counts("1(x2),4") == [1, 1, 4]


def test_the_controllers_record() -> None:
    record = slurm.read_record(RECORDED["jobs"]["three"])
    assert record == slurm.Record({"a100-2": "a100", "h100-1": "h100", "a100-1": "a100"}, 120.0)
    record = slurm.read_record(RECORDED["jobs"]["unequal"])
    assert record.gres == {"a100-1": "a100", "h100-1": "h100"}
    assert slurm.read_record("JobId=1 TimeLimit=2-03:04:05 x").limit_seconds == ((2 * 24 + 3) * 60 + 4) * 60 + 5
    assert slurm.read_record("JobId=1 TimeLimit=UNLIMITED x").limit_seconds is None


def test_a_silent_controller_is_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PATH", "")
    assert slurm.limit_seconds() == math.inf
    assert slurm.record() is None
    assert "scontrol" in str(slurm.requeue())


def test_gpus_are_those_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, GPU-aaa1'\necho '1, NVIDIA H100 80GB HBM3, GPU-bbb2'\n"
        "echo '2, NVIDIA A100-SXM4-80GB, GPU-ccc3'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    h100, a100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    for chosen, found in [
        (None, (f"{h100} GPU-aaa1", f"{h100} GPU-bbb2", f"{a100} GPU-ccc3")),
        ("2,0", (f"{a100} GPU-ccc3", f"{h100} GPU-aaa1")),
        ("GPU-bbb", (f"{h100} GPU-bbb2",)),
        ("", ()),
    ]:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert launch.visible_gpus() == found
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert launch.visible_gpus() == ()


def test_an_address_nobody_answers_at_is_named_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    own = launch.party({**ENVIRONMENTS["two.2"], "MASTER_PORT": "1"})
    assert own is not None
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here = launch.Party(own.number, own.size, own.agents, "127.0.0.1", own.port, own.task)
    with pytest.raises(ValueError, match=r"task 2 on \S+: task 0 did not answer at 127.0.0.1:1 within 2 s") as caught:
        launch.meet(here, 2)
    assert "MASTER_PORT" in str(caught.value)


def test_requeueing_says_why_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    launch.requeue()
    assert "go on with ckpt_path=auto" in capsys.readouterr().out
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\necho 'Requested operation is presently disabled' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    launch.requeue()
    assert "job 12 was not put back into the queue (Requested operation is presently disabled)" in (
        capsys.readouterr().out
    )


def test_who_starts_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    names = ("NVIDIA H100", "NVIDIA H100")

    def party(agents: bool, size: int) -> launch.Party:
        return launch.Party(0, size, agents, "a", 1, None)

    def there(*counts: int | None, devices: tuple[str, ...] = ()) -> list[launch.Presence]:
        return [launch.Presence(f"n{i}", "", count, i, devices) for i, count in enumerate(counts)]

    found, counts = launch.members(party(True, 2), there(2, 1, devices=names), [2, 1], on_gpus=True)
    assert counts == [2, 1]
    assert [(m.node, m.device) for m in found] == [("n0", names[0]), ("n0", names[1]), ("n1", names[0])]
    # A rank takes the GPU of its number, or the only one it sees.
    ranks, _ = launch.members(party(False, 2), there(1, 1, devices=("x", "y")), None, on_gpus=True)
    assert [m.device for m in ranks] == ["x", "y"]
    ranks, _ = launch.members(party(False, 2), there(1, 1, devices=("x",)), None, on_gpus=True)
    assert [m.device for m in ranks] == ["x", "x"]
    # A CPU cluster's ranks, whatever GPUs the nodes have; on one node all of them.
    assert launch.members(party(True, 2), there(8, 8), [3, 2], on_gpus=False)[1] == [3, 2]
    assert launch.members(party(True, 1), there(None), [3, 2], on_gpus=True)[1] == [5]
    for per_node, words in [(None, "no cluster is named"), ([1, 1, 1], "the cluster has 3 nodes")]:
        with pytest.raises(ValueError, match=rf"no GPUs on n0, n1, .* its 2 nodes shall have, and {words}"):
            launch.members(party(True, 2), there(None, None), per_node, on_gpus=True)
    with pytest.raises(ValueError, match="no GPUs on n1"):
        launch.members(party(True, 2), there(2, None), [2, 1], on_gpus=True)


@pytest.mark.parametrize("number", range(6))
def test_lightning_is_told_the_truth(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hexiseq.environment import SlurmEnvironment

    for name, value in ENVIRONMENTS[f"three.{number}"].items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    environment = SlurmEnvironment()
    node, local = [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)][number]
    assert (environment.global_rank(), environment.node_rank(), environment.local_rank()) == (number, node, local)
    assert (environment.world_size(), environment.main_address, environment.main_port) == (6, "a100-2", 20007)
    # Lightning's own would refuse: not every node has as many ranks as this one.
    environment.validate_settings(num_devices=environment.task.tasks[node], num_nodes=3)
    assert SlurmEnvironment.detect()
    assert not environment.auto_requeue


def test_without_a_step_there_is_no_slurm_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from hexiseq.environment import SlurmEnvironment

    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert not SlurmEnvironment.detect()
    with pytest.raises(ValueError, match="needs ranks started with srun"):
        SlurmEnvironment()


def test_a_task_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hexiseq.environment import Launched

    monkeypatch.setenv("LOCAL_RANK", "2")
    for visible, index in [(1, 0), (4, 2), (0, 2)]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert Launched().local_rank() == index

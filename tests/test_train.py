"""The command line as a user meets it: what runs, what is refused, with which words and which exit code."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hexiseq.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
FEW_STEPS = ("trainer.max_steps=2", "trainer.validate_every=null", "data.seq_len=256")


class Answer:
    def __init__(self, code: int, out: str, err: str, folder: Path) -> None:
        self.code, self.out, self.err, self.folder = code, out, err, folder

    @property
    def run_dir(self) -> Path:
        return next(path.parent for path in sorted(self.folder.rglob("plan.json")))


@pytest.fixture
def call(call, tmp_path: Path):
    """The same, with the folder of the run."""
    return lambda *arguments: Answer(*call(*arguments), tmp_path)


H100_A100 = ("recipe=plan", "+cluster=h100_a100")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("recipe=plan", "+cluster=nowhere"), 1, ["Could not find 'cluster/nowhere'", "h100_a100", "cpu_mixed"]),
        (("recipe=plan", "cluster=h100_a100"), 1, ["+cluster=h100_a100"]),
        ((*H100_A100, "cluster.nodes.0.devices.0.type=h900"), 2, ["'h900'", "h100_sxm"]),
        (
            (*H100_A100, "cluster.gpus.h100_sxm.memory_gb=0"),
            2,
            ["'h100_sxm'", "memory_gb must be a positive number", "got 0"],
        ),
        (
            (*H100_A100, "cluster.nodes.1.nic_gb_per_s=-25"),
            2,
            ["'a100'", "nic_gb_per_s must be a positive number", "got -25"],
        ),
        (
            (*H100_A100, "hydra.run.dir=/proc/nowhere/run"),
            2,
            ["the run folder /proc/nowhere/run cannot be written to", "hydra.run.dir=FOLDER"],
        ),
        ((*H100_A100, "trainer.print_every=0"), 2, ["trainer.print_every must be an integer of at least 1, got 0"]),
        ((*H100_A100, "trainer.split_every=1.5"), 2, ["trainer.split_every must be an integer of at least 1, got 1.5"]),
        ((*H100_A100, "trainer.trace_steps=[3]"), 2, ["trainer.trace_steps must be two ascending steps", "got [3]"]),
        ((*H100_A100, "trainer.trace_steps=[3,3]"), 2, ["trainer.trace_steps must be two ascending", "got [3, 3]"]),
        ((*H100_A100, "launch.preflight=1"), 2, ["launch.preflight must be true or false, got 1"]),
        (
            (*H100_A100, "launch.preflight_timeout_seconds=0"),
            2,
            ["launch.preflight_timeout_seconds must be above 0 and at most 604800, got 0"],
        ),
        ((*H100_A100, "data.seq_len=0"), 2, ["data.seq_len must be an integer of at least 2, got 0"]),
        (
            (*H100_A100, "data.seq_len=8000000", "strategy.offload=auto"),
            2,
            ["GB", "h100", "seq_len", "warning: strategy.offload=auto does without offload: node h100 has no host_mem"],
        ),
        ((*H100_A100, "model.config.num_key_value_heads=5"), 2, ["32 query heads are not a multiple of 5 KV heads"]),
        ((*H100_A100, "strategy.offload=maybe"), 2, ["strategy.offload must be true, false or auto, got 'maybe'"]),
        (
            (*H100_A100, "strategy.offload=true", "strategy.recompute=none"),
            2,
            ["strategy.offload=true with strategy.recompute=none: offload", "use recompute selective or full"],
        ),
        (
            (*H100_A100, "strategy.offload=true"),
            2,
            ["offload: node h100 has no host_memory_gb", "strategy.offload=false"],
        ),
        (
            ("recipe=plan", "+cluster=cpu_mixed", "strategy.offload=true"),
            2,
            ["device type cpu_core has no host_gb_per_s", "cluster.gpus.cpu_core.host_gb_per_s"],
        ),
        ((*H100_A100, "strategy=manual", "strategy.plan=nowhere.json"), 2, ["plan file nowhere.json: No such file"]),
        ((*H100_A100, "strategy=manual"), 2, ["strategy.plan"]),
        ((*H100_A100, "strategy.plan=plan.json"), 2, ["only read by strategy=manual"]),
        ((*H100_A100, "strategy.dtype=int4"), 2, ["strategy.dtype 'int4' is not one of"]),
        (
            (
                *H100_A100,
                "strategy=ulysses",
                "model.config.num_attention_heads=36",
                "model.config.num_key_value_heads=36",
            ),
            2,
            ["ulysses", "36"],
        ),
        (("+cluster=cpu_mixed", "ckpt_path=nowhere"), 2, ["ckpt_path 'nowhere' does not exist"]),
        (
            ("+cluster=cpu_mixed", "trainer.max_steps=0"),
            2,
            ["trainer.max_steps must be an integer of at least 1, got 0"],
        ),
        (("+cluster=cpu_mixed", "data=text_dir", "data.path=empty"), 2, ["empty"]),
        (("+cluster=cpu_mixed", "recipe.optimizer.lr=abc"), 2, ["optimizer lr must be a positive number, got 'abc'"]),
        (("+cluster=cpu_mixed", "strategy.dtype=float16"), 2, ["float16", "loss scaling"]),
        (("+cluster=cpu_mixed", "model.config.model_type=dance"), 2, ["dance"]),
        (("+cluster=cpu_mixed", "model.config.vocab_size=10"), 2, ["vocab_size 10 is smaller"]),
        (("+cluster=cpu_mixed", "seed=99999999999"), 2, ["seed must be below 2^32"]),
        (("+cluster=cpu_mixed", "ckpt_path=empty"), 2, ["ckpt_path 'empty' is no whole checkpoint"]),
        (("+cluster=cpu_mixed", "recipe.name=dance"), 2, ["'dance' is not one of plan, simulate, slurm"]),
        (("+cluster=cpu_mixed", "launch.mismatch=hope"), 2, ["launch.mismatch 'hope' is not one of refuse, replan"]),
        (("+cluster=cpu_mixed", "launch.timeout_seconds=0"), 2, ["launch.timeout_seconds must be above 0"]),
    ],
)
def test_mistakes_end_before_any_rank_starts(
    call, tmp_path, arguments: tuple[str, ...], code: int, words: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    answer = call(*arguments)
    assert answer.code == code
    for word in words:
        assert word in answer.err
    assert "Traceback" not in answer.err
    assert len(answer.err.splitlines()) < 40
    assert not list(tmp_path.rglob("logs"))


def broken_plans(plan: dict) -> dict[str, dict]:
    lost, doubled = json.loads(json.dumps(plan)), json.loads(json.dumps(plan))
    lost["replicas"][0]["groups"][0]["shards"][0]["tokens"][0][0] += 1
    widest = max(doubled["replicas"][0]["groups"], key=lambda group: len(group["shards"]))
    widest["shards"][0]["heads"][1] += 1
    return {"belong to no rank": lost, "belong to ranks": doubled}


def test_plan_recipe_writes_a_plan_that_can_be_edited_and_checked(call, tmp_path: Path) -> None:
    answer = call("recipe=plan", "+cluster=h100_a100_16", "model=llama3_8b", "data.seq_len=262144")
    assert answer.code == 0
    plan = json.loads((answer.run_dir / "plan.json").read_text())
    assert (plan["policy"], plan["seq_len"]) == ("hexiseq", 262144)
    assert plan["slot"] > 0
    assert plan["predicted"]["step_seconds"] >= plan["bound"]["step_seconds"] > 0
    assert plan["gap"] == pytest.approx(plan["predicted"]["step_seconds"] / plan["bound"]["step_seconds"] - 1)
    assert plan["predicted"]["tokens_per_second"] == pytest.approx(262144 / plan["predicted"]["step_seconds"])
    assert len(plan["predicted"]["memory_gb"]) == len(plan["devices"]) == 16
    assert plan["solve_seconds"] < 5
    assert {rival["name"] for rival in plan["rivals"]} >= {"fast_only", "ring", "ulysses", "usp", "hexiseq"}
    shard = plan["replicas"][0]["groups"][0]["shards"][0]
    assert set(shard) == {"rank", "tokens", "heads"}
    assert "rivals" in answer.out
    assert (answer.run_dir / "plan.svg").read_text().startswith("<?xml")
    job = ("recipe=plan", "+cluster=h100_a100_16", "model=llama3_8b", "data.seq_len=262144", "strategy=manual")
    assert call(*job, f"strategy.plan={answer.run_dir / 'plan.json'}").code == 0
    (tmp_path / "moved.json").write_text(json.dumps({**plan, "recompute": "full", "offload": True}))
    job = (*job, "strategy.plan=moved.json")
    hosts = [f"+cluster.nodes.{node}.host_memory_gb=1000" for node in (0, 1)]
    assert call(*job, *hosts).code == 0  # a plan says what it recomputes and whether it offloads
    for words, settings in (
        ('or do without: strategy.offload=false, with a manual plan "offload": false in it', ()),
        ("set strategy.offload=true, or make a new plan", ("strategy.offload=false",)),
        ("set strategy.recompute=full strategy.offload=true", ("strategy.recompute=none", *hosts)),
    ):
        refused = call(*job, *settings)
        assert refused.code == 2
        assert words in refused.err
    for words, broken in broken_plans(plan).items():
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        refused = call(*job, "strategy.plan=broken.json")
        assert refused.code == 2
        assert words in refused.err


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_sweep_under_a_launcher_is_refused(call, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "3"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    answer = call(flag, "+cluster=cpu_mixed", "strategy=ring,hexiseq", "launch.timeout_seconds=1")
    assert answer.code == 2
    assert "3 processes" in answer.err


def test_a_time_limit_shorter_than_a_step_is_refused(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\necho 'JobId=5 TimeLimit=00:00:01 x'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    answer = call("+cluster=cpu_mixed", "data.seq_len=65536", "trainer.max_steps=2")
    assert answer.code == 2
    assert "the Slurm job's --time: a time limit of 1 s is shorter than one step" in answer.err
    assert not list(tmp_path.rglob("logs"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_training_on_uneven_ranks(call) -> None:
    answer = call("+cluster=cpu_mixed", *FEW_STEPS)
    assert answer.code == 0, answer.err
    steps = [row for row in rows(answer.run_dir / "metrics.csv") if row["loss"]]
    assert [int(row["step"]) for row in steps] == [1, 2]
    assert float(steps[1]["loss"]) < float(steps[0]["loss"]) < 6.5
    for row in steps:
        assert float(row["tokens_per_second"]) * float(row["step_seconds"]) == pytest.approx(
            255
        )  # the last has no label
        assert float(row["predicted_step_seconds"]) > 0
    tokens = [int(float(steps[0][f"tokens_rank_{rank}"])) for rank in range(3)]
    assert sum(tokens) == 256
    assert tokens[0] > tokens[1]
    assert (answer.run_dir / "checkpoints" / "step-2" / ".metadata").exists()
    assert all((answer.run_dir / "logs" / f"rank{rank}.log").exists() for rank in range(3))
    assert (answer.run_dir / "config.yaml").exists()
    checkpoint = answer.run_dir / "checkpoints" / "step-2"
    # A part of a checkpoint that has gone missing is named.
    torn = shutil.copytree(checkpoint, answer.folder / "torn")
    (torn / "__0_0.distcp").unlink()
    refused = call("+cluster=cpu_even", *FEW_STEPS, f"ckpt_path={torn}")
    assert refused.code == 2
    assert "__0_0.distcp" in refused.err
    assert "Traceback" not in refused.err
    # Another model must refuse this checkpoint, with the parameter's name.
    refused = call("+cluster=cpu_even", *FEW_STEPS, "model.config.hidden_size=144",
                   f"ckpt_path={checkpoint}")  # fmt: skip
    assert refused.code == 2
    assert "is a checkpoint of another model" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.slow
def test_sweep_runs_each_job_once_and_goes_on_past_an_illegal_one(call, tmp_path: Path) -> None:
    heads = ("model.config.num_attention_heads=8", "model.config.num_key_value_heads=8")
    job = ("+cluster=cpu_mixed", *heads, *FEW_STEPS, "strategy.drop_devices=false")
    answer = call("-m", "strategy=ulysses,ring,hexiseq", *job)
    assert answer.code == 0, answer.err
    (table,) = tmp_path.rglob("summary.csv")
    found = rows(table)
    assert [row["status"] for row in found] == ["illegal", "ok", "ok"]
    assert "8" in found[0]["reason"]
    losses = [float(row["loss"]) for row in found[1:]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for number in (1, 2):
        assert Plan.load(table.parent / str(number) / "plan.json").world_size == 3
        assert len(list((table.parent / str(number) / "logs").glob("rank*.log"))) == 3
    assert rows(table.parent / "0" / "metrics.csv")[0]["status"] == "illegal"


@pytest.mark.slow
def test_rehearsal_keeps_the_real_plans_cuts(call) -> None:
    hosts = [f"+cluster.nodes.{node}.host_memory_gb=1000" for node in (0, 1)]
    answer = call(
        "+cluster=h100_a100", "trainer.max_steps=2", "trainer.validate_every=null", "recipe.rehearsal.seq_len=512",
        "strategy.recompute=full", "strategy.offload=true", *hosts,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert "REHEARSAL" in answer.out
    target, ran = (Plan.load(answer.run_dir / name) for name in ("plan.target.json", "plan.json"))
    assert (target.world_size, ran.world_size) == (8, 8)
    assert (target.offload, ran.offload) == (True, True)
    assert sum(target.predicted.host_memory_gb) == pytest.approx(65536 * 32 * 4096 * 2 / 1e9)
    for there, here in zip(target.shards(), ran.shards(), strict=True):
        assert there.heads == here.heads
        assert here.num_tokens / ran.seq_len == pytest.approx(there.num_tokens / target.seq_len, abs=2 / ran.seq_len)
    assert [len(g.shards) for g in target.replicas[0].groups] == [len(g.shards) for g in ran.replicas[0].groups]
    assert [row["loss"] != "" for row in rows(answer.run_dir / "metrics.csv")] == [True, True]


@pytest.mark.slow
def test_without_a_cluster_the_machine_is_measured(call) -> None:
    answer = call(*FEW_STEPS)
    assert answer.code == 0, answer.err
    # Cores that truly differ are types of their own.
    assert all(device.type.startswith("cpu") for device in Plan.load(answer.run_dir / "plan.json").devices)
    assert rows(answer.run_dir / "metrics.csv")


@pytest.mark.slow
def test_ranks_with_little_memory_train_where_an_even_split_does_not_fit(call) -> None:
    little = ("+cluster=cpu_mixed", "cluster.gpus.cpu_half_core.memory_gb=0.5", "data.seq_len=4096")
    little += ("strategy.drop_devices=false", "trainer.max_steps=2", "trainer.validate_every=null")
    refused = call(*little, "strategy=ring")
    assert refused.code == 2
    assert "a cpu_half_core on node local, needs" in refused.err
    assert "GB of 0.475 GB usable (0.5 GB)" in refused.err
    trained = call(*little)
    assert trained.code == 0, trained.err
    steps = [row for row in rows(trained.run_dir / "metrics.csv") if row["loss"]]
    assert len(steps) == 2
    assert all(float(steps[0][f"tokens_rank_{rank}"]) < 4096 // 3 for rank in (1, 2))


@pytest.mark.slow
def test_wandb_offline(call, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = call("+cluster=cpu_even", *FEW_STEPS, "logger=wandb", "logger.mode=offline")
    assert answer.code == 0, answer.err
    assert list((answer.run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert rows(answer.run_dir / "metrics.csv")


def torchrun(ranks: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.thorough  # jobs on Slurm do the same
@pytest.mark.slow
def test_torchrun_is_joined_and_gives_the_same_losses(call, tmp_path: Path) -> None:
    assert call("+cluster=cpu_mixed", *FEW_STEPS).code == 0
    (tmp_path / "joined").mkdir()
    joined = torchrun(3, tmp_path / "joined", "+cluster=cpu_mixed", *FEW_STEPS)
    assert joined.returncode == 0, joined.stderr
    (folder,) = (path.parent for path in (tmp_path / "joined").rglob("metrics.csv"))
    alone_dir = next(path.parent for path in (tmp_path / "outputs").rglob("metrics.csv"))
    assert [row["loss"] for row in rows(alone_dir / "metrics.csv")] == [
        row["loss"] for row in rows(folder / "metrics.csv")
    ]
    assert len(list((tmp_path / "joined").rglob(".hydra"))) == 1


@pytest.mark.slow
def test_torchrun_with_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    refused = torchrun(2, tmp_path, "+cluster=cpu_mixed", *FEW_STEPS)
    assert refused.returncode != 0
    assert refused.stderr.count("the job's 2 ranks are not the 3 devices of cluster 'cpu_mixed'") == 1


def ranks_of(parent: int) -> dict[int, int]:
    """Process ids by rank of the ranks a ``train.py`` process started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"HEXISEQ_PARENT=%d" % parent in environment and b"recipes.pretrain" in command:
                found[next(int(item[5:]) for item in environment if item.startswith(b"RANK="))] = int(entry.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM])
def test_a_signal_to_the_run_ends_all_of_it_in_one_line(tmp_path: Path, number: signal.Signals) -> None:
    process = endless_run(tmp_path)
    ranks = ranks_of(process.pid)
    assert sorted(ranks) == [0, 1, 2]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"error: ended by {number.name}; all ranks have stopped" in err
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_within_the_timeout(tmp_path: Path) -> None:
    process = endless_run(tmp_path, "strategy.timeout_seconds=15")
    ranks = ranks_of(process.pid)
    os.kill(ranks[2], signal.SIGSTOP)
    stopped = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert time.monotonic() - stopped < 60
    assert "rank 2 (cpu_half_core on local) did not answer within the timeout" in err
    assert "SIGKILL" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


def endless_run(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run that has trained two steps and would go on."""
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "train.py"),
            "+cluster=cpu_mixed",
            *FEW_STEPS,
            "trainer.max_steps=100000",
            *arguments,
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any(line.startswith("step 2/") for line in process.stdout)
    return process


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    process = endless_run(tmp_path)
    ranks = ranks_of(process.pid)
    assert sorted(ranks) == [0, 1, 2]
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert time.monotonic() - killed < 60
    assert "rank 1 (cpu_half_core on local) was killed by SIGKILL" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())

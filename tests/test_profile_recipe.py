"""``recipe=profile`` as a user meets it: a cluster comes out to make a plan for; what is refused; who hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hexiseq.cluster import Cluster
from hexiseq.plan import Plan
from recipes import job as jobs
from recipes import profile

ROOT = Path(__file__).resolve().parent.parent
BRIEF = ("recipe.seconds=0.2", "recipe.link_seconds=0.1", "recipe.timeout_seconds=120")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXISEQ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    monkeypatch.setattr(profile, "CLUSTERS", tmp_path / "conf" / "cluster")


@pytest.mark.parametrize(
    ("name", "cores"),
    [
        ("cpu_even", [(0,), (1,)]),
        pytest.param("cpu_mixed", [(0,), (1,), (1,)], marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_a_profile_is_a_cluster_to_plan_for(call, tmp_path: Path, name: str, cores: list[tuple[int, ...]]) -> None:
    code, out, err = call("recipe=profile", f"+cluster={name}", "recipe.save=mine", *BRIEF)
    assert code == 0, err
    assert "torch" in out
    assert "bandwidth per rank and direction" in out
    raw = json.loads(next(tmp_path.rglob("profile.json")).read_text())
    assert [len(rank["calls"]) for rank in raw["ranks"]] == [len(raw["ranks"][0]["calls"])] * len(cores)
    assert {link["kind"] for link in raw["links"]} == {"p2p", "all_to_all"}
    saved = tmp_path / "conf" / "cluster" / "mine.yaml"
    assert next(tmp_path.rglob("outputs/**/cluster.yaml")).read_text() == saved.read_text()
    cluster = Cluster.from_config(yaml.safe_load(saved.read_text())["cluster"])
    assert [place.seat.cores for place in cluster.places] == cores
    types = {"cpu_even": ["cpu_core"] * 2, "cpu_mixed": ["cpu_core"] + ["cpu_half_core"] * 2}
    assert [place.device.type.split("_slow")[0] for place in cluster.places] == types[name]
    assert all(device.source.endswith("tiny_llama, float32") for device in cluster.devices)

    search = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    code, out, err = call("recipe=plan", "+cluster=mine", search, "data.seq_len=4096", "hydra.run.dir=planned")
    assert code == 0, err
    assert Plan.load(tmp_path / "planned" / "plan.json").world_size == len(cores)

    code, _, err = call("recipe=profile", f"+cluster={name}", "recipe.save=mine", *BRIEF)
    assert code == 2
    assert "mine.yaml exists; choose another name, or recipe.overwrite=true" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("+cluster=h100_a100",), "cluster 'h100_a100' has GPUs, this machine has none; leave +cluster out"),
        (("recipe.seconds=0",), "recipe.seconds must be above 0 and at most 3600, got 0"),
        (("recipe.timeout_seconds=soon",), "recipe.timeout_seconds must be above 0 and at most 3600, got 'soon'"),
        (("recipe.alike=5",), "recipe.alike must be a fraction from 0 to below 1, got 5"),
        (("recipe.overwrite=maybe",), "recipe.overwrite must be true or false, got 'maybe'"),
        (("recipe.save=a/b",), "recipe.save must be a name of at most 100 letters, digits, _ and -, got 'a/b'"),
        (("strategy.dtype=int4",), "strategy.dtype 'int4' is not one of auto"),
        (("model.config.num_key_value_heads=5",), "9 query heads are not a multiple of 5 KV heads"),
        (("+cluster=cpu_mixed", "cluster.nodes.0.devices.0.type=h900"), "unknown device type 'h900'"),
    ],
)
def test_mistakes_end_before_any_rank_starts(call, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = call("recipe=profile", *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("logs"))


def test_a_save_target_that_cannot_be_written_is_refused(call, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile, "CLUSTERS", tmp_path / "nowhere")
    code, _, err = call("recipe=profile", "recipe.save=mine")
    assert code == 2
    assert "nowhere cannot be written; take cluster.yaml from the run folder" in err


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    from recipes.compose import composed

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/run cannot be written to: Not a directory; choose another"):
        profile.prepare(composed(["recipe=profile"]), tmp_path / "file" / "run")


def test_ranks_on_several_machines_need_a_cluster() -> None:
    from hexiseq.launch import Member
    from recipes.compose import composed

    with pytest.raises(ValueError, match=r"4 ranks are on 2 nodes \(a, b\).*recipe=profile recipe.save=NAME"):
        jobs.detect(composed([]), [Member("a"), Member("a"), Member("b"), Member("b")])


@pytest.mark.slow
def test_this_machine_is_measured_once(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ("recipe=plan", "data.seq_len=2048")
    code, out, err = call(*job, "hydra.run.dir=first")
    assert code == 0, err
    assert "no cluster was named: measured" in out
    code, out, err = call(*job, "hydra.run.dir=second")
    assert code == 0, err
    assert "this machine as measured on" in out
    assert "recipe=profile measures it again" in out
    first, second = (Plan.load(tmp_path / name / "plan.json") for name in ("first", "second"))
    assert first.digest() == second.digest()
    (kept,) = (tmp_path / "cache").iterdir()
    before = json.loads(kept.read_text())["time"]
    assert call("recipe=profile", *BRIEF)[0] == 0
    assert json.loads(kept.read_text())["time"] > before

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEXISEQ_CACHE", str(tmp_path / "file" / "cache"))
    code, out, err = call(*job, "hydra.run.dir=third")
    assert code == 0, err
    assert "no cluster was named: measured" in out
    assert err.count("warning: ") == 1
    assert "cannot be written" in err


@pytest.mark.slow
@pytest.mark.thorough
def test_torchrun_is_joined(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(ROOT / "train.py"), "recipe=profile", *BRIEF]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("outputs/**/cluster.yaml")
    assert len(Cluster.from_config(yaml.safe_load(path.read_text())["cluster"]).places) == 2


def rank_process(parent: int, rank: int) -> int:
    """Process id of a rank that ``train.py`` has started."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
                command = (entry / "cmdline").read_bytes() if environment else b""
            except OSError:
                continue
            mine = f"HEXISEQ_PARENT={parent}".encode() in environment and f"RANK={rank}".encode() in environment
            if mine and b"recipes.profile" in command:
                return int(entry.name)
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} did not start")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "recipe=profile", "+cluster=cpu_mixed", "recipe.seconds=60"]
    with subprocess.Popen(
        [*command, "recipe.timeout_seconds=20"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as train_process:
        try:
            assert train_process.stdout is not None
            for line in train_process.stdout:
                if line.startswith("2 "):  # the table of ranks: all have met
                    break
            os.kill(rank_process(train_process.pid, 2), signal.SIGSTOP)
            _, err = train_process.communicate(timeout=400)
        finally:
            train_process.kill()
    assert train_process.returncode == 2
    assert "rank 2 (cpu_half_core on local) did not answer within 20 s" in err
    assert "Traceback" not in err

"""The launcher with real processes: errors are named, dead ranks end the run, nobody is left behind."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hexiseq import launch
from hexiseq.plan import Plan, RankDevice, make_replica

ROOT = Path(__file__).resolve().parent.parent.parent
WORKER = """
import os, resource, signal, sys, time
from pathlib import Path
from hexiseq import launch
run_dir, what = Path(sys.argv[1]), sys.argv[2]
def main():
    rank = launch.rank()
    (run_dir / f"pid{rank}").write_text(str(os.getpid()))
    if what == "user" and rank == 1:
        raise ValueError("data.path is empty")
    if what == "bug" and rank == 1:
        raise RuntimeError("broken")
    if what == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "settled":
        import torch
        import torch.distributed as dist
        from hexiseq.plan import RankDevice
        from hexiseq.testbed import Berth
        launch.settle([RankDevice("cpu_core", "here", "cpu")] * 3, [()] * 3, [Berth()] * 3)
        dist.init_process_group("gloo", init_method=f"file://{run_dir}/store", rank=rank, world_size=3)
        dist.barrier()
        for task in Path("/proc/self/task").iterdir():
            print(os.sched_getscheduler(int(task.name)), (task / "comm").read_text(), end="", flush=True)
        large = lambda: torch.ones(4_000_000).sum()
        for _ in range(10):
            large()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            large()
        print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
    elif what != "fine":
        time.sleep(120)
    print("rank", rank, "done", flush=True)
launch.worker(main, run_dir)
"""


def plan(ranks: int) -> Plan:
    replica = make_replica(8 * ranks, 8, [(1, [(rank, 8, 2)]) for rank in range(ranks)])
    devices = tuple(RankDevice("cpu_core", f"node{rank}", "cpu") for rank in range(ranks))
    return Plan("manual", 8 * ranks, 2, 1, 8, 1, "ring", "none", "float32", (replica,), devices)


def start(run_dir: Path, what: str) -> None:
    (run_dir / "worker.py").write_text(WORKER)
    launch.start_ranks([sys.executable, str(run_dir / "worker.py"), str(run_dir), what], plan(3).devices, run_dir)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def gone(run_dir: Path) -> bool:
    pids = [int(path.read_text()) for path in run_dir.glob("pid*")]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_every_rank_has_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "fine")
    assert "rank 0 done" in capfd.readouterr().out
    assert "rank 2 done" in (tmp_path / "logs" / "rank2.log").read_text()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_threads_that_talk_to_other_ranks_wake_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "settled")
    policies = [line.split() for line in capfd.readouterr().out.splitlines() if "gloo" in line]
    assert policies
    assert all(int(policy) == os.SCHED_BATCH for policy, *_ in policies)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's malloc")
def test_ranks_on_cpus_keep_the_memory_they_free(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "settled")
    faults = [line.split()[-1] for line in capfd.readouterr().out.splitlines() if "faults" in line]
    assert faults
    assert max(map(int, faults)) < 300  # 3,906 pages are in one such tensor


def test_a_users_error_comes_back_as_it_was_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.path is empty$"):
        start(tmp_path, "user")
    assert gone(tmp_path)
    assert "Traceback" in (tmp_path / "logs" / "rank1.log").read_text()


@pytest.mark.parametrize(("what", "text"), [("bug", "RuntimeError: broken"), ("killed", "was killed by SIGKILL")])
def test_a_failed_rank_is_named_and_ends_the_run(tmp_path: Path, what: str, text: str) -> None:
    began = time.monotonic()
    with pytest.raises(launch.RankFailed, match=r"rank 1 \(cpu_core on node1\)") as failure:
        start(tmp_path, what)
    assert text in str(failure.value)
    assert gone(tmp_path)
    assert time.monotonic() - began < 60


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from tests.unit.test_launch import start; start(Path(sys.argv[2]), 'wait')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(tmp_path)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid*"))) < 3:
        assert time.monotonic() < deadline, "the ranks did not start"
        assert parent.poll() is None
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert gone(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_first_process_prepared_reaches_all(tmp_path: Path, fails: bool) -> None:
    code = """
import sys
from hexiseq import launch
own = launch.party()
def prepare():
    if sys.argv[1] == "True":
        raise ValueError("no such cluster")
    return {"plan": [1, 2], "rank": own.number}
try:
    meeting = launch.meet(own, 30)
    assert [entry.ranks for entry in launch.muster(own, meeting)] == [1, 1]
    assert meeting.share(None if own.number else prepare) == {"plan": [1, 2], "rank": 0}
except ValueError as error:
    assert str(error) == "no such cluster" and sys.argv[1] == "True" and meeting.heard == (own.number > 0)
    sys.exit(7)
"""
    port = str(29000 + os.getpid() % 20000)
    environments = [{"RANK": f"{r}", "LOCAL_RANK": f"{r}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": port} for r in range(2)]  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(fails)], cwd=ROOT, env={**os.environ, **environment})
        for environment in environments
    ]
    assert [process.wait(timeout=90) for process in ranks] == ([7, 7] if fails else [0, 0])


def test_without_a_launcher_there_is_no_party(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launch.party() is None

"""Jobs on test beds: pinned ranks, quotas, slow links. Each run starts real ranks, so all are slow."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.test_testbed import left_behind, namespaces, quotas

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks are pinned to two cores"),
]
ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = ("data=synthetic", "data.seq_len=256", "trainer.validation_sequences=0", "strategy=ring")
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
# Two nodes of a rank each: 1 : 0.5 by quotas, 20 MB/s between them.
NODE = "{{name: n{0}, devices: [{{type: cpu_core, cores: [{0}], quota: {1}}}], intra_gb_per_s: 1, {2}}}"
LINK = "nics: 1, nic_gb_per_s: 0.02"
BED = ("+cluster=cpu_slow_link", f"cluster.nodes=[{NODE.format(0, 0.8, LINK)},{NODE.format(1, 0.4, LINK)}]")


def start(launcher: tuple[str, ...], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *STEPS, *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def await_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    assert any(line.startswith(f"step {step}/") for line in process.stdout)


def ranks_of(pid: int) -> dict[int, int]:
    """Process ids of the ranks below a process, by rank."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = [int(item[5:]) for item in environment if item.startswith(b"RANK=")]
            found |= {rank[0]: child} if rank else ranks_of(child)
    return found


def losses(folder: Path) -> list[str]:
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return [row["loss"] for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "launcher",
    [(), pytest.param((*TORCHRUN, "--nproc-per-node=3"), marks=pytest.mark.thorough)],
    ids=["python", "torchrun"],
)
def test_ranks_stay_on_their_cores(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    process = start(launcher, tmp_path, "+cluster=cpu_mixed", "trainer.max_steps=100000")
    await_step(process, 2)
    try:
        ranks = ranks_of(process.pid)
        assert sorted(ranks) == [0, 1, 2]
        for rank, pid in ranks.items():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                used = sum(map(int, (thread / "stat").read_text().rsplit(")", 1)[1].split()[11:13]))
                if used > 1:  # in ticks: a thread that computes or communicates
                    assert os.sched_getaffinity(int(thread.name)) == {min(rank, 1)}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@quotas
@namespaces
@pytest.mark.parametrize(
    "launcher",
    [pytest.param((), marks=pytest.mark.thorough), (*TORCHRUN, "--nproc-per-node=2")],
    ids=["python", "torchrun"],
)
def test_a_job_trains_on_a_bed_as_elsewhere(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    (tmp_path / "bed").mkdir()
    (tmp_path / "plain").mkdir()
    process = start(launcher, tmp_path / "bed", *BED, "trainer.max_steps=4")
    await_step(process, 1)
    ranks = ranks_of(process.pid)
    groups = [Path(f"/proc/{pid}/cgroup").read_text() for _, pid in sorted(ranks.items())]
    assert all(f"hexiseq-{process.pid if not launcher else ranks[0]}" in group for group in groups)
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in (*ranks.values(), process.pid)}
    # The first thread of a process, which moved, stands for it; its launcher stayed.
    assert len(networks) == 3
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    plain = start((), tmp_path / "plain", "+cluster=cpu_even", "trainer.max_steps=4")
    _, err = plain.communicate(timeout=300)
    assert plain.returncode == 0, err
    assert losses(tmp_path / "bed") == losses(tmp_path / "plain")
    deadline = time.monotonic() + 60
    while left_behind(ranks[0]) + left_behind(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_behind(ranks[0]) + left_behind(process.pid)


@quotas
@namespaces
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGKILL])
def test_nothing_stays_behind_a_job_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    process = start((), tmp_path, *BED, "trainer.max_steps=100000")
    await_step(process, 2)
    assert len(left_behind(process.pid)) == 2 + 2 + 3
    process.send_signal(number)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while left_behind(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_behind(process.pid)


JOB = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, x, rates = dist.get_rank(), torch.zeros(500_000), []
for _ in range(4):
    dist.barrier()
    start = time.perf_counter()
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    rates.append(2e-3 / (time.perf_counter() - start))
if rank == 1:
    print(max(rates), min(rates))
dist.barrier()
dist.destroy_process_group()
"""


@namespaces
def test_gloo_runs_at_the_slower_links_cap(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "scripts/slow_links.py", "0.05", "0.01", "--", sys.executable, str(tmp_path / "job.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    best, worst = map(float, done.stdout.split())
    assert 0.001 < best < 0.013  # in GB/s; a busy machine slows transfers
    assert worst < 0.011


@namespaces
def test_collectives_are_held_against_the_circle() -> None:
    command = [sys.executable, "scripts/slow_links.py", "0.02", "0.02", "--", sys.executable, "-m",
               "benchmarks.collectives", "0.02"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    names, ratios = zip(*(line.split(": ") for line in done.stdout.splitlines()), strict=True)
    assert names == ("2 ranks, all-gather", "2 ranks, reduce-scatter", "2 ranks, to the next rank")
    assert all(float(ratio.split()[0]) > 0.9 for ratio in ratios)  # no faster than the links


@namespaces
def test_a_failed_rank_ends_the_others(tmp_path: Path) -> None:
    job = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(100)"
    command = [sys.executable, "scripts/slow_links.py", "0.05", "0.05", "--", sys.executable, "-c", job]
    assert subprocess.run(command, cwd=ROOT, timeout=90, check=False).returncode == 3

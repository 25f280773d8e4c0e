"""Uneven machines made of one machine's cores (`hexiseq.testbed`), and training jobs on them that take turns.

A shared machine changes its speed by a third within the hour. Jobs that are compared therefore run at one time and take
turns, a step each (`benchmarks.turns`): what slows one slows all. Each is a process of its own that starts its ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.probe import MEMORY_STEP
from benchmarks.turns import FAILED, LIMIT_SECONDS, Seat
from hexiseq import launch
from hexiseq.cluster import device_from_config
from recipes import job as jobs

ROOT = Path(__file__).resolve().parent.parent
UNTIMED = MEMORY_STEP + 2  # the first steps: to allocate, to measure memory, to settle after it
CYCLE_SECONDS = 300.0  # that a step of every job may take
LINK_GB_PER_S = 0.02  # of a slow one
# tiny_llama widened until matrix products and attention are most of a step.
MODEL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
         "head_dim": 64}  # fmt: skip
MHA, GQA = 8, 2


@dataclass(frozen=True)
class Rank:
    """A rank of a bed: its core, its share of it (by quota, or by sharing it with as many), and its node."""

    core: int
    share: float
    quota: bool = True
    node: int = 0
    gb_per_s: float = 1.0  # of the node's link


FULL = Rank(0, 1.0, quota=False), Rank(1, 1.0, quota=False)
BEDS: dict[str, tuple[Rank, ...]] = {
    "1:1": FULL,
    "1:.5:.5": (FULL[0], *(Rank(1, 0.5, quota=False),) * 2),
    "1:.25": (Rank(0, 0.8), Rank(1, 0.2)),
    "1:.5:.25": (Rank(0, 0.8), Rank(1, 0.4), Rank(1, 0.2)),
    "1:1:1:1": tuple(Rank(i // 2, 0.4) for i in range(4)),
    "1:1:.5:.5:.25": tuple(Rank(core, share) for core, share in ((0, 0.4), (0, 0.4), (1, 0.2), (1, 0.2), (1, 0.1))),
    "slow 1:1": tuple(Rank(i, 0.8, node=i, gb_per_s=LINK_GB_PER_S) for i in range(2)),
    "slow 1:.5:.25": (Rank(0, 0.8), Rank(1, 0.4), Rank(1, 0.2, node=1, gb_per_s=LINK_GB_PER_S)),
}


@dataclass(frozen=True)
class Setting:
    """One training run. ``calibrates``: the fit may see it; else it is judged by it."""

    bed: str
    kv_heads: int
    seq_len: int
    policy: str
    exchange: str
    calibrates: bool = False

    @property
    def name(self) -> str:
        heads = "mha" if self.kv_heads == MODEL["num_attention_heads"] else "gqa"
        return f"{self.bed} {heads} {self.seq_len // 1024}k {self.policy} {self.exchange}"


def core_rates(path: Path | None) -> dict[str, Any]:
    """Rates of one core: of the first device of a cluster that ``recipe=profile`` wrote, else the catalogue's.

    Raises:
        ValueError: the file is not such a cluster.
    """
    if path is None:
        return yaml.safe_load((jobs.CONF / "gpu" / "cpu_core.yaml").read_text())
    try:
        entry = next(iter(yaml.safe_load(path.read_text())["cluster"]["gpus"].values()))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{path} is not a cluster that recipe=profile wrote: it has no cluster.gpus") from error
    device_from_config(entry)
    return entry


def cluster_config(bed: Sequence[Rank], rates: Mapping[str, Any]) -> dict[str, Any]:
    """A bed as a cluster's configuration; a rank's rates are its share of the core's `rates`."""
    gpus: dict[str, Any] = {}
    nodes: dict[int, dict[str, Any]] = {}
    for rank in bed:
        kind = f"core_{round(100 * rank.share)}"
        scaled = {name: value * rank.share for name, value in rates.items() if name.endswith(("tflops", "gb_per_s"))}
        gpus[kind] = {**rates, **scaled, "type": kind, "launch_us": rates["launch_us"] / rank.share}
        node = {"name": f"n{rank.node}", "devices": [], "intra_gb_per_s": 1.0, "nics": 1, "nic_gb_per_s": rank.gb_per_s}
        seat = {"type": kind, "cores": [rank.core], **({"quota": rank.share} if rank.quota else {})}
        nodes.setdefault(rank.node, node)["devices"].append(seat)
    slow = any(rank.gb_per_s < 1 for rank in bed)
    return {"name": "bed", "gpus": gpus, "nodes": list(nodes.values()), "namespaces": slow}


def workload_overrides(kv_heads: int, seq_len: int) -> list[str]:
    """The model and the length of its sequences, as `train.py` takes them."""
    shape = {**MODEL, "num_key_value_heads": kv_heads}
    return ["model=tiny_llama", *(f"model.config.{name}={value}" for name, value in shape.items()),
            "data=synthetic", f"data.seq_len={seq_len}"]  # fmt: skip


def job_config(setting: Setting, cluster: Mapping[str, Any], steps: int) -> jobs.Config:
    """A setting's job on its bed, described by `cluster`."""
    from recipes.compose import composed

    config = composed([
        *workload_overrides(setting.kv_heads, setting.seq_len), f"strategy={setting.policy}",
        f"strategy.exchange={setting.exchange}", "strategy.drop_devices=false", f"trainer.max_steps={steps}",
        "trainer.validation_sequences=0", f"data.synthetic.length={4 * setting.seq_len}",
        f"strategy.timeout_seconds={LIMIT_SECONDS + 60}",  # ranks wait for their turn
    ])  # fmt: skip
    config["cluster"] = dict(cluster)
    return config


def train(
    settings: Mapping[str, tuple[Setting, Mapping[str, Any]]], steps: int, profile: bool = False
) -> dict[str, dict[str, Any]]:
    """Train all settings, each on the bed that its cluster's configuration describes, a step each by turns.

    Args:
        settings: by any names; and the clusters' configurations.
        steps: of each, `UNTIMED` and those that count.
        profile: for `benchmarks.probe`.

    Returns:
        By name: ``config``, ``plan``, ``step_seconds`` (of the last rank to end each), and ``ranks``, what
        `benchmarks.probe` found on each.

    Raises:
        RuntimeError: a job failed or took too long; all have ended.
    """
    limit_seconds = LIMIT_SECONDS + steps * CYCLE_SECONDS
    jobs_by_future: dict[Future[dict[str, Any]], str] = {}
    records, failed = {}, ""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(settings)) as pool, _released(Path(folder)):
        for number, (name, (setting, cluster)) in enumerate(settings.items()):
            seat = Seat(Path(folder), number, len(settings))
            task = {"setting": dataclasses.asdict(setting), "cluster": dict(cluster), "steps": steps,
                    "arguments": [seat.to_argument(), *(["profile"] if profile else [])]}  # fmt: skip
            job = pool.submit(_in_a_process, task, limit_seconds)
            jobs_by_future[job] = name
            while not (seat.is_ready() or any(job.done() for job in jobs_by_future)):
                time.sleep(0.1)  # one by one: beds are built, and ranks find one another
            if any(job.done() for job in jobs_by_future):  # it has failed: none ends before all have started
                break
        for job in as_completed(jobs_by_future):
            name = jobs_by_future[job]
            try:
                records[name] = job.result()
            except (RuntimeError, OSError, ValueError) as error:
                failed = failed or f"{name}: {error}"
                (Path(folder) / FAILED).touch()  # the others need not wait
    if failed:
        raise RuntimeError(failed)
    return {name: records[name] for name in settings}


@contextlib.contextmanager
def _released(folder: Path) -> Iterator[None]:
    """Whatever happens within, no job goes on waiting for its turn after it."""
    try:
        yield
    finally:
        (folder / FAILED).touch()


def _in_a_process(task: Mapping[str, Any], limit_seconds: float) -> dict[str, Any]:
    """`_train_one` in a process of its own, under the time limit. Raises RuntimeError where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "benchmarks.beds", str(out), json.dumps(task), str(os.getpid())]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, said = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired as error:
            process.send_signal(signal.SIGTERM)  # its ranks and its bed end with it
            process.communicate()
            raise RuntimeError(f"took longer than {limit_seconds:g} s") from error
        if process.returncode:
            raise RuntimeError(said.strip()[-2000:] or f"it ended with code {process.returncode}")
        return json.loads(out.read_text())


def _train_one(setting: Setting, cluster: Mapping[str, Any], steps: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Train a setting in this process's children, watched by `benchmarks.probe`: its record, as `train` returns it."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        job = jobs.prepare(job_config(setting, cluster, steps), run_dir)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "benchmarks.probe", str(run_dir), *arguments]
        launch.start_ranks(command, job.plan.devices, run_dir)
        ranks = [json.loads((run_dir / f"probe-{rank}.json").read_text()) for rank in range(job.plan.world_size)]
    seconds = [max(step["wall"] for step in of_ranks) for of_ranks in zip(*(r["steps"] for r in ranks), strict=True)]
    return {"config": job.config, "plan": job.plan.to_dict(), "step_seconds": seconds, "ranks": ranks}


if __name__ == "__main__":
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)  # nobody would read the record
    if os.getppid() != int(sys.argv[3]):
        sys.exit("the process that asked for this job is gone")
    what = json.loads(sys.argv[2])
    try:
        record = _train_one(Setting(**what.pop("setting")), **what)
    except ValueError as error:
        sys.exit(str(error))  # no plan, said in words
    Path(sys.argv[1]).write_text(json.dumps(record))

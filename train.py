"""Compose a configuration with Hydra, once, and run its recipe.

    python train.py +cluster=h100_a100            # plan, start the ranks, train (or rehearse without those GPUs)
    torchrun --nproc-per-node 3 train.py +cluster=cpu_mixed
    srun --het-group=0,1 --kill-on-bad-exit=1 python train.py +cluster=h100_a100
    python train.py -m +cluster=cpu_mixed strategy=ring,hexiseq

Exit codes: 0, or 2 for a mistake of the user's (one block on stderr), or 1 for a failed rank or when Hydra refuses.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Slurm's warning that the time is up must not end a process that is still importing.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

import contextlib
import csv
import dataclasses
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hexiseq import launch
from hexiseq.cost import OutOfMemory
from hexiseq.doctor import Meeting
from hexiseq.schedule import IllegalPolicy
from recipes import job as jobs
from recipes import plan, profile, simulate, slurm
from recipes.report import write_report

ROOT = Path(__file__).resolve().parent
# Recipes that only compute run in this process; the others run in one process per rank.
LOCAL_RECIPES = {"plan": plan.run, "simulate": simulate.run, "slurm": slurm.run}
RANK_RECIPES = {"pretrain": jobs, "profile": profile}

outcomes: list[str] = []
told: list[bool] = []
reported: list[Exception] = []
# Where a launcher started this process: its place among the others, and where it meets them.
crew: list[tuple[launch.Party, Meeting]] = []
sweeps: list[Path] = []


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="train")
def main(composed: DictConfig) -> None:
    """Run one job and record how it ended; never raises for a user's mistake, so that a sweep goes on."""
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir)
    sweep_dir = Path(hydra_config.sweep.dir) if hydra_config.mode == RunMode.MULTIRUN else None
    status, reason = "ok", ""
    try:
        run(composed, run_dir)
    except (ValueError, OmegaConfBaseException) as error:
        unrunnable = sweep_dir is not None and isinstance(error, (IllegalPolicy, OutOfMemory))
        status = ("illegal" if isinstance(error, IllegalPolicy) else "out_of_memory") if unrunnable else "error"
        reason = str(error)
        report(error)
    except launch.RankFailed as error:
        status, reason = "failed", str(error)
        report(error)
    except launch.Interrupted as error:
        report(error)
        sys.exit(error.code)  # ends a sweep, too
    except Exception as error:
        if sweep_dir is None:
            raise
        # Not a mistake we know: the traceback, and a row, and the sweep goes on.
        status, reason = "failed", f"{type(error).__name__}: {error}"
        traceback.print_exception(error)
    outcomes.append(status)
    if sweep_dir is not None:
        overrides = " ".join(hydra_config.overrides.task)
        write_row(sweep_dir / "summary.csv", run_dir, hydra_config.job.num, overrides, status, reason)
        sweeps[:] = [sweep_dir]


def run(composed: DictConfig, run_dir: Path) -> None:
    config: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    if crew:
        lead(config, run_dir)
    elif (job := prepared(config, run_dir)) is not None:
        launch.start_ranks(command(config["recipe"]["name"], run_dir), job.devices, run_dir)


def prepared(config: dict[str, Any], run_dir: Path, members: Sequence[launch.Member] | None = None) -> Any:
    """The job of a recipe that runs in ranks; None of one that has computed all there is in this process."""
    recipe = config["recipe"]["name"]
    if recipe in LOCAL_RECIPES:
        LOCAL_RECIPES[recipe](config, run_dir)
        return None
    if recipe not in RANK_RECIPES:
        raise ValueError(f"recipe.name {recipe!r} is not one of {', '.join((*LOCAL_RECIPES, *RANK_RECIPES))}")
    if launch.party() is None and (nodes := launch.slurm.nodes_of_job()) > 1:
        raise ValueError(
            f"this process is alone in a Slurm job of {nodes} nodes; start one on each with srun "
            "--kill-on-bad-exit=1 python train.py ... (--het-group=0,1 where the job is a heterogeneous one)"
        )
    job = RANK_RECIPES[recipe].prepare(config, run_dir, members=members)
    RANK_RECIPES[recipe].announce(job)
    return job


def command(recipe: str, run_dir: Path) -> list[str]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return [sys.executable, "-m", f"recipes.{recipe}", str(run_dir)]


def lead(config: dict[str, Any], run_dir: Path) -> None:
    """Prepare the job of the processes a launcher started, this one being the first of them, and take part in it."""
    own, meeting = crew[0]
    told.append(True)
    there = launch.muster(own, meeting)

    def make() -> dict[str, Any]:
        # What only computes runs in this process, and asks nothing of the others.
        if config["recipe"]["name"] in LOCAL_RECIPES:
            prepared(config, run_dir)
            return {"job": None}
        members, ranks = jobs.enlist(config, own, there)
        job = prepared(config, run_dir, members)
        return {"job": job.to_dict(), "ranks": ranks, "nodes": [entry.node for entry in there],
                "port": launch.free_port()}  # fmt: skip

    serve(meeting.share(make))


def follow() -> int:
    """Take part in the job of the first process, and never compose. Returns the exit code; the first says why."""
    own, meeting = crew[0]
    # Where the first ends with an error, srun ends this one: as soon, and with the right code, it ends by itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        launch.muster(own, meeting)
        order = meeting.share(None)
    except ValueError as error:
        if not meeting.heard:
            report(error)
        return launch.USER_ERROR_CODE
    except RuntimeError:
        report(RuntimeError(f"{own.who(own.number)}: {own.who(0)} is gone"))
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which ranks inherit
    try:
        serve(order)
    except (ValueError, launch.RankFailed) as error:
        if not meeting.heard:
            report(error)
        return launch.USER_ERROR_CODE if isinstance(error, ValueError) else 1
    except launch.Interrupted as error:
        return error.code
    return 0


def dismiss() -> None:
    """Where this first process ends before there was a job, tell the others, so that they do not wait for one."""
    if not crew or told or crew[0][0].number != 0:
        return
    own, meeting = crew[0]

    def end() -> None:
        raise ValueError("the first process has ended; see its output")

    with contextlib.suppress(ValueError):
        launch.muster(own, meeting)
        meeting.share(end)


def serve(order: dict[str, Any]) -> None:
    """Be, or start, the ranks of a job that the first process has prepared."""
    if order["job"] is None:
        return
    own, meeting = crew[0]
    recipe = order["job"]["config"]["recipe"]["name"]
    job = RANK_RECIPES[recipe].Job.from_dict(order["job"])
    if not own.agents:
        # Only ranks pay for importing torch and Lightning; without the garbage collector that takes an eighth less.
        gc.disable()
        module = importlib.import_module(f"recipes.{recipe}")
        launch.worker(lambda: module.run(job), job.run_dir, job.devices, meeting)
        return
    text, path = json.dumps(order["job"]), job.run_dir / "job.json"
    if not path.exists() or path.read_text() != text:  # nodes need not share their files
        job.run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    agents = launch.agents(own, meeting, order["nodes"], order["ranks"], order["port"])
    if agents is None:
        launch.start_ranks(command(recipe, job.run_dir), job.devices, job.run_dir)
        return
    hosts = [node for node, count in zip(order["nodes"], order["ranks"], strict=True) for _ in range(count)]
    devices = [dataclasses.replace(device, node=host) for device, host in zip(job.devices, hosts, strict=True)]
    try:
        launch.start_ranks(command(recipe, job.run_dir), devices, job.run_dir, agents)
    except (ValueError, launch.RankFailed) as error:
        launch.stay(launch.USER_ERROR_CODE if isinstance(error, ValueError) else 1, first=True)
        if own.number == 0:
            report(error)
            reported.append(error)
        meeting.heard = launch.say_last(agents, said=own.number == 0)
        raise


def report(error: Exception) -> None:
    """One short block on stderr, once; the traceback only when Hydra's switch for it is set."""
    if error in reported:
        return
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr, flush=True)


def write_row(path: Path, run_dir: Path, number: int, overrides: str, status: str, reason: str) -> None:
    """Add a job's row to the sweep's table; an unrunnable job also leaves a metrics.csv that says so."""
    row: dict[str, Any] = {
        "job": number,
        "overrides": overrides,
        "status": status,
        "reason": reason,
        "run_dir": str(run_dir),
    }
    last = jobs.last_metrics(run_dir) if status == "ok" else {}
    figures = ("loss", "tokens_per_second", "step_seconds", "predicted_step_seconds", "simulated_step_seconds")
    row |= {key: last.get(key, "") for key in figures}
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)
    if status != "ok" and not (run_dir / "metrics.csv").exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / "metrics.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["status", "reason"], [status, reason]])


def sweep_report(sweep_dir: Path) -> None:
    """Compare the sweep's jobs in ``report.html``; its jobs have ended as they have, whether that works or not."""
    try:
        print(f"written: {write_report(sweep_dir)}", flush=True)
    except Exception as error:
        print(f"warning: no report was written: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def make_folder(arguments: Sequence[str], key: str) -> None:
    """Make the folder that Hydra would else fail to make with a traceback. Raises ValueError where it cannot be."""
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")]
    if "--help" in arguments or "-h" in arguments or (named and "${" in named[-1]):
        return
    jobs.make_folder(Path(named[-1].strip("'\"")) if named else Path("multirun" if "sweep" in key else "outputs"), key)


def start() -> int:
    launch.hold_signals()
    multirun = any(argument in ("-m", "--multirun") for argument in sys.argv[1:])
    outcomes.clear()
    sweeps.clear()
    crew.clear()
    told.clear()
    try:
        own = launch.party()
    except ValueError as error:  # which all processes find alike
        if launch.is_first():
            report(error)
        return launch.USER_ERROR_CODE
    try:
        if own is not None:
            launch.become_rank(own)
            waiting = yaml.safe_load((ROOT / "conf" / "train.yaml").read_text())["launch"]["timeout_seconds"]
            crew.append((own, launch.meet(own, launch.told(sys.argv[1:], "launch.timeout_seconds", waiting))))
            if own.number != 0:
                return follow()
            if multirun and (own.size > 1 or not own.agents):
                raise ValueError(
                    f"-m runs many jobs, the launcher started {own.size} processes for one; "
                    "run the sweep with plain python, which starts each job's ranks itself"
                )
        make_folder(sys.argv[1:], "hydra.sweep.dir" if multirun else "hydra.run.dir")
        main()
    except ValueError as error:
        report(error)
        return launch.USER_ERROR_CODE
    finally:
        dismiss()
    for sweep_dir in sweeps:
        sweep_report(sweep_dir)
    if "error" in outcomes:
        return launch.USER_ERROR_CODE
    return 1 if "failed" in outcomes else 0


if __name__ == "__main__":
    code = start()
    if code and crew:
        launch.stay(code, first=crew[0][0].number == 0)
    sys.exit(code)

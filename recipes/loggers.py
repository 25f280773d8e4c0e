"""Where a run's metrics go: metrics.csv, always, and Weights & Biases beside it."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
import re
import secrets
import string
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from hexiseq import launch, picture
from recipes.job import Job

MODES = ("online", "offline")
MOST_SECONDS = 3600
MOST_LETTERS, NOT_IN_PROJECTS = 128, "/\\#?%:"  # of a W&B project
RUN_FILE = "wandb.json"  # in the run folder: the id under which W&B knows the run
log = logging.getLogger(__name__)


def check(config: dict[str, Any]) -> None:
    """Refuse what could not be logged.

    Raises:
        ValueError: a setting of ``logger`` is no such thing; W&B is wanted and not installed; there is no trace of the
            run to resume.
    """
    settings = config["logger"]
    if settings["name"] not in ("csv", "wandb"):
        raise ValueError(f"logger.name {settings['name']!r} is not one of csv, wandb")
    if settings["name"] != "wandb":
        return
    project = settings["project"]
    if not isinstance(project, str) or not 0 < len(project) <= MOST_LETTERS or set(project) & set(NOT_IN_PROJECTS):
        raise ValueError(
            f"logger.project must be a name of at most {MOST_LETTERS} letters, none of {' '.join(NOT_IN_PROJECTS)} "
            f"among them, got {project!r}"
        )
    if settings["mode"] not in MODES:
        raise ValueError(f"logger.mode {settings['mode']!r} is not one of {', '.join(MODES)}")
    seconds = settings["init_timeout_seconds"]
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"logger.init_timeout_seconds must be above 0 and at most {MOST_SECONDS}, got {seconds!r}")
    if not isinstance(settings["resume"], bool):
        raise ValueError(f"logger.resume must be true or false, got {settings['resume']!r}")
    if settings["resume"]:
        earlier_run(config["ckpt_path"])
    if find_spec("wandb") is None:
        raise ValueError("logger=wandb needs wandb: pip install 'hexiseq[wandb]', or leave logger at csv")


def loggers(job: Job) -> list[Logger]:
    """The run's loggers. W&B is rank 0's alone, and one run a job."""
    earlier = _earlier_rows(job) if launch.rank() == 0 else []
    path = job.run_dir / "metrics.csv"
    if launch.rank() == 0 and not earlier and path.exists():  # another run's
        path.rename(next(path for n in itertools.count(1) if not (path := job.run_dir / f"metrics.{n}.csv").exists()))
    metrics = CSVLogger(job.run_dir, name="", version="", flush_logs_every_n_steps=1)
    if launch.rank() == 0:
        # Lightning starts the file anew.
        metrics.experiment.metrics += earlier
        metrics.save()
    chosen: list[Logger] = [metrics]
    if job.config["logger"]["name"] == "wandb" and launch.rank() == 0:
        chosen.append(WandbLogger(experiment=start_wandb(job)))
    return chosen


def _earlier_rows(job: Job) -> list[dict[str, Any]]:
    """Rows of metrics.csv up to the checkpoint that a run goes on from in its own folder."""
    checkpoint, path = job.config["ckpt_path"], job.run_dir / "metrics.csv"
    if checkpoint is None or Path(checkpoint).parent.parent.resolve() != job.run_dir.resolve() or not path.is_file():
        return []
    last = int(Path(checkpoint).name.removeprefix("step-"))
    with path.open(newline="") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if int(row["step"]) <= last]


def start_wandb(job: Job) -> Any:
    """A W&B run, offline where it cannot be online; its id is kept in the run folder.

    Configuration and plan go to it as an artifact.
    """
    import wandb

    settings = job.config["logger"]
    if settings["resume"]:
        number = earlier_run(job.config["ckpt_path"])
    elif (job.run_dir / RUN_FILE).is_file():  # the same run, started again
        number = _id_in(job.run_dir / RUN_FILE)
    else:
        number = _new_id()
    online = settings["mode"] == "online"
    offline = f"logging offline, to be sent later with wandb sync {job.run_dir}/wandb/offline-run-*"
    if online and (reason := _no_key()):
        online = False
        print(f"W&B: {reason}; {offline}", flush=True)
    given = {
        "project": settings["project"],
        "dir": str(job.run_dir),
        "id": number,
        "resume": "allow" if online else None,
        "config": {**job.config, "plan": job.plan.to_dict()},
    }
    quiet = wandb.Settings(init_timeout=settings["init_timeout_seconds"], silent=True)
    # The environment must not turn off, or prompt about, what the configuration asks for.
    if online:
        try:
            run = wandb.init(**given, mode="online", settings=quiet)
        except wandb.errors.Error as error:
            online = False
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"W&B cannot be reached ({reason}); {offline}", flush=True)
            wandb.teardown()  # its service holds the id of the run that did not start
            given["resume"] = None
    if not online:
        run = wandb.init(**given, mode="offline", settings=quiet)
    (job.run_dir / RUN_FILE).write_text(json.dumps({"id": number, "project": settings["project"]}) + "\n")
    _keep_plan(run, job.run_dir)
    return run


def _keep_plan(run: Any, run_dir: Path) -> None:
    import wandb

    artifact = wandb.Artifact(f"plan-{run.id}", type="plan")
    for name in ("plan.json", "plan.target.json", "config.yaml"):
        if (run_dir / name).exists():
            artifact.add_file(str(run_dir / name))
    run.log_artifact(artifact)


def finish(chosen: list[Logger], run_dir: Path, failed: bool) -> None:
    """End W&B's run, with its pictures and an exit code, whatever has happened."""
    for logger in chosen:
        if isinstance(logger, WandbLogger):
            import wandb

            try:
                logger.experiment.log({path.stem: wandb.Html(path.read_text()) for path in picture.pictures(run_dir)})
                logger.experiment.finish(exit_code=int(failed))
                wandb.teardown()  # its service writes on after that; a rank that has failed leaves at once
            except Exception:  # training's own error must not be lost
                log.exception("W&B did not finish")


def earlier_run(ckpt_path: str | None) -> str:
    """The id of the W&B run a checkpoint belongs to, from its run folder.

    Raises:
        ValueError: there is no checkpoint, or no trace of a run beside it.
    """
    if ckpt_path is None:
        raise ValueError("logger.resume=true continues the W&B run of a checkpoint; name one with ckpt_path=FOLDER")
    folder = Path(ckpt_path).resolve()
    for parent in (folder, *folder.parents[:2]):
        if (parent / RUN_FILE).is_file():
            return _id_in(parent / RUN_FILE)
    raise ValueError(
        f"logger.resume=true: there is no {RUN_FILE} beside ckpt_path {ckpt_path!r}, in it or up to two folders above; "
        "it was not trained with logger=wandb, or the run folder was moved. Leave logger.resume at false for a new run"
    )


def _id_in(path: Path) -> str:
    try:
        number = json.loads(path.read_text())["id"]
    except (ValueError, KeyError, TypeError):
        number = None
    if not isinstance(number, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", number):
        raise ValueError(
            f"logger=wandb: {path} is not what a run writes; without it, and with logger.resume=false, a new run starts"
        )
    return number


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def _no_key() -> str | None:
    """Why W&B cannot be online, found without a network and without asking; None if it can."""
    import wandb

    if os.environ.get("WANDB_MODE", "online") != "online":
        return f"WANDB_MODE is {os.environ['WANDB_MODE']}"
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    try:
        known = wandb.login(prompt=False, verify=False)
    except TypeError:  # before login could be told not to ask
        known = bool(wandb.api.api_key)
    return None if known else "no API key (WANDB_API_KEY, netrc or wandb login)"

"""What the telemetry tests run in every rank."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import training_cases
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from training_cases import CONFIG, OPTIMIZER, Batches, Compiled, Recorded, exact_norms, trainer

from hexiseq.attention.clock import CLOCK
from hexiseq.callbacks import Checkpoints, Throughput, Traces, throughput
from hexiseq.plan import Plan
from hexiseq.strategy import HexiSeqStrategy
from hexiseq.workload import ModelShape

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelShape.from_hf_config(CONFIG)
PEAKS = {"cpu": 0.1, "fast": 0.3, "slow": 0.1}


def on(plan: Plan) -> HexiSeqStrategy:
    """Every rank is on its device of the plan."""
    return HexiSeqStrategy(plan, identify=lambda _: (plan.devices[dist.get_rank()].type, "here"))


def seen(job: L.Trainer) -> list[dict[str, float]]:
    """What the throughput callback logs, a dict a step: filled while the job runs."""
    table: list[dict[str, float]] = []

    class Seen(CSVLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            table.append({**metrics, "step": step})
            super().log_metrics(metrics, step)

    job.loggers = [Seen(job.default_root_dir, name="", version="", flush_logs_every_n_steps=1)]
    return table


def logged(plan: Plan, steps: int, folder: str, split_every: int | None, **settings: Any) -> dict[str, Any]:
    """Train, and return the steps' metrics, losses, valid tokens, and how often the operator and the clock ran."""
    exact_norms(plan.dtype)
    compiled, packing = settings.pop("compiled", False), settings.pop("packing", None)
    module = (Compiled if compiled else Recorded)(CONFIG, OPTIMIZER, seed=7)
    watcher = Throughput(MODEL, PEAKS, print_every=0, split_every=split_every, folder=Path(folder))
    job = trainer(
        on(plan), max_steps=steps, gradient_clip_val=1.0, callbacks=[watcher], default_root_dir=folder,
        **settings,
    )  # fmt: skip
    table = seen(job)
    job.fit(module, Batches(plan, packing=packing))
    assert not CLOCK.timing
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules())
    return {
        "metrics": table,
        "losses": module.result.losses,
        "valid": module.result.valid,
        "grads": {name: grad.numpy() for name, grad in module.result.grads.items()},
        "hooks": hooks,
    }


class Watchface:
    """Time that only passes when it is told to."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


class Timed(Recorded):
    """A micro-step takes 1 second, a validation batch 100."""

    def training_step(self, *args: Any) -> Any:
        Watchface.now += 1
        return super().training_step(*args)

    def validation_step(self, *args: Any) -> Any:
        Watchface.now += 100
        return super().validation_step(*args)


class SlowBatches(Batches):
    """A batch takes 10 seconds to come, 20 on rank 1."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            Watchface.now += 20 if dist.get_rank() == 1 else 10
            yield batch


class SlowCheckpoints(L.Callback):
    """A checkpoint takes 1000 seconds more than it takes."""

    def on_save_checkpoint(self, *_: Any) -> None:
        Watchface.now += 1000


class SlowCallback(L.Callback):
    """Something a user does between two micro-steps takes a tenth of a second."""

    def on_train_batch_end(self, *_: Any) -> None:
        Watchface.now += 0.1


def durations(plan: Plan, folder: str) -> list[dict[str, float]]:
    """Metrics of four steps of two micro-steps, with a validation after every second and a checkpoint after every one;
    one validation falls between the micro-steps of a step."""
    exact_norms(plan.dtype)
    real, throughput.time = throughput.time, Watchface
    try:
        module = Timed(CONFIG, OPTIMIZER, seed=7)
        job = trainer(
            on(plan), max_steps=4, accumulate_grad_batches=2, default_root_dir=folder,
            val_check_interval=3, limit_val_batches=1,
            callbacks=[
                Throughput(print_every=0, split_every=1, folder=Path(folder)), SlowCallback(), SlowCheckpoints(),
                Checkpoints(Path(folder) / "checkpoints", 1),
            ],
        )  # fmt: skip
        table = seen(job)
        job.fit(module, SlowBatches(plan), Batches(plan))
    finally:
        throughput.time = real
    return [row for row in table if "step_seconds" in row]


def traced(plan: Plan, folder: str) -> bool:
    """Train three steps, of which the second is traced."""
    exact_norms(plan.dtype)
    module = Recorded(CONFIG, OPTIMIZER, seed=7)
    job = trainer(on(plan), max_steps=3, callbacks=[Traces(Path(folder), (2, 3))])
    job.fit(module, Batches(plan))
    return CLOCK.tracing


def to_wandb(plan: Plan, folder: str, fail: bool) -> None:
    """Train with W&B offline beside metrics.csv."""
    if str(ROOT) not in sys.path:  # recipes are not installed
        sys.path.insert(0, str(ROOT))
    from recipes import loggers

    exact_norms(plan.dtype)
    run_dir = Path(folder)
    settings = {"name": "wandb", "project": "p", "mode": "offline", "resume": False, "init_timeout_seconds": 5}
    job = SimpleNamespace(config={"logger": settings, "ckpt_path": None}, run_dir=run_dir, plan=plan)
    if dist.get_rank() == 0:
        plan.save(run_dir / "plan.json")
        (run_dir / "config.yaml").write_text("seed: 0\n")
        (run_dir / "plan.svg").write_text("<svg/>")
    loggers.launch.rank, kept = dist.get_rank, loggers.launch.rank
    failed = True
    try:
        chosen = loggers.loggers(job)
        watcher = Throughput(MODEL, PEAKS, print_every=0, split_every=1, folder=run_dir)
        fit = trainer(on(plan), max_steps=4, callbacks=[watcher], default_root_dir=folder)
        fit.loggers = chosen
        fit.fit(Failing(CONFIG, OPTIMIZER, seed=7) if fail else Recorded(CONFIG, OPTIMIZER, seed=7), Batches(plan))
        failed = False
    except ArithmeticError:
        pass
    finally:
        loggers.finish(chosen, run_dir, failed)
        loggers.launch.rank = kept
    assert failed == fail


class Failing(Recorded):
    """Fails on all ranks after the second step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if batch_idx == 2:
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


def logged_on(plan: Plan, args: tuple, settings: dict[str, Any]) -> dict[str, Any]:
    return logged(plan, *args, **settings)


def valid_tokens(plan: Plan, rank: int, micro_steps: int) -> list[int]:
    """Labelled tokens of a rank in each micro-step, from the batches themselves."""
    replica = plan.place(rank)[0]
    first = sum(r.sequences for r in plan.replicas[:replica])
    counts = []
    for batch in itertools.islice(training_cases.micro_steps(plan), micro_steps):
        labels = batch["labels"][first : first + plan.replicas[replica].sequences]
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        counts.append(int((targets[:, torch.from_numpy(plan.shard(rank).positions())] != -100).sum()))
    return counts


def documents(plan: Plan, steps: int) -> list[list[list[int]]]:
    batches = training_cases.micro_steps(plan, packing="documents")
    return [batch["documents"] for batch in itertools.islice(batches, steps)]

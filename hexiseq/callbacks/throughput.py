"""Loss, speed, MFU and memory of the whole job, once per optimizer step, right on mixed clusters.

Definitions, with a worked example: ``docs/metrics.md``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.profilers import Profiler
from torch.optim import Optimizer
from typing_extensions import override

from hexiseq.callbacks.split import StepSampler, balance, rank_split, write_split
from hexiseq.callbacks.work import RankWork
from hexiseq.plan import Plan
from hexiseq.strategy import HexiSeqStrategy, StepStats
from hexiseq.workload import ModelShape

MOST_RANK_COLUMNS = 64  # above so many ranks, figures are per device type only
FIRST_SAMPLE = 3  # the first steps allocate, compile and warm up
_DATA = "[_TrainingEpochLoop].train_dataloader_next"
_APART = ("save_checkpoint", "[Callback]Traces.on_train_batch_end")


class Throughput(pl.Callback):
    """Logs what `HexiSeqStrategy` counted exactly over all ranks, and wall time between optimizer steps.

    What a step's time leaves out: validation, checkpoints, writing traces. At the end it prints the means.

    Args:
        model: its shape, for FLOPs; None: no MFU.
        peaks: device type -> dense peak, TFLOP/s. Types without one get no MFU, nor does the job then.
        print_every: print a line every so many steps; 0 prints none (a progress bar shows them).
        split_every: split every so many-th step into compute, exchange and wait; None: never.
        folder: of the run, for ``step_split.json``; None writes none.

    Raises:
        ValueError: a number that is negative or, of `split_every`, 0.
    """

    def __init__(
        self,
        model: ModelShape | None = None,
        peaks: Mapping[str, float] | None = None,
        *,
        print_every: int,
        split_every: int | None = None,
        folder: Path | None = None,
    ) -> None:
        if print_every < 0:
            raise ValueError(f"print_every must be at least 0, got {print_every}")
        if split_every is not None and split_every < 1:
            raise ValueError(f"split_every must be at least 1, or null for never; got {split_every}")
        self._model, self._peaks = model, dict(peaks or {})
        self._print_every, self._split_every, self._folder = print_every, split_every, folder
        self._memory: PeakMemory | None = None
        self._work: RankWork | None = None
        self._sampler: StepSampler | None = None
        self._watch: _Watch | None = None
        self._step = self._first_step = 0
        self._started = self._batch_ended = 0.0
        self._apart_seconds = self._data_seconds = self._flops = self._learning_rate = 0.0
        self._totals: dict[str, float] = defaultdict(float)
        self._balances: list[float] = []
        self._peak_gb: dict[str, float] = {}

    # --- the hooks

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._memory is None:  # before there is a model
            self._memory = PeakMemory(trainer.strategy.root_device)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch = _Watch(trainer.profiler)  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        trainer.profiler = self._watch  # type: ignore[attr-defined]
        self._step = self._first_step = trainer.global_step
        self._totals.clear()
        self._balances.clear()
        self._begin()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = _hexiseq(trainer)
        if self._sampler is None and self._samples(self._step + 1):
            self._sampler = StepSampler(pl_module, strategy.root_device)
            self._sampler.start()
        if self._model is not None:
            if self._work is None or self._work.plan is not strategy.plan:
                self._work = RankWork(strategy.plan, self._model, trainer.global_rank)
            self._flops += self._work.micro_step(batch.get("documents"))

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._sampler is not None:
            self._sampler.backward_done()
        assert self._watch is not None
        assert self._memory is not None
        self._data_seconds += self._watch.take(_DATA)
        _hexiseq(trainer).counters |= {
            "flops": self._flops,
            "data_wait_seconds": self._data_seconds,
            "memory_gb": self._memory.gb(),
        }

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._learning_rate = optimizer.param_groups[0]["lr"]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._watch is not None
        stepped = trainer.global_step != self._step  # else a micro-step that only accumulated
        found = self._sampler.finish() if stepped and self._sampler is not None else None
        self._batch_ended = now = time.perf_counter()
        self._apart_seconds += self._watch.take(*_APART)
        if not stepped:
            return
        self._step = trainer.global_step
        strategy = _hexiseq(trainer)
        seconds = now - self._started - self._apart_seconds
        metrics = self._metrics(strategy.plan, strategy.step_stats, seconds)
        if found is not None:
            self._sampler = None
            metrics |= self._split(strategy, seconds, *found)
        if self._step > self._first_step + 1:
            self._totals["steps"] += 1
            self._totals["seconds"] += seconds
            self._totals["tokens"] += strategy.step_stats.valid_tokens
            self._totals["mfu_seconds"] += seconds * metrics.get("mfu", 0.0)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._step)
        if trainer.progress_bar_callback is not None:
            shown = {"loss": metrics["loss"], "tokens/s": metrics["tokens_per_second"]}
            pl_module.log_dict(shown, prog_bar=True, logger=False, sync_dist=False, rank_zero_only=True)
        if trainer.is_global_zero and self._print_every and self._step % self._print_every == 0:
            print(_line(self._step, trainer.max_steps, metrics), flush=True)
        self._begin()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._sampler is not None:
            self._sampler.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watch is None or trainer.sanity_checking:
            return
        if self._sampler is not None:
            self._sampler.resume()
        loss = trainer.callback_metrics.get("validation_loss")
        if loss is not None:
            for logger in trainer.loggers:
                logger.log_metrics({"validation_loss": float(loss)}, step=trainer.global_step)
            if trainer.is_global_zero and self._print_every:
                print(f"step {trainer.global_step}  validation loss {float(loss):.4f}", flush=True)
        # All since the last batch: a checkpoint in between is part of it.
        self._watch.take(*_APART)
        self._apart_seconds += time.perf_counter() - self._batch_ended

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and self._totals["steps"]:
            print(self._summary(_hexiseq(trainer).plan), flush=True)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave(trainer)

    def _leave(self, trainer: pl.Trainer) -> None:
        if self._sampler is not None:
            self._sampler.abandon()
        if self._watch is not None:
            trainer.profiler = self._watch.inner  # type: ignore[attr-defined]
        self._watch = self._sampler = None

    # --- figures

    def _begin(self) -> None:
        """The next step's time begins."""
        self._apart_seconds = self._data_seconds = self._flops = 0.0
        self._started = self._batch_ended = time.perf_counter()

    def _samples(self, step: int) -> bool:
        since = step - self._first_step - FIRST_SAMPLE
        return self._split_every is not None and since >= 0 and since % self._split_every == 0

    def _metrics(self, plan: Plan, stats: StepStats, seconds: float) -> dict[str, float]:
        types = [device.type for device in plan.devices]
        by_rank = stats.by_rank
        metrics: dict[str, float] = {
            "loss": stats.loss,
            "tokens_per_second": stats.valid_tokens / seconds,
            "tokens_per_second_per_device": stats.valid_tokens / seconds / plan.world_size,
            "step_seconds": seconds,
            "data_wait_seconds": max(by_rank["data_wait_seconds"]),
            "learning_rate": self._learning_rate,
        }
        if stats.grad_norm is not None:
            metrics["grad_norm"] = stats.grad_norm
        if plan.predicted is not None:
            metrics["predicted_step_seconds"] = plan.predicted.step_seconds
            metrics["prediction_error"] = abs(plan.predicted.step_seconds - seconds) / seconds
        for kind, tokens in _by_type(types, by_rank["valid_tokens"], sum).items():
            metrics[f"tokens_per_second_{kind}"] = tokens / seconds
        if self._model is not None:
            metrics |= mfu(types, by_rank["flops"], self._peaks, seconds)
        peaks_gb = _by_type(types, by_rank["memory_gb"], max)
        for kind, most in peaks_gb.items():
            metrics[f"memory_gb_{kind}"] = self._peak_gb[kind] = most
        if plan.world_size <= MOST_RANK_COLUMNS:
            for shard in plan.shards():
                metrics[f"tokens_rank_{shard.rank}"] = shard.num_tokens
                metrics[f"memory_gb_rank_{shard.rank}"] = by_rank["memory_gb"][shard.rank]
                if plan.predicted is not None:
                    metrics[f"predicted_memory_gb_rank_{shard.rank}"] = plan.predicted.memory_gb[shard.rank]
        return metrics

    def _split(
        self, strategy: HexiSeqStrategy, seconds: float, by_kind: Mapping[str, float], layer: Mapping[str, Any]
    ) -> dict[str, float]:
        """Collective. Gather all ranks' sampled steps, write them, and return what is logged of them."""
        assert self._memory is not None
        own = rank_split(
            strategy.plan, strategy.global_rank, seconds, self._data_seconds, self._memory.gb(), by_kind, layer
        )
        splits: list[Any] = [None] * strategy.world_size
        dist.all_gather_object(splits, own)
        if strategy.is_global_zero and self._folder is not None:
            write_split(self._folder / "step_split.json", self._step, seconds, splits)
        self._balances.append(balance(splits))
        metrics = {"balance": self._balances[-1]}
        parts = ("compute_seconds", "exchange_seconds", "wait_seconds")
        for name in parts:
            values = [getattr(split, name) for split in splits]
            for kind, mean in _by_type([split.device for split in splits], values, _mean).items():
                metrics[f"{name}_{kind}"] = mean
        if len(splits) <= MOST_RANK_COLUMNS:
            metrics |= {f"{name}_rank_{split.rank}": getattr(split, name) for split in splits for name in parts}
        return metrics

    def _summary(self, plan: Plan) -> str:
        seconds, steps = self._totals["seconds"], int(self._totals["steps"])
        mean_seconds, used = seconds / steps, self._totals["mfu_seconds"] / seconds
        parts = [f"{self._totals['tokens'] / seconds:,.0f} tokens/s", f"{mean_seconds:.3f} s a step"]
        if plan.predicted is not None:
            off = abs(plan.predicted.step_seconds - mean_seconds) / mean_seconds
            parts.append(f"predicted {plan.predicted.step_seconds:.3f} s ({off:.0%} off)")
        if used:
            parts.append(f"MFU {used:.1%}")
        if self._balances:
            parts.append(f"balance {_mean(self._balances):.2f}")
        memory = ", ".join(f"{kind} {gb:.2f} GB" for kind, gb in self._peak_gb.items())
        first = self._first_step + 2
        return f"steps {first} to {first + steps - 1}: {', '.join(parts)}; peak memory: {memory}"


def mfu(types: Sequence[str], flops: Sequence[float], peaks: Mapping[str, float], seconds: float) -> dict[str, float]:
    """``mfu`` of the job and ``mfu_TYPE`` of each device type: model FLOPs over those of the dense peaks in that time.

    Args:
        types: of the ranks' devices.
        flops: each rank's part of the model's FLOPs.
        peaks: device type -> TFLOP/s. A type without one is left out, and so is the job then.
    """
    done, found = _by_type(types, flops, sum), {}
    for kind, work in done.items():
        if kind in peaks:
            found[f"mfu_{kind}"] = work / (types.count(kind) * peaks[kind] * 1e12 * seconds)
    if set(done) <= set(peaks):
        found["mfu"] = sum(flops) / (sum(peaks[kind] for kind in types) * 1e12 * seconds)
    return found


class PeakMemory:
    """The most memory of this rank since it was made: allocated on its GPU; else what the process has grown by, GB."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _forget_peak()
            self._before = _resident_gb()

    def gb(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 1e9
        return max(0.0, _peak_resident_gb() - self._before)


def _forget_peak() -> None:
    """Let the kernel count the peak of this process afresh, where it can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _resident_gb() -> float:
    return _status("VmRSS")


def _peak_resident_gb() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(name)), 0.0)


class _Watch(Profiler):
    """The trainer's profiler, with the seconds of its actions kept: Lightning names all it does to it."""

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self._began: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def take(self, *names: str) -> float:
        """Seconds of the actions since they were last taken."""
        return sum(self._seconds.pop(name, 0.0) for name in names)

    @override
    def start(self, action_name: str) -> None:
        if action_name in (_DATA, *_APART):
            self._began[action_name] = time.perf_counter()
        self.inner.start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        self.inner.stop(action_name)
        if action_name in self._began:
            self._seconds[action_name] += time.perf_counter() - self._began.pop(action_name)

    @override
    def summary(self) -> str:
        return self.inner.summary()

    @override
    def describe(self) -> None:
        self.inner.describe()

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.inner.setup(stage, local_rank, log_dir)

    @override
    def teardown(self, stage: str | None) -> None:
        self.inner.teardown(stage)

    @override
    def __del__(self) -> None:
        """The trainer's profiler outlives this one."""


def _by_type(types: Sequence[str], values: Sequence[float], fold: Any) -> dict[str, float]:
    table: dict[str, list[float]] = {}
    for kind, value in zip(types, values, strict=True):
        table.setdefault(kind, []).append(value)
    return {kind: fold(there) for kind, there in table.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _line(step: int, of: int, metrics: Mapping[str, float]) -> str:
    predicted = metrics.get("predicted_step_seconds")
    return (
        f"step {step}/{of}  loss {metrics['loss']:.4f}  {metrics['tokens_per_second']:,.0f} tokens/s  "
        f"{metrics['step_seconds']:.3f} s"
        + (f" (predicted {predicted:.3f})" if predicted is not None else "")
        + (f"  MFU {metrics['mfu']:.1%}" if "mfu" in metrics else "")
    )


def _hexiseq(trainer: pl.Trainer) -> HexiSeqStrategy:
    assert isinstance(trainer.strategy, HexiSeqStrategy)
    return trainer.strategy

"""Loss and speed of the whole job, once per optimizer step, to the loggers and to the terminal."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from hexiseq.strategy import HexiSeqStrategy


class Throughput(pl.Callback):
    """Logs what `HexiSeqStrategy` counted exactly over all ranks, and wall time between optimizer steps.

    Metrics: ``loss`` (mean over the step's valid tokens, whole job), ``tokens_per_second`` (valid tokens over wall
    time, whole job), ``step_seconds``, ``predicted_step_seconds``, ``grad_norm``, ``learning_rate`` and
    ``tokens_rank_R``. Validation time is not counted into a step.

    Args:
        print_every: print a line every so many steps; 0 prints none (a progress bar shows them).
    """

    def __init__(self, print_every: int) -> None:
        self._predicted: float | None = None
        self._tokens: dict[str, float] = {}
        self._print_every = print_every
        self._step = 0
        self._started = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, HexiSeqStrategy)
        plan = trainer.strategy.plan
        self._predicted = plan.predicted.step_seconds if plan.predicted else None
        self._tokens = {f"tokens_rank_{shard.rank}": shard.num_tokens for shard in plan.shards()}
        self._step = trainer.global_step
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # a micro-step that only accumulated
        assert isinstance(trainer.strategy, HexiSeqStrategy)
        self._step = trainer.global_step
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        stats = trainer.strategy.step_stats
        metrics: dict[str, float] = {
            "loss": stats.loss,
            "tokens_per_second": stats.valid_tokens / seconds,
            "step_seconds": seconds,
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            **self._tokens,
        }
        if stats.grad_norm is not None:
            metrics["grad_norm"] = stats.grad_norm
        if self._predicted is not None:
            metrics["predicted_step_seconds"] = self._predicted
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._step)
        if trainer.is_global_zero and self._print_every and self._step % self._print_every == 0:
            predicted = f" (predicted {self._predicted:.3f})" if self._predicted is not None else ""
            print(
                f"step {self._step}/{trainer.max_steps}  loss {stats.loss:.4f}  "
                f"{metrics['tokens_per_second']:,.0f} tokens/s  {seconds:.3f} s{predicted}",
                flush=True,
            )

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss = trainer.callback_metrics.get("validation_loss")
        if trainer.sanity_checking or loss is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics({"validation_loss": float(loss)}, step=trainer.global_step)
        if trainer.is_global_zero and self._print_every:
            print(f"step {trainer.global_step}  validation loss {float(loss):.4f}", flush=True)
        self._started = time.perf_counter()

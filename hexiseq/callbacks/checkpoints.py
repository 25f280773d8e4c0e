"""Checkpoints every so many optimizer steps, always at the end, and when the run is asked to stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from hexiseq.strategy import HexiSeqStrategy

ASKED = "asked_to_stop"


class Checkpoints(pl.Callback):
    """Writes ``step-N`` folders that resume on the same or another number of ranks.

    Args:
        folder: where they go.
        every: optimizer steps between two; None writes only the last.
        asked_to_stop: whether this rank has been told to end (`hexiseq.launch.asked_to_stop`). Once any rank has, all
            write a checkpoint after the same optimizer step and training ends.

    Attributes:
        stopped: training ended because a rank was asked to.
    """

    def __init__(self, folder: Path, every: int | None, asked_to_stop: Callable[[], bool] | None = None) -> None:
        self._folder, self._every, self._asked = folder, every, asked_to_stop
        self._saved = 0
        self.stopped = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._saved = trainer.global_step

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._asked is not None:
            # Signals reach ranks at different moments: they agree by what travels with the step's sums.
            _strategy(trainer).counters[ASKED] = float(self._asked())

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._saved:
            return
        asked = self._asked is not None and any(_strategy(trainer).step_stats.by_rank[ASKED])
        if asked or step == trainer.max_steps or (self._every is not None and step % self._every == 0):
            self._saved = step
            trainer.save_checkpoint(self._folder / f"step-{step}")
        if asked and step != trainer.max_steps:
            self.stopped = trainer.should_stop = True
            trainer.limit_val_batches = 0  # what is left of the time is not for it


def _strategy(trainer: pl.Trainer) -> HexiSeqStrategy:
    assert isinstance(trainer.strategy, HexiSeqStrategy)
    return trainer.strategy

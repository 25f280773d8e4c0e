"""Checkpoints every so many optimizer steps, and always at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override


class Checkpoints(pl.Callback):
    """Writes ``step-N`` folders that resume on the same or another number of ranks.

    Args:
        folder: where they go.
        every: optimizer steps between two; None writes only the last.
    """

    def __init__(self, folder: Path, every: int | None) -> None:
        self._folder, self._every = folder, every
        self._saved = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._saved = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        due = step == trainer.max_steps or (self._every is not None and step % self._every == 0)
        if due and step != self._saved:
            self._saved = step
            trainer.save_checkpoint(self._folder / f"step-{step}")

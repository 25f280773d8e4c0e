"""Traces of torch's profiler, one file per rank, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from hexiseq.attention.clock import CLOCK
from hexiseq.strategy import HexiSeqStrategy


class Traces(pl.Callback):
    """Profiles optimizer steps ``[first, last)``, counted from 1 over the whole training, and writes
    ``rankR-TYPE.json`` into `folder`.

    Attention's exchanges, its waiting and its blocks of kernel calls are spans whose names begin with ``hexiseq``.

    Raises:
        ValueError: the range is empty or begins before step 1.
    """

    def __init__(self, folder: Path, steps: tuple[int, int]) -> None:
        if not 1 <= steps[0] < steps[1]:
            raise ValueError(f"trainer.trace_steps must be two ascending steps from 1 on, [first, last), got {steps}")
        self._folder, self._steps = folder, steps
        self._profile: profile | None = None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The step under way is one more than those done.
        if self._profile is None and self._steps[0] <= trainer.global_step + 1 < self._steps[1]:
            activities = [ProfilerActivity.CPU]
            if trainer.strategy.root_device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
            CLOCK.tracing = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step + 1 >= self._steps[1]:
            self._write(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        CLOCK.tracing = False

    def _write(self, trainer: pl.Trainer) -> None:
        if self._profile is None:
            return
        CLOCK.tracing = False
        finished, self._profile = self._profile, None
        finished.stop()
        assert isinstance(trainer.strategy, HexiSeqStrategy)
        rank = trainer.global_rank
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / f"rank{rank}-{trainer.strategy.plan.devices[rank].type}.json"))

"""Training jobs that take turns, a step each: a machine that gets slower gets slower for all of them alike.

The jobs run at one time, in processes of their own; all but one sleep. Whose turn it is stands in a file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from typing_extensions import override

POLL_SECONDS = 0.05  # next to nothing, and less than a hundredth of the steps that are compared
FAILED = "failed"  # a file that says that a job has
LIMIT_SECONDS = 900  # that a job waits for the others to start, or for its turn


@dataclass(frozen=True)
class Seat:
    """One job's place among those that take turns.

    Attributes:
        folder: of the file that says whose turn it is, empty in the beginning.
        number: of this job.
        count: of all jobs.
    """

    folder: Path
    number: int
    count: int

    def to_argument(self) -> str:
        return f"turns={self.number}/{self.count}@{self.folder}"

    @staticmethod
    def from_arguments(arguments: list[str]) -> Seat | None:
        for argument in arguments:
            if argument.startswith("turns="):
                place, folder = argument.removeprefix("turns=").split("@", 1)
                number, count = map(int, place.split("/"))
                return Seat(Path(folder), number, count)
        return None

    def ready(self) -> None:
        """Say that this job has started."""
        self._sign(self.number).touch()

    def is_ready(self) -> bool:
        """Whether this job has said so."""
        return self._sign(self.number).exists()

    def wait(self, turn: int) -> None:
        """Sleep until all jobs have started and so many turns are over.

        Raises:
            RuntimeError: a job has failed, or this one waited for `LIMIT_SECONDS`.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while (holder := self._holder(turn)) is not None:
            if (self.folder / FAILED).exists():
                raise RuntimeError(f"job {self.number} of {self.count} waited for another that failed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"job {self.number} of {self.count} waited {LIMIT_SECONDS:g} s for job {holder}")
            time.sleep(POLL_SECONDS)

    def pass_on(self) -> None:
        """Give the turn to the next job."""
        part = self.folder / f"turn-{self.number}.part"
        part.write_text(str(self._over() + 1))
        part.replace(self.folder / "turn")

    def _sign(self, job: int) -> Path:
        return self.folder / f"ready-{job}"

    def _over(self) -> int:
        """Turns that are over."""
        file = self.folder / "turn"
        return int(file.read_text()) if file.exists() else 0

    def _holder(self, turn: int) -> int | None:
        """A job that has not started, or has a turn before that one."""
        for job in range(self.count):
            if not self._sign(job).exists():
                return job
        over = self._over()
        return None if over >= turn else over % self.count


class TakesTurns(pl.Callback):
    """Does a step when it is this job's turn.

    Attributes:
        steps: seconds of each, wall and this process's CPU time, without waiting for the turn.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.steps: list[dict[str, float]] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.seat.ready()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        # The turn by its number: after the last step this job may have it still, until its first rank has passed it on.
        self._wait(trainer, len(self.steps) * self.seat.count + self.seat.number)
        self._start = time.perf_counter(), time.process_time()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        wall, cpu = self._start
        self.steps.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
        dist.barrier()  # nobody of this job computes on when the next one has the turn
        if trainer.is_global_zero:
            self.seat.pass_on()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._wait(trainer, len(self.steps) * self.seat.count)  # what an end costs is in nobody's step

    def _wait(self, trainer: pl.Trainer, turn: int) -> None:
        """One rank looks, and all go on at one moment: who sees a turn late is not late in a step."""
        if trainer.is_global_zero:
            self.seat.wait(turn)
        dist.barrier()

"""How long a job's steps take, as its plan predicts, against a time limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Walltime:
    """The steps of a job against its time limit, infinite where there is none; without start-up and checkpoints."""

    step_seconds: float
    steps: int
    limit_seconds: float

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def runs(self) -> int:
        """How often the job has to start."""
        return max(1, math.ceil(self.seconds / self.limit_seconds))

    def __str__(self) -> str:
        text = (
            f"{duration(self.step_seconds)} a step predicted, {self.steps:,} steps about {duration(self.seconds)}; "
            f"time limit {duration(self.limit_seconds)}"
        )
        return text if self.runs == 1 else f"{text}: it takes {self.runs} or more runs, each requeued and resumed"


def walltime_within(step_seconds: float, steps: int, limit_seconds: float, key: str) -> Walltime:
    """Raises ValueError for a limit within which no step would end; `key` is what sets it."""
    if limit_seconds < step_seconds:
        raise ValueError(
            f"{key}: a time limit of {duration(limit_seconds)} is shorter than one step, which is predicted to "
            f"take {duration(step_seconds)}; ask for more time"
        )
    return Walltime(step_seconds, steps, limit_seconds)


def seconds_of(limit: Any) -> float:
    """A time limit as sbatch takes it: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S.

    Raises:
        ValueError: it is none of these.
    """
    text = str(limit)
    if text.lower() in ("unlimited", "infinite"):
        return math.inf
    days, dash, clock = text.rpartition("-")
    fields = clock.split(":")
    if not all(field.isdecimal() for field in (*fields, *([days] if dash else []))) or len(fields) > 3:
        raise ValueError(
            f"a time limit is minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, got {text!r} "
            "(quote it on the command line: \"recipe.time='2:00:00'\")"
        )
    units = (3600, 60, 1) if dash or len(fields) == 3 else (60, 1)
    seconds = 86400 * int(days or 0) + sum(int(field) * unit for field, unit in zip(fields, units, strict=False))
    return float(seconds) or math.inf  # to Slurm, 0 is no limit


def duration(seconds: float) -> str:
    """As people say it: the largest unit of which there are two."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if 2 * size <= seconds < math.inf:
            return f"{seconds / size:.3g} {unit}"
    return "none" if seconds == math.inf else f"{seconds:.3g} s"

"""What a sweep's picture compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        title: what all jobs have in common.
        labels, policies: of each job.
        lanes: title -> tokens per second of each job; None where there is none.
        problems: of each job, why it has no figures; empty if it has.
        alike: lanes measure the same thing and share a scale.
    """

    title: str
    labels: Sequence[str]
    policies: Sequence[str]
    lanes: Mapping[str, Sequence[float | None]]
    problems: Sequence[str]
    alike: bool = True

"""What this rank does when: spans of exchange, waiting and computing, on a sampled step, and names for a profiler.

One process is one rank, so there is one `CLOCK`. It is off but for the steps a callback samples; what reports to it
pays for the test of a flag then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

KINDS = ("compute", "exchange", "wait")


@dataclass(frozen=True)
class Span:
    """Of what a rank did, one of `KINDS`, in seconds from the clock's start."""

    kind: str
    name: str
    start: float
    end: float


class Clock:
    """Spans that follow one another. One begun inside another interrupts it: a moment belongs to the innermost.

    On CUDA spans are between events on the current stream, so that nothing waits for the device before `stop`: what
    counts is how long the stream stood still, not how long a transfer took beside it.

    Attributes:
        timing: spans are recorded, between `start` and `stop`.
        tracing: spans are named to torch's profiler.
    """

    def __init__(self) -> None:
        self.timing = self.tracing = False
        self._device = torch.device("cpu")
        self._origin: Any = None
        self._open: list[list[Any]] = []  # kind, name, mark of the start
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._records: list[record_function] = []

    def start(self, device: torch.device) -> None:
        """Begin to record. Waits for what `device` has in hand."""
        self._device, self._open, self._spans = device, [], []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._origin = self.mark()
        self.timing = True

    def begin(self, kind: str, name: str) -> None:
        """Enter a span; `end` leaves it."""
        if self.timing:
            now = self.mark()
            if self._open:
                self._close(now)
            self._open.append([kind, name, now])
        if self.tracing:
            record = record_function(f"hexiseq {kind}: {name}")
            record.__enter__()
            self._records.append(record)

    def end(self) -> None:
        if self.timing and self._open:
            now = self.mark()
            self._close(now)
            self._open.pop()
            if self._open:
                self._open[-1][2] = now
        if self._records:
            self._records.pop().__exit__(None, None, None)

    def _close(self, now: Any) -> None:
        kind, name, start = self._open[-1]
        self._spans.append((kind, name, start, now))

    def mark(self) -> Any:
        """This moment, for `seconds`."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """From the start to `mark`. On CUDA both must have been reached: after `stop`."""
        return self._origin.elapsed_time(mark) / 1e3 if self._device.type == "cuda" else mark - self._origin

    def stop(self) -> list[Span]:
        """End the recording. Waits for the device.

        Returns:
            all spans, by start.
        """
        self.timing = False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [Span(kind, name, self.seconds(a), self.seconds(b)) for kind, name, a, b in self._spans]


CLOCK = Clock()

"""A sampled step, split into compute, exchange and wait. What is measured and what is not: ``docs/metrics.md``.

Attention reports to `hexiseq.attention.clock.CLOCK` by itself. The parameters' traffic is FSDP2's own; hooks around
FSDP2's, there for the sampled step only, time it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from hexiseq.attention.clock import CLOCK, Span
from hexiseq.plan import Plan

GATHER, REDUCE = "gather parameters", "reduce gradients"
LayerSpans = list[tuple[str, str, float, float]]


@dataclass(frozen=True)
class RankSplit:
    """One rank's sampled step. Seconds add up to the step's with those spent waiting for data.

    Attributes:
        layer: ``forward`` and ``backward`` of the middle decoder layer, in the last micro-step: kind, name, start and
            end of spans that follow one another without a gap, in seconds from the layer's start on this rank.
    """

    rank: int
    device: str
    node: str
    compute_seconds: float
    exchange_seconds: float
    wait_seconds: float
    data_wait_seconds: float
    memory_gb: float
    layer: Mapping[str, LayerSpans]


class StepSampler:
    """Measures one step: `start` with its first micro-step, `backward_done` after every backward pass, `finish`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, list[Any]] = {}
        # The root comes first, then the decoder layers in order.
        root, *layers = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._root, self._layers = root, layers
        self._middle = layers[len(layers) // 2]
        self._handles: list[Any] = []

    def start(self) -> None:
        """Collective."""
        self._marks.clear()
        CLOCK.start(self._device)
        self._meet(anywhere=True)
        for module in (self._root, *self._layers):
            self._watch(module)

    def pause(self) -> None:
        CLOCK.timing = False

    def resume(self) -> None:
        CLOCK.timing = True

    def backward_done(self) -> None:
        CLOCK.end()  # the last reduction

    def abandon(self) -> None:
        """Stop, and leave no hook behind."""
        CLOCK.timing = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self) -> tuple[dict[str, float], dict[str, LayerSpans]]:
        """Collective. Seconds by kind, compute left out: it is the rest; and the middle layer's spans."""
        self._meet(anywhere=True)
        self.abandon()
        spans = CLOCK.stop()
        seconds: dict[str, float] = defaultdict(float)
        for span in spans:
            seconds[span.kind] += span.end - span.start
        marks = {name: [CLOCK.seconds(mark) for mark in pair] for name, pair in self._marks.items() if len(pair) == 2}
        return seconds, {name: fill(spans, *pair) for name, pair in marks.items()}

    def _meet(self, anywhere: bool = False) -> None:
        """Wait for the slowest rank, so that a transfer that follows is not taken for longer than it is.

        On GPUs parameters move beside computation, and ranks meeting there would change what is measured.
        """
        if dist.get_world_size() > 1 and (anywhere or self._device.type == "cpu"):
            CLOCK.begin("wait", "meeting")
            dist.all_reduce(torch.zeros(1, device=self._device))
            CLOCK.end()

    def _watch(self, module: nn.Module) -> None:
        """Hooks just outside of FSDP2's own: it gathers before a forward and a backward pass, and reduces after it."""
        middle, root = module is self._middle, module is self._root

        def before_forward(_: nn.Module, args: Any) -> None:
            if CLOCK.timing:
                if middle:
                    self._marks["forward"] = [CLOCK.mark()]
                self._begin(GATHER)

        def gathered(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not CLOCK.timing:
                return
            CLOCK.end()
            for tensor in _tensors((*args, *kwargs.values())):
                # What FSDP2 hangs its reduction on.
                if tensor.grad_fn is not None and "PostBackward" in tensor.grad_fn.name():
                    tensor.grad_fn.register_prehook(before_reduction)
                    tensor.grad_fn.register_hook(after_reduction)

        def before_reduction(_: Any) -> None:
            self._begin(REDUCE)

        def after_reduction(*_: Any) -> None:
            CLOCK.end()
            if middle and "backward" in self._marks:
                self._marks["backward"].append(CLOCK.mark())

        def after_forward(_: nn.Module, args: Any, output: Any) -> None:
            for tensor in _tensors(output) if CLOCK.timing else ():
                tensor.register_hook(queue_last_reduction if root else before_backward)

        def left(_: nn.Module, args: Any, output: Any) -> None:
            if not CLOCK.timing:
                return
            if middle:
                self._marks["forward"].append(CLOCK.mark())
            for tensor in _tensors(output) if not root else ():
                tensor.register_hook(gathered_again)

        def before_backward(_: Tensor) -> None:
            if middle:
                self._marks["backward"] = [CLOCK.mark()]
            self._begin(GATHER)

        def gathered_again(_: Tensor) -> None:
            CLOCK.end()

        def queue_last_reduction(_: Tensor) -> None:
            # FSDP2 queues its last reduction in a hook that runs after this one.
            Variable._execution_engine.queue_callback(lambda: self._begin(REDUCE))

        apart = torch.compiler.disable  # of a compiled layer
        self._handles += [
            module.register_forward_pre_hook(apart(before_forward), prepend=True),
            module.register_forward_pre_hook(apart(gathered), with_kwargs=True),
            module.register_forward_hook(apart(after_forward), prepend=True),
            module.register_forward_hook(apart(left)),
        ]

    def _begin(self, name: str) -> None:
        self._meet()
        CLOCK.begin("exchange", name)


def fill(spans: Sequence[Span], start: float, end: float) -> LayerSpans:
    """The spans between two moments, from the first of them on, and computing where there is none."""
    filled: LayerSpans = []
    now = start
    for span in spans:
        if span.start < start or span.end > end:
            continue
        if span.start > now:
            filled.append(("compute", "linear", now - start, span.start - start))
        filled.append((span.kind, span.name, span.start - start, span.end - start))
        now = span.end
    if end > now:
        filled.append(("compute", "linear", now - start, end - start))
    return filled


def rank_split(
    plan: Plan,
    rank: int,
    step_seconds: float,
    data_wait_seconds: float,
    memory_gb: float,
    seconds: Mapping[str, float],
    layer: Mapping[str, LayerSpans],
) -> RankSplit:
    """A rank's sampled step from what the sampler found; computing is what is left of the step."""
    exchange, wait = seconds.get("exchange", 0.0), seconds.get("wait", 0.0)
    compute = step_seconds - exchange - wait - data_wait_seconds
    device = plan.devices[rank]
    return RankSplit(
        rank, device.type, device.node, compute, exchange, wait, data_wait_seconds, memory_gb, dict(layer)
    )  # fmt: skip


def balance(splits: Sequence[RankSplit]) -> float:
    """Mean over ranks of the time they compute, over the longest."""
    busy = [split.compute_seconds for split in splits]
    return sum(busy) / len(busy) / max(busy)


def write_split(path: Path, step: int, step_seconds: float, splits: Sequence[RankSplit]) -> None:
    """Write ``step_split.json``, at once, so that nobody reads half of it."""
    table = {"step": step, "step_seconds": step_seconds, "ranks": [asdict(split) for split in splits]}
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(table))
    draft.replace(path)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Tensors with gradients in what a module takes or returns."""
    if isinstance(values, Tensor):
        if values.requires_grad:
            yield values
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)

"""A rank of a training run that is watched: bytes at the border of its process groups, memory, clocks, kinds of work.

    python -m benchmarks.probe RUN_DIR [profile] [turns=...]

runs `recipes.pretrain` on a prepared run folder, as `hexiseq.launch` starts it, and writes ``probe-N.json`` there. With
turns (`benchmarks.turns`) it does its steps by turns with other jobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from benchmarks import ranks
from benchmarks.turns import Seat, TakesTurns
from hexiseq import launch
from hexiseq.attention.exchange import Buffers, Lease
from hexiseq.attention.kernels import cpu
from recipes import pretrain
from recipes.job import load

MEMORY_STEP = 1  # the first allocates what stays
# Kinds of work by parts of operators' names, the first that fits; what fits none is elementwise work and copies.
KINDS = {
    "gemm": ("aten.mm", "aten.addmm", "aten.bmm", "linear_cross_entropy"),
    "attend": ("hexiseq.", "flash_attention"),
    "optimizer": ("_foreach", "_fused_adam", "lerp_", "addcdiv_", "addcmul_", "aten.sqrt"),
    "collectives": ("c10d", "fsdp"),
}


class Clock(TorchDispatchMode):
    """CPU seconds of this thread in each operator; an operator that calls others is counted whole."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self._cpu = time.thread_time()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.thread_time()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds[str(func)] += time.thread_time() - start

    def kinds(self, in_kernels: float) -> dict[str, float]:
        """By kind: attention's kernels, what else `attend` does, and the thread's time outside of operators, too."""
        seconds = {"attention": in_kernels, **dict.fromkeys(KINDS, 0.0), "elementwise": 0.0}
        others = {}
        for name, value in self.seconds.items():
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "elementwise")
            seconds[kind] += value
            if kind == "elementwise":
                others[f"  {name}"] = value
        seconds["attend"] -= in_kernels
        seconds["outside"] = time.thread_time() - self._cpu - sum(self.seconds.values())
        return {**seconds, **dict(sorted(others.items(), key=lambda item: -item[1])[:20])}


class Border:
    """Counts what this rank hands to its process groups, by kind, itself as receiver left out."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        names = ("batch_isend_irecv", "all_to_all_single", "all_gather_single", "reduce_scatter_single", "all_reduce")
        with contextlib.ExitStack() as stack:
            for name in names:
                counted = self._counted(getattr(dist, name), getattr(self, f"_{name}"))
                stack.enter_context(mock.patch.object(dist, name, counted))
            yield

    @staticmethod
    def _counted(plain: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            count(*args, **options)
            return plain(*args, **options)

        return call

    def _batch_isend_irecv(self, ops: Any) -> None:
        self.sent["attention"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)

    def _all_to_all_single(self, output: Any, source: Any, output_sizes: Any, input_sizes: Any, group: Any,
                           **_: Any) -> None:  # fmt: skip
        ranks = dist.get_process_group_ranks(group)
        away = sum(size for rank, size in zip(ranks, input_sizes, strict=True) if rank != dist.get_rank())
        self.sent["attention"] += away * source.element_size()

    def _all_gather_single(self, output: Any = None, source: Any = None, group: Any = None, *_: Any,
                           **options: Any) -> None:  # fmt: skip
        source = options.get("input_tensor", options.get("input", source))
        # On the circle each rank passes on all parts but one. Ranks' agreement before each call is in float64.
        kind = "parameters" if source.dtype == torch.float32 else "agreement"
        self.sent[kind] += source.nbytes * (dist.get_world_size(group) - 1)

    def _reduce_scatter_single(self, output: Any = None, source: Any = None, *_: Any, **options: Any) -> None:
        output = options.get("output_tensor", options.get("output", output))
        self.sent["parameters"] += output.nbytes * (dist.get_world_size(options.get("group")) - 1)

    def _all_reduce(self, tensor: Any, *_: Any, **__: Any) -> None:
        self.sent["all_reduce"] += tensor.nbytes


class Probe(pl.Callback):
    """Clocks and counters at the end of every step; peak memory above what the process held before there was a model,
    without the pages of libraries' files.

    Steps up to `MEMORY_STEP`, and the one after it, are not to be timed.

    Args:
        profile: also split the last step's CPU time by kinds of work (`Clock`), which slows that step.
        turns: whose clocks count, if there are turns: they leave out waiting for them.
    """

    def __init__(self, folder: Path, border: Border, profile: bool, turns: TakesTurns | None) -> None:
        self._folder, self._border, self._profile, self._turns = folder, border, profile, turns
        self._steps: list[dict[str, Any]] = []
        self._kinds: dict[str, float] = {}
        self._clock: Clock | None = None
        self._open = contextlib.ExitStack()
        self._unkept = contextlib.ExitStack()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        map_blocks_from(262_144)
        ctypes.CDLL(None).malloc_trim(0)
        self._before = status_bytes("RssAnon")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._mark()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        if trainer.global_step == MEMORY_STEP:
            self._unkept.enter_context(_buffers_let_go())
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
        if trainer.global_step == MEMORY_STEP + 1:
            self._unkept.close()
            launch.keep_memory()  # again

    def begin(self, trainer: pl.Trainer) -> None:
        """The step begins, now that its turn has come."""
        if self._profile and trainer.global_step == trainer.max_steps - 1:
            self._open.enter_context(ranks.kernels_timed(cpu))
            self._clock = self._open.enter_context(Clock())

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._clock is not None:
            self._open.close()
            self._kinds, self._clock = self._clock.kinds(sum(ranks._in_kernels)), None
        self._mark()

    def _mark(self) -> None:
        clocks = {"wall": time.perf_counter(), "cpu": time.process_time()}
        # A first step loads 17 MB more of libraries, which stay.
        peak = status_bytes("VmHWM") - status_bytes("RssFile") - self._before
        self._steps.append({**clocks, "peak_bytes": peak, "sent": dict(self._border.sent)})

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = [
            {"wall": b["wall"] - a["wall"], "cpu": b["cpu"] - a["cpu"], "peak_bytes": b["peak_bytes"],
             "sent": {kind: count - a["sent"].get(kind, 0) for kind, count in b["sent"].items()}}
            for a, b in zip(self._steps, self._steps[1:], strict=False)
        ]  # fmt: skip
        if self._turns is not None:
            steps = [{**step, **clocks} for step, clocks in zip(steps, self._turns.steps, strict=True)]
        found = {"steps": steps, "peak_bytes": steps[MEMORY_STEP]["peak_bytes"], "kinds": self._kinds}
        (self._folder / f"probe-{launch.rank()}.json").write_text(json.dumps(found))


class Begins(pl.Callback):
    """Tells the probe, which comes before `TakesTurns` and ends a step before it does, that the wait is over."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        self._probe.begin(trainer)


@contextlib.contextmanager
def _buffers_let_go() -> Iterator[None]:
    """Communication buffers are let go of, as an allocator that serves all of the model takes them back on a GPU."""

    def give(lease: Lease, buffer: torch.Tensor) -> None:
        lease._taken.pop(id(buffer), None)

    for found in gc.get_objects():
        if isinstance(found, Buffers):
            found._free.clear()
            found._last_use.clear()
    with mock.patch.object(Lease, "give", give):
        yield


def map_blocks_from(size: int) -> None:
    """Let glibc map and unmap blocks from so many bytes on, and keep smaller ones when they are free.

    Kept blocks (`launch.keep_memory`) let the resident set creep above what is in use. Mapped ones show what is,
    but fresh pages cost time.
    """
    trim_threshold, map_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(map_threshold, size)
    libc.mallopt(trim_threshold, 2 * size)


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def run(folder: Path, profile: bool, seat: Seat | None) -> None:
    border = Border()
    turns = None if seat is None else TakesTurns(seat)
    probe = Probe(folder, border, profile, turns)

    class Watched(pl.Trainer):
        def __init__(self, *, callbacks: list[pl.Callback], **options: Any) -> None:
            # The turn ends when all else about a step is done.
            super().__init__(callbacks=[*callbacks, probe, *([turns] if turns else []), Begins(probe)], **options)

    with border.watched(), mock.patch.object(pl, "Trainer", Watched):
        pretrain.run(load(folder))


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    launch.worker(lambda: run(run_dir, "profile" in sys.argv[2:], Seat.from_arguments(sys.argv[2:])), run_dir)

"""What one device does, measured while every other rank measures too: matrix products at the model's own shapes,
attention calls of several sizes, copies; on GPUs copies to pinned host memory and back.

On GPUs a call takes what the clock says. On CPUs it takes CPU time, and what share of its cores a rank got is measured
apart, over the whole time (`Usage`): a time slice is longer than a call, so no clock shows in one call that two ranks
share a core, and programs that are no part of the job would show in all of them.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hexiseq.attention import kernels
from hexiseq.workload import ModelShape, attention_flops

BACKWARD_ATTENTION = 2.5  # backward FLOPs of attention over forward: five matrix products against two
PRODUCTS = 3  # of a linear layer: forward, gradients to the input and to the weight
HEAD_ROWS = 1024  # tokens whose logits exist at one time
LEAST_SAMPLES = 3
USABLE = 0.9  # of free memory
# Of a sample: calls are repeated until they take so long that reading the clock does not show.
LEAST_SECONDS = {"cpu": 0.001, "cuda": 0.005}
# Edges of attention tiles; the largest product or tile, so that a round of all calls fits the time.
TILES = {"cpu": (64, 256, 512, 1024, 2048), "cuda": (256, 1024, 2048, 4096, 8192)}
MOST_ROWS = {"cpu": 512, "cuda": 4096}
MOST_FLOPS = {"cpu": 7e8, "cuda": 4e13}
COPIED_BYTES = {"cpu": 32_000_000, "cuda": 512_000_000}
# Of the samples: others on the machine only ever make a call longer. But a GPU's clock, or memory that is shared,
# may be faster for a moment.
LOW, LEAST = 0.1, 0.0


@dataclass(frozen=True)
class Call:
    """One thing that is timed.

    Attributes:
        work: ``gemm``, ``attention_forward``, ``attention_backward``, ``copy``, ``to_host`` or ``from_host``.
        shape: of it, in words.
        amount: FLOPs, bytes read and written by ``copy``, or bytes that go to the host or come from it.
        per_token: of ``gemm``: how often the model does it for each row, so that rates can be weighted.
        edge: of attention's tile, in tokens.
        causal: whether that is a causal square.
        seconds: of one call, on an unshared device; 0 before it is measured.
        samples: that were taken.
    """

    work: str
    shape: str
    amount: float
    per_token: float = 0.0
    edge: int = 0
    causal: bool = False
    seconds: float = 0.0
    samples: int = 0


@dataclass(frozen=True)
class Usage:
    """A CPU rank's part of its cores while it measured. Seconds.

    Attributes:
        cores: it may run on.
        threads: that compute.
        busy: CPU time of this rank, of all its threads.
        wall: time that passed.
        cores_busy: CPU time of anybody on its cores; None where the system does not say.
        quota: share of a core it is allowed; None: all it gets.
    """

    cores: tuple[int, ...]
    threads: int
    busy: float
    wall: float
    cores_busy: float | None
    quota: float | None


@dataclass(frozen=True)
class Bench:
    """Everything one rank will time, warm.

    Attributes:
        kernel: name of the attention kernel that runs.
        calls: what is timed, and the function that does it.
        repeats: of each call in a sample.
        memory_gb, free_gb: of the device, before anything was put there.
    """

    device: torch.device
    kernel: str
    calls: list[tuple[Call, Callable[[], Any]]]
    repeats: list[int]
    memory_gb: float
    free_gb: float


def set_up(shape: ModelShape, device: torch.device, dtype: str, kernel: str, sharers: int) -> Bench:
    """Make the matrices and call everything once.

    Args:
        dtype: of the job.
        kernel: attention kernel, as `kernels.load` takes it.
        sharers: ranks that share this device's memory, this one included.

    Raises:
        ValueError: the kernel cannot run here, or not with these heads; a matrix does not fit into memory.
    """
    loaded = kernels.load(kernel, dtype)
    if (problem := loaded.refuses(shape.head_dim)) is not None:
        raise ValueError(f"kernel {loaded.name} cannot run model {shape.name!r}: {problem}")
    memory_gb, free_gb = memory(device)
    _check_fits(shape, device, dtype, free_gb / sharers)
    calls = [*_products(shape, device, dtype), *_attention(shape, device, dtype, loaded), _copy(device)]
    if device.type == "cuda":  # a CPU's memory is its host's
        calls += _host_copies(device)
    clock = _clock(device)
    repeats = [_repeats(run, clock, LEAST_SECONDS[device.type]) for _, run in calls]
    return Bench(device, loaded.name, calls, repeats, memory_gb, free_gb)


@dataclass(frozen=True)
class Round:
    """What one rank saw in a part of the time.

    Attributes:
        samples: seconds of each call of a `Bench`.
        usage: None on a GPU.
    """

    samples: list[list[float]]
    usage: Usage | None


def time_calls(bench: Bench, seconds: float, quota: float | None = None) -> Round:
    """Time all calls round and round for about `seconds`. To be called on all ranks at one time.

    Args:
        quota: share of a core a CPU rank is allowed.
    """
    clock = _clock(bench.device)
    samples: list[list[float]] = [[] for _ in bench.calls]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    start, busy, others = time.perf_counter(), time.process_time(), _busy_seconds(cores)

    def late() -> bool:
        return min(map(len, samples)) >= LEAST_SAMPLES and time.perf_counter() - start > seconds

    for i, (_, run) in itertools.cycle(enumerate(bench.calls)):
        if late():
            break
        before = clock()
        for _ in range(bench.repeats[i]):
            run()
        samples[i].append((clock() - before) / bench.repeats[i])
    usage = None
    if bench.device.type == "cpu":
        others_now = _busy_seconds(cores)
        usage = Usage(
            cores=cores,
            threads=torch.get_num_threads(),
            busy=time.process_time() - busy,
            wall=time.perf_counter() - start,
            cores_busy=None if others_now is None or others is None else others_now - others,
            quota=quota,
        )
    return Round(samples, usage)


def measured(bench: Bench, rounds: Sequence[Round]) -> dict[str, Any]:
    """What the rounds say together.

    Returns:
        ``kernel``; ``calls``: of `Call`; ``usage``: of `Usage`, None on a GPU; ``memory_gb`` and ``free_gb``;
        ``host_memory_gb``, None on a CPU.
    """
    calls = []
    for i, (call, _) in enumerate(bench.calls):
        samples = [seconds for one in rounds for seconds in one.samples[i]]
        alone = bench.device.type == "cpu" and call.work != "copy"
        seconds = quantile(samples, LEAST if alone else LOW)
        calls.append(asdict(replace(call, seconds=seconds, samples=len(samples))))
    usages = [one.usage for one in rounds if one.usage is not None]
    return {
        "kernel": bench.kernel,
        "calls": calls,
        "usage": asdict(functools.reduce(_joined, usages)) if usages else None,
        "memory_gb": bench.memory_gb,
        "free_gb": bench.free_gb,
        "host_memory_gb": memory(torch.device("cpu"))[0] if bench.device.type == "cuda" else None,
    }


def _joined(first: Usage, second: Usage) -> Usage:
    busy = None if first.cores_busy is None or second.cores_busy is None else first.cores_busy + second.cores_busy
    return replace(first, busy=first.busy + second.busy, wall=first.wall + second.wall, cores_busy=busy)


def quantile(samples: Sequence[float], part: float) -> float:
    return sorted(samples)[int(part * (len(samples) - 1))]


def memory(device: torch.device) -> tuple[float, float]:
    """Memory of a GPU, or of this machine; all of it and what is free, in GB."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total / 1e9, free / 1e9
    page = os.sysconf("SC_PAGE_SIZE") / 1e9
    total_gb, free_gb = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.startswith("MemAvailable:"):
            free_gb = int(line.split()[1]) * 1024 / 1e9
    return total_gb, free_gb


def _matrices(shape: ModelShape) -> list[tuple[str, int, int, float]]:
    """Name, columns in and out, and how often a token passes it, of the model's matrices; those alike together."""
    layers, inner = shape.layers, shape.heads * shape.head_dim
    return [
        ("query", shape.hidden, inner, layers),
        ("key and value", shape.hidden, shape.kv_heads * shape.head_dim, 2 * layers),
        ("attention output", inner, shape.hidden, layers),
        ("MLP up and gate", shape.hidden, shape.intermediate, 2 * layers),
        ("MLP down", shape.intermediate, shape.hidden, layers),
        ("output head", shape.hidden, shape.vocab, 1),
    ]


def _rows(kind: str, name: str, across: int, out: int) -> int:
    most = min(HEAD_ROWS, MOST_ROWS[kind]) if name == "output head" else MOST_ROWS[kind]
    return max(16, min(most, int(MOST_FLOPS[kind] / (2 * PRODUCTS * across * out))))


def _check_fits(shape: ModelShape, device: torch.device, dtype: str, free_gb: float) -> None:
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    total_gb = 0.0
    for name, across, out, _ in _matrices(shape):
        rows = _rows(device.type, name, across, out)
        # The weight and its gradient, rows in and out and their gradients.
        total_gb += size * 2 * (across * out + rows * (across + out)) / 1e9
        if total_gb > USABLE * free_gb:
            raise ValueError(
                f"model {shape.name!r}: measuring its {name} matrix of {across} x {out} in {dtype}, with those before "
                f"it, takes {total_gb:.2f} GB, {free_gb:.2f} GB are free for this rank; profile a smaller model"
            )


def _products(shape: ModelShape, device: torch.device, dtype: str) -> list[tuple[Call, Callable[[], Any]]]:
    """Forward and backward products of the model's matrices."""
    found: list[tuple[Call, Callable[[], Any]]] = []
    for name, across, out, times in _matrices(shape):
        rows = _rows(device.type, name, across, out)
        make = {"device": device, "dtype": getattr(torch, dtype)}
        x, weight = torch.randn(rows, across, **make), torch.randn(out, across, **make)
        dy = torch.randn(rows, out, **make)

        def run(x: torch.Tensor = x, weight: torch.Tensor = weight, dy: torch.Tensor = dy) -> None:
            torch.nn.functional.linear(x, weight)
            dy @ weight
            dy.T @ x

        amount = 2.0 * PRODUCTS * rows * across * out
        found.append((Call("gemm", f"{name}: {rows} x {across} x {out}", amount, times / rows), run))
    return found


def _attention(
    shape: ModelShape, device: torch.device, dtype: str, kernel: kernels.Kernel
) -> list[tuple[Call, Callable[[], Any]]]:
    """Squares, causal and full, of several edges with the query heads of one KV head and of several."""
    ratio, scale = shape.heads // shape.kv_heads, shape.head_dim**-0.5
    counts = dict.fromkeys((ratio, ratio * max(1, shape.kv_heads // 2), shape.heads))
    found: list[tuple[Call, Callable[[], Any]]] = []
    for edge, heads, mask in itertools.product(TILES[device.type], counts, (kernels.FULL, kernels.CAUSAL)):
        pairs = edge * edge if mask == kernels.FULL else edge * (edge + 1) // 2
        flops = heads * attention_flops(shape, pairs)
        if flops > MOST_FLOPS[device.type] and heads > ratio:
            continue
        make = {"device": device, "dtype": getattr(torch, dtype)}
        q, dout = (torch.randn(1, heads, edge, shape.head_dim, **make) for _ in range(2))
        k, v = (torch.randn(1, heads // ratio, edge, shape.head_dim, **make) for _ in range(2))
        out, lse = kernel.forward(q, k, v, mask, scale)

        def forward(q=q, k=k, v=v, mask=mask) -> None:
            kernel.forward(q, k, v, mask, scale)

        def backward(dout=dout, q=q, k=k, v=v, out=out, lse=lse, mask=mask) -> None:
            kernel.backward(dout, q, k, v, out, lse, mask, scale)

        words = f"{mask} square of {edge}, {heads} heads of {shape.head_dim}"
        for work, times, run in (("forward", 1.0, forward), ("backward", BACKWARD_ATTENTION, backward)):
            call = Call(f"attention_{work}", words, times * flops, edge=edge, causal=mask == kernels.CAUSAL)
            found.append((call, run))
    return found


def _copy(device: torch.device) -> tuple[Call, Callable[[], Any]]:
    source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return Call("copy", f"{source.numel():,} floats", 2.0 * source.nbytes), lambda: target.copy_(source)


def _host_copies(device: torch.device) -> list[tuple[Call, Callable[[], Any]]]:
    """To pinned host memory and from it, as the inputs of layers go with offload."""
    here = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    there = torch.ones(here.shape, dtype=torch.uint8, pin_memory=True)
    found: list[tuple[Call, Callable[[], Any]]] = []
    for work, source, target in (("to_host", here, there), ("from_host", there, here)):

        def run(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source, non_blocking=True)

        found.append((Call(work, f"{len(source):,} bytes", float(len(source))), run))
    return found


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return lambda: time.process_time() / threads

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def _repeats(run: Callable[[], Any], clock: Callable[[], float], least_seconds: float) -> int:
    run()  # warm
    before = clock()
    run()
    return max(1, min(1000, int(least_seconds / max(clock() - before, 1e-7))))


def _busy_seconds(cores: Sequence[int]) -> float | None:
    """CPU time anybody has had on these cores since the machine started, stolen time included (`proc(5)`)."""
    path = Path("/proc/stat")
    if not path.is_file():
        return None
    ticks = {}
    for line in path.read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _idle, _iowait, *rest = map(int, fields)
            ticks[int(name[3:])] = user + nice + system + sum(rest[:3])
    if any(core not in ticks for core in cores):
        return None
    return sum(ticks[core] for core in cores) / os.sysconf("SC_CLK_TCK")

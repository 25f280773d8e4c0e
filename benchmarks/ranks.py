"""Ranks pinned to cores, one thread each, and passes timed between barriers: what the benchmarks share."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hexiseq.plan import Plan, RankDevice, fits_slots, make_replica


@dataclass(frozen=True)
class Method:
    """One way to run attention on all ranks.

    Attributes:
        positions: of this rank's tokens in the whole sequence, in its order.
        forward: local ``q [B, L, H, D], k, v [B, L, K, D]`` -> ``out [B, L, H, D]``, differentiable.
    """

    name: str
    positions: Tensor
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]


def cores(count: int) -> list[int]:
    """The first `count` cores this process may use. Raises ValueError if there are fewer."""
    available = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(available):
        raise ValueError(f"--cores {count}: this process may use {len(available)} cores")
    return available[:count]


def core_of(rank: int, cores: Sequence[int]) -> int:
    """A core for each rank, in order; those beyond the cores share the last one."""
    return cores[min(rank, len(cores) - 1)]


def pin(core: int) -> None:
    """Bind all threads of this process to one core, those of gloo included; torch computes with one thread."""
    torch.set_num_threads(1)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, tuple[float, float, float]]:
    """What the function returns; seconds: wall from a barrier on, the process's CPU up to the next, kernels' CPU."""
    dist.barrier()
    _in_kernels.clear()
    cpu, wall = time.process_time(), time.perf_counter()
    result = function(*args)
    wall = time.perf_counter() - wall
    dist.barrier()  # what this rank still has to send is its work too
    return result, (wall, time.process_time() - cpu, sum(_in_kernels))


_in_kernels: list[float] = []  # CPU seconds of each kernel call since `timed` began


@contextlib.contextmanager
def kernels_timed(*modules: types.ModuleType) -> Iterator[None]:
    """While open, the CPU attention ops these modules hold as ``_forward`` and ``_backward`` are timed."""

    def clocked(op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            result = op(*args, **options)
            _in_kernels.append(time.thread_time() - start)
            return result

        return call

    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in ("_forward", "_backward"):
                stack.enter_context(mock.patch.object(module, name, clocked(getattr(module, name))))
        yield


def tensors(seq_len: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output's gradient of one whole sequence ``[1, S, heads, D]``, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(1, seq_len, n, dim, generator=generator).to(dtype) for n in counts]


def slot_for(seq_len: int, slots: int) -> int:
    """The slot that cuts the sequence into so many. Raises ValueError if none does."""
    slot = 2 * -(-seq_len // (2 * slots))
    if not fits_slots(seq_len, slot, slots):
        raise ValueError(f"{seq_len} tokens do not make {slots} slots: choose another --seq or --slot")
    return slot


def ring_plan(slots: Sequence[int], *, slot: int, seq_len: int, heads: int, kv_heads: int, **options: Any) -> Plan:
    """Groups of one rank with so many slots each; all heads at every rank."""
    short = sum(slots) * slot - seq_len
    counts = [(n, [(rank, n * slot - (short if rank == 0 else 0), heads)]) for rank, n in enumerate(slots)]
    return _plan(counts, slot=slot, seq_len=seq_len, heads=heads, kv_heads=kv_heads, policy="ring", **options)


def ulysses_plan(ranks: int, *, slot: int, seq_len: int, heads: int, kv_heads: int, **options: Any) -> Plan:
    """One group of all ranks, tokens and heads even."""
    members = [(r, seq_len // ranks + (r < seq_len % ranks), heads // ranks) for r in range(ranks)]
    counts = [(-(-seq_len // slot), members)]
    return _plan(counts, slot=slot, seq_len=seq_len, heads=heads, kv_heads=kv_heads, policy="ulysses", **options)


def _plan(
    counts: list, *, policy: str, slot: int, seq_len: int, heads: int, kv_heads: int, fusion: int, exchange: str,
    dtype: str,
) -> Plan:  # fmt: skip
    ranks = sum(len(members) for _, members in counts)
    return Plan(
        policy=policy, seq_len=seq_len, num_heads=heads, num_kv_heads=kv_heads, slot=slot, fusion=fusion,
        exchange=exchange, recompute="none", dtype=dtype, replicas=(make_replica(seq_len, slot, counts),),
        devices=(RankDevice("cpu", "here", "cpu"),) * ranks,
    )  # fmt: skip

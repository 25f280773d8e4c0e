"""Attention over a plan on real GPUs, one process each, over NCCL: ``pytest -m gpu tests/gpu``. Needs two GPUs."""

from __future__ import annotations

import dataclasses
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.profiler import ProfilerActivity, profile

from hexiseq.attention import attend, close_all, kernels
from hexiseq.attention.kernels import dense
from hexiseq.plan import Plan, RankDevice, make_replica

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HEADS, KV_HEADS, DIM = 8, 2, 64


def plan_of(seq_len: int, exchange: str, uneven: bool) -> Plan:
    """Two groups of one with 8 slots each, or with 10 and 6; bfloat16, the kernel chosen on the spot."""
    slot = seq_len // 16
    slots = (10, 6) if uneven else (8, 8)
    replica = make_replica(seq_len, slot, [(n, [(rank, n * slot, HEADS)]) for rank, n in enumerate(slots)])
    return Plan(
        policy="manual", seq_len=seq_len, num_heads=HEADS, num_kv_heads=KV_HEADS, slot=slot, fusion=2,
        exchange=exchange, recompute="none", dtype="bfloat16", replicas=(replica,),
        devices=(RankDevice("gpu", "here", "auto"),) * 2,
    )  # fmt: skip


def whole(seq_len: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    counts = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, seq_len, n, DIM, generator=generator).bfloat16() for n in counts]


def run(function, *args) -> list:
    """``function(rank, *args)`` on two GPUs; what they return, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    torch.multiprocessing.spawn(_start, (port, answers, function, args), nprocs=2)
    return [value for _, value in sorted((answers.get() for _ in range(2)), key=lambda answer: answer[0])]


def _start(rank: int, port: int, answers, function, args) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    answers.put((rank, function(rank, *args)))
    close_all()
    dist.destroy_process_group()


def shard(plan: Plan, rank: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    positions = torch.from_numpy(plan.shard(rank).positions())
    return [t[:, positions].cuda() for t in tensors]


def results(rank: int, plan: Plan, times: int) -> list[list[torch.Tensor]]:
    q, k, v, dout = shard(plan, rank, whole(plan.seq_len))
    found = []
    for _ in range(times):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attend(*inputs, plan=plan)
        found.append([t.cpu() for t in (out.detach(), *torch.autograd.grad(out, inputs, dout))])
    return found


@pytest.mark.parametrize("exchange", ["ring", "allgather"])
@pytest.mark.parametrize("uneven", [False, True])
def test_equals_one_device(exchange, uneven):
    plan = plan_of(1024, exchange, uneven)
    q, k, v, dout = (t.double().transpose(1, 2) for t in whole(plan.seq_len))
    out, lse = dense.forward(q, k, v, kernels.CAUSAL, DIM**-0.5)
    expected = [out, *dense.backward(dout, q, k, v, out, lse, kernels.CAUSAL, DIM**-0.5)]
    single = [t.transpose(1, 2) for t in one_device(plan.seq_len)]
    for rank, (found,) in enumerate(run(results, plan, 1)):
        positions = torch.from_numpy(plan.shard(rank).positions())
        for ours, alone, reference in zip(found, single, expected, strict=True):
            reference = reference.transpose(1, 2)
            top = reference.abs().max()
            error = (ours.double() - reference[:, positions]).abs().max() / top
            kernel_error = (alone.double() - reference).abs().max() / top
            assert error <= 3 * kernel_error


def one_device(seq_len: int) -> list[torch.Tensor]:
    kernel = kernels.load("auto", "bfloat16")
    q, k, v, dout = (t.cuda().transpose(1, 2) for t in whole(seq_len))
    out, lse = kernel.forward(q, k, v, kernels.CAUSAL, DIM**-0.5)
    return [t.cpu() for t in (out, *kernel.backward(dout, q, k, v, out, lse, kernels.CAUSAL, DIM**-0.5))]


def forward_repeats(rank: int, plan: Plan) -> bool:
    first, second = results(rank, plan, 2)
    return torch.equal(first[0], second[0])


def test_forward_repeats_bit_by_bit():
    assert all(run(forward_repeats, plan_of(4096, "ring", True)))


def overlap(rank: int, plan: Plan) -> float:
    """Share of the time of NCCL kernels during which an attention kernel runs too, over forward and backward."""
    results(rank, plan, 2)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        results(rank, plan, 1)
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            name = event.name().lower()
            if "nccl" in name and "allreduce" not in name:
                spans[True].append((event.start_ns(), event.end_ns()))
            elif "flash" in name or "fmha" in name or "attention" in name:
                spans[False].append((event.start_ns(), event.end_ns()))
    shared = sum(max(0, min(b, d) - max(a, c)) for a, b in spans[True] for c, d in spans[False])
    return shared / sum(b - a for a, b in spans[True])


def test_transfers_run_while_kernels_do():
    """Long enough that kernels dominate: most of the ring's transfers must lie beside them, not between them."""
    plan = dataclasses.replace(plan_of(65536, "ring", False), fusion=1)
    assert min(run(overlap, plan)) > 0.5

"""Measure the devices at hand and describe them as a cluster: what ``python train.py`` plans for when none is named.

Rates are best-of-several of a matrix product and of attention forward and backward, at sizes where launch costs do
not matter. ``python -m hexiseq.profile [RANKS]`` prints the cluster as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROUNDS = 5
MOST_CPU_RANKS = 4


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Shortest of `ROUNDS` timings of `work`, after one to warm up."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(ROUNDS))


def measure(device: torch.device, dtype: torch.dtype, size: int) -> dict[str, float]:
    """Achieved rates of one device.

    Args:
        size: edge of the square matrix product and tokens of the attention call.

    Returns:
        ``gemm_tflops``, ``attention_forward_tflops``, ``attention_backward_tflops`` (causal, 8 heads of 64),
        ``hbm_gb_per_s`` (read plus write of a copy) and ``launch_us`` (a kernel on one element).
    """
    a = torch.randn(size, size, device=device, dtype=dtype)
    gemm = 2 * size**3 / seconds(lambda: a @ a, device)

    heads, dim = 8, 64
    q, k, v = (torch.randn(1, heads, size, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    flops = 4 * dim * heads * size * size / 2
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        with torch.no_grad():
            forward = seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), device)
        both = seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward(), device)

    source = torch.empty(64_000_000 if device.type == "cuda" else 8_000_000, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source), device)
    one = torch.ones(1, device=device)
    return {
        "gemm_tflops": gemm / 1e12,
        "attention_forward_tflops": flops / forward / 1e12,
        "attention_backward_tflops": 2.5 * flops / max(both - forward, forward) / 1e12,
        "hbm_gb_per_s": copy / 1e9,
        "launch_us": seconds(lambda: one.add_(1), device) * 1e6,
    }


def local_cluster(ranks: int | None = None) -> dict[str, Any]:
    """The machine as a one-node cluster, in the form `Cluster.from_config` takes: its GPUs, else its CPU cores."""
    return _cuda_cluster(ranks) if torch.cuda.is_available() else _cpu_cluster(ranks)


def _cuda_cluster(ranks: int | None) -> dict[str, Any]:
    count = torch.cuda.device_count()
    if ranks is not None and ranks > count:
        raise ValueError(f"{ranks} ranks were started, this machine has {count} GPUs; start at most one a GPU")
    gpus, devices = {}, []
    for index in range(ranks or count):
        properties = torch.cuda.get_device_properties(index)
        # GPUs of one name are measured each: a sick one becomes a type of its own speed.
        kind = f"gpu{index}"
        has_bf16 = properties.major >= 8
        rates = measure(torch.device("cuda", index), torch.bfloat16 if has_bf16 else torch.float16, 8192)
        gpus[kind] = {
            "type": kind,
            "vendor": "amd" if torch.version.hip else "nvidia",
            "names": [properties.name],
            "peak_tflops": rates["gemm_tflops"],
            **rates,
            "memory_gb": properties.total_memory / 1e9,
            "overhead_gb": 2.0,
            "dtypes": [*(["bfloat16"] if has_bf16 else []), "float16", "float32"],
            "kernel": "torch_flash" if has_bf16 else "torch_efficient",
            "source": f"measured on this {properties.name}",
        }
        devices.append({"type": kind})
    return _one_node(gpus, devices, _copy_gb_per_s() if len(devices) > 1 else 100.0)


def _copy_gb_per_s() -> float:
    """Bandwidth of a device-to-device copy between the first two GPUs."""
    source = torch.empty(64_000_000, device="cuda:0")
    target = torch.empty(64_000_000, device="cuda:1")
    return source.numel() * source.element_size() / seconds(lambda: target.copy_(source), source.device) / 1e9


def _cpu_cluster(ranks: int | None) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    count = ranks or min(len(cores), MOST_CPU_RANKS)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {cores[0]})
    rates = measure(torch.device("cpu"), torch.float32, 1024)
    share = min(1.0, len(cores) / count)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    entry = {
        "type": "cpu",
        "vendor": "cpu",
        "peak_tflops": rates["gemm_tflops"] * share,
        **{name: value / share if name == "launch_us" else value * share for name, value in rates.items()},
        "memory_gb": memory / count,
        "overhead_gb": 0.4,
        "dtypes": ["float32", "float64", "bfloat16", "float16"],
        "kernel": "cpu",
        "source": "measured on this machine",
    }
    devices = [{"type": "cpu", "cores": [cores[i % len(cores)]]} for i in range(count)]
    # Loopback moves a copy in and a copy out of the kernel: about half the memory bandwidth each way, shared.
    return _one_node({"cpu": entry}, devices, rates["hbm_gb_per_s"] / 4)


def _one_node(gpus: dict[str, Any], devices: list[dict[str, Any]], intra_gb_per_s: float) -> dict[str, Any]:
    node = {
        "name": "local",
        "devices": devices,
        "intra_gb_per_s": intra_gb_per_s,
        "nics": 1,
        "nic_gb_per_s": intra_gb_per_s,
    }
    return {"name": "local", "gpus": gpus, "nodes": [node]}


if __name__ == "__main__":
    json.dump(local_cluster(int(sys.argv[1]) if len(sys.argv) > 1 else None), sys.stdout)

"""Other systems' context-parallel attention on CPU ranks: even splits, causal, whole sequences.

Each peer is run as published, on the same CPU kernel as ours (`hexiseq.standins` where it calls flash-attn), with two
exceptions, both without effect on its speed: what a mistake makes silently wrong is mended, and adapters to other
libraries that this installation's versions break are left out. Every peer's result is checked before it is timed.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from benchmarks.ranks import Method

NAMES = ("torch-allgather", "torch-alltoall", "zigzag-ring", "ulysses")
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def why_not(name: str, *, ranks: int, seq_len: int, heads: int, kv_heads: int) -> str:
    """Why a peer cannot split this evenly over `ranks`; empty if it can."""
    if name == "ulysses":
        for what, count in (("tokens", seq_len), ("query heads", heads), ("KV heads", kv_heads)):
            if count % ranks:
                return f"{count} {what} do not divide over {ranks} ranks"
    elif seq_len % (2 * ranks):
        return f"{seq_len} tokens do not divide into {2 * ranks} chunks"
    return ""


def not_installed(name: str) -> str:
    """Which package a peer lacks; empty if none."""
    package = {"ulysses": "yunchang", "zigzag-ring": "ring_flash_attn"}.get(name)
    if package is None or importlib.util.find_spec(package) is not None:
        return ""
    return f"{package} is not installed: pip install -e '.[bench]'"


def load(name: str, rank: int, ranks: int, seq_len: int) -> Method:
    """The peer as a method of all ranks of the job. Called inside `hexiseq.standins.install`."""
    if name == "ulysses":
        module = importlib.import_module("yunchang.ulysses.attn_layer")
        attention = module.UlyssesAttention(dist.group.WORLD)
        positions = torch.arange(seq_len).chunk(ranks)[rank]
        return Method(name, positions, lambda q, k, v: attention(q, k, v, causal=True))
    if name == "zigzag-ring":
        function = _zigzag().zigzag_ring_flash_attn_func
        chunks = torch.arange(seq_len).chunk(2 * ranks)
        positions = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
        return Method(name, positions, lambda q, k, v: function(q, k, v, causal=True))
    rotation = {"torch-allgather": "ALL_GATHER", "torch-alltoall": "ALL_TO_ALL"}[name]
    indices = _HeadTailLoadBalancer(seq_len, ranks, "cpu")._generate_indices()[0].long()
    return Method(name, indices.chunk(ranks)[rank], _torch_ring(torch_cp._RotateMethod[rotation]))


def _torch_ring(rotation: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's context parallel. `context_parallel` itself refuses CPU tensors; what it calls does not."""

    group = cast(dist.ProcessGroup, dist.group.WORLD)

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            torch_cp._cp_options.rotate_method = rotation
            out, lse = torch_cp._templated_ring_attention(group, 2, _forward, q, k, v, is_causal=True, dropout_p=0.0)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            torch_cp._cp_options.rotate_method = rotation
            q, k, v, out, lse = ctx.saved_tensors
            return torch_cp._templated_ring_attention_backward(
                group, 2, _backward, dout, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
            )  # fmt: skip

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Ring.apply(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    return attention


def _zigzag() -> types.ModuleType:
    """``ring_flash_attn.zigzag_ring_flash_attn``, its gradients made right.

    Backward keeps its sums in ``buffer.to(torch.float32)``. Of a float32 buffer that is no copy, and the next step's
    kernel writes over the sums: float32 gradients are silently wrong. The mended source says ``copy=True``, which other
    dtypes do anyway.
    """
    # Its adapter to Hugging Face asks transformers for names that version 5 no longer has.
    adapters: Any = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    module: Any = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")
    source = inspect.getsource(module.zigzag_ring_flash_attn_backward)
    assert source.count("_buffer.to(torch.float32)") == 3, "another version than the one this mends"
    exec(source.replace("_buffer.to(torch.float32)", "_buffer.to(torch.float32, copy=True)"), module.__dict__)
    return module

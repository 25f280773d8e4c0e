"""PyTorch's flash attention for CPUs: float64, float32, bfloat16 and float16, native GQA, any head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from hexiseq.attention.kernels import CAUSAL, anticausal_reversed

DEVICE = "cpu"
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def unusable(dtype: str) -> str | None:
    return None


def refuses(head_dim: int) -> str | None:
    return None


@anticausal_reversed
def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, 0.0, mask == CAUSAL, scale=scale)


@anticausal_reversed
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dout, q, k, v, out, lse, 0.0, mask == CAUSAL, scale=scale)

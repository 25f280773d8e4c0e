"""PyTorch's flash attention for CPUs: float64, float32, bfloat16 and float16, native GQA."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cpu"
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def unusable() -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, 0.0, causal, scale=scale)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dout, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale)

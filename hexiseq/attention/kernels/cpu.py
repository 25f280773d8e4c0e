"""PyTorch's flash attention for CPUs: float64, float32, bfloat16 and float16, native GQA."""

from __future__ import annotations

import torch
from torch import Tensor

from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, reverse

DEVICE = "cpu"
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def unusable() -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    if mask == ANTICAUSAL:
        return reverse(*forward(*reverse(q, k, v), CAUSAL, scale))
    return _forward(q, k, v, 0.0, mask == CAUSAL, scale=scale)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if mask == ANTICAUSAL:
        return reverse(*backward(*reverse(dout, q, k, v, out, lse), CAUSAL, scale))
    return _backward(dout, q, k, v, out, lse.contiguous(), 0.0, mask == CAUSAL, scale=scale)

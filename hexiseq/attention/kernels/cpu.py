"""PyTorch's flash attention for CPUs: float64, float32, bfloat16 and float16, native GQA, any head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from hexiseq.attention.kernels import CAUSAL, anticausal_reversed

DEVICE = "cpu"
_PACKED_ROWS = 2048
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def unusable(dtype: str) -> str | None:
    return None


def refuses(head_dim: int) -> str | None:
    return None


@anticausal_reversed
def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _packed(q, k, v)
    return _forward(q, k, v, 0.0, mask == CAUSAL, scale=scale)


@anticausal_reversed
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, out, k, v = _packed(dout, q, out, k, v)
    return _backward(dout, q, k, v, out, lse, 0.0, mask == CAUSAL, scale=scale)


def _packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each head's rows side by side, if there are many rows of queries (first) and keys (last).

    Rows of one head that lie a power of two apart meet in the same few cache lines: the operator reads them again and
    again, up to a tenth slower than it could.
    """
    if min(tensors[0].shape[2], tensors[-1].shape[2]) < _PACKED_ROWS:
        return tensors
    return tuple(t.contiguous() for t in tensors)

"""PyTorch's own flash attention on CUDA: FA2, or what ``torch.nn.attention.activate_flash_attention_impl`` chose."""

from __future__ import annotations

import torch
from torch import Tensor

from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, reverse

DEVICE = "cuda"
_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def unusable() -> str | None:
    if not torch.cuda.is_available():
        return "it needs a CUDA device and there is none"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"flash attention needs compute capability 8.0, {torch.cuda.get_device_name()} is older"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    if mask == ANTICAUSAL:
        return reverse(*forward(*reverse(q, k, v), CAUSAL, scale))
    out, lse, *_ = _forward(q, k, v, 0.0, mask == CAUSAL, False, scale=scale)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if mask == ANTICAUSAL:
        return reverse(*backward(*reverse(dout, q, k, v, out, lse), CAUSAL, scale))
    # Undefined sequence offsets select the dense path; without dropout the random state is not read.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    return _backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        mask == CAUSAL,
        seed,
        offset,
        scale=scale,
    )

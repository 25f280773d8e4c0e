"""PyTorch's memory-efficient attention on CUDA: it runs on V100. It knows no GQA, so KV heads are repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from hexiseq.attention.kernels import CAUSAL, anticausal_reversed, cuda_unusable, odd_head_dim

DEVICE = "cuda"
_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
_LSE_ALIGNMENT = 32


def unusable(dtype: str) -> str | None:
    return cuda_unusable(dtype, ("float32", "float16", "bfloat16"), least=(5, 0))


def refuses(head_dim: int) -> str | None:
    return odd_head_dim(head_dim, most=None)


@anticausal_reversed
def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    ratio = q.shape[1] // k.shape[1]
    out, lse, *_ = _forward(q, _repeat(k, ratio), _repeat(v, ratio), None, True, 0.0, mask == CAUSAL, scale=scale)
    return out, lse[:, :, : q.shape[2]]


@anticausal_reversed
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    ratio = q.shape[1] // k.shape[1]
    # The kernel reads lse in whole tiles; +inf makes the rows past the end contribute nothing.
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _LSE_ALIGNMENT), value=torch.inf).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _backward(
        dout, q, _repeat(k, ratio), _repeat(v, ratio), None, out, padded, seed, seed, 0.0,
        [True, True, True, False], mask == CAUSAL, scale=scale,
    )  # fmt: skip
    return dq, _fold(dk, ratio), _fold(dv, ratio)


def _repeat(kv: Tensor, ratio: int) -> Tensor:
    return kv if ratio == 1 else kv.repeat_interleave(ratio, dim=1)


def _fold(grad: Tensor, ratio: int) -> Tensor:
    return grad if ratio == 1 else grad.unflatten(1, (-1, ratio)).sum(2, dtype=torch.float32)

"""PyTorch's own flash attention on CUDA: FA2, or the FA3 or FA4 that a process has put behind the same operators.

It does so by ``torch.nn.attention.activate_flash_attention_impl``, before the kernel is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexiseq.attention.kernels import CAUSAL, anticausal_reversed, cuda_unusable, odd_head_dim

DEVICE = "cuda"
_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
# Major compute capabilities that PyTorch's bindings accept.
_MAJORS = {"FA3": (9,), "FA4": (9, 10)}


def unusable(dtype: str) -> str | None:
    problem = cuda_unusable(dtype, ("float16", "bfloat16"), least=(8, 0))
    activated = torch.nn.attention.current_flash_attention_impl()
    if problem is not None or activated not in _MAJORS:
        return problem
    if torch.cuda.get_device_capability()[0] not in _MAJORS[activated]:
        majors = " or ".join(f"{major}.x" for major in _MAJORS[activated])
        return f"{activated}, which was activated in PyTorch, needs compute capability {majors}"
    return None


def implementation() -> str:
    """What runs behind the operators now."""
    return torch.nn.attention.current_flash_attention_impl() or "FA2"


def refuses(head_dim: int) -> str | None:
    return odd_head_dim(head_dim, most=256)


@anticausal_reversed
def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _forward(q, k, v, 0.0, mask == CAUSAL, False, scale=scale)
    return out, lse


@anticausal_reversed
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Undefined sequence offsets select the dense path; without dropout the random state is not read.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    return _backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, mask == CAUSAL, seed, offset,
        scale=scale,
    )  # fmt: skip

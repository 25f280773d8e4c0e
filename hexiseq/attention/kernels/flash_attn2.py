"""The ``flash-attn`` distribution, version 2.7 or later of the 2 series (``pip install hexiseq[flash]``)."""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, cuda_unusable, odd_head_dim, parameters

DEVICE = "cuda"
_FORWARD = ("q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right",
            "softcap", "alibi_slopes", "return_softmax")  # fmt: skip
_BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "dropout_p", "softmax_scale", "causal",
             "window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic")  # fmt: skip


def unusable(dtype: str) -> str | None:
    # By distribution name: flash-attn-4 alone also provides a `flash_attn` module, with other functions.
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return "the distribution flash-attn is not installed"
    if (problem := cuda_unusable(dtype, ("float16", "bfloat16"), least=(8, 0))) is not None:
        return problem
    try:
        from flash_attn import flash_attn_interface as interface
    except ImportError as error:
        return f"flash-attn {version} does not import: {error}"
    for function, expected in (("_flash_attn_forward", _FORWARD), ("_flash_attn_backward", _BACKWARD)):
        found = parameters(getattr(interface, function, None))
        if found[: len(expected)] != expected:
            return f"{function} of flash-attn {version} takes ({', '.join(found)}), not ({', '.join(expected)})"
    return None


def refuses(head_dim: int) -> str | None:
    return odd_head_dim(head_dim, most=256)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, mask == CAUSAL, *_window(mask), 0.0, None, False)
    return out.transpose(1, 2), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    _flash_attn_backward(
        dout, q, k, v, out, lse.contiguous(), dq, dk, dv, 0.0, scale, mask == CAUSAL, *_window(mask), 0.0, None,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _window(mask: str) -> tuple[int, int]:
    """How many keys left and right of its own a query sees, -1 for all."""
    return (0, -1) if mask == ANTICAUSAL else (-1, -1)

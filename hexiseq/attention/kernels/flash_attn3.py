"""The ``flash-attn-3`` distribution: flash attention for Hopper GPUs, built from the ``hopper`` folder of flash-attn.

Its private functions have had two interfaces: up to 3.0.0b1 they take ``window_size=(left, right)``, later
``window_size_left, window_size_right``. Everything before that parameter has kept its place, and both are called.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, cuda_unusable, odd_head_dim, parameters

DEVICE = "cuda"
# From k_new to v_descale: caches, ragged batches, rotary embedding, fp8 scales.
_UNUSED_FORWARD = ("k_new", "v_new", "qv", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
                   "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos",
                   "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")  # fmt: skip
_UNUSED_BACKWARD = ("cu_seqlens_q", "cu_seqlens_k", "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k")
_FORWARD = ("q", "k", "v", *_UNUSED_FORWARD, "softmax_scale", "causal")
_BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", *_UNUSED_BACKWARD, "dq", "dk", "dv", "softmax_scale",
             "causal")  # fmt: skip
_RENAMED = {"out_": "out", "is_causal": "causal"}
_WINDOWS = (("window_size",), ("window_size_left", "window_size_right"))


def unusable(dtype: str) -> str | None:
    try:
        version = importlib.metadata.version("flash-attn-3")
    except importlib.metadata.PackageNotFoundError:
        return "the distribution flash-attn-3 is not installed"
    if (problem := cuda_unusable(dtype, ("float16", "bfloat16"), least=(9, 0))) is not None:
        return problem
    if torch.cuda.get_device_capability()[0] != 9:
        return f"it is for compute capability 9.x and {torch.cuda.get_device_name()} is later"
    try:
        import flash_attn_interface as interface
    except ImportError as error:
        return f"flash-attn-3 {version} does not import: {error}"
    for function, expected in (("_flash_attn_forward", _FORWARD), ("_flash_attn_backward", _BACKWARD)):
        found = tuple(_RENAMED.get(name, name) for name in parameters(getattr(interface, function, None)))
        if not any(found[: len(expected) + len(window)] == (*expected, *window) for window in _WINDOWS):
            return f"{function} of flash-attn-3 {version} takes ({', '.join(found)}), not ({', '.join(expected)}, ...)"
    return None


def refuses(head_dim: int) -> str | None:
    return odd_head_dim(head_dim, most=256)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    unused = [None] * len(_UNUSED_FORWARD)
    window = _window(mask, _flash_attn_forward)
    out, lse, *_ = _flash_attn_forward(q, k, v, *unused, scale, mask == CAUSAL, **window)
    return out.transpose(1, 2), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_backward

    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    unused = [None] * len(_UNUSED_BACKWARD)
    window = _window(mask, _flash_attn_backward)
    _flash_attn_backward(
        dout, q, k, v, out, lse.contiguous(), *unused, dq, dk, dv, scale, mask == CAUSAL, **window,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _window(mask: str, function) -> dict:
    """How many keys left and right of its own a query sees, -1 for all, as that function takes it."""
    left, right = (0, -1) if mask == ANTICAUSAL else (-1, -1)
    if "window_size" in parameters(function):
        return {"window_size": (left, right)}
    return {"window_size_left": left, "window_size_right": right}

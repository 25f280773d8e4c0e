"""CPU stand-ins for flash-attn 2 and 3: their adapters, and other libraries built on them, run without a GPU.

`install` puts them where the real ones would be imported from. Names, order and defaults of parameters, results,
shapes, strides and refusals are those of flash-attn 2.8.3 (``flash_attn.flash_attn_interface``) and of the two
interfaces that flash-attn 3 has had: 3.0.0b1, shipped in the ``hopper`` folder of that release, whose functions take
``window_size=(left, right)``; and the later one, whose functions are `torch.library` custom ops and take
``window_size_left, window_size_right``. All tensors are ``[B, S, H, D]``, lse is ``[B, H, S]``; a query sees its own
key and ``left`` and ``right`` keys beside it (-1: all), query and key rows aligned at their ends.

PyTorch's CPU flash attention does the work, at its own speed but for one copy of gradients into given buffers: full
rectangles and causal squares as they are, anticausal squares (``left`` 0) reversed. Any other mask is computed densely,
with the whole score matrix in memory.
Dropout, soft capping, ALiBi and inference features (paged or appended KV, rotary embedding, fp8) are refused.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import re
import sys
import types
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

FULL, CAUSAL, ANTICAUSAL, OTHER = "full", "causal", "anticausal", "other"
HALF = (torch.float16, torch.bfloat16)
VERSIONS = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0b1"}

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_accepted: Collection[torch.dtype] = HALF


@contextlib.contextmanager
def install(dtypes: Collection[torch.dtype]) -> Iterator[None]:
    """Let ``flash_attn``, ``flash_attn_interface`` and their distributions be the stand-ins, inside the context.

    Modules that import them inside keep them afterwards.

    Args:
        dtypes: those accepted. The libraries accept `HALF`; wider ones serve comparisons on CPUs (lse is then as wide).
    """
    global _accepted
    package, interface = _module("flash_attn", FLASH_ATTN), _module("flash_attn.flash_attn_interface", FLASH_ATTN)
    package.__dict__.update(__version__=VERSIONS["flash-attn"], __path__=[], flash_attn_interface=interface)
    modules = {m.__name__: m for m in (package, interface, _module("flash_attn_interface", FLASH_ATTN_3))}
    before = {name: sys.modules.get(name) for name in modules}
    real_version, accepted = importlib.metadata.version, _accepted

    def version(distribution_name: str) -> str:
        return VERSIONS.get(re.sub(r"[-_.]+", "-", distribution_name).lower()) or real_version(distribution_name)

    sys.modules.update(modules)
    importlib.metadata.version, _accepted = version, tuple(dtypes)
    try:
        yield
    finally:
        importlib.metadata.version, _accepted = real_version, accepted
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# flash-attn 2.8.3


def fa2_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_flash_attn_forward`` -> out, lse (+inf where a query sees no key), an empty S_dmask, rng_state."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_softmax=return_softmax)
    out, lse = _attend(q, k, v, softmax_scale, causal, (window_size_left, window_size_right), torch.inf)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def fa2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """``_flash_attn_backward``: writes dq, dk, dv; returns softmax_d, here of its shape only."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    window = (window_size_left, window_size_right)
    _write((dq, dk, dv), _attend_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal, window))
    return _softmax_d(q)


def fa2_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_flash_attn_varlen_forward``: tensors ``[total, H, D]``, lse ``[H, total]``, sequence by sequence."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_softmax=return_softmax)
    _refuse(block_table=block_table, leftpad_k=leftpad_k, seqused_k=seqused_k)
    window, parts = (window_size_left, window_size_right), []
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        parts.append(_attend(q[None, rows], k[None, keys], v[None, keys], softmax_scale, causal, window, torch.inf))
    out, lse = torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=1)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def fa2_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """``_flash_attn_varlen_backward``: writes dq, dk, dv; returns softmax_d, here of its shape only."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    window = (window_size_left, window_size_right)
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        part_dout, part_q, part_out = (t[None, rows] for t in (dout, q, out))
        part_k, part_v = (t[None, keys] for t in (k, v))
        lse = softmax_lse[None, :, rows].contiguous()
        grads = _attend_backward(part_dout, part_q, part_k, part_v, part_out, lse, softmax_scale, causal, window)
        buffers = ((dq, rows), (dk, keys), (dv, keys))
        _write([None if t is None else t[None, at] for t, at in buffers], grads)
    return q.new_empty(q.shape[1], len(q) + 128 * (len(cu_seqlens_q) - 1), dtype=torch.float32)


def fa2_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``flash_attn_func``, differentiable; head dims that are no multiple of 8 are padded."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    dim = q.shape[-1]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    if dim % 8:
        q, k, v = (pad(t, (0, -dim % 8)) for t in (q, k, v))
    out, lse = _Attention.apply(q, k, v, scale, causal, window_size, torch.inf)
    out = out[..., :dim]
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def fa2_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``flash_attn_varlen_func``, differentiable."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table)
    parts = []
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        part = (q[None, rows], k[None, keys], v[None, keys])
        parts.append(fa2_func(*part, 0.0, softmax_scale, causal, window_size, return_attn_probs=True))
    out, lse = torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], dim=1)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


# flash-attn 3.0.0b1


def fa3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    qv: Tensor | None,
    out: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    page_table: Tensor | None,
    kv_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    seqlens_rotary: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, None, None]:
    """``_flash_attn_forward`` -> out, lse (-inf where a query sees no key), no out_accum, no lse_accum."""
    _refuse(k_new=k_new, v_new=v_new, qv=qv, page_table=page_table, kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k)
    _refuse(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k)
    _refuse(rotary_cos=rotary_cos, attention_chunk=attention_chunk, softcap=softcap)
    result, lse = _attend(q, k, v, softmax_scale, causal, window_size, -torch.inf)
    if out is not None:
        result = out.copy_(result)
    return result, lse, None, None


def fa3_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    sequed_q: Tensor | None,
    sequed_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_flash_attn_backward``: writes and returns dq, dk, dv; softmax_d is of its shape only."""
    _refuse(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sequed_q=sequed_q, sequed_k=sequed_k)
    _refuse(softcap=softcap)
    grads = _attend_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal, window_size)
    dq, dk, dv = _write((dq, dk, dv), grads)
    return dq, dk, dv, _softmax_d(q)


def fa3_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """``flash_attn_func``, differentiable."""
    _refuse(qv=qv, attention_chunk=attention_chunk, softcap=softcap)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Attention.apply(q, k, v, scale, causal, window_size, -torch.inf)[0]


# flash-attn 3, later interface


def fa3_op_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_flash_attn_forward`` -> out, lse (-inf where a query sees no key), empty out_accum and lse_accum."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse, *_ = fa3_forward(
        q, k, v, k_new, v_new, qv, out_, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, scale, causal, (window_size_left, window_size_right), attention_chunk, softcap,
    )  # fmt: skip
    return out, lse, torch.empty(0), torch.empty(0)


def fa3_op_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """``_flash_attn_backward``: writes dq, dk, dv; returns softmax_d, here of its shape only."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return fa3_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
        dq, dk, dv, scale, is_causal, (window_size_left, window_size_right), softcap,
    )[3]  # fmt: skip


# What modules hold, by the libraries' names.
FLASH_ATTN = {
    "flash_attn_func": fa2_func,
    "flash_attn_varlen_func": fa2_varlen_func,
    "_flash_attn_forward": fa2_forward,
    "_flash_attn_backward": fa2_backward,
    "_flash_attn_varlen_forward": fa2_varlen_forward,
    "_flash_attn_varlen_backward": fa2_varlen_backward,
}
FLASH_ATTN_3 = {
    "flash_attn_func": fa3_func,
    "_flash_attn_forward": fa3_forward,
    "_flash_attn_backward": fa3_backward,
}
FLASH_ATTN_3_OPS = {"_flash_attn_forward": fa3_op_forward, "_flash_attn_backward": fa3_op_backward}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, scale, causal, window, empty_lse):
        out, lse = _attend(q, k, v, scale, causal, window, empty_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = scale, causal, window
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, _):
        return *_attend_backward(dout, *ctx.saved_tensors, *ctx.call), None, None, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: tuple[int, int], empty_lse: float
) -> tuple[Tensor, Tensor]:
    q, k, v = _checked(q, k, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask, (left, right) = _mask(q, k, causal, window)
    if mask == OTHER:
        scores = _scores(q, k, scale, left, right)
        lse = scores.logsumexp(-1)
        out = scores.softmax(-1).nan_to_num_(0.0) @ _repeated(v, q)
        out, lse = out.to(q.dtype), lse.masked_fill_(lse == -torch.inf, empty_lse)
    elif mask == ANTICAUSAL:
        out, lse = (t.flip(2) for t in _forward(q.flip(2), k.flip(2), v.flip(2), 0.0, True, scale=scale))
    else:
        out, lse = _forward(q, k, v, 0.0, mask == CAUSAL, scale=scale)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def _attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
) -> tuple[Tensor, ...]:
    if not lse.is_contiguous():
        raise RuntimeError("softmax_lse must be contiguous: the library reads it as if it were")
    q, k, v, dout, out = _checked(q, k, v, dout, out)
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    mask, (left, right) = _mask(q, k, causal, window)
    if mask == OTHER:
        grads: Any = _dense_backward(dout, q, k, v, out, lse, scale, left, right)
    elif mask == ANTICAUSAL:
        call = (t.flip(2) for t in (dout, q, k, v, out, lse))
        grads = (t.flip(2) for t in _backward(*call, 0.0, True, scale=scale))
    else:
        grads = _backward(dout, q, k, v, out, lse, 0.0, mask == CAUSAL, scale=scale)
    return tuple(t.transpose(1, 2) for t in grads)


def _dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, scale, left, right)
    do = dout.to(scores.dtype)
    p = torch.where(scores == -torch.inf, 0.0, (scores - lse[..., None]).exp())
    delta = (do * out.to(scores.dtype)).sum(-1, keepdim=True)
    ds = p * (do @ _repeated(v, q).mT - delta) * scale
    ratio = q.shape[1] // k.shape[1]
    dk, dv = ((t.mT @ x.to(scores.dtype)).unflatten(1, (-1, ratio)).sum(2) for t, x in ((ds, q), (p, do)))
    return (ds @ _repeated(k, q)).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _mask(q: Tensor, k: Tensor, causal: bool, window: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """What kind of mask it is, and its limits: -1 where no pair of query and key reaches one."""
    rows, keys = q.shape[2], k.shape[2]
    left, right = window[0], 0 if causal else window[1]
    left, right = -1 if left >= keys - 1 else left, -1 if right >= rows - 1 else right
    square = {(-1, 0): CAUSAL, (0, -1): ANTICAUSAL} if rows == keys else {}
    return FULL if left < 0 and right < 0 else square.get((left, right), OTHER), (left, right)


def _scores(q: Tensor, k: Tensor, scale: float, left: int, right: int) -> Tensor:
    scores = q.to(torch.promote_types(q.dtype, torch.float32)) @ _repeated(k, q).mT * scale
    rows, keys = scores.shape[2:]
    ahead = torch.arange(keys) - torch.arange(keys - rows, keys)[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    return scores.masked_fill_(hidden, -torch.inf)


def _repeated(kv: Tensor, q: Tensor) -> Tensor:
    return kv.to(torch.promote_types(kv.dtype, torch.float32)).repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _checked(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[Tensor]:
    """The tensors with a contiguous last dimension, as the library makes them, or its refusal."""
    if q.dtype not in _accepted:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    for name, tensor in zip(("key", "value", "dout", "out"), (k, v, *more), strict=False):
        if tensor.dtype != q.dtype:
            raise RuntimeError(f"query and {name} must have the same dtype")
    batch, _, heads, dim = q.shape
    if batch == 0:
        raise RuntimeError("batch size must be positive")
    if dim > 256:
        raise RuntimeError("FlashAttention only supports head dimension at most 256")
    if dim % 8:
        raise RuntimeError("head_size should be a multiple of 8")
    if heads % k.shape[2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    shapes = [(batch, *k.shape[1:3], dim)] * 2 + [tuple(q.shape)] * len(more)
    for tensor, shape in zip((k, v, *more), shapes, strict=True):
        if tuple(tensor.shape) != shape:
            raise RuntimeError(f"a tensor must have shape {shape}, it has {tuple(tensor.shape)}")
    return [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, *more)]


def _write(buffers: Collection[Tensor | None], grads: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradients, in the buffers given."""
    results = []
    for name, buffer, grad in zip(("dq", "dk", "dv"), buffers, grads, strict=True):
        if buffer is not None:
            if buffer.dtype != grad.dtype:
                raise RuntimeError(f"{name} must have the same dtype as q")
            if buffer.stride(-1) != 1:
                raise RuntimeError(f"{name} must have contiguous last dimension")
            if buffer.shape != grad.shape:
                raise RuntimeError(f"{name} must have shape {tuple(grad.shape)}, it has {tuple(buffer.shape)}")
        results.append(grad if buffer is None else buffer.copy_(grad))
    return results


def _softmax_d(q: Tensor) -> Tensor:
    batch, rows, heads, _ = q.shape
    return q.new_empty(batch, heads, -(-rows // 128) * 128, dtype=torch.float32)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    bounds = [t.tolist() for t in (cu_seqlens_q, cu_seqlens_k)]
    rows, keys = ([slice(a, b) for a, b in itertools.pairwise(t)] for t in bounds)
    return list(zip(rows, keys, strict=True))


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"the CPU stand-in does not implement {name}")


def _module(name: str, content: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name, "CPU stand-in, see hexiseq.standins.")
    module.__spec__ = ModuleSpec(name, None)  # importlib.util.find_spec raises where it is None
    module.__dict__.update(content)
    return module

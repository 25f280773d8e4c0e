"""Attention as its definition reads, on any device: the whole score matrix in float64, results in the inputs' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, FULL

DEVICE = None


def unusable(dtype: str) -> str | None:
    return None


def refuses(head_dim: int) -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ _repeat(v, q)
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    do, ratio = dout.double(), q.shape[1] // k.shape[1]
    p = (_scores(q, k, mask, scale) - lse.double()[..., None]).exp()
    delta = (do * out.double()).sum(-1, keepdim=True)
    ds = p * (do @ _repeat(v, q).mT - delta) * scale
    dq, dk, dv = ds @ _repeat(k, q), ds.mT @ q.double(), p.mT @ do
    dk, dv = (t.unflatten(1, (-1, ratio)).sum(2) for t in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _repeat(kv: Tensor, q: Tensor) -> Tensor:
    return kv.double().repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, mask: str, scale: float) -> Tensor:
    scores = q.double() @ _repeat(k, q).mT * scale
    if mask == FULL:
        return scores
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device)
    return scores.masked_fill({CAUSAL: hidden.triu(1), ANTICAUSAL: hidden.tril(-1)}[mask], -torch.inf)

"""Attention over an uneven plan: heads split inside a group, tokens across groups, KV slots around a ring.

    out = attend(q, k, v, plan=plan)       # local shards [B, L, H, D], inside an initialised process group

See ``docs/architecture.md`` for the layout and the ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hexiseq.attention.layout import routes
from hexiseq.attention.op import attend_op
from hexiseq.attention.runtime import Runtime, close_all, flat_documents, runtime_for
from hexiseq.attention.tiles import Mask
from hexiseq.plan import Plan

__all__ = ["Mask", "Runtime", "attend", "close_all", "routes", "runtime_for"]


@torch.compiler.disable  # a graph of its own could not be captured: it is communication, decided by plan and documents
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    causal: bool = True,
    scale: float | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    window: int | None = None,
) -> Tensor:
    """Exact softmax attention of the plan's whole sequence, for this rank's tokens. Collective over the replica.

    Args:
        q: the rank's queries, all heads, ``[B, L, H, D]``: its tokens of the plan in order. A rank without tokens
            passes ``L`` 0, or 1 for a dummy token, which is dropped: its output and gradients are zero.
        k, v: ``[B, L, K, D]``.
        plan: the same on all ranks; this process is its rank ``dist.get_rank()``. The first call with a plan makes its
            process groups (`runtime_for`).
        causal: whether a token attends to the tokens up to itself only.
        scale: factor on the scores; ``D ** -0.5`` if None.
        documents: of each of the ``B`` sequences, the boundaries of its documents in the whole sequence, ascending from
            0 to the plan's ``seq_len``. Tokens attend within their document. None: a sequence is one document.
        window: tokens that a token attends to at most, the latest, itself included; None for all. Needs `causal`.

        ``B``, ``D``, everything after `plan`, whether gradients are needed, and the order of calls and of their
        backward passes are the same on all ranks of a replica.

    Returns:
        ``[B, L, H, D]`` in the inputs' dtype; gradients reach q, k and v. There are no second derivatives.

    Raises:
        ValueError: a tensor's shape, dtype or device is not the plan's, or boundaries or window are no such thing;
            raised before any communication. Or ranks call with different values; raised by all of them.
        RuntimeError: a peer failed, or did not answer within the runtime's timeout; names it. Later calls repeat it.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a Plan, got {type(plan).__name__}")
    runtime = runtime_for(plan)
    number = runtime.enter()
    _check(runtime, q, k, v)
    batch, _, _, dim = q.shape
    mask = Mask.checked(plan.seq_len, batch, bool(causal), window, documents)
    scale = dim**-0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale}")
    runtime.agree(
        q.device,
        mask.documents,
        number=number,
        batch=batch,
        head_dim=dim,
        causal=mask.causal,
        scale=scale,
        window=mask.window or 0,
        needs_gradients=torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)),
    )
    flat = flat_documents(mask.documents)
    out, _ = attend_op(q, k, v, flat, runtime.handle, number, mask.causal, mask.window or 0, scale)
    return out


def _check(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor) -> None:
    plan, kernel, where = runtime.plan, runtime.kernel, f"rank {runtime.rank}"
    tokens = plan.shard(runtime.rank).num_tokens
    lengths = (tokens,) if tokens else (0, 1)
    for name, x, heads in (("q", q, plan.num_heads), ("k", k, plan.num_kv_heads), ("v", v, plan.num_kv_heads)):
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            raise ValueError(f"{where}: {name} must be a dense tensor, got {getattr(x, 'layout', type(x).__name__)}")
        if x.dim() != 4 or not x.shape[-1]:
            raise ValueError(f"{where}: {name} has shape {tuple(x.shape)}, needs [B, L, {heads}, D]")
        if x.shape[1] not in lengths:
            raise ValueError(f"{where}: {name} has {x.shape[1]} tokens, the plan {' or '.join(map(str, lengths))}")
        if x.shape[2] != heads:
            raise ValueError(f"{where}: {name} has {x.shape[2]} heads, the plan {heads}")
        if (x.shape[0], x.shape[1], x.shape[3]) != (q.shape[0], q.shape[1], q.shape[3]):
            raise ValueError(f"{where}: {name} has shape {tuple(x.shape)}, q {tuple(q.shape)}: "
                             "B, L and D must agree")  # fmt: skip
        if str(x.dtype) != f"torch.{plan.dtype}":
            raise ValueError(f"{where}: {name} is {str(x.dtype).removeprefix('torch.')}, the plan {plan.dtype}")
        if x.device.type != (kernel.device or q.device.type):
            needs = f"the plan's kernel {kernel.name!r} needs {kernel.device}" if kernel.device else f"q on {q.device}"
            raise ValueError(f"{where}: {name} is on {x.device}, {needs}")
    if (reason := kernel.refuses(q.shape[3])) is not None:
        raise ValueError(f"{where}: kernel {kernel.name!r} takes no heads of size {q.shape[3]}: {reason}")

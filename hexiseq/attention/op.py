"""Attention over a plan as one operator with its own backward: ``torch.ops.hexiseq.attend``.

One explicit operator fixes the order of communication, lets backward use the global out and log-sum-exp, and is a unit
that selective activation checkpointing can keep (it cannot look inside a `torch.autograd.Function`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexiseq.attention.exchange import GradientRing, from_heads, kv_ring, to_heads
from hexiseq.attention.layout import INNER, OWN, Block, Route
from hexiseq.attention.runtime import Runtime, runtime_of


@torch.library.custom_op("hexiseq::attend", mutates_args=())
def attend_op(q: Tensor, k: Tensor, v: Tensor, handle: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """``(out [B, L, H, D], lse [B, own heads, L_g])`` of local shards; `handle` names a `Runtime` of this process."""
    runtime = runtime_of(handle)
    runtime.calls["forward"] += 1
    route, links = runtime.route(causal), runtime.links
    q_h, k_h, v_h = to_heads(route, links, (q, k, v), "qkk")
    kv = torch.stack([k_h, v_h], dim=2)
    rows, batch, heads, dim = q_h.shape
    # Rows outermost, so that the result goes back as it lies.
    out = q_h.new_empty(rows, batch, heads, dim, dtype=_accumulator(q))
    lse = q_h.new_empty(batch, heads, rows, dtype=out.dtype)

    for block, block_kv in kv_ring(route, links, kv):
        queries = _queries(route, block)
        if queries.start == rows:
            continue
        for fragment in route.fragments:
            part_out, part_lse = runtime.kernel.forward(
                _bhsd(q_h[queries, :, fragment.q]),
                _bhsd(block_kv[:, :, 0, fragment.kv]),
                _bhsd(block_kv[:, :, 1, fragment.kv]),
                causal and block.side == OWN,
                scale,
            )
            so_far = _bhsd(out[queries, :, fragment.q]), lse[:, fragment.q, queries]
            _merge(*so_far, part_out, part_lse, first=block.side == OWN)

    local = _local_like(q)
    widths = [m.heads[1] - m.heads[0] for m in route.members]
    blocks = from_heads(route, links, out.to(q.dtype), widths)
    tokens = route.me.rows[1] - route.me.rows[0]
    for member, part in zip(route.members, blocks, strict=True):
        local[:, :tokens, slice(*member.heads)] = part.transpose(0, 1)
    return local, lse


@attend_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    route = runtime_of(handle).route(causal)
    heads = route.me.heads[1] - route.me.heads[0]
    return _local_like(q), q.new_empty(q.shape[0], heads, route.rows, dtype=_accumulator(q))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.handle, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    # Under autograd's no_grad. Only local tensors and lse were kept: q, k, v are the model's own activations, which
    # checkpointing recomputes, and one fused all-to-all brings all of them to head form again.
    q, k, v, out, lse = ctx.saved_tensors
    grads = _attend_backward(runtime_of(ctx.handle), dout, q, k, v, out, lse, ctx.causal, ctx.scale)
    return *grads, None, None, None


attend_op.register_autograd(_backward, setup_context=_setup_context)


def _attend_backward(
    runtime: Runtime,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    runtime.calls["backward"] += 1
    route, links = runtime.route(causal), runtime.links
    q_h, k_h, v_h, out_h, dout_h = to_heads(route, links, (q, k, v, out, dout), "qkkqq")
    rows, batch, heads, dim = q_h.shape
    kv = torch.stack([k_h, v_h], dim=2)
    kv_count = kv.shape[3]
    # dq, dk and dv side by side: they go back in one all-to-all.
    grad = q_h.new_zeros(rows, batch, heads + 2 * kv_count, dim, dtype=_accumulator(q))
    dq, own_dkv = grad[:, :, :heads], grad[:, :, heads:].unflatten(2, (2, kv_count))

    ring = GradientRing(route, links, own_dkv)
    for block, block_kv in kv_ring(route, links, kv):
        queries = _queries(route, block)
        dkv = own_dkv if block.side == OWN else torch.zeros_like(block_kv, dtype=grad.dtype)
        for fragment in route.fragments if queries.start < rows else ():
            part_q, part_k, part_v = runtime.kernel.backward(
                _bhsd(dout_h[queries, :, fragment.q]),
                _bhsd(q_h[queries, :, fragment.q]),
                _bhsd(block_kv[:, :, 0, fragment.kv]),
                _bhsd(block_kv[:, :, 1, fragment.kv]),
                _bhsd(out_h[queries, :, fragment.q]),
                lse[:, fragment.q, queries],
                causal and block.side == OWN,
                scale,
            )
            _bhsd(dq[queries, :, fragment.q]).add_(part_q)
            _bhsd(dkv[:, :, 0, fragment.kv]).add_(part_k)
            _bhsd(dkv[:, :, 1, fragment.kv]).add_(part_v)
        if block.side != OWN:
            ring.pass_on(block, dkv)
    ring.come_home()
    return _gradients_home(route, runtime, grad, q, k, v)


def _gradients_home(
    route: Route, runtime: Runtime, grad: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all of dq, dk and dv to the tokens' owners; copies of a KV head are summed there in member order."""
    members = route.members
    widths = [m.heads[1] - m.heads[0] + 2 * (m.kv[1] - m.kv[0]) for m in members]
    # Partial sums travel unrounded; complete ones are rounded on either side of the transfer all the same.
    message = grad if route.shared_kv else grad.to(q.dtype)
    blocks = from_heads(route, runtime.links, message, widths)
    tokens = route.me.rows[1] - route.me.rows[0]
    dq, dk, dv = (_local_like(t, message.dtype) for t in (q, k, v))
    done = 0
    for member, block in zip(members, blocks, strict=True):
        heads, kv = slice(*member.heads), slice(*member.kv)
        n, count = member.heads[1] - member.heads[0], member.kv[1] - member.kv[0]
        part_q, part_k, part_v = block.transpose(0, 1).split([n, count, count], dim=2)
        dq[:, :tokens, heads] = part_q
        for target, part in ((dk, part_k), (dv, part_v)):
            shared = max(0, min(done, member.kv[1]) - member.kv[0]) if count else 0
            here = target[:, :tokens, kv]
            here[:, :, :shared] += part[:, :, :shared]
            here[:, :, shared:] = part[:, :, shared:]
        done = max(done, member.kv[1])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _queries(route: Route, block: Block) -> slice:
    """Own rows that attend to the block: to an inner group's slots with causal masking only the back interval."""
    return slice(route.front if block.side == INNER else 0, route.rows)


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, first: bool) -> None:
    """Merge attention over further keys into `out` ``[B, H, S, D]`` and `lse` ``[B, H, S]``, in place."""
    part_lse = part_lse.to(lse.dtype)
    # An empty row is -inf here; some kernels say +inf.
    part_lse = torch.where(part_lse == torch.inf, -torch.inf, part_lse)
    if first:
        out.copy_(part_out)
        lse.copy_(part_lse)
        return
    top = torch.maximum(lse, part_lse)
    base = torch.where(top == -torch.inf, 0.0, top)  # both empty: no inf - inf
    old, new = (lse - base).exp_(), (part_lse - base).exp_()
    total = old + new
    weight = torch.where(total > 0, new / total, 0.0)
    out.lerp_(part_out.to(out.dtype), weight[..., None])
    lse.copy_(base + total.log_())


def _bhsd(x: Tensor) -> Tensor:
    """``[S, B, H, D]`` viewed as ``[B, H, S, D]``."""
    return x.permute(1, 2, 0, 3)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _local_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An own shard, contiguous. Zero, for the dummy token of a rank without tokens; elsewhere every value is set."""
    return x.new_zeros(x.shape, dtype=dtype or x.dtype)

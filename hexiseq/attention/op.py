"""Attention over a plan as one operator with its own backward: ``torch.ops.hexiseq.attend``.

One explicit operator fixes the order of communication, lets backward use the global out and log-sum-exp, and is a unit
that selective activation checkpointing can keep (it cannot look inside a `torch.autograd.Function`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexiseq.attention.clock import CLOCK
from hexiseq.attention.exchange import from_heads, gradients_home, to_heads, walk_kv
from hexiseq.attention.layout import OWN, Block, Call, Fragment, Route
from hexiseq.attention.runtime import Runtime, runtime_of


@torch.library.custom_op("hexiseq::attend", mutates_args=())
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    handle: int,
    number: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``(out [B, L, H, D], lse [B, own heads, L_g])`` of local shards.

    Args:
        documents: `flat_documents` of the call, on the CPU.
        handle: of a `Runtime` of this process.
        number: of the call, from its `Runtime.enter`.
        window: 0 for none.
    """
    runtime = runtime_of(handle)
    runtime.calls["forward"] += 1
    route, links = runtime.route(causal, window, documents), runtime.links
    with runtime.step(), links.buffers.lease() as lease:
        q_h, k_h, v_h = to_heads(route, links, lease, (q, k, v), "qkk")
        rows, batch, heads, dim = q_h.shape
        out = lse = None
        if not _adopts(route, q):
            wide = _accumulator(q)
            if len(route.members) == 1:
                out = q_h.new_empty(batch, rows, heads, dim, dtype=wide).transpose(1, 2)
            else:  # rows outermost, so that the result goes back as it lies
                out = lease.take(q_h, (rows, batch, heads, dim), dtype=wide).permute(1, 2, 0, 3)
            lse = q_h.new_empty(batch, heads, rows, dtype=wide)
        for block, kv in walk_kv(route, links, lease, k_h, v_h):
            for call, fragment in _work(route, block):
                keys, values = _kv_views(block, kv, k_h, v_h, call, fragment)
                part = runtime.kernel.forward(_view(q_h, call, fragment), keys, values, call.mask, scale)
                if out is None:
                    out, lse = part
                else:
                    assert lse is not None
                    at = call.sequences, fragment.q, call.queries
                    _merge(out[at], lse[at], *part, first=call.first)
        if out is None:  # a rank without heads
            out, lse = q_h.new_empty(batch, heads, rows, dim), q_h.new_empty(batch, heads, rows, dtype=_accumulator(q))
        assert lse is not None
        if len(route.members) == 1:
            return _as_local(out.permute(0, 2, 1, 3), q), lse.contiguous()
        local = _local_like(q, route)
        message = out.permute(2, 0, 1, 3)
        if out.dtype != q.dtype:
            message = lease.take(q_h, message.shape).copy_(message)
        widths = [m.heads[1] - m.heads[0] for m in route.members]
        tokens = route.me.rows[1] - route.me.rows[0]
        for member, block_out in zip(route.members, from_heads(route, links, lease, message, widths), strict=True):
            local[:, :tokens, slice(*member.heads)] = block_out.transpose(0, 1)
        return local, lse


@attend_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    handle: int,
    number: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    runtime = runtime_of(handle)
    lse = q.new_empty(q.shape[0], runtime.num_heads, runtime.group_tokens, dtype=_accumulator(q))
    return q.new_empty(q.shape), lse


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, ctx.handle, ctx.number, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, documents, *output)


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    # Only local tensors and lse were kept: q, k, v are the model's own activations, which checkpointing recomputes, and
    # one fused all-to-all brings all of them to head form again.
    if torch.is_grad_enabled():
        raise RuntimeError("attention over a plan has no second derivatives: create_graph=True is not supported")
    q, k, v, documents, out, lse = ctx.saved_tensors
    runtime = runtime_of(ctx.handle)
    route = runtime.route(ctx.causal, ctx.window, documents)
    if q.device.type == "cpu" or CLOCK.timing:
        runtime.agree(q.device, None, number=ctx.number, backward=True)
    grads = _attend_backward(runtime, route, dout, q, k, v, out, lse, ctx.scale)
    return *grads, None, None, None, None, None, None


attend_op.register_autograd(_backward, setup_context=_setup_context)


def _attend_backward(
    runtime: Runtime,
    route: Route,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    runtime.calls["backward"] += 1
    links = runtime.links
    with runtime.step(), links.buffers.lease() as lease:
        q_h, k_h, v_h, out_h, dout_h = to_heads(route, links, lease, (q, k, v, out, dout), "qkkqq")
        rows, batch, heads, dim = q_h.shape
        kv_count, wide = k_h.shape[2], _accumulator(q)
        grad = dq = dk = dv = home = None
        if not _adopts(route, q):
            # dq, dk and dv side by side: they go back in one all-to-all.
            grad = lease.take(q_h, (rows, batch, heads + 2 * kv_count, dim), dtype=wide)
            dq, dk, dv = (g.permute(1, 2, 0, 3) for g in grad.split([heads, kv_count, kv_count], dim=2))
            home = gradients_home(route, links, lease, *(g.permute(2, 0, 1, 3) for g in (dk, dv)))

        for block, kv in walk_kv(route, links, lease, k_h, v_h):
            dkv = None
            if block.side != OWN and block.grad_rows:
                shape = (block.grad_rows, batch, 2, kv_count, dim)
                dkv = lease.take(q_h, shape, block.most_rows, dtype=wide)
                if not block.covered:
                    dkv.zero_()
            for call, fragment in _work(route, block):
                keys, values = _kv_views(block, kv, k_h, v_h, call, fragment)
                at = call.sequences, fragment.q, call.queries
                parts = runtime.kernel.backward(
                    _view(dout_h, call, fragment),
                    _view(q_h, call, fragment),
                    keys,
                    values,
                    _view(out_h, call, fragment),
                    lse[at],
                    call.mask,
                    scale,
                )
                if dq is None:
                    dq, dk, dv = parts
                    continue
                assert dk is not None
                assert dv is not None
                _add(dq[at], parts[0], first=call.first)
                for source, target in call.grads:
                    for i, (sum_of, part) in enumerate(((dk, parts[1]), (dv, parts[2]))):
                        if dkv is not None:
                            sum_of = dkv[:, :, i].permute(1, 2, 0, 3)
                        first = block.covered if dkv is not None else call.first
                        _add(sum_of[call.sequences, fragment.kv, target], part[:, :, source], first=first)
            if home is None:
                assert dk is not None
                assert dv is not None
                home = gradients_home(route, links, lease, *(g.permute(2, 0, 1, 3) for g in (dk, dv)))
            if block.side != OWN:
                home.pass_on(block, dkv)
        assert home is not None
        home.come_home()
        if grad is None:
            own_q, own_k, own_v = (_as_local(g.permute(0, 2, 1, 3), q) for g in (dq, dk, dv) if g is not None)
            return own_q, own_k, own_v
        return _to_owners(runtime, route, lease, grad, q, k, v)


def _to_owners(
    runtime: Runtime, route: Route, lease: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all of dq, dk and dv to the tokens' owners; copies of a KV head are summed there in member order."""
    members = route.members
    widths = [m.heads[1] - m.heads[0] + 2 * (m.kv[1] - m.kv[0]) for m in members]
    message = grad
    # Partial sums travel unrounded; complete ones are rounded on either side of the transfer all the same.
    if not route.shared_kv and grad.dtype != q.dtype and len(members) > 1:
        message = lease.take(q, grad.shape).copy_(grad)
    blocks = from_heads(route, runtime.links, lease, message, widths)
    tokens = route.me.rows[1] - route.me.rows[0]
    dq, dk, dv = (_local_like(t, route, message.dtype) for t in (q, k, v))
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


def _adopts(route: Route, q: Tensor) -> bool:
    """Whether what the first kernel call returns can itself be what later ones are added to: it has all rows, heads
    and the accumulator's dtype, and need not be laid out for an all-to-all."""
    if not route.blocks or len(route.members) > 1 or len(route.fragments) > 1 or q.dtype != _accumulator(q):
        return False
    calls = route.blocks[0].calls
    return bool(calls) and calls[0].sequences == slice(None) and calls[0].queries == slice(0, route.rows)


def _work(route: Route, block: Block) -> list[tuple[Call, Fragment]]:
    return [(call, fragment) for call in block.calls for fragment in route.fragments]


def _view(x: Tensor, call: Call, fragment: Fragment) -> Tensor:
    """Queries of a call, ``[S, B, H, D]`` viewed as ``[B, H, S, D]``."""
    return x[call.queries, call.sequences, fragment.q].permute(1, 2, 0, 3)


def _kv_views(
    block: Block, kv: Tensor | None, k: Tensor, v: Tensor, call: Call, fragment: Fragment
) -> tuple[Tensor, Tensor]:
    """Keys and values of a call, viewed as ``[B, K, S, D]``."""
    if block.side != OWN:
        assert kv is not None
        k, v = kv[:, :, 0], kv[:, :, 1]
    at = call.keys, call.sequences, fragment.kv
    return k[at].permute(1, 2, 0, 3), v[at].permute(1, 2, 0, 3)


def _add(total: Tensor, part: Tensor, first: bool) -> None:
    if first:
        total.copy_(part)
    else:
        total.add_(part)


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


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _local_like(x: Tensor, route: Route, dtype: torch.dtype | None = None) -> Tensor:
    """An own shard, contiguous. Zero, for the dummy token of a rank without tokens; elsewhere every value is set."""
    no_tokens = route.me.rows[0] == route.me.rows[1]
    return (x.new_zeros if no_tokens else x.new_empty)(x.shape, dtype=dtype or x.dtype)


def _as_local(x: Tensor, like: Tensor) -> Tensor:
    """A result ``[B, L_g, heads, D]`` of a group of one as the own shard: its own memory where it lies right."""
    return x.to(like.dtype, memory_format=torch.contiguous_format).contiguous()

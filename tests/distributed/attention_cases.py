"""Plans drawn at random, and what workers do with them. Kept apart from the tests so that workers import little."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.distributed as dist

from hexiseq.attention import attend, close_all, runtime_for
from hexiseq.plan import Plan, RankDevice, group_intervals, make_replica

NAMES = ("out", "dq", "dk", "dv")


def split(rng: random.Random, total: int, parts: int) -> list[int]:
    """`total` cut into `parts` at random; zeros and skew are common."""
    weights = [rng.choice((0, 1, 1, 2, 5, 12)) * rng.random() for _ in range(parts)]
    if not any(weights):
        weights[rng.randrange(parts)] = 1.0
    cuts = [round(total * sum(weights[:i]) / sum(weights)) for i in range(parts + 1)]
    sizes = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    if parts > 1 and rng.random() < 0.3:  # a rank with a single token or head
        giver = max(range(parts), key=sizes.__getitem__)
        taker = rng.choice([i for i in range(parts) if i != giver])
        moved = sizes[taker] + sizes[giver] - 1
        if moved > 0:
            sizes[taker], sizes[giver] = 1, moved
    return sizes


def draw_plan(seed: int, dtype: str = "float64", kernel: str = "cpu") -> Plan:
    """A plan of 2 to 5 ranks in groups of 1 to 4; now and then two replicas. Ranks are shuffled."""
    rng = random.Random(seed)
    world = rng.choice((2, 3, 3, 4, 4, 5, 5))
    replicas = 2 if world >= 4 and rng.random() < 0.25 else 1
    sizes = [world] if replicas == 1 else [2, world - 2]
    ratio, kv = rng.choice((1, 2, 3, 8)), rng.choice((1, 2, 3, 4))
    heads, half = ratio * kv, rng.randint(1, 5)
    shapes = []
    for size in sizes:
        groups, left = [], size
        while left:
            groups.append(rng.randint(1, min(4, left)) if rng.random() < 0.6 else 1)
            left -= groups[-1]
        shapes.append((groups, [rng.choice((1, 1, 2, 3, 4, 6)) for _ in groups]))
    if replicas == 2:  # both cover the same sequence with the same slots
        total = max(sum(n) for _, n in shapes)
        for _, n in shapes:
            n[rng.randrange(len(n))] += total - sum(n)
    total = sum(shapes[0][1])
    seq_len = total * 2 * half - rng.choice((0, 0, rng.randint(0, half), half))
    made, rank = [], 0
    for groups, slots in shapes:
        cut = []
        for members, n, (front, back) in zip(groups, slots, group_intervals(seq_len, 2 * half, slots), strict=True):
            tokens = split(rng, front[1] - front[0] + back[1] - back[0], members)
            share = split(rng, heads, members)
            cut.append((n, [(rank + i, tokens[i], share[i]) for i in range(members)]))
            rank += members
        made.append(make_replica(seq_len, 2 * half, cut))
    plan = Plan(
        policy="manual", seq_len=seq_len, num_heads=heads, num_kv_heads=kv, slot=2 * half, fusion=rng.randint(1, 4),
        exchange="ring", recompute="none", dtype=dtype, replicas=tuple(made),
        devices=(RankDevice("cpu", "here", kernel),) * world,
    )  # fmt: skip
    order = list(range(world))
    rng.shuffle(order)
    return plan.relabel(order)


def simple_plan(groups: list[tuple[int, list[tuple[int, int]]]], seq_len: int, heads: int, kv: int, slot: int, **kw) -> Plan:
    """One replica, ranks in order: per group ``(slots, [(tokens, heads), ...])``."""
    rank, cut = 0, []
    for slots, members in groups:
        cut.append((slots, [(rank + i, *member) for i, member in enumerate(members)]))
        rank += len(members)
    values = dict(
        policy="manual", seq_len=seq_len, num_heads=heads, num_kv_heads=kv, slot=slot, fusion=2, exchange="ring",
        recompute="none", dtype="float64", replicas=(make_replica(seq_len, slot, cut),),
        devices=tuple(RankDevice("cpu", f"node{r}", "cpu") for r in range(rank)),
    )  # fmt: skip
    return Plan(**{**values, **kw})


def tensors(plan: Plan, batch: int, dim: int, seed: int) -> list[torch.Tensor]:
    """The whole sequence's q, k, v and dO, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, plan.dtype)
    counts = (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads, plan.num_heads)
    return [
        torch.randn(batch, plan.seq_len, n, dim, generator=generator, dtype=torch.float64).to(dtype) for n in counts
    ]


def reference(q, k, v, dout, causal: bool, scale: float | None = None) -> list[torch.Tensor]:
    """Dense attention and its gradients by autograd, in float64: out, dq, dk, dv."""
    q, k, v = (t.double().detach().clone().requires_grad_() for t in (q, k, v))
    ratio = q.shape[2] // k.shape[2]
    kk, vv = (t.repeat_interleave(ratio, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, kk) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), vv)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def own_kernel(q, k, v, dout, causal: bool) -> list[torch.Tensor]:
    """The same on one device with the kernel the ranks use, in the tensors' dtype."""
    from hexiseq.attention.kernels import cpu

    scale = q.shape[-1] ** -0.5
    q, k, v, dout = (t.transpose(1, 2) for t in (q, k, v, dout))
    out, lse = cpu.forward(q, k, v, causal, scale)
    return [t.transpose(1, 2) for t in (out, *cpu.backward(dout, q, k, v, out, lse, causal, scale))]


def error(found: torch.Tensor, expected: torch.Tensor, top: float) -> float:
    return (found.double() - expected.double()).abs().max().item() / top if found.numel() else 0.0


def shards(plan: Plan, rank: int, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    positions = torch.from_numpy(plan.shard(rank).positions())
    return [t[:, positions] for t in whole]


def run(plan: Plan, q, k, v, dout, **options) -> list[torch.Tensor]:
    """out, dq, dk, dv of local shards."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = attend(q, k, v, plan=plan, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def check(plan: Plan, batch: int, dim: int, seed: int, causal: bool) -> tuple[list[float], list[float]]:
    """Errors of this rank's out, dq, dk, dv, and those of the same kernel on one device. A dummy's must be zero."""
    rank = dist.get_rank()
    whole = tensors(plan, batch, dim, seed)
    expected = reference(*whole, causal)
    tops = [t.abs().max().item() for t in expected]
    single = [error(a, b, top) for a, b, top in zip(own_kernel(*whole, causal), expected, tops, strict=True)]
    local = shards(plan, rank, whole)
    dummy = not plan.shard(rank).num_tokens and seed % 2
    if dummy:
        local = [t.new_ones(batch, 1, *t.shape[2:]) for t in local]
    found = run(plan, *local, causal=causal)
    if dummy:
        assert all(t.shape[1] == 1 and not t.any() for t in found), "the dummy token has an output or a gradient"
        errors = [0.0] * 4
    else:
        assert all(t.dtype == getattr(torch, plan.dtype) for t in found)
        errors = [error(a, b, top) for a, b, top in zip(found, shards(plan, rank, expected), tops, strict=True)]
    close_all()
    return errors, single


def twice(plan: Plan, batch: int, dim: int, seed: int) -> bool:
    """Whether two runs agree bit by bit."""
    local = shards(plan, dist.get_rank(), tensors(plan, batch, dim, seed))
    first, second = run(plan, *local), run(plan, *local)
    close_all()
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def with_dtype(plan: Plan, dtype: str) -> Plan:
    return dataclasses.replace(plan, dtype=dtype)


__all__ = ["check", "draw_plan", "reference", "run", "runtime_for", "shards", "simple_plan", "tensors", "twice"]

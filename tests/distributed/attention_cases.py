"""What the workers of `test_attention` do. Kept apart from the tests so that workers import little."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import time
from collections import Counter
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hexiseq.attention import Runtime, attend, close_all, runtime_for
from hexiseq.attention.exchange import Lease, Mailbox
from hexiseq.plan import Plan, RankDevice, make_replica

NAMES = ("out", "dq", "dk", "dv")


def simple_plan(groups: list[tuple[int, list]], seq_len: int, heads: int, kv: int, slot: int, **options) -> Plan:
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
    return Plan(**{**values, **options})


def tensors(plan: Plan, batch: int, dim: int, seed: int) -> list[torch.Tensor]:
    """The whole sequence's q, k, v and dO, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, plan.dtype)
    counts = (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads, plan.num_heads)
    return [
        torch.randn(batch, plan.seq_len, n, dim, generator=generator, dtype=torch.float64).to(dtype) for n in counts
    ]


def allowed(seq_len: int, documents: list[int] | None, causal: bool, window: int | None) -> torch.Tensor:
    """Which key (column) each query (row) of a sequence attends to, from the definitions: bool ``[S, S]``."""
    at = torch.arange(seq_len)
    found = torch.ones(seq_len, seq_len, dtype=torch.bool)
    if causal:
        found &= at <= at[:, None]
    if window is not None:
        found &= at > at[:, None] - window
    if documents is not None:
        own = torch.bucketize(at, torch.tensor(documents), right=True)
        found &= own == own[:, None]
    return found


def masks(seq_len: int, batch: int, causal: bool = True, documents=None, window=None) -> torch.Tensor:
    """The same for every sequence of a batch: ``[B, 1, S, S]``."""
    every = documents or [None] * batch
    return torch.stack([allowed(seq_len, edges, causal, window) for edges in every])[:, None]


def reference(q, k, v, dout, scale: float | None = None, **mask) -> list[torch.Tensor]:
    """Dense attention and its gradients by autograd, in float64: out, dq, dk, dv."""
    q, k, v = (t.double().detach().clone().requires_grad_() for t in (q, k, v))
    ratio = q.shape[2] // k.shape[2]
    kk, vv = (t.repeat_interleave(ratio, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, kk) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~masks(q.shape[1], q.shape[0], **mask), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), vv)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def own_kernel(q, k, v, dout, **mask) -> list[torch.Tensor]:
    """The same on one device with the kernel the ranks use, in the tensors' dtype, under one dense mask."""
    from hexiseq.attention.kernels import cpu

    dense = torch.zeros(q.shape[0], 1, q.shape[1], q.shape[1], dtype=q.dtype)
    dense.masked_fill_(~masks(q.shape[1], q.shape[0], **mask), -torch.inf)
    q, k, v, dout = (t.transpose(1, 2) for t in (q, k, v, dout))
    out, lse = cpu._forward(q, k, v, 0.0, False, attn_mask=dense)
    grads = cpu._backward(dout, q, k, v, out, lse, 0.0, False, attn_mask=dense)
    return [t.transpose(1, 2) for t in (out, *grads)]


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


def errors(plan: Plan, dtypes: tuple[str, ...], batch: int, dim: int, seed: int, mask: dict) -> dict:
    """Per dtype: errors of this rank's out, dq, dk, dv, and those of the same kernel on one device.

    A rank without tokens passes a dummy token in odd seeds: its output and gradients must be zero.
    """
    rank, found_errors = dist.get_rank(), {}
    for dtype in dtypes:
        typed = dataclasses.replace(plan, dtype=dtype)
        whole = tensors(typed, batch, dim, seed)
        expected = reference(*whole, **mask)
        # Tokens that see only themselves have no gradient to q and k: absolute errors then.
        tops = [t.abs().max().item() or 1.0 for t in expected]
        single = [error(a, b, top) for a, b, top in zip(own_kernel(*whole, **mask), expected, tops, strict=True)]
        local = shards(typed, rank, whole)
        dummy = not plan.shard(rank).num_tokens and seed % 2
        if dummy:
            local = [t.new_ones(batch, 1, *t.shape[2:]) for t in local]
        found = run(typed, *local, **mask)
        assert all(f.dtype == t.dtype and f.shape[1] == t.shape[1] for f, t in zip(found, local, strict=False))
        if dummy:
            assert not any(t.any() for t in found), "the dummy token has an output or a gradient"
            found = [t[:, :0] for t in found]
        ours = [error(a, b, top) for a, b, top in zip(found, shards(typed, rank, expected), tops, strict=True)]
        found_errors[dtype] = (ours, single)
    close_all()
    return found_errors


def repeated(plan: Plan, batch: int, dim: int, seed: int) -> bool:
    """Whether two runs agree bit by bit."""
    local = shards(plan, dist.get_rank(), tensors(plan, batch, dim, seed))
    first, second = run(plan, *local), run(plan, *local)
    close_all()
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def layouts(plan: Plan, scale: float) -> dict[str, float]:
    """Largest error with inputs of unusual strides, against the same inputs laid out plainly."""
    local = shards(plan, dist.get_rank(), tensors(plan, 2, 8, 5))
    q, k, v, dout = local
    variants = {
        "heads before tokens": [t.transpose(1, 2).contiguous().transpose(1, 2) for t in local],
        "dim first": [t.movedim(3, 0).contiguous().movedim(0, 3) for t in local],
        "slices of wider tensors": [torch.cat([t, t + 1], 3)[..., : t.shape[3]] for t in local],
        "expanded batch": [t[:1].expand(2, -1, -1, -1) for t in local],
        "expanded heads of k and v": [q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v), dout],
        "dout of a sum": [q, k, v, torch.ones((), dtype=dout.dtype).expand_as(dout)],
    }
    found = {}
    for name, inputs in variants.items():
        plain = run(plan, *(t.contiguous() for t in inputs), scale=scale)
        odd = run(plan, *inputs, scale=scale)
        found[name] = max(error(a, b, 1.0) for a, b in zip(odd, plain, strict=True))
    whole = tensors(plan, 2, 8, 5)
    expected = shards(plan, dist.get_rank(), reference(*whole, scale))
    found["scale"] = max(error(a, b, 1.0) for a, b in zip(run(plan, *local, scale=scale), expected, strict=True))
    close_all()
    return found


def keep_attention(_context, op, *_args, **_kwargs) -> CheckpointPolicy:
    kept = op is torch.ops.hexiseq.attend.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(plan: Plan) -> dict[str, tuple[int, bool]]:
    """Per recompute mode: times attention ran forward, and whether gradients equal those without checkpointing."""
    x = shards(plan, dist.get_rank(), tensors(plan, 1, 8, 3)[:1])[0]
    weights = [torch.nn.Parameter(torch.randn(8, 8, dtype=x.dtype, generator=torch.Generator().manual_seed(i)))
               for i in range(3)]  # fmt: skip

    def layer(x):
        q, k, v = (x @ w for w in weights)
        kv = plan.num_kv_heads
        return attend(q, k[:, :, :kv].contiguous(), v[:, :, :kv].contiguous(), plan=plan).sin()

    runtime = runtime_for(plan)
    modes = {
        "none": layer,
        "selective": lambda x: checkpoint(
            layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep_attention)
        ),
        "full": lambda x: checkpoint(layer, x, use_reentrant=False),
    }
    found, plain = {}, []
    for name, function in modes.items():
        before = runtime.calls["forward"]
        inputs = x.clone().requires_grad_()
        grads = torch.autograd.grad((function(inputs) ** 2).sum(), [inputs, *weights])
        plain = plain or grads
        same = all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
        found[name] = (runtime.calls["forward"] - before, same)
    close_all()
    return found


def interleaved(first: Plan, second: Plan) -> tuple[float, int]:
    """Largest error of two plans used in turn, forward and backward interleaved; process groups of both together."""
    rank, made = dist.get_rank(), []
    for plan in (first, second):
        whole = tensors(plan, 1, 8, 1)
        q, k, v, dout = shards(plan, rank, whole)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        made.append((plan, inputs, dout, attend(*inputs, plan=plan), shards(plan, rank, reference(*whole))))
    worst = 0.0
    for _, inputs, dout, out, expected in made:
        found = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
        worst = max([worst, *(error(a, b, 1.0) for a, b in zip(found, expected, strict=True))])
    groups = len({id(g) for plan in (first, second) for g in _groups_of(runtime_for(plan)) if g is not None})
    runtime_for(first).close()
    whole = tensors(second, 1, 8, 1)
    found = run(second, *shards(second, rank, whole))
    expected = shards(second, rank, reference(*whole))
    worst = max([worst, *(error(a, b, 1.0) for a, b in zip(found, expected, strict=True))])
    close_all()
    return worst, groups


def _groups_of(runtime: Runtime) -> tuple:
    return runtime.replica_group, runtime.group, runtime.kv_group, runtime.dkv_group


def jittered(plan: Plan, seed: int) -> list[float]:
    """Errors in float64 when every kernel call takes a random time, another one on every rank."""
    runtime, rng = runtime_for(plan), random.Random(1000 * seed + dist.get_rank())
    kernel, pace = runtime.kernel, rng.choice((0, 0.002, 0.01))

    def forward(*args):
        time.sleep(rng.random() * pace)
        return kernel.forward(*args)

    def backward(*args):
        time.sleep(rng.random() * pace)
        return kernel.backward(*args)

    runtime.kernel = dataclasses.replace(kernel, forward=forward, backward=backward)
    whole = tensors(plan, 1, 8, seed)
    expected = shards(plan, dist.get_rank(), reference(*whole))
    local = shards(plan, dist.get_rank(), whole)
    found = [run(plan, *local) for _ in range(3)]  # calls without a barrier: ranks drift into one another's
    close_all()
    return [max(error(a, b, 1.0) for a, b in zip(results, expected, strict=True)) for results in found]


def order_of_work(plan: Plan) -> list[tuple[str, int]]:
    """What a forward does on this rank, in order: ``("batch", tick)`` issued, ``("kernel", query rows)``."""
    runtime, log, post = runtime_for(plan), [], Mailbox.post
    kernel = runtime.kernel

    def logged_post(self, sends, receives):
        log.extend(("batch", tick) for tick in sorted({message.tick for message, _ in (*sends, *receives)}))
        post(self, sends, receives)

    def logged_forward(q, *args):
        log.append(("kernel", q.shape[2]))
        return kernel.forward(q, *args)

    runtime.kernel = dataclasses.replace(kernel, forward=logged_forward)
    Mailbox.post = logged_post
    try:
        q, k, v, _ = shards(plan, dist.get_rank(), tensors(plan, 1, 8, 0))
        attend(q, k, v, plan=plan)
    finally:
        Mailbox.post = post
    close_all()
    return log


def fake_shapes(plan: Plan) -> bool:
    """Whether the operator's fake outputs have the shapes, strides and dtypes of the real ones."""
    runtime = runtime_for(plan)
    q, k, v, _ = shards(plan, dist.get_rank(), tensors(plan, 2, 8, 0))
    real = torch.ops.hexiseq.attend(q, k, v, None, runtime.handle, 1, True, 0, 0.3)
    with FakeTensorMode() as mode:
        fake = torch.ops.hexiseq.attend(
            *(mode.from_tensor(t) for t in (q, k, v)), None, runtime.handle, 1, True, 0, 0.3
        )
    close_all()
    return all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) for a, b in zip(real, fake, strict=True)
    )


def alone(plan: Plan) -> float:
    """Largest error of a plan of one rank."""
    whole = tensors(plan, 2, 8, 0)
    expected = reference(*whole)
    worst = max(error(a, b, 1.0) for a, b in zip(run(plan, *whole), expected, strict=True))
    close_all()
    return worst


def closed(plan: Plan) -> str:
    """What using a closed runtime says, and that attention makes a new one."""
    runtime = runtime_for(plan)
    q, k, v, _ = shards(plan, dist.get_rank(), tensors(plan, 1, 8, 0))
    runtime.close()
    runtime.close()
    try:
        torch.ops.hexiseq.attend(q, k, v, None, runtime.handle, 1, True, 0, 0.3)
        said = "nothing"
    except RuntimeError as caught:
        said = str(caught)
    attend(q, k, v, plan=plan)
    assert runtime_for(plan) is not runtime
    close_all()
    return said


def refused(plan: Plan) -> dict[str, str]:
    """What `attend` says to each kind of wrong tensor. Every rank asks, none communicates."""
    rank = dist.get_rank()
    q, k, v, _ = shards(plan, rank, tensors(plan, 1, 8, 0))
    wrong = {
        "tokens": (torch.cat([q, q[:, :1]], 1), k, v),
        "q heads": (q[:, :, 1:], k, v),
        "kv heads": (q, torch.cat([k, k], 2), v),
        "v heads": (q, k, v[:, :, 1:]),
        "dtype": (q, k.float(), v),
        "batch": (q, k, torch.cat([v, v])),
        "dim": (q, k[..., 1:], v),
        "rank": (q[0], k, v),
        "device": (q, k, v.to("meta")),
        "no tensor": (q, k, None),
        "sparse": (q, k.to_sparse(), v),
        "no dim": (q[..., :0], k[..., :0], v[..., :0]),
        "scale": ((q, k, v), {"scale": 0.0}),
        "documents": ((q, k, v), {"documents": [0, plan.seq_len]}),
        "fraction": ((q, k, v), {"documents": [[0, 3.7, plan.seq_len]]}),
    }
    said = {}
    for name, inputs in wrong.items():
        tensors_, options = inputs if len(inputs) == 2 else (inputs, {})
        try:
            attend(*tensors_, plan=plan, **options)
            said[name] = "nothing"
        except ValueError as caught:
            said[name] = str(caught)
    close_all()
    return said


def runtime_error(plans: list[Plan]) -> str:
    """What `Runtime` says to the plan this rank brings."""
    try:
        Runtime(plans[dist.get_rank()]).close()
    except ValueError as caught:
        return str(caught)
    return "nothing"


def peer_fails(plan: Plan, failing: int, how: str, backward: bool) -> str:
    """Attention during which one rank dies or stops; what the others are told."""
    rank = dist.get_rank()
    runtime = Runtime(plan, timedelta(seconds=2))
    q, k, v, dout = shards(plan, rank, tensors(plan, 1, 8, 0))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*inputs, plan=plan) if backward else None
    if backward:  # which would find the peer missing before any of its own messages is
        runtime.agree = lambda *_, **__: None
    dist.barrier()
    if rank == failing:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6.0)
        return "slept"
    try:
        if out is None:
            attend(*inputs, plan=plan)
        else:
            torch.autograd.grad(out, inputs, dout)
    except RuntimeError as caught:
        if how == "dies":
            raise
        return str(caught)
    return "nothing"


def raise_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise KeyError("a mistake")
    return dist.get_rank()


def hang_on(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(100)
    return dist.get_rank()


def forward_and_backward(plan: Plan, batch: int, dim: int, mask: dict | None = None) -> tuple:
    """A call's forward, and then its backward, as functions; the plan's runtime is made beforehand."""
    q, k, v, dout = (t.contiguous() for t in shards(plan, dist.get_rank(), tensors(plan, batch, dim, 0)))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    runtime_for(plan)
    made = []

    def forward():
        made.append(attend(*inputs, plan=plan, **mask or {}))

    def backward():
        torch.autograd.grad(made.pop(), inputs, dout)

    return forward, backward


def bytes_sent(plan: Plan, batch: int, dim: int) -> list[list[int]]:
    """Bytes this rank hands to the process groups for each rank in forward and in backward, itself left out."""
    batches, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single
    sent = [0] * plan.world_size

    def counted_batch(ops):
        for op in ops:
            if op.op is dist.isend:
                sent[op.peer] += op.tensor.nbytes
        return batches(ops)

    def counted_all_to_all(output, source, output_sizes, input_sizes, group, **options):
        assert sum(input_sizes) == source.numel()
        for rank, size in zip(dist.get_process_group_ranks(group), input_sizes, strict=True):
            sent[rank] += size * source.element_size() * (rank != dist.get_rank())
        return all_to_all(output, source, output_sizes, input_sizes, group=group, **options)

    found = []
    passes = forward_and_backward(plan, batch, dim)
    dist.batch_isend_irecv, dist.all_to_all_single = counted_batch, counted_all_to_all
    try:
        for one in passes:
            one()
            found.append(sent[:])
            sent[:] = [0] * plan.world_size
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = batches, all_to_all
    close_all()
    return found


def collectives(plan: Plan) -> list[dict[str, int]]:
    """How often this rank calls each function of torch.distributed in forward and in backward."""
    names = ("all_to_all_single", "batch_isend_irecv", "all_gather_single", "all_reduce", "barrier", "broadcast")
    plain, counts, found = {name: getattr(dist, name) for name in names}, Counter(), []

    def counted(name):
        def call(*args, **options):
            counts[name] += 1
            return plain[name](*args, **options)

        return call

    passes = forward_and_backward(plan, 1, 8)
    try:
        for name in names:
            setattr(dist, name, counted(name))
        for one in passes:
            one()
            found.append(dict(counts))
            counts.clear()
    finally:
        for name in names:
            setattr(dist, name, plain[name])
    close_all()
    return found


class _Copies(TorchDispatchMode):
    """Sums the bytes that copying operators write into tensors whose last dimension is `dim`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.bytes = dim, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        name = function.overloadpacket.__name__
        if name in ("copy_", "clone", "cat", "stack", "_to_copy", "contiguous") and out.shape[-1:] == (self.dim,):
            self.bytes += out.nbytes
        return out


def copied(plan: Plan, batch: int, dim: int) -> list[int]:
    """Bytes of tensors with heads that a call copies in forward and in backward."""
    from hexiseq.attention import op

    q, k, v, dout = (t.contiguous() for t in shards(plan, dist.get_rank(), tensors(plan, batch, dim, 0)))
    runtime = runtime_for(plan)
    found = []
    with _Copies(dim) as copies:
        out, lse = op.attend_op._init_fn(q, k, v, None, runtime.handle, 1, True, 0, 0.3)
        found.append(copies.bytes)
        op._attend_backward(runtime, runtime.route(), dout, q, k, v, out, lse, 0.3)
        found.append(copies.bytes - found[0])
    close_all()
    return found


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_over_calls(plan: Plan, first: int, calls: int) -> tuple[int, int, int]:
    """Over `calls` calls after `first`, with ever new documents: growth of memory; buffers kept before and after."""
    buffers = runtime_for(plan).links.buffers
    for one in forward_and_backward(plan, 1, 8):  # without documents messages are longest
        one()
    seen = []
    for call in range(first + calls):
        edges = sorted({0, plan.seq_len, *random.Random(call).sample(range(1, plan.seq_len), 5)})
        for one in forward_and_backward(plan, 1, 8, {"documents": [edges], "window": plan.seq_len // 2}):
            one()
        if call + 1 in (first, first + calls):
            gc.collect()
            seen.append((_resident_bytes(), sum(t.nbytes for free in buffers._free.values() for t in free)))
    close_all()
    return seen[1][0] - seen[0][0], seen[0][1], seen[1][1]


class _Done:
    """Work that is done."""

    def wait(self) -> None:
        pass


def peak_bytes(plan: Plan, batch: int, dim: int) -> list[int]:
    """Most bytes allocated at one time in a forward and in a backward, results included, buffers as on a GPU.

    There the allocator takes back at once what is handed back; here a CPU rank's own store would keep it. Kernels only
    allocate their results: their workspace is not attention's.
    """
    passes = forward_and_backward(plan, batch, dim)
    take, all_to_all = Lease.take, dist.all_to_all_single
    Lease.take = lambda self, like, shape, most=None, dtype=None: like.new_empty(shape, dtype=dtype or like.dtype)

    def finished(result, message, *args, **options):
        # What gloo's thread frees the profiler does not see: every reference of its own is gone before we go on.
        held = [x._use_count() for x in (result, message)]
        work = all_to_all(result, message, *args, **options)
        if work is not None:
            work.wait()
        del work
        while [x._use_count() for x in (result, message)] != held:
            time.sleep(1e-3)
        return _Done()

    def empty(x):
        return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)

    def forward(q, *_):
        return empty(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))

    def backward(_dout, q, k, v, *_):
        return empty(q), empty(k), empty(v)

    runtime = runtime_for(plan)
    runtime.kernel = dataclasses.replace(runtime.kernel, forward=forward, backward=backward)
    dist.all_to_all_single = finished
    found = []
    try:
        for one in passes:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                one()
            events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
            live = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
            found.append(int(live.max()))
    finally:
        Lease.take, dist.all_to_all_single = take, all_to_all
    close_all()
    return found


def disagreement(plan: Plan, what: str) -> str:
    """What attend says when the last rank calls differently."""
    odd = dist.get_rank() == plan.world_size - 1
    batch, options = 2 if odd and what == "batch" else 1, {}
    if odd and what == "scale":
        options["scale"] = 0.5
    if odd and what == "window":
        options["window"] = 3
    if odd and what == "causal":
        options["causal"] = False
    if what == "documents":
        options["documents"] = [[0, 4 + odd, plan.seq_len]]
    q, k, v, _ = shards(plan, dist.get_rank(), tensors(plan, batch, 8, 0))
    try:
        attend(q, k, v, plan=plan, **options)
        said = "nothing"
    except ValueError as caught:
        said = str(caught)
    close_all()
    return said


def out_of_step(plan: Plan) -> list[str]:
    """What ranks hear when the last one runs two backward passes in another order, and when it then skips a call."""
    odd = dist.get_rank() == plan.world_size - 1
    q, k, v, dout = shards(plan, dist.get_rank(), tensors(plan, 1, 8, 0))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    said = []

    def told(function):
        try:
            function()
            said.append("nothing")
        except (ValueError, RuntimeError) as caught:
            said.append(str(caught))

    outs = [attend(*inputs, plan=plan) for _ in range(2)]
    for out in reversed(outs) if odd else outs:
        told(lambda out=out: torch.autograd.grad(out, inputs, dout))
    if odd:  # refused here alone, before anybody communicates
        told(lambda: attend(q.float(), k, v, plan=plan))
    told(lambda: attend(*inputs, plan=plan))
    close_all()
    return said


def other_plan(first: Plan, second: Plan) -> str:
    """What is said when the last rank calls with another plan than the others, all of them made before."""
    odd = dist.get_rank() == first.world_size - 1
    for plan in (first, second):
        runtime_for(plan)
    plan = second if odd else first
    q, k, v, _ = shards(plan, dist.get_rank(), tensors(plan, 1, 8, 0))
    try:
        attend(q, k, v, plan=plan)
        said = "nothing"
    except ValueError as caught:
        said = str(caught)
    close_all()
    return said


def modes(plan: Plan) -> float:
    """Worst error of a call with gradients after one in inference mode. Second derivatives must be refused."""
    mask = {"documents": [[0, 5, plan.seq_len]]}
    whole = tensors(plan, 1, 8, 0)
    q, k, v, dout = shards(plan, dist.get_rank(), whole)
    with torch.inference_mode():
        attend(q, k, v, plan=plan, **mask)
    found = run(plan, q, k, v, dout, **mask)
    expected = shards(plan, dist.get_rank(), reference(*whole, **mask))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*inputs, plan=plan)
    refusal = ""
    try:
        torch.autograd.grad(out, inputs, dout, create_graph=True)
    except RuntimeError as caught:
        refusal = str(caught)
    assert "no second derivatives" in refusal
    close_all()
    return max(error(a, b, 1.0) for a, b in zip(found, expected, strict=True))


def fails_within(plan: Plan) -> list[str]:
    """What a rank hears whose kernel fails in a call, and what it hears in the next."""
    runtime = runtime_for(plan)

    def broken(*_):
        raise MemoryError("none left")

    runtime.kernel = dataclasses.replace(runtime.kernel, forward=broken)
    q, k, v, _ = shards(plan, dist.get_rank(), tensors(plan, 1, 8, 0))
    said = []
    for _ in range(2):
        try:
            attend(q, k, v, plan=plan)
        except (MemoryError, RuntimeError) as caught:
            said.append(f"{type(caught).__name__}: {caught}")
    return said


def compiled(plan: Plan) -> float:
    """Largest difference between a layer around attention and the same layer compiled, forward and gradients."""
    x = shards(plan, dist.get_rank(), tensors(plan, 1, 8, 3)[:1])[0]
    weights = [torch.nn.Parameter(torch.randn(8, 8, dtype=x.dtype, generator=torch.Generator().manual_seed(i)))
               for i in range(3)]  # fmt: skip

    def layer(x):
        q, k, v = ((x @ w).sin() for w in weights)
        kv = plan.num_kv_heads
        return (attend(q, k[:, :, :kv], v[:, :, :kv], plan=plan, window=5) + x).cos()

    found = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        inputs = x.clone().requires_grad_()
        out = function(inputs)
        found.append([out.detach(), *torch.autograd.grad((out**2).sum(), [inputs, *weights])])
    close_all()
    return max(error(a, b, 1.0) for a, b in zip(*found, strict=True))

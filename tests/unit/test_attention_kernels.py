"""Kernel adapters. The CUDA ones run here with stand-ins for the functions they call, of the very same signatures."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest
import torch

from hexiseq.attention import kernels
from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, FULL, cpu, dense, flash_attn2, torch_efficient, torch_flash
from hexiseq.attention.op import _merge

# (query rows, key rows, mask, query heads, KV heads)
CALLS = [
    (7, 7, CAUSAL, 4, 4), (7, 7, CAUSAL, 6, 2), (5, 9, FULL, 6, 2), (9, 5, FULL, 3, 1), (40, 33, FULL, 2, 2),
    (9, 9, ANTICAUSAL, 6, 2), (33, 33, ANTICAUSAL, 2, 2),
]  # fmt: skip


def make(sq, sk, h, k, dtype=torch.float64, seed=0):
    """q, k, v, dout as ``[B, H, S, D]`` views of ``[S, B, H, D]``, as the operator makes them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sq, 2, h, 8), (sk, 2, k, 8), (sk, 2, k, 8), (sq, 2, h, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).permute(1, 2, 0, 3) for s in shapes]


def autograd(q, k, v, dout, mask, scale):
    """out, lse, dq, dk, dv from the definition, gradients by autograd."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    ratio = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(ratio, 1).mT * scale
    minus = torch.full(scores.shape[2:], -torch.inf, dtype=scores.dtype)
    scores = scores + {FULL: 0, CAUSAL: minus.triu(1), ANTICAUSAL: minus.tril(-1)}[mask]
    out = scores.softmax(-1) @ v.repeat_interleave(ratio, 1)
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def results(kernel, q, k, v, dout, mask, scale):
    out, lse = kernel.forward(q, k, v, mask, scale)
    return [out, lse, *kernel.backward(dout, q, k, v, out, lse, mask, scale)]


@pytest.mark.parametrize("kernel", [cpu, dense])
@pytest.mark.parametrize("call", CALLS)
def test_kernel_equals_definition(kernel, call):
    sq, sk, mask, h, k = call
    inputs = make(sq, sk, h, k)
    for found, expected in zip(results(kernel, *inputs, mask, 0.3), autograd(*inputs, mask, 0.3), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_rounds_its_results_only(dtype):
    inputs = make(7, 7, 6, 2, dtype)
    expected = autograd(*(t.double() for t in inputs), CAUSAL, 0.3)
    found = results(dense, *inputs, CAUSAL, 0.3)
    assert found[0].dtype == found[2].dtype == dtype
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0].to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", [cpu, dense])
def test_parts_of_the_keys_with_global_out_and_lse_sum_to_the_whole(kernel):
    """What the ring relies on: backward of a part of the keys takes out and lse of all of them."""
    q, k, v, dout = make(6, 10, 4, 2)
    out, lse, dq, dk, _ = autograd(q, k, v, dout, FULL, 0.3)
    merged, merged_lse, found_dq, found_dk = torch.empty_like(out), torch.empty_like(lse), 0, []
    for i, part in enumerate((slice(0, 3), slice(3, 10))):
        part_out, part_lse = kernel.forward(q, k[:, :, part], v[:, :, part], FULL, 0.3)
        _merge(merged, merged_lse, part_out, part_lse, first=i == 0)
        a, b, _ = kernel.backward(dout, q, k[:, :, part], v[:, :, part], out, lse, FULL, 0.3)
        found_dq, found_dk = found_dq + a, [*found_dk, b]
    torch.testing.assert_close(merged, out, rtol=0, atol=1e-13)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-13)
    torch.testing.assert_close(found_dq, dq, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.cat(found_dk, 2), dk, rtol=0, atol=1e-13)


def test_merge_of_empty_rows_has_no_nan():
    """Rows: both empty, only the first, only the second (said as +inf), neither."""
    inf, one = torch.inf, torch.ones(1, 1, 4, 1)
    out, lse = one.clone(), torch.tensor([[[-inf, 0.0, -inf, 0.0]]])
    out[0, 0, 0] = out[0, 0, 2] = 0
    _merge(out, lse, torch.tensor([0.0, 0.0, 3.0, 3.0]).view(1, 1, 4, 1), torch.tensor([[[inf, inf, 2.0, 0.0]]]), False)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, 1.0, 3.0, 2.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([-inf, 0.0, 2.0, 0.6931472]))


def test_merge_does_not_write_into_the_kernels_result():
    out, lse = torch.empty(1, 1, 2, 1), torch.empty(1, 1, 2)
    part, part_lse = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 2)
    _merge(out, lse, part, part_lse, first=True)
    _merge(out, lse, part * 3, part_lse, first=False)
    assert part.eq(1).all()
    assert part_lse.eq(0).all()


def test_unknown_and_unusable_names():
    with pytest.raises(
        ValueError, match="kernel 'fast' is not one of cpu, dense, torch_flash, torch_efficient, flash_attn2"
    ):
        kernels.load("fast")
    if not torch.cuda.is_available():
        for name in ("torch_flash", "torch_efficient"):
            with pytest.raises(ValueError, match=f"kernel '{name}' cannot run here: it needs a CUDA device"):
                kernels.load(name)
    assert kernels.load("cpu").device == "cpu"
    assert kernels.load("dense").device is None


# Stand-ins: signatures are those of torch 2.13's operators and of flash-attn 2.8.


def flash_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert (dropout_p, return_debug_mask) == (0.0, False)
    out, lse = dense.forward(query, key, value, CAUSAL if is_causal else FULL, scale)
    return out, lse.contiguous(), None, None, query.shape[2], key.shape[2], torch.empty(2), torch.empty(()), None


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    assert (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p) == (None, None, query.shape[2], key.shape[2], 0.0)
    assert philox_seed.dtype == philox_offset.dtype == torch.uint64
    assert logsumexp.is_contiguous()
    return dense.backward(grad_out, query, key, value, out, logsumexp, CAUSAL if is_causal else FULL, scale)


def efficient_forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert (attn_bias, compute_log_sumexp, dropout_p) == (None, True, 0.0)
    assert key.shape[1] == query.shape[1], "it takes no fewer KV heads than query heads"
    out, lse = dense.forward(query, key, value, CAUSAL if is_causal else FULL, scale)
    padded = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.nan, dtype=lse.dtype)
    padded[:, :, : lse.shape[2]] = lse
    return out, padded, torch.empty(()), torch.empty(())


def efficient_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    assert (attn_bias, dropout_p, grad_input_mask) == (None, 0.0, [True, True, True, False])
    assert key.shape[1] == query.shape[1]
    assert logsumexp.shape[2] % 32 == 0
    assert logsumexp[:, :, query.shape[2] :].eq(torch.inf).all()
    lse = logsumexp[:, :, : query.shape[2]]
    return *dense.backward(grad_out_, query, key, value, out, lse, CAUSAL if is_causal else FULL, scale), None


def fa2_mask(causal, left, right):
    return {(True, -1, -1): CAUSAL, (False, -1, -1): FULL, (False, 0, -1): ANTICAUSAL}[causal, left, right]


def fa2_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    assert (dropout_p, softcap) == (0.0, 0.0)
    assert alibi_slopes is None
    assert not return_softmax
    out, lse = dense.forward(
        *(t.transpose(1, 2) for t in (q, k, v)), fa2_mask(causal, window_size_left, window_size_right), softmax_scale
    )
    return out.transpose(1, 2), lse, None, torch.empty(2)


def fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (dropout_p, softcap, deterministic) == (0.0, 0.0, False)
    assert softmax_lse.is_contiguous()
    grads = dense.backward(
        *(t.transpose(1, 2) for t in (dout, q, k, v, out)),
        softmax_lse,
        fa2_mask(causal, window_size_left, window_size_right),
        softmax_scale,
    )
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad.transpose(1, 2))


@pytest.fixture
def fake_flash_attn(monkeypatch):
    """A `flash_attn` distribution made of the stand-ins, on a machine with a GPU."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = fa2_forward, fa2_backward
    package.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"flash-attn": "2.8.3"}[name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return interface


@pytest.mark.parametrize("call", CALLS)
def test_cuda_adapters_call_their_functions_rightly(call, monkeypatch, fake_flash_attn):
    monkeypatch.setattr(torch_flash, "_forward", flash_forward)
    monkeypatch.setattr(torch_flash, "_backward", flash_backward)
    monkeypatch.setattr(torch_efficient, "_forward", efficient_forward)
    monkeypatch.setattr(torch_efficient, "_backward", efficient_backward)
    sq, sk, mask, h, k = call
    inputs = make(sq, sk, h, k)
    expected = autograd(*inputs, mask, 0.3)
    for kernel in (torch_flash, torch_efficient, flash_attn2):
        for found, right in zip(results(kernel, *inputs, mask, 0.3), expected, strict=True):
            assert found.shape == right.shape
            # The efficient adapter sums repeated KV heads in float32.
            torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-13 if h == k else 1e-6)


@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_backward", "efficient_attention",
                                  "efficient_attention_backward"])  # fmt: skip
def test_stand_ins_have_torchs_signatures(name):
    stand_in = {
        "flash_attention": flash_forward,
        "flash_attention_backward": flash_backward,
        "efficient_attention": efficient_forward,
        "efficient_attention_backward": efficient_backward,
    }[name]
    schema = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default._schema
    code = stand_in.__code__
    assert [a.name for a in schema.arguments] == list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def test_flash_attn_is_found_by_distribution_and_signature(monkeypatch, fake_flash_attn):
    assert flash_attn2.unusable() is None
    fake_flash_attn._flash_attn_forward = lambda q, k, v, dropout_p, softmax_scale, causal, window_size: None
    assert "_flash_attn_forward of flash-attn 2.8.3 takes (q, k, v" in flash_attn2.unusable()
    monkeypatch.undo()
    # The module alone is not enough: flash-attn-4 brings one of the same name.
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert flash_attn2.unusable() == "the distribution flash-attn is not installed"

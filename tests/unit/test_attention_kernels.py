"""Kernel adapters. The CUDA ones run here with CPU stand-ins of the same signatures for the functions they call."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
import types

import pytest
import torch

from hexiseq import plan, standins
from hexiseq.attention import kernels
from hexiseq.attention.kernels import (
    ANTICAUSAL,
    CAUSAL,
    FULL,
    cpu,
    dense,
    flash_attn2,
    flash_attn3,
    torch_efficient,
    torch_flash,
)
from hexiseq.attention.op import _merge

# (query rows, key rows, mask, query heads, KV heads)
CALLS = [
    (7, 7, CAUSAL, 4, 4), (7, 7, CAUSAL, 6, 2), (1, 1, CAUSAL, 2, 1), (5, 9, FULL, 6, 2), (9, 5, FULL, 3, 1),
    (40, 33, FULL, 2, 2), (1, 6, FULL, 4, 2), (9, 9, ANTICAUSAL, 6, 2), (33, 33, ANTICAUSAL, 2, 2),
    (1, 1, ANTICAUSAL, 2, 2),
]  # fmt: skip


def make(sq, sk, h, k, dtype=torch.float64, seed=0):
    """q, k, v, dout as ``[B, H, S, D]`` views of ``[S, B, H, D]``, as the operator makes them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sq, 2, h, 8), (sk, 2, k, 8), (sk, 2, k, 8), (sq, 2, h, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).permute(1, 2, 0, 3) for s in shapes]


def visible(mask, sq, sk):
    """Which keys each query attends to, ``[sq, sk]``."""
    rows, keys = torch.arange(sq)[:, None], torch.arange(sk)
    return {FULL: rows >= 0, CAUSAL: keys <= rows, ANTICAUSAL: keys >= rows}[mask].expand(sq, sk)


def autograd(q, k, v, dout, seen, scale):
    """out, lse, dq, dk, dv from the definition, gradients by autograd; `seen` as `visible` returns it, or a mask."""
    seen = visible(seen, q.shape[2], k.shape[2]) if isinstance(seen, str) else seen
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    ratio = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(ratio, 1).mT * scale).masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(ratio, 1)
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def results(kernel, q, k, v, dout, mask, scale):
    out, lse = kernel.forward(q, k, v, mask, scale)
    return [out, lse, *kernel.backward(dout, q, k, v, out, lse, mask, scale)]


@pytest.fixture(params=["cpu", "dense", "torch_flash", "torch_efficient", "flash_attn2", "flash_attn3",
                        "flash_attn3_later"])  # fmt: skip
def kernel(request, monkeypatch):
    """An adapter; those for CUDA call stand-ins, which accept float64 so that errors are visible."""
    monkeypatch.setattr(torch_flash, "_forward", flash_forward)
    monkeypatch.setattr(torch_flash, "_backward", flash_backward)
    monkeypatch.setattr(torch_efficient, "_forward", efficient_forward)
    monkeypatch.setattr(torch_efficient, "_backward", efficient_backward)
    with standins.install((torch.float64,)):
        if request.param == "flash_attn3_later":
            sys.modules["flash_attn_interface"].__dict__.update(standins.FLASH_ATTN_3_OPS)
        yield importlib.import_module(f"hexiseq.attention.kernels.{request.param.removesuffix('_later')}")


def tolerance(kernel):
    """The efficient adapter sums gradients of repeated KV heads in float32."""
    return 1e-6 if kernel is torch_efficient else 1e-13


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_kernel_equals_definition(kernel, call):
    sq, sk, mask, h, k = call
    inputs = make(sq, sk, h, k)
    for found, expected in zip(results(kernel, *inputs, mask, 0.3), autograd(*inputs, mask, 0.3), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance(kernel))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_rounds_its_results_only(dtype):
    inputs = make(7, 7, 6, 2, dtype)
    expected = autograd(*(t.double() for t in inputs), CAUSAL, 0.3)
    found = results(dense, *inputs, CAUSAL, 0.3)
    assert found[0].dtype == found[2].dtype == dtype
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0].to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, ANTICAUSAL])
def test_half_precision_errors_are_of_the_dtypes_rounding(dtype, mask):
    inputs = make(33, 33, 6, 2, dtype)
    expected = autograd(*(t.double() for t in inputs), mask, 0.3)
    with standins.install(standins.HALF):
        for kernel in (cpu, flash_attn2, flash_attn3):
            found = results(kernel, *inputs, mask, 0.3)
            assert [t.dtype for t in found] == [dtype, torch.float32, dtype, dtype, dtype]
            for a, b in zip(found, expected, strict=True):
                assert (a.double() - b).abs().max() <= 4 * torch.finfo(dtype).eps * b.abs().max()


def merged(kernel, q, k, v, dout, parts, global_out, global_lse):
    """out, lse, dq, dk, dv from calls on parts of the keys: (keys, mask) each."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float64)
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v))
    for i, (keys, mask) in enumerate(parts):
        part = k[:, :, keys], v[:, :, keys]
        _merge(out, lse, *kernel.forward(q, *part, mask, 0.3), first=i == 0)
        grads = kernel.backward(dout, q, *part, global_out, global_lse, mask, 0.3)
        for total, grad in zip((dq, dk[:, :, keys], dv[:, :, keys]), grads, strict=True):
            total += grad
    return [out, lse, dq, dk, dv]


def test_parts_of_the_keys_with_global_out_and_lse_sum_to_the_whole(kernel):
    """What the ring relies on: backward of a part of the keys takes out and lse of all of them."""
    inputs = make(6, 10, 4, 2)
    expected = autograd(*inputs, FULL, 0.3)
    parts = [(slice(0, 3), FULL), (slice(3, 10), FULL)]
    for found, right in zip(merged(kernel, *inputs, parts, *expected[:2]), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=tolerance(kernel))


def test_a_window_is_an_anticausal_and_a_causal_square(kernel):
    """Queries 8..15 of a window of 9: keys 0..7 at its far edge, keys 8..15 of their own."""
    inputs = make(8, 16, 4, 2)
    ahead = torch.arange(16) - torch.arange(8, 16)[:, None]
    expected = autograd(*inputs, (ahead <= 0) & (ahead > -9), 0.3)
    parts = [(slice(8, 16), CAUSAL), (slice(0, 8), ANTICAUSAL)]
    for found, right in zip(merged(kernel, *inputs, parts, *expected[:2]), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=tolerance(kernel))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, ANTICAUSAL])
def test_slices_of_wider_buffers(kernel, mask):
    """The operator passes slices of rows and heads, of lse too."""
    q, k, v, dout = make(16, 12, 8, 4)
    rows, heads, kv, keys = slice(5, 14), slice(2, 6), slice(1, 3), slice(2, 11)
    sliced = q[:, heads, rows], k[:, kv, keys], v[:, kv, keys], dout[:, heads, rows]
    expected = autograd(*(t.contiguous() for t in sliced), mask, 0.3)
    found_out, found_lse = kernel.forward(*sliced[:3], mask, 0.3)
    wide = torch.full((2, 8, 16), torch.nan, dtype=torch.float64)
    wide[:, heads, rows] = expected[1]
    out = torch.full((16, 2, 8, 8), torch.nan, dtype=torch.float64).permute(1, 2, 0, 3)
    out[:, heads, rows] = expected[0]
    grads = kernel.backward(sliced[3], *sliced[:3], out[:, heads, rows], wide[:, heads, rows], mask, 0.3)
    for found, right in zip([found_out, found_lse, *grads], expected, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=0, atol=tolerance(kernel))


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


# Which kernel can run, and which is chosen.


@pytest.fixture
def machine():
    """A function that makes this process see a GPU of a compute capability, or none, and installed distributions."""
    real = importlib.metadata.version
    with standins.install(standins.HALF), pytest.MonkeyPatch.context() as patch:
        stand_in = importlib.metadata.version

        def become(capability=None, installed=(), activated=None):
            patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
            patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
            patch.setattr(torch.cuda, "get_device_name", lambda: f"GPU {capability}")
            patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: activated)

            def version(name):
                return stand_in(name) if name in installed else real(name)

            patch.setattr(importlib.metadata, "version", version)

        yield become


@pytest.mark.parametrize(
    ("capability", "installed", "activated", "dtype", "chosen"),
    [
        (None, (), None, "bfloat16", "cpu"),
        (None, ("flash-attn", "flash-attn-3"), None, "float64", "cpu"),
        ((9, 0), ("flash-attn", "flash-attn-3"), None, "bfloat16", "flash_attn3"),
        ((9, 0), ("flash-attn",), None, "bfloat16", "flash_attn2"),
        ((9, 0), (), None, "float16", "torch_flash"),
        ((9, 0), ("flash-attn",), "FA3", "float16", "torch_flash"),
        ((8, 0), ("flash-attn", "flash-attn-3"), None, "bfloat16", "flash_attn2"),
        ((8, 9), (), None, "bfloat16", "torch_flash"),
        ((8, 0), (), "FA4", "bfloat16", "torch_efficient"),
        ((10, 0), ("flash-attn", "flash-attn-3"), None, "bfloat16", "flash_attn2"),
        ((10, 0), ("flash-attn", "flash-attn-3"), "FA4", "bfloat16", "torch_flash"),
        ((8, 0), ("flash-attn",), None, "float32", "torch_efficient"),
        ((7, 0), ("flash-attn",), None, "float16", "torch_efficient"),
    ],
)
def test_choice_follows_device_installation_and_dtype(machine, capability, installed, activated, dtype, chosen):
    machine(capability, installed, activated)
    name, reason = kernels.choose(dtype)
    assert name == chosen
    loaded = kernels.load("auto", dtype)
    assert loaded.name == chosen
    assert loaded.reason.startswith(reason)
    # What was passed over is said, with the reason.
    for other in kernels.ADAPTERS[: kernels.ADAPTERS.index(chosen)] if capability and not activated else ():
        assert f"not {other}: " in reason


@pytest.mark.parametrize(
    ("capability", "dtype", "problem"),
    [
        ((7, 0), "bfloat16", "torch_efficient: bfloat16 needs compute capability 8.0"),
        ((9, 0), "float64", "not in float64"),
    ],
)
def test_dense_is_not_chosen_for_a_gpu(machine, capability, dtype, problem):
    machine(capability)
    with pytest.raises(
        ValueError, match=rf"no kernel is made for {dtype} on GPU .*{problem}.*dense computes it if named"
    ):
        kernels.load("auto", dtype)
    assert kernels.load("dense", dtype).name == "dense"


def test_load_says_what_stands_behind_torch_flash(machine, caplog):
    machine((9, 0), activated="FA3")
    with caplog.at_level("INFO"):
        assert kernels.load("torch_flash", "bfloat16").reason == "as asked for; it runs FA3"
    assert "attention kernel torch_flash: as asked for; it runs FA3" in caplog.text
    machine((9, 0))
    assert kernels.load("torch_flash", "bfloat16").reason == "as asked for; it runs FA2"


@pytest.mark.parametrize(
    ("name", "capability", "installed", "activated", "dtype", "problem"),
    [
        ("torch_flash", None, (), None, "float16", "it needs a CUDA device and there is none"),
        ("torch_efficient", None, (), None, "float64", "it needs a CUDA device and there is none"),
        ("flash_attn2", None, (), None, "float16", "the distribution flash-attn is not installed"),
        ("flash_attn2", None, ("flash-attn",), None, "float16", "it needs a CUDA device and there is none"),
        ("flash_attn3", (9, 0), ("flash-attn",), None, "float16", "the distribution flash-attn-3 is not installed"),
        ("flash_attn3", (8, 0), ("flash-attn-3",), None, "float16", "it needs compute capability 9.0 and .* has 8.0"),
        ("flash_attn3", (10, 0), ("flash-attn-3",), None, "float16", "it is for compute capability 9.x and .* later"),
        ("torch_flash", (7, 5), (), None, "float16", "it needs compute capability 8.0 and .* has 7.5"),
        ("torch_flash", (8, 0), (), None, "float32", "it computes in float16 and bfloat16, not in float32"),
        ("torch_flash", (8, 0), (), "FA3", "float16", "FA3, which was activated in PyTorch, needs .* 9.x"),
        ("torch_flash", (8, 6), (), "FA4", "float16", "FA4, which was activated .* 9.x or 10.x"),
        ("torch_efficient", (7, 0), (), None, "bfloat16", "bfloat16 needs compute capability 8.0 .*use float16"),
        ("torch_efficient", (8, 0), (), None, "float64", "it computes in float32 .* not in float64"),
    ],
)
def test_unusable_kernels_say_why_and_what_can(machine, name, capability, installed, activated, dtype, problem):
    machine(capability, installed, activated)
    with pytest.raises(
        ValueError, match=f"kernel '{name}' cannot run here: {problem}.*; those that can, in {dtype}: .*dense"
    ):
        kernels.load(name, dtype)


def test_names_are_the_plans():
    assert set(kernels.NAMES) == set(plan.KERNELS)
    with pytest.raises(ValueError, match=r"kernel 'fast' is not one of flash_attn3, .*, auto"):
        kernels.load("fast", "float32")
    for dtype in plan.DTYPES:
        assert kernels.load("cpu", dtype).device == "cpu"
        assert kernels.load("dense", dtype).device is None


@pytest.mark.parametrize("adapter", [torch_flash, flash_attn2, flash_attn3])
def test_head_dims_that_flash_attention_refuses(adapter):
    assert adapter.refuses(64) is adapter.refuses(256) is None
    assert adapter.refuses(100) == "it takes head dims that are multiples of 8, not 100"
    assert adapter.refuses(264) == "it takes head dims up to 256, not 264"


def test_head_dims_that_others_refuse():
    assert torch_efficient.refuses(264) is cpu.refuses(7) is dense.refuses(7) is None
    assert torch_efficient.refuses(12) == "it takes head dims that are multiples of 8, not 12"


def test_flash_attn_is_found_by_distribution_and_signature(machine, monkeypatch):
    machine((9, 0), ("flash-attn", "flash-attn-3"))
    assert flash_attn2.unusable("float16") is flash_attn3.unusable("float16") is None
    two, three = sys.modules["flash_attn.flash_attn_interface"], sys.modules["flash_attn_interface"]
    for name, function in standins.FLASH_ATTN_3_OPS.items():
        monkeypatch.setattr(three, name, function)
    assert flash_attn3.unusable("float16") is None
    monkeypatch.setattr(two, "_flash_attn_forward", lambda q, k, v, dropout_p, softmax_scale, causal, window_size: None)
    assert "_flash_attn_forward of flash-attn 2.8.3 takes (q, k, v" in flash_attn2.unusable("float16")
    monkeypatch.delattr(three, "_flash_attn_backward")
    assert "_flash_attn_backward of flash-attn-3 3.0.0b1 takes (), not (dout, q" in flash_attn3.unusable("float16")


def test_parameters_of_custom_ops_are_their_functions():
    def function(q: torch.Tensor, window_size_left: int = -1) -> torch.Tensor:
        return q.clone()

    op = torch.library.custom_op("hexiseq_test::function", mutates_args=())(function)
    assert kernels.parameters(op) == kernels.parameters(function) == ("q", "window_size_left")
    assert kernels.parameters(None) == ()


def test_a_module_called_flash_attn_is_not_enough(monkeypatch):
    """flash-attn-4 brings one of the same name."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert flash_attn2.unusable("float16") == "the distribution flash-attn is not installed"


# Stand-ins of hexiseq.standins: parameters as read in flash-attn 2.8.3, its flash_attn and hopper folders, and for the
# later interface of flash-attn 3 in hopper/flash_attn_interface.py of the repository.

FA2_CALL = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
FA2_CALL_DEFAULTS = (
    "dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None"
)
FA2_FUNC = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, " \
           "deterministic=False, return_attn_probs=False"  # fmt: skip
RAGGED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
FA3_CACHE = (
    "k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, "
    "max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, "
    "v_descale"
)
FA3_REST = "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, " \
           "pack_gqa=None, sm_margin=0"  # fmt: skip
FA3_RAGGED = "cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k"


def defaulted(names, default="None"):
    return ", ".join(f"{name}={default}" for name in names.split(", "))


SIGNATURES = {
    standins.fa2_forward: f"q, k, v, {FA2_CALL}, return_softmax",
    standins.fa2_backward: f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {FA2_CALL}, deterministic, rng_state=None",
    standins.fa2_varlen_forward: f"q, k, v, {RAGGED}, {FA2_CALL_DEFAULTS}, return_softmax=False, block_table=None, "
    "leftpad_k=None, seqused_k=None, zero_tensors=False",
    standins.fa2_varlen_backward: f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {RAGGED}, {FA2_CALL}, deterministic, "
    "rng_state=None, zero_tensors=False",
    standins.fa2_func: f"q, k, v, {FA2_FUNC}",
    standins.fa2_varlen_func: f"q, k, v, {RAGGED}, {FA2_FUNC}, block_table=None",
    standins.fa3_forward: f"q, k, v, {FA3_CACHE}, softmax_scale, causal, window_size=(-1, -1), {FA3_REST}",
    standins.fa3_backward: f"dout, q, k, v, out, softmax_lse, {FA3_RAGGED}, dq, dk, dv, softmax_scale, causal, "
    "window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0",
    standins.fa3_func: "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0",
    standins.fa3_op_forward: f"q, k, v, {defaulted(FA3_CACHE.replace('out', 'out_'))}, softmax_scale=None, "
    f"causal=False, window_size_left=-1, window_size_right=-1, {FA3_REST}",
    standins.fa3_op_backward: f"dout, q, k, v, out, softmax_lse, {defaulted(FA3_RAGGED)}, {defaulted('dq, dk, dv')}, "
    "softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, "
    "deterministic=False, sm_margin=0",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_stand_ins_have_the_libraries_signatures(function):
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    found = ", ".join(str(p).replace(" = ", "=") for p in bare)
    assert found == SIGNATURES[function]


@pytest.mark.parametrize("window", [(-1, -1), (0, -1), (-1, 0), (2, 1), (3, -1), (100, 0)], ids=str)
@pytest.mark.parametrize("shape", [(7, 7), (5, 9), (9, 5)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_stand_ins_align_windows_at_the_end(shape, causal, window):
    sq, sk = shape
    left, right = window[0], 0 if causal else window[1]
    ahead = torch.arange(sk) - torch.arange(sk - sq, sk)[:, None]
    seen = (ahead >= (-left if left >= 0 else -99)) & (ahead <= (right if right >= 0 else 99))
    q, k, v, dout = (t.transpose(1, 2) for t in make(sq, sk, 6, 2))
    expected = autograd(*(t.transpose(1, 2) for t in (q, k, v, dout)), seen, 0.3)
    expected_out, expected_lse, *expected_grads = expected
    with standins.install((torch.float64,)):
        for function, empty in ((standins.fa2_forward, torch.inf), (standins.fa3_op_forward, -torch.inf)):
            limits = {
                "softmax_scale": 0.3,
                "causal": causal,
                "window_size_left": window[0],
                "window_size_right": window[1],
            }
            if function is standins.fa2_forward:
                limits.update(dropout_p=0.0, softcap=0.0, alibi_slopes=None, return_softmax=False)
            out, lse, *_ = function(q, k, v, **limits)
            assert out.is_contiguous()
            assert lse.is_contiguous()
            torch.testing.assert_close(out.transpose(1, 2), expected_out, rtol=0, atol=1e-13)
            torch.testing.assert_close(
                lse, expected_lse.masked_fill(expected_lse == -torch.inf, empty), rtol=0, atol=1e-13
            )
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        grads = torch.autograd.grad(
            standins.fa2_func(*leaves, softmax_scale=0.3, causal=causal, window_size=window), leaves, dout
        )
        for found, right_one in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(found.transpose(1, 2), right_one.nan_to_num(0.0), rtol=0, atol=1e-13)


def test_stand_ins_of_ragged_batches_equal_their_sequences():
    lengths, ends = (5, 1, 9), torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    q, k, v, dout = (t[0].transpose(0, 1) for t in make(15, 15, 4, 2))
    with standins.install((torch.float64,)):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        call = (ends, ends, 9, 9)
        out, lse, _ = standins.fa2_varlen_func(*leaves, *call, softmax_scale=0.3, causal=True, return_attn_probs=True)
        grads = torch.autograd.grad(out, leaves, dout)
        start = 0
        for length in lengths:
            rows = slice(start, start := start + length)
            parts = [t[None, rows].transpose(1, 2) for t in (q, k, v, dout)]
            expected = autograd(*parts, CAUSAL, 0.3)
            found = [
                out[None, rows].transpose(1, 2),
                lse[None, :, rows],
                *(g[None, rows].transpose(1, 2) for g in grads),
            ]
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
        # The private pair, writing into given buffers.
        private_out, private_lse, *_ = standins.fa2_varlen_forward(q, k, v, *call, 0.0, 0.3, True)
        buffers = [torch.empty_like(t) for t in (q, k, v)]
        standins.fa2_varlen_backward(
            dout, q, k, v, private_out, private_lse, *buffers, *call, 0.0, 0.3, True, -1, -1, 0.0, None, False
        )
        for a, b in zip([private_out, private_lse, *buffers], [out, lse, *grads], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_stand_ins_refuse_what_the_libraries_refuse():
    def forward(q, k=None, v=None):
        k = q if k is None else k
        return standins.fa2_forward(q, k, k if v is None else v, 0.0, 0.3, True, -1, -1, 0.0, None, False)

    q = torch.randn(1, 4, 4, 16, dtype=torch.bfloat16)
    out, lse, *_ = forward(q)
    for bad, text in (
        ((q.float(),), "fp16 and bf16"),
        ((q, q.half()), "query and key must have the same dtype"),
        ((q[..., :12],), "multiple of 8"),
        ((torch.randn(1, 2, 1, 264, dtype=torch.bfloat16),), "at most 256"),
        ((q, q[:, :, :3]), "must divide number of heads"),
        ((q[:0],), "batch size must be positive"),
        ((q, q, q[:, :3]), "shape"),
    ):
        with pytest.raises(RuntimeError, match=text):
            forward(*bad)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        standins.fa2_func(q, q, q, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="softcap"):
        standins.fa3_func(q, q, q, softcap=30.0)

    def backward(lse, dq):
        rest = (0.0, 0.3, True, -1, -1, 0.0, None, False)
        return standins.fa2_backward(q, q, q, q, out, lse, dq, None, None, *rest)

    assert backward(lse, torch.empty_like(q)).shape == (1, 4, 128)
    for call, text in (
        ((lse.transpose(1, 2).contiguous().transpose(1, 2), None), "softmax_lse must be contiguous"),
        ((lse, torch.empty_like(q, dtype=torch.float32)), "dq must have the same dtype"),
        ((lse, torch.empty(1, 4, 16, 4, dtype=q.dtype).mT), "dq must have contiguous last dimension"),
        ((lse, torch.empty_like(q)[:, :2]), "dq must have shape"),
    ):
        with pytest.raises(RuntimeError, match=text):
            backward(*call)
    # The public function pads what the private ones refuse.
    odd = q[..., :12]
    with pytest.raises(RuntimeError, match="multiple of 8"):
        standins.fa3_func(odd, odd, odd)
    padded = standins.fa2_func(odd, odd, odd, causal=True)
    exact = autograd(*(t.double().transpose(1, 2) for t in (odd, odd, odd, odd)), CAUSAL, 12**-0.5)[0]
    torch.testing.assert_close(padded.transpose(1, 2).double(), exact, rtol=0, atol=2e-2)


def test_install_is_undone():
    with standins.install((torch.float32,)):
        import flash_attn
        import flash_attn_interface
        from flash_attn import flash_attn_func

        assert importlib.util.find_spec("flash_attn") is not None
        assert flash_attn.__version__ == importlib.metadata.version("flash_attn") == "2.8.3"
        assert importlib.metadata.version("flash_attn_3") == "3.0.0b1"
        assert importlib.metadata.version("torch") == torch.__version__
        q = torch.randn(1, 3, 2, 8)
        assert flash_attn_func(q, q, q).dtype == flash_attn_interface.flash_attn_func(q, q, q).dtype == torch.float32
    with pytest.raises(RuntimeError, match="fp16 and bf16"):
        flash_attn_func(q, q, q)
    assert "flash_attn" not in sys.modules
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


# Stand-ins of PyTorch's CUDA operators, with the signatures of 2.13.


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
    assert logsumexp.is_contiguous()
    assert logsumexp[:, :, query.shape[2] :].eq(torch.inf).all()
    lse = logsumexp[:, :, : query.shape[2]]
    return *dense.backward(grad_out_, query, key, value, out, lse, CAUSAL if is_causal else FULL, scale), None


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
    assert [a.name for a in schema.arguments] == list(inspect.signature(stand_in).parameters)

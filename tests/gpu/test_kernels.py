"""Kernel adapters on a real GPU: ``pytest -m gpu tests/gpu``. Those this GPU cannot run are skipped with the reason."""

from __future__ import annotations

import pytest
import torch

from hexiseq.attention import kernels
from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, FULL, dense

pytestmark = pytest.mark.gpu

# torch_flash three times: as PyTorch ships it, and with FA3 and FA4 put behind its operators.
CHOICES = [*kernels.NAMES, "torch_flash FA3", "torch_flash FA4"]
# Of max|difference| / max|reference|, in units of the dtype's rounding.
ROUNDINGS = {"float16": 4, "bfloat16": 4, "float32": 64, "float64": 64}


@pytest.fixture(params=[(choice, dtype) for choice in CHOICES for dtype in ROUNDINGS], ids=" ".join)
def loaded(request):
    """A kernel and a dtype it can run in."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    (name, _, activated), dtype = request.param[0].partition(" "), request.param[1]
    try:
        if activated:
            torch.nn.attention.activate_flash_attention_impl(activated)
        kernel = kernels.load(name, dtype)
        if kernel.device == "cpu":
            pytest.skip("a kernel for CPUs")
        yield kernel, getattr(torch, dtype)
    except (ValueError, ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    finally:
        if torch.nn.attention.current_flash_attention_impl() is not None:
            torch.nn.attention.restore_flash_attention_impl()


def make(sq, sk, h, k, dtype, dim=64):
    """q, k, v, dout as ``[B, H, S, D]`` views of ``[S, B, H, D]``, as the operator makes them."""
    torch.manual_seed(0)
    shapes = ((sq, 2, h, dim), (sk, 2, k, dim), (sk, 2, k, dim), (sq, 2, h, dim))
    return [torch.randn(shape, device="cuda", dtype=torch.float64).to(dtype).permute(1, 2, 0, 3) for shape in shapes]


def reference(q, k, v, dout, mask, scale=0.125):
    """out, lse, dq, dk, dv in float64, on the CPU."""
    q, k, v, dout = (t.double().cpu() for t in (q, k, v, dout))
    out, lse = dense.forward(q, k, v, mask, scale)
    return [out, lse, *dense.backward(dout, q, k, v, out, lse, mask, scale)]


def assert_close(found, expected, dtype, least=0.0):
    """Equal up to rounding of the largest value, or of `least` where that is larger."""
    expected = expected.to(found.device).double()
    error = ((found.double() - expected).abs().max() / expected.abs().max().clamp(min=least)).item()
    assert error <= ROUNDINGS[str(dtype).removeprefix("torch.")] * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("sq", "sk", "mask", "h", "k"),
    [
        (257, 257, CAUSAL, 4, 4),
        (256, 256, CAUSAL, 8, 2),
        (1, 1, CAUSAL, 4, 2),
        (257, 257, ANTICAUSAL, 8, 2),
        (256, 256, ANTICAUSAL, 3, 3),
        (1, 1, ANTICAUSAL, 4, 2),
        (129, 513, FULL, 6, 2),
        (513, 1, FULL, 3, 1),
        (1, 96, FULL, 4, 2),
    ],
)
def test_forward_and_backward_equal_dense(loaded, sq, sk, mask, h, k):
    kernel, dtype = loaded
    inputs = q, k_, v, dout = make(sq, sk, h, k, dtype)
    expected_out, expected_lse, *expected_grads = reference(*inputs, mask)
    out, lse = kernel.forward(q, k_, v, mask, 0.125)
    assert lse.shape == (2, h, sq)
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=0, atol=1e-3)
    grads = kernel.backward(dout, q, k_, v, out, lse, mask, 0.125)
    for found, expected in zip((out, *grads), (expected_out, *expected_grads), strict=True):
        assert found.shape == expected.shape
        # With one key, dq and dk are zero: sums of rounding errors.
        assert_close(found, expected, dtype, least=10.0 if sk == 1 else 0.0)


@pytest.mark.parametrize("dim", [8, 80, 96, 128, 160, 192, 256])
def test_head_dims(loaded, dim):
    kernel, dtype = loaded
    assert kernel.refuses(dim) is None
    inputs = q, k, v, dout = make(65, 65, 4, 2, dtype, dim)
    out, lse = kernel.forward(q, k, v, CAUSAL, 0.125)
    grads = kernel.backward(dout, q, k, v, out, lse, CAUSAL, 0.125)
    expected_out, _, *expected_grads = reference(*inputs, CAUSAL)
    for found, expected in zip((out, *grads), (expected_out, *expected_grads), strict=True):
        assert_close(found, expected, dtype)


def test_backward_of_a_part_takes_global_out_and_lse(loaded):
    kernel, dtype = loaded
    inputs = q, k, v, dout = make(200, 300, 4, 2, dtype)
    out, lse, dq, dk, dv = reference(*inputs, FULL)
    out, lse = out.to("cuda", dtype), lse.to("cuda", torch.promote_types(dtype, torch.float32))
    total = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    for part in (slice(0, 100), slice(100, 300)):
        part_q, part_k, part_v = kernel.backward(dout, q, k[:, :, part], v[:, :, part], out, lse, FULL, 0.125)
        total += part_q
        assert_close(part_k, dk[:, :, part], dtype)
        assert_close(part_v, dv[:, :, part], dtype)
    assert_close(total, dq, dtype)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, ANTICAUSAL])
def test_strided_lse_and_slices(loaded, mask):
    """The operator passes slices of rows and heads of larger buffers."""
    kernel, dtype = loaded
    q, k, v, dout = make(96, 64, 8, 4, dtype)
    rows, heads, kv = slice(32, 96), slice(2, 6), slice(1, 3)
    sliced = q[:, heads, rows], k[:, kv], v[:, kv], dout[:, heads, rows]
    expected_out, expected_lse, *expected_grads = reference(*sliced, mask)
    out, lse = kernel.forward(*sliced[:3], mask, 0.125)
    wide = torch.full((2, 8, 96), torch.nan, device="cuda", dtype=lse.dtype)
    wide[:, heads, rows] = expected_lse.to(wide)
    wide_out = torch.full((96, 2, 8, 64), torch.nan, device="cuda", dtype=dtype).permute(1, 2, 0, 3)
    wide_out[:, heads, rows] = expected_out.to(wide_out)
    grads = kernel.backward(sliced[3], *sliced[:3], wide_out[:, heads, rows], wide[:, heads, rows], mask, 0.125)
    for found, expected in zip((out, *grads), (expected_out, *expected_grads), strict=True):
        assert_close(found, expected, dtype)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, ANTICAUSAL])
def test_deterministic_algorithms_repeat_bit_for_bit(loaded, mask):
    kernel, dtype = loaded
    q, k, v, dout = make(1024, 1024, 8, 2, dtype)
    out, lse = kernel.forward(q, k, v, mask, 0.125)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (kernel.backward(dout, q, k, v, out, lse, mask, 0.125) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)

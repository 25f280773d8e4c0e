"""Kernel adapters on a real GPU: ``pytest -m gpu tests/gpu``. Those this GPU cannot run are skipped with the reason."""

from __future__ import annotations

import pytest
import torch

from hexiseq.attention import kernels
from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, FULL, dense

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["torch_flash", "torch_efficient", "flash_attn2"])
def kernel(request):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        return kernels.load(request.param)
    except ValueError as error:
        pytest.skip(str(error))


def make(sq, sk, h, k, dtype, dim=64):
    """q, k, v, dout as ``[B, H, S, D]`` views of ``[S, B, H, D]``, as the operator makes them."""
    torch.manual_seed(0)
    shapes = ((sq, 2, h, dim), (sk, 2, k, dim), (sk, 2, k, dim), (sq, 2, h, dim))
    return [torch.randn(shape, device="cuda", dtype=torch.float64).to(dtype).permute(1, 2, 0, 3) for shape in shapes]


def dtypes():
    return [torch.float16] + ([torch.bfloat16] if torch.cuda.is_bf16_supported(including_emulation=False) else [])


def close(found, expected, dtype):
    error = (found.double() - expected.double()).abs().max() / expected.abs().max()
    return error.item() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("sq", "sk", "mask", "h", "k"),
    [
        (257, 257, CAUSAL, 4, 4),
        (256, 256, CAUSAL, 8, 2),
        (257, 257, ANTICAUSAL, 8, 2),
        (129, 513, FULL, 6, 2),
        (513, 1, FULL, 3, 1),
        (1, 96, FULL, 2, 2),
    ],
)
def test_forward_and_backward_equal_dense(kernel, sq, sk, mask, h, k):
    for dtype in dtypes():
        q, k_, v, dout = make(sq, sk, h, k, dtype)
        exact = [t.double() for t in (q, k_, v, dout)]
        out, lse = dense.forward(*exact[:3], mask, 0.125)
        grads = dense.backward(exact[3], *exact[:3], out, lse, mask, 0.125)
        found_out, found_lse = kernel.forward(q, k_, v, mask, 0.125)
        assert found_lse.shape == (2, h, sq)
        assert found_lse.dtype == torch.float32
        torch.testing.assert_close(found_lse.double(), lse, rtol=0, atol=1e-3)
        found = kernel.backward(dout, q, k_, v, found_out, found_lse, mask, 0.125)
        for a, b in zip((found_out, *found), (out, *grads), strict=True):
            assert close(a, b, dtype)


def test_backward_of_a_part_takes_global_out_and_lse(kernel):
    for dtype in dtypes():
        q, k, v, dout = make(200, 300, 4, 2, dtype)
        exact = [t.double() for t in (q, k, v, dout)]
        out, lse = dense.forward(*exact[:3], FULL, 0.125)
        _, dk, _ = dense.backward(exact[3], *exact[:3], out, lse, FULL, 0.125)
        part = slice(100, 300)
        _, found, _ = kernel.backward(dout, q, k[:, :, part], v[:, :, part], out.to(dtype), lse.float(), FULL, 0.125)
        assert close(found, dk[:, :, part], dtype)


def test_strided_lse_and_slices(kernel):
    """The operator passes slices of rows and heads of larger buffers."""
    dtype = torch.float16
    q, k, v, dout = make(96, 64, 8, 4, dtype)
    rows, heads, kv = slice(32, 96), slice(2, 6), slice(1, 3)
    plain = [q[:, heads, rows].contiguous(), k[:, kv].contiguous(), v[:, kv].contiguous()]
    out, lse = kernel.forward(*plain, FULL, 0.125)
    expected = kernel.backward(dout[:, heads, rows].contiguous(), *plain, out, lse, FULL, 0.125)
    wide = torch.zeros(2, 8, 96, device="cuda")
    wide[:, heads, rows] = lse
    found = kernel.backward(
        dout[:, heads, rows], q[:, heads, rows], k[:, kv], v[:, kv], out, wide[:, heads, rows], FULL, 0.125
    )
    for a, b in zip(found, expected, strict=True):
        assert close(a, b.double(), dtype)

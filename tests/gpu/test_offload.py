"""Layers' inputs in host memory on a real GPU: ``pytest -m gpu tests/gpu``. Needs one GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from hexiseq.offload import HostInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LAYERS, TOKENS, HIDDEN = 8, 16384, 4096
INPUT_BYTES = TOKENS * HIDDEN * 2


class Block(nn.Module):
    """So many FLOPs for each byte of its input that copies can hide behind them, and the same bits every time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(LAYERS)).to("cuda", torch.bfloat16)


def step(layers: nn.ModuleList, inputs: HostInputs | None) -> Tensor:
    """Forward and backward; the output's sum."""
    torch.manual_seed(1)
    hidden = torch.randn(1, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 1.0
    for index, layer in enumerate(layers):
        if inputs is None:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        else:
            with inputs.saving(index, hidden):
                hidden = checkpoint(layer, hidden, use_reentrant=False)
    total = hidden.float().sum()
    total.backward()
    return total.detach()


def gradients(layers: nn.ModuleList) -> list[Tensor]:
    """Taken off the device, whose memory is measured."""
    found = [p.grad.cpu() for p in layers.parameters()]
    layers.zero_grad(set_to_none=True)
    return found


def test_the_same_bits_in_less_memory():
    layers, inputs = blocks(), HostInputs(LAYERS)
    peaks, losses, grads = [], [], []
    # Again and again: host memory is used anew, and a copy that is not waited for would show.
    for store in (None, inputs, inputs, inputs):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        losses.append(step(layers, store))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        grads.append(gradients(layers))
    for loss, found in zip(losses[1:], grads[1:], strict=True):
        assert torch.equal(loss, losses[0])
        assert all(map(torch.equal, found, grads[0]))
    # All inputs but two: that of the layer at work and the one on its way.
    assert max(peaks[1:]) <= peaks[0] - 0.9 * (LAYERS - 2) * INPUT_BYTES
    assert inputs.host_bytes == inputs.free_bytes == (LAYERS - 1) * INPUT_BYTES


def test_copies_run_beside_kernels():
    layers, inputs = blocks(), HostInputs(LAYERS)
    step(layers, inputs)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(layers, inputs)
        torch.cuda.synchronize()
    copies: dict[str, list[tuple[int, int]]] = {"DtoH": [], "HtoD": []}
    kernels = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        span = event.start_ns(), event.end_ns()
        way = next((way for way in copies if way in event.name()), None)
        if way is None and "Mem" not in event.name():
            kernels.append(span)
        elif way is not None and span[1] - span[0] > 1e5:  # inputs, and no scalars
            copies[way].append(span)
    for way, spans in copies.items():
        assert len(spans) >= LAYERS - 1, way
        shared = sum(max(0, min(b, d) - max(a, c)) for a, b in spans for c, d in kernels)
        assert shared > 0.8 * sum(b - a for a, b in spans), way

"""Layers' inputs in host memory from forward to backward, where recompute keeps nothing else of them, or little.

On GPUs the copies run beside the kernels, on a stream of their own: a layer's input leaves while the layer is computed
forward, and comes back while the layer after it is computed backward. So a device holds two of them, whatever the
number of layers. The last layer's stays: backward begins with it. On CPUs an input is copied to other memory at once,
which saves nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Of host memory: PyTorch rounds what it pins up to a power of two, which would double some inputs.
PIECE_BYTES = 1 << 25


class Beside:
    """Issues copies: on GPUs on a stream of their own, behind what the current one has so far; on CPUs they run."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, device: torch.device, copy: Callable[[], None]) -> Callable[[], None]:
        """Returns what makes all kernels that are issued after it wait for these copies."""
        if device.type != "cuda":
            copy()
            return lambda: None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        issuing = torch.cuda.current_stream(device)
        self._stream.wait_stream(issuing)
        with torch.cuda.stream(self._stream):
            copy()
        done = self._stream.record_event()

        def wait() -> None:
            # Memory belongs to the stream that was current, whichever is by now.
            for stream in {issuing, torch.cuda.current_stream(device)}:
                stream.wait_event(done)

        return wait


class HostInputs:
    """The inputs of a model's layers, of all its forward passes whose backward is still to come.

    Args:
        beside: issues copies one after the other, each behind what is computed so far.

    Attributes:
        host_bytes: of host memory that was asked for; kept for later passes, whatever their shapes.
        free_bytes: of these, in nobody's use.
    """

    def __init__(
        self, layers: int, beside: Callable[[torch.device, Callable[[], None]], Callable[[], None]] | None = None
    ) -> None:
        self.layers, self.beside = layers, beside or Beside()
        self.host_bytes = self.free_bytes = 0
        self._free: dict[int, list[Tensor]] = {}
        self._latest: weakref.ref[_Input] | None = None

    def saving(self, layer: int, hidden: Tensor) -> saved_tensors_hooks:
        """A context in which this layer's input, of all that autograd saves, goes to host memory."""
        # A hook that held the input itself would keep it on the device.
        address, shape = hidden.data_ptr(), hidden.shape

        def pack(tensor: Tensor) -> Any:
            if tensor.data_ptr() != address or tensor.shape != shape:
                return tensor
            return self._put(layer, tensor.detach())

        return saved_tensors_hooks(pack, lambda packed: packed.take() if isinstance(packed, _Input) else packed)

    def _put(self, layer: int, tensor: Tensor) -> _Input:
        before = self._latest() if self._latest is not None and layer else None
        if before is not None:
            before.leave()
        found = _Input(self, tensor, before)
        if layer < self.layers - 1:
            found.send()
        self._latest = weakref.ref(found)
        return found

    def take_pieces(self, size: int, pinned: bool) -> list[Tensor]:
        """Host memory for so many bytes."""
        whole, rest = divmod(size, PIECE_BYTES)
        last = [1 << (rest - 1).bit_length()] if rest else []
        return [self._piece(piece, pinned) for piece in [PIECE_BYTES] * whole + last]

    def give_pieces(self, pieces: list[Tensor]) -> None:
        for piece in pieces:
            self._free.setdefault(len(piece), []).append(piece)
            self.free_bytes += len(piece)

    def _piece(self, size: int, pinned: bool) -> Tensor:
        if self._free.get(size):
            self.free_bytes -= size
            return self._free[size].pop()
        try:
            piece = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise RuntimeError(
                f"no host memory for layers' inputs beyond {self.host_bytes / 1e9:.3g} GB of this rank: {error}; set "
                "strategy.offload=false, or a smaller host_memory_gb of the cluster's nodes"
            ) from error
        self.host_bytes += size
        return piece


class _Input:
    """A layer's input: on the device, then in host memory, then on the device again.

    It owns its host memory and gives it back when autograd lets go of it, also after an error. Copies of a model follow
    one another, so what is given back may be written to at once, though a copy out of it is still to run.

    Attributes:
        here: on the device, or None.
        leaving, coming: while a copy is under way, what makes kernels wait for it.
    """

    def __init__(self, inputs: HostInputs, tensor: Tensor, before: _Input | None) -> None:
        self.inputs, self.before = inputs, before
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.pieces: list[Tensor] = []
        self.here: Tensor | None = tensor
        self.leaving: Callable[[], None] | None = None
        self.coming: Callable[[], None] | None = None

    def send(self) -> None:
        """Begin the copy to host memory."""
        assert self.here is not None
        self.here = self.here.contiguous()
        self.pieces = self.inputs.take_pieces(self.here.nbytes, self.device.type == "cuda")
        self.leaving = self.inputs.beside(self.device, partial(_copy, self.here, self.pieces, out=True))

    def leave(self) -> None:
        """Free the device's memory, for kernels that begin when the copy is done."""
        if self.leaving is not None:
            self.leaving()
            self.leaving = self.here = None

    def fetch(self) -> None:
        """Begin the copy to the device, if it is not there or under way."""
        if self.here is None:
            self.here = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.coming = self.inputs.beside(self.device, partial(_copy, self.here, self.pieces, out=False))

    def take(self) -> Tensor:
        """The input on the device. That of the layer before begins to come, too."""
        self.fetch()
        found = self.here
        assert found is not None
        if self.coming is not None:
            self.coming()
            self.coming = self.here = None
        if self.before is not None:
            self.before.fetch()
        return found

    def __del__(self) -> None:
        if self.coming is not None:
            self.coming()  # else what is written to might be another's by then
        self.inputs.give_pieces(self.pieces)


def _copy(tensor: Tensor, pieces: Sequence[Tensor], *, out: bool) -> None:
    for piece, part in zip(pieces, tensor.view(-1).view(torch.uint8).split(PIECE_BYTES), strict=True):
        target, source = (piece[: len(part)], part) if out else (part, piece[: len(part)])
        target.copy_(source, non_blocking=True)

"""Layers' inputs in host memory from forward to backward, where recompute keeps nothing else of them, or little.

On GPUs the copies run beside the kernels, on a stream of their own: a layer's input leaves while the layer is computed
forward, and comes back while the layer after it is computed backward. So a device holds two of them, whatever the
number of layers. The last layer's stays: backward begins with it. On CPUs an input is copied to other memory at once,
which saves nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Of host memory: PyTorch rounds what it pins up to a power of two, which would double some inputs.
PIECE_BYTES = 1 << 25


class HostInputs:
    """The inputs of a model's layers, of all its forward passes whose backward is still to come.

    Attributes:
        host_bytes: of host memory that was asked for; kept for later passes, whatever their shapes.
        free_bytes: of these, in nobody's use.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.host_bytes = self.free_bytes = 0
        self._free: dict[int, list[Tensor]] = {}
        self._latest: weakref.ref[_Input] | None = None
        self._stream: torch.cuda.Stream | None = None

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
        return [
            self._piece(piece, pinned) for piece in [PIECE_BYTES] * whole + [1 << (rest - 1).bit_length()] * (rest > 0)
        ]

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

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[torch.cuda.Stream | None]:
        """Copies issued inside run beside the kernels, behind all that is queued so far; None on CPUs."""
        if device.type != "cuda":
            yield None
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield self._stream


class _Input:
    """A layer's input: on the device, then in host memory, then on the device again.

    It owns its host memory and gives it back when autograd lets go of it, also after an error. All copies of a model
    are in one stream, so what is given back may be written at once, though a copy out of it is still queued.
    """

    def __init__(self, inputs: HostInputs, tensor: Tensor, before: _Input | None) -> None:
        self.inputs, self.before = inputs, before
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.pieces: list[Tensor] = []
        self.here: Tensor | None = tensor
        self.copied: torch.cuda.Event | None = None  # of the latest copy
        self.computing: torch.cuda.Stream | None = None  # whose memory a copy on its way in is written to

    def send(self) -> None:
        """Begin the copy to host memory."""
        assert self.here is not None
        self.here = self.here.contiguous()
        flat = self.here.view(-1).view(torch.uint8)
        self.pieces = self.inputs.take_pieces(len(flat), self.device.type == "cuda")
        with self.inputs.beside(self.device) as stream:
            self._each(lambda piece, part: piece.copy_(part, non_blocking=True), flat)
        if stream is None:
            self.here = None
        else:
            self.copied = stream.record_event()

    def leave(self) -> None:
        """Free the device's memory once the copy is done; kernels queued from now on wait for that."""
        if self.copied is not None and self.computing is None and self.here is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.here = None

    def fetch(self) -> None:
        """Begin the copy to the device, if it is not there or under way."""
        if self.here is not None:
            return
        self.here = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        flat = self.here.view(-1).view(torch.uint8)
        with self.inputs.beside(self.device) as stream:
            self._each(lambda piece, part: part.copy_(piece, non_blocking=True), flat)
        if stream is not None:
            self.copied, self.computing = stream.record_event(), torch.cuda.current_stream(self.device)

    def take(self) -> Tensor:
        """The input on the device. That of the layer before begins to come, too."""
        self.fetch()
        assert self.here is not None
        found = self.here
        if self.computing is not None:
            assert self.copied is not None
            torch.cuda.current_stream(self.device).wait_event(self.copied)
        if self.pieces:
            self.here = self.computing = None
        if self.before is not None:
            self.before.fetch()
        return found

    def _each(self, copy: Any, flat: Tensor) -> None:
        for piece, part in zip(self.pieces, flat.split(PIECE_BYTES), strict=True):
            copy(piece[: len(part)], part)

    def __del__(self) -> None:
        if self.computing is not None and self.copied is not None:
            self.computing.wait_event(self.copied)  # else what is written to might be another's by then
        self.inputs.give_pieces(self.pieces)

"""Attention kernels: one small adapter per implementation, all with the same two functions.

    forward(q, k, v, mask, scale) -> out, lse
    backward(dout, q, k, v, out, lse, mask, scale) -> dq, dk, dv

Tensors are ``[B, H, S, D]`` views with any strides but a contiguous last dimension; ``lse`` is ``[B, H, S]``, natural
logarithm, float32 (float64 for float64). ``H`` is a multiple of the KV heads. ``mask`` is ``FULL`` (any rectangle),
``CAUSAL`` (query row i attends to key rows j <= i) or ``ANTICAUSAL`` (to rows j >= i: the far edge of a window), the
latter two on squares only, since implementations differ in how they align such a mask on a rectangle. No call is empty.
``backward`` takes the *global* out and lse of its queries, of which the given keys may be a part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

FULL, CAUSAL, ANTICAUSAL = "full", "causal", "anticausal"
NAMES = ("cpu", "dense", "torch_flash", "torch_efficient", "flash_attn2")


@dataclass(frozen=True)
class Kernel:
    """An adapter that can be used in this process. ``device`` is the torch device type it needs, None for any."""

    name: str
    device: str | None
    forward: Callable[[Tensor, Tensor, Tensor, str, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, str, float], tuple[Tensor, Tensor, Tensor]]


def load(name: str) -> Kernel:
    """The kernel of that name.

    Raises:
        ValueError: the name is not one of `NAMES`, or this process cannot run it; says why.
    """
    if name not in NAMES:
        raise ValueError(f"kernel {name!r} is not one of {', '.join(NAMES)}")
    module = importlib.import_module(f"{__name__}.{name}")
    if (reason := module.unusable()) is not None:
        raise ValueError(f"kernel {name!r} cannot run here: {reason}; the choices are {', '.join(NAMES)}")
    return Kernel(name, module.DEVICE, module.forward, module.backward)


def reverse(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies of ``[B, H, S, ...]`` tensors with their rows in reverse order.

    An anticausal square is a causal one on reversed rows: so run kernels that know no anticausal mask.
    """
    return tuple(t.flip(2) for t in tensors)

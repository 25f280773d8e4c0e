"""Attention kernels: one small adapter per implementation, all with the same two functions.

    forward(q, k, v, causal, scale) -> out, lse
    backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv

Tensors are ``[B, H, S, D]`` views with any strides but a contiguous last dimension; ``lse`` is ``[B, H, S]``, natural
logarithm, float32 (float64 for float64). ``H`` is a multiple of the KV heads. Only square causal calls and full
rectangles are made, since implementations differ in how they align a rectangular causal mask, and no call is empty.
``backward`` takes the *global* out and lse of its queries, of which the given keys may be a part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

NAMES = ("cpu", "dense", "torch_flash", "torch_efficient", "flash_attn2")


@dataclass(frozen=True)
class Kernel:
    """An adapter that can be used in this process. ``device`` is the torch device type it needs, None for any."""

    name: str
    device: str | None
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]


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

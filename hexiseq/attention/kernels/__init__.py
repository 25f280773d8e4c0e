"""Attention kernels: one small adapter per implementation, all with the same two functions.

    forward(q, k, v, mask, scale) -> out, lse
    backward(dout, q, k, v, out, lse, mask, scale) -> dq, dk, dv

Tensors are ``[B, H, S, D]`` views with any strides but a contiguous last dimension; ``lse`` is ``[B, H, S]``, natural
logarithm, float32 (float64 for float64). ``H`` is a multiple of the KV heads. ``mask`` is ``FULL`` (any rectangle),
``CAUSAL`` (query row i attends to key rows j <= i) or ``ANTICAUSAL`` (to rows j >= i: the far edge of a window), the
latter two on squares only, since implementations differ in how they align such a mask on a rectangle. No call is empty.
``backward`` takes the *global* out and lse of its queries, of which the given keys may be a part.

An adapter also says what it cannot do: ``unusable(dtype)`` why it cannot run in this process, ``refuses(head_dim)`` why
it cannot take heads of that size; both return None where it can.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

FULL, CAUSAL, ANTICAUSAL = "full", "causal", "anticausal"
ADAPTERS = ("flash_attn3", "flash_attn2", "torch_flash", "torch_efficient", "cpu", "dense")
NAMES = (*ADAPTERS, "auto")


@dataclass(frozen=True)
class Kernel:
    """An adapter that can be used in this process.

    Attributes:
        name: one of `ADAPTERS`.
        device: the torch device type it needs, None for any.
        reason: why it is this one, and which implementation stands behind it where there are several.
        refuses: head dim -> why it cannot take heads of that size, or None.
    """

    name: str
    device: str | None
    reason: str
    forward: Callable[[Tensor, Tensor, Tensor, str, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, str, float], tuple[Tensor, Tensor, Tensor]]
    refuses: Callable[[int], str | None]


def load(name: str, dtype: str) -> Kernel:
    """The kernel of that name for inputs of that dtype; ``auto`` is the one `choose` names.

    Raises:
        ValueError: the name is not one of `NAMES`, or this process cannot run it in that dtype; says why, and which
            ones it can.
    """
    if name not in NAMES:
        raise ValueError(f"kernel {name!r} is not one of {', '.join(NAMES)}")
    reason = "as asked for"
    if name == "auto":
        name, reason = choose(dtype)
    adapter = _adapter(name)
    if (problem := adapter.unusable(dtype)) is not None:
        able = [other for other in ADAPTERS if _adapter(other).unusable(dtype) is None]
        raise ValueError(f"kernel {name!r} cannot run here: {problem}; those that can, in {dtype}: {', '.join(able)}")
    if name == "torch_flash":
        reason = f"{reason}; it runs {adapter.implementation()}"
    log.info("attention kernel %s: %s", name, reason)
    return Kernel(name, adapter.DEVICE, reason, adapter.forward, adapter.backward, adapter.refuses)


def choose(dtype: str) -> tuple[str, str]:
    """The fastest kernel this process can run in that dtype, and why it is that one.

    flash-attn 3 on Hopper, flash-attn 2 on Ampere and later, where installed; else PyTorch's own flash attention, and
    its memory-efficient attention on older GPUs. A process that has activated FA3 or FA4 in PyTorch gets that.

    Raises:
        ValueError: only the dense reference could; a job must ask for that by name.
    """
    if not torch.cuda.is_available():
        return "cpu", "there is no CUDA device"
    device = torch.cuda.get_device_name()
    activated = torch.nn.attention.current_flash_attention_impl()
    if activated is not None and _adapter("torch_flash").unusable(dtype) is None:
        return "torch_flash", f"{activated} was activated in PyTorch"
    passed_over: list[str] = []
    for name in ("flash_attn3", "flash_attn2", "torch_flash", "torch_efficient"):
        if (problem := _adapter(name).unusable(dtype)) is None:
            return name, "; ".join([f"the fastest for {dtype} on {device}", *passed_over])
        passed_over.append(f"not {name}: {problem}")
    raise ValueError(
        f"no kernel is made for {dtype} on {device}: {'; '.join(passed_over)}; "
        "kernel dense computes it if named, with the whole score matrix in memory"
    )


def _adapter(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


# Shared by adapters.


def anticausal_reversed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``forward`` or ``backward`` of a kernel that knows no anticausal mask.

    An anticausal square is a causal one with the rows of queries and keys in reverse order.
    """

    @functools.wraps(function)
    def run(*call: Any) -> tuple[Tensor, ...]:
        *tensors, mask, scale = call
        if mask != ANTICAUSAL:
            return function(*call)
        return tuple(t.flip(2) for t in function(*(t.flip(2) for t in tensors), CAUSAL, scale))

    return run


def cuda_unusable(dtype: str, dtypes: tuple[str, ...], least: tuple[int, int]) -> str | None:
    """Why a kernel for these dtypes and this compute capability or later cannot run `dtype` on the current device."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device and there is none"
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if capability < least:
        return f"it needs compute capability {_dotted(least)} and {name} has {_dotted(capability)}"
    if dtype not in dtypes:
        return f"it computes in {' and '.join(dtypes)}, not in {dtype}"
    if dtype == "bfloat16" and capability < (8, 0):
        return f"bfloat16 needs compute capability 8.0 and {name} has {_dotted(capability)}; use float16"
    return None


def odd_head_dim(head_dim: int, most: int | None) -> str | None:
    """Why a kernel that takes multiples of 8, up to `most` where it is given, cannot take `head_dim`."""
    if head_dim % 8:
        return f"it takes head dims that are multiples of 8, not {head_dim}"
    if most is not None and head_dim > most:
        return f"it takes head dims up to {most}, not {head_dim}"
    return None


@functools.cache
def parameters(function: Any) -> tuple[str, ...]:
    """Parameter names; those of the wrapped function where it is a `torch.library` custom op; none of None."""
    function = getattr(function, "_init_fn", function)
    return tuple(inspect.signature(function).parameters) if callable(function) else ()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"

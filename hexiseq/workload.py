"""The workload: a model's shape and what training it on a sequence takes, in FLOPs and bytes.

A multiply-add is two FLOPs; an attention score and its use are four per query head, pair and head dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hexiseq.plan import DTYPES, NO_OFFLOAD, RECOMPUTE_MODES

# Parameters, gradients and two Adam moments are kept in fp32, sharded over all ranks.
STATE_BYTES_PER_PARAMETER = 16
# Architectures whose layers obey sliding_window, with what Hugging Face takes where a config does not say.
WINDOWS = {"mistral": 4096, "ministral": 4096, "phi3": None, "starcoder2": None, "qwen2": 4096, "qwen3": 4096}


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLP and grouped-query attention.

    Attributes:
        window: a token attends to so many latest tokens, itself included; None: to all before it.
        full_layers: how many of the layers attend to all before, although there is a window.

    Raises:
        ValueError: a size that is not positive; query heads that are not a multiple of KV heads.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool = False
    window: int | None = None
    full_layers: int = 0

    def __post_init__(self) -> None:
        where = f"model {self.name!r}"
        if not isinstance(self.name, str):
            raise ValueError(f"model: name must be text, got {self.name!r}")
        if not isinstance(self.tied_embeddings, bool):
            raise ValueError(f"{where}: tied_embeddings must be true or false, got {self.tied_embeddings!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int | None" and value is None:
                continue
            least = 0 if field.name == "full_layers" else 1
            if field.type.startswith("int") and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                what = "a positive integer" if least else "an integer of at least 0"
                raise ValueError(f"{where}: {field.name} must be {what}, got {value!r}")
        if self.full_layers >= (self.layers if self.window else 1):
            raise ValueError(f"{where}: {self.full_layers} of {self.layers} layers without the window {self.window}; "
                             "a window needs layers that have it")  # fmt: skip
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{where}: {self.heads} query heads are not a multiple of {self.kv_heads} KV heads; "
                "set num_attention_heads to a multiple of num_key_value_heads"
            )

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention and MLP matrices and the two norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @functools.cached_property
    def embedding_parameters(self) -> int:
        """Input embedding and output head (one matrix when tied), and the last norm."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + self.hidden

    @functools.cached_property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters

    @functools.cached_property
    def kinds(self) -> tuple[ModelShape, ...]:
        """The layers by kind, as models of only such layers: those with a window, those without."""
        if not self.full_layers:
            return (self,)
        return (
            dataclasses.replace(self, layers=self.layers - self.full_layers, full_layers=0),
            dataclasses.replace(self, layers=self.full_layers, full_layers=0, window=None),
        )

    @staticmethod
    def from_hf_config(config: Mapping[str, Any], name: str | None = None) -> ModelShape:
        """Read the shape from the keys of a Hugging Face decoder config. Raises ValueError on a missing key."""
        if not isinstance(config, Mapping):
            raise ValueError(f"model {name or '?'!r}: the config must be a mapping, got {config!r}")
        label = name or str(config.get("model_type", "?"))
        required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if missing := [key for key in required if config.get(key) is None]:
            raise ValueError(f"model {label!r}: the config lacks {', '.join(missing)}")
        heads = config["num_attention_heads"]
        for key in ("num_attention_heads", "hidden_size"):
            if not isinstance(config[key], int) or isinstance(config[key], bool) or config[key] < 1:
                raise ValueError(f"model {label!r}: {key} must be a positive integer, got {config[key]!r}")
        tied = config.get("tie_word_embeddings")
        if tied is not None and not isinstance(tied, bool):
            raise ValueError(f"model {label!r}: tie_word_embeddings must be true or false, got {tied!r}")
        kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
        if head_dim is None:
            if config["hidden_size"] % heads:
                raise ValueError(
                    f"model {label!r}: hidden_size {config['hidden_size']} is not a multiple of num_attention_heads "
                    f"{heads}; set head_dim"
                )
            head_dim = config["hidden_size"] // heads
        window, full_layers = _window(config, label)
        return ModelShape(
            name=label,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            vocab=config["vocab_size"],
            tied_embeddings=bool(tied),
            window=window,
            full_layers=full_layers,
        )


def _window(config: Mapping[str, Any], label: str) -> tuple[int | None, int]:
    """Sliding window of a Hugging Face config, and how many layers go without it.

    Of architectures not in `WINDOWS` all layers count as attending to everything: an upper estimate.
    """
    kind, layers = config.get("model_type"), config["num_hidden_layers"]
    window = config.get("sliding_window", WINDOWS[kind]) if kind in WINDOWS else None
    if window is None:
        return None, 0
    full = 0
    if kind in ("qwen2", "qwen3"):
        if not config.get("use_sliding_window"):
            return None, 0
        full = min(layers, config.get("max_window_layers", 28))
    if (types := config.get("layer_types")) is not None:
        if not isinstance(types, Sequence) or len(types) != layers:
            raise ValueError(f"model {label!r}: layer_types must have an entry for each of {layers} layers")
        full = sum(entry != "sliding_attention" for entry in types)
    return (window, full) if full < layers else (None, 0)


@dataclass(frozen=True)
class Workload:
    """What one optimizer step processes.

    Attributes:
        sequences: sequences of one micro-step over all replicas.
        accumulation: micro-steps of an optimizer step.
        keep_parameters: keep gathered parameters after forward (``reshard_after_forward=False``).
        offload: keep the layers' inputs in host memory from forward to backward; with recompute alone.
    """

    model: ModelShape
    seq_len: int
    dtype: str
    recompute: str
    sequences: int
    accumulation: int
    keep_parameters: bool
    offload: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelShape):
            raise ValueError(f"workload: model must be a ModelShape, got {self.model!r}")
        for name in ("keep_parameters", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"workload: {name} must be true or false, got {getattr(self, name)!r}")
        for name, least in (("seq_len", 2), ("sequences", 1), ("accumulation", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"workload: {name} must be an integer of at least {least}, got {value!r}")
        for name, choices in (("dtype", tuple(DTYPES)), ("recompute", RECOMPUTE_MODES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"workload: {name} {getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.offload and self.recompute == "none":
            raise ValueError(f"workload: {NO_OFFLOAD}")

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype]

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.sequences * self.accumulation


def linear_flops(model: ModelShape) -> int:
    """Matrix FLOPs of one layer for one token, forward."""
    return 2 * (model.layer_parameters - 2 * model.hidden)


def attention_flops(model: ModelShape, pairs: float) -> float:
    """Attention FLOPs of one layer and one query head over `pairs` (query, key) pairs, forward."""
    return 4 * model.head_dim * pairs


def attended_pairs(end: Any, window: int | None) -> Any:
    """(query, key) pairs of a sequence's first `end` tokens, each with itself and those before it in the window.

    Args:
        end: a number, or an array of numbers.
    """
    if window is None:
        return end * (end + 1) // 2
    filling = np.minimum(end, window)
    return filling * (filling + 1) // 2 + (end - filling) * window


def all_pairs(model: ModelShape, seq_len: int) -> int:
    """(query, key) pairs of one query head and one sequence, summed over the layers."""
    return sum(kind.layers * attended_pairs(seq_len, kind.window) for kind in model.kinds)


def elementwise_bytes(model: ModelShape, element_bytes: int) -> int:
    """Bytes that a layer reads and writes for one token, forward, outside matrix products and attention.

    Norms, rotary embedding, activation, residuals: every operator on its own, as layers run that are not compiled.
    """
    turned = (model.heads + model.kv_heads) * model.head_dim
    return element_bytes * (22 * model.hidden + 12 * turned + 5 * model.intermediate)


def head_flops(model: ModelShape) -> int:
    """FLOPs of the output head for one token, forward."""
    return 2 * model.hidden * model.vocab


def model_flops(workload: Workload) -> float:
    """Useful FLOPs of an optimizer step: forward and backward, exact pairs, nothing recomputed (for MFU)."""
    model, n = workload.model, workload.seq_len
    forward = model.layers * linear_flops(model) * n + model.heads * attention_flops(model, all_pairs(model, n))
    return 3 * (forward + head_flops(model) * n) * workload.sequences * workload.accumulation

"""Plugs the attention of a plan into Hugging Face decoders, and computes their loss without the full logits.

No model code of our own: attention goes through transformers' attention-function registry, so pretrained weights load
and checkpoints export as they are. What the attention cannot do (sinks, soft caps, ...) is refused by name.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from hexiseq.attention import attend
from hexiseq.offload import HostInputs
from hexiseq.plan import NO_OFFLOAD, RECOMPUTE_MODES, Plan

IGNORED = -100
NAME = "hexiseq"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Config keys of things that change logits or loss outside the parts replaced here, and the values that do nothing.
_UNSUPPORTED = {
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "attention_dropout": (None, 0),
    "attention_chunk_size": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "output_router_logits": (None, False),
    "is_encoder_decoder": (None, False),
}


@dataclass
class PlanHolder:
    """What a model's attention layers and its strategy share: mutable, so that a live plan can replace another.

    Attributes:
        plan: the plan attention runs.
        loss_sum: sum of the token losses of the model's last forward with labels, a detached scalar.
        documents: per sequence of the batch in hand the boundaries attention stays within, as `attend` takes them; to
            be set before the forward. A recomputed forward takes those it ran with first.
    """

    plan: Plan
    loss_sum: Tensor | None = None
    documents: list[list[int]] | None = None


def build_model(config: Mapping[str, Any], dtype: torch.dtype, *, seed: int | None) -> PreTrainedModel:
    """A causal language model from the keys of a Hugging Face config. Nothing is downloaded.

    Args:
        config: with ``model_type``.
        dtype: of the parameters.
        seed: of the initial weights, which depend on nothing else; None leaves the model on the meta device, to be
            filled part by part with `materialize`.

    Raises:
        ValueError: an unknown model type, or values its config refuses.
    """
    values = dict(config)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ValueError("model.config lacks model_type, the name of a Hugging Face architecture such as llama")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), dtype=dtype)
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.config of model_type {model_type!r}: {error}") from None
    if seed is not None:
        materialize(model, model, seed, torch.device("cpu"))
    return model


def load_model(folder: str, config: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with the weights saved in a local folder, in memory as a whole.

    Args:
        config: as for `build_model`; it may differ from the saved one in what holds no weights, such as RoPE.

    Raises:
        ValueError: the folder is not a saved model, or its weights are not those of `config`.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"weights {folder!r} is not a folder; give that of a saved Hugging Face model")
    values = dict(config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=AutoConfig.for_model(values.pop("model_type", "?"), **values),
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"weights {folder!r} do not load: {error}") from None
    model, report = loaded
    if lacking := sorted(report["missing_keys"]):
        raise ValueError(f"weights {folder!r} lack {len(lacking)} of the model's parameters, such as {lacking[0]}")
    return model


def prepare(model: PreTrainedModel, holder: PlanHolder) -> None:
    """Make `model` compute on this rank's shard of ``holder.plan``: attention, loss and RoPE.

    Afterwards ``model(input_ids, position_ids, shift_labels, num_items_in_batch)`` takes the local tokens ``[B, L]``
    and returns ``loss``, the sum of the local token losses over `num_items_in_batch`, and no logits.

    Raises:
        ValueError: the model needs what the attention or the loss does not do, or has other heads than the plan.
    """
    _refuse(model.config, holder.plan)
    for layer in decoder_layers(model):
        for module in layer.modules():
            if not getattr(module, "is_causal", True):
                raise ValueError(f"{model.config.model_type}: {type(module).__name__} is not causal attention")
            if getattr(module, "sinks", None) is not None:
                raise ValueError(
                    f"{model.config.model_type}: {type(module).__name__} has attention sinks; not supported"
                )
            module._hexiseq = holder  # type: ignore[assignment]
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(f"model type {model.config.model_type!r} does not take its attention from the registry")
    model.config.use_cache = False
    model.forward = types.MethodType(partial(_forward, holder, model.forward), model)
    model._hexiseq = holder  # type: ignore[assignment]
    if not any(parameter.is_meta for parameter in model.parameters()):
        _fix_rope(model, holder.plan)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(f"model type {model.config.model_type!r} has no list of decoder layers named 'layers'")
    return layers


def apply_recompute(model: PreTrainedModel, mode: str, *, offload: bool = False) -> HostInputs | None:
    """Recompute activations in backward, per decoder layer.

    ``selective`` keeps what `attend` returned and recomputes the rest, so that no ring runs twice; ``full`` runs it
    again. All ranks must use the same mode: it decides which collectives run.

    Args:
        offload: keep the layers' inputs in host memory meanwhile.

    Returns:
        With `offload`, where they are.
    """
    if mode not in RECOMPUTE_MODES:
        raise ValueError(f"recompute {mode!r} is not one of {', '.join(RECOMPUTE_MODES)}")
    if offload and mode == "none":
        raise ValueError(NO_OFFLOAD)
    if mode == "none":
        return None
    settings = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_attention)}
    layers = decoder_layers(model)
    inputs = HostInputs(len(layers)) if offload else None
    for index, layer in enumerate(layers):
        saving = partial(inputs.saving, index) if inputs is not None else None
        run = partial(_checkpointed, settings if mode == "selective" else {}, saving)
        layers[index] = checkpoint_wrapper(layer, checkpoint_fn=run)
    return inputs


def materialize(model: PreTrainedModel, part: nn.Module, seed: int, device: torch.device) -> None:
    """Give `part` of a model on the meta device memory and initial weights, a function of seed and module name only.

    Parts that have memory already stay as they are, so that layers can be filled and sharded one by one.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for module in reversed(list(part.modules())):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        module.to_empty(device=device, recurse=False)
        # Wrappers of activation checkpointing must not change the weights.
        name = names[id(module)].replace("_checkpoint_wrapped_module.", "")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            model._init_weights(module)
    if part is model:
        model.tie_weights()
        holder = getattr(model, "_hexiseq", None)
        if holder is not None:
            _fix_rope(model, holder.plan)


def token_loss_sum(hidden_BLE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, labels_BL: Tensor) -> Tensor:
    """Sum of the cross entropies of ``hidden @ weight.T + bias`` over labels other than -100, without all logits."""
    hidden, labels = hidden_BLE.flatten(0, 1), labels_BL.flatten()
    liger = _liger() if hidden.is_cuda else None
    if liger is not None:
        return liger(weight_VE, hidden, labels, bias_V)
    # Rounded to a low-precision input's type, a sum over many tokens is useless; single token losses are not.
    low = hidden.dtype in (torch.bfloat16, torch.float16)
    losses = nn.functional.linear_cross_entropy(
        hidden,
        weight_VE,
        labels,
        linear_bias=bias_V,
        reduction="none" if low else "sum",
        ignore_index=IGNORED,
        options=nn.LinearCrossEntropyOptions(),
    )
    return losses.float().sum() if low else losses


def _liger() -> Callable[..., Tensor] | None:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")


def _forward(
    holder: PlanHolder,
    plain: Callable[..., Any],
    model: PreTrainedModel,
    *args: Any,
    shift_labels: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    labels: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    # Bound to the instance, and so inside the hooks of the FSDP root, where the head's weight is gathered.
    if labels is not None:
        raise ValueError("pass shift_labels: labels of a shard cannot be shifted, the next token may be another rank's")
    if shift_labels is None:
        return plain(*args, **kwargs)
    if num_items_in_batch is None:
        raise ValueError("shift_labels needs num_items_in_batch, the tokens the loss is divided by; pass on the batch")
    hidden = model.get_decoder()(*args, **{**kwargs, "use_cache": False}).last_hidden_state
    head = model.get_output_embeddings()
    total = token_loss_sum(hidden, head.weight, head.bias, shift_labels)
    holder.loss_sum = total.detach()
    return CausalLMOutputWithPast(loss=total / num_items_in_batch)


@torch.compiler.disable
def _attention(
    module: Any,
    query_BHLD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    attention_mask: Tensor | int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    holder: PlanHolder = module._hexiseq
    given = {"softcap": softcap, "s_aux": s_aux, "dropout": dropout or None}
    refused = [name for name, value in given.items() if value is not None]
    if isinstance(attention_mask, Tensor):
        refused.append("a mask")
    if refused:
        raise ValueError(f"{type(module).__name__}: attention over a plan takes no {', '.join(refused)}")
    # Stock attention takes the window from one of the two, depending on the implementation.
    if attention_mask != sliding_window:
        raise ValueError(
            f"{type(module).__name__}: the window of its mask is {attention_mask}, that of its attention "
            f"{sliding_window}; only layers where both agree are supported"
        )
    q, k, v = (x.transpose(1, 2) for x in (query_BHLD, key_BKLD, value_BKLD))
    return attend(q, k, v, plan=holder.plan, scale=scaling, documents=holder.documents, window=sliding_window), None


def _no_mask(
    *args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, use_vmap: bool = False, **_: Any
) -> int | None:
    """In the place of a layer's mask, its window: a model that puts it into the mask alone is found out."""
    if attention_mask is not None or use_vmap:
        what = "a mask of the model's own" if use_vmap else "attention_mask"
        raise ValueError(f"attention over a plan takes no {what}: nothing is padded, and documents mark what is packed")
    return local_size


def _checkpointed(
    settings: Mapping[str, Any], saving: Callable[[Tensor], Any] | None, layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a decoder layer, and once more in backward with the same documents: by then another batch may be in hand.

    Args:
        saving: given the layer's input, a context in which that is saved elsewhere.
    """
    holder: PlanHolder = layer._hexiseq
    documents = holder.documents

    def run(*args: Any, **kwargs: Any) -> Any:
        in_hand, holder.documents = holder.documents, documents
        try:
            return layer(*args, **kwargs)
        finally:
            holder.documents = in_hand

    if saving is not None and not args:
        raise ValueError(f"{type(layer).__name__} is not given its input first; set strategy.offload=false")
    with saving(args[0]) if saving is not None and torch.is_grad_enabled() else nullcontext():
        return checkpoint(run, *args, use_reentrant=False, **settings, **kwargs)


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op is torch.ops.hexiseq.attend.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _refuse(config: Any, plan: Plan) -> None:
    name = f"model type {config.model_type!r}"
    for key, neutral in _UNSUPPORTED.items():
        value = getattr(config, key, None)
        if value not in neutral:
            raise ValueError(f"{name}: {key}={value!r} is not supported; only {' or '.join(map(str, neutral))}")
    window = getattr(config, "sliding_window", None)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"{name}: sliding_window must be an integer of at least 1, or null; got {window!r}")
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise ValueError(f"{name}: layers of type {', '.join(sorted(others))} are not supported, only "
                         f"{', '.join(sorted(_LAYER_TYPES))}")  # fmt: skip
    heads = (config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if heads != (plan.num_heads, plan.num_kv_heads):
        raise ValueError(
            f"{name} has {heads[0]} query and {heads[1]} KV heads, the plan {plan.num_heads} and {plan.num_kv_heads}; "
            "plan for this model"
        )


def _fix_rope(model: PreTrainedModel, plan: Plan) -> None:
    """Compute length-dependent RoPE frequencies once, for the plan's whole sequence, not from a rank's positions."""
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            if any(k == "longrope" or "dynamic" in k for k in kind.values()):
                raise ValueError(f"model type {model.config.model_type!r}: RoPE types {kind} that depend on length, "
                                 "different by layer, are not supported")  # fmt: skip
        elif kind is not None and (kind == "longrope" or "dynamic" in kind):
            if kind not in ROPE_INIT_FUNCTIONS:
                raise ValueError(f"model type {model.config.model_type!r}: RoPE type {kind!r} is not supported")
            inv_freq, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, module.inv_freq.device, seq_len=plan.seq_len
            )
            module.inv_freq.copy_(inv_freq)
            module.rope_type = "default"  # no further updates

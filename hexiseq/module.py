"""A Hugging Face decoder as a LightningModule for `HexiSeqStrategy`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from typing_extensions import override

from hexiseq.models import build_model, load_model
from hexiseq.strategy import HexiSeqStrategy

OPTIMIZER_KEYS = ("lr", "betas", "weight_decay", "warmup_steps", "total_steps", "min_lr_ratio")


class CausalLM(pl.LightningModule):
    """Trains a decoder on next tokens, with AdamW, a linear warm-up and a cosine decay.

    Logs ``validation_loss``, the mean over all valid tokens of all ranks. The loss of training steps is in the
    strategy's `step_stats`.

    Args:
        config: keys of a Hugging Face config, with ``model_type``.
        optimizer: ``lr``, ``betas``, ``weight_decay`` (of matrices; vectors have none), ``warmup_steps``,
            ``total_steps`` (the decay ends there; 0 keeps the rate constant after warm-up) and ``min_lr_ratio`` (of the
            last rate to ``lr``).
        seed: of the initial weights.
        weights: folder of a saved Hugging Face model to start from instead.

    Raises:
        ValueError: naming the optimizer setting that is missing, unknown or out of range.
    """

    model: PreTrainedModel | None

    def __init__(
        self, config: Mapping[str, Any], optimizer: Mapping[str, Any], seed: int, weights: str | None = None
    ) -> None:
        super().__init__()
        # Plain containers only: checkpoints are loaded with weights_only.
        self.config, self.settings, self.seed, self.weights = _plain(config), _plain(optimizer), seed, weights
        _check(self.settings)
        hparams = {"config": self.config, "optimizer": self.settings, "seed": seed, "weights": weights}
        self.save_hyperparameters(hparams, logger=False)
        self.model = None

    @property
    def hexiseq(self) -> HexiSeqStrategy:
        strategy = self.trainer.strategy
        if not isinstance(strategy, HexiSeqStrategy):
            raise ValueError(f"CausalLM runs under HexiSeqStrategy, not {type(strategy).__name__}")
        return strategy

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        tokens, vocab = getattr(self.trainer.datamodule, "vocab_size", 0), self.config.get("vocab_size", 0)  # type: ignore[attr-defined]
        if tokens > vocab:
            raise ValueError(f"model.config.vocab_size {vocab} is smaller than the data's {tokens} tokens")
        dtype = self.hexiseq.parameter_dtype
        if self.weights is not None:
            self.model = self.hexiseq.parallelize(load_model(self.weights, self.config, dtype))
        else:
            self.model = self.hexiseq.parallelize(build_model(self.config, dtype, seed=None), self.seed)

    @override
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(**batch).loss

    @override
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(**batch).loss

    @override
    def on_validation_epoch_end(self) -> None:
        # Reduced already, so the same on all ranks: sync_dist would take means of means. Lightning would give it to the
        # loggers under the step before; `Throughput` does under the right one.
        loss = self.hexiseq.validation_stats().loss
        self.log("validation_loss", loss, logger=False, sync_dist=False, rank_zero_only=False)

    @override
    def configure_optimizers(self) -> Any:
        settings = self.settings
        decayed = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        plain = [p for p in self.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": settings["weight_decay"]},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = AdamW([g for g in groups if g["params"]], lr=settings["lr"], betas=tuple(settings["betas"]))
        schedule = LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        warmup, total, least = (self.settings[key] for key in ("warmup_steps", "total_steps", "min_lr_ratio"))
        if step < warmup:
            return (step + 1) / warmup
        if not total:
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or (hasattr(value, "__iter__") and not isinstance(value, (str, torch.Tensor))):
        return [_plain(item) for item in value]
    return value


def _check(settings: Mapping[str, Any]) -> None:
    if set(settings) != set(OPTIMIZER_KEYS):
        raise ValueError(
            f"optimizer settings must be {', '.join(OPTIMIZER_KEYS)}; got {', '.join(settings) or 'nothing'}"
        )
    if not (_is_number(settings["lr"]) and settings["lr"] > 0):
        raise ValueError(f"optimizer lr must be a positive number, got {settings['lr']!r}")
    betas = settings["betas"]
    if not isinstance(betas, list) or len(betas) != 2 or not all(_is_number(b) and 0 <= b < 1 for b in betas):
        raise ValueError(f"optimizer betas must be two numbers in [0, 1), got {betas!r}")
    for name in ("weight_decay", "warmup_steps", "total_steps"):
        if not (_is_number(settings[name]) and settings[name] >= 0):
            raise ValueError(f"optimizer {name} must be a number of at least 0, got {settings[name]!r}")
    if not (_is_number(settings["min_lr_ratio"]) and 0 <= settings["min_lr_ratio"] <= 1):
        raise ValueError(f"optimizer min_lr_ratio must be within [0, 1], got {settings['min_lr_ratio']!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

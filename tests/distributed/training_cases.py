"""What the training tests run in every rank, and the plain Hugging Face model in one process they compare it with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from hexiseq.data import HexiSeqDataModule, restarted_positions
from hexiseq.models import build_model, decoder_layers
from hexiseq.module import CausalLM
from hexiseq.plan import Plan, RankDevice, make_replica
from hexiseq.strategy import HexiSeqStrategy
from hexiseq.testing import as_launched

CONFIG = {
    "model_type": "llama",
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 288,
    "max_position_embeddings": 4096,
}
# A layer that sees everything, and one that sees the latest 25 tokens.
WINDOWS = {
    **{key: value for key, value in CONFIG.items() if key != "head_dim"},
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 25,
    "max_window_layers": 1,
}
OPTIMIZER = {
    "lr": 3e-3,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "warmup_steps": 0,
    "total_steps": 0,
    "min_lr_ratio": 0.0,
}
SEQ_LEN = 93  # the outermost back half-slot of 4 tokens holds one

UNEVEN = (make_replica(SEQ_LEN, 8, [(7, [(0, 30, 5), (1, 23, 4)]), (5, [(2, 40, 9)])]),)
PACKED = (make_replica(SEQ_LEN, 8, [(7, [(0, 30, 5), (1, 23, 4)]), (5, [(2, 40, 9)])], sequences=2),)
NO_TOKENS = (make_replica(SEQ_LEN, 8, [(7, [(0, 53, 4), (1, 0, 5)]), (5, [(2, 40, 9)])]),)
REPLICAS = (
    make_replica(SEQ_LEN, 8, [(8, [(2, 61, 9)]), (4, [(0, 32, 9)])], sequences=2),
    make_replica(SEQ_LEN, 8, [(12, [(1, 93, 9)])]),
)
TWO = (make_replica(SEQ_LEN, 8, [(8, [(1, 61, 9)]), (4, [(0, 32, 9)])]),)


def make_plan(replicas: tuple, *, dtype: str = "float64", recompute: str = "none", exchange: str = "ring") -> Plan:
    ranks = sum(len(replica.ranks) for replica in replicas)
    devices = tuple(RankDevice("cpu", "here", "cpu") for _ in range(ranks))
    return Plan("manual", SEQ_LEN, 9, 3, 8, 2, exchange, recompute, dtype, replicas, devices)


@dataclasses.dataclass
class Result:
    """Of a run, on every rank: exact losses of its steps, the last step's gradients after clipping, weights."""

    losses: list[float] = dataclasses.field(default_factory=list)
    valid: list[int] = dataclasses.field(default_factory=list)
    norms: list[float | None] = dataclasses.field(default_factory=list)
    grads: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class Recorded(CausalLM):
    """Fills a `Result` while it trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.result = Result()

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        stats = self.hexiseq.step_stats
        self.result.losses.append(stats.loss)
        self.result.valid.append(stats.valid_tokens)
        self.result.norms.append(stats.grad_norm)
        self.result.grads = full({n: p.grad for n, p in self.model.named_parameters()})

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.result.losses.append(float(self.model(**batch).loss) * batch["num_items_in_batch"])

    def on_train_end(self) -> None:
        self.result.weights = full(dict(self.model.named_parameters()))


class Compiled(Recorded):
    """Its decoder layers are compiled, around attention."""

    def configure_model(self) -> None:
        if self.model is None:
            model = build_model(self.config, self.hexiseq.parameter_dtype, seed=None)
            for layer in decoder_layers(model):
                layer.compile(backend="aot_eager")
            self.model = self.hexiseq.parallelize(model, self.seed)


class Watched(Recorded):
    """Notes after every forward of a micro-step how many of its layers' inputs are still in the device's memory."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.inputs: list[StorageWeakRef] = []
            self.left: list[int] = []
            for layer in decoder_layers(self.model):
                layer._checkpoint_wrapped_module.register_forward_pre_hook(
                    lambda _, args: self.inputs.append(StorageWeakRef(args[0].untyped_storage()))
                )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.inputs.clear()
        loss = super().training_step(batch, batch_idx)
        self.left.append(sum(not storage.expired() for storage in self.inputs))
        return loss


class Mean(CausalLM):
    """Returns what a user might: the mean over the rank's own tokens."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        valid = (batch["shift_labels"] != -100).sum().clamp(min=1)
        return self.model(**batch).loss * batch["num_items_in_batch"] / valid


class Unparallel(CausalLM):
    def configure_model(self) -> None:
        self.model = build_model(self.config, torch.float32, seed=0)


def full(tensors: dict[str, Any]) -> dict[str, Tensor]:
    whole = {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in tensors.items()}
    return {n.replace("_checkpoint_wrapped_module.", ""): t for n, t in whole.items()}


def micro_steps(plan: Plan, labelled: bool = True, packing: str | None = None) -> Iterator[dict[str, Any]]:
    """Batches of the whole job. Labels are missing at random, and wherever UNEVEN's and NO_TOKENS's last rank is.

    `packing`: None, ``documents`` for boundaries drawn at random, or ``restarted`` for positions that restart as well.
    """
    generator = torch.Generator().manual_seed(5)
    cuts = torch.Generator().manual_seed(6)
    while True:
        ids = torch.randint(0, 259, (plan.sequences, SEQ_LEN), generator=generator)
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -100, ids)
        labels[:, 28:76] = -100
        batch = {"input_ids": ids, "labels": labels if labelled else torch.full_like(ids, -100)}
        if packing:
            batch["documents"] = [
                [0, *sorted((torch.randperm(SEQ_LEN - 1, generator=cuts)[:count] + 1).tolist()), SEQ_LEN]
                for count in torch.randint(0, 8, (plan.sequences,), generator=cuts).tolist()
            ]
        if packing == "restarted":
            batch["position_ids"] = torch.from_numpy(np.stack([restarted_positions(d) for d in batch["documents"]]))
        yield batch


class Batches:
    """A rank's share of `micro_steps`."""

    def __init__(self, plan: Plan, labelled: bool = True, packing: str | None = None) -> None:
        self.plan, self.labelled, self.packing, replica = plan, labelled, packing, plan.place(dist.get_rank())[0]
        first = sum(r.sequences for r in plan.replicas[:replica])
        self.rows = slice(first, first + plan.replicas[replica].sequences)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in micro_steps(self.plan, self.labelled, self.packing):
            yield {name: value[self.rows] for name, value in batch.items()}


class Always:
    """The same batch again and again."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch)


def trainer(strategy: HexiSeqStrategy, **settings: Any) -> L.Trainer:
    as_launched()
    return L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        **settings,
    )


def exact_norms(dtype: str) -> None:
    """Hugging Face computes norms in float32 whatever the model's type; in a float64 comparison neither side may."""
    for norm in (LlamaRMSNorm, Qwen2RMSNorm):
        if "stock" not in vars(norm):
            norm.stock = norm.forward
        norm.forward = _norm if dtype == "float64" else norm.stock


def _norm(self: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


def train(
    plan: Plan,
    steps: list[int],
    clip: float | None,
    config: dict[str, Any] = CONFIG,
    packing: str | None = None,
    compiled: bool = False,
    **strategy: Any,
) -> Result:
    """Optimizer steps of `steps` micro-steps each; all equal but for a shorter last one."""
    exact_norms(plan.dtype)
    module = (Compiled if compiled else Recorded)(config, OPTIMIZER, seed=7)
    job = trainer(
        HexiSeqStrategy(plan, **strategy),
        max_epochs=1,
        limit_train_batches=sum(steps),
        accumulate_grad_batches=steps[0],
        gradient_clip_val=clip,
    )
    job.fit(module, Batches(plan, packing=packing))
    return module.result


def offloaded(plans: list[Plan], steps: list[int]) -> list[tuple[Result, list[int]]]:
    """Of each plan, runs with four layers: the result, and layers' inputs on the device when a forward has ended."""
    found = []
    for plan in plans:
        module = Watched({**CONFIG, "num_hidden_layers": 4}, OPTIMIZER, seed=7)
        job = trainer(
            HexiSeqStrategy(plan), max_epochs=1, limit_train_batches=sum(steps), accumulate_grad_batches=steps[0]
        )
        job.fit(module, Batches(plan, packing="documents"))
        found.append((module.result, module.left))
    return found


def plain_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    """Sum of the token losses of a plain model, and their number.

    Documents with positions that restart are left to Hugging Face, others are a block-diagonal mask.
    """
    documents, positions = batch.get("documents"), batch.get("position_ids")
    labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    mask = None
    if documents is not None:
        token, number = torch.arange(SEQ_LEN), torch.zeros_like(batch["input_ids"])
        for row, ends in enumerate(documents):
            labels[row, [end - 1 for end in ends]] = -100
            for start in ends[:-1]:
                number[row, start:] += 1
        if positions is None:
            mask = (token[:, None] >= token) & (number[:, :, None] == number[:, None, :])[:, None]
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, position_ids=positions, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, int((labels != -100).sum())


def reference(
    plan: Plan, steps: list[int], clip: float | None, config: dict[str, Any] = CONFIG, packing: str | None = None
) -> Result:
    """The same with the plain model in one process."""
    exact_norms(plan.dtype)
    dtype = torch.float64 if plan.dtype == "float64" else torch.float32
    model = build_model(config, dtype, seed=7)
    model.set_attn_implementation("sdpa")
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=tuple(OPTIMIZER["betas"]))
    batches = micro_steps(plan, packing=packing)
    result = Result()
    for accumulation in steps:
        optimizer.zero_grad()
        losses, counts = zip(*(plain_loss(model, next(batches)) for _ in range(accumulation)), strict=True)
        valid, total = sum(counts), sum(loss.item() for loss in losses)
        (sum(losses) / valid).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip).item() if clip is not None else None
        result.losses.append(total / valid)
        result.valid.append(valid)
        result.norms.append(norm)
        result.grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return result


def compare(
    plan: Plan,
    steps: list[int],
    clip: float | None,
    strategy: dict[str, Any],
    config: dict[str, Any] = CONFIG,
    packing: str | None = None,
    compiled: bool = False,
) -> dict[str, float]:
    """Largest differences between both ways, gradients relative to the largest value of each."""
    got = train(plan, steps, clip, config, packing, compiled, **strategy)
    wanted = reference(plan, steps, clip, config, packing)
    assert got.valid == wanted.valid
    assert got.grads.keys() == wanted.grads.keys()
    errors = {"loss": max(abs(a - b) / b for a, b in zip(got.losses, wanted.losses, strict=True))}
    errors["grads"] = max(((got.grads[n] - g).abs().max() / g.abs().max()).item() for n, g in wanted.grads.items())
    if clip is not None:
        errors["norm"] = max(abs(a - b) / b for a, b in zip(got.norms, wanted.norms, strict=True))
    return errors


def data_module(packed: bool = False) -> HexiSeqDataModule:
    synthetic = {"documents": 60, "length": 50, "vocab_size": 40, "noise": 0.1}
    marks = {"mask_documents": packed, "restart_positions": packed}
    return HexiSeqDataModule("synthetic", SEQ_LEN, 3, 0.05, synthetic=synthetic, **marks)


def run_to(step: int, plan: Plan, start: str | None, end: str | None) -> dict[str, Any]:
    """Train to an optimizer step, from a checkpoint and to another one, with a data position and a decaying rate."""
    exact_norms(plan.dtype)
    module = Recorded(CONFIG, {**OPTIMIZER, "warmup_steps": 2, "total_steps": 8}, seed=7)
    data = data_module()
    job = trainer(HexiSeqStrategy(plan), max_steps=step, accumulate_grad_batches=2, gradient_clip_val=1.0)
    job.fit(module, datamodule=data, ckpt_path=start)
    if end:
        job.save_checkpoint(end)
    weights = {n: w.double().numpy() for n, w in module.result.weights.items()}
    return {"losses": module.result.losses, "weights": weights, "consumed": data.sequences_consumed}


def tied(plan: Plan, folder: str) -> tuple[list[float], list[float]]:
    """Losses of four steps with tied embeddings, without and with an interruption."""
    exact_norms(plan.dtype)
    config = {**CONFIG, "tie_word_embeddings": True}
    modules = [Recorded(config, OPTIMIZER, seed=7) for _ in range(3)]
    data = data_module()
    for module, end, start in zip(modules, (4, 2, 4), (None, None, folder), strict=True):
        job = trainer(HexiSeqStrategy(plan), max_steps=end)
        data = data_module()
        job.fit(module, datamodule=data, ckpt_path=start)
        if end == 2:
            job.save_checkpoint(folder)
        assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
        weight = full({"w": module.model.lm_head.weight})["w"]
        assert weight.shape == (CONFIG["vocab_size"], CONFIG["hidden_size"])
    whole, first, second = (module.result.losses for module in modules)
    return whole, first + second


class Replace(L.Callback):
    """Another cut after every optimizer step."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = plans

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy.replace_plan(self.plans[trainer.global_step % 2])


def replaced(plans: list[Plan], other: Plan) -> tuple[list[float], list[float], str, float]:
    """Losses on one plan, on two by turns, what another recompute mode is told, and a validation after the fit."""
    exact_norms(plans[0].dtype)
    modules = [Recorded(CONFIG, OPTIMIZER, seed=7) for _ in range(2)]
    for module, callbacks in zip(modules, ([], [Replace(plans)]), strict=True):
        data = data_module()
        job = trainer(HexiSeqStrategy(plans[0]), max_steps=4, callbacks=callbacks)
        job.fit(module, datamodule=data)
    message = ""
    try:
        job.strategy.replace_plan(other)
    except ValueError as error:
        message = str(error)
    job.validate(module, datamodule=data, verbose=False)
    return modules[0].result.losses, modules[1].result.losses, message, float(job.callback_metrics["validation_loss"])


def validate(plan: Plan, packed: bool) -> tuple[float, float, float]:
    """Validation loss over the plan, the same by test steps, and of the plain model."""
    exact_norms(plan.dtype)
    module, data = Recorded(CONFIG, OPTIMIZER, seed=7), data_module(packed)
    job = trainer(HexiSeqStrategy(plan))
    job.validate(module, datamodule=data, verbose=False)
    validated = float(job.callback_metrics["validation_loss"])
    job.test(module, dataloaders=data.val_dataloader(), verbose=False)
    tested = torch.tensor(sum(module.result.losses))
    dist.all_reduce(tested)
    model = build_model(CONFIG, torch.float64, seed=7)
    total, valid = 0.0, 0
    for index in range(len(data.validation_source)):
        ids, labels = (torch.from_numpy(x)[None] for x in data.validation_source[index])
        batch = {"input_ids": ids, "labels": labels, **data.marks([data.validation_source.boundaries(index)])}
        loss, count = plain_loss(model, batch)
        total, valid = total + loss.item(), valid + count
    return validated, float(tested) / valid, total / valid


def refusal(kind: str, plan: Plan, folder: str) -> str:
    """The text of the ValueError this rank ends with."""
    exact_norms(plan.dtype)
    module: CausalLM = CausalLM(CONFIG, OPTIMIZER, seed=7)
    batches, settings, strategy = Batches(plan), {}, {}
    start: str | None = None
    if kind == "mean":
        module = Mean(CONFIG, OPTIMIZER, seed=7)
    elif kind == "unparallel":
        module = Unparallel(CONFIG, OPTIMIZER, seed=7)
    elif kind == "unlabelled":
        batches = Batches(plan, labelled=False)
    elif kind == "other model":
        start = folder
        module = CausalLM({**CONFIG, "intermediate_size": 80}, OPTIMIZER, seed=7)
    elif kind == "damaged checkpoint":
        start = folder
    elif kind == "no checkpoint":
        start = folder + "-nowhere"
    elif kind == "precision":
        settings["precision"] = "bf16-true"
    elif kind == "devices":
        strategy["identify"] = lambda device: ("cpu" if dist.get_rank() else "toaster", "here")
    elif kind == "other documents":
        batches = Always({**next(iter(batches)), "documents": [[0, 40 + dist.get_rank() // 2, SEQ_LEN]]})
    elif kind == "other sequences":
        first, second = itertools.islice(batches, 2)
        batches = Always(second if dist.get_rank() == 1 else first)
    elif kind == "boundaries":
        batches = Always({**next(iter(batches)), "documents": [[0, 50, 40, SEQ_LEN]]})
    elif kind == "no batch":
        batches = Always([next(iter(batches))])
    try:
        job = trainer(HexiSeqStrategy(plan, **strategy), max_steps=2, **settings)
        job.fit(module, batches, ckpt_path=start)
    except ValueError as error:
        return str(error)
    return "nothing refused"

"""Training over a plan equals training of the plain Hugging Face model in one process, and resumes where it stopped."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hexiseq.data import HexiSeqDataModule
from hexiseq.models import build_model
from hexiseq.module import CausalLM
from hexiseq.plan import Plan, RankDevice, make_replica
from hexiseq.strategy import HexiSeqStrategy

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
NO_TOKENS = (make_replica(SEQ_LEN, 8, [(7, [(0, 53, 4), (1, 0, 5)]), (5, [(2, 40, 9)])]),)
REPLICAS = (
    make_replica(SEQ_LEN, 8, [(8, [(2, 61, 9)]), (4, [(0, 32, 9)])], sequences=2),
    make_replica(SEQ_LEN, 8, [(12, [(1, 93, 9)])]),
)
TWO = (make_replica(SEQ_LEN, 8, [(8, [(1, 61, 9)]), (4, [(0, 32, 9)])]),)


def make_plan(replicas: tuple, *, dtype: str = "float64", recompute: str = "none") -> Plan:
    ranks = sum(len(replica.ranks) for replica in replicas)
    devices = tuple(RankDevice("cpu", "here", "cpu") for _ in range(ranks))
    return Plan("manual", SEQ_LEN, 9, 3, 8, 2, "ring", recompute, dtype, replicas, devices)


# --- what runs in the ranks


@dataclasses.dataclass
class Result:
    losses: list[float]
    valid: list[int]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    validation: float | None = None
    consumed: int = 0
    first_ids: list[int] = dataclasses.field(default_factory=list)


class Recorded(CausalLM):
    """Keeps each step's exact loss, and the gradients after clipping."""

    def configure_model(self) -> None:
        super().configure_model()
        self.losses: list[float] = []
        self.valid: list[int] = []
        self.grads: dict[str, Tensor] = {}

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.losses.append(self.hexiseq.step_stats.loss)
        self.valid.append(self.hexiseq.step_stats.valid_tokens)
        self.grads = full({n: p.grad for n, p in self.model.named_parameters()})


def full(tensors: dict[str, Any]) -> dict[str, Tensor]:
    whole = {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in tensors.items()}
    return {n.replace("_checkpoint_wrapped_module.", ""): t for n, t in whole.items()}


def micro_steps(plan: Plan) -> Iterator[dict[str, Tensor]]:
    """Whole batches of the job: labels are missing everywhere a middle rank would have them, and at random."""
    generator = torch.Generator().manual_seed(5)
    while True:
        ids = torch.randint(0, 259, (plan.sequences, SEQ_LEN), generator=generator)
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -100, ids)
        labels[:, 28:76] = -100
        yield {"input_ids": ids, "labels": labels}


class Batches:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, replica = plan, plan.place(rank)[0]
        first = sum(r.sequences for r in plan.replicas[:replica])
        self.rows = slice(first, first + plan.replicas[replica].sequences)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in micro_steps(self.plan):
            yield {name: value[self.rows] for name, value in batch.items()}


def trainer(strategy: HexiSeqStrategy, folder: str | None = None, **settings: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=strategy_world(),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        **settings,
    )


def strategy_world() -> int:
    return dist.get_world_size()


def exact_norms(dtype: str) -> None:
    """Hugging Face computes norms in float32 whatever the model's type; both sides of a float64 comparison must not."""

    def forward(self: LlamaRMSNorm, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    if dtype == "float64":
        LlamaRMSNorm.forward = forward


def train(plan: Plan, accumulation: int, clip: float | None, steps: int) -> Result:
    """Result of `steps` optimizer steps over the plan."""
    exact_norms(plan.dtype)
    module = Recorded(CONFIG, OPTIMIZER, seed=7)
    job = trainer(
        HexiSeqStrategy(plan), max_steps=steps, accumulate_grad_batches=accumulation, gradient_clip_val=clip
    )
    job.fit(module, Batches(plan, dist.get_rank()))
    return Result(module.losses, module.valid, module.grads, full(dict(module.model.named_parameters())))


def reference(plan: Plan, accumulation: int, clip: float | None, steps: int) -> Result:
    """The same with the plain model in one process."""
    exact_norms(plan.dtype)
    model = build_model(CONFIG, getattr(torch, plan.dtype), seed=7)
    model.set_attn_implementation("sdpa")
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=tuple(OPTIMIZER["betas"]))
    batches = micro_steps(plan)
    result = Result([], [], {}, {})
    for _ in range(steps):
        optimizer.zero_grad()
        micro = [next(batches) for _ in range(accumulation)]
        valid = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro)
        total = 0.0
        for batch in micro:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            (loss / valid).backward()
            total += loss.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        result.losses.append(total / valid)
        result.valid.append(valid)
        result.grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    result.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result


def compare(plan: Plan, accumulation: int, clip: float | None) -> dict[str, float]:
    """Largest differences between both ways, relative to the largest value of each gradient."""
    got, wanted = train(plan, accumulation, clip, 3), reference(plan, accumulation, clip, 3)
    assert got.valid == wanted.valid
    assert got.grads.keys() == wanted.grads.keys()
    worst = max(
        ((got.grads[n] - g).abs().max() / g.abs().max()).item() for n, g in wanted.grads.items()
    )
    loss = max(abs(a - b) / b for a, b in zip(got.losses, wanted.losses, strict=True))
    return {"grads": worst, "loss": loss}


def ranks_main(rank: int, world: int, store: str, calls: list, results: Any) -> None:
    warnings.filterwarnings("ignore")
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test", HEXISEQ_NODE="here",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for fn, args in calls:
        try:
            outcome = fn(*args)
        except Exception:
            outcome = traceback.format_exc()
        if rank == 0:
            results.put(outcome)
        dist.barrier()


def on_ranks(world: int, calls: list[tuple[Callable, tuple]]) -> list[Any]:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(ranks_main, (world, f"{folder}/store", calls, results), nprocs=world)
    return [results.get() for _ in calls]


if __name__ == "__main__":
    import sys
    calls = [
        (compare, (make_plan(UNEVEN), 3, 0.5)),
        (compare, (make_plan(UNEVEN, recompute="selective"), 1, None)),
        (compare, (make_plan(UNEVEN, recompute="full"), 3, 0.5)),
        (compare, (make_plan(NO_TOKENS, recompute="selective"), 3, 0.5)),
        (compare, (make_plan(REPLICAS), 3, 0.5)),
        (compare, (make_plan(UNEVEN, dtype="float32", recompute="selective"), 3, 0.5)),
    ]
    import time
    t = time.time()
    for r in on_ranks(3, calls):
        print(r)
    print(time.time() - t)

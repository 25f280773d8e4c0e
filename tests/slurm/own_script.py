"""A Lightning script of a user's own, started by srun with a task for each rank: what README promises, and no recipe.

Without Slurm it trains the same in one process.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hexiseq import HexiSeqStrategy, launch
from hexiseq.callbacks import Checkpoints
from hexiseq.environment import SlurmEnvironment
from hexiseq.module import CausalLM
from hexiseq.plan import Plan, RankDevice, make_replica

CONFIG = {"model_type": "llama", "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 288}  # fmt: skip
OPTIMIZER = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "warmup_steps": 0, "total_steps": 0,
             "min_lr_ratio": 0.0}  # fmt: skip
SEQ_LEN, STEPS = 96, 4


class Losses(L.Callback):
    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.is_global_zero:
            print(f"loss {trainer.strategy.step_stats.loss:.12f}", flush=True)


def main() -> None:
    task = launch.slurm.task()
    shares = [(7, [(0, 30, 5), (1, 26, 4)]), (5, [(2, 40, 9)])] if task else [(12, [(0, SEQ_LEN, 9)])]
    nodes = [node for node, count in zip(task.nodes, task.tasks, strict=True) for _ in range(count)] if task else ["x"]
    devices = tuple(RankDevice("cpu", node, "cpu") for node in nodes)
    replica = make_replica(SEQ_LEN, 8, shares)
    plan = Plan("manual", SEQ_LEN, 9, 3, 8, 2, "ring", "none", "float64", (replica,), devices)
    # Every sequence differs: a rank that reads another share of the data gives another loss.
    rows = torch.randint(0, 259, (STEPS, SEQ_LEN), generator=torch.Generator().manual_seed(5))
    folder = Path("checkpoints" if task else "checkpoints-alone")
    checkpoints = Checkpoints(folder, every=None, asked_to_stop=launch.asked_to_stop)
    launch.listen()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=task.tasks[task.node] if task else 1,
        num_nodes=len(task.nodes) if task else 1,
        strategy=HexiSeqStrategy(plan),
        plugins=[SlurmEnvironment()] if task else [],
        callbacks=[Losses(), checkpoints],
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    batches = DataLoader([{"input_ids": row} for row in rows], batch_size=1)  # Lightning gives it a sampler
    trainer.fit(CausalLM(CONFIG, OPTIMIZER, seed=7), batches)
    dist.barrier()
    dist.destroy_process_group()
    if checkpoints.stopped and task is not None and task.number == 0:
        launch.requeue()


if __name__ == "__main__":
    main()

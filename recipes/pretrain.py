"""Train a decoder from random weights over the run's plan: ``python -m recipes.pretrain RUN_DIR`` in every rank."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # What imports make stays; looking through it again and again takes an eighth of their time.
    gc.disable()

import logging
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import RichProgressBar
from typing_extensions import override

from hexiseq import HexiSeqStrategy, launch, picture
from hexiseq.callbacks import Checkpoints, Throughput, Traces
from hexiseq.environment import Launched
from hexiseq.module import CausalLM
from hexiseq.workload import ModelShape
from recipes.job import Job, data_module, load
from recipes.loggers import finish, loggers


def run(job: Job) -> None:
    """Train. Called on every rank, with the launcher's environment set."""
    quiet()
    config, trainer_config, checks = job.config, job.config["trainer"], job.config["launch"]
    accelerator = "cuda" if job.on_gpus else "cpu"
    if job.assigned:
        launch.settle(job.plan.devices, job.cores, job.berths)
    pl.seed_everything(config["seed"], verbose=False)

    strategy = HexiSeqStrategy(
        job.plan,
        reshard_after_forward=not config["strategy"]["keep_parameters"],
        timeout=timedelta(seconds=config["strategy"]["timeout_seconds"]),
        preflight=timedelta(seconds=checks["preflight_timeout_seconds"]) if checks["preflight"] else None,
        device_names=job.device_names,
        process_group_backend=None if job.on_gpus else "gloo",
    )
    model = config["model"]
    module = CausalLM(model["config"], config["recipe"]["optimizer"], config["seed"], weights=model["weights"])
    data = data_module(config)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", launch.world_size()))
    terminal = sys.stdout.isatty() and launch.rank() == 0
    checkpoints = Checkpoints(job.run_dir / "checkpoints", trainer_config["checkpoint_every"], launch.asked_to_stop)
    chosen = loggers(job)
    failed = True
    try:
        trainer = pl.Trainer(
            accelerator=accelerator,
            devices=min(here, torch.cuda.device_count()) if job.on_gpus else here,
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
            strategy=strategy,
            plugins=[Launched()],
            logger=chosen,
            callbacks=[*callbacks(job, terminal), checkpoints],
            max_epochs=-1,
            inference_mode=False,  # validation without gradients, but with tensors that training can go on using
            max_steps=trainer_config["max_steps"],
            accumulate_grad_batches=trainer_config["accumulation"],
            gradient_clip_val=trainer_config["gradient_clip"],
            **validation(job),
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=terminal,
            log_every_n_steps=1,
            default_root_dir=job.run_dir,
        )
        trainer.fit(module, datamodule=data, ckpt_path=config["ckpt_path"], weights_only=True)
        if trainer.is_global_zero:
            # Ranks may have been renamed to where the launcher put them.
            strategy.plan.save(job.run_dir / "plan.json")
            picture.draw_measured(job.run_dir)
        failed = False
    finally:
        finish(chosen, job.run_dir, failed)
    dist.destroy_process_group()
    if checkpoints.stopped and launch.rank() == 0:
        launch.requeue()


def quiet() -> None:
    """Keep a run's output to what its user can act on."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (
        ".*isinstance.treespec, LeafSpec.*",  # Lightning inside, torch's deprecation
        ".*Experiment logs directory.*exists and is not empty",  # the run folder has the plan already
        ".*sync_dist=True.*",  # what is logged is reduced already
    ):
        warnings.filterwarnings("ignore", message=message)


def validation(job: Job) -> dict[str, Any]:
    """Trainer arguments: counts are in sequences and optimizer steps here, in batches there."""
    config = job.config["trainer"]
    sequences, every = config["validation_sequences"], config["validate_every"]
    if not sequences or every is None:
        return {"limit_val_batches": 0}
    return {
        "limit_val_batches": -(-sequences // job.plan.sequences),
        "val_check_interval": every * config["accumulation"],
        "check_val_every_n_epoch": None,
    }


def callbacks(job: Job, terminal: bool) -> list[pl.Callback]:
    """What the run shows and logs."""
    config = job.config["trainer"]
    traced = config["trace_steps"]
    chosen: list[pl.Callback] = [
        Throughput(
            ModelShape.from_hf_config(job.config["model"]["config"], job.config["model"]["name"]),
            peaks(job),
            print_every=0 if terminal else config["print_every"] or 0,
            split_every=config["split_every"],
            folder=job.run_dir,
        )
    ]
    if traced is not None:
        chosen.append(Traces(job.run_dir / "traces", (traced[0], traced[1])))
    if terminal:
        chosen.append(Bar())
    return chosen


class Bar(RichProgressBar):
    """Lightning's bar, for training that has steps and no epochs."""

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        return "step"


def peaks(job: Job) -> dict[str, float]:
    """Dense peak of each device type, TFLOP/s. None in a rehearsal: its CPU ranks only bear the GPUs' names."""
    if job.target is not None or not job.config.get("cluster"):
        return {}
    return {name: float(entry["peak_tflops"]) for name, entry in job.config["cluster"]["gpus"].items()}


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    job = load(run_dir)
    launch.worker(lambda: run(job), run_dir, job.devices)

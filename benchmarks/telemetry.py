"""What telemetry costs: training steps without it, with the throughput callback, and with a sampled split, by turns.

    python -m benchmarks.telemetry                       # two ranks, tiny_llama, 2048 tokens
    python -m benchmarks.telemetry --seq 8192 --rounds 10

Printed are, per optimizer step, the ranks' CPU seconds together, rank 0's wall seconds, and the CPU seconds of rank 0's
main thread within the callback's own hooks: medians over rounds, and the median over rounds of the difference to the
step without, in percent. The order of the three changes from round to round. A machine that is busy with other things
blurs wall time; CPU time less so, and the hooks' own hardly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from benchmarks.ranks import core_of, cores, pin, ring_plan
from hexiseq import HexiSeqStrategy
from hexiseq.callbacks import Throughput
from hexiseq.module import CausalLM
from hexiseq.plan import Plan
from hexiseq.testing import Pool, as_launched
from hexiseq.workload import ModelShape

MODES = ("off", "on", "sampled")
WARM_UP = 3
CONF = Path(__file__).resolve().parents[1] / "conf"


class ByTurns(Throughput):
    """The callback, silent on every third step and sampling on every third."""

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        self.table: list[tuple[float, float, float]] = []  # CPU, wall and own CPU seconds of a step
        self._clock()

    def _clock(self) -> None:
        self.cpu, self.wall, self.own = time.process_time(), time.perf_counter(), 0.0

    def _mode(self) -> str:
        return MODES[mode_of(self._step)]

    def _call(self, hook: str, *args: Any) -> None:
        if self._mode() != "off":
            start = time.thread_time()
            getattr(super(), hook)(*args)
            self.own += time.thread_time() - start

    def _samples(self, step: int) -> bool:
        return self._mode() == "sampled"

    def on_train_batch_start(self, *args: Any) -> None:
        self._call("on_train_batch_start", *args)

    def on_after_backward(self, *args: Any) -> None:
        self._call("on_after_backward", *args)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._call("on_before_optimizer_step", *args)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._call("on_train_batch_end", trainer, *args)
        self._step = trainer.global_step
        dist.barrier()
        self.table.append((time.process_time() - self.cpu, time.perf_counter() - self.wall, self.own))
        self._begin()
        self._clock()


def mode_of(step: int) -> int:
    """Index of the mode of a step, counted from 0: each once a round, in another order each round."""
    turn, place = divmod(step, len(MODES))
    return (place + turn) % len(MODES)


class Always:
    """The same random tokens, for ever."""

    def __init__(self, seq_len: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batch = {"input_ids": torch.randint(0, vocab, (1, seq_len), generator=generator)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self._batch


def train(plan: Plan, config: dict[str, Any], steps: int, core_list: list[int]) -> list[tuple[float, float, float]]:
    """CPU and wall seconds of this rank's steps."""
    pin(core_of(dist.get_rank(), core_list))
    as_launched()
    optimizer = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "warmup_steps": 0, "total_steps": 0,
                 "min_lr_ratio": 0.0}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        watcher = ByTurns(ModelShape.from_hf_config(config), {"cpu": 0.1}, print_every=0, split_every=1,
                          folder=Path(folder))  # fmt: skip
        trainer = pl.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=HexiSeqStrategy(plan),
            plugins=[TorchElasticEnvironment()],
            logger=CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1), callbacks=[watcher],
            max_steps=steps, gradient_clip_val=1.0, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, use_distributed_sampler=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(CausalLM(config, optimizer, seed=0), Always(plan.seq_len, config["vocab_size"]))
    return watcher.table


def sorted_by_mode(seconds: list[float], turn: int) -> list[float]:
    return [seconds[(mode - turn) % len(MODES)] for mode in range(len(MODES))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = yaml.safe_load((CONF / "model" / "tiny_llama.yaml").read_text())["config"]
    plan = ring_plan(
        [2] * args.ranks, slot=args.seq // (2 * args.ranks), seq_len=args.seq, heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"], fusion=1, exchange="ring", dtype="float32",
    )  # fmt: skip
    steps = len(MODES) * (WARM_UP + args.rounds)
    with Pool(args.ranks, timeout=3600) as pool:
        tables = pool.run(train, plan, config, steps, cores(args.cores))
    cpu = [sum(table[step][0] for table in tables) for step in range(steps)]
    wall = [row[1] for row in tables[0]]
    result: dict[str, Any] = {"seq_len": args.seq, "ranks": args.ranks, "rounds": args.rounds}
    print(f"{args.ranks} ranks, {args.seq} tokens, {args.rounds} rounds")
    for name, seconds in (("cpu_seconds", cpu), ("wall_seconds", wall)):
        rounds = [
            sorted_by_mode(seconds[len(MODES) * r : len(MODES) * (r + 1)], r)
            for r in range(WARM_UP, WARM_UP + args.rounds)
        ]
        for mode, label in enumerate(MODES):
            median = statistics.median(r[mode] for r in rounds)
            more = statistics.median((r[mode] - r[0]) / r[0] for r in rounds)
            result[f"{label}_{name}"], result[f"{label}_{name}_more"] = median, more
            print(f"{name:13} {label:8} {median:8.4f} s" + (f"  {more:+.2%}" if mode else ""))
    for mode, label in enumerate(MODES[1:], 1):
        own = [row[2] for step, row in enumerate(tables[0]) if step >= len(MODES) * WARM_UP and mode_of(step) == mode]
        result[f"{label}_own_seconds"] = statistics.median(own)
        share = statistics.median(own) / (result["off_cpu_seconds"] / args.ranks)
        print(f"own hooks     {label:8} {statistics.median(own):8.4f} s  {share:.2%} of a rank's CPU seconds")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

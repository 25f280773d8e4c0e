"""What a model keeps alive in forward and backward, against the cost model: a decoder on one CPU process.

    python -m benchmarks.memory                                  # tiny_llama, 1,000 tokens, fp32 and bf16
    python -m benchmarks.memory --layers 16 --dtypes bfloat16    # a deeper one

Counted are the storages that operators return, attention's own included, from then on until nothing refers to them, and
printed the most at one time in forward and in backward, which the model's peak is compared with. Weights and their
gradients are left out on both sides: `hexiseq.cost` counts them by themselves. What is within one operator of PyTorch's
is not seen: a kernel's workspace, the logits of a chunk of the loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.ranks import ring_plan
from hexiseq.attention.exchange import Lease
from hexiseq.attention.op import attend_op
from hexiseq.attention.runtime import close_all
from hexiseq.cluster import Cluster, Node, Seat, device_from_config
from hexiseq.cost import memory_gb
from hexiseq.cost.memory import fixed_bytes
from hexiseq.models import PlanHolder, apply_recompute, build_model, prepare
from hexiseq.plan import RECOMPUTE_MODES, Plan
from hexiseq.workload import ModelShape, Workload

CONF = Path(__file__).resolve().parents[1] / "conf"
DTYPES = ("float32", "bfloat16")
Config = Mapping[str, Any]


class Live(TorchDispatchMode):
    """Bytes of the storages that operators have returned and that are still referred to.

    Args:
        weights: shapes of tensors that do not count, those of gradients.
    """

    def __init__(self, weights: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._weights = weights
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is attend_op._opoverload:
            with self:  # its own operators are called one by one
                out = attend_op._init_fn(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tuple(tensor.shape) not in self._weights:
                self._add(tensor.untyped_storage())
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        known = self._alive.get(storage._cdata)
        if known is None or known[0].expired():
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()


def plan_of(config: Config, seq_len: int, dtype: str, recompute: str) -> Plan:
    """All of a sequence on one rank."""
    whole = ring_plan(
        [1], slot=seq_len + seq_len % 2, seq_len=seq_len, heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"], fusion=1, exchange="ring", dtype=dtype,
    )  # fmt: skip
    return dataclasses.replace(whole, recompute=recompute)


def measured(config: Config, plan: Plan) -> dict[str, int]:
    """Bytes alive of a forward and backward pass, weights and their gradients apart."""
    model = build_model(config, getattr(torch, plan.dtype), seed=0)
    prepare(model, PlanHolder(plan))
    apply_recompute(model, plan.recompute)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config["vocab_size"], (1, plan.seq_len), generator=generator)
    batch = {"input_ids": ids, "position_ids": torch.arange(plan.seq_len)[None], "shift_labels": ids}
    model(**batch, num_items_in_batch=plan.seq_len).loss.backward()  # what the first call makes and keeps is there
    model.zero_grad()
    shapes = {tuple(weight.shape)[::step] for weight in model.parameters() for step in (1, -1)}  # some come transposed
    with mock.patch.object(Lease, "take", _take), Live(shapes) as live:
        loss = model(**batch, num_items_in_batch=plan.seq_len).loss
        forward, live.most = live.most, 0
        loss.backward()
    return {"forward": forward, "backward": live.most}


def _take(self: Lease, like: Tensor, shape: Any, most: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer that goes when it is let go of, as on a GPU; a CPU rank's own store would keep it."""
    return like.new_empty(shape, dtype=dtype or like.dtype)


def predicted(config: Config, plan: Plan) -> float:
    """The larger of both as the cost model has it."""
    workload = Workload(ModelShape.from_hf_config(config), plan.seq_len, plan.dtype, plan.recompute, 1, 1, False)
    device = device_from_config(yaml.safe_load((CONF / "gpu" / "cpu_core.yaml").read_text()))
    here = Cluster("here", (Node("here", (Seat(device),), 1, 1, 1),))
    used, _ = memory_gb(plan, workload, here.places)
    return float(used[0] - device.overhead_gb) * 1e9 - fixed_bytes(workload, 1)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Config]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=1000, help="tokens (%(default)s)")
    parser.add_argument("--model", default="tiny_llama", help="of conf/model (%(default)s)")
    parser.add_argument("--layers", type=int, help="of the model (as its file says)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    file = CONF / "model" / f"{options.model}.yaml"
    if not file.exists():
        parser.error(f"--model {options.model}: conf/model has no such file")
    config = yaml.safe_load(file.read_text())["config"]
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    if config["num_hidden_layers"] < 1:
        parser.error(f"--layers must be at least 1, got {options.layers}")
    sizes = {size for weight in build_model(config, torch.float32, seed=None).parameters() for size in weight.shape}
    if options.seq < 2 or options.seq in sizes:
        parser.error(f"--seq must be at least 2 and none of the model's own sizes, {sorted(sizes)}, got {options.seq}: "
                     "weights' gradients are told by their shapes")  # fmt: skip
    return options, config


def main(arguments: list[str] | None = None) -> None:
    options, config = parse(arguments)
    rows = []
    layers = config["num_hidden_layers"]
    print(f"{options.model}, {layers} layers, {options.seq:,} tokens; alive at most, elements a token")
    print(f"{'dtype':10}{'recompute':10}{'forward':>10}{'backward':>10}{'predicted':>11}   predicted / measured")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for dtype, recompute in itertools.product(options.dtypes, RECOMPUTE_MODES):
            plan = plan_of(config, options.seq, dtype, recompute)
            found, wanted = measured(config, plan), predicted(config, plan)
            close_all()
            ratio = wanted / max(found.values())
            rows.append({"dtype": dtype, "recompute": recompute, **found, "predicted": wanted, "ratio": ratio})
            a_token = options.seq * getattr(torch, dtype).itemsize
            forward, backward, both = (size / a_token for size in (*found.values(), wanted))
            print(f"{dtype:10}{recompute:10}{forward:10,.0f}{backward:10,.0f}{both:11,.0f}   {ratio:.3f}", flush=True)
        dist.destroy_process_group()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

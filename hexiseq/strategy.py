"""The Lightning strategy: runs a plan. It owns process groups, the cut of each batch, loss normalisation, FSDP2 and
checkpoints.

Losses are *sums* of token losses; gradients are divided by the number of valid tokens of the whole optimizer step, over
all ranks and micro-steps. That number is known only after the last backward, so losses are divided by the nominal
number of tokens first and gradients multiplied by nominal/actual before clipping.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from hexiseq import doctor, preflight
from hexiseq.attention import Runtime, runtime_for
from hexiseq.cluster import Cluster
from hexiseq.launch.roster import Identity, match_ranks
from hexiseq.models import IGNORED, PlanHolder, apply_recompute, decoder_layers, materialize, prepare
from hexiseq.plan import Plan
from hexiseq.workload import Workload

# plan.dtype -> (type of the parameters kept, type they are gathered in)
_PARAMETERS = {
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "bfloat16": (torch.float32, torch.bfloat16),
}


@dataclass(frozen=True)
class StepStats:
    """An optimizer step, or a validation run, over the whole job.

    Attributes:
        loss: mean over the valid tokens; NaN where there were none.
        valid_tokens: tokens with a label.
        grad_norm: before clipping; None where gradients are not clipped by norm.
        by_rank: ``valid_tokens`` and the strategy's `counters`, of every rank.
    """

    loss: float
    valid_tokens: int
    grad_norm: float | None = None
    by_rank: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def identify(device: torch.device) -> Identity:
    """``(device type, node)`` of this rank.

    What the launcher put into ``HEXISEQ_DEVICE_TYPE`` and ``HEXISEQ_NODE``; else the driver's name of the device and
    the host's name.
    """
    found = doctor.driver_name(device)
    return os.environ.get("HEXISEQ_DEVICE_TYPE", found), os.environ.get("HEXISEQ_NODE", socket.gethostname())


class HexiSeqStrategy(ModelParallelStrategy):
    """Trains a Hugging Face decoder over a plan, inside an ordinary Lightning trainer.

    The module must override `configure_model` and pass its model through `parallelize`; `training_step` receives the
    rank's shard of each batch and returns ``model(**batch).loss`` unchanged (see `hexiseq.module.CausalLM`). Data
    loaders yield whole sequences, ``{"input_ids": [B, N]}`` and optionally what `cut` lists, the same ones on all ranks
    of a replica.

    Either give a plan, or what to make one from: it is then solved on rank 0 and sent to all.

    Args:
        plan: a `Plan`, or the path of a ``plan.json``.
        cluster, workload, policy, solver: solved by ``schedule.solve(cluster, workload, policy, **solver)``.
        reshard_after_forward: free gathered parameters between forward and backward; None: as the workload says, else
            True.
        reduce_each_micro_step: reduce gradients in every micro-step of an optimizer step, instead of once. More
            traffic; without it each rank holds unsharded gradients while it accumulates.
        timeout: of every collective and transfer.
        preflight: how long the trial of all links before the first step may take (`hexiseq.preflight`); None: no trial.
            It takes a moment, and what it finds would else be a hang or a wrong loss.
        identify: tells ``(device type, node)`` of a rank's device.
        device_names: device type -> what the driver calls it; a cluster brings its own.
        process_group_backend: None lets torch choose by device.
        save_distributed_checkpoint: write checkpoints as folders, each rank its part.

    Attributes:
        step_stats: of the last optimizer step.
        counters: numbers of this rank, under the same names on all, that travel with the sums of the optimizer step:
            set before the last backward pass ends, they are in its ``step_stats.by_rank``.

    Raises:
        ValueError: on all ranks, for what the user can put right: devices that are not the plan's, a model or precision
            that does not fit, a checkpoint of another model.
    """

    step_stats: StepStats

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        cluster: Cluster | None = None,
        workload: Workload | None = None,
        policy: str | None = None,
        solver: Mapping[str, Any] | None = None,
        reshard_after_forward: bool | None = None,
        reduce_each_micro_step: bool = False,
        timeout: timedelta = timedelta(minutes=10),
        preflight: timedelta | None = timedelta(minutes=1),
        identify: Callable[[torch.device], Identity] = identify,
        device_names: Mapping[str, Sequence[str]] | None = None,
        process_group_backend: str | None = None,
        save_distributed_checkpoint: bool = True,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if (plan is None) == (cluster is None or workload is None or policy is None):
            raise ValueError("HexiSeqStrategy needs either plan, or cluster, workload and policy")
        self._given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
        self._cluster, self._workload, self._policy, self._solver = cluster, workload, policy, dict(solver or {})
        if reshard_after_forward is None:
            reshard_after_forward = workload is None or not workload.keep_parameters
        self._reshard, self._reduce_each_micro_step = reshard_after_forward, reduce_each_micro_step
        self._wait, self._preflight = timeout, preflight
        self._compared: doctor.Comparison | None = None
        self._identify = identify
        self._names = device_names or {device.type: device.names for device in (cluster.devices if cluster else ())}
        self.counters: dict[str, float] = {}
        self._holder: PlanHolder | None = None
        self._plan: Plan | None = None
        self._training = _Sums()
        self._validation = _Sums()
        self._checked = False
        self._last_batch: tuple[Any, ...] = ()

    # --- the plan and the ranks

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("the strategy has no plan before setup_environment")
        return self._plan

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.plan.place(self.global_rank)[0]

    @property
    def nominal_tokens(self) -> int:
        """Tokens of a micro-step of the whole job, labelled or not: what losses are divided by."""
        return self.plan.sequences * self.plan.seq_len

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": len(self.plan.replicas), "rank": self.replica}

    @override
    def setup_environment(self) -> None:
        if type(self.precision_plugin) not in (Precision, _ClipSharded):
            raise ValueError("the plan's dtype sets the precision; leave Trainer(precision=...) at '32-true'")
        store = self._compare_ranks()  # held until the process group has it
        self._setup_distributed()
        del store
        self._plan = self._agree_on_plan()
        if self._plan.dtype not in _PARAMETERS:
            raise ValueError(f"training in {self._plan.dtype} needs loss scaling, which is not supported; choose "
                             f"{', '.join(_PARAMETERS)}")  # fmt: skip
        self.precision_plugin = _ClipSharded(self)
        # One dimension whatever the replicas: they may differ in size, parameters are sharded over all ranks.
        self._device_mesh = init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("ranks",))
        runtime = runtime_for(self._plan, self._wait)
        if self._preflight is not None and self.world_size > 1:
            self._try_links(runtime, self._preflight.total_seconds())
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @override
    def set_world_ranks(self) -> None:
        if isinstance(self.cluster_environment, LightningEnvironment):
            super().set_world_ranks()
        else:
            # The launcher knows; nodes times devices is wrong when nodes are unequal.
            rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _compare_ranks(self) -> Any:
        """Stop, on all ranks, what would hang or corrupt once the accelerator's process group exists. Collective."""
        self.set_world_ranks()
        if self.world_size == 1:
            return None
        environment = self.cluster_environment
        assert environment is not None
        seconds = self._wait.total_seconds()
        store = doctor.reach_store(environment.main_address, environment.main_port, self.global_rank, seconds)
        meeting = doctor.Meeting(store, self.global_rank, self.world_size, seconds)
        dtype = self._given.dtype if self._given else self._workload.dtype if self._workload else None
        self._compared = doctor.check(meeting, doctor.examine(self.root_device, self.global_rank), dtype)
        for line in self._compared.noted if self.is_global_zero else ():
            rank_zero_warn(line)
        return store

    def _try_links(self, runtime: Runtime, seconds: float) -> None:
        """Stop, on all ranks, what would hang or corrupt a step. Collective."""
        environment = self.cluster_environment
        assert environment is not None
        assert self._compared is not None
        store = doctor.reach_store(environment.main_address, environment.main_port, self.global_rank, seconds)
        meeting = doctor.Meeting(store, self.global_rank, self.world_size, seconds, runtime.links.name)
        outcome = preflight.try_links(runtime, meeting, self.root_device, seconds)
        if self.is_global_zero:
            compared = self._compared
            print(preflight.describe(outcome, meeting.who, compared.skew_seconds, len(compared.noted)), flush=True)

    def check_equal(self, what: str, value: str) -> None:
        """Collective. Raises ValueError on all ranks, naming those whose value is not rank 0's."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        others = [rank for rank, other in enumerate(values) if other != values[0]]
        if others:
            raise ValueError(f"ranks {others} differ from rank 0 in {what}: {values[others[0]]} instead of {values[0]}")

    def _agree_on_plan(self) -> Plan:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, self._identify(self.root_device))
        outcome: dict[str, Any] = {}
        if self.is_global_zero:
            # An error must reach the ranks that wait for the plan.
            try:
                outcome["plan"] = match_ranks(self._solve(), found, self._names).to_dict()
            except ValueError as error:
                outcome["error"] = str(error)
            except Exception as error:
                outcome["error"] = f"{type(error).__name__} while planning: {error}"
        outcome = self.broadcast(outcome)
        if "error" in outcome:
            raise ValueError(outcome["error"])
        plan = Plan.from_dict(outcome["plan"])
        self.check_equal("the plan", plan.digest())
        return plan

    def _solve(self) -> Plan:
        if self._given is not None:
            return self._given
        from hexiseq.schedule import solve

        assert self._cluster is not None
        assert self._workload is not None
        assert self._policy is not None
        return solve(self._cluster, self._workload, self._policy, **self._solver)

    def replace_plan(self, plan: Plan) -> None:
        """Go on with another plan from the next micro-step. Collective; to be called between optimizer steps.

        Parameters and optimizer state are sharded evenly whatever the plan, so nothing moves.

        Raises:
            ValueError: the plan changes more than slots, tokens and heads.
        """
        for name in ("seq_len", "num_heads", "num_kv_heads", "exchange", "recompute", "offload", "dtype", "devices"):
            if getattr(plan, name) != getattr(self.plan, name):
                raise ValueError(f"a running job cannot change {name} of its plan, from {getattr(self.plan, name)} to "
                                 f"{getattr(plan, name)}")  # fmt: skip
        ranks = [
            [(replica.sequences, [g.ranks for g in replica.groups]) for replica in p.replicas]
            for p in (self.plan, plan)
        ]
        if ranks[0] != ranks[1]:
            raise ValueError("a running job cannot change the replicas, groups and sequences of its plan")
        self.check_equal("the new plan", plan.digest())
        runtime_for(plan, self._wait)
        self._plan = plan
        if self._holder is not None:
            self._holder.plan = plan

    # --- the model

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The type parameters must be built in; the optimizer's states have it too."""
        return _PARAMETERS[self.plan.dtype][0]

    def parallelize(self, model: PreTrainedModel, seed: int | None = None) -> PreTrainedModel:
        """Put `model` on the plan: attention, loss, recompute, parameters sharded over all ranks.

        To be called in `configure_model`.

        Args:
            model: parameters in `parameter_dtype`; on the meta device, or the same on all ranks.
            seed: of the initial weights of a model on the meta device, which is filled and sharded layer by layer.
        """
        for name, parameter in model.named_parameters():
            if parameter.dtype != self.parameter_dtype:
                raise ValueError(f"a plan in {self.plan.dtype} needs parameters in {self.parameter_dtype}, "
                                 f"{name} has {parameter.dtype}")  # fmt: skip
            if parameter.is_meta and seed is None:
                raise ValueError("a model on the meta device needs the seed of its initial weights")
        self._holder = PlanHolder(self.plan)
        prepare(model, self._holder)
        apply_recompute(model, self.plan.recompute, offload=self.plan.offload)
        gathered = _PARAMETERS[self.plan.dtype][1]
        policy = (
            MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
            if gathered
            else MixedPrecisionPolicy()
        )
        for part in [*decoder_layers(model), model]:
            if seed is not None:
                materialize(model, part, seed, self.root_device)
            # The root's parameters, embedding and head, are needed first in backward: torch keeps them by itself.
            reshard = None if part is model else self._reshard
            fully_shard(part, mesh=self.device_mesh, mp_policy=policy, reshard_after_forward=reshard)
            # Token losses are summed, so gradients are too. Forced, because scaling in the collective crashes gloo.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        return model

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._holder is None:
            raise ValueError("HexiSeqStrategy needs a module whose configure_model passes its model through "
                             "self.trainer.strategy.parallelize(model); see hexiseq.module.CausalLM")  # fmt: skip
        super().setup(trainer)
        self._checked = False
        self._training = _Sums()

    # --- batches

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return super().batch_to_device(self.cut(batch), device, dataloader_idx)

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's shard of whole sequences.

        Args:
            batch: ``input_ids`` ``[B, N]``, ``B`` the replica's sequences, and optionally:
                ``labels`` ``[B, N]``, not shifted, -100 where there is none;
                ``documents``, per sequence the ascending boundaries of the documents packed into it, 0 and ``N``
                included: attention stays within a document, and no token is predicted from another document's;
                ``position_ids`` int64 ``[B, N]`` in place of 0 to ``N``; where they jump, `documents` must say if a
                document starts there.

        Returns:
            ``input_ids``, ``position_ids``, ``shift_labels`` ``[B, L]`` and ``num_items_in_batch``; ``documents`` where
            a sequence has several. A rank without tokens gets one dummy token without a label.

        Raises:
            ValueError: naming the entry, its value and what it must be.
        """
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            got = f"one with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(
                f"a batch must be a dict with input_ids and optionally labels, documents, position_ids; got {got}"
            )
        ids = batch["input_ids"]
        expected = (self.plan.replicas[self.replica].sequences, self.plan.seq_len)
        if tuple(ids.shape) != expected:
            raise ValueError(f"a batch of replica {self.replica} must be input_ids of shape {list(expected)}, "
                             f"got {list(ids.shape)}")  # fmt: skip
        documents, positions = batch.get("documents"), batch.get("position_ids")
        if positions is not None:
            _check_positions(positions, expected, packed=documents is not None)
        if documents is not None:
            documents = _boundaries(documents, *expected)
            if all(len(ends) == 2 for ends in documents):
                documents = None
        labels = batch.get("labels", ids)
        # Shifted before the cut: the next token may be another rank's.
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        for row, ends in enumerate(documents or ()):
            targets[row, [end - 1 for end in ends[1:-1]]] = IGNORED
        shard = self.plan.shard(self.global_rank)
        tokens = torch.from_numpy(shard.positions()) if shard.num_tokens else torch.zeros(1, dtype=torch.int64)
        targets = targets[:, tokens] if shard.num_tokens else torch.full((len(ids), 1), IGNORED)
        if not self._checked:
            self._last_batch = ids, labels, positions, documents
        shares = {
            "input_ids": ids[:, tokens],
            "position_ids": tokens.expand(len(ids), -1).contiguous() if positions is None else positions[:, tokens],
            "shift_labels": targets,
            "num_items_in_batch": self.nominal_tokens,
        }
        return shares if documents is None else {**shares, "documents": documents}

    # --- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._checked:
            self._check_batch()
        args = self._take(args)
        output = super().training_step(*args, **kwargs)
        if not self._checked:
            self._check_loss(output)
        self._training.add(self._in_hand.loss_sum, args[0]["shift_labels"])
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        args = self._take(args)
        output = super().validation_step(*args, **kwargs)
        self._validation.add(self._in_hand.loss_sum, args[0]["shift_labels"])
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().test_step(*self._take(args), **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict_step(*self._take(args), **kwargs)

    def _take(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make the batch, a step's first argument, the one in hand. Its documents are not for the model's own code."""
        batch = dict(args[0])
        self._in_hand.documents, self._in_hand.loss_sum = batch.pop("documents", None), None
        return batch, *args[1:]

    @property
    def _in_hand(self) -> PlanHolder:
        assert self._holder is not None
        return self._holder

    @override
    def on_validation_start(self) -> None:
        self._validation = _Sums()

    def validation_stats(self) -> StepStats:
        """Collective. Of the validation batches so far, exact over ranks and batches."""
        return self._validation.reduce(self.root_device)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        """Gradients stay unreduced inside: Lightning enters it for all but the last micro-step."""
        modules = [m for m in self._modules() if isinstance(m, FSDPModule)] if not self._reduce_each_micro_step else []
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_requires_gradient_sync(True, recurse=False)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        trained = getattr(trainer.datamodule, "sequences_trained", None)  # type: ignore[attr-defined]
        if trained is not None:
            trained(self.plan.sequences)
        if trainer.fit_loop._should_accumulate():
            return
        self.step_stats = self._training.reduce(self.root_device, self.counters)
        self._training = _Sums()
        if not self.step_stats.valid_tokens:
            raise ValueError("no token of the optimizer step has a label: all labels of all ranks are -100")
        # Lightning has divided by accumulate_grad_batches, in a shorter last step of an epoch too.
        nominal = self.nominal_tokens * trainer.accumulate_grad_batches
        grads = _local_grads(self._modules_parameters())
        if grads:
            torch._foreach_mul_(grads, nominal / self.step_stats.valid_tokens)

    def _check_batch(self) -> None:
        """Stop a job whose data loaders give the ranks of a replica other sequences or documents. Collective."""
        digests: list[Any] = [None] * self.world_size
        dist.all_gather_object(digests, _digest(self._last_batch))
        self._last_batch = ()
        for number, replica in enumerate(self.plan.replicas):
            first, *others = sorted(replica.ranks)
            if wrong := [rank for rank in others if digests[rank] != digests[first]]:
                raise ValueError(
                    f"ranks {wrong} got another first batch than rank {first} of their replica {number}; the ranks of "
                    "a replica must read the same sequences, labels and documents (distributed_sampler_kwargs of the "
                    "strategy shares sequences among replicas)"
                )

    def _check_loss(self, output: Any) -> None:
        """Stop a module that returns anything but the sum of its token losses over the nominal tokens. Collective."""
        loss = output["loss"] if isinstance(output, Mapping) else output
        expected = self._in_hand.loss_sum
        message = None
        if expected is None:
            message = "training_step did not call the model with its batch: return model(**batch).loss"
        elif loss is not None:
            got, wanted = float(loss.detach()), float(expected) / self.nominal_tokens
            if not abs(got - wanted) <= 1e-3 * max(abs(wanted), 1e-6):
                message = (
                    f"training_step returned {got:.6g}; the sum of the token losses over num_items_in_batch is "
                    f"{wanted:.6g}. Return model(**batch).loss as it is: a mean over a rank's tokens is wrong when "
                    "ranks hold unequal shares"
                )
        messages: list[Any] = [None] * self.world_size
        dist.all_gather_object(messages, message)
        wrong = [rank for rank, text in enumerate(messages) if text]
        if wrong:
            raise ValueError(f"rank {wrong[0]}: {messages[wrong[0]]}")
        self._checked = True

    def _modules(self) -> Sequence[nn.Module]:
        assert self.model is not None
        return list(self.model.modules())

    def _modules_parameters(self) -> Sequence[nn.Parameter]:
        assert self.model is not None
        return list(self.model.parameters())

    # --- checkpoints

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # For information only: a run resumes on whatever plan it then has.
        checkpoint["hexiseq"] = {"digest": self.plan.digest(), "plan": self.plan.to_dict()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if not path.exists():
            raise ValueError(f"ckpt_path {str(path)!r} does not exist")
        try:
            if path.is_dir():
                self._check_checkpoint(path)
            return super().load_checkpoint(path, weights_only)
        except CheckpointException as error:
            rank, failure = next(iter(error.failures.items()))
            raise ValueError(f"ckpt_path {str(path)!r} does not load: rank {rank}: {failure[0]}") from error
        except (EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"ckpt_path {str(path)!r} is damaged ({reason}); without it an earlier one can be used"
            ) from error

    def _check_checkpoint(self, path: Path) -> None:
        """Compare the checkpoint's parameters with the model's before anything is loaded."""
        if not (path / ".metadata").is_file():
            raise ValueError(f"ckpt_path {str(path)!r} is not a checkpoint: it has no .metadata")
        assert self.model is not None
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        shapes = {
            name.removeprefix("state_dict."): tuple(getattr(entry, "size", ()))
            for name, entry in saved.items()
            if name.startswith("state_dict.")
        }
        own = {name: tuple(getattr(value, "shape", ())) for name, value in get_model_state_dict(self.model).items()}
        for name in [*own, *sorted(shapes.keys() - own.keys())]:
            if own.get(name) != shapes.get(name):
                here, there = (list(s[name]) if name in s else "no such parameter" for s in (own, shapes))
                raise ValueError(
                    f"ckpt_path {str(path)!r} is a checkpoint of another model: {name} is {there} in the checkpoint, "
                    f"{here} in the model; set the model it was written with"
                )


class _Sums:
    """Token-loss sum and valid tokens of a rank, over several batches, kept on the device."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, loss_sum: Tensor | None, shift_labels: Tensor) -> None:
        if loss_sum is None:
            raise ValueError("the step did not call the model with its batch: return model(**batch).loss")
        # Counts above 2^24 are not exact in float32.
        part = torch.stack([loss_sum.double(), (shift_labels != IGNORED).sum().double()])
        self._total = part if self._total is None else self._total + part

    def reduce(self, device: torch.device, counters: Mapping[str, float] | None = None) -> StepStats:
        """Collective: one all-reduce, in which every rank's own numbers have a place of their own."""
        counters = counters or {}
        own = torch.zeros(2, dtype=torch.float64, device=device) if self._total is None else self._total
        shared = torch.zeros(dist.get_world_size(), 1 + len(counters), dtype=torch.float64, device=device)
        mine = shared[dist.get_rank()]
        mine[0] = own[1]
        mine[1:] = torch.tensor(list(counters.values()), dtype=torch.float64)
        total = torch.cat([own[:1], shared.flatten()])
        dist.all_reduce(total)
        loss_sum, *numbers = total.tolist()
        valid, *others = (tuple(numbers[i :: 1 + len(counters)]) for i in range(1 + len(counters)))
        by_rank = {"valid_tokens": valid, **dict(zip(counters, others, strict=True))}
        count = int(sum(valid))
        return StepStats(loss_sum / count if count else float("nan"), count, by_rank=by_rank)


class _ClipSharded(Precision):
    """Clips by the norm over all shards with a single all-reduce, where torch makes one for every parameter."""

    def __init__(self, strategy: HexiSeqStrategy) -> None:
        self._strategy = strategy

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        grads = _local_grads([p for group in optimizer.param_groups for p in group["params"]])
        square = torch.zeros((), dtype=torch.float64, device=self._strategy.root_device)
        if grads:
            square += torch.stack(torch._foreach_norm(grads)).double().square().sum()
        dist.all_reduce(square)
        norm = float(square.sqrt())
        if grads and norm > clip_val:
            torch._foreach_mul_(grads, clip_val / (norm + 1e-6))
        self._strategy.step_stats = replace(self._strategy.step_stats, grad_norm=norm)


def _boundaries(documents: Any, sequences: int, seq_len: int) -> list[list[int]]:
    """A batch's documents as lists of integers, checked."""
    if not isinstance(documents, (list, tuple, Tensor)) or len(documents) != sequences:
        got = f"{len(documents)}" if isinstance(documents, (list, tuple, Tensor)) else repr(documents)
        raise ValueError(f"documents of a batch must be a list of the boundaries of each of its {sequences} sequences, "
                         f"got {got}")  # fmt: skip
    whole = []
    for row, given in enumerate(documents):
        ends = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
        if not isinstance(ends, (list, tuple)) or len(ends) < 2:
            raise ValueError(f"documents[{row}] must be a list of at least 2 boundaries, 0 and {seq_len}, got {ends!r}")
        for place, end in enumerate(ends):
            if not isinstance(end, (int, np.integer)) or isinstance(end, bool):
                raise ValueError(f"documents[{row}][{place}] must be an integer, got {end!r}")
        if ends[0] != 0 or ends[-1] != seq_len:
            raise ValueError(
                f"documents[{row}] must reach from 0 to the sequence's {seq_len} tokens, got {ends[0]} to {ends[-1]}"
            )
        for place, (start, end) in enumerate(pairwise(ends), 1):
            if start >= end:
                raise ValueError(f"documents[{row}][{place}] must be above {start}, the boundary before it, got {end}")
        whole.append([int(end) for end in ends])
    return whole


def _check_positions(position_ids: Any, shape: tuple[int, int], packed: bool) -> None:
    """Refuse a batch's position ids that are none, or that jump in a sequence whose documents are not known."""
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) != shape or position_ids.dtype != torch.int64:
        got = f"{position_ids.dtype} {list(position_ids.shape)}" if isinstance(position_ids, Tensor) else position_ids
        raise ValueError(f"position_ids of a batch must be torch.int64 of shape {list(shape)}, got {got}")
    if (least := int(position_ids.min())) < 0:
        raise ValueError(f"position_ids of a batch must be at least 0, got {least}")
    jumps = (position_ids.diff() != 1).nonzero()
    if len(jumps) and not packed:
        row, place = jumps[0].tolist()
        before, after = position_ids[row, place : place + 2].tolist()
        raise ValueError(
            f"position_ids[{row}] jump from {before} to {after} at token {place + 1}: pass documents, with "
            f"{place + 1} as a boundary if a document starts there, and without if none does"
        )


def _digest(batch: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for part in batch:
        digest.update(part.cpu().numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode())
    return digest.hexdigest()


def _local_grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of the gradients; empty parts, of parameters with fewer rows than ranks, are left out."""
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    return [g for g in local if g.numel()]

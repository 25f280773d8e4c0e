"""Lightning told the truth about jobs whose nodes have different numbers of ranks.

Lightning's own environments take every node to have as many ranks as this one: they refuse such jobs, or read another
share of the data. Given as a plugin, with `HexiSeqStrategy`, world size, ranks and addresses are the job's::

    task = hexiseq.launch.slurm.task()
    Trainer(strategy=HexiSeqStrategy(...), plugins=[SlurmEnvironment()],
            devices=task.tasks[task.node], num_nodes=len(task.nodes))

`recipes.pretrain` needs no more than `Launched`, whoever starts its ranks.
"""

from __future__ import annotations

import os

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from typing_extensions import override

from hexiseq.launch import slurm


def gpu_of(local_rank: int) -> int:
    """Index of a rank's GPU among those it sees: Slurm can show each task its own alone (``--gpus-per-task``)."""
    return 0 if torch.cuda.device_count() == 1 else local_rank


class Launched(TorchElasticEnvironment):
    """Ranks that have torch's variables: torchrun's, and those of `hexiseq.launch`."""

    @override
    def local_rank(self) -> int:
        return gpu_of(super().local_rank())

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


class SlurmEnvironment(SLURMEnvironment):
    """Ranks that ``srun`` starts, a task each, in a job of one or more components.

    Lightning's automatic requeueing is off: its signal handler saves in whatever line a rank is, and ranks that are in
    different ones wait for each other forever. `hexiseq.callbacks.Checkpoints` does it between optimizer steps, with
    `hexiseq.launch.listen` called before and `hexiseq.launch.requeue` after ``fit``.

    Raises:
        ValueError: ``srun`` has not started this process.
    """

    def __init__(self) -> None:
        found = slurm.task()
        if found is None:
            raise ValueError("SlurmEnvironment needs ranks started with srun, a task for each; there is no step here")
        self.task = found
        super().__init__(auto_requeue=False)

    @property
    @override
    def main_address(self) -> str:
        # The node that sorts first, which Lightning takes, need not have rank 0.
        return os.environ.setdefault("MASTER_ADDR", self.task.nodes[0])

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ.setdefault("MASTER_PORT", str(self.task.port)))

    @staticmethod
    @override
    def detect() -> bool:
        return slurm.task() is not None

    @override
    def world_size(self) -> int:
        return self.task.size

    @override
    def global_rank(self) -> int:
        return self.task.number

    @override
    def local_rank(self) -> int:
        return gpu_of(self.task.local)

    @override
    def node_rank(self) -> int:
        return self.task.node

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass

    @staticmethod
    @override
    def _validate_srun_variables() -> None:
        pass

"""The processes that a launcher has started for a job, and how they come to know what to do.

A launcher starts either the ranks themselves (torchrun; ``srun`` with a task for each) or an agent on every node, which
starts the node's ranks (``srun`` with one task a node). The first process alone reads the configuration; it learns from
the others where they are and what they see, and tells them what to run.
"""

from __future__ import annotations

import csv
import math
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hexiseq.doctor import Meeting, reach_store
from hexiseq.launch import slurm
from hexiseq.launch.agent import Agents
from hexiseq.launch.roster import Member

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,name,uuid", "--format=csv,noheader")
SECONDS = 30  # that it may take; drivers that are not kept loaded are slow
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Party:
    """This process among those a launcher started.

    Attributes:
        agents: they are agents, else ranks.
        address, port: where the first of them is, and hosts the store through which they speak.
        task: what Slurm says, if it is Slurm.
    """

    number: int
    size: int
    agents: bool
    address: str
    port: int
    task: slurm.Task | None

    def who(self, number: int) -> str:
        if self.task is None:
            return f"rank {number}"
        if self.agents:
            return f"the process of node {self.task.nodes[number]}"
        return f"task {number}"


def party(environment: Mapping[str, str] = os.environ) -> Party | None:
    """The processes this one is among; None where no launcher has started it.

    Raises:
        ValueError: Slurm has placed them in a way in which ranks cannot be told apart.
    """
    task = slurm.task(environment)
    if all(name in environment for name in _RANK_VARIABLES):
        return Party(
            int(environment["RANK"]), int(environment["WORLD_SIZE"]), False,
            environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), task,
        )  # fmt: skip
    if task is None:
        return None
    # srun's own variables name the node that sorts first, which need not have the first process.
    chosen = environment.get("MASTER_PORT", str(task.port))
    if not chosen.isdecimal() or not 0 < int(chosen) < 2**16:
        raise ValueError(f"MASTER_PORT {chosen!r} of the environment is no port; give a number from 1 to {2**16 - 1}")
    return Party(task.number, task.size, max(task.tasks) == 1, task.nodes[0], int(chosen), task)


def become_rank(own: Party) -> None:
    """Put into the environment what torch and Lightning expect there of a rank, where Slurm has started it."""
    if own.agents or own.task is None:
        return
    task = own.task
    os.environ.update(
        RANK=str(own.number),
        WORLD_SIZE=str(own.size),
        LOCAL_RANK=str(task.local),
        LOCAL_WORLD_SIZE=str(task.tasks[task.node]),
        GROUP_RANK=str(task.node),
        GROUP_WORLD_SIZE=str(len(task.nodes)),
        MASTER_ADDR=own.address,
        MASTER_PORT=str(own.port),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def meet(own: Party, timeout_seconds: float) -> Meeting:
    """Come together with the other processes.

    Args:
        timeout_seconds: of this wait and those that follow.

    Raises:
        ValueError: the first process does not answer at its address.
    """
    if own.size == 1 and own.agents:
        import torch.distributed as dist

        return Meeting(dist.HashStore(), 0, 1, timeout_seconds)
    try:
        store = reach_store(own.address, own.port, own.number, timeout_seconds)
    except ValueError as error:
        if own.number == 0:
            raise ValueError(f"{error}; MASTER_PORT=NUMBER in the environment chooses another") from error
        node = socket.gethostname()
        raise ValueError(
            f"{own.who(own.number)} on {node}: {own.who(0)} did not answer at {own.address}:{own.port} within "
            f"{timeout_seconds:g} s. Has it ended (see its output), and can {node} reach {own.address} at that port? "
            "MASTER_PORT=NUMBER in the environment chooses another"
        ) from error
    return Meeting(store, own.number, own.size, timeout_seconds, own.who)


@dataclass(frozen=True)
class Presence:
    """What one process of a party finds.

    Attributes:
        ranks: how many it stands for; None: an agent on a node without GPUs, which cannot tell.
        local: number among the processes of its node.
        devices: what the driver calls the GPUs it sees, in order; none where it cannot be asked.
    """

    node: str
    partition: str
    ranks: int | None
    local: int
    devices: tuple[str, ...]


def presence(own: Party) -> Presence:
    """What this process finds."""
    task, devices = own.task, visible_gpus()
    ranks: int | None = 1
    if own.agents:
        assert task is not None
        ranks = task.gpus or len(devices) or None
    node = task.nodes[task.node] if task else socket.gethostname()
    partition = task.partitions[task.node] if task else ""
    return Presence(node, partition, ranks, int(os.environ.get("LOCAL_RANK", task.local if task else 0)), devices)


def muster(own: Party, meeting: Meeting) -> list[Presence]:
    """What all processes find, by number. Raises ValueError naming those that do not come."""
    everyone = meeting.gather("starting the job", asdict(presence(own)))
    return [Presence(**{**entry, "devices": tuple(entry["devices"])}) for entry in everyone]


def members(
    own: Party, there: Sequence[Presence], per_node: Sequence[int] | None, on_gpus: bool
) -> tuple[list[Member], list[int]]:
    """The job's ranks, and how many each process starts or is.

    Args:
        per_node: how many devices the cluster has, node after node: so many ranks agents start where no GPUs say it.
        on_gpus: the cluster's devices are GPUs.

    Raises:
        ValueError: nothing says how many ranks a node shall have.
    """
    counts = [entry.ranks if on_gpus or not own.agents else None for entry in there]
    if per_node is not None and len(there) == 1:
        per_node = [sum(per_node)]  # one machine stands for all
    if None in counts:
        if any(counts) or per_node is None or len(per_node) != len(there):
            without = ", ".join(entry.node for entry, count in zip(there, counts, strict=True) if count is None)
            wanted = "no cluster is named" if per_node is None else f"the cluster has {len(per_node)} nodes"
            raise ValueError(
                f"the job has no GPUs on {without}, so it does not say how many ranks its {len(there)} nodes shall "
                f"have, and {wanted}; ask for GPUs (--gres), start a task for each rank, or name a cluster of as many "
                "nodes"
            )
        counts = list(per_node)
    gres = (slurm.record() or slurm.Record({}, None)).gres if own.task else {}
    found = []
    for entry, count in zip(there, counts, strict=True):
        assert count is not None
        for i in range(count):
            index = i if own.agents else min(entry.local, max(0, len(entry.devices) - 1))
            device = entry.devices[index] if index < len(entry.devices) else ""
            found.append(Member(entry.node, entry.partition, device, gres.get(entry.node, "")))
    return found, [int(count or 0) for count in counts]


def agents(own: Party, meeting: Meeting, nodes: Sequence[str], ranks: Sequence[int], port: int) -> Agents | None:
    """What `start_ranks` needs to know of the other nodes; None where there are none."""
    if own.size == 1:
        return None
    return Agents(meeting, tuple(ranks), tuple(nodes), own.address, port)


def free_port() -> int:
    """A port that nobody listens at, of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def visible_gpus() -> tuple[str, ...]:
    """Names and ids of the NVIDIA GPUs this process may use, as `doctor.driver_name` gives them, without touching them.

    Initialising CUDA here would take memory of each from its rank.
    """
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode:
        return ()
    rows = [[field.strip() for field in row] for row in csv.reader(done.stdout.splitlines()) if len(row) == 3]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        found = rows
    else:
        wanted = [item.strip() for item in chosen.split(",") if item.strip()]
        found = [row for item in wanted for row in rows if item == row[0] or row[2].startswith(item)]
    return tuple(f"{name} {uuid}" for _, name, uuid in found)


def told(arguments: Sequence[str], key: str, default: Any) -> Any:
    """A number that the command line gives `key`, read by processes that do not compose the configuration."""
    given = [argument.partition("=")[2] for argument in arguments if argument.lstrip("+").startswith(f"{key}=")]
    try:
        number = float(given[-1])
    except (IndexError, ValueError):
        return default
    # The first process composes, and refuses what is no time.
    return number if 0 < number < math.inf else default


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the one that speaks to the user, also where nothing else is known of the others."""
    return environment.get("RANK", environment.get("SLURM_PROCID", "0")) == "0"

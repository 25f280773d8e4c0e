"""What Slurm says about a job: read from the environment of a step's processes, and asked of ``scontrol``.

A job over several partitions is a heterogeneous one, whose variables have traps. Inside a step over its components
``SLURM_NTASKS_PER_NODE`` and ``SLURM_JOB_PARTITION`` may be another component's, and ``SLURM_NODELIST`` is sorted by
name while ranks and ``SLURM_NODEID`` go component by component; none of them is used here.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

SECONDS = 20  # that scontrol may take
FIRST_PORT, PORTS = 20_000, 20_000  # of the rendezvous, by job


@dataclass(frozen=True)
class Task:
    """This process of a job step.

    Attributes:
        job: id of the job; of a heterogeneous one that of its leader, which is the one to requeue.
        key: the same as one number, an array's task having its own.
        restarts: how often the job has been requeued.
        number: of this process in the step.
        nodes: of the step, in the order of its processes.
        tasks: processes on each of them.
        partitions: of each of them.
        node: index of this process's node.
        local: number of this process on its node.
        gpus: of this process's node, that the step has; None: none were asked for.
    """

    job: str
    key: int
    restarts: int
    number: int
    nodes: tuple[str, ...]
    tasks: tuple[int, ...]
    partitions: tuple[str, ...]
    node: int
    local: int
    gpus: int | None

    @property
    def size(self) -> int:
        return sum(self.tasks)

    @property
    def port(self) -> int:
        """For the job's rendezvous: every process of the job comes to the same, other jobs of the time to others."""
        return FIRST_PORT + (self.key + self.restarts) % PORTS


def task(environment: Mapping[str, str] = os.environ) -> Task | None:
    """This process's place in a job step; None where ``srun`` has not started it.

    Raises:
        ValueError: the components of a heterogeneous job share a node, so that ranks cannot be told apart.
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    named = expand_hosts(environment["SLURM_STEP_NODELIST"])
    # Both are in the order of names.
    count = dict(zip(named, expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"]), strict=True))
    components = [[node for node in nodes if node in count] for nodes in _components(environment)]
    nodes = [node for component in components for node in component]
    if len(set(nodes)) < len(nodes):
        twice = sorted({node for node in nodes if nodes.count(node) > 1})
        raise ValueError(
            f"components of the heterogeneous job share {', '.join(twice)}; ask for each on nodes of its own "
            "(--exclusive, or one component with what both need)"
        )
    partitions = []
    for number, component in enumerate(components):
        named_partition = environment.get(f"SLURM_JOB_PARTITION_HET_GROUP_{number}")
        partitions += [named_partition or environment.get("SLURM_JOB_PARTITION", "")] * len(component)
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return Task(
        job=job_id(environment) or "0",
        key=int(environment.get("SLURM_JOB_ID", "0")),
        restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
        number=int(environment["SLURM_PROCID"]),
        nodes=tuple(nodes),
        tasks=tuple(count[node] for node in nodes),
        partitions=tuple(partitions),
        node=int(environment["SLURM_NODEID"]),
        local=int(environment["SLURM_LOCALID"]),
        gpus=int(gpus) if gpus.isdigit() else None,
    )


def _components(environment: Mapping[str, str]) -> list[list[str]]:
    """Nodes of every component of the job, in the order of the step's processes."""
    count = int(environment.get("SLURM_HET_SIZE", "1"))
    if count == 1:
        return [expand_hosts(environment["SLURM_STEP_NODELIST"])]
    return [expand_hosts(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"]) for number in range(count)]


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """What ``scontrol`` knows the job by: an array's task, else the job, the leader where it is heterogeneous."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def nodes_of_job(environment: Mapping[str, str] = os.environ) -> int:
    """Nodes of the whole job this process runs in, inside a step or not; 0 outside Slurm."""
    count = int(environment.get("SLURM_HET_SIZE", "1"))
    if count == 1:
        return int(environment.get("SLURM_JOB_NUM_NODES", "0"))
    return sum(int(environment.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}", "0")) for number in range(count))


def expand_hosts(text: str) -> list[str]:
    """``a[1-3,07],b-[1-2]-x`` -> a1, a2, a3, a07, b-1-x, b-2-x; in the order written."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        grown = [""]
        for fixed, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            endings = [fixed] if fixed else [n for item in numbers.split(",") for n in _range(item)]
            grown = [name + ending for name in grown for ending in endings]
        names += grown
    return names


def _range(item: str) -> list[str]:
    first, _, last = item.partition("-")
    # Leading zeros are part of the name.
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]


def expand_counts(text: str) -> list[int]:
    """``1(x2),4`` -> 1, 1, 4."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        assert found, f"tasks per node {text!r}"
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


@dataclass(frozen=True)
class Record:
    """What the controller knows about a job.

    Attributes:
        gres: node -> the type of its GPUs, where it has a name.
        limit_seconds: the time limit; None: there is none.
    """

    gres: Mapping[str, str]
    limit_seconds: float | None


def record() -> Record | None:
    """Ask ``scontrol`` about this process's job; None where it does not answer or there is no job."""
    job = job_id()
    text = _scontrol("show", "job", "--details", "--oneliner", job) if job else None
    return None if text is None else read_record(text)


def read_record(text: str) -> Record:
    """What ``scontrol show job --details --oneliner`` printed, a line for each component."""
    gres: dict[str, str] = {}
    for nodes, kind in re.findall(r"\sNodes=(\S+) .*?GRES=gpu:([^:\s(]+):\d+", text):
        gres |= dict.fromkeys(expand_hosts(nodes), kind)
    limit = re.search(r"\bTimeLimit=(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if limit is None:
        return Record(gres, None)
    days, hours, minutes, seconds = (int(part or 0) for part in limit.groups())
    return Record(gres, ((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def limit_seconds() -> float:
    """The time limit of this process's job; infinite where there is none, or nobody to ask."""
    known = record()
    return math.inf if known is None or known.limit_seconds is None else known.limit_seconds


def requeue() -> str | None:
    """Put this process's job back into the queue, which ends it; why not, where that cannot be."""
    job = job_id()
    if job is None:
        return "it is not a Slurm job"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


def _scontrol(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

"""One way into a job: start the local ranks, or be one of the processes a launcher (torchrun, srun) has started.

The first process composes the configuration and prepares the run folder; ranks only ever read what it prepared. A
worker is a command (``python -m recipes.NAME RUN_DIR``), so nothing is pickled and Hydra never runs twice.
"""

from hexiseq.launch import slurm
from hexiseq.launch.agent import Agents, Interrupted, RankFailed, say_last, start_ranks
from hexiseq.launch.party import (
    Party,
    Presence,
    agents,
    become_rank,
    free_port,
    is_first,
    meet,
    members,
    muster,
    party,
    told,
    visible_gpus,
)
from hexiseq.launch.roster import MISMATCH, Member, Roster, match_ranks, reconcile, roster
from hexiseq.launch.worker import (
    STOP_SIGNAL,
    USER_ERROR_CODE,
    asked_to_stop,
    hold_signals,
    keep_memory,
    listen,
    prepare_cpu,
    rank,
    requeue,
    settle,
    stay,
    worker,
    world_size,
)

__all__ = [
    "MISMATCH",
    "STOP_SIGNAL",
    "USER_ERROR_CODE",
    "Agents",
    "Interrupted",
    "Member",
    "Party",
    "Presence",
    "RankFailed",
    "Roster",
    "agents",
    "asked_to_stop",
    "become_rank",
    "free_port",
    "hold_signals",
    "is_first",
    "keep_memory",
    "listen",
    "match_ranks",
    "meet",
    "members",
    "muster",
    "party",
    "prepare_cpu",
    "rank",
    "reconcile",
    "requeue",
    "roster",
    "say_last",
    "settle",
    "slurm",
    "start_ranks",
    "stay",
    "told",
    "visible_gpus",
    "worker",
    "world_size",
]

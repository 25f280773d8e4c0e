"""Ranks compare what they are through the store: one message for all, and the absent are named."""

from __future__ import annotations

import dataclasses
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import training_cases as cases

from hexiseq import doctor
from hexiseq.doctor import Meeting, check, examine
from hexiseq.plan import Plan
from hexiseq.strategy import HexiSeqStrategy


def compared(claims: dict[int, dict[str, str]], absent: int | None, timeout_seconds: float) -> str:
    """What this rank of a pool is told, some ranks claiming other versions, one perhaps not there."""
    rank = dist.get_rank()
    store = doctor.reach_store("unused", 0, rank, timeout_seconds)
    if rank == absent:
        return "absent"
    own = dataclasses.replace(examine(torch.device("cpu"), rank), **claims.get(rank, {}))
    try:
        compared = check(Meeting(store, rank, dist.get_world_size(), timeout_seconds), own, "float32")
    except ValueError as error:
        return str(error)
    return f"{[report.rank for report in compared.reports]} {compared.noted}"


def test_ranks_that_agree_hear_of_one_another(pools) -> None:
    assert pools(3).run(compared, {}, None, 20.0) == ["[0, 1, 2] ()"] * 3


def skewed(ahead_seconds: float) -> tuple[tuple[str, ...], float]:
    """What a rank hears when the clock of rank 1, on a node of its own, is ahead."""
    rank = dist.get_rank()
    store = doctor.reach_store("unused", 0, rank, 20.0)
    own = dataclasses.replace(examine(torch.device("cpu"), rank), node=f"node{rank % 2}")
    right = time.time

    def clock() -> float:
        return right() + (ahead_seconds if rank == 1 else 0.0)

    with mock.patch.object(time, "time", clock):
        compared = check(Meeting(store, rank, dist.get_world_size(), 20.0), own, "float32")
    return compared.noted, compared.skew_seconds


def test_a_clock_that_is_off_is_noted_with_its_node(pools) -> None:
    for noted, skew in pools(3).run(skewed, 100.0):
        assert skew == pytest.approx(100, abs=2)
        assert noted == (f"clocks differ: that of node1 is {skew:.1f} s ahead of node0's, so times in logs mislead",)


def test_one_rank_with_another_version_stops_all_with_one_message(pools) -> None:
    answers = pools(3).run(compared, {1: {"torch": "2.12.0"}, 2: {"python": "3.10.1"}}, None, 20.0)
    assert len(set(answers)) == 1
    assert "cannot work together" in answers[0]
    assert "torch: 2.12.0 on rank 1" in answers[0]
    assert "python" not in answers[0].lower()


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_on_all_others(pools, absent: int) -> None:
    answers = pools(3).run(compared, {}, absent, 0.5)
    told = {answer for rank, answer in enumerate(answers) if rank != absent}
    assert told == {f"comparing the ranks' software: rank {absent} did not answer within 0.5 s; see its log, or leave "
                    "it out"}  # fmt: skip


def gathered_late(late_seconds: float) -> str:
    """What a rank hears where rank 0 is that late and the last rank never comes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = doctor.reach_store("unused", 0, rank, 20.0)
    with mock.patch.object(doctor, "_LAST_WORDS_SECONDS", 0.4):
        meeting = Meeting(store, rank, ranks, 0.8)
        if rank == ranks - 1:
            return ""
        time.sleep(late_seconds if rank == 0 else 0.0)
        try:
            meeting.gather("measuring", None)
        except ValueError as error:
            return str(error)
    return f"rank {rank} went on"


def test_a_rank_0_that_is_late_is_not_taken_for_the_one_that_is_missing(pools) -> None:
    answers = pools(3).run(gathered_late, 0.9)
    assert set(answers[:2]) == {"measuring: rank 2 did not answer within 0.8 s; see its log, or leave it out"}


def refused(plan: Plan, claims: dict[int, dict[str, str]]) -> str:
    """The text of the ValueError this rank's strategy ends with."""
    rank = dist.get_rank()
    own = doctor.examine

    def claim(device: torch.device, rank: int) -> doctor.Report:
        return dataclasses.replace(own(device, rank), **claims.get(rank, {}))

    doctor.examine = claim
    try:
        job = cases.trainer(HexiSeqStrategy(plan), max_steps=1)
        job.fit(cases.CausalLM(cases.CONFIG, cases.OPTIMIZER, seed=7), cases.Batches(plan))
    except ValueError as error:
        return str(error)
    finally:
        doctor.examine = own
    return f"rank {rank} went on"


def test_the_strategy_asks_before_it_makes_its_process_group(pools) -> None:
    plan = cases.make_plan(cases.UNEVEN)
    answers = pools(3).run(refused, plan, {2: {"nccl": "2.21.5"}}, timeout=120)
    assert len(set(answers)) == 1
    assert "nccl: 2.21.5 on rank 2 (cpu on here), none on rank 0 (cpu on here)" in answers[0]

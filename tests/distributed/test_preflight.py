"""The trial of all links before the first step: what works passes, what does not is named."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import training_cases as cases

from hexiseq import doctor
from hexiseq.attention import runtime_for
from hexiseq.plan import Plan
from hexiseq.preflight import Outcome, describe, try_links
from hexiseq.strategy import HexiSeqStrategy
from hexiseq.testing import Pool, draw_plan


@contextlib.contextmanager
def fault(kind: str | None, rank: int | None) -> Iterator[None]:
    """On `rank`, something wrong with what it sends, or a stop of the whole process for some seconds."""
    reduce, exchange, batch = dist.all_reduce, dist.all_to_all_single, dist.batch_isend_irecv

    def reduced(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        tensor[-1] += 1
        return reduce(tensor, *args, **kwargs)

    def exchanged(output: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        return exchange(output, message + 1, *args, **kwargs)

    def sent(ops: list[Any]) -> Any:
        for op in ops:
            if op.op is dist.isend:
                op.tensor[len(op.tensor) // 2] += 1
        return batch(ops)

    def stopped(ops: list[Any]) -> Any:
        if not stops:
            stops.append(subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]))
            os.kill(os.getpid(), signal.SIGSTOP)
        return batch(ops)

    kind, _, seconds = (kind or "").partition(":")
    stops: list[Any] = []
    name, replacement = {
        "sum": ("all_reduce", reduced),
        "all-to-all": ("all_to_all_single", exchanged),
        "transfer": ("batch_isend_irecv", sent),
        "stop": ("batch_isend_irecv", stopped),
    }.get(kind, ("", None))
    with mock.patch.object(dist, name, replacement) if dist.get_rank() == rank else contextlib.nullcontext():
        yield


def tried(plan: Plan, timeout_seconds: float, kind: str | None = None, at: int | None = None) -> Outcome | str:
    """What this rank's preflight came to, `kind` of fault being on rank `at`."""
    rank = dist.get_rank()
    runtime = runtime_for(plan, timedelta(seconds=30))
    store = doctor.reach_store("unused", 0, rank, timeout_seconds)
    meeting = doctor.Meeting(store, rank, plan.world_size, timeout_seconds, runtime.links.name)
    try:
        with fault(kind, at):
            return try_links(runtime, meeting, torch.device("cpu"), timeout_seconds)
    except ValueError as error:
        return str(error)
    finally:
        runtime.close()


WORLD = "all-reduce, all-gather, reduce-scatter over all ranks; all-reduce in replicas; "
IN_GROUPS = "all-reduce, all-to-all, transfers in groups; "


@pytest.mark.parametrize(
    ("replicas", "exchange", "tried_text"),
    [
        (cases.UNEVEN, "ring", f"{WORLD}{IN_GROUPS}transfers of KV; transfers of dKV"),
        (cases.NO_TOKENS, "allgather", f"{WORLD}{IN_GROUPS}transfers, all-to-all of KV; transfers, all-to-all of dKV"),
        (cases.REPLICAS, "ring", f"{WORLD}transfers of KV; transfers of dKV"),
    ],
    ids=["uneven", "rank-without-tokens-allgather", "replicas"],
)
def test_every_kind_of_transfer_of_a_plan_is_tried(pools, replicas, exchange, tried_text) -> None:
    plan = cases.make_plan(replicas, exchange=exchange)
    outcomes = pools(plan.world_size).run(tried, plan, 30.0)
    for outcome in outcomes:
        assert outcome.stages == outcomes[0].stages
        assert outcome.slowest == outcomes[0].slowest
        a, b, rate = outcome.slowest
        assert 0 <= a < b < plan.world_size
        assert rate > 0
    lines = describe(outcomes[0], "rank {}".format, 0.0123, 0).splitlines()
    assert lines[1] == f"  {tried_text}"
    assert lines[3] == "  nodes' clocks within 0.01 s; no differences noted"


@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_plans_drawn_at_random_pass(pools, exchange) -> None:
    plans = [plan for seed in range(40) if (plan := draw_plan(seed, exchange=exchange)).world_size in (3, 4)]
    for plan in plans[:6]:
        assert all(isinstance(outcome, Outcome) for outcome in pools(plan.world_size).run(tried, plan, 30.0))


@pytest.mark.parametrize(
    ("kind", "at", "words"),
    [
        ("sum", 0, "all-reduce over all ranks: the sum is wrong on rank 0 (cpu on here), rank 1 (cpu on here), "
                   "rank 2 (cpu on here): element 0 of 1 is 4 instead of 3"),
        ("all-to-all", 1, "all-to-all in groups: wrong data from rank 1 (cpu on here) on rank 0 (cpu on here), rank 1 "
                          "(cpu on here): element 0 of "),
        ("transfer", 2, "transfers of KV: wrong data from rank 2 (cpu on here) on rank 0 (cpu on here), "
                        "rank 1 (cpu on here): element "),
    ],
)  # fmt: skip
def test_wrong_data_is_named_with_its_sender_on_all_ranks(pools, kind, at, words) -> None:
    first, *others = pools(3).run(tried, cases.make_plan(cases.UNEVEN), 30.0, kind, at)
    assert words in first
    assert others == [first] * 2


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 2])
def test_a_rank_that_stops_is_named_within_the_timeout(at) -> None:
    # Rank 0, who would answer the others, is waited for some seconds longer.
    kind = "stop:5" if at else "stop:10"
    with Pool(3) as own:
        answers = own.run(tried_once, cases.make_plan(cases.UNEVEN), 3.0, kind, at)
    told = f"preflight: rank {at} (cpu on here) did not answer within 3 s; see its log, or leave it out"
    assert [answer for rank, answer in enumerate(answers) if rank != at] == [told, told]


def tried_once(*args: Any) -> str:
    """`tried` where ranks do not end as one: the pool is of no use afterwards."""
    with mock.patch("hexiseq.attention.Runtime.close"):
        return str(tried(*args))


def trained(plan: Plan, preflight: timedelta | None) -> str:
    """What this rank's training ends with, rank 2 altering what it sends to other groups."""
    try:
        with fault("transfer", 2):
            job = cases.trainer(HexiSeqStrategy(plan, preflight=preflight), max_steps=1)
            job.fit(cases.CausalLM(cases.CONFIG, cases.OPTIMIZER, seed=7), cases.Batches(plan))
    except ValueError as error:
        return str(error)
    return "went on"


def test_the_strategy_stops_before_a_step_with_wrong_data(pools) -> None:
    plan = cases.make_plan(cases.UNEVEN)
    answers = pools(3).run(trained, plan, timedelta(seconds=30), timeout=120)
    assert len(set(answers)) == 1
    assert answers[0].startswith(
        "preflight: this job's links do not work:\n  transfers of KV: wrong data from rank 2 ("
    )
    # Nothing else would find it.
    assert pools(3).run(trained, plan, None, timeout=120) == ["went on"] * 3

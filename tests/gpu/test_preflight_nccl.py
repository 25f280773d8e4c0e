"""What a GPU reports of itself, and the trial of links over NCCL: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from test_attention_nccl import plan_of, run

from hexiseq import doctor
from hexiseq.attention import runtime_for
from hexiseq.preflight import Outcome, try_links

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_gpu_reports_what_the_doctor_compares():
    report = doctor.examine(torch.device("cuda", 0), 0)
    assert report.gpu in doctor.driver_name(torch.device("cuda", 0))
    assert report.capability == ".".join(map(str, torch.cuda.get_device_capability(0)))
    assert 0 <= report.used_gb <= torch.cuda.mem_get_info(0)[1] / 1e9
    held = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")  # this rank's own, so not in use by somebody else
    assert doctor.examine(torch.device("cuda", 0), 0).used_gb == pytest.approx(report.used_gb, abs=0.2)
    del held


def tried(rank: int, exchange: str) -> Outcome:
    plan = plan_of(1024, exchange, uneven=True)
    runtime = runtime_for(plan, timedelta(seconds=60))
    meeting = doctor.Meeting(doctor.reach_store("unused", 0, rank, 60.0), rank, 2, 60.0, runtime.links.name)
    return try_links(runtime, meeting, torch.device("cuda", rank), 60.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_links_of_two_gpus_pass(exchange):
    for outcome in run(tried, exchange):
        kind = "all-to-all" if exchange == "allgather" else "transfers"
        assert {("reduce-scatter", "over all ranks"), (kind, "of KV"), (kind, "of dKV")} <= set(outcome.stages)
        assert outcome.slowest[:2] == (0, 1)
        assert outcome.slowest[2] > 0
        assert outcome.seconds < 20

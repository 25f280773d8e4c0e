"""Figures of the throughput callback against the worked example of docs/metrics.md, by hand, and by brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hexiseq.attention import clock
from hexiseq.attention.clock import Clock, Span
from hexiseq.callbacks import Throughput, Traces
from hexiseq.callbacks.split import RankSplit, balance, fill, rank_split
from hexiseq.callbacks.throughput import mfu
from hexiseq.callbacks.work import RankWork
from hexiseq.plan import Plan, Prediction, RankDevice, make_replica
from hexiseq.strategy import StepStats
from hexiseq.testing import draw_mask, draw_plan
from hexiseq.workload import ModelShape, Workload, model_flops
from recipes import job as jobs
from recipes import loggers

# The worked example of docs/metrics.md.
MODEL = ModelShape("example", layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=4, vocab=32)
PLAN = Plan(
    "manual", 16, 4, 2, 4, 1, "ring", "none", "float32",
    (make_replica(16, 4, [(2, [(0, 8, 4)]), (2, [(1, 4, 3), (2, 4, 1)])]),),
    (RankDevice("big", "a", "cpu"), RankDevice("small", "b", "cpu"), RankDevice("small", "b", "cpu")),
    predicted=Prediction(0.9e-6, 1.7e7, 0.0, 0.0, 0.0, 0.0, (1.0, 2.0, 3.0), (4.0, 4.0, 4.0)),
)  # fmt: skip
FLOPS = (112128.0, 62592.0, 49536.0)
PEAKS = {"big": 0.4, "small": 0.1}


def test_the_worked_example() -> None:
    assert tuple(RankWork(PLAN, MODEL, rank).micro_step() for rank in range(3)) == FLOPS
    by_rank = {
        "valid_tokens": (7.0, 4.0, 4.0),
        "flops": FLOPS,
        "data_wait_seconds": (0.0, 1e-7, 2e-7),
        "memory_gb": (1.5, 0.5, 0.75),
    }
    figures = Throughput(MODEL, PEAKS, print_every=1)._metrics(PLAN, StepStats(2.5, 15, 1.0, by_rank), 1e-6)
    assert figures == pytest.approx(
        {
            "loss": 2.5,
            "grad_norm": 1.0,
            "learning_rate": 0.0,
            "step_seconds": 1e-6,
            "data_wait_seconds": 2e-7,
            "tokens_per_second": 15e6,
            "tokens_per_second_per_device": 5e6,
            "tokens_per_second_big": 7e6,
            "tokens_per_second_small": 8e6,
            "mfu": 0.37376,
            "mfu_big": 0.28032,
            "mfu_small": 0.56064,
            "predicted_step_seconds": 0.9e-6,
            "prediction_error": 0.1,
            "memory_gb_big": 1.5,
            "memory_gb_small": 0.75,
            **{f"tokens_rank_{rank}": tokens for rank, tokens in enumerate((8, 4, 4))},
            **{f"memory_gb_rank_{rank}": gb for rank, gb in enumerate((1.5, 0.5, 0.75))},
            **{f"predicted_memory_gb_rank_{rank}": gb for rank, gb in enumerate((1.0, 2.0, 3.0))},
        }
    )
    # A type without a peak has no MFU, and the job then has none.
    assert set(mfu(["big", "small", "small"], FLOPS, {"small": 0.1}, 1e-6)) == {"mfu_small"}
    assert balance([split(4.0), split(2.0), split(3.0)]) == 0.75


def split(compute_seconds: float) -> RankSplit:
    return RankSplit(0, "big", "a", compute_seconds, 0.0, 0.0, 0.0, 0.0, {})


@pytest.mark.parametrize("seed", range(40))
def test_ranks_work_adds_up_to_the_models(seed: int) -> None:
    plan = draw_plan(seed)
    window = (None, 1, 5, plan.seq_len + 1)[seed % 4]
    full = 1 if window and seed % 3 == 0 else 0
    model = ModelShape("m", 3, 16, 24, plan.num_heads, plan.num_kv_heads, 4, 50, window=window, full_layers=full)
    works = [RankWork(plan, model, rank) for rank in range(plan.world_size)]
    workload = Workload(model, plan.seq_len, "float32", "none", plan.sequences, 2, False)
    assert sum(2 * work.micro_step() for work in works) == model_flops(workload)

    # Packed documents, counted pair by pair.
    documents = draw_mask(seed, plan.seq_len, plan.replicas[0].sequences)["documents"]
    if documents is None:
        return
    pairs = 0
    for edges in documents:
        for kind in model.kinds:
            for start, end in itertools.pairwise(edges):
                for query in range(start, end):
                    pairs += kind.layers * sum(1 for key in range(start, query + 1)
                                               if kind.window is None or query - key < kind.window)  # fmt: skip
    ranks = plan.replicas[0].ranks
    own = model_flops(Workload(model, plan.seq_len, "float32", "none", plan.replicas[0].sequences, 1, False))
    whole = model_flops(Workload(model, plan.seq_len, "float32", "none", 1, 1, False))
    plain = sum(work.micro_step() for work in (works[rank] for rank in ranks))
    assert plain == own == whole * plan.replicas[0].sequences
    packed = sum(works[rank].micro_step(documents) for rank in ranks)
    linear = plain - sum(
        3 * plan.num_heads * 16 * kind.layers * sum(min(q + 1, kind.window or q + 1) for q in range(plan.seq_len))
        for kind in model.kinds
    ) * plan.replicas[0].sequences  # fmt: skip
    assert packed == linear + 3 * plan.num_heads * 16 * pairs


# --- the clock


class Ticks:
    """Time that passes by one with every look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


class Event:
    """torch.cuda.Event, on the same time, in milliseconds."""

    ticks: Ticks

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = self.ticks.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_spans_follow_one_another(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    Event.ticks = Ticks()
    waited: list[Any] = []
    monkeypatch.setattr(clock, "time", Event.ticks)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    one = Clock()
    one.begin("exchange", "while it is off")
    one.end()
    one.start(torch.device(device))
    one.begin("compute", "outer")
    one.begin("exchange", "inside")
    one.end()
    one.end()
    one.begin("wait", "after")
    one.end()
    # A moment of an outer span that another interrupts is the other's.
    assert one.stop() == [
        Span("compute", "outer", 1, 2),
        Span("exchange", "inside", 2, 3),
        Span("compute", "outer", 3, 4),
        Span("wait", "after", 5, 6),
    ]
    assert len(waited) == (2 if device == "cuda" else 0)
    assert not one.timing


def test_gaps_between_spans_are_computing() -> None:
    spans = [
        Span("wait", "early", 0, 2),
        Span("wait", "w", 3, 4),
        Span("exchange", "x", 4, 6),
        Span("wait", "l", 8, 11),
    ]
    assert fill(spans, 2.5, 10) == [
        ("compute", "linear", 0, 0.5),
        ("wait", "w", 0.5, 1.5),
        ("exchange", "x", 1.5, 3.5),
        ("compute", "linear", 3.5, 7.5),
    ]
    assert fill([], 1, 2) == [("compute", "linear", 0, 1)]
    found = rank_split(PLAN, 1, 10.0, 1.0, 0.5, {"exchange": 2.0, "wait": 3.0}, {})
    assert found == RankSplit(1, "small", "b", 4.0, 2.0, 3.0, 1.0, 0.5, {})


# --- settings and W&B


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Throughput(print_every=-1), "print_every must be at least 0, got -1"),
        (lambda: Throughput(print_every=1, split_every=0), "split_every must be at least 1, or null for never; got 0"),
        (lambda: Traces(Path(), (3, 3)), r"two ascending steps from 1 on, \[first, last\), got \(3, 3\)"),
        (lambda: Traces(Path(), (0, 3)), r"from 1 on, .* got \(0, 3\)"),
    ],
)
def test_settings_are_checked(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


WANDB = {"name": "wandb", "project": "hexiseq", "mode": "online", "resume": False, "init_timeout_seconds": 1}


def job(folder: Path, **logger: Any) -> Any:
    config = {"logger": {**WANDB, **logger}, "ckpt_path": None}
    return SimpleNamespace(config=config, run_dir=folder, plan=PLAN)


def test_what_cannot_be_logged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"run folder .*file/run cannot be written to: .*; choose another with hydra"):
        jobs.make_folder(tmp_path / "file" / "run")
    for change, message in (
        ({"mode": "dance"}, "logger.mode 'dance' is not one of online, offline"),
        ({"init_timeout_seconds": 0}, "logger.init_timeout_seconds must be above 0 and at most 3600, got 0"),
        ({"init_timeout_seconds": float("inf")}, "must be above 0 and at most 3600, got inf"),
        ({"resume": True}, "name one with ckpt_path=FOLDER"),
        ({"resume": "no"}, "logger.resume must be true or false, got 'no'"),
        ({"project": "a/b"}, "logger.project must be a name of at most 128 letters, .* got 'a/b'"),
        ({"name": "tensorboard"}, "logger.name 'tensorboard' is not one of csv, wandb"),
    ):
        with pytest.raises(ValueError, match=message):
            loggers.check(job(tmp_path, **change).config)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-30"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"there is no wandb.json beside ckpt_path .*step-30"):
        loggers.earlier_run(str(checkpoint))
    for text in ("{}", "[]", "", '{"id": null}', '{"id": "a/b"}'):
        (tmp_path / "run" / "wandb.json").write_text(text)
        with pytest.raises(ValueError, match=r"run/wandb.json is not what a run writes"):
            loggers.earlier_run(str(checkpoint))
    (tmp_path / "run" / "wandb.json").unlink()
    (tmp_path / "run" / "wandb.json").write_text(json.dumps({"id": "abc", "project": "p"}))
    assert loggers.earlier_run(str(checkpoint)) == "abc"


def test_without_a_key_or_a_network_wandb_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for key, line in ((None, "W&B: no API key"), ("0" * 40, "W&B cannot be reached")):
        if key:
            monkeypatch.setenv("WANDB_API_KEY", key)
        folder = tmp_path / f"run-{key}"
        folder.mkdir()
        PLAN.save(folder / "plan.json")
        run = loggers.start_wandb(job(folder))
        assert run.settings.mode == "offline"
        run.finish()
        out, err = capfd.readouterr()
        assert [text.startswith(line) for text in out.splitlines()] == [True], out
        assert "Traceback" not in err
        (kept,) = folder.glob("wandb/offline-run-*/*.wandb")
        assert kept.stem == f"run-{json.loads((folder / 'wandb.json').read_text())['id']}"

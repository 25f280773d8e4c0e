"""What a run logs about itself: exact over uneven ranks and replicas, and the sampled step's split."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import telemetry_cases as cases
from training_cases import NO_TOKENS, PACKED, REPLICAS, UNEVEN, make_plan

from hexiseq.plan import Plan, RankDevice
from hexiseq.workload import Workload, model_flops

START_UP = 180.0


def mixed(plan: Plan) -> Plan:
    """Rank 0 is of another device type than the others."""
    kinds = ["fast", *["slow"] * (plan.world_size - 1)]
    return dataclasses.replace(plan, devices=tuple(RankDevice(kind, "here", "cpu") for kind in kinds))


def run(pools: Any, plan: Plan, *args: Any, **settings: Any) -> list[dict[str, Any]]:
    return pools(plan.world_size).run(cases.logged_on, plan, args, settings, timeout=START_UP)


@pytest.mark.parametrize(
    ("replicas", "recompute", "exchange"),
    [
        pytest.param(UNEVEN, "selective", "ring", id="uneven"),
        pytest.param(REPLICAS, "none", "allgather", id="uneven-replicas"),
        pytest.param(NO_TOKENS, "full", "ring", id="rank-without-tokens"),
    ],
)
def test_counts_are_exact_and_sampling_changes_nothing(pools, tmp_path, replicas, recompute, exchange):
    plan = mixed(make_plan(replicas, recompute=recompute, exchange=exchange))
    plain = run(pools, plan, 4, str(tmp_path / "plain"), None, accumulate_grad_batches=2)
    sampled = run(pools, plan, 4, str(tmp_path / "split"), 1, accumulate_grad_batches=2)
    work = model_flops(Workload(cases.MODEL, plan.seq_len, plan.dtype, recompute, plan.sequences, 2, False))
    ranks = list(zip(plain, sampled, strict=True))
    for one, other in ranks:
        assert one["losses"] == other["losses"]
        assert all(np.array_equal(grad, other["grads"][name]) for name, grad in one["grads"].items())
        assert one["hooks"] == other["hooks"]  # those of the sampled step are gone
        for result in (one, other):
            rows = result["metrics"]
            assert [row["step"] for row in rows] == [1, 2, 3, 4]
            for row, valid, loss in zip(rows, result["valid"], result["losses"], strict=True):
                seconds = row["step_seconds"]
                assert row["loss"] == loss
                assert row["tokens_per_second"] * seconds == pytest.approx(valid)
                assert row["tokens_per_second_per_device"] * 3 == pytest.approx(row["tokens_per_second"])
                by_type = row["tokens_per_second_fast"] + row["tokens_per_second_slow"]
                assert by_type == pytest.approx(row["tokens_per_second"])
                assert row["mfu"] * seconds * 0.5e12 == pytest.approx(work)
                parts = (0.3 * row["mfu_fast"] + 0.2 * row["mfu_slow"]) * seconds * 1e12
                assert parts == pytest.approx(work)
                assert row["memory_gb_slow"] == max(row["memory_gb_rank_1"], row["memory_gb_rank_2"]) >= 0
            assert all(("balance" in row) == (result is other and row["step"] >= 3) for row in rows)
    # Valid tokens of each type, counted from the shards: rank 0 is the fast one.
    share = sum(row["tokens_per_second_fast"] * row["step_seconds"] for row in plain[0]["metrics"])
    assert share == pytest.approx(sum(cases.valid_tokens(plan, rank=0, micro_steps=8)))

    # All ranks log the same but for their own clocks.
    assert len({tuple(row["loss"] for row in result["metrics"]) for result in sampled}) == 1
    table = json.loads((tmp_path / "split" / "step_split.json").read_text())
    assert not (tmp_path / "plain" / "step_split.json").exists()
    assert table["step"] == 4
    assert table["step_seconds"] == sampled[0]["metrics"][-1]["step_seconds"]
    check_split(plan, table, sampled[0]["metrics"][-1], exchange, recompute)


def check_split(plan: Plan, table: dict, row: dict, exchange: str, recompute: str) -> None:
    busy = []
    for rank, entry in enumerate(table["ranks"]):
        device = plan.devices[rank]
        assert (entry["rank"], entry["device"], entry["node"]) == (rank, device.type, device.node)
        for name in ("compute_seconds", "exchange_seconds", "wait_seconds"):
            assert entry[name] == row[f"{name}_rank_{rank}"] >= 0
        assert entry["memory_gb"] >= 0
        busy.append(entry["compute_seconds"])
        total = sum(entry[f"{name}_seconds"] for name in ("compute", "exchange", "wait", "data_wait"))
        if rank == 0:
            assert total == pytest.approx(table["step_seconds"])
        assert set(entry["layer"]) == {"forward", "backward"}
        for spans in entry["layer"].values():
            assert spans[0][2] == 0
            for (_, _, start, end), (*_, following, _) in itertools.pairwise(spans):
                assert start <= end
                assert end == pytest.approx(following, abs=1e-9)
        forward, backward = ([(kind, name) for kind, name, *_ in entry["layer"][p]] for p in ("forward", "backward"))
        assert ("exchange", "gather parameters") in forward
        assert ("exchange", "reduce gradients") in backward
        # Ranks meet before attention: forward, recomputed, backward.
        together = len(plan.replicas[plan.place(rank)[0]].ranks) > 1
        assert forward.count(("wait", "comparing calls")) == together
        assert backward.count(("wait", "comparing calls")) == together * (1 + (recompute != "none"))
        kv = [name for kind, name in forward if kind == "exchange" and name.startswith("KV")]
        assert bool(kv) == (len(plan.replicas[plan.place(rank)[0]].groups) > 1 and bool(plan.shard(rank).num_heads))
        if kv:
            assert all(("all-gather" in name) == (exchange == "allgather") for name in kv)
        if plan.shard(rank).num_heads:
            assert ("compute", "own attention") in forward
            assert ("compute", "own attention") in backward
    assert row["balance"] == pytest.approx(sum(busy) / len(busy) / max(busy))
    mean = (busy[1] + busy[2]) / 2
    assert row["compute_seconds_slow"] == pytest.approx(mean)


@pytest.mark.slow
def test_compiled_layers_are_sampled_too(pools, tmp_path):
    plan = mixed(make_plan(UNEVEN, recompute="none"))
    plain = run(pools, plan, 4, str(tmp_path / "plain"), None, compiled=True)
    sampled = run(pools, plan, 4, str(tmp_path / "split"), 1, compiled=True)
    for one, other in zip(plain, sampled, strict=True):
        assert one["losses"] == other["losses"]
        assert one["hooks"] == other["hooks"]
    table = json.loads((tmp_path / "split" / "step_split.json").read_text())
    check_split(plan, table, sampled[0]["metrics"][-1], "ring", "none")


def test_flops_of_packed_documents_are_fewer(pools, tmp_path):
    plan = mixed(make_plan(PACKED))
    rows = run(pools, plan, 2, str(tmp_path), None, packing="documents")[0]["metrics"]
    plain = model_flops(Workload(cases.MODEL, plan.seq_len, plan.dtype, "none", plan.sequences, 1, False))
    for row, documents in zip(rows, cases.documents(plan, 2), strict=True):
        pairs = sum((b - a) * (b - a + 1) // 2 for edges in documents for a, b in itertools.pairwise(edges))
        fewer = plan.sequences * plan.seq_len * (plan.seq_len + 1) // 2 - pairs
        less = 3 * cases.MODEL.layers * cases.MODEL.heads * 4 * cases.MODEL.head_dim * fewer
        assert row["mfu"] * row["step_seconds"] * 0.5e12 == pytest.approx(plain - less)


def test_a_step_is_its_data_and_computing_not_checkpoints_and_validation(pools, tmp_path):
    plan = make_plan(UNEVEN)
    for rank, rows in enumerate(pools(3).run(cases.durations, plan, str(tmp_path), timeout=START_UP)):
        # Two batches and two micro-steps, and a user's callback after those before, but where a validation follows it.
        batch = 20 if rank == 1 else 10
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        # The first step's batches come with one ahead.
        steady = [row["step_seconds"] - 2 * batch for row in rows[1:]]
        assert steady == pytest.approx([2.1, 2.2, 2.1], abs=1e-6)
        assert [row["data_wait_seconds"] for row in rows[1:]] == pytest.approx([40] * 3)


def test_traces_name_what_attention_does(pools, tmp_path):
    plan = mixed(make_plan(UNEVEN))
    assert pools(3).run(cases.traced, plan, str(tmp_path), timeout=START_UP) == [False] * 3
    names = ["rank0-fast.json", "rank1-slow.json", "rank2-slow.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        ours = [event for event in events if event.get("name", "").startswith("hexiseq ") and event["ph"] == "X"]
        found = {event["name"].partition(":")[0] for event in ours}
        assert found == {"hexiseq compute", "hexiseq exchange", "hexiseq wait"}
        assert sum(event["name"] == "hexiseq compute: own attention" for event in ours) == 2 * cases.MODEL.layers
        assert all(event["dur"] >= 0 for event in ours)


def wandb_records(path: Path) -> list[Any]:
    """What an offline run has written: a log of LevelDB's format, of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, records, parts = path.read_bytes(), 7, [], b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:  # the rest of a block
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def wandb_history(records: list[Any]) -> list[dict[str, Any]]:
    rows = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


@pytest.mark.parametrize("fail", [False, True])
def test_wandb_has_what_metrics_csv_has(pools, tmp_path, fail):
    plan = mixed(make_plan(UNEVEN))
    pools(3).run(cases.to_wandb, plan, str(tmp_path), fail, timeout=START_UP)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")  # one run a job
    records = wandb_records(path)
    number = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert next(r.run.run_id for r in records if r.WhichOneof("record_type") == "run") == number
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [int(fail)]
    assert any(r.request.HasField("log_artifact") or r.HasField("artifact") for r in records)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        by_hand = [row for row in csv.DictReader(file) if row["step_seconds"]]
    history = wandb_history(records)
    assert sum("plan" in "".join(row) for row in history) == 1  # the picture
    there = [row for row in history if "tokens_per_second" in row]
    assert len(there) == len(by_hand) == (2 if fail else 4)
    for one, other in zip(there, by_hand, strict=True):
        tokens = sum(cases.valid_tokens(plan, rank, 4)[int(other["step"]) - 1] for rank in range(3))
        assert one["trainer/global_step"] == int(other["step"])
        assert one["tokens_per_second"] == pytest.approx(tokens / float(other["step_seconds"]))
        assert one["mfu_slow"] == pytest.approx(float(other["mfu_slow"]))

"""Training over a plan equals training of the plain Hugging Face model in one process, and resumes where it stopped."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import training_cases as cases
from training_cases import CONFIG, NO_TOKENS, PACKED, REPLICAS, TWO, UNEVEN, WINDOWS, make_plan

from hexiseq.data import restarted_positions
from hexiseq.launch import match_ranks
from hexiseq.plan import Plan, RankDevice, make_replica
from hexiseq.strategy import HexiSeqStrategy

START_UP = 180.0  # the first case imports Lightning and transformers in every rank


@pytest.mark.parametrize(
    ("replicas", "recompute", "steps", "clip", "strategy"),
    [
        pytest.param(UNEVEN, "none", [3, 3, 3], 0.5, {}, id="accumulation-clipping"),
        pytest.param(UNEVEN, "selective", [1, 1, 1], None, {}, id="selective"),
        pytest.param(UNEVEN, "full", [2, 2, 1], 0.5, {"reshard_after_forward": False}, id="full-short-last-step"),
        pytest.param(
            NO_TOKENS, "selective", [3, 3, 3], 0.5, {"reduce_each_micro_step": True}, id="rank-without-tokens"
        ),
        pytest.param(REPLICAS, "none", [2, 2, 2], 0.5, {}, id="two-replicas"),
    ],
)
def test_loss_and_gradients_in_float64(pools, replicas, recompute, steps, clip, strategy):
    plan = make_plan(replicas, recompute=recompute)
    for errors in pools(plan.world_size).run(cases.compare, plan, steps, clip, strategy, timeout=START_UP):
        assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize(
    ("replicas", "config", "packing", "recompute", "exchange"),
    [
        pytest.param(PACKED, CONFIG, "documents", "none", "ring", id="documents"),
        pytest.param(PACKED, CONFIG, "documents", "selective", "allgather", id="documents-selective-allgather"),
        pytest.param(PACKED, CONFIG, "restarted", "full", "ring", id="restarted-full"),
        pytest.param(NO_TOKENS, CONFIG, "restarted", "selective", "ring", id="restarted-rank-without-tokens"),
        pytest.param(REPLICAS, CONFIG, "restarted", "full", "allgather", id="restarted-full-allgather-two-replicas"),
        pytest.param(PACKED, WINDOWS, None, "none", "allgather", id="windows-allgather"),
        pytest.param(PACKED, WINDOWS, None, "selective", "ring", id="windows-selective"),
        pytest.param(PACKED, WINDOWS, None, "full", "ring", id="windows-full"),
        pytest.param(PACKED, WINDOWS, "restarted", "selective", "allgather", id="windows-restarted-allgather"),
        pytest.param(PACKED, WINDOWS, "restarted", "full", "ring", id="windows-restarted-full"),
    ],
)
def test_documents_and_windows_in_float64(pools, replicas, config, packing, recompute, exchange):
    plan = make_plan(replicas, recompute=recompute, exchange=exchange)
    args = (plan, [2, 2, 2], 0.5, {}, config, packing)
    for errors in pools(plan.world_size).run(cases.compare, *args, timeout=START_UP):
        assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize(
    ("replicas", "recompute", "dtype"), [(NO_TOKENS, "selective", "bfloat16"), (UNEVEN, "full", "float32")]
)
def test_offload_changes_nothing_but_where_inputs_are(pools, replicas, recompute, dtype):
    plan = make_plan(replicas, recompute=recompute, dtype=dtype)
    plans = [plan, dataclasses.replace(plan, offload=True)]
    for (stays, all_there), (goes, left) in pools(3).run(cases.offloaded, plans, [2, 2], timeout=START_UP):
        assert goes.losses == stays.losses
        assert all(torch.equal(goes.grads[name], grad) for name, grad in stays.grads.items())
        assert all(torch.equal(goes.weights[name], weight) for name, weight in stays.weights.items())
        assert (all_there, left) == ([4] * 4, [1] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_layers(pools, recompute):
    plan = make_plan(TWO, recompute=recompute)
    args = (plan, [2, 2], 0.5, {}, WINDOWS, "restarted", True)
    for errors in pools(plan.world_size).run(cases.compare, *args, timeout=START_UP):
        assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize(("dtype", "limits"), [("float32", (1e-6, 1e-4)), ("bfloat16", (1e-2, 0.2))])
def test_loss_and_gradients_in_lower_precision(pools, dtype, limits):
    plan = make_plan(UNEVEN, dtype=dtype, recompute="selective")
    for errors in pools(plan.world_size).run(cases.compare, plan, [3, 3, 3], 0.5, {}, timeout=START_UP):
        assert errors["loss"] <= limits[0], errors
        assert errors["grads"] <= limits[1], errors


def test_an_interrupted_run_continues_bitwise_and_on_fewer_ranks(pools, tmp_path):
    plan, folder = make_plan(UNEVEN, dtype="float32", recompute="selective"), str(tmp_path / "step-3")
    whole = pools(3).run(cases.run_to, 6, plan, None, None, timeout=START_UP)
    first = pools(3).run(cases.run_to, 3, plan, None, folder, timeout=START_UP)
    second = pools(3).run(cases.run_to, 6, plan, folder, None, timeout=START_UP)
    for a, b, c in zip(whole, first, second, strict=True):
        assert a["losses"] == b["losses"] + c["losses"]
        assert a["consumed"] == c["consumed"] == 12
        assert all(np.array_equal(w, c["weights"][n]) for n, w in a["weights"].items())

    # Another number of ranks, another cut, another recompute mode.
    for other in pools(2).run(cases.run_to, 6, make_plan(TWO, dtype="float32"), folder, None, timeout=START_UP):
        assert other["losses"] == pytest.approx(whole[0]["losses"][3:], rel=1e-5)
        assert other["consumed"] == 12
        for name, weight in whole[0]["weights"].items():
            assert np.abs(other["weights"][name] - weight).max() <= 1e-5 * np.abs(weight).max(), name


def test_tied_embeddings_train_and_resume(pools, tmp_path):
    plan = make_plan(TWO, dtype="float32")
    for whole, parts in pools(2).run(cases.tied, plan, str(tmp_path / "step-2"), timeout=START_UP):
        assert whole == parts
        assert whole[-1] < whole[0]


def test_a_running_job_takes_another_cut(pools):
    moved = (make_replica(cases.SEQ_LEN, 8, [(5, [(0, 20, 3), (1, 17, 6)]), (7, [(2, 56, 9)])]),)
    plans, other = [make_plan(UNEVEN), make_plan(moved)], make_plan(UNEVEN, recompute="full")
    for one, two, message, validation in pools(3).run(cases.replaced, plans, other, timeout=START_UP):
        assert two == pytest.approx(one, rel=1e-10)
        assert "cannot change recompute" in message
        assert validation > 0


@pytest.mark.parametrize("packed", [False, True])
def test_validation_counts_every_token_once(pools, packed):
    for got, tested, wanted in pools(3).run(cases.validate, make_plan(REPLICAS), packed, timeout=START_UP):
        assert got == pytest.approx(wanted, rel=1e-6)  # Lightning keeps metrics in float32
        assert tested == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mean", "Return model(**batch).loss as it is"),
        ("unparallel", "self.trainer.strategy.parallelize(model)"),
        ("unlabelled", "all labels of all ranks are -100"),
        (
            "other model",
            "model.model.layers.0.mlp.gate_proj.weight is [96, 72] in the checkpoint, [80, 72] in the model",
        ),
        ("no checkpoint", "does not exist"),
        ("damaged checkpoint", "is damaged (Ran out of input); without it an earlier one can be used"),
        ("precision", "the plan's dtype sets the precision"),
        ("devices", "toaster"),
        ("other documents", "ranks [2] got another first batch than rank 0 of their replica 0"),
        ("other sequences", "ranks [1] got another first batch than rank 0 of their replica 0"),
        ("no batch", "a batch must be a dict with input_ids and optionally labels, documents, position_ids; got list"),
        ("boundaries", "documents[0][2] must be above 50, the boundary before it, got 40"),
    ],
)
def test_every_rank_is_told_what_is_wrong(pools, tmp_path, kind, message):
    plan, folder = make_plan(UNEVEN, dtype="float32"), str(tmp_path / "checkpoint")
    if kind == "other model":
        pools(3).run(cases.run_to, 1, plan, None, folder, timeout=START_UP)
    if kind == "damaged checkpoint":
        (tmp_path / "checkpoint").mkdir()
        for part in (".metadata", "meta.pt"):
            (tmp_path / "checkpoint" / part).touch()
    for text in pools(3).run(cases.refusal, kind, plan, folder, timeout=START_UP):
        assert message in text


def test_ranks_are_matched_by_type_and_node():
    kinds = [("fast", "a"), ("fast", "a"), ("slow", "b"), ("fast", "c"), ("slow", "c")]
    devices = tuple(RankDevice(kind, node, "cpu") for kind, node in kinds)
    replica = make_replica(100, 10, [(4, [(0, 20, 2), (1, 20, 2)]), (3, [(2, 30, 4)]), (3, [(3, 15, 2), (4, 15, 2)])])
    plan = Plan("manual", 100, 4, 2, 10, 1, "ring", "none", "float32", (replica,), devices)

    assert match_ranks(plan, kinds) == plan
    # Other node names, another order, and the driver's name of a device.
    found = [("slow", "h9"), ("ACME Fast 80GB", "h9"), ("slow", "h1"), ("fast", "h3"), ("fast", "h3")]
    matched = match_ranks(plan, found, {"fast": ["ACME Fast"]})
    assert [device.type for device in matched.devices] == ["slow", "fast", "slow", "fast", "fast"]
    assert matched.replicas[0].groups[0].ranks == (3, 4)
    assert matched.replicas[0].groups[2].ranks == (1, 0)

    with pytest.raises(ValueError, match="are not the plan's 5 devices") as caught:
        match_ranks(plan, [("fast", "a"), ("slow", "a"), ("slow", "b"), ("fast", "c"), ("slow", "c")])
    assert "1 fast + 1 slow  1         2" in str(caught.value)
    with pytest.raises(ValueError, match="4 ranks are not the plan's 5 devices"):
        match_ranks(plan, kinds[:4])


N = cases.SEQ_LEN


def cutter(rank: int, replicas: tuple = PACKED) -> HexiSeqStrategy:
    strategy = HexiSeqStrategy(make_plan(replicas))
    strategy._plan, strategy.cluster_environment = strategy._given, SimpleNamespace(global_rank=lambda: rank)
    return strategy


def test_a_batch_is_cut_with_its_documents():
    ids, ends = torch.arange(2 * N).reshape(2, N), [[0, 1, 50, N], [0, 60, N]]
    batch = {"input_ids": ids, "documents": [torch.tensor(ends[0]), np.array(ends[1])]}
    positions = torch.from_numpy(np.stack([restarted_positions(e) for e in ends]))
    shards = [cutter(rank).cut({**batch, "position_ids": positions}) for rank in range(3)]
    ids_of, labels_of = ([shard[key] for shard in shards] for key in ("input_ids", "shift_labels"))
    target = dict(zip(torch.cat(ids_of, 1).flatten().tolist(), torch.cat(labels_of, 1).flatten().tolist(), strict=True))
    last = {row * N + end - 1 for row in range(2) for end in ends[row][1:]}
    assert target == {i: -100 if i in last else i + 1 for i in range(2 * N)}
    for shard in shards:
        assert shard["documents"] == ends
        assert torch.equal(shard["position_ids"], positions.flatten()[shard["input_ids"]])

    # Without documents, and with one in each sequence, nothing is marked.
    plain, single = (cutter(1).cut({"input_ids": ids, **more}) for more in ({}, {"documents": [[0, N], (0, N)]}))
    assert plain.keys() == single.keys() == {"input_ids", "position_ids", "shift_labels", "num_items_in_batch"}
    assert torch.equal(plain["position_ids"], plain["input_ids"] % N)
    assert all(torch.equal(plain[name], single[name]) for name in plain if name != "num_items_in_batch")

    # The dummy token of a rank without any.
    dummy = cutter(1, NO_TOKENS).cut({"input_ids": ids[:1], "documents": ends[:1]})
    assert dummy["documents"] == ends[:1]
    assert dummy["shift_labels"].tolist() == [[-100]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"documents": [[0, N]]}, "list of the boundaries of each of its 2 sequences, got 1"),
        ({"documents": 3}, "each of its 2 sequences, got 3"),
        ({"documents": [[0, N], [N]]}, r"documents\[1\] must be a list of at least 2 boundaries, 0 and 93, got \[93\]"),
        ({"documents": [[0, N], N]}, r"documents\[1\] must be a list of at least 2 boundaries, 0 and 93, got 93"),
        ({"documents": [[0, N], [0, 4.5, N]]}, r"documents\[1\]\[1\] must be an integer, got 4.5"),
        ({"documents": [[1, N], [0, N]]}, r"documents\[0\] must reach from 0 to the sequence's 93 tokens, got 1 to 93"),
        ({"documents": [[0, N], [0, N + 1]]}, r"documents\[1\] must reach .* 93 tokens, got 0 to 94"),
        ({"documents": [[0, N], [0, 7, 7, N]]}, r"documents\[1\]\[2\] must be above 7, the boundary before it, got 7"),
        (
            {"position_ids": torch.zeros(2, 9).long()},
            r"must be torch.int64 of shape \[2, 93\], got torch.int64 \[2, 9\]",
        ),
        ({"position_ids": torch.arange(-1.0, N - 1).expand(2, -1)}, r"must be torch.int64 .*, got torch.float32"),
        ({"position_ids": torch.arange(-1, N - 1).expand(2, -1)}, "must be at least 0, got -1"),
        (
            {"position_ids": torch.arange(2 * N).reshape(2, N) % 140},
            r"position_ids\[1\] jump from 139 to 0 at token 47: pass documents, with 47 as a boundary if",
        ),
    ],
)
def test_malformed_batches_are_named(batch, message):
    with pytest.raises(ValueError, match=message):
        cutter(0).cut({"input_ids": torch.zeros(2, N, dtype=torch.int64), **batch})


def test_the_strategy_needs_a_plan_or_what_to_make_one_from():
    with pytest.raises(ValueError, match="either plan, or cluster, workload and policy"):
        HexiSeqStrategy()

"""The plan's own rules: what it accepts, what it refuses and how it names it, and that it survives a file."""

import copy
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiseq.plan import (
    EXCHANGES,
    Bound,
    ExcludedDevice,
    Plan,
    Prediction,
    RankDevice,
    Rival,
    align,
    claims,
    cut,
    fits_slots,
    fragments,
    fusion_width,
    group_intervals,
    kv_heads,
    make_replica,
    table,
)


def example(**changes):
    """Three ranks: a group of two (5 slots), a group of one (3 slots), 62 tokens in slots of 8, 2 short."""
    replica = make_replica(62, 8, [(5, [(0, 30, 5), (1, 8, 1)]), (3, [(2, 24, 6)])], sequences=2)
    values = dict(
        policy="hexiseq", seq_len=62, num_heads=6, num_kv_heads=2, slot=8, fusion=2, exchange="ring",
        recompute="selective", dtype="bfloat16", replicas=(replica,),
        devices=(RankDevice("h100", "a", "flash_attn2"),) * 2 + (RankDevice("a100", "b", "torch_flash"),),
        excluded=(ExcludedDevice("v100", "c", "too slow"),),
        predicted=Prediction(1.5, 40.0, 1.0, 0.1, 0.2, 0.3, (10.0, 11.0, 12.0), (76.0, 76.0, 38.0)),
        bound=Bound(1.2), gap=0.25, solve_seconds=0.01,
        rivals=(Rival("ring", "ok", 2.0, 31.0), Rival("ulysses", "illegal", reason="6 heads over 4 ranks")),
    )  # fmt: skip
    return Plan(**{**values, **changes})


def edited(edit):
    data = copy.deepcopy(example().to_dict())
    edit(data, data["replicas"][0]["groups"])
    return Plan.from_dict(data)


def test_layout_is_nested_and_mirrored():
    plan = example()
    outer, inner = plan.replicas[0].groups
    assert group_intervals(62, 8, [5, 3]) == [((0, 20), (44, 62)), ((20, 32), (32, 44))]
    assert outer.shards[0].tokens == ((0, 20), (44, 54))
    assert outer.shards[1].tokens == ((54, 62),)
    assert inner.shards[0].tokens == ((20, 44),)  # touching intervals are one
    assert plan.sequences == 2
    assert plan.world_size == 3
    assert plan.place(2) == (0, 1, 0)
    assert plan.shard(1).heads == (5, 6)
    assert plan.shard(1).positions().tolist() == list(range(54, 62))


BROKEN = {
    "lost token": (lambda d, g: g[1]["shards"][0].update(tokens=[[20, 43]]), r"tokens \[43, 44\) belong to no rank"),
    "doubled token": (
        lambda d, g: g[1]["shards"][0].update(tokens=[[20, 45]]), r"tokens \[44, 45\) belong to ranks 2 and 0"),
    "token outside": (lambda d, g: g[0]["shards"][1].update(tokens=[[54, 63]]), r"not a range within \[0, 62\)"),
    "empty interval": (lambda d, g: g[0]["shards"][1].update(tokens=[[54, 54], [54, 62]]), "not a range"),
    "order of members": (
        lambda d, g: (g[0]["shards"][0].update(tokens=[[8, 20], [44, 62]]), g[0]["shards"][1].update(tokens=[[0, 8]])),
        "cut in member order"),
    "tokens of another group": (
        lambda d, g: (g[0]["shards"][0].update(tokens=[[0, 19], [44, 54]]),
                      g[1]["shards"][0].update(tokens=[[19, 44]])), "group 0: its 5 slots are the tokens"),
    "lost head": (lambda d, g: g[0]["shards"][0].update(heads=[0, 4]), r"heads \[4, 5\) belong to no rank"),
    "doubled head": (lambda d, g: g[0]["shards"][1].update(heads=[4, 6]), r"heads \[4, 5\) belong to ranks 0 and 1"),
    "missing last head": (lambda d, g: g[1]["shards"][0].update(heads=[0, 5]), r"heads \[5, 6\) belong to no rank"),
    "head outside": (lambda d, g: g[1]["shards"][0].update(heads=[0, 7]), r"heads \[0, 7\)"),
    "odd slot": (lambda d, g: d.update(slot=7), "slot must be an even number"),
    "too many slots": (lambda d, g: g[0].update(slots=6), "9 slots of 8 tokens do not cover 62"),
    "too few slots": (lambda d, g: g[0].update(slots=4), "60 to 64|do not cover 62"),
    "no slots": (lambda d, g: g[1].update(slots=0), "needs at least one slot"),
    "doubled rank": (lambda d, g: g[1]["shards"][0].update(rank=1), r"ranks 0 to 2 once each, got \[0, 1, 1\]"),
    "no sequences": (lambda d, g: d["replicas"][0].update(sequences=0), "0 sequences"),
    "unknown policy": (lambda d, g: d.update(policy="best"), "'best' is not one of hexiseq"),
    "unknown recompute": (lambda d, g: d.update(recompute="some"), "recompute 'some'"),
    "offload of text": (lambda d, g: d.update(offload="yes"), "plan: offload must be true or false, got 'yes'"),
    "offload without recompute": (
        lambda d, g: d.update(offload=True, recompute="none"), "plan: offload .* use recompute selective or full"),
    "unknown exchange": (lambda d, g: d.update(exchange="mail"), "exchange 'mail' is not one of ring, allgather"),
    "unknown dtype": (lambda d, g: d.update(dtype="int8"), "dtype 'int8'"),
    "uneven groups of heads": (lambda d, g: d.update(num_kv_heads=4), "not a multiple of 4 KV heads"),
    "no fusion": (lambda d, g: d.update(fusion=0), "fusion must be a positive integer"),
    "missing key": (lambda d, g: d.pop("seq_len"), "seq_len"),
    "missing shard key": (lambda d, g: g[0]["shards"][0].pop("heads"), "'heads' is missing"),
    "unknown key": (lambda d, g: d.update(colour="red"), "colour"),
    "heads of text": (
        lambda d, g: g[1]["shards"][0].update(heads=["0", "9"]),
        r"replicas\[0\]\.groups\[1\]\.shards\[0\]\.heads must be \[start, end\), two integers, got \['0', '9'\]"),
    "one head": (lambda d, g: g[1]["shards"][0].update(heads=5), r"shards\[0\]\.heads must be \[start, end\).*got 5"),
    "tokens that are no ranges": (
        lambda d, g: g[1]["shards"][0].update(tokens=[20, 44]), r"tokens\[0\] must be \[start, end\).*got 20"),
    "rank of text": (lambda d, g: g[1]["shards"][0].update(rank="2"), r"shards\[0\]\.rank must be an integer, got '2'"),
    "fractional slots": (lambda d, g: g[1].update(slots=3.0), r"groups\[1\]\.slots must be an integer, got 3\.0"),
    "true for a number": (lambda d, g: d.update(fusion=True), "fusion must be an integer, got True"),
    "no list": (lambda d, g: d.update(replicas=5), "plan: replicas must be a list, got 5"),
    "prediction of a number": (lambda d, g: d.update(predicted=5), "plan: predicted: expected a mapping.*got 5"),
    "short host memory": (
        lambda d, g: d["predicted"].update(host_memory_gb=[1.0]), r"predicted\.host_memory_gb must have.*got 1"),
    "short prediction": (lambda d, g: d["predicted"].update(memory_gb=[1.0]), r"predicted\.memory_gb must have.*got 1"),
    "gap of text": (lambda d, g: d.update(gap="x"), "plan: gap must be a number, got 'x'"),
    "missing bound": (lambda d, g: d["bound"].clear(), "plan: bound: key 'step_seconds' is missing"),
    "unknown device key": (
        lambda d, g: d["devices"][1].update(colour=1), r"plan: devices\[1\]: key 'colour' is not known; the keys are"),
    "unknown kernel": (lambda d, g: d["devices"][1].update(kernel="magic"), r"devices\[1\]\.kernel 'magic' is not one"),
    "new version": (lambda d, g: d.update(version=2), "version 2 is not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_says_what_is_wrong(name):
    edit, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        edited(edit)


def test_zero_tokens_and_zero_heads_are_legal():
    replica = make_replica(64, 16, [(2, [(0, 0, 4), (1, 32, 0)]), (2, [(2, 32, 4)])])
    devices = (RankDevice("x", "n", "cpu"),) * 3
    plan = Plan("manual", 64, 4, 2, 16, 1, "ring", "none", "float32", (replica,), devices)
    assert plan.shard(0).tokens == ()
    assert plan.shard(1).num_heads == 0


def test_plans_made_in_code_are_checked_for_kernels():
    odd = (*example().devices[:2], RankDevice("a100", "b", "magic"))
    with pytest.raises(ValueError, match=r"devices\[2\]\.kernel 'magic' is not one of torch_flash, .*, auto"):
        example(devices=odd)
    assert {example(exchange=exchange).exchange for exchange in EXCHANGES} == {"ring", "allgather"}


@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
def test_fragments_are_whole_ratios_of_the_right_heads(ratio):
    for first in range(17):
        for last in range(first, 17):
            made, k0 = fragments((first, last), ratio), kv_heads((first, last), ratio)[0]
            served = []
            for (q0, q1), (a, b) in made:
                assert (q1 - q0) % (b - a) == 0
                each = (q1 - q0) // (b - a)
                served += [(first + q, k0 + a + (q - q0) // each) for q in range(q0, q1)]
            assert served == [(q, q // ratio) for q in range(first, last)]
            assert len(made) <= 3
    assert len(fragments((3, 9), 3)) == len(fragments((4, 5), 3)) == 1
    assert len(fragments((2, 7), 3)) == 3


def test_every_kv_head_has_one_speaker():
    assert claims([(0, 2), (1, 3), (3, 3), (1, 2), (2, 4)]) == [(0, 2), (2, 3), (3, 3), (3, 3), (3, 4)]
    assert claims([]) == []


def test_fusion_leaves_a_tick_for_the_transfer():
    assert [fusion_width(4, slots) for slots in range(1, 8)] == [1, 1, 2, 3, 4, 4, 4]


def test_json_round_trip(tmp_path):
    plan = example()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    stable = {
        "policy",
        "seq_len",
        "slot",
        "predicted",
        "bound",
        "gap",
        "solve_seconds",
        "rivals",
        "devices",
        "replicas",
    }
    data = json.loads(path.read_text())
    assert stable <= set(data)
    assert data["predicted"]["memory_gb"][2] == 12.0
    assert data["replicas"][0]["groups"][0]["shards"][0]["tokens"] == [[0, 20], [44, 54]]
    bare = example(predicted=None, bound=None, gap=None, solve_seconds=None, rivals=(), excluded=())
    bare.save(path)
    assert Plan.load(path) == bare


def test_files_that_are_no_plans(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        Plan.load(tmp_path / "none.json")
    path = tmp_path / "plan.json"
    for text in ("{", "[]", '"plan"'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"plan file .*plan\.json"):
            Plan.load(path)


def test_digest_is_what_ranks_execute():
    plan = example()
    same = dataclasses.replace(
        plan, predicted=None, gap=None, rivals=(), solve_seconds=9.0, bound=None, policy="manual"
    )
    assert same.digest() == plan.digest()
    for change in (
        {"fusion": 3}, {"exchange": "allgather"}, {"recompute": "full"}, {"dtype": "float16"},
        {"devices": plan.devices[::-1]}, {"offload": True},
    ):  # fmt: skip
        assert dataclasses.replace(plan, **change).digest() != plan.digest()
    older = plan.to_dict()
    del older["offload"], older["predicted"]["host_memory_gb"], older["predicted"]["host_copy_seconds"]
    assert Plan.from_dict(older) == plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).digest() == plan.digest()


def test_relabel_moves_devices_memory_and_shards_together():
    plan = example()
    moved = plan.relabel([2, 0, 1])
    for old, new in enumerate([2, 0, 1]):
        assert moved.shard(new).tokens == plan.shard(old).tokens
        assert moved.shard(new).heads == plan.shard(old).heads
        assert moved.devices[new] == plan.devices[old]
        assert moved.predicted.memory_gb[new] == plan.predicted.memory_gb[old]
    assert moved.relabel([1, 2, 0]) == plan
    with pytest.raises(ValueError, match="not a permutation"):
        plan.relabel([0, 0, 1])
    with pytest.raises(ValueError, match="rank 7"):
        plan.place(7)


def test_table_shows_every_rank_and_rival():
    text = table(example())
    lines = text.splitlines()
    assert lines[1].split() == ["rank", "device", "node", "replica", "group", "tokens", "share", "heads", "kv", "heads",
                                "memory"]  # fmt: skip
    assert "h100" in lines[2]
    assert "10/76 GB" in lines[2]
    assert "left out: v100 on c: too slow" in lines
    assert any(line.startswith("ring") and "1.333x" in line for line in lines)
    assert any(line.startswith("ulysses") and line.endswith("6 heads over 4 ranks") for line in lines)
    assert "gap 25.0%" in text
    assert "all-to-all 0.1 s, ring 0.2 s, parameters 0.3 s" in text
    assert "all-to-all 0.1 s, allgather 0.2 s, parameters 0.3 s" in table(example(exchange="allgather"))
    predicted = dataclasses.replace(example().predicted, host_memory_gb=(7.0, 6.0, 5.0), host_copy_seconds=0.4)
    offloads = table(example(offload=True, predicted=predicted))
    assert "recompute selective, offload, bfloat16" in offloads
    assert "/76 GB, host 7 GB" in offloads.splitlines()[2]
    assert "parameters 0.3 s, host copies 0.4 s)" in offloads
    twice = table(example(excluded=(ExcludedDevice("v100", "c", "too slow"),) * 2))
    assert "left out: 2 x v100 on c: too slow" in twice
    assert align(["a", "bb"], [["ccc", "d"]]) == ["a    bb", "ccc  d"]


@pytest.mark.parametrize(
    ("heads", "ratio", "expected"),
    [((0, 4), 4, (0, 1)), ((3, 5), 4, (0, 2)), ((4, 4), 4, (1, 1)), ((1, 7), 3, (0, 3)), ((2, 3), 1, (2, 3))],
)
def test_kv_heads(heads, ratio, expected):
    assert kv_heads(heads, ratio) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(half=st.integers(1, 9), slots=st.lists(st.integers(1, 6), min_size=1, max_size=5), data=st.data())
def test_any_slots_cover_all_tokens_once(half, slots, data):
    slot = 2 * half
    seq_len = sum(slots) * slot - data.draw(st.integers(0, half))
    assert fits_slots(seq_len, slot, sum(slots))
    runs = group_intervals(seq_len, slot, slots)
    covered = sorted(p for run in runs for a, b in run for p in range(a, b))
    assert covered == list(range(seq_len))
    for (front, back), count in zip(runs, slots, strict=True):
        assert front[1] - front[0] == count * half or seq_len < sum(slots) * half + front[0]
        assert back[1] >= back[0]


def test_cut():
    assert cut([(0, 4), (8, 12)], [3, 5]) == [((0, 3),), ((3, 4), (8, 12))]
    assert cut([(0, 4), (4, 8)], [8]) == [((0, 8),)]
    assert cut([(0, 4), (4, 4)], [0, 4]) == [(), ((0, 4),)]
    with pytest.raises(ValueError, match="sum to 3"):
        cut([(0, 4)], [3])
    assert not fits_slots(9, 4, 3 - 1)
    assert np.array_equal(make_replica(4, 2, [(2, [(0, 4, 1)])]).groups[0].shards[0].positions(), np.arange(4))

"""From measurements to a cluster: fits, shares of cores, device types, what is said about them; and the cache."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hexiseq.cluster import Cluster, Device, device_from_config
from hexiseq.profile import cache, describe, measured, set_up, time_calls
from hexiseq.profile import rates as rates_module
from hexiseq.profile.describe import cpu_shares, device_curves, device_rates, fit, fit_kinds
from hexiseq.profile.links import exchange_sets, pair_rounds
from hexiseq.workload import ModelShape

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
SHAPE = ModelShape("tiny", layers=2, hidden=64, intermediate=96, heads=6, kv_heads=2, head_dim=16, vocab=128)
H100 = "NVIDIA H100 80GB HBM3"


def catalogue() -> dict[str, Device]:
    found = [device_from_config(yaml.safe_load(path.read_text())) for path in sorted((CONF / "gpu").glob("*.yaml"))]
    return {device.type: device for device in found}


def test_a_fit_separates_what_is_fixed_from_the_rate() -> None:
    amounts = [1e6, 1e7, 1e8, 1e9]
    fixed, rate = fit(amounts, [50e-6 + amount / 2e10 for amount in amounts])
    assert (fixed, rate) == pytest.approx((50e-6, 2e10))
    # A large call that is off moves the rate and not what is fixed.
    off = [50e-6 + amount / 2e10 * (1.2 if amount == 1e9 else 1) for amount in amounts]
    assert fit(amounts, off)[0] == pytest.approx(50e-6, rel=0.1)


def test_a_fit_of_several_kinds_separates_their_rates_from_what_is_fixed() -> None:
    rates = {(False, 64): 1e10, (False, 512): 3e10, (True, 64): 5e9}
    kinds = [kind for kind in rates for _ in range(3)]
    amounts = [1e6, 2e6, 8e6] * 3
    seconds = [20e-6 + amount / rates[kind] for amount, kind in zip(amounts, kinds, strict=True)]
    fixed, found = fit_kinds(amounts, seconds, kinds)
    assert fixed == pytest.approx(20e-6)
    assert found == pytest.approx(rates)
    # Of one call of each kind nothing is known to be fixed.
    assert fit_kinds([1e6, 1e6], [1e-3, 2e-3], [0, 1]) == (0.0, pytest.approx({0: 1e9, 1: 5e8}))


def test_curves_never_fall_and_never_pass_the_rate() -> None:
    def call(way: str, edge: int, causal: bool, rate: float) -> dict[str, Any]:
        return {"work": f"attention_{way}", "amount": 1e9, "seconds": 1e9 / rate, "edge": edge, "causal": causal}

    full = {64: 2e9, 256: 9e9, 512: 4e9, 1024: 8e9}
    squares = {64: 1e9, 256: 2e9, 512: 3e9, 1024: 9e9}
    calls = [call(way, edge, causal, rate * (2 if way == "forward" else 1)) for way in ("forward", "backward")
             for causal, rates in ((False, full), (True, squares)) for edge, rate in rates.items()]  # fmt: skip
    curves = device_curves(calls)
    assert curves["attention_curve"] == [[64, 0.25], [256, 0.75], [512, 0.75], [1024, 1.0]]
    assert curves["causal_curve"] == [[64, 0.125], [256, 0.25], [512, 0.375], [1024, 1.0]]


def test_a_fit_never_has_a_negative_cost() -> None:
    fixed, rate = fit([1e6, 1e9], [1e-6, 2e-3])
    assert fixed == 0
    assert 5e11 <= rate <= 1e12
    assert fit([1e6], [1e-3]) == pytest.approx((0.0, 1e9))


def usage(cores: tuple[int, ...], busy: float, cores_busy: float | None, quota: float | None = None) -> dict[str, Any]:
    return {"cores": cores, "threads": 1, "busy": busy, "wall": 10.0, "cores_busy": cores_busy, "quota": quota}


def ranks_with(*usages: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [{"host": "here", "usage": used} for used in usages]


@pytest.mark.parametrize(
    ("usages", "shares"),
    [
        # A core to itself; two on another; other programs take half of both and change nothing.
        ([usage((0,), 10, 10), usage((1,), 5, 10), usage((1,), 5, 10)], [1.0, 0.5, 0.5]),
        ([usage((0,), 5, 10), usage((1,), 2.5, 10), usage((1,), 2.5, 10)], [1.0, 0.5, 0.5]),
        # A quota leaves the core idle, or to others.
        ([usage((0,), 2, 2, 0.2), usage((1,), 8, 8, 0.8)], [0.2, 0.8]),
        ([usage((0,), 2, 10, 0.2)], [0.2]),
        # Not pinned: four on two cores.
        ([usage((0, 1), 5, 20)] * 4, [0.5] * 4),
        # The system does not say what others do.
        ([usage((1,), 5, None), usage((1,), 5, None)], [0.5, 0.5]),
        ([None, None], [1.0, 1.0]),
    ],
)
def test_shares_of_cores_are_those_of_the_jobs_own_ranks(usages: list, shares: list[float]) -> None:
    assert cpu_shares(ranks_with(*usages)) == pytest.approx(shares)


def test_cores_of_two_hosts_are_not_the_same_cores() -> None:
    ranks = ranks_with(usage((0,), 10, 10), usage((0,), 10, 10))
    ranks[1]["host"] = "there"
    assert cpu_shares(ranks) == [1.0, 1.0]


def test_matrix_products_count_as_often_as_the_model_does_them() -> None:
    def call(work: str, amount: float, seconds: float, per_token: float = 0.0) -> dict[str, Any]:
        tile = {"edge": 64 if "attention" in work else 0, "causal": False}
        return {"work": work, "amount": amount, "seconds": seconds, "per_token": per_token, **tile}

    calls = [call("gemm", 1e9, 0.01, 3), call("gemm", 1e9, 0.04, 1), call("copy", 1e8, 0.01)]
    for work in ("attention_forward", "attention_backward"):
        calls += [call(work, flops, 1e-4 + flops / 1e11) for flops in (1e6, 1e9)]
    whole = device_rates(calls, 1.0)
    assert whole["gemm_tflops"] == pytest.approx(4e9 / 0.07 / 1e12)
    assert whole["attention_forward_tflops"] == pytest.approx(0.1)
    assert whole["hbm_gb_per_s"] == pytest.approx(10)
    assert whole["launch_us"] == pytest.approx(100)
    half = device_rates(calls, 0.5)
    assert half["gemm_tflops"] == pytest.approx(whole["gemm_tflops"] / 2)
    assert half["launch_us"] == pytest.approx(200)


def gpu(rank: int, node: str, device: str = H100, speed: float = 1.0, free_gb: float = 79.0) -> dict[str, Any]:
    calls = [{"work": "gemm", "amount": 7.94e14, "seconds": 1 / speed, "per_token": 1.0},
             {"work": "copy", "amount": 3.35e12, "seconds": 1, "per_token": 0.0},
             {"work": "to_host", "amount": 4.4e10, "seconds": 1, "per_token": 0.0},
             {"work": "from_host", "amount": 4.8e10, "seconds": 1, "per_token": 0.0}]  # fmt: skip
    for way, tflops in (("forward", 616), ("backward", 585)):
        for seconds, (edge, causal) in itertools.product((1e-4, 1e-2), ((1024, False), (1024, True), (8192, False))):
            reached = speed * {(1024, False): 0.8, (1024, True): 0.5}.get((edge, causal), 1.0)
            calls.append({"work": f"attention_{way}", "amount": tflops * 1e12 * reached * (seconds - 1e-5),
                          "seconds": seconds, "per_token": 0.0, "edge": edge, "causal": causal})  # fmt: skip
    for call in calls:
        call |= {"edge": call.get("edge", 0), "causal": call.get("causal", False)}
    uuid = f"GPU-{rank:08x}-0000-0000-0000-000000000000"
    return {"node": node, "host": node, "device": f"{device} {uuid}", "vendor": "nvidia", "cores": [], "usage": None,
            "dtypes": ["bfloat16", "float16", "float32"], "kernel": "flash_attn3", "calls": calls, "memory_gb": 80.0,
            "free_gb": free_gb, "host_memory_gb": 1000.0 + rank, "workload": "llama3_8b, bfloat16",
            "links": []}  # fmt: skip


def joined(ranks: list[dict[str, Any]], within: float, between: float | dict[tuple[int, int], float]) -> list[dict]:
    nodes = [rank["node"] for rank in ranks]
    work = [("p2p", *item) for item in pair_rounds(nodes)] + [("all_to_all", *item) for item in exchange_sets(nodes)]
    for kind, reach, sets in work:
        for members in sets:
            speed = within if reach == "within" else between
            if isinstance(speed, dict):
                speed = speed.get(tuple(members), 25.0)
            link = {"kind": kind, "reach": reach, "ranks": members, "bytes": [1e4, 1e8],
                    "seconds": [1e-5 + size / (speed * 1e9) for size in (1e4, 1e8)]}  # fmt: skip
            for rank in members:
                ranks[rank]["links"].append(link)
    return ranks


def test_a_sick_gpu_is_a_type_of_its_own_and_pointed_out() -> None:
    ranks = [gpu(rank, f"node{rank // 4}", speed=0.7 if rank == 6 else 1.0 - 0.01 * (rank % 3)) for rank in range(8)]
    survey = describe("ours", joined(ranks, 370.0, 25.0), catalogue(), None, 0.05)
    cluster = Cluster.from_config(survey.cluster)
    assert survey.types == ["h100_sxm"] * 6 + ["h100_sxm_slow", "h100_sxm"]
    well, slow = cluster.devices
    assert slow.attention_forward_tflops == pytest.approx(0.7 * well.attention_forward_tflops, rel=0.02)
    assert well.launch_us == pytest.approx(10, rel=0.01)
    assert (well.names, slow.names) == ((H100,), ("GPU-00000006-0000-0000-0000-000000000000",))
    assert well.peak_tflops == 989
    assert well.host_gb_per_s == 44  # the slower way
    assert [node.host_memory_gb for node in cluster.nodes] == [1000, 1004]
    assert (well.attention_curve, well.causal_curve) == (((1024, 0.8), (8192, 1.0)), ((1024, 0.5),))
    assert [node.intra_gb_per_s for node in cluster.nodes] == pytest.approx([370, 370])
    # Four ranks together fill the node's network, of which each measured its part.
    assert cluster.nodes[0].network_gb_per_s == pytest.approx(100, rel=0.01)
    (line,) = [line for line in survey.lines if line.startswith("SLOW")]
    assert "rank 6" in line
    assert "on node1" in line
    assert "-2" in line or "-3" in line
    assert any("DIFFERS: h100_sxm attention forward" in line and "on rank 6" in line for line in survey.lines)


def test_nodes_alike_are_a_class_and_unknown_gpus_are_measured_only() -> None:
    ranks = [gpu(rank, f"node{rank // 2}", device="NVIDIA H200 NVL") for rank in range(6)]
    survey = describe("ours", joined(ranks, 100.0, 25.0), catalogue(), None, 0.05)
    (node,) = Cluster.from_config(survey.cluster).nodes
    assert (node.count, len(node.seats), node.host_memory_gb) == (3, 2, 1000)
    assert survey.types == ["h200_nvl"] * 6
    assert "h200_nvl is not in the catalogue: measured only" in survey.lines


def test_a_pair_of_nodes_that_carries_less_is_a_link() -> None:
    ranks = [gpu(rank, "abc"[rank], speed=(1.0, 1.0, 0.5)[rank]) for rank in range(3)]
    survey = describe("ours", joined(ranks, 100.0, {(0, 1): 10.0}), catalogue(), None, 0.05)
    assert survey.cluster["links"] == [] or survey.cluster["links"][0]["nodes"] == ["a", "b"]
    ranks = [gpu(rank, "abc"[rank], speed=(1.0, 0.8, 0.5)[rank]) for rank in range(3)]
    survey = describe("ours", joined(ranks, 100.0, {(0, 1): 10.0}), catalogue(), None, 0.05)
    (link,) = Cluster.from_config(survey.cluster).links
    assert (link.nodes, link.gb_per_s) == (("a", "b"), pytest.approx(10))


def test_memory_that_others_hold_is_pointed_out() -> None:
    ranks = [gpu(0, "a"), gpu(1, "a", free_gb=40.0)]
    survey = describe("ours", joined(ranks, 100.0, 25.0), catalogue(), None, 0.05)
    (line,) = [line for line in survey.lines if line.startswith("IN USE")]
    assert "rank 1" in line
    assert "hold 40.0 of 80.0 GB" in line


@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (1, 1), (4, 2), (1, 1, 1), (3, 1, 2), (2,) * 4, (1,) * 5])
def test_every_class_of_link_is_measured_and_no_rank_twice_at_one_time(sizes: tuple[int, ...]) -> None:
    nodes = [f"node{i}" for i, size in enumerate(sizes) for _ in range(size)]
    rounds = pair_rounds(nodes)
    for reach, pairs in rounds + exchange_sets(nodes):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
        for members in pairs:
            assert len({nodes[rank] for rank in members}) == (1 if reach == "within" else len(members))
    joins = {frozenset(nodes[rank] for rank in pair) for reach, pairs in rounds if reach == "between" for pair in pairs}
    assert len(joins) == (len(sizes) if len(sizes) > 2 else len(sizes) - 1)
    with_pairs = {nodes[pair[0]] for reach, pairs in rounds if reach == "within" for pair in pairs}
    assert with_pairs == {f"node{i}" for i, size in enumerate(sizes) if size > 1}


def test_this_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "TILES", {"cpu": (16, 128)})
    monkeypatch.setattr(rates_module, "COPIED_BYTES", {"cpu": 1_000_000})
    bench = set_up(SHAPE, torch.device("cpu"), "float32", "auto", 1)
    rounds = [time_calls(bench, 0.1), time_calls(bench, 0.1)]
    found = measured(bench, rounds)
    assert found["kernel"] == "cpu"
    assert all(call["samples"] >= 3 and call["seconds"] > 0 for call in found["calls"])
    rates = device_rates(found["calls"], 1.0)
    # Any processor of the last twenty years, and none of the next ten.
    assert all(1e-5 < rates[name] < 100 for name in rates if name.endswith("tflops"))
    assert found["usage"]["busy"] == sum(one.usage.busy for one in rounds if one.usage) > 0
    assert found["host_memory_gb"] is None  # its memory is its host's
    assert "host_gb_per_s" not in rates
    curves = device_curves(found["calls"])
    assert {name: [edge for edge, _ in curve] for name, curve in curves.items()} == {
        "attention_curve": [16, 128], "causal_curve": [16, 128]
    }  # fmt: skip


def test_a_model_that_does_not_fit_is_refused_with_its_matrix() -> None:
    huge = ModelShape("huge", layers=1, hidden=2**17, intermediate=2**20, heads=6, kv_heads=2, head_dim=16, vocab=128)
    with pytest.raises(ValueError, match=r"model 'huge': measuring its MLP up and gate matrix of 131072 x 1048576"):
        set_up(huge, torch.device("cpu"), "float32", "auto", 1)


CORE = {
    "type": "cpu", "vendor": "cpu", "peak_tflops": 0.1, "gemm_tflops": 0.1, "attention_forward_tflops": 0.1,
    "attention_backward_tflops": 0.1, "memory_gb": 2.0, "hbm_gb_per_s": 8.0, "overhead_gb": 0.4, "launch_us": 40.0,
    "dtypes": ["float32"], "kernel": "cpu", "source": "made up",
}  # fmt: skip
NODE = {"name": "here", "devices": [{"type": "cpu"}], "intra_gb_per_s": 1.0, "nics": 1, "nic_gb_per_s": 1.0}
CLUSTER = {"name": "kept", "gpus": {"cpu": CORE}, "nodes": [NODE]}


def some_key(**changes: Any) -> dict[str, Any]:
    return {**cache.key(["EPYC"], [0, 1], 2, "auto", SHAPE), **changes}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXISEQ_CACHE", str(tmp_path / "cache"))


def test_the_cache_gives_back_what_was_stored_under_the_same_key_alone(tmp_path: Path) -> None:
    assert cache.load(some_key()) is None
    assert cache.store(some_key(), CLUSTER) is None
    found = cache.load(some_key())
    assert found is not None
    assert found[0] == CLUSTER
    for changes in ({"torch": "2.0"}, {"ranks": 3}, {"devices": ["other"]}, {"cores": [1]}, {"dtype": "bfloat16"},
                    {"host": "there"}, {"model": {}}):  # fmt: skip
        assert cache.load(some_key(**changes)) is None
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"time": 1}', "null"])
def test_a_torn_or_foreign_file_is_measured_again(broken: str) -> None:
    cache.store(some_key(), CLUSTER)
    cache.path_of(some_key()).write_text(broken)
    assert cache.load(some_key()) is None


@pytest.mark.parametrize(("days", "usable"), [(29.9, True), (30.1, False), (-1, False)])
def test_an_old_measurement_is_made_again(days: float, usable: bool) -> None:
    cache.store(some_key(), CLUSTER)
    path = cache.path_of(some_key())
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "time": time.time() - days * 86400}))
    assert (cache.load(some_key()) is not None) == usable


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEXISEQ_CACHE", str(tmp_path / "file" / "cache"))
    assert "Not a directory" in str(cache.store(some_key(), CLUSTER))
    assert cache.load(some_key()) is None


def test_readers_never_see_half_a_file() -> None:
    big = {**CLUSTER, "nodes": [{**NODE, "name": f"node{i}"} for i in range(200)]}
    cache.store(some_key(), big)
    seen, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(cache.load(some_key()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        cache.store(some_key(), big)
    done.set()
    reader.join()
    assert seen
    assert all(found is not None and found[0] == big for found in seen)


def test_the_cache_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEXISEQ_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "hexiseq"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "hexiseq"
    assert os.environ["HOME"] == str(tmp_path)

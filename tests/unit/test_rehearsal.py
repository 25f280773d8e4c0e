"""A rehearsal keeps what the plan decided and shrinks the rest."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import yaml
from transformers import AutoConfig

from hexiseq import picture
from hexiseq.cluster import device_from_config, offload_lacks
from hexiseq.plan import Plan, RankDevice, make_replica
from hexiseq.rehearsal import proportional, rehearse_cluster, rehearse_model, rehearse_plan
from hexiseq.workload import ModelShape
from recipes.job import CONF
from tests.test_configs import composed


def big_plan() -> Plan:
    seq_len, slot = 65536, 1024
    replica = make_replica(
        seq_len,
        slot,
        [(48, [(0, 24000, 5), (1, 25152, 0), (2, 0, 4)]), (16, [(3, 16383, 9), (4, 1, 0)])],
    )
    devices = (
        *[RankDevice("h100_sxm", "h100", "torch_flash")] * 3,
        *[RankDevice("a100_80", "a100", "torch_flash")] * 2,
    )
    return Plan("hexiseq", seq_len, 9, 3, slot, 4, "ring", "selective", "bfloat16", (replica,), devices)


def test_cuts_and_shares_are_kept() -> None:
    plan = big_plan()
    small = rehearse_plan(plan, 1000)
    assert abs(small.seq_len - 1000) <= 64
    assert [g.slots for g in small.replicas[0].groups] == [48, 16]
    for there, here in zip(plan.shards(), small.shards(), strict=True):
        assert here.heads == there.heads
        assert abs(here.num_tokens - there.num_tokens * small.seq_len / plan.seq_len) <= 1
    assert (small.fusion, small.recompute, small.dtype) == (plan.fusion, plan.recompute, "float32")
    assert {device.kernel for device in small.devices} == {"cpu"}
    assert [device.type for device in small.devices] == [device.type for device in plan.devices]


@pytest.mark.parametrize(("shares", "total"), [([3, 0, 1], 8), ([1, 1, 1], 100), ([5, 4000, 1], 64), ([7], 3)])
def test_proportional_sums_and_stays_within_one(shares: list[int], total: int) -> None:
    sizes = proportional(shares, total)
    assert sum(sizes) == total
    assert all(abs(size - share * total / sum(shares)) <= 1 for size, share in zip(sizes, shares, strict=True))


@pytest.mark.parametrize("model", ["llama_3b", "llama_13b", "llama3_70b", "qwen3_8b", "mistral_7b"])
def test_every_models_rehearsal_is_a_valid_config(model: str) -> None:
    config = composed("+cluster=h100_a100", f"model={model}")
    small = rehearse_model(config["model"]["config"], config["recipe"]["rehearsal"], 300, 0.1)
    assert AutoConfig.for_model(**small).num_attention_heads == config["model"]["config"]["num_attention_heads"]


def test_model_keeps_its_heads() -> None:
    config = composed("+cluster=h100_a100")["model"]["config"]
    small = rehearse_model(config, {"layers": 2, "hidden": 64, "intermediate": 128, "head_dim": 8}, 300, 0.1)
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (32, 8)
    assert (small["num_hidden_layers"], small["hidden_size"], small["head_dim"], small["vocab_size"]) == (2, 64, 8, 300)


def test_windows_shrink_with_the_sequence() -> None:
    shrink = {"layers": 2, "hidden": 64, "intermediate": 128, "head_dim": 8}
    config = composed("model=mistral_7b")["model"]["config"]
    assert rehearse_model(config, shrink, 300, 1 / 32)["sliding_window"] == 128
    assert rehearse_model(config, shrink, 300, 1e-9)["sliding_window"] == 1
    assert "sliding_window" not in rehearse_model(composed("model=qwen3_8b")["model"]["config"], shrink, 300, 0.5)
    mixed = {**config, "model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 16}
    shape = ModelShape.from_hf_config(rehearse_model(mixed, shrink, 300, 0.5))
    assert (shape.layers, shape.window, shape.full_layers) == (2, 2048, 1)
    typed = {**config, "model_type": "ministral", "layer_types": ["full_attention", "sliding_attention"] * 16}
    assert rehearse_model(typed, shrink, 300, 0.5)["layer_types"] == ["full_attention", "sliding_attention"]


def test_the_machine_is_shared_by_all_ranks() -> None:
    core = device_from_config(yaml.safe_load((CONF / "gpu" / "cpu_core.yaml").read_text()))
    plan = rehearse_plan(big_plan(), 1000)
    cluster = rehearse_cluster(plan, core, cores=2)
    assert [(place.device.type, place.node_name) for place in cluster.places] == [
        (d.type, d.node) for d in plan.devices
    ]
    assert sum(place.device.gemm_tflops for place in cluster.places) == pytest.approx(2 * core.gemm_tflops)
    # What inputs are copied to is the one memory there is.
    assert not offload_lacks(cluster.places)
    assert cluster.places[0].device.host_gb_per_s == pytest.approx(core.hbm_gb_per_s * 2 / 5 / 2)
    assert rehearse_cluster(plan, core, cores=16).places[0].device.gemm_tflops == core.gemm_tflops


def test_picture_is_svg_and_repeats() -> None:
    plan = big_plan()
    text = picture.plan_svg(plan)
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text == picture.plan_svg(plan)

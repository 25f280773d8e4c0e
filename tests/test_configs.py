"""Every configuration composes and builds what it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from hexiseq.cluster import Cluster, device_from_config
from hexiseq.plan import POLICIES
from hexiseq.workload import ModelShape
from recipes.job import _check, common_dtype, workload_of

CONF = Path(__file__).resolve().parent.parent / "conf"


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", list(overrides))
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


@pytest.mark.parametrize("name", names("cluster"))
def test_cluster_composes_with_its_model(name: str) -> None:
    config = composed(f"+cluster={name}")
    cluster = Cluster.from_config(config["cluster"])
    workload = workload_of(config, cluster)
    _check(config)
    assert cluster.name == name
    assert all(device.source for device in cluster.devices)
    gpus = any(device.vendor != "cpu" for device in cluster.devices)
    assert workload.model.name == ("llama3_8b" if gpus else "tiny_llama")
    assert workload.dtype == ("bfloat16" if gpus else "float32")


def test_command_line_overrides_the_clusters_model() -> None:
    assert composed("+cluster=h100_a100", "model=llama_7b")["model"]["name"] == "llama_7b"


@pytest.mark.parametrize("name", names("gpu"))
def test_catalogue_entry_is_a_device(name: str) -> None:
    device = device_from_config(composed(f"+gpu@entry={name}")["entry"])
    assert device.type == name
    assert device.gemm_tflops <= device.peak_tflops


@pytest.mark.parametrize("name", names("model"))
def test_model_has_a_shape_and_a_hugging_face_config(name: str) -> None:
    from transformers import AutoConfig

    config = composed(f"model={name}")["model"]
    shape = ModelShape.from_hf_config(config["config"], config["name"])
    hf = AutoConfig.for_model(**config["config"])
    assert (hf.num_attention_heads, hf.num_key_value_heads, hf.head_dim) == (
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
    )
    assert shape.window == (4096 if name == "mistral_7b" else None)
    billions = {
        "llama3_8b": 8.0,
        "qwen3_8b": 8.2,
        "llama_3b": 3.4,
        "llama_7b": 6.7,
        "llama_13b": 13.0,
        "llama3_70b": 70.6,
        "mistral_7b": 7.24,
    }
    if name in billions:
        assert shape.parameters / 1e9 == pytest.approx(billions[name], rel=0.02)


@pytest.mark.parametrize("name", names("strategy"))
def test_strategy_names_a_policy(name: str) -> None:
    overrides = [f"strategy={name}", *(["strategy.plan=plan.json"] if name == "manual" else [])]
    strategy = composed(*overrides)["strategy"]
    assert (strategy["policy"], strategy["exchange"]) == (name, "auto")
    assert name in POLICIES


@pytest.mark.parametrize("group", ["recipe", "logger", "data", "trainer"])
def test_other_groups_compose(group: str) -> None:
    for name in names(group):
        extra = ["data.path=folder"] if name == "text_dir" else []
        assert composed(f"{group}={name}", *extra)


@pytest.mark.parametrize("name", names("experiment"))
def test_experiments_compose(name: str) -> None:
    assert composed(f"+experiment={name}", "+cluster=cpu_mixed")


def test_tiny_llama_has_no_even_head_split() -> None:
    config = composed()["model"]["config"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert (heads, kv_heads) == (9, 3)
    assert all(heads % ranks for ranks in (2, 4, 8))


def test_dtype_auto_takes_what_all_devices_have() -> None:
    config = composed(
        "+cluster=h100_a100", "+gpu@cluster.gpus.v100_32=v100_32", "cluster.nodes.1.devices.0.type=v100_32"
    )
    cluster = Cluster.from_config(config["cluster"])
    assert common_dtype("auto", cluster) == "float16"
    with pytest.raises(ValueError, match="v100_32 cannot run it"):
        common_dtype("bfloat16", cluster)

"""Clusters: built from plain containers, expanded into places, linked; mistakes are named."""

import copy

import pytest

from hexiseq.cluster import Cluster, Device, Link, Node, Seat, device_from_config, offload_lacks

GPU = {
    "type": "h100_sxm", "vendor": "nvidia", "names": ["H100 SXM"], "peak_tflops": 989, "gemm_tflops": 700,
    "attention_forward_tflops": 600, "attention_backward_tflops": 480, "memory_gb": 80, "hbm_gb_per_s": 3350,
    "overhead_gb": 2.0, "launch_us": 10.0, "dtypes": ["bfloat16", "float16"], "kernel": "torch_flash", "source": "test",
}  # fmt: skip
CONFIG = {
    "name": "mix",
    "gpus": {"h100_sxm": GPU, "a100": {**GPU, "type": "a100", "gemm_tflops": 270}},
    "nodes": [
        {"name": "fast", "count": 2, "devices": [{"type": "h100_sxm", "count": 2}], "intra_gb_per_s": 450, "nics": 2,
         "nic_gb_per_s": 25},
        {"name": "slow", "devices": [{"type": "a100"}, {"type": "h100_sxm", "cores": [0, 1]}], "intra_gb_per_s": 300,
         "nics": 1, "nic_gb_per_s": 25},
    ],
    "links": [{"nodes": ["fast-0", "slow"], "gb_per_s": 5}],
}  # fmt: skip


def test_places_links_and_devices():
    cluster = Cluster.from_config(CONFIG)
    places = cluster.places
    assert [(p.index, p.node, p.node_name, p.device.type) for p in places] == [
        (0, 0, "fast-0", "h100_sxm"), (1, 0, "fast-0", "h100_sxm"), (2, 1, "fast-1", "h100_sxm"),
        (3, 1, "fast-1", "h100_sxm"), (4, 2, "slow", "a100"), (5, 2, "slow", "h100_sxm"),
    ]  # fmt: skip
    assert places[5].seat.cores == (0, 1)
    assert [d.type for d in cluster.devices] == ["h100_sxm", "a100"]
    assert cluster.bandwidth_gb_per_s(places[0], places[1]) == 450
    assert cluster.bandwidth_gb_per_s(places[0], places[2]) == 50
    assert cluster.bandwidth_gb_per_s(places[2], places[4]) == 25
    assert cluster.bandwidth_gb_per_s(places[4], places[0]) == 5  # the special link, either way round
    by_class = copy.deepcopy(CONFIG)
    by_class["links"] = [{"nodes": ["slow", "fast"], "gb_per_s": 7}]
    cluster = Cluster.from_config(by_class)
    assert {cluster.bandwidth_gb_per_s(cluster.places[i], cluster.places[4]) for i in range(4)} == {7}


def test_attention_reaches_its_rate_by_the_edge_of_a_tile():
    curves = {"attention_curve": [[64, 0.5], [1024, 1]], "causal_curve": [[64, 0.25], [256, 0.75]]}
    device = device_from_config({**GPU, **curves})
    wide = device_from_config({**GPU, "attention_curve": [[64, 0.5], [1048576, 1]], "causal_curve": [[1, 0.5]]})
    assert wide.attention_fraction([8, 1024], causal=True).tolist() == wide.attention_fraction([8, 1024]).tolist()
    assert device.attention_fraction(256) == pytest.approx(0.75)  # half-way from 64 to 1024 by the logarithm
    assert device.attention_fraction([1, 64, 1024, 1e6]).tolist() == [0.5, 0.5, 1, 1]
    assert device.attention_fraction([128, 256], causal=True).tolist() == pytest.approx([0.5, 0.75])
    # A square takes 4/3 as long as its pairs do in full tiles, one of twice the edge 7/6, and so on.
    assert device.attention_fraction([512, 1024], causal=True).tolist() == pytest.approx([6 / 7, 12 / 13])
    plain, full = device_from_config(GPU), device_from_config({**GPU, "attention_curve": [[64, 0.5], [1024, 1]]})
    assert (plain.curved, full.curved, plain.attention_fraction(1)) == (False, True, 1)
    assert full.attention_fraction(256, causal=True) == pytest.approx(0.75)


MISTAKES = {
    "missing key": (lambda c: c.pop("nodes"), "cluster 'mix': missing nodes"),
    "unknown key": (lambda c: c.update(racks=3), "unknown racks"),
    "no nodes": (lambda c: c.update(nodes=[], links=[]), "has no nodes"),
    "unknown device": (lambda c: c["nodes"][0]["devices"][0].update(type="b300"), "unknown device type 'b300'.*a100"),
    "bad count": (lambda c: c["nodes"][0]["devices"][0].update(count=0), "count of h100_sxm.*0"),
    "bad node count": (lambda c: c["nodes"][0].update(count=1.5), "count must be a positive"),
    "bad bandwidth": (lambda c: c["nodes"][1].update(intra_gb_per_s=-3), "'slow': intra_gb_per_s.*-3"),
    "node without devices": (lambda c: c["nodes"][1].update(devices=[]), "'slow': has no devices"),
    "control characters": (lambda c: c["nodes"][1].update(name="a\x01b"), "printable text, got 'a.x01b'"),
    "doubled node": (lambda c: c["nodes"][1].update(name="fast"), "two nodes are called 'fast'"),
    "link to nowhere": (lambda c: c["links"][0].update(nodes=["fast", "moon"]), "names node 'moon'"),
    "link of three": (lambda c: c["links"][0].update(nodes=["fast", "slow", "slow"]), "joins two nodes"),
    "bad host memory": (lambda c: c["nodes"][1].update(host_memory_gb=0), "'slow': host_memory_gb must be a positive"),
    "bad host rate": (lambda c: c["gpus"]["a100"].update(host_gb_per_s="fast"), "'a100': host_gb_per_s must be a pos"),
    "bad rate": (lambda c: c["gpus"]["a100"].update(gemm_tflops=0), "'a100': gemm_tflops must be a positive"),
    "text for a number": (lambda c: c["gpus"]["a100"].update(memory_gb="80"), "memory_gb"),
    "a curve of one number": (
        lambda c: c["gpus"]["a100"].update(attention_curve=[[64]]),
        "pairs of an edge and a fraction",
    ),
    "a curve that falls": (
        lambda c: c["gpus"]["a100"].update(causal_curve=[[64, 0.5], [256, 0.4]]),
        r"do not fall, got \[64, 0.5\] before",
    ),
    "a curve in disorder": (
        lambda c: c["gpus"]["a100"].update(attention_curve=[[256, 0.5], [64, 1]]),
        "attention_curve must have ascending edges",
    ),
    "a curve beyond its rate": (
        lambda c: c["gpus"]["a100"].update(attention_curve=[[64, 1.1]]),
        r"fractions above 0 up to 1, got \[64, 1.1\]",
    ),
    "a curve below its rate": (
        lambda c: c["gpus"]["a100"].update(attention_curve=[[64, 0.9]]),
        "last fraction of attention_curve must be 1",
    ),
    "unknown kernel": (lambda c: c["gpus"]["a100"].update(kernel="magic"), "kernel 'magic' is not one of"),
    "unknown dtype": (lambda c: c["gpus"]["a100"].update(dtypes=["int4"]), "'int4'"),
    "no dtype": (lambda c: c["gpus"]["a100"].update(dtypes=[]), "dtypes is empty"),
    "missing rate": (lambda c: c["gpus"]["a100"].pop("launch_us"), "gpus.a100: missing launch_us"),
    "two vendors": (lambda c: c["gpus"]["a100"].update(vendor="amd"), "AMD and NVIDIA"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    edit, message = MISTAKES[name]
    config = copy.deepcopy(CONFIG)
    edit(config)
    with pytest.raises(ValueError, match=message):
        Cluster.from_config(config)


def test_what_offload_lacks_is_named():
    config = copy.deepcopy(CONFIG)
    assert offload_lacks(Cluster.from_config(config).places).startswith("device type h100_sxm has no host_gb_per_s")
    config["gpus"]["h100_sxm"]["host_gb_per_s"] = 50
    assert "cluster.gpus.a100.host_gb_per_s" in offload_lacks(Cluster.from_config(config).places)
    config["gpus"]["a100"]["host_gb_per_s"] = 25
    config["nodes"][0]["host_memory_gb"] = 1000
    cluster = Cluster.from_config(config)
    assert offload_lacks(cluster.places).startswith("node slow has no host_memory_gb")
    assert not offload_lacks(cluster.places[:4])


def test_direct_construction():
    device = device_from_config(GPU)
    assert isinstance(device, Device)
    assert device.names == ("H100 SXM",)
    node = Node("n", (Seat(device),) * 2, 450, 4, 25)
    assert node.network_gb_per_s == 100
    cluster = Cluster("one", (node,))
    assert len(cluster.places) == 2
    assert cluster.bandwidth_gb_per_s(*cluster.places) == 450
    with pytest.raises(ValueError, match="gb_per_s"):
        Link(("a", "b"), float("nan"))


WRONG_TYPES = [
    *((lambda c, v=v: c.update(nodes=v), f"nodes must be a list of mappings, got {v!r}") for v in (None, 5, "abc")),
    (lambda c: c.update(nodes=[3]), r"node '\?': expected a mapping.*got 3"),
    *((lambda c, v=v: c["nodes"][0].update(devices=v), f"devices must be a list.*{v}") for v in (None, 5)),
    *((lambda c, v=v: c.update(gpus=v), "gpus must be a mapping") for v in (None, 5, [3], "abc")),
    (lambda c: c.update(links=5), "links must be a list.*5"),
    (lambda c: c["links"][0].update(nodes=5), "link: nodes must be a list of two node names, got 5"),
    (lambda c: c["nodes"][0]["devices"][0].update(cores=5), "cores must be a list of core numbers, got 5"),
    *((lambda c, v=v: c["nodes"][0]["devices"][0].update(cores=[v]), rf"cores must be core numbers.*\[{v!r}\]")
      for v in ("a", 0.5, -1, True)),
    (lambda c: c["nodes"][0]["devices"][0].update(type=["a"]), r"type must be a text.*\['a'\]"),
    (lambda c: c["nodes"][0].update(count=True), "count must be a positive integer, got True"),
    (lambda c: c["nodes"][0]["devices"][0].update(count=True), "count of h100_sxm must be.*got True"),
    (lambda c: c["gpus"]["a100"].update(dtypes=5), "dtypes must be a list of texts, got 5"),
    (lambda c: c["gpus"]["a100"].update(dtypes="float32"), "dtypes must be a list of texts, got 'float32'"),
    (lambda c: c["gpus"]["a100"].update(names=5), "names must be a list of texts, got 5"),
    *((lambda c, v=v: c["gpus"]["a100"].update(type=v), "type must be a text") for v in (None, 5, [])),
    (lambda c: c["gpus"]["a100"].update(gemm_tflops=1e-30), "gemm_tflops must be a positive number.*1e-30"),
    (lambda c: c["gpus"]["a100"].update(gemm_tflops=10**400), "gemm_tflops must be a positive number"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(WRONG_TYPES)))
def test_wrong_types_are_named(index):
    edit, message = WRONG_TYPES[index]
    config = copy.deepcopy(CONFIG)
    edit(config)
    with pytest.raises(ValueError, match=message):
        Cluster.from_config(config)


@pytest.mark.parametrize("config", [5, "abc", None])
def test_no_mapping_at_all(config):
    with pytest.raises(ValueError, match="expected a mapping"):
        Cluster.from_config(config)
    with pytest.raises(ValueError, match="expected a mapping"):
        device_from_config(config)


def test_devices_say_which_kernels_they_run():
    assert device_from_config({**GPU, "vendor": "cpu", "kernel": "cpu"}).kernels == ("cpu", "dense", "auto")
    assert device_from_config(GPU).kernels == (
        "torch_flash", "torch_efficient", "flash_attn2", "flash_attn3", "dense", "auto",
    )  # fmt: skip

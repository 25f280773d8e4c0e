"""Detection by name, and the comparison of ranks before their process group exists."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import yaml

from hexiseq import launch
from hexiseq.doctor import Report, findings, recognise, table
from hexiseq.plan import Plan, RankDevice, make_replica

ROOT = Path(__file__).resolve().parent.parent.parent
CATALOGUE = {
    entry["type"]: entry["names"]
    for entry in (yaml.safe_load(path.read_text()) for path in sorted((ROOT / "conf" / "gpu").glob("*.yaml")))
}


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 80GB HBM3 GPU-8f6e2c1a-0b3d-4e5f-9a7b-1c2d3e4f5a6b", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("NVIDIA A100-SXM4-80GB", "a100_80"),
        ("NVIDIA A100 80GB PCIe", "a100_80"),
        ("A100-SXM-80GB", "a100_80"),
        ("NVIDIA A100-SXM4-40GB", "a100_40"),
        ("NVIDIA A100-PCIE-40GB", "a100_40"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA A800 80GB PCIe", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L4", None),
        ("Tesla V100-SXM2-32GB", "v100_32"),
        ("Tesla V100-SXM2-16GB", None),
        ("Tesla V100-PCIE-32GB", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA GeForce RTX 5090", None),
        ("AMD Instinct MI300X", None),
        ("cpu", None),
    ],
)
def test_names_as_drivers_report_them(reported: str, kind: str | None) -> None:
    assert recognise(reported, CATALOGUE) == kind


def test_the_longest_name_wins_and_a_tie_is_no_guess() -> None:
    sick = "GPU-8f6e2c1a-0b3d-4e5f-9a7b-1c2d3e4f5a6b"
    names = {"well": ["NVIDIA H100 80GB HBM3"], "slow": [sick]}
    assert recognise(f"NVIDIA H100 80GB HBM3 {sick}", names) == "slow"
    assert recognise("NVIDIA H100 80GB HBM3 GPU-00000000-0b3d-4e5f-9a7b-1c2d3e4f5a6b", names) == "well"
    assert recognise("NVIDIA H100 80GB HBM3", {"a": ["H100 80GB HBM3"], "b": ["H100 80GB HBM3"]}) is None
    assert recognise("NVIDIA A100-SXM4-80GB", {"any": ["A100"]}) == "any"


def report(rank: int, **changes: object) -> Report:
    dtypes = ("bfloat16", "float16", "float32", "float64")
    base = Report(rank, f"node{rank // 2}", "a100_80", "0.1.0", "2.13.0+cu130", "13.0", "91002", "2.27.3", "580.95",
                  "3.11.9", "EPYC", dtypes, "8.0", f"gpu{rank}", 0.6)  # fmt: skip
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.12.0+cu130"}, "torch: 2.12.0+cu130 on rank 2 (a100_80 on node1), 2.13.0+cu130 on rank 0"),
        ({"nccl": "2.21.5"}, "nccl: 2.21.5 on rank 2"),
        ({"hexiseq": "0.2.0"}, "hexiseq: 0.2.0 on rank 2"),
        ({"cuda": "12.8"}, "cuda major: 12 on rank 2"),
        ({"dtypes": ("float16", "float32")}, "rank 2 (a100_80 on node1) cannot run the job's bfloat16"),
        ({"gpu": "gpu1"}, "GPU gpu1: rank 1 (a100_80 on node0), rank 2 (a100_80 on node1) all run on it"),
    ],
)
def test_what_hangs_stops_the_job(changes: dict[str, object], words: str) -> None:
    fatal, _ = findings([report(0), report(1), report(2, **changes), report(3)], "bfloat16")
    assert len(fatal) == 1
    assert words in fatal[0]


@pytest.mark.parametrize("field", ["cudnn", "driver", "python", "cpu"])
def test_what_merely_differs_is_noted(field: str) -> None:
    fatal, noted = findings([report(0), report(1, **{field: "999.1"})], "bfloat16")
    assert fatal == []
    (line,) = noted
    assert line.endswith(f": {getattr(report(0), field)} on {report(0).who}, 999.1 on {report(1).who}")


def test_unlike_gpus_need_a_newer_nccl() -> None:
    old = [report(rank, nccl="2.20.5", capability="9.0" if rank == 1 else "8.0") for rank in range(3)]
    assert findings(old, None) == ([
        f"nccl: 2.20.5 on {old[0].who}, {old[1].who}, {old[2].who}; compute capabilities differ (9.0 on {old[1].who}, "
        f"8.0 on {old[0].who}, {old[2].who}), and between unlike GPUs NCCL before 2.21 hangs"
    ], [])  # fmt: skip
    for fine in ({"nccl": "2.21.0"}, {"capability": "8.0"}, {"cuda": "hip 6.4"}, {"nccl": "none"}):
        assert findings([dataclasses.replace(rank, **fine) for rank in old], None) == ([], [])


def test_an_old_driver_and_a_busy_gpu_are_noted() -> None:
    ranks = [report(0, driver="570.86.10"), report(1, driver="570.86.10", used_gb=12.34), report(2, driver="570.86.10")]
    everybody = ", ".join(rank.who for rank in ranks)
    assert findings(ranks, None) == ([], [
        f"driver is older than CUDA 13.0 asks for, 580.65.06: 570.86.10 on {everybody}",
        f"GPU memory is in use already: 12.3 GB on {ranks[1].who}",
    ])  # fmt: skip
    assert findings([report(0, driver="580.65.06"), report(1, driver="580.65.06")], None) == ([], [])
    assert findings([report(0, gpu="none", driver="470.1"), report(1, gpu="none", driver="470.1")], None) == ([], [])


def test_equal_ranks_and_other_devices_are_fine() -> None:
    ranks = [report(0), report(1), report(2, device="h100_sxm", capability="9.0"), report(3, cuda="13.1")]
    assert findings(ranks, "bfloat16") == ([], [f"CUDA differs: 13.1 on {ranks[3].who}, 13.0 on {ranks[0].who}, "
                                                f"{ranks[1].who}, {ranks[2].who}"])  # fmt: skip
    first, header, *rows = table(ranks)
    assert "torch 2.13.0+cu130" in first
    assert header.split() == ["rank", "node", "device", "cuda", "capability"]
    assert rows[3].split() == ["3", "node1", "a100_80", "13.1", "8.0"]


CLAIMING = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
from hexiseq import launch
from hexiseq.strategy import HexiSeqStrategy
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from tests.unit.test_doctor import even_plan
def main():
    if launch.rank() == 1:
        torch.__version__ = "2.0.0"
    strategy = HexiSeqStrategy(even_plan(), timeout=timedelta(seconds=60), process_group_backend="gloo")
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy._accelerator = __import__("lightning").pytorch.accelerators.CPUAccelerator()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.setup_environment()
launch.worker(main, Path(sys.argv[1]))
"""


def even_plan() -> Plan:
    replica = make_replica(16, 8, [(1, [(rank, 8, 2)]) for rank in range(2)])
    devices = (RankDevice("cpu", "here", "cpu"),) * 2
    return Plan("manual", 16, 2, 1, 8, 1, "ring", "none", "float32", (replica,), devices)


@pytest.mark.slow
def test_a_job_of_unlike_ranks_ends_before_its_process_group(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "worker.py").write_text(CLAIMING)
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path)]
    with pytest.raises(ValueError, match=r"2\.0\.0 on rank 1") as stopped:
        launch.start_ranks(command, even_plan().devices, tmp_path)
    reports = sorted((tmp_path / "logs").glob("rank*.error"))
    assert len(reports) == 2
    for path in reports:
        told = yaml.safe_load(path.read_text())
        assert told["user"]
        assert told["message"] == str(stopped.value)
    assert os.environ.get("RANK") is None

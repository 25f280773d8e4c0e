"""Measuring this machine gives a cluster one can plan for."""

from __future__ import annotations

import json
import subprocess
import sys

from hexiseq.cluster import Cluster


def measured(*arguments: str) -> Cluster:
    done = subprocess.run(
        [sys.executable, "-m", "hexiseq.profile", *arguments], capture_output=True, text=True, check=True
    )
    return Cluster.from_config(json.loads(done.stdout))


def test_this_machine_is_a_cluster() -> None:
    cluster = measured("3")
    assert len(cluster.places) == 3
    (device,) = cluster.devices
    # Any processor of the last twenty years, and none of the next ten.
    assert 1e-4 < device.gemm_tflops < 100
    assert 1e-4 < device.attention_forward_tflops < 100
    assert all(len(place.seat.cores) <= 1 for place in cluster.places)

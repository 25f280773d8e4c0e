"""Whole training steps of every policy that runs, side by side on uneven test beds (`hexiseq.testbed`).

    python -m benchmarks.training                               # both beds
    python -m benchmarks.training --beds 1:.5:.5 --seq 8192 --kv-heads 8 --steps 8 --json out.json

Each bed is measured by ``recipe=profile`` first, and all policies plan for what it wrote: two ranks on one core, for
one, disturb each other and have less than half of its rates.
Every policy's job runs at one time, and they take turns, a step each (`benchmarks.turns`): the others sleep, and a
machine that changes its speed changes it for all of them. A gain is the median, over the cycles, of the best even
policy's step over ours in the same cycle. CPU seconds of all ranks say whether policies did the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.beds import (
    BEDS,
    GQA,
    MHA,
    ROOT,
    UNTIMED,
    Setting,
    cluster_config,
    core_rates,
    job_config,
    train,
    workload_overrides,
)
from hexiseq.plan import align
from recipes.job import solve_config

EVEN = ("ring", "ulysses", "usp")
POLICIES = ("hexiseq", *EVEN)
PROFILE_SECONDS = 300


def profiled(bed: str, kv_heads: int, seq_len: int) -> dict[str, Any]:
    """What ``recipe=profile`` measures on a bed: a cluster's configuration. Raises RuntimeError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "cluster" / "bed.yaml"
        written.parent.mkdir()
        as_it_should_be = yaml.safe_dump({"cluster": cluster_config(BEDS[bed], core_rates(None))})
        written.write_text(f"# @package _global_\n{as_it_should_be}")
        command = [sys.executable, "train.py", "--config-dir", folder, "recipe=profile", "+cluster=bed",
                   *workload_overrides(kv_heads, seq_len), f"hydra.run.dir={folder}/run"]  # fmt: skip
        try:
            said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROFILE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"recipe=profile took longer than {PROFILE_SECONDS} s") from error
        if said.returncode:
            raise RuntimeError(f"recipe=profile failed: {said.stderr.strip()[-2000:]}")
        return yaml.safe_load((Path(folder) / "run" / "cluster.yaml").read_text())["cluster"]


def measure(bed: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, and CPU seconds of all ranks in it, by policy; and why a policy does not run.

    Raises:
        RuntimeError: no even policy runs, or a job failed.
    """
    cluster = profiled(bed, options.kv_heads, options.seq)
    found: dict[str, Any] = {"cluster": cluster, "seconds": {}, "cpu_seconds": {}, "left_out": {}, "shares": {}}
    settings, steps = {}, UNTIMED + options.steps
    for policy in POLICIES:
        setting = Setting(bed, options.kv_heads, options.seq, policy, "auto")
        try:
            *_, plan = solve_config(job_config(setting, cluster, steps))
        except ValueError as error:
            found["left_out"][policy] = str(error)
            continue
        settings[policy] = setting
        found["shares"][policy] = [[shard.num_tokens for shard in group.shards] for group in plan.replicas[0].groups]
    if "hexiseq" not in settings or len(settings) < 2:
        reasons = "; ".join(f"{policy}: {reason}" for policy, reason in found["left_out"].items())
        raise RuntimeError(f"nothing to compare, {reasons}")
    found["load_before"] = os.getloadavg()[0]
    records = train({policy: (setting, cluster) for policy, setting in settings.items()}, steps)
    for policy, record in records.items():
        ranks = [rank["steps"][UNTIMED:] for rank in record["ranks"]]
        found["seconds"][policy] = record["step_seconds"][UNTIMED:]
        found["cpu_seconds"][policy] = [sum(step["cpu"] for step in cycle) for cycle in zip(*ranks, strict=True)]
    return found


def gain(seconds: Mapping[str, list[float]], policy: str) -> tuple[float, float, float]:
    """How much longer than the policy's the best even policy's step takes: median, least and most over the cycles."""
    even = min((name for name in EVEN if name in seconds), key=lambda name: statistics.median(seconds[name]))
    ratios = [theirs / ours for theirs, ours in zip(seconds[even], seconds[policy], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beds", nargs="+", default=["1:.5:.5", "1:.25"], choices=list(BEDS), metavar="BED")
    parser.add_argument("--seq", type=int, default=8192, help="tokens (%(default)s)")
    parser.add_argument("--kv-heads", type=int, default=GQA, choices=(MHA, GQA), help="of 8 query heads (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each policy (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, limit in (("steps", 1), ("seq", 256)):
        if getattr(options, name) < limit:
            parser.error(f"--{name} must be at least {limit}, got {getattr(options, name)}")
    rows, loads, everything = [], [], {}
    for bed in options.beds:
        try:
            found = everything[bed] = measure(bed, options)
        except RuntimeError as error:
            raise SystemExit(f"{bed}: {error}") from error
        loads.append(f"{found['load_before']:.1f}")
        for policy, values in found["seconds"].items():
            median, least, most = gain(found["seconds"], policy)
            cpu = statistics.median(found["cpu_seconds"][policy])
            rows.append([bed, policy, f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}",
                         f"{cpu:.2f}", f"{median:.2f}x ({least:.2f} to {most:.2f})",
                         str(found["shares"][policy])])  # fmt: skip
        rows += [[bed, policy, "-", "-", "-", "-", reason] for policy, reason in found["left_out"].items()]
    header = ["bed", "policy", "step s", "all steps", "CPU s, all ranks", "best even / it", "tokens by group"]
    print("\n".join(align(header, rows)))
    print(f"load before: {', '.join(loads)}")
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Whole training steps of every policy that runs, side by side on uneven test beds (`hexiseq.testbed`).

    python -m benchmarks.training                               # both beds; --rates takes what recipe=profile wrote
    python -m benchmarks.training --beds 1:.5:.5 --seq 8192 --rounds 3 --json out.json

Policies take turns, a run of a few steps each, in an order that changes from round to round. A policy's step is the
median over its runs of the steps after the first; a gain is the best even policy's over ours. CPU seconds of all ranks
say whether policies did the same work and whether others had the machine: load is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.prediction import BEDS, GQA, MHA, Setting, core_rates, in_a_process, measured_cpu, measured_seconds
from hexiseq.plan import align

EVEN = ("ring", "ulysses", "usp")
POLICIES = ("hexiseq", *EVEN)


def measure(bed: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and CPU seconds of all ranks, of each round, by policy; and why a policy does not run."""
    rates = core_rates(options.rates)
    found: dict[str, Any] = {"seconds": {}, "cpu_seconds": {}, "load": [], "left_out": {}, "shares": {}}
    for number in range(options.rounds):
        turn = number % len(POLICIES)
        for policy in (*POLICIES[turn:], *POLICIES[:turn]):
            if policy in found["left_out"]:
                continue
            found["load"].append(os.getloadavg()[0])
            setting = Setting(bed, options.kv_heads, options.seq, policy, "auto")
            record = in_a_process(setting, rates, profile=False)
            if record["status"] != "ok":
                found["left_out"][policy] = record["reason"].strip().splitlines()[-1]
                continue
            found["seconds"].setdefault(policy, []).append(measured_seconds(record))
            found["cpu_seconds"].setdefault(policy, []).append(float(measured_cpu(record).sum()))
            groups = record["plan"]["replicas"][0]["groups"]
            found["shares"][policy] = [
                [sum(end - start for start, end in shard["tokens"]) for shard in group["shards"]] for group in groups
            ]
            print(f"{bed} {policy}: {found['seconds'][policy][-1]:.2f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beds", nargs="+", default=["1:.5:.5", "1:.25"], choices=list(BEDS), metavar="BED")
    parser.add_argument("--seq", type=int, default=8192, help="tokens (%(default)s)")
    parser.add_argument("--kv-heads", type=int, default=MHA, choices=(MHA, GQA), help="of 8 query heads (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=Path, help="a cluster that recipe=profile wrote on one core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {bed: measure(bed, options) for bed in options.beds}
    rows = []
    for bed, result in found.items():
        seconds = {policy: statistics.median(values) for policy, values in result["seconds"].items()}
        even = min((seconds[policy] for policy in EVEN if policy in seconds), default=None)
        for policy, value in seconds.items():
            gain = f"{even / value:.2f}x" if even else "-"
            cpu = statistics.median(result["cpu_seconds"][policy])
            rows.append([bed, policy, f"{value:.2f}", f"{cpu:.2f}", gain, str(result["shares"][policy])])
        rows += [[bed, policy, "-", "-", "-", reason] for policy, reason in result["left_out"].items()]
    header = ["bed", "policy", "step s", "CPU s, all ranks", "best even / it", "tokens by group"]
    print("\n".join(align(header, rows)))
    print("load before runs:", ", ".join(f"{load:.1f}" for result in found.values() for load in result["load"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How long the scheduler takes, and how near the bound its plans are, from 8 to 10,240 GPUs.

    python -m benchmarks.scheduler                       # a table; --json PATH writes each run
    python -m benchmarks.scheduler --gpus 128 1024 --runs 9
    python -m benchmarks.scheduler --paper               # how near the best the paper's large simulations are planned

Clusters are nodes of eight GPUs, a quarter of them each of H100, A100, A800 and L40S (of two types below 32 GPUs). A
call begins with the cluster as it was read and ends with the plan, rivals included; what it could keep from the call
before is thrown away. Seconds are those of the process on one core, medians over runs; the first call of all, which
loads the solver, does not count.

Columns say how near the best a plan is: ``gap`` to the bound that no plan beats, and ``rounding`` to the best of all
groupings with tokens, heads and slots in fractions. For that both are estimated alike, as the search estimates;
``beyond`` is what the cost model adds to the plan's own estimate. Fractions know no memory: ``fullest`` says how full
the fullest device is, of what it may be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from typing_extensions import override

from benchmarks.paper_settings import MODES, Row, all_rows, main_nics
from hexiseq.cluster import Cluster, Node, Seat, device_from_config
from hexiseq.cost import Layout, exposed_seconds, optimizer_seconds, replica_kinds
from hexiseq.plan import Plan, align
from hexiseq.schedule import solve, solve_modes
from hexiseq.schedule.estimate import Alike, Job
from hexiseq.schedule.local import cut_heads, share_tokens
from hexiseq.schedule.search import Options, Parts, Search, slot_totals
from hexiseq.schedule.shares import GroupClass, Shares
from hexiseq.workload import ModelShape, Workload
from recipes.compose import composed
from recipes.job import workload_of as workload_of_job

CONF = Path(__file__).resolve().parent.parent / "conf"
INTRA_GB_PER_S = {"h100_sxm": 450.0, "a100_80": 300.0, "a800": 200.0, "l40s": 31.0}
NIC_GB_PER_S = 25.0
PAPER_TOKENS = 262_144  # of the shortest sequences of the paper's that are looked at
# GPUs, model, tokens of a sequence, sequences of a step.
ROWS = (
    (8, "llama_7b", 65536, 1),
    (16, "llama_7b", 131072, 1),
    (32, "llama_13b", 262144, 1),
    (64, "llama_13b", 524288, 1),
    (128, "llama_13b", 524288, 1),
    (128, "llama3_70b", 1048576, 1),
    (128, "llama3_70b", 131072, 8),
    (256, "llama3_70b", 262144, 4),
    (512, "llama3_70b", 262144, 8),
    (1024, "llama3_70b", 262144, 16),
    (1024, "llama3_70b", 1048576, 8),
    (2560, "llama3_70b", 262144, 40),
    (5120, "llama3_70b", 262144, 80),
    (10240, "llama3_70b", 262144, 160),
    (10240, "llama3_70b", 1048576, 64),
)


def cluster_of(gpus: int, nics: int) -> Cluster:
    """Nodes of eight, a class of nodes for each type."""
    types = list(INTRA_GB_PER_S)[: 4 if gpus >= 32 else 2 if gpus >= 16 else 1]
    nodes = []
    for name in types:
        device = device_from_config(yaml.safe_load((CONF / "gpu" / f"{name}.yaml").read_text()))
        seats = (Seat(device),) * 8
        nodes.append(Node(name, seats, INTRA_GB_PER_S[name], nics, NIC_GB_PER_S, count=gpus // 8 // len(types)))
    return Cluster(f"{gpus} GPUs", tuple(nodes))


def workload_of(model: str, seq_len: int, sequences: int) -> Workload:
    config = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text())
    shape = ModelShape.from_hf_config(config["config"], config["name"])
    recompute = "full" if model == "llama3_70b" else "selective"
    return Workload(shape, seq_len, "bfloat16", recompute, sequences, 1, False)


def call(gpus: int, nics: int, workload: Workload, time_limit_seconds: float) -> tuple[Plan, float]:
    """A plan, and the CPU seconds it took."""
    cluster = cluster_of(gpus, nics)
    for cached in (cut_heads, share_tokens, slot_totals):
        cached.cache_clear()
    start = time.process_time()
    plan = solve(cluster, workload, time_limit_seconds=time_limit_seconds)
    return plan, time.process_time() - start


class Fractional(Search):
    """The search with tokens, heads and slots in fractions: what its estimates say then is what rounding costs."""

    @override
    def cut_heads(self, members: list[int], tokens: float, head_caps: np.ndarray | None) -> tuple[Any, ...]:
        speed = 1 / self.attention_in(round(self.workload.seq_len / tokens))[members]
        heads = self.workload.model.heads * speed / speed.sum()
        return tuple(heads.round(9).tolist())

    @override
    def totals(self, parts: Parts, shares: np.ndarray) -> list[tuple[float, int]]:
        return [(1.0, 2 * len(parts.grouping))]


def own_seconds(search: Search, layout: Layout) -> float:
    """The same estimate of a layout's own tokens, heads and slots."""
    begins, members = layout.begins.tolist(), layout.ranks.tolist()
    grouping = [members[a:b] for a, b in itertools.pairwise(begins)]
    heads = [tuple(layout.heads[a:b].astype(int).tolist()) for a, b in itertools.pairwise(begins)]
    classes = [GroupClass(cut, 0.0, 0.0, (), ()) for cut in heads]
    linear = float((layout.tokens * search.linear[layout.ranks]).max())
    index = list(range(len(grouping)))
    return search.estimated(Parts(grouping, classes, [1] * len(index), index, grouping),
                            Shares(layout.group_tokens, linear), 1.0)  # fmt: skip


def rounding(plan: Plan, cluster: Cluster, workload: Workload) -> tuple[float, float]:
    """What whole tokens, heads and slots cost a plan, against the best fractional layout of all groupings of its
    devices and replicas, both as estimated; and the plan's predicted seconds over its own estimate."""
    assert plan.predicted is not None
    left_out = Counter((d.type, d.node) for d in plan.excluded)
    places = []
    for place in cluster.places:
        key = (place.device.type, place.node_name)
        if left_out[key]:
            left_out[key] -= 1
        else:
            places.append(place)
    job = Job(cluster, places, workload)
    options = Options(None, None, math.inf)
    fractional = own = 0.0
    for kind in replica_kinds(plan, job.wires.signature):
        ranks = np.sort(kind.ranks, axis=1)
        search = Fractional(job, Alike(ranks, kind.layout.sequences), options)
        fractional = max(fractional, search.rank_groupings()[0][0])
        own = max(own, own_seconds(search, kind.layout.renamed(np.searchsorted(ranks[0], kind.ranks[0]))))
    alone = exposed_seconds(workload, job.wires) + optimizer_seconds(workload, job.wires)
    fractional, own = (workload.accumulation * seconds + alone for seconds in (fractional, own))
    return own / fractional - 1, plan.predicted.step_seconds / own - 1


def paper_rows() -> list[Row]:
    """The paper's simulations of 64 and 128 GPUs with sequences of 256k tokens and more."""
    return [row for row in all_rows() if row.cluster in ("paper_sim_64", "paper_sim_128") and row.sequences == 1
            and row.seq_len >= PAPER_TOKENS and row.nics == main_nics(row.cluster)]  # fmt: skip


def best_of_modes(row: Row, time_limit_seconds: float) -> tuple[Cluster, Plan, Workload]:
    """The fastest plan of all the modes that the paper suite has."""
    config = composed(["recipe=plan", *row.overrides])
    cluster = Cluster.from_config(config["cluster"])
    workloads = [workload_of_job({**config, "strategy": config["strategy"] | mode}, cluster) for mode in MODES.values()]
    return cluster, *solve_modes(cluster, workloads, rivals=False, time_limit_seconds=time_limit_seconds)


def print_paper(time_limit_seconds: float) -> None:
    cells = []
    for row in paper_rows():
        cluster, plan, workload = best_of_modes(row, time_limit_seconds)
        lost, beyond = rounding(plan, cluster, workload)
        assert plan.predicted is not None
        fullest = max(a / b for a, b in zip(plan.predicted.memory_gb, plan.predicted.memory_limit_gb, strict=True))
        mode = workload.recompute + (", kept" if workload.keep_parameters else "")
        cells.append([row.cluster, row.model, f"{row.seq_len:,}", mode, f"{plan.predicted.step_seconds:.4g} s",
                      str(len(plan.excluded)), f"{plan.gap:.1%}", f"{lost:.2%}", f"{beyond:.1%}",
                      f"{fullest:.1%}"])  # fmt: skip
    header = ["cluster", "model", "tokens", "recompute", "step", "left out", "gap", "rounding", "beyond", "fullest"]
    print("\n".join(align(header, cells)))


def measure(row: tuple[int, str, int, int], options: argparse.Namespace) -> dict[str, Any]:
    gpus, model, seq_len, sequences = row
    workload = workload_of(model, seq_len, sequences)
    runs = [call(gpus, options.nics, workload, options.time_limit) for _ in range(options.runs)]
    plan, seconds = runs[0][0], [taken for _, taken in runs]
    lost, beyond = rounding(plan, cluster_of(gpus, options.nics), workload)
    assert plan.predicted is not None
    best = min((r.step_seconds for r in plan.rivals if r.step_seconds and r.name != "hexiseq"), default=None)
    return {
        "gpus": gpus,
        "model": model,
        "seq_len": seq_len,
        "sequences": sequences,
        "cpu_seconds": seconds,
        "step_seconds": plan.predicted.step_seconds,
        "gap": plan.gap,
        "rounding": lost,
        "beyond_estimate": beyond,
        "gain": best and best / plan.predicted.step_seconds,
        "replicas": len(plan.replicas),
        "excluded": len(plan.excluded),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", help="rows with these numbers of GPUs only")
    parser.add_argument("--nics", type=int, default=8, help="of 25 GB/s, per node (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="calls of each row (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=60.0, help="processor seconds of a call (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers there")
    parser.add_argument("--paper", action="store_true", help="no times, but the paper's simulations; alone")
    options = parser.parse_args(arguments)
    if options.paper and (options.gpus or options.json):
        parser.error("--paper is a table of its own, without --gpus and --json")
    if options.paper:
        print_paper(options.time_limit)
        return
    rows = [row for row in ROWS if not options.gpus or row[0] in options.gpus]
    if not rows or options.runs < 1 or options.nics < 1:
        parser.error(f"no row has so many GPUs: {options.gpus}; there are {sorted({row[0] for row in ROWS})}"
                     if not rows else "--runs and --nics must be at least 1")  # fmt: skip
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    call(16, options.nics, workload_of("llama_7b", 65536, 1), options.time_limit)
    found = []
    for row in rows:
        found.append(measure(row, options))
        print(f"{row}: {statistics.median(found[-1]['cpu_seconds']):.3f} s", flush=True)
    header = ["GPUs", "model", "tokens", "sequences", "seconds (least)", "step"]
    header += ["replicas", "left out", "gap", "rounding", "beyond", "gain"]
    cells = [
        [
            f"{r['gpus']:,}", r["model"], f"{r['seq_len']:,}", str(r["sequences"]),
            f"{statistics.median(r['cpu_seconds']):.3f} ({min(r['cpu_seconds']):.3f})", f"{r['step_seconds']:.4g} s",
            str(r["replicas"]), str(r["excluded"]), f"{r['gap']:.1%}", f"{r['rounding']:.2%}",
            f"{r['beyond_estimate']:.1%}",
            f"{r['gain']:.2f}x" if r["gain"] else "-",
        ]
        for r in found
    ]  # fmt: skip
    print("\n".join(align(header, cells)))
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": settings, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The paper's settings, planned: gain, balance, memory and traffic of our plans against even splits of the same job.

    python -m benchmarks.paper_suite                              # every row that is not in the results yet
    python -m benchmarks.paper_suite --family testbed --nics 1    # some of them
    python -m benchmarks.paper_suite --rows sim_64 llama_13b      # rows whose name has all of these
    python -m benchmarks.paper_suite --docs                       # nothing solved: tables and pictures of the results

The rows are those of ``conf/experiment/paper_*.yaml`` (a Hydra multirun of one is the same rows, without the
comparisons), each with every choice of NICs per node. A row is solved in every mode of `MODES`, and every policy, ours
and the rivals, counts by the mode that suits it best. All figures are predictions of `hexiseq.cost`; nothing runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import paper_report as report
from benchmarks.paper_settings import FAMILIES, MODES, NICS, NOT_EVEN, Record, Row, all_rows, main_nics
from hexiseq.cluster import Cluster, Place
from hexiseq.cost import (
    OutOfMemory,
    Wires,
    busy_seconds,
    exposed_seconds,
    layer_bytes,
    lower_bound,
    match_places,
    predict,
    replica_cost,
)
from hexiseq.plan import (
    DTYPES,
    EXCHANGES,
    POLICIES,
    Plan,
    RankDevice,
    fits_slots,
    make_replica,
)
from hexiseq.schedule import IllegalPolicy, solve
from hexiseq.workload import Workload
from recipes.compose import composed
from recipes.job import workload_of

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "paper-suite.md"


# What is said of a plan ----------------------------------------------------------------------------------------


def figures(plan: Plan, cluster: Cluster, workload: Workload, places: Sequence[Place] | None = None) -> Record:
    """The figures of a plan that the tables compare; `places`: of its ranks, where they are not the plan's own."""
    places = match_places(plan, cluster) if places is None else places
    predicted = plan.predicted
    assert predicted is not None
    memory = [used / p.device.memory_gb for used, p in zip(predicted.memory_gb, places, strict=True)]
    busy = busy_seconds(plan, cluster, workload, places)
    return {
        "step_seconds": predicted.step_seconds,
        "without_parameters_seconds": without_parameters(plan, exposed_seconds(workload, Wires(cluster, places))),
        "parameter_seconds": predicted.parameter_seconds,
        "balance": float(busy.mean() / busy.max()),
        "memory_fraction": max(memory),
        "between_models_gb": traffic_between_models(plan, workload, places) / 1e9,
        "replicas": len(plan.replicas),
        "groups": sum(len(replica.groups) for replica in plan.replicas),
        "exchange": plan.exchange,
        "devices": plan.world_size,
    }


def traffic_between_models(plan: Plan, workload: Workload, places: Sequence[Place]) -> float:
    """Bytes of a step that pass between devices of different GPU models: all-to-all, KV and its gradients.

    Parameters are left out: they go round all devices whatever the plan.
    """
    total = 0.0
    for replica in plan.replicas:
        for kind in workload.model.kinds:
            cost = replica_cost(plan, replica, dataclasses.replace(workload, model=kind), places)
            types = np.array([places[rank].device.type for rank in cost.ranks])
            moved = layer_bytes(cost, workload.recompute)
            across = types[:, None] != types[None, :]
            total += workload.accumulation * kind.layers * float(moved[across].sum())
    return total


def without_parameters(plan: Plan, exposed: float) -> float:
    """Step time if parameters moved for free, from the parts of a plan's prediction.

    Exact where compute decides, which is certain as soon as all wires together take less than the step. Where the wires
    may decide, what compute with what nothing hides, or the other traffic, takes by itself; a gather of KV, and the
    last gradients of a ring, count as hidden then, the return of gathered gradients as not.

    Args:
        exposed: seconds of the step in which parameters move and nothing is computed.
    """
    predicted = plan.predicted
    assert predicted is not None
    moving = predicted.all_to_all_seconds + predicted.ring_seconds
    if predicted.step_seconds > moving + predicted.parameter_seconds:
        return predicted.step_seconds - exposed
    bare = predicted.all_to_all_seconds
    if plan.exchange == "allgather":
        # Gathered once per pass; gradients are sums in fp32.
        gathers, returned = 3 if plan.recompute == "full" else 2, max(4, DTYPES[plan.dtype]) / DTYPES[plan.dtype]
        bare += predicted.ring_seconds * returned / (gathers + returned)
    return min(predicted.step_seconds - exposed, max(predicted.compute_seconds + bare, moving))


# Even grids, for what `solve` does not tell --------------------------------------------------------------------


def round_robin(places: Sequence[Place]) -> list[Place]:
    """The places with GPU models taking turns, as a launcher deals out devices that knows no models."""
    by_model: dict[str, list[Place]] = {}
    for place in places:
        by_model.setdefault(place.device.type, []).append(place)
    turns = itertools.zip_longest(*by_model.values())
    return [place for turn in turns for place in turn if place is not None]


def even_grids(workload: Workload, places: Sequence[Place]) -> Iterator[Plan]:
    """Every even grid over `places` in their order: equal replicas of equal groups, equal tokens and heads."""
    model, ranks, length = workload.model, len(places), workload.seq_len
    devices = tuple(RankDevice(p.device.type, p.node_name, p.device.kernel) for p in places)
    for replicas, width in itertools.product(range(1, ranks + 1), range(1, ranks + 1)):
        if ranks % (replicas * width) or workload.sequences % replicas or model.heads % width:
            continue
        if model.kv_heads % width and width % model.kv_heads:
            continue
        groups = ranks // replicas // width
        slot = 2 * -(-length // (2 * groups))
        if not fits_slots(length, slot, groups):
            continue
        made = []
        for start in range(0, ranks, groups * width):
            counts = []
            for g in range(groups):
                tokens = slot if g else length - (groups - 1) * slot
                first = start + g * width
                share = [tokens // width + (m < tokens % width) for m in range(width)]
                counts.append((1, [(first + m, share[m], model.heads // width) for m in range(width)]))
            made.append(make_replica(length, slot, counts, workload.sequences // replicas))
        for exchange in EXCHANGES if groups > 1 else EXCHANGES[:1]:
            yield Plan(
                policy="usp",
                seq_len=length,
                num_heads=model.heads,
                num_kv_heads=model.kv_heads,
                slot=slot,
                fusion=1,
                exchange=exchange,
                recompute=workload.recompute,
                dtype=workload.dtype,
                replicas=tuple(made),
                devices=devices,
            )


def predicted_grids(cluster: Cluster, workload: Workload, places: Sequence[Place]) -> list[Plan]:
    """The even grids over `places` that fit memory, with their predictions."""
    found = []
    for plan in even_grids(workload, places):
        predicted = predict(plan, cluster, workload, places)
        if all(used <= most for used, most in zip(predicted.memory_gb, predicted.memory_limit_gb, strict=True)):
            found.append(dataclasses.replace(plan, predicted=predicted))
    return found


# Solving a row -------------------------------------------------------------------------------------------------


def solve_row(row: Row) -> Record:
    """A row in every mode, as plain containers."""
    start = time.perf_counter()
    config = composed(row.overrides)
    cluster = Cluster.from_config(config["cluster"])
    modes = {}
    for mode, keys in MODES.items():
        strategy = {**config["strategy"], **keys}
        modes[mode] = solve_mode(cluster, workload_of({**config, "strategy": strategy}, cluster), strategy["exchange"])
    return {**dataclasses.asdict(row), "modes": modes, "seconds": time.perf_counter() - start}


def solve_mode(cluster: Cluster, workload: Workload, exchange: str) -> Record:
    """Ours, the rivals and the even grids of one workload."""
    found: Record = {"bound_seconds": lower_bound(cluster, workload)}
    fastest = max(cluster.devices, key=lambda device: device.attention_forward_tflops)
    fast = [place for place in cluster.places if place.device == fastest]
    devices = {"even": cluster.places, "fast_only": fast}
    grids = {kind: predicted_grids(cluster, workload, places) for kind, places in devices.items()}
    for kind, plans in grids.items():
        exposed = exposed_seconds(workload, Wires(cluster, devices[kind]))
        free = [without_parameters(plan, exposed) for plan in plans]
        found[f"{kind}_without_parameters_seconds"] = min(free, default=None)
    try:
        began = time.thread_time()
        ours = solve(cluster, workload, exchange=exchange, time_limit_seconds=60)
        taken = time.thread_time() - began
    except (OutOfMemory, IllegalPolicy) as error:
        status = "out_of_memory" if isinstance(error, OutOfMemory) else "illegal"
        return {**found, "status": status, "reason": str(error)}
    places = match_places(ours, cluster)
    found |= {"status": "ok", "ours": figures(ours, cluster, workload), "solve_seconds": taken}
    found["ours"] |= {"gap": ours.gap, "excluded": len(ours.excluded)}
    found["ours"]["dealt_gb"] = traffic_between_models(ours, workload, round_robin(places)) / 1e9
    found["rivals"] = {r.name: {"status": r.status, "step_seconds": r.step_seconds} for r in ours.rivals}
    if (name := best_even(found["rivals"])) is not None:
        step = found["rivals"][name]["step_seconds"]
        found["even"] = {"name": name, "step_seconds": step}
        alike = [p for p in grids["even"] if p.predicted and math.isclose(p.predicted.step_seconds, step)]
        if not alike and name in POLICIES:  # no grid of neighbours
            alike = [solve(cluster, workload, name, rivals=False, exchange=exchange)]
        if alike:
            found["even"] |= figures(alike[0], cluster, workload)
    dealt = round_robin(cluster.places)
    if len(cluster.devices) > 1 and (others := predicted_grids(cluster, workload, dealt)):
        plan = min(others, key=lambda plan: plan.predicted.step_seconds if plan.predicted else math.inf)
        found["round_robin"] = figures(plan, cluster, workload, dealt)
    return found


def best_even(rivals: dict[str, Record]) -> str | None:
    """The fastest even split over all devices that runs; of equals one with a plan and a name of its own."""
    running = [name for name, rival in rivals.items() if name not in NOT_EVEN and rival["status"] == "ok"]
    return min(running, key=lambda n: (rivals[n]["step_seconds"], n not in POLICIES, n == "even"), default=None)


def run(rows: Sequence[Row], path: Path, again: bool) -> dict[str, Record]:
    """Solve what `path` does not hold yet; it is written after every row."""
    results: dict[str, Record] = json.loads(path.read_text()) if path.exists() else {}
    waiting = [row for row in rows if again or row.key not in results]
    print(f"{len(rows)} rows, {len(waiting)} to solve; results: {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(waiting, 1):
        results[row.key] = solve_row(row)
        written = path.with_suffix(".part")
        written.write_text(json.dumps(results, indent=1) + "\n")
        written.replace(path)
        view = report.summary(results[row.key])
        gain = f"gain {view['gain']:.3f}" if view["gain"] else view["outcome"]
        print(f"{number}/{len(waiting)}  {row.key:<48} {gain:<32} {results[row.key]['seconds']:.1f} s", flush=True)
    return results


# Command -------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[Row]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="(all)")
    add("--rows", nargs="+", default=[], metavar="TEXT", help="only rows whose name has all of these")
    add("--nics", nargs="+", type=int, choices=NICS, help="NICs per node (all; each family's own ones first)")
    add("--main", action="store_true", help="only with each family's own number of NICs")
    add("--out", type=Path, default=Path("outputs/paper_suite"), help="results.json and results.csv (%(default)s)")
    add("--again", action="store_true", help="solve rows that are in the results, too")
    add("--docs", action="store_true", help="write tables and pictures into docs/ from the results; solve nothing")
    options = parser.parse_args(arguments)
    rows = [
        row
        for row in all_rows()
        if row.family in options.family
        and (options.nics is None or row.nics in options.nics)
        and (row.nics == main_nics(row.cluster) or not options.main)
        and all(text in row.key for text in options.rows)
    ]
    if not rows:
        parser.error(f"no row has {' and '.join(options.rows)}; a row's name is like {all_rows()[0].key!r}")
    return options, rows


def main(arguments: Sequence[str] | None = None) -> None:
    options, rows = parse(arguments)
    path = options.out / "results.json"
    if options.docs and not path.exists():
        raise SystemExit(f"there are no results in {path}; run without --docs first")
    results = json.loads(path.read_text()) if options.docs else run(rows, path, options.again)
    found = [results[row.key] for row in rows if row.key in results]
    report.write_csv([report.summary(record) for record in found], options.out / "results.csv")
    print(f"\n{report.gains_table(found)}\n\n{report.against_paper(found)}")
    if options.docs:
        DOCS.write_text(report.fill(DOCS.read_text(), report.tables(found)))
        report.pictures(found, DOCS.with_suffix(""))
        report.write_csv([report.summary(record) for record in found], DOCS.with_suffix("") / "results.csv")


if __name__ == "__main__":
    main()

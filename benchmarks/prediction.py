"""Predicted against measured: real training steps on test beds made of one machine's cores (`benchmarks.beds`).

    python -m benchmarks.prediction run --json out.json [--rates profile.yaml] [--only NAME ...]
    python -m benchmarks.prediction report --json out.json [--clock cpu] [--plot out.png]

``run`` trains the settings by turns, as many at one time as the memory holds, and writes what it finds to the JSON
after each such group; settings that are there already are not run again. A shared machine changes its speed by a third
within the hour: `REFERENCE` runs in every group, and what took it longer is taken to have slowed the whole group.
``report`` fits the calibration to the settings that are for it, judges it on the others, and prints the table: step
time, peak memory above what a process holds before it has a model, and bytes handed to the process groups. Which
settings calibrate is fixed in `SETTINGS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.beds import BEDS, GQA, MHA, MODEL, UNTIMED, Setting, cluster_config, core_rates, train
from hexiseq import testbed
from hexiseq.cluster import Cluster
from hexiseq.cost import (
    busy_seconds,
    exposed_seconds,
    layer_bytes,
    match_places,
    optimizer_seconds,
    predict,
    replica_cost,
    token_bytes,
)
from hexiseq.cost.traffic import Wires, accumulator_bytes, parameter_traffic, reduced_bytes
from hexiseq.plan import Plan
from hexiseq.profile.rates import memory
from hexiseq.workload import Workload
from recipes import job as jobs

STEPS = 8
RANK_GB = 1.3  # that a rank and its part of the job's own process may hold
SETTINGS = (
    Setting("1:1", MHA, 2048, "ring", "ring", calibrates=True),
    Setting("1:1", GQA, 8192, "ulysses", "ring", calibrates=True),
    Setting("1:1", MHA, 4096, "ring", "allgather", calibrates=True),
    Setting("1:.5:.5", MHA, 4096, "hexiseq", "allgather", calibrates=True),
    Setting("1:.25", GQA, 4096, "hexiseq", "ring", calibrates=True),
    Setting("1:.5:.25", MHA, 8192, "hexiseq", "ring", calibrates=True),
    Setting("1:1:1:1", GQA, 4096, "usp", "ring", calibrates=True),
    Setting("slow 1:1", MHA, 4096, "ring", "ring", calibrates=True),
    Setting("1:1", MHA, 16384, "ring", "ring"),
    Setting("1:1", MHA, 4096, "ulysses", "ring"),
    Setting("1:.5:.5", GQA, 8192, "hexiseq", "ring"),
    Setting("1:.5:.5", MHA, 8192, "ring", "ring"),
    Setting("1:.25", MHA, 8192, "hexiseq", "allgather"),
    Setting("1:.5:.25", GQA, 4096, "hexiseq", "allgather"),
    Setting("1:1:1:1", GQA, 8192, "usp", "allgather"),
    Setting("1:1:1:1", MHA, 4096, "ulysses", "ring"),
    Setting("1:1:.5:.5:.25", GQA, 8192, "hexiseq", "ring"),
    Setting("slow 1:1", GQA, 8192, "hexiseq", "ring"),
    Setting("slow 1:.5:.25", MHA, 4096, "hexiseq", "ring"),
)
REFERENCE = SETTINGS[1]  # two whole cores, next to nothing but kernels


# --- running


def run(path: Path, only: Sequence[str], rates: Mapping[str, Any], profile: bool) -> None:
    """Run the settings that the file lacks, in groups that the memory holds, and add each group to it.

    Raises:
        RuntimeError: a job failed; groups that are done are in the file.
    """
    found = json.loads(path.read_text()) if path.exists() else {"settings": {}}
    found["machine"] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    lacking = {"quota": testbed.lacks_quotas(), "namespaces": testbed.lacks_namespaces()}

    def keep(setting: Setting, record: Mapping[str, Any]) -> None:
        found["settings"][setting.name] = {**record, "key": _key(setting, rates), "calibrates": setting.calibrates}

    def save() -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(path)

    wanted = []
    for setting in _by_turns(SETTINGS):
        before = found["settings"].get(setting.name, {"key": None})
        if (only and setting.name not in only) or before["key"] == _key(setting, rates):
            continue
        ranks = BEDS[setting.bed]
        needs = {"quota": any(r.quota for r in ranks), "namespaces": any(r.gb_per_s < 1 for r in ranks)}
        if why := next((lacking[what] for what, needed in needs.items() if needed and lacking[what]), None):
            keep(setting, {"status": "skipped", "reason": why})
            print(f"{setting.name}: skipped, {why}")
        else:
            wanted.append(setting)
    save()
    for group in groups(wanted, int(memory(torch.device("cpu"))[1] / RANK_GB)):
        started, load = time.monotonic(), os.getloadavg()[0]
        records = train({s.name: (s, cluster_config(BEDS[s.bed], rates)) for s in group}, STEPS, profile)
        reference = statistics.median(records[REFERENCE.name]["step_seconds"][UNTIMED:])
        for setting in group:
            keep(
                setting, {"status": "ok", **records[setting.name], "load_before": load, "reference_seconds": reference}
            )
        save()
        print(f"{', '.join(s.name for s in group)}: {time.monotonic() - started:.0f} s; "
              f"{REFERENCE.name} {reference:.2f} s a step", flush=True)  # fmt: skip


def _by_turns(settings: Sequence[Setting]) -> list[Setting]:
    """Those that calibrate and those held back by turns, as far as they go."""
    known, judged = ([s for s in settings if s.calibrates is what] for what in (True, False))
    return [s for pair in itertools.zip_longest(known, judged) for s in pair if s is not None]


def groups(settings: Sequence[Setting], most_ranks: int) -> list[list[Setting]]:
    """Cut them, in their order, into groups of at most so many ranks (or one setting), with `REFERENCE` in each."""
    made: list[list[Setting]] = []
    for setting in settings:
        if setting == REFERENCE:
            continue
        if not made or sum(len(BEDS[s.bed]) for s in (*made[-1], setting)) > most_ranks:
            made.append([REFERENCE])
        made[-1].append(setting)
    if not made and REFERENCE in settings:
        made.append([REFERENCE])
    return made


def _key(setting: Setting, rates: Mapping[str, Any]) -> str:
    parts = (
        REFERENCE.name,
        dataclasses.asdict(setting),
        [dataclasses.asdict(r) for r in BEDS[setting.bed]],
        MODEL,
        STEPS,
        dict(rates),
    )
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


# --- predicting


# What calibration may change. Factors of the cost model's own figures, which profiles have measured; then terms that it
# lacks: what part of the parameters' transfers that GPUs hide passes beside nothing else, since FSDP2 waits for each on
# CPUs; seconds of a whole core for moving a GB into or out of a socket, and for a step.
FACTORS = ("gemm", "attention", "hbm", "launch", "wires")
TERMS = {"parameters": 1.0, "transfer_seconds_per_gb": 0.5, "step_ms": 200.0}
# How far from the start they are let go, as logarithms, against a prediction's miss of `MISS`.
FACTORS_VARY, TERMS_VARY, MISS = 0.3, 1.0, 0.05
# How much longer gloo's collectives take than once around the circle at the wire's rate (it reduces all to all ranks,
# and between two the directions partly take turns), and its own copy of what it moves (`benchmarks.collectives`).
REDUCED, GATHERED_BY_TWO, COPIED = 2.0, 1.5, 1.0


@dataclass(frozen=True)
class Forecast:
    """What the model says of a record. Seconds of the step; per rank: seconds of its core, bytes sent, memory."""

    step_seconds: float
    cpu_seconds: np.ndarray
    attention_bytes: np.ndarray
    parameter_bytes: float
    memory_bytes: np.ndarray


def forecast(record: Mapping[str, Any], calibration: Mapping[str, float]) -> Forecast:
    """Predict a record's step with the rates it was planned with, changed by `calibration`."""
    config = _scaled(record["config"], calibration)
    cluster = Cluster.from_config(config["cluster"])
    plan = Plan.from_dict(record["plan"])
    workload: Workload = jobs.workload_of(config, cluster)
    places = match_places(plan, cluster)
    predicted = predict(plan, cluster, workload, places)
    share = np.array([_share(place.device.type) for place in places])
    sent, received, tokens = (np.zeros(plan.world_size) for _ in range(3))
    layers, repeats = workload.model.layers, workload.accumulation
    for replica in plan.replicas:
        cost = replica_cost(plan, replica, workload, places)
        moved = layer_bytes(cost, workload.recompute)
        sent[cost.ranks] += repeats * layers * moved.sum(1)
        received[cost.ranks] += repeats * layers * moved.sum(0)
        tokens[cost.ranks] = cost.layout.sequences * cost.layout.tokens
    parameters = parameter_traffic(workload, plan.world_size)
    transfer = calibration.get("transfer_seconds_per_gb", 0.0) * 1e-9 * (sent + received + 2 * parameters)
    step = calibration.get("step_ms", 0.0) * 1e-3
    extra = transfer + step  # of a whole core
    wires = Wires(cluster, places)
    busy = busy_seconds(plan, cluster, workload, places) + optimizer_seconds(workload, wires)
    reduced = reduced_bytes(workload) * (1 - 1 / plan.world_size)
    passed = (GATHERED_BY_TWO if plan.world_size == 2 else 1.0) * (parameters - reduced) + REDUCED * reduced
    exposed = calibration.get("parameters", 0.0) * (wires.around(passed) - exposed_seconds(workload, wires))
    used = (np.array(predicted.memory_gb) - np.array([place.device.overhead_gb for place in places])) * 1e9
    # The model counts the copy of a layer's gradients that is reduced beside a layer's work, since GPUs reduce while
    # the next layer is at work. On CPUs FSDP2 waits: that copy and gloo's are there when the work's memory is free.
    copy = workload.model.layer_parameters * accumulator_bytes(workload)
    waiting = np.maximum((1 + COPIED) * copy - tokens * token_bytes(workload)[1], 0) - copy
    return Forecast(
        step_seconds=predicted.step_seconds + exposed + float((extra / share).max()),
        cpu_seconds=busy * share + extra,
        attention_bytes=sent,
        parameter_bytes=parameters,
        memory_bytes=used + waiting,
    )


def _scaled(config: Mapping[str, Any], calibration: Mapping[str, float]) -> dict[str, Any]:
    gemm, attention, hbm, launch_factor, wires = (calibration.get(name, 1.0) for name in FACTORS)
    factors = {"gemm_tflops": gemm, "attention_forward_tflops": attention, "attention_backward_tflops": attention,
               "hbm_gb_per_s": hbm, "launch_us": launch_factor}  # fmt: skip
    cluster = json.loads(json.dumps(config["cluster"]))
    for entry in cluster["gpus"].values():
        entry |= {name: entry[name] * factor for name, factor in factors.items()}
    for node in cluster["nodes"]:
        node["intra_gb_per_s"] *= wires
        if not cluster.get("namespaces"):
            node["nic_gb_per_s"] *= wires
    return {**config, "cluster": cluster}


def _share(kind: str) -> float:
    return int(kind.removeprefix("core_")) / 100


def pace(records: Collection[dict[str, Any]]) -> None:
    """Note in each how much slower than usual the machine was, by what its group's `REFERENCE` took."""
    usual = statistics.median(record["reference_seconds"] for record in records) if records else 0.0
    for record in records:
        record["pace"] = record["reference_seconds"] / usual


def measured_seconds(record: Mapping[str, Any]) -> float:
    """Seconds of a step, at the machine's usual speed."""
    return statistics.median(record["step_seconds"][UNTIMED:]) / record["pace"]


def measured_cpu(record: Mapping[str, Any]) -> np.ndarray:
    """CPU seconds of a step by rank, as they were: who runs beside a rank disturbs them little."""
    steps = [[step["cpu"] for step in rank["steps"][UNTIMED:]] for rank in record["ranks"]]
    return np.median(steps, axis=1)


def measured_bytes(record: Mapping[str, Any], kind: str) -> np.ndarray:
    return np.array([rank["steps"][1]["sent"].get(kind, 0) for rank in record["ranks"]], float)


def calibrate(records: Sequence[Mapping[str, Any]], clock: str) -> dict[str, float]:
    """Fit `FACTORS` and `TERMS`: least squares of the logarithms of predicted over measured, held near the start.

    Args:
        clock: ``wall`` fits step times and, at half the weight, ranks' CPU times; ``cpu`` the latter alone, which
            other processes on the machine disturb little.
    """
    names = [*FACTORS, *TERMS]
    start = np.log([1.0] * len(FACTORS) + list(TERMS.values()))
    tether = MISS / np.array([FACTORS_VARY] * len(FACTORS) + [TERMS_VARY] * len(TERMS))

    def misses(logs: np.ndarray) -> np.ndarray:
        calibration = dict(zip(names, np.exp(logs).tolist(), strict=True))
        found: list[float] = []
        for record in records:
            said = forecast(record, calibration)
            of_cpu = 0.5 if clock == "wall" else 1.0
            found += (
                of_cpu * np.log(said.cpu_seconds / measured_cpu(record)) / np.sqrt(len(said.cpu_seconds))
            ).tolist()
            if clock == "wall":
                found.append(float(np.log(said.step_seconds / measured_seconds(record))))
        return np.array([*found, *(tether * (logs - start))])  # what the data do not tell stays where it was

    fitted = _least_squares(misses, start)
    return dict(zip(names, np.exp(fitted).tolist(), strict=True))


def _least_squares(misses: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Levenberg-Marquardt with differences for derivatives; at most a factor e a step."""
    at, damping = start.copy(), 1e-2
    value = misses(at)
    for _ in range(40):
        slopes = np.stack([(misses(at + 1e-3 * unit) - value) / 1e-3 for unit in np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slopes.T @ value)
        trial = at + np.clip(step, -1.0, 1.0)
        found = misses(trial)
        if found @ found < value @ value:
            settled = value @ value - found @ found < 1e-7
            at, value, damping = trial, found, damping / 4
            if settled:
                break
        else:
            damping *= 8
    return at


# --- reporting


def report(path: Path, clock: str, plot: Path | None) -> dict[str, Any]:
    """Print the table of all records; returns calibration and errors, as written beside the JSON."""
    found = json.loads(path.read_text())
    records = {s.name: found["settings"][s.name] for s in SETTINGS if s.name in found["settings"]}
    done = {name: record for name, record in records.items() if record["status"] == "ok"}
    if old := [name for name, record in done.items() if "reference_seconds" not in record]:
        raise ValueError(f"{path} is of an older format, which did not run by turns: run {', '.join(old)} again")
    pace(done.values())
    known = [record for record in done.values() if record["calibrates"]]
    calibration = calibrate(known, clock) if known else {}
    rows = {name: _row(record, calibration, clock) for name, record in done.items()}
    head = ("setting", "", "measured s", "model s", "fitted s", "error", "memory GB", "model", "error", "bytes", "load")
    widths = (42, 4, 10, 8, 8, 7, 9, 6, 7, 6, 5)
    print("  ".join(text.ljust(width) for text, width in zip(head, widths, strict=True)))
    for name, row in rows.items():
        cells = (
            name, "fit" if row["calibrates"] else "", f"{row['measured']:.2f}", f"{row['model']:.2f}",
            f"{row['fitted']:.2f}", f"{row['error']:+.1%}", f"{row['memory_gb']:.3f}",
            f"{row['memory_model_gb']:.3f}", f"{row['memory_error']:+.1%}",
            "exact" if row["bytes_exact"] else "OFF", f"{done[name]['load_before']:.1f}",
        )  # fmt: skip
        print("  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)))
    for name, record in records.items():
        if record["status"] != "ok":
            print(f"{name}: {record['status']}: {record.get('reason')}")
    judged = [row for row in rows.values() if not row["calibrates"]]
    summary: dict[str, Any] = {"clock": clock, "calibration": calibration, "rows": rows}
    for what in ("error", "memory_error"):
        sizes = [abs(row[what]) for row in judged]
        if sizes:
            summary[f"{what}_median"], summary[f"{what}_worst"] = statistics.median(sizes), max(sizes)
            print(f"{what} on {len(sizes)} held-back settings: median {summary[f'{what}_median']:.1%}, "
                  f"worst {summary[f'{what}_worst']:.1%}")  # fmt: skip
    print("calibration:", ", ".join(f"{name} {value:.3g}" for name, value in calibration.items()))
    if plot is not None and rows:
        draw(rows, clock, plot)
    return summary


def _row(record: Mapping[str, Any], calibration: Mapping[str, float], clock: str) -> dict[str, Any]:
    """A record's line. On the CPU clock, times are of the busiest rank's core."""
    plain, fitted = forecast(record, {}), forecast(record, calibration)
    if clock == "wall":
        seconds = (measured_seconds(record), plain.step_seconds, fitted.step_seconds)
    else:
        cpu = measured_cpu(record)
        busiest = int(cpu.argmax())
        seconds = (float(cpu[busiest]), float(plain.cpu_seconds[busiest]), float(fitted.cpu_seconds[busiest]))
    peaks = np.array([rank["peak_bytes"] for rank in record["ranks"]])
    worst = int(np.abs(np.log(fitted.memory_bytes / peaks)).argmax())
    sent = measured_bytes(record, "attention")
    return {
        "calibrates": record["calibrates"],
        **dict(zip(("measured", "model", "fitted"), seconds, strict=True)),
        "error": seconds[2] / seconds[0] - 1,
        "memory_gb": peaks[worst] / 1e9,
        "memory_model_gb": fitted.memory_bytes[worst] / 1e9,
        "memory_error": float(fitted.memory_bytes[worst] / peaks[worst] - 1),
        "bytes_exact": bool((sent == fitted.attention_bytes).all()),
        "bytes_sent": sent.tolist(),
        "bytes_model": fitted.attention_bytes.tolist(),
        "parameter_bytes_sent": measured_bytes(record, "parameters").tolist(),
        "parameter_bytes_model": fitted.parameter_bytes,
        "cpu_seconds": measured_cpu(record).tolist(),
        "cpu_seconds_fitted": fitted.cpu_seconds.tolist(),
    }


def draw(rows: Mapping[str, Mapping[str, Any]], clock: str, path: Path) -> None:
    """Predicted against measured, with bands of 5 and 15 %: step time and memory."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    panels = (
        (axes[0], "measured", "fitted", "step time" if clock == "wall" else "CPU time of the busiest rank", "s"),
        (axes[1], "memory_gb", "memory_model_gb", "peak memory of the rank predicted worst", "GB"),
    )
    for axis, of, said, title, unit in panels:
        values = np.array([[row[of], row[said]] for row in rows.values()])
        ends = np.array([values.min() / 1.4, values.max() * 1.4])
        for band, shade in ((0.15, "#e8edf3"), (0.05, "#c9d6e4")):
            axis.fill_between(ends, ends * (1 - band), ends * (1 + band), color=shade, label=f"within {band:.0%}")
        axis.plot(ends, ends, color="#6b7b8c", linewidth=0.8)
        for calibrates, colour, marker, label in (
            (True, "#8a8f98", "o", "calibrates"),
            (False, "#c8452e", "D", "held back"),
        ):
            chosen = values[[row["calibrates"] is calibrates for row in rows.values()]]
            axis.scatter(*chosen.T, s=34, color=colour, marker=marker, label=label, zorder=3)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
        axis.set(xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            ticks.set_major_formatter("{x:g}")
            ticks.set_minor_locator(ticker.NullLocator())
        axis.set_aspect("equal")
    axes[0].legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rates", type=Path, help="a cluster that recipe=profile wrote on one core")
    parser.add_argument("--only", nargs="+", default=[], choices=[s.name for s in SETTINGS], metavar="NAME")
    parser.add_argument("--profile", action="store_true", help="split a step by kinds of work")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what to judge by; cpu if others run")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    try:
        if options.command == "run":
            run(options.json, options.only, core_rates(options.rates), options.profile)
        else:
            summary = report(options.json, options.clock, options.plot)
            options.json.with_suffix(f".{options.clock}.json").write_text(json.dumps(summary, indent=1))
    except (RuntimeError, OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

"""Predicted against measured: real training steps on test beds made of one machine's cores (`hexiseq.testbed`).

    python -m benchmarks.prediction run --json out.json [--rates profile.yaml] [--only NAME ...]
    python -m benchmarks.prediction report --json out.json [--clock cpu] [--plot out.png]

``run`` trains each setting for a few steps in processes of its own, under a time limit, and writes what it finds to the
JSON after each; settings that are there already are not run again. A file is one trial: a shared machine changes its
speed by a third within the hour, and settings of different hours say nothing about each other. ``report`` fits the
calibration to the settings that are for it, judges it on the others, and prints the table: step time, peak memory above
what a process holds before it has a model, and bytes handed to the process groups. Which settings calibrate is fixed in
`SETTINGS`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.probe import MEMORY_STEP
from hexiseq import launch, testbed
from hexiseq.cluster import Cluster, device_from_config
from hexiseq.cost import (
    busy_seconds,
    exposed_seconds,
    layer_bytes,
    match_places,
    optimizer_seconds,
    predict,
    replica_cost,
)
from hexiseq.cost.traffic import Wires, parameter_traffic, reduced_bytes
from hexiseq.plan import Plan
from hexiseq.workload import Workload
from recipes import job as jobs

ROOT = Path(__file__).resolve().parent.parent
STEPS = 8
UNTIMED = MEMORY_STEP + 2  # the first steps: to allocate, to measure memory, to settle after it
LIMIT_SECONDS = 420.0  # of one setting
LINK_GB_PER_S = 0.02  # of a slow one
# tiny_llama widened until matrix products and attention are most of a step.
MODEL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
         "head_dim": 64}  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """A rank of a bed: its core, its share of it (by quota, or by sharing it with as many), and its node."""

    core: int
    share: float
    quota: bool = True
    node: int = 0
    gb_per_s: float = 1.0  # of the node's link


FULL = Rank(0, 1.0, quota=False), Rank(1, 1.0, quota=False)
BEDS: dict[str, tuple[Rank, ...]] = {
    "1:1": FULL,
    "1:.5:.5": (FULL[0], *(Rank(1, 0.5, quota=False),) * 2),
    "1:.25": (Rank(0, 0.8), Rank(1, 0.2)),
    "1:.5:.25": (Rank(0, 0.8), Rank(1, 0.4), Rank(1, 0.2)),
    "1:1:1:1": tuple(Rank(i // 2, 0.4) for i in range(4)),
    "1:1:.5:.5:.25": tuple(Rank(core, share) for core, share in ((0, 0.4), (0, 0.4), (1, 0.2), (1, 0.2), (1, 0.1))),
    "slow 1:1": tuple(Rank(i, 0.8, node=i, gb_per_s=LINK_GB_PER_S) for i in range(2)),
    "slow 1:.5:.25": (Rank(0, 0.8), Rank(1, 0.4), Rank(1, 0.2, node=1, gb_per_s=LINK_GB_PER_S)),
}


@dataclass(frozen=True)
class Setting:
    """One training run. ``calibrates``: the fit may see it; else it is judged by it."""

    bed: str
    kv_heads: int
    seq_len: int
    policy: str
    exchange: str
    calibrates: bool = False

    @property
    def name(self) -> str:
        heads = "mha" if self.kv_heads == MODEL["num_attention_heads"] else "gqa"
        return f"{self.bed} {heads} {self.seq_len // 1024}k {self.policy} {self.exchange}"


MHA, GQA = 8, 2
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


# --- running


def cluster_config(bed: Sequence[Rank], rates: Mapping[str, Any]) -> dict[str, Any]:
    """A bed as a cluster's configuration; a rank's rates are its share of the core's `rates`."""
    gpus: dict[str, Any] = {}
    nodes: dict[int, dict[str, Any]] = {}
    for rank in bed:
        kind = f"core_{round(100 * rank.share)}"
        scaled = {name: value * rank.share for name, value in rates.items() if name.endswith(("tflops", "gb_per_s"))}
        gpus[kind] = {**rates, **scaled, "type": kind, "launch_us": rates["launch_us"] / rank.share}
        node = {"name": f"n{rank.node}", "devices": [], "intra_gb_per_s": 1.0, "nics": 1, "nic_gb_per_s": rank.gb_per_s}
        seat = {"type": kind, "cores": [rank.core], **({"quota": rank.share} if rank.quota else {})}
        nodes.setdefault(rank.node, node)["devices"].append(seat)
    slow = any(rank.gb_per_s < 1 for rank in bed)
    return {"name": "bed", "gpus": gpus, "nodes": list(nodes.values()), "namespaces": slow}


def workload_overrides(kv_heads: int, seq_len: int) -> list[str]:
    """The model and the length of its sequences, as `train.py` takes them."""
    shape = {**MODEL, "num_key_value_heads": kv_heads}
    return ["model=tiny_llama", *(f"model.config.{name}={value}" for name, value in shape.items()),
            "data=synthetic", f"data.seq_len={seq_len}"]  # fmt: skip


def job_config(setting: Setting, cluster: Mapping[str, Any], steps: int = STEPS) -> jobs.Config:
    """A setting's job on its bed, described by `cluster`."""
    from recipes.compose import composed

    config = composed([
        *workload_overrides(setting.kv_heads, setting.seq_len), f"strategy={setting.policy}",
        f"strategy.exchange={setting.exchange}", "strategy.drop_devices=false", f"trainer.max_steps={steps}",
        "trainer.validation_sequences=0", f"data.synthetic.length={4 * setting.seq_len}",
    ])  # fmt: skip
    config["cluster"] = dict(cluster)
    return config


def run_setting(
    setting: Setting, cluster: Mapping[str, Any], arguments: Sequence[str], steps: int = STEPS
) -> dict[str, Any]:
    """Train it in this process's children. Returns what `run` records.

    Args:
        arguments: for `benchmarks.probe`.
    """
    config = job_config(setting, cluster, steps)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        job = jobs.prepare(config, run_dir)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "benchmarks.probe", str(run_dir), *arguments]
        launch.start_ranks(command, job.plan.devices, run_dir)
        with (run_dir / "metrics.csv").open(newline="") as file:
            seconds = [float(row["step_seconds"]) for row in csv.DictReader(file) if row.get("step_seconds")]
        ranks = [json.loads((run_dir / f"probe-{rank}.json").read_text()) for rank in range(job.plan.world_size)]
    return {"config": job.config, "plan": job.plan.to_dict(), "step_seconds": seconds, "ranks": ranks}


def run(path: Path, only: Sequence[str], rates: Mapping[str, Any], profile: bool) -> None:
    """Run the settings that the file lacks, each in a process of its own, and add them to it one by one."""
    found = json.loads(path.read_text()) if path.exists() else {"settings": {}}
    found["machine"] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    lacking = {"quota": testbed.lacks_quotas(), "namespaces": testbed.lacks_namespaces()}
    # Those that calibrate and those held back by turns: a machine that gets slower must not look like a wrong model.
    known, judged = ([s for s in SETTINGS if s.calibrates is what] for what in (True, False))
    order = [s for pair in itertools.zip_longest(known, judged) for s in pair if s is not None]
    for setting in order:
        key = _key(setting, rates)
        before = found["settings"].get(setting.name, {"key": None})
        if (only and setting.name not in only) or (before["key"] == key and before["status"] != "failed"):
            continue
        ranks = BEDS[setting.bed]
        needs = {"quota": any(r.quota for r in ranks), "namespaces": any(r.gb_per_s < 1 for r in ranks)}
        why = next((lacking[what] for what, needed in needs.items() if needed and lacking[what]), None)
        started, load = time.monotonic(), os.getloadavg()[0]
        result = (
            {"status": "skipped", "reason": why}
            if why
            else in_a_process(setting, cluster_config(ranks, rates), ["profile"] if profile else [])
        )
        result |= {"load_before": load, "wall_seconds": time.monotonic() - started}
        print(f"{setting.name}: {result['status']} {result.get('reason') or ''} in {result['wall_seconds']:.0f} s",
              flush=True)  # fmt: skip
        found["settings"][setting.name] = {**result, "key": key, "calibrates": setting.calibrates}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(path)


def in_a_process(
    setting: Setting, cluster: Mapping[str, Any], arguments: Sequence[str], steps: int = STEPS,
    limit_seconds: float = LIMIT_SECONDS,
) -> dict[str, Any]:  # fmt: skip
    """`run_setting` in a process of its own, under the time limit; ``status`` and, where that is not ok, ``reason``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        task = json.dumps({"setting": dataclasses.asdict(setting), "cluster": dict(cluster),
                           "arguments": list(arguments), "steps": steps})  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.prediction", "one", "--json", str(out), "--task", task]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, said = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # its ranks and its bed end with it
            process.communicate()
            return {"status": "failed", "reason": f"took longer than {limit_seconds:g} s"}
        if process.returncode:
            return {"status": "failed", "reason": said.strip()[-2000:]}
        return {"status": "ok", **json.loads(out.read_text())}


def _key(setting: Setting, rates: Mapping[str, Any]) -> str:
    parts = (dataclasses.asdict(setting), [dataclasses.asdict(r) for r in BEDS[setting.bed]], MODEL, STEPS, dict(rates))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def core_rates(path: Path | None) -> dict[str, Any]:
    """Rates of one core: of the first device of a cluster that ``recipe=profile`` wrote, else the catalogue's."""
    if path is None:
        return yaml.safe_load((jobs.CONF / "gpu" / "cpu_core.yaml").read_text())
    document = yaml.safe_load(path.read_text())
    entry = next(iter(document["cluster"]["gpus"].values()))
    device_from_config(entry)
    return entry


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
    sent, received = np.zeros(plan.world_size), np.zeros(plan.world_size)
    layers, repeats = workload.model.layers, workload.accumulation
    for replica in plan.replicas:
        cost = replica_cost(plan, replica, workload, places)
        moved = layer_bytes(cost, workload.recompute)
        sent[cost.ranks] += repeats * layers * moved.sum(1)
        received[cost.ranks] += repeats * layers * moved.sum(0)
    parameters = parameter_traffic(workload, plan.world_size)
    transfer = calibration.get("transfer_seconds_per_gb", 0.0) * 1e-9 * (sent + received + 2 * parameters)
    step = calibration.get("step_ms", 0.0) * 1e-3
    extra = transfer + step  # of a whole core
    wires = Wires(cluster, places)
    busy = busy_seconds(plan, cluster, workload, places) + optimizer_seconds(workload, wires)
    reduced = reduced_bytes(workload) * (1 - 1 / plan.world_size)
    passed = (GATHERED_BY_TWO if plan.world_size == 2 else 1.0) * (parameters - reduced) + REDUCED * reduced
    exposed = calibration.get("parameters", 0.0) * (wires.around(passed) - exposed_seconds(workload, wires))
    overhead = np.array([place.device.overhead_gb for place in places])
    copied = COPIED * workload.model.layer_parameters * workload.element_bytes
    return Forecast(
        step_seconds=predicted.step_seconds + exposed + float((extra / share).max()),
        cpu_seconds=busy * share + extra,
        attention_bytes=sent,
        parameter_bytes=parameters,
        memory_bytes=(np.array(predicted.memory_gb) - overhead) * 1e9 + copied,
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


def measured_seconds(record: Mapping[str, Any]) -> float:
    return statistics.median(record["step_seconds"][UNTIMED:])


def measured_cpu(record: Mapping[str, Any]) -> np.ndarray:
    """CPU seconds of a step by rank."""
    return np.array([statistics.median(step["cpu"] for step in rank["steps"][UNTIMED:]) for rank in record["ranks"]])


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
    parser.add_argument("command", choices=("run", "report", "one"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rates", type=Path, help="a cluster that recipe=profile wrote on one core")
    parser.add_argument("--only", nargs="+", default=[], choices=[s.name for s in SETTINGS], metavar="NAME")
    parser.add_argument("--profile", action="store_true", help="split a step by kinds of work")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what to judge by; cpu if others run")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command == "one":
        task = json.loads(options.task)
        found = run_setting(Setting(**task["setting"]), task["cluster"], task["arguments"], task["steps"])
        options.json.write_text(json.dumps(found))
    elif options.command == "run":
        run(options.json, options.only, core_rates(options.rates), options.profile)
    else:
        summary = report(options.json, options.clock, options.plot)
        options.json.with_suffix(f".{options.clock}.json").write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()

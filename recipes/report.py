"""A sweep's jobs side by side, as one HTML file that needs nothing else: ``python -m recipes.report SWEEP_DIR``.

Sweeps write ``report.html`` after their last job; calling it again reads ``summary.csv`` and the run folders anew.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hexiseq import picture
from hexiseq.picture.comparison import Comparison
from hexiseq.plan import Plan

_REHEARSALS = (
    "Rehearsals: what is predicted is for the cluster's devices; what is measured is of CPU processes with a small "
    "model in their place, and says nothing of those devices."
)
BASELINES = ("ring", "ulysses", "usp")  # the even splits that a speed-up is over
KINDS = ("predicted", "simulated", "measured")
STATUS = {"out_of_memory": "out of memory"}
COLUMNS = {"job", "overrides", "status", "reason", "run_dir"}  # of a sweep's table, whatever its recipe


@dataclass(frozen=True)
class Job:
    """A job of a sweep and what its run folder says.

    Attributes:
        plan: of the cluster that was asked for, also where it was rehearsed; None if the job came to none.
        rehearsal: CPU processes ran in place of the plan's devices, and what is measured is theirs.
        step_seconds: by `KINDS`; measured: the median without the first step.
        metrics: the newest value of every column of metrics.csv.
    """

    number: str
    overrides: tuple[str, ...]
    status: str
    reason: str
    run_dir: Path
    plan: Plan | None
    rehearsal: bool
    step_seconds: dict[str, float]
    tokens_per_second: dict[str, float]
    metrics: dict[str, str]

    @property
    def policy(self) -> str:
        if self.plan:
            return self.plan.policy
        asked = [text.split("=", 1)[1] for text in self.overrides if text.startswith("strategy=")]
        return asked[-1] if asked else "hexiseq"

    @property
    def task(self) -> tuple[str, ...]:
        """What was asked for besides the policy: jobs are compared with those of the same task."""
        return tuple(sorted(text for text in self.overrides if not text.startswith("strategy=")))


def write_report(sweep_dir: Path) -> Path:
    """Write ``report.html`` into a sweep's folder.

    Raises:
        ValueError: there is no summary.csv.
    """
    path = sweep_dir / "report.html"
    path.write_text(page(sweep_dir.resolve().name, read_jobs(sweep_dir)), encoding="utf-8")
    return path


def read_jobs(sweep_dir: Path) -> list[Job]:
    """The jobs of a sweep, by number. Raises ValueError where no sweep has been."""
    summary = sweep_dir / "summary.csv"
    if not summary.is_file():
        raise ValueError(
            f"{sweep_dir} has no summary.csv; name the folder of a sweep, such as multirun/DATE/TIME-RECIPE"
        )
    with summary.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and (lacking := COLUMNS - set(rows[0])):
        raise ValueError(f"{summary} lacks {', '.join(sorted(lacking))}; it is no sweep's")
    whole = [row for row in rows if all(row[name] is not None for name in COLUMNS)]  # a killed sweep may leave a part
    return sorted((_job(sweep_dir, row) for row in whole), key=lambda job: (len(job.number), job.number))


def _job(sweep_dir: Path, row: dict[str, str]) -> Job:
    # A sweep that was moved has its jobs beside the table.
    run_dir = next((path for path in (Path(row["run_dir"]), sweep_dir / row["job"]) if path.is_dir()), sweep_dir / "?")
    rehearsal = (run_dir / "plan.target.json").exists()
    plan = _plan(run_dir / ("plan.target.json" if rehearsal else "plan.json"))
    seconds: dict[str, float] = {}
    speed: dict[str, float] = {}
    if plan and plan.predicted:
        seconds["predicted"], speed["predicted"] = plan.predicted.step_seconds, plan.predicted.tokens_per_second
    if (path := run_dir / "simulation.json").exists():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # not what a simulation writes
            simulated = json.loads(path.read_text())
            seconds["simulated"], speed["simulated"] = simulated["step_seconds"], simulated["tokens_per_second"]
    steps = _metrics(run_dir / "metrics.csv")
    for name, found in (("step_seconds", seconds), ("tokens_per_second", speed)):
        values = [value for step in steps if (value := _number(step.get(name)))]
        if values:
            # The first step also allocates and warms up.
            found["measured"] = statistics.median(values[1:] or values)
    newest = {key: value for step in steps for key, value in step.items() if value}
    return Job(row["job"], tuple(row["overrides"].split()), row["status"], row["reason"], run_dir, plan, rehearsal,
               seconds, speed, newest)  # fmt: skip


def _plan(path: Path) -> Plan | None:
    try:
        return Plan.load(path)
    except ValueError:
        return None


def _metrics(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if "status" not in row]  # an unrunnable job's says only so


def speedups(jobs: Sequence[Job], kind: str) -> list[float | None]:
    """How much faster each job is than the best even split of its task that ran; None without one."""
    best: dict[tuple[str, ...], float] = {}
    for job in jobs:
        if job.policy in BASELINES and kind in job.step_seconds:
            best[job.task] = min(best.get(job.task, float("inf")), job.step_seconds[kind])
    return [
        best[job.task] / job.step_seconds[kind] if job.task in best and kind in job.step_seconds else None
        for job in jobs
    ]


def page(name: str, jobs: Sequence[Job]) -> str:
    """The report as HTML text."""
    common = [text for text in jobs[0].overrides if all(text in job.overrides for job in jobs)] if jobs else []
    labels = [" ".join(text for text in job.overrides if text not in common) or f"job {job.number}" for job in jobs]
    ran = sum(job.status == "ok" for job in jobs)
    parts = [
        f"<h1>Sweep {escape(name)}</h1>",
        f"<p>{len(jobs)} jobs, {ran} ran. All with <code>{escape(' '.join(common))}</code></p>" if common
        else f"<p>{len(jobs)} jobs, {ran} ran.</p>",
    ]  # fmt: skip
    if any(job.rehearsal for job in jobs):
        parts.append(f"<p class='alarm'>{_REHEARSALS}</p>")
    if jobs:
        parts += [_chart(jobs, labels, common), _table(jobs, labels), *map(_pictures, jobs, labels)]
    head, tail = _HTML.split("BODY")
    return head.replace("TITLE", escape(f"HexiSeq sweep {name}")) + "\n".join(parts) + tail


def _chart(jobs: Sequence[Job], labels: Sequence[str], common: Sequence[str]) -> str:
    rehearsal = any(job.rehearsal for job in jobs)
    lanes = {}
    for kind in KINDS:
        values = [job.tokens_per_second.get(kind) for job in jobs]
        if any(values):
            title = f"{kind} tokens/s" + (", rehearsal on CPUs" if rehearsal and kind == "measured" else "")
            lanes[title] = values
    comparison = Comparison(
        title="Tokens per second",
        labels=[f"{job.number}  {label}" if len(label) <= 60 else f"{job.number}  {label[:57]}..."
                for job, label in zip(jobs, labels, strict=True)],
        policies=[job.policy for job in jobs],
        lanes=lanes,
        problems=["" if job.tokens_per_second else _status(job) for job in jobs],
        alike=not rehearsal,
    )  # fmt: skip
    return _drawn(lambda: picture.comparison_svg(comparison), "chart")


def _status(job: Job) -> str:
    return STATUS.get(job.status, job.status)


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[str]
    numbers: bool = True


def _table(jobs: Sequence[Job], labels: Sequence[str]) -> str:
    """A row for each job; columns that nobody has anything for are left out."""

    def column(title: str, numbers: Sequence[float | None], form: str) -> _Column:
        return _Column(title, ["" if number is None else form.format(number) for number in numbers])

    columns = [
        _Column("job", [job.number for job in jobs]),
        _Column("overrides", [escape(text) for text in labels], False),
    ]
    columns.append(_Column("policy", [escape(job.policy) for job in jobs], False))
    columns.append(_Column("status", [_status_cell(job) for job in jobs], False))
    for kind in KINDS:
        columns.append(column(f"{kind} step, s", [job.step_seconds.get(kind) for job in jobs], "{:.4g}"))
        columns.append(column(f"{kind} tokens/s", [job.tokens_per_second.get(kind) for job in jobs], "{:,.0f}"))
        columns.append(column(f"{kind} speed-up", speedups(jobs, kind), "{:.3f}x"))
    columns += [
        column("MFU", [_number(job.metrics.get("mfu")) for job in jobs], "{:.1%}"),
        column("balance", [_number(job.metrics.get("balance")) for job in jobs], "{:.3f}"),
        column("above bound", [job.plan.gap if job.plan else None for job in jobs], "{:.1%}"),
        _Column("fullest device", [_memory(job.plan) for job in jobs], False),
    ]
    columns = [shown for shown in columns if any(shown.cells)]

    def tag(shown: _Column) -> str:
        return " class='number'" if shown.numbers else ""

    head = "".join(f"<th{tag(shown)}>{shown.title}</th>" for shown in columns)
    rows = ["".join(f"<td{tag(shown)}>{shown.cells[i]}</td>" for shown in columns) for i in range(len(jobs))]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    note = (
        f"Speed-up: over the best of {', '.join(BASELINES)} with the same other overrides, by the same kind of time. "
        "Measured: medians of all steps but the first. Memory is predicted."
    )
    return f"<div class='wide'><table>\n<tr>{head}</tr>\n{body}\n</table></div>\n<p class='faint'>{note}</p>"


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # empty, or not what a run writes
        return None


def _status_cell(job: Job) -> str:
    if job.status == "ok":
        return "rehearsed" if job.rehearsal else "ok"
    return f"<b class='alarm'>{escape(_status(job))}</b><br/><span class='reason'>{escape(job.reason)}</span>"


def _memory(plan: Plan | None) -> str:
    if plan is None or plan.predicted is None:
        return ""
    pairs = zip(plan.predicted.memory_gb, plan.predicted.memory_limit_gb, itertools.count())
    used, limit, rank = max(pairs, key=lambda pair: pair[0] / pair[1])
    return f"{used:.3g} of {limit:.3g} GB (rank {rank}, {escape(plan.devices[rank].type)})"


def _pictures(job: Job, label: str) -> str:
    """The job's pictures, folded."""
    plan = job.plan
    if plan is None:
        return ""
    drawn = []
    for name in picture.PICTURES:
        path = job.run_dir / name
        if path.exists():
            drawn.append(_drawn(path.read_text, f"job{job.number}{path.stem}"))
        elif name == "plan.svg":
            drawn.append(_drawn(lambda: picture.plan_svg(plan), f"job{job.number}plan"))
    summary = f"job {escape(job.number)}: {escape(label)}"
    return f"<details><summary>{summary}</summary>\n" + "\n".join(drawn) + "\n</details>"


def _drawn(draw: Callable[[], str], prefix: str) -> str:
    """A picture inside the page, its names made its own; a line in its place if it cannot be drawn."""
    try:
        svg = draw()
    except Exception as error:
        return f"<p class='alarm'>not drawn: {escape(f'{type(error).__name__}: {error}')}</p>"
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = svg.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    return f"<figure>{svg}</figure>"


_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<title>TITLE</title>
<style>
body { font: 14px/1.45 "DejaVu Sans", Verdana, Arial, sans-serif; color: #1a1a1a; margin: 2em; }
h1 { font-size: 1.4em; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 0.3em 0.8em; border-bottom: 1px solid #e3e3e3; }
th { font-weight: normal; color: #5f5f5f; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide, figure { overflow-x: auto; }
figure { margin: 1em 0; }
.alarm { color: #b33a00; }
.faint { color: #5f5f5f; }
.reason { display: inline-block; min-width: 18em; max-width: 40em; font-size: 0.85em; }
summary { cursor: pointer; padding: 0.3em 0; }
</style>
</head>
<body>
BODY
</body>
</html>
"""


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("error: name one folder of a sweep: python -m recipes.report SWEEP_DIR", file=sys.stderr)
        return 2
    try:
        print(f"written: {write_report(Path(arguments[0]))}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

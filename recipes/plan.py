"""Solve and show a plan: the table, its rivals, ``plan.json`` and pictures. Starts no process."""

from __future__ import annotations

from pathlib import Path

from hexiseq import picture
from hexiseq.plan import table
from recipes.job import Config, solve_config


def run(config: Config, run_dir: Path) -> None:
    cluster, workload, plan = solve_config(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    plan.save(run_dir / "plan.json")
    picture.draw(run_dir, plan, cluster, workload)
    print(table(plan))
    written = [run_dir / "plan.json", *picture.pictures(run_dir)]
    print(f"solved in {plan.solve_seconds:.2f} s; written: {', '.join(map(str, written))}")

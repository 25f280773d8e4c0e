"""Solve and show a plan: the table, its rivals, ``plan.json`` and ``plan.svg``. Starts no process."""

from __future__ import annotations

from pathlib import Path

from hexiseq import picture
from hexiseq.plan import table
from recipes.job import Config, solve_config


def run(config: Config, run_dir: Path) -> None:
    _, _, plan = solve_config(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    plan.save(run_dir / "plan.json")
    (run_dir / "plan.svg").write_text(picture.plan_svg(plan))
    print(table(plan))
    print(f"solved in {plan.solve_seconds:.2f} s; written: {run_dir / 'plan.json'}, {run_dir / 'plan.svg'}")

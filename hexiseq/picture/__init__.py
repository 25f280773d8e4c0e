"""Pictures of a plan and of one layer, drawn for every run; ``docs/pictures.md`` explains them.

``plan.svg``: who owns which tokens and query heads, per node and device type, how full memory and how busy each device
is. ``timeline.svg``: one layer forward and backward, what every rank computes, exchanges and waits for, predicted and,
after a run, measured. ``timeline.json`` keeps what was predicted until then.

matplotlib is imported when something is drawn, not before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hexiseq.picture.comparison import Comparison
from hexiseq.plan import Plan

if TYPE_CHECKING:
    from hexiseq.cluster import Cluster
    from hexiseq.workload import Workload

PICTURES = ("plan.svg", "timeline.svg")


def draw(run_dir: Path, plan: Plan, cluster: Cluster, workload: Workload, *, rehearsal: bool = False) -> None:
    """Write a plan's pictures into a run folder. What goes wrong is a line on stderr; nothing is raised.

    Args:
        rehearsal: CPU processes stand in for the plan's devices, and the picture says so.
    """

    def plan_picture() -> None:
        from hexiseq.picture.rows import busy_seconds

        assert plan.predicted is not None
        busy = (busy_seconds(plan, cluster, workload) / plan.predicted.step_seconds).tolist()
        note = "rehearsed by CPU processes on this machine: all figures are predictions for the devices named"
        text = plan_svg(plan, model=workload.model.name, busy=busy, note=note if rehearsal else "")
        (run_dir / "plan.svg").write_text(text)

    def timeline_picture() -> None:
        from hexiseq.picture.layers import timeline_page
        from hexiseq.picture.timeline import predicted

        timeline = predicted(plan, cluster, workload)
        timeline.save(run_dir / "timeline.json")
        (run_dir / "timeline.svg").write_text(timeline_page([timeline]).svg())

    _attempt("plan.svg", plan_picture)
    _attempt("timeline.svg", timeline_picture)


def draw_measured(run_dir: Path) -> None:
    """Draw ``timeline.svg`` again with what the run measured, if it did: ``step_split.json``. Raises nothing, too."""

    def timeline_picture() -> None:
        from hexiseq.picture.layers import timeline_page
        from hexiseq.picture.timeline import Timeline, measured

        split, expected = run_dir / "step_split.json", run_dir / "timeline.json"
        if not split.exists():
            return
        found = measured(json.loads(split.read_text()), rehearsal=(run_dir / "plan.target.json").exists())
        timelines = [Timeline.load(expected)] if expected.exists() else []
        if found.lanes:
            (run_dir / "timeline.svg").write_text(timeline_page([*timelines, found]).svg())

    _attempt("timeline.svg", timeline_picture)


def pictures(run_dir: Path) -> list[Path]:
    """The pictures there are in a run folder, for a logger to take along."""
    return [run_dir / name for name in PICTURES if (run_dir / name).exists()]


def plan_svg(plan: Plan, *, model: str = "", busy: Sequence[float] | None = None, note: str = "") -> str:
    """The plan as SVG text, the same for the same plan; see `plans.plan_page`."""
    from hexiseq.picture.plans import plan_page

    return plan_page(plan, model=model, busy=busy, note=note).svg()


def comparison_svg(comparison: Comparison) -> str:
    """Jobs of a sweep side by side as SVG text; see `bars.comparison_page`."""
    from hexiseq.picture.bars import comparison_page

    return comparison_page(comparison).svg()


def _attempt(name: str, picture: Callable[[], None]) -> None:
    """A run must not fail for want of a picture."""
    try:
        picture()
    except Exception as error:
        reason = " ".join(str(error).split())
        print(f"warning: {name} was not drawn: {type(error).__name__}: {reason}", file=sys.stderr, flush=True)

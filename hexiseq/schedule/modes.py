"""What a job keeps for backward is a choice, too: the plan of the mode that suits it best, and the rivals' best."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hexiseq.cluster import Cluster
from hexiseq.cost import OutOfMemory
from hexiseq.plan import RECOMPUTE_MODES, Gain, Plan, Rival
from hexiseq.schedule.even import IllegalPolicy
from hexiseq.schedule.solve import solve
from hexiseq.workload import Workload


def modes(workload: Workload, recompute: str | None, keep_parameters: bool | None) -> list[Workload]:
    """The job in every mode that is left open, None; those that compute least first."""
    return [
        dataclasses.replace(workload, recompute=mode, keep_parameters=keep)
        for mode in ([recompute] if recompute is not None else RECOMPUTE_MODES)
        for keep in ([keep_parameters] if keep_parameters is not None else (False, True))
    ]


def solve_modes(
    cluster: Cluster, workloads: Sequence[Workload], policy: str = "hexiseq", **options: Any
) -> tuple[Plan, Workload]:
    """The fastest plan of a policy over these modes of one job, and its mode. Options are those of `solve`.

    Of modes equally fast the first is taken. A rival's row is that of its own best mode, and the first of the plan's
    gains, ``modes``, what the even policies lose by having the plan's mode and not their own.

    Raises:
        OutOfMemory, IllegalPolicy: no mode has a plan; the error is that of the mode that lacks least memory.
    """
    found: list[tuple[Plan, Workload]] = []
    errors: list[ValueError] = []
    for workload in workloads:
        try:
            found.append((solve(cluster, workload, policy, **options), workload))
        except (OutOfMemory, IllegalPolicy) as error:
            errors.append(error)
    if not found:
        lacking = [error for error in errors if isinstance(error, OutOfMemory)]
        raise min(lacking, key=lambda error: error.lacking_gb) if lacking else errors[0]
    plan, workload = min(found, key=lambda item: _seconds(item[0]))
    rows = tuple(_best_row([other.rivals[i] for other, _ in found]) for i in range(len(plan.rivals)))
    gains = plan.gains
    before = next((row.step_seconds for row in plan.rivals if row.name == "even"), None)
    after = next((row.step_seconds for row in rows if row.name == "even"), None)
    if gains and before and after and len(workloads) > 1:
        gains = (Gain("modes", after / before), *gains)
    spent = sum(other.solve_seconds or 0.0 for other, _ in found)
    return plan.annotated(rivals=rows, gains=gains, solve_seconds=spent), workload


def _best_row(rows: Sequence[Rival]) -> Rival:
    """A rival in the mode that suits it best."""
    running = [row for row in rows if row.step_seconds is not None]
    return min(running, key=lambda row: row.step_seconds or 0.0) if running else rows[-1]


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds

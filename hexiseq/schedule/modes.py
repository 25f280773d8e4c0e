"""What a job keeps for backward, and where, is a choice, too: the plan of the best mode, and the rivals' best."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from hexiseq.cluster import Cluster
from hexiseq.cost import OutOfMemory, lower_bound
from hexiseq.plan import RECOMPUTE_MODES, Gain, Plan, Rival
from hexiseq.schedule.even import IllegalPolicy
from hexiseq.schedule.solve import check_job, even_rivals, solve
from hexiseq.workload import Workload

NEARLY_FULL = 0.9  # of what a plan may fill of a device, from which its mode is tried with offload, too


def modes(
    workload: Workload, recompute: str | None, keep_parameters: bool | None, offload: bool | None = False
) -> list[Workload]:
    """The job in every mode that is left open, None; those that compute least first, of these those that copy least."""
    return [
        dataclasses.replace(workload, recompute=mode, keep_parameters=keep, offload=moved)
        for mode in ([recompute] if recompute is not None else RECOMPUTE_MODES)
        for moved in ([offload] if offload is not None else (False, True))
        for keep in ([keep_parameters] if keep_parameters is not None else (False, True))
        if mode != "none" or not moved or (recompute and offload)  # which is refused
    ]


def solve_modes(
    cluster: Cluster, workloads: Sequence[Workload], policy: str = "hexiseq", **options: Any
) -> tuple[Plan, Workload]:
    """The fastest plan of a policy over these modes of one job, and its mode. Options are those of `solve`.

    Of modes equally fast the first is taken. A rival's row is that of its own best mode, and the first of the plan's
    gains, ``modes``, what the even policies lose by having the plan's mode and not their own. Offload makes nothing
    faster but by the memory it frees: where the same mode comes without it, too, it is left out unless memory binds
    there, for the policy or a rival. A mode whose lower bound is not below the best plan so far is for rivals alone.

    Raises:
        OutOfMemory, IllegalPolicy: no mode has a plan; the error is that of the mode that lacks least memory.
    """
    start = time.perf_counter()
    rivals = options.get("rivals", True)
    for_rivals = {name: options[name] for name in ("slot", "exchange", "time_limit_seconds") if name in options}
    best: tuple[Plan, Workload] | None = None
    rows: list[tuple[Rival, ...]] = []
    errors: list[ValueError] = []
    roomy: set[Workload] = set()  # modes in which more memory would make nobody faster
    for workload in workloads:
        if workload.offload and dataclasses.replace(workload, offload=False) in roomy:
            continue
        hopeless = policy == "hexiseq" and best is not None and lower_bound(cluster, workload) >= _seconds(best[0])
        if hopeless and not rivals:
            check_job(cluster, workload)
            continue
        try:
            if hopeless:
                assert best is not None
                # How full ours would be is not known, so that rivals may have the mode with offload, too.
                found, full = (*even_rivals(cluster, workload, **for_rivals), best[0].rivals[-1]), True
            else:
                plan = solve(cluster, workload, policy, **options)
                found, full = plan.rivals, _nearly_full(plan)
                if best is None or _seconds(plan) < _seconds(best[0]):
                    best = plan, workload
        except (OutOfMemory, IllegalPolicy) as error:
            errors.append(error)
            continue
        rows.append(found)
        if not full and all(row.status != "out_of_memory" for row in found):
            roomy.add(workload)
    if best is None:
        lacking = [error for error in errors if isinstance(error, OutOfMemory)]
        raise min(lacking, key=lambda error: error.shortage.lacking_gb) if lacking else errors[0]
    plan, workload = best
    of_all = tuple(map(_best_row, zip(*rows, strict=True)))
    gains = plan.gains
    before = next((row.step_seconds for row in plan.rivals if row.name == "even"), None)
    after = next((row.step_seconds for row in of_all if row.name == "even"), None)
    if gains and before and after and len(workloads) > 1:
        gains = (Gain("modes", after / before), *gains)
    return plan.annotated(rivals=of_all, gains=gains, solve_seconds=time.perf_counter() - start), workload


def _nearly_full(plan: Plan) -> bool:
    """Whether a device is, so that more memory might make the plan faster."""
    assert plan.predicted is not None
    used = zip(plan.predicted.memory_gb, plan.predicted.memory_limit_gb, strict=True)
    return any(u > NEARLY_FULL * m for u, m in used)


def _best_row(rows: Sequence[Rival]) -> Rival:
    """A rival in the mode that suits it best."""
    running = [row for row in rows if row.step_seconds is not None]
    return min(running, key=lambda row: row.step_seconds or 0.0) if running else rows[-1]


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds

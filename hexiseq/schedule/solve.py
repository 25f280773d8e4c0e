"""`solve`: a policy's plan for a cluster and a workload, with its prediction, certificate and rivals."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from hexiseq import cost
from hexiseq.cluster import Cluster, Place
from hexiseq.cost import OutOfMemory
from hexiseq.plan import EXCHANGES, POLICIES, ExcludedDevice, Plan, Rival
from hexiseq.schedule.even import IllegalPolicy, even_grid, exchanges, legal_widths
from hexiseq.schedule.search import Search
from hexiseq.workload import Workload


def solve(
    cluster: Cluster,
    workload: Workload,
    policy: str = "hexiseq",
    *,
    manual: Plan | None = None,
    drop_devices: bool = True,
    rivals: bool = True,
    slot: int | None = None,
    exchange: str | None = None,
) -> Plan:
    """Make a plan.

    Args:
        policy: ``hexiseq``; ``ring``, even tokens in groups of one; ``ulysses``, one group of all, even heads; ``usp``,
            the best even grid of the two; ``manual``, the given plan, checked against cluster and workload.
        manual: the plan of policy ``manual``.
        drop_devices: whether ``hexiseq`` may leave out devices that make the step slower.
        rivals: whether to predict the other policies too, for the plan's rival rows.
        slot: ring transfer unit in tokens; chosen when None.
        exchange: how KV crosses groups, one of `EXCHANGES`; None or ``auto``: of every plan considered in the end,
            rivals included, whichever is predicted to be faster and fits; a manual plan keeps its own.

    Returns:
        The plan with `predicted`, `bound`, `gap`, `solve_seconds` and `rivals`. The same inputs give the same plan, bit
        for bit, except `solve_seconds`.

    Raises:
        IllegalPolicy: the policy cannot split this job over these devices.
        OutOfMemory: no split of the policy fits; names the worst device, what it lacks and what would fit.
        ValueError: an unknown policy, a device that cannot run the dtype, a manual plan for another job.
    """
    start = time.perf_counter()
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
    if (policy == "manual") != (manual is not None):
        raise ValueError("policy manual and a plan go together: give strategy=manual strategy.plan=FILE")
    most = workload.seq_len // 2 * 2
    if slot is not None and not (isinstance(slot, int) and not isinstance(slot, bool) and 2 <= slot <= most
                                 and slot % 2 == 0):  # fmt: skip
        raise ValueError(f"strategy.slot must be an even number of tokens from 2 to seq_len, here {most}, or null, "
                         f"got {slot!r}")  # fmt: skip
    if exchange not in (None, "auto", *EXCHANGES):
        raise ValueError(f"strategy.exchange {exchange!r} is not one of auto, {', '.join(EXCHANGES)}")
    exchange = None if exchange == "auto" else exchange
    if manual is not None and exchange not in (None, manual.exchange):
        raise ValueError(f"strategy.exchange is {exchange}, the manual plan's exchange {manual.exchange}; "
                         "set strategy.exchange=auto, or change the plan")  # fmt: skip
    _check_dtype(cluster, workload)
    plans: dict[str, Plan | ValueError] = {}

    def made(name: str) -> Plan | ValueError:
        if name not in plans:
            try:
                plans[name] = _make(name, cluster, workload, manual, drop_devices, slot, exchange)
            except (IllegalPolicy, OutOfMemory) as error:
                plans[name] = error
        return plans[name]

    chosen = made(policy)
    if isinstance(chosen, OutOfMemory) and policy != "manual":
        raise _explain(chosen, cluster, workload, policy, drop_devices, slot, exchange)
    if isinstance(chosen, ValueError):
        raise chosen
    rows: tuple[Rival, ...] = ()
    if rivals:
        rows = tuple(_row(name, made(name)) for name in ("fast_only", "even", "ring", "ulysses", "usp", "hexiseq"))
    assert chosen.predicted is not None
    bound = cost.bound(cluster, workload)
    return dataclasses.replace(
        chosen,
        policy=policy,
        bound=bound,
        gap=chosen.predicted.step_seconds / bound.step_seconds - 1,
        rivals=rows,
        solve_seconds=time.perf_counter() - start,
    )


def _make(
    name: str,
    cluster: Cluster,
    workload: Workload,
    manual: Plan | None,
    drop_devices: bool,
    slot: int | None,
    exchange: str | None,
) -> Plan:
    places = cluster.places
    if name == "manual":
        assert manual is not None
        cost.check_workload(manual, workload)
        return _checked(manual, cluster, workload, cost.match_places(manual, cluster), manual.exchange)
    if name == "hexiseq":
        return _hexiseq(cluster, workload, drop_devices, slot, exchange)
    if name == "fast_only":
        fastest = max(cluster.devices, key=lambda d: (d.attention_forward_tflops, d.gemm_tflops))
        kept = [place for place in places if place.device == fastest]
        if len(kept) == len(places):
            raise IllegalPolicy(f"policy fast_only: all devices are {fastest.type}")
        return _best_even(name, cluster, workload, kept, slot, exchange)
    if name in ("usp", "even"):
        return _best_even(name, cluster, workload, places, slot, exchange)
    width = 1 if name == "ring" else len(places)
    return _checked(even_grid(name, workload, places, width, slot), cluster, workload, places, exchange)


def _best_even(
    name: str, cluster: Cluster, workload: Workload, places: Sequence[Place], slot: int | None, exchange: str | None
) -> Plan:
    """The fastest even grid that fits memory."""
    widths = legal_widths(workload, len(places))
    if not widths:
        raise IllegalPolicy(
            f"policy {name} on {len(places)} ranks: {workload.seq_len} tokens and {workload.model.heads} query / "
            f"{workload.model.kv_heads} KV heads divide over no even grid; use policy hexiseq or a longer sequence"
        )
    best: Plan | None = None
    lacks: OutOfMemory | None = None
    for width in widths:
        try:
            # Policy names in messages, not in plans: `Plan.policy` knows no rivals.
            plan = even_grid("usp", workload, places, width, slot)
            plan = _checked(plan, cluster, workload, places, exchange)
        except OutOfMemory as error:
            if lacks is None or error.lacking_gb < lacks.lacking_gb:
                lacks = error
            continue
        if best is None or _seconds(plan) < _seconds(best):
            best = plan
    if best is None:
        assert lacks is not None
        raise lacks
    return best


def _hexiseq(cluster: Cluster, workload: Workload, drop_devices: bool, slot: int | None, exchange: str | None) -> Plan:
    everywhere = Search(cluster, cluster.places, workload, slot, exchange)
    best, kept = everywhere.run(), cluster.places
    full = best
    if drop_devices:
        for places in _subsets(cluster):
            floor = cost.devices_bound([place.device for place in places], workload)
            if best is not None and floor >= _seconds(best):
                continue
            part = Search(cluster, places, workload, slot, exchange)
            plan = part.run(refine=False)
            if plan is not None and (best is None or _seconds(plan) < 1.05 * _seconds(best)):
                plan = part.run()  # rounding alone is within a few percent
            if plan is not None and (best is None or _seconds(plan) < _seconds(best)):
                best, kept = plan, tuple(places)
    if best is None:
        if everywhere.misfit is None:
            raise IllegalPolicy(
                f"policy hexiseq: {workload.seq_len} tokens are too few for {len(cluster.places)} devices; use a "
                "longer sequence or fewer devices"
            )
        cost.check_memory(everywhere.misfit, cluster, workload, cluster.places)
        raise AssertionError("a plan that does not fit passed the memory check")
    inside = {place.index for place in kept}
    why = "the job does not fit memory with it" if full is None else (
        f"the step is slower with it: {_seconds(full):.4g} s against {_seconds(best):.4g} s"
    )  # fmt: skip
    excluded = tuple(
        ExcludedDevice(place.device.type, place.node_name, why) for place in cluster.places if place.index not in inside
    )
    return dataclasses.replace(best, policy="hexiseq", excluded=excluded)


def _subsets(cluster: Cluster) -> list[list[Place]]:
    """Parts of the cluster worth a try: only the fastest types, and all but one type, node class or node."""
    by_speed = sorted(cluster.devices, key=lambda d: -d.attention_forward_tflops)
    keep = [set(by_speed[:n]) for n in range(1, len(by_speed))]
    keep += [set(by_speed) - {device} for device in by_speed]
    found = [[place for place in cluster.places if place.device in kept] for kept in keep]
    found += [[place for place in cluster.places if place.node_class is not node] for node in cluster.nodes]
    unique = {tuple(place.index for place in places): places for places in found}
    return [places for indices, places in unique.items() if 0 < len(indices) < len(cluster.places)]


def _checked(plan: Plan, cluster: Cluster, workload: Workload, places: Sequence[Place], exchange: str | None) -> Plan:
    """The plan with its prediction, by the faster exchange that fits where that is open. Raises OutOfMemory."""
    found, lacks = [], []
    for candidate in exchanges(plan, exchange):
        try:
            cost.check_memory(candidate, cluster, workload, places)
        except OutOfMemory as error:
            lacks.append(error)
            continue
        predicted = cost.predict(candidate, cluster, workload, places)
        found.append(dataclasses.replace(candidate, predicted=predicted))
    if not found:
        raise min(lacks, key=lambda error: error.lacking_gb)
    return min(found, key=_seconds)


def _explain(
    error: OutOfMemory,
    cluster: Cluster,
    workload: Workload,
    policy: str,
    drop_devices: bool,
    slot: int | None,
    exchange: str | None,
) -> OutOfMemory:
    """The error with the largest length this policy fits on the cluster, whatever length was asked for."""
    fits, full_fits = _longest(cluster, workload, policy, drop_devices, slot, exchange), 0
    if fits < 2 and workload.recompute != "full":
        full = dataclasses.replace(workload, recompute="full")
        full_fits = _longest(cluster, full, policy, drop_devices, slot, exchange)
    return OutOfMemory(error.problem, workload.recompute, fits, error.rank, error.lacking_gb, full_fits)


def _longest(
    cluster: Cluster, workload: Workload, policy: str, drop_devices: bool, slot: int | None, exchange: str | None
) -> int:
    """Largest length of a fixed grid, a hundredth fine, that fits; 0 when none does."""
    parts: list[Sequence[Place]] = [cluster.places]
    if policy == "hexiseq" and drop_devices:
        parts += _subsets(cluster)
    limits = [(cost.longest_length(workload, places), places) for places in parts]

    def length(index: int) -> int:
        octave, step = divmod(index, 128)
        found = (128 + step << octave) >> 7
        return found // slot * slot if slot else found if found < 128 else found // 2 * 2

    def fits(index: int) -> bool:
        tokens = length(index)
        if tokens < 2:
            return False
        shorter = dataclasses.replace(workload, seq_len=tokens)
        for limit, places in limits:
            if tokens > limit:
                continue
            try:
                if policy != "hexiseq":
                    _make(policy, cluster, shorter, None, False, slot, exchange)
                elif Search(cluster, places, shorter, slot, exchange).run(refine=False) is None:
                    continue
            except ValueError:
                continue
            return True
        return False

    high = 0  # the first index that is too long
    most = min(workload.seq_len, max(limit for limit, _ in limits))
    while length(high) <= most and high < 128 * 64:
        high += 128
    high = next((index for index in range(max(0, high - 128), high + 1) if length(index) > most), high)
    low, stride = high - 4, 4
    while low >= 0 and length(low) >= 2 and not fits(low):
        high, stride = low, 2 * stride
        low -= stride
    if low < 0 or length(low) < 2:
        low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return length(low) if low and length(low) >= 2 else 0


def _row(name: str, found: Plan | ValueError) -> Rival:
    if isinstance(found, Plan):
        assert found.predicted is not None
        return Rival(name, "ok", found.predicted.step_seconds, found.predicted.tokens_per_second)
    return Rival(name, "out_of_memory" if isinstance(found, OutOfMemory) else "illegal", reason=str(found))


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def _check_dtype(cluster: Cluster, workload: Workload) -> None:
    for place in cluster.places:
        if workload.dtype not in place.device.dtypes:
            common = [d for d in place.device.dtypes if all(d in other.dtypes for other in cluster.devices)]
            raise ValueError(
                f"{place.device.type} on node {place.node_name} cannot run {workload.dtype}; one dtype serves the "
                f"whole job: use {' or '.join(common) if common else 'devices with a dtype in common'}, or leave it out"
            )

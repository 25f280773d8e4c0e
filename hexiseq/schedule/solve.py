"""`solve`: a policy's plan for a cluster and a workload, with its prediction, certificate and rivals."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hexiseq import cost
from hexiseq.cluster import Cluster, Place
from hexiseq.cost import Kind, Layout, OutOfMemory
from hexiseq.plan import EXCHANGES, POLICIES, ExcludedDevice, Gain, Plan, Rival
from hexiseq.schedule.drafts import Draft, written
from hexiseq.schedule.estimate import Alike, Job, even_estimate, kind_of
from hexiseq.schedule.even import (
    CONTEXT_FIRST,
    HEAD_FIRST,
    IllegalPolicy,
    even_grid,
    exchanges,
    legal_widths,
)
from hexiseq.schedule.polish import polish
from hexiseq.schedule.replicas import divisions, replica_numbers
from hexiseq.schedule.search import Options, Search
from hexiseq.workload import Workload

EVEN_POLICIES = ("fast_only", "even", "ring", "ulysses", "usp", "loongtrain")
EVEN_GRIDS = ("ring", "ulysses", "usp", "loongtrain", "even")  # the narrowest first: errors name it
TIME_LIMIT_SECONDS = 2.0
CONTAINED = {"usp": ("ring", "ulysses"), "loongtrain": ("usp",), "even": ("loongtrain",)}
EXPLAIN_SECONDS = 5.0  # spent on the longest sequence that would fit; what is known by then is true, if not the longest
FEW_DEVICES = 6  # so few that every part of a cluster is looked at
JUDGED_GRIDS = 6  # even grids of a policy that are judged in full
ESTIMATE_SLACK = 1.15  # estimates of even grids are nearer than that
REFINED_DIVISIONS = 2  # divisions into replicas that are searched in full; others by estimate


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
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> Plan:
    """Make a plan.

    Args:
        policy: ``hexiseq``; ``ring``, even tokens in groups of one; ``ulysses``, one group of all, even heads; ``usp``,
            the best even grid of the two with groups of neighbours; ``loongtrain``, the best even grid with neighbours
            in a group or next to one another on the ring; ``even``, the best of all these; ``fast_only``, the same on
            the fastest type of device alone; ``manual``, the given plan, checked against cluster and workload.
        manual: the plan of policy ``manual``.
        drop_devices: whether ``hexiseq`` may leave out devices that make the step slower.
        rivals: whether to predict the other policies too, for the plan's rival rows.
        slot: ring transfer unit in tokens; chosen when None.
        exchange: how KV crosses groups, one of `EXCHANGES`; None or ``auto``: of every plan considered in the end,
            rivals included, whichever is predicted to be faster and fits; a manual plan keeps its own.
        time_limit_seconds: of processor time, after which ``hexiseq`` takes the best plan it has. Within it the same
            inputs give the same plan, bit for bit.

    Returns:
        The plan with `predicted`, `bound`, `gap`, `solve_seconds` and `rivals`. Where the workload has several
        sequences the policy chooses the replicas, too: even ones have equally many devices and sequences.

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
    options = _options(workload, slot, exchange, time_limit_seconds)
    if manual is not None and options.exchange not in (None, manual.exchange):
        raise ValueError(f"strategy.exchange is {exchange}, the manual plan's exchange {manual.exchange}; "
                         "set strategy.exchange=auto, or change the plan")  # fmt: skip
    if manual is not None and slot not in (None, manual.slot):
        raise ValueError(f"strategy.slot is {slot}, the manual plan's slot {manual.slot}; set strategy.slot=null, or "
                         "change the plan")  # fmt: skip
    check_job(cluster, workload)
    everyone = Job(cluster, cluster.places, workload)
    found: dict[str, Draft | ValueError] = {}
    if rivals or policy != "manual":
        found = even_policies(everyone, options)
    if policy == "manual":
        assert manual is not None
        chosen = _manual(manual, cluster, workload)
    elif policy == "hexiseq":
        chosen = _hexiseq(everyone, drop_devices, options, found)
    else:
        made = found[policy]
        if isinstance(made, OutOfMemory):
            raise _explain(made, cluster, workload, policy, drop_devices, options)
        if isinstance(made, ValueError):
            raise made
        chosen = _written(made, policy, cluster, "the policy takes the fastest type alone")
    rows: tuple[Rival, ...] = ()
    if rivals:
        own: Plan | ValueError = chosen
        if policy != "hexiseq":
            try:
                own = _hexiseq(everyone, drop_devices, options, found)
            except (IllegalPolicy, OutOfMemory) as error:
                own = error
        rows = (*_even_rows(found), _row("hexiseq", own))
    assert chosen.predicted is not None
    bound = cost.bound(cluster, workload)
    return chosen.annotated(
        policy=policy,
        bound=bound,
        gap=chosen.predicted.step_seconds / bound.step_seconds - 1,
        rivals=rows,
        solve_seconds=time.perf_counter() - start,
    )


def even_rivals(
    cluster: Cluster,
    workload: Workload,
    *,
    slot: int | None = None,
    exchange: str | None = None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> tuple[Rival, ...]:
    """The rows of the even policies alone, as `solve` has them before that of ``hexiseq``.

    Raises:
        ValueError: as `solve`.
    """
    options = _options(workload, slot, exchange, time_limit_seconds)
    check_job(cluster, workload)
    return _even_rows(even_policies(Job(cluster, cluster.places, workload), options))


def _options(workload: Workload, slot: int | None, exchange: str | None, time_limit_seconds: float) -> Options:
    """What a user left open, if it is as it must be."""
    most = workload.seq_len // 2 * 2
    if slot is not None and not (isinstance(slot, int) and not isinstance(slot, bool) and 2 <= slot <= most
                                 and slot % 2 == 0):  # fmt: skip
        raise ValueError(f"strategy.slot must be an even number of tokens from 2 to seq_len, here {most}, or null, "
                         f"got {slot!r}")  # fmt: skip
    if exchange not in (None, "auto", *EXCHANGES):
        raise ValueError(f"strategy.exchange {exchange!r} is not one of auto, {', '.join(EXCHANGES)}")
    if (not isinstance(time_limit_seconds, (int, float)) or isinstance(time_limit_seconds, bool)
            or not 0 < time_limit_seconds < math.inf):  # fmt: skip
        raise ValueError(f"strategy.time_limit_seconds must be a positive number, got {time_limit_seconds!r}")
    return Options(slot, None if exchange == "auto" else exchange, time.thread_time() + time_limit_seconds)


def check_job(cluster: Cluster, workload: Workload) -> None:
    """Raise ValueError where the cluster's devices or hosts cannot run the workload, whatever the plan."""
    _check_dtype(cluster, workload)
    cost.check_offload(workload, cluster.places)


def _manual(plan: Plan, cluster: Cluster, workload: Workload) -> Plan:
    cost.check_workload(plan, workload)
    places = cost.match_places(plan, cluster)
    cost.check_memory(plan, cluster, workload, places, manual=True)
    return plan.annotated(predicted=cost.predict(plan, cluster, workload, places))


# Even policies -------------------------------------------------------------------------------------------------


def even_policies(everyone: Job, options: Options) -> dict[str, Draft | ValueError]:
    """What each of `EVEN_POLICIES` makes of the job: the fastest of its grids that fits, or why there is none."""
    fastest = max(everyone.devices, key=lambda d: (d.attention_forward_tflops, d.gemm_tflops))
    fast = np.flatnonzero(np.array([device == fastest for device in everyone.devices])[everyone.device])
    found = _even_grids(everyone, EVEN_GRIDS, options)
    if len(fast) == len(everyone.places):
        found["fast_only"] = IllegalPolicy(f"policy fast_only: all devices are {fastest.type}")
    else:
        found["fast_only"] = _even_grids(everyone.part(fast), ("even",), options)["even"]
    return {name: found[name] for name in EVEN_POLICIES}


def _even_grids(job: Job, names: Sequence[str], options: Options) -> dict[str, Draft | ValueError]:
    """The fastest even grid of each policy over equal replicas: the best by estimate, judged in full."""
    grids: list[tuple[float, int, tuple[Alike, ...], int, str]] = []
    for division in _even_divisions(job):
        for width, placement in _grids(division[0].ranks.shape[1], job.workload):
            seconds = max(even_estimate(job, alike, width, placement == HEAD_FIRST) for alike in division)
            grids.append((seconds, len(grids), division, width, placement))
    grids.sort(key=lambda item: item[:2])
    smallest = float(job.capacity.min())
    made: dict[int, list[Draft] | IllegalPolicy] = {}
    found: dict[str, Draft | ValueError] = {}
    for name in names:
        # A policy has the grids of narrower ones, too.
        narrower = [found[other] for other in CONTAINED.get(name, ()) if other in found]
        best = min((one for one in narrower if isinstance(one, Draft)), key=lambda one: one.seconds, default=None)
        closest: Draft | None = None
        reason: IllegalPolicy | None = None
        tried = 0
        for seconds, index, division, width, placement in grids:
            if not _belongs(name, width, placement, division[0].ranks.shape[1]):
                continue
            if best is not None and (
                tried >= JUDGED_GRIDS or seconds > best.seconds * ESTIMATE_SLACK or options.late()
            ):
                break
            # Without a head more than the tokens fit: no need to look closer, except to say what is lacking.
            hopeless = job.workload.seq_len * division[0].sequences > division[0].ranks.shape[1] * smallest
            if hopeless and (closest is not None or best is not None):
                continue
            if index not in made:
                made[index] = _judged(job, division, name, width, placement, options)
            drafts = made[index]
            if isinstance(drafts, IllegalPolicy):
                reason = reason or drafts
                continue
            tried += 1
            for one in drafts:
                if best is not None and one.seconds_below(best.seconds) >= best.seconds:
                    continue
                if one.lacking_gb <= 0:
                    best = one
                elif closest is None or one.lacking_gb < closest.lacking_gb:
                    closest = one
        if best is not None:
            found[name] = best
        elif closest is not None:
            found[name] = _out_of_memory(closest)
        else:
            found[name] = reason if reason is not None and name in ("ring", "ulysses") else _no_grid(name, job)
    return found


def _judged(
    job: Job, division: tuple[Alike, ...], name: str, width: int, placement: str, options: Options
) -> list[Draft] | IllegalPolicy:
    """An even grid over these replicas by each exchange, or why there is none."""
    first = division[0]
    one = dataclasses.replace(job.workload, sequences=first.sequences)
    try:
        grid = even_grid(name, one, first.ranks.shape[1], width, options.slot, placement)
    except IllegalPolicy as error:
        return error
    kinds = [[kind_of(layout, alike.ranks) for alike in division] for layout in exchanges(grid, options.exchange)]
    return [Draft(job, tuple(one)) for one in kinds]


def _even_divisions(job: Job) -> Iterator[tuple[Alike, ...]]:
    """Equally many ranks and sequences for every replica: neighbours together, or dealt over all replicas in turn."""
    ranks, sequences = len(job.places), job.workload.sequences
    for number in replica_numbers(ranks, sequences, even=True):
        everyone = np.arange(ranks)
        layouts = [everyone.reshape(number, -1), everyone.reshape(-1, number).T] if number > 1 else [everyone[None]]
        for rows in layouts:
            kinds: dict[object, list[np.ndarray]] = {}
            for row, signature in zip(rows, job.wires.signatures(rows), strict=True):
                kinds.setdefault(signature, []).append(row)
            yield tuple(Alike(np.array(alike), sequences // number) for alike in kinds.values())


def _grids(ranks: int, workload: Workload) -> list[tuple[int, str]]:
    """Group sizes and placements of even grids, the illegal ones of `ring` and `ulysses` included."""
    legal = legal_widths(workload, ranks)
    found = [(width, HEAD_FIRST) for width in sorted({1, *legal, ranks})]
    return found + [(width, CONTEXT_FIRST) for width in legal if 1 < width < ranks]


def _belongs(name: str, width: int, placement: str, ranks: int) -> bool:
    """Whether a grid is one of a policy's."""
    if name == "ring":
        return width == 1
    if name == "ulysses":
        return width == ranks
    return name != "usp" or placement == HEAD_FIRST


def _no_grid(name: str, job: Job) -> IllegalPolicy:
    model = job.workload.model
    return IllegalPolicy(
        f"policy {name} on {len(job.places)} ranks: {job.workload.seq_len} tokens and {model.heads} query / "
        f"{model.kv_heads} KV heads divide over no even grid; use policy hexiseq or a longer sequence"
    )


# The uneven policy ---------------------------------------------------------------------------------------------


def _hexiseq(everyone: Job, drop_devices: bool, options: Options, even: Mapping[str, Draft | ValueError]) -> Plan:
    """The fastest plan, of all devices or a part of them; never slower than the even ones."""
    cluster, workload = everyone.cluster, everyone.workload
    best, misfit = _search(everyone, options, refine=True)
    seed, fast = even["even"], even["fast_only"]
    steps = [seed, *_by_speed(seed, options)] if isinstance(seed, Draft) else []
    for step in steps:
        if best is None or step.seconds < best.seconds:
            best = step
    full = best
    if drop_devices and isinstance(fast, Draft) and (best is None or fast.seconds < best.seconds):
        best = fast
    parts = _subsets(everyone) if drop_devices else []
    floors = [_part_floor(everyone, ranks) for ranks in parts]
    for floor, ranks in sorted(zip(floors, parts, strict=True), key=lambda item: item[0]):
        if best is not None and (floor >= best.seconds or options.late()):
            break
        job = everyone.part(ranks)
        part, _ = _search(job, options, refine=False)
        if part is not None and (best is None or part.seconds < 1.05 * best.seconds):
            part, _ = _search(job, options, refine=True)  # rounding alone is within a few percent
        if part is not None and (best is None or part.seconds < best.seconds):
            best = part
    if best is not None:
        polished = _polished(best, options)
        best, full = polished, polished if full is best else full
    if best is None:
        if misfit is None and isinstance(seed, OutOfMemory):
            raise _explain(seed, cluster, workload, "hexiseq", drop_devices, options)
        if misfit is None:
            raise IllegalPolicy(
                f"policy hexiseq: {workload.seq_len} tokens are too few for {len(cluster.places)} devices; use a "
                "longer sequence or fewer devices"
            )
        raise _explain(_out_of_memory(misfit), cluster, workload, "hexiseq", drop_devices, options)
    why = "the job does not fit memory with it" if full is None else (
        f"the step is slower with it: {full.seconds:.4g} s against {best.seconds:.4g} s"
    )  # fmt: skip
    plan = _written(best, "hexiseq", cluster, why)
    if steps and full is not None:
        # What is no better is not taken.
        seconds = list(itertools.accumulate([*(step.seconds for step in steps), full.seconds, best.seconds], min))
        sources = zip(("tokens", "heads", "grouping", "devices"), itertools.pairwise(seconds), strict=True)
        gains = tuple(Gain(source, before / after) for source, (before, after) in sources)
        plan = plan.annotated(gains=gains)
    return plan


def _polished(found: Draft, options: Options) -> Draft:
    """The draft after small changes, where all its replicas are alike."""
    if len(found.kinds) > 1:
        return found
    (kind,) = found.kinds
    # Ranks in their order in the job: what a gather copies hangs on it.
    place = np.argsort(np.argsort(kind.ranks[0]))
    ranks = np.empty_like(kind.ranks)
    ranks[:, place] = kind.ranks
    search = Search(found.job, Alike(ranks, kind.layout.sequences), options)
    return Draft(found.job, (search.kind(polish(search, kind.layout.renamed(place))),))


def _part_floor(job: Job, ranks: np.ndarray) -> float:
    """Seconds no plan over all these ranks beats: compute with exposed parameters, or all parameters' traffic."""
    compute = cost.devices_bound(job.wires.devices.subset(ranks), job.workload)
    nodes = np.unique(job.wires.node[ranks])
    wire = float(job.wires.nic[nodes].min() if len(nodes) > 1 else job.wires.port[ranks[0]])
    moved, exposed = (
        traffic(job.workload, len(ranks)) / wire for traffic in (cost.parameter_traffic, cost.exposed_traffic)
    )
    return max(compute + exposed, moved)


def _by_speed(even: Draft, options: Options) -> list[Draft]:
    """The even plan with tokens by speed, and with tokens and heads by speed: each the last one where none fits."""
    found = [even]
    alike = all(
        (np.maximum.reduceat(device, begins, axis=1) == np.minimum.reduceat(device, begins, axis=1)).all()
        for device, begins in ((even.job.device[kind.ranks], kind.layout.begins[:-1]) for kind in even.kinds)
    )
    for even_heads in (True,) if alike else (True, False):
        if options.late():
            found.append(found[-1])
            continue
        kinds: list[Kind] = []
        for kind in even.kinds:
            begins = kind.layout.begins.tolist()
            grouping = [list(range(start, end)) for start, end in itertools.pairwise(begins)]
            search = Search(even.job, Alike(kind.ranks, kind.layout.sequences), options, even_heads=even_heads)
            _adopt(search, kinds)
            if (plan := search.lay_out_groups(grouping)) is None:
                break
            kinds.append(_matching(search, plan, kinds))
        fits = len(kinds) == len(even.kinds) and (made := Draft(even.job, tuple(kinds))).lacking_gb <= 0
        found.append(made if fits else found[-1])
    return found[1:] if len(found) > 2 else [found[1]] * 2  # devices alike have equal heads at any rate


def _adopt(search: Search, kinds: Sequence[Kind]) -> None:
    """All replicas of a plan have the slot and the exchange of the first."""
    if kinds:
        first = kinds[0].layout
        search.options = dataclasses.replace(search.options, slot=first.slot, exchange=first.exchange)


def _matching(search: Search, layout: Layout, kinds: Sequence[Kind]) -> Kind:
    """The kind laid out, with the fusion of the first."""
    return search.kind(layout.crossing(fusion=kinds[0].layout.fusion) if kinds else layout)


def _search(job: Job, options: Options, refine: bool) -> tuple[Draft | None, Draft | None]:
    """The fastest division into replicas that fits, and else the one that lacks least memory."""
    best: Draft | None = None
    closest: Draft | None = None
    candidates: list[tuple[float, int, list[Search]]] = []
    divided = list(divisions(job))
    floors = [_floor(job, division) for division in divided]
    for index in sorted(range(len(divided)), key=lambda i: (floors[i], -len(divided[i]), i)):
        if candidates and (floors[index] >= 1.1 * candidates[0][0] or options.late()):
            continue
        searches = [Search(job, alike, options) for alike in divided[index]]
        # Those that come after the ones searched in full need no exact estimate, unless nothing fits.
        enough = candidates[REFINED_DIVISIONS - 1][0] if len(candidates) >= REFINED_DIVISIONS else math.inf
        estimated = _estimated(searches, enough) if len(divided) > 1 else 0.0
        candidates.append((estimated, index, searches))
        candidates.sort(key=lambda item: item[:2])
    for place in range(len(candidates)):
        if (best is not None and place >= REFINED_DIVISIONS) or (place and options.late(best is not None)):
            break
        if place == REFINED_DIVISIONS:
            rest = [(_estimated(searches, math.inf), index, searches) for _, index, searches in candidates[place:]]
            candidates[place:] = sorted(rest, key=lambda item: item[:2])
        searches = candidates[place][2]
        found, fits = _laid_out(job, searches, refine)
        if found is not None and fits and (best is None or found.seconds < best.seconds):
            best = found
        elif found is not None and not fits and (closest is None or found.lacking_gb < closest.lacking_gb):
            closest = found
    return best, closest


def _estimated(searches: Sequence[Search], enough: float) -> float:
    """Estimated seconds of the slowest replicas; of the first that take longer than `enough` if there are any."""
    seconds = 0.0
    for search in searches:
        seconds = max(seconds, search.glance())
        if seconds > enough:
            break
    return seconds


def _floor(job: Job, division: tuple[Alike, ...]) -> float:
    """Compute seconds of a micro-step that no layout of these replicas beats."""
    return max(
        cost.compute_bound(
            job.wires.devices.subset(alike.ranks[0]),
            dataclasses.replace(job.workload, sequences=alike.sequences, accumulation=1),
        )
        for alike in division
    )


def _laid_out(job: Job, searches: Sequence[Search], refine: bool) -> tuple[Draft | None, bool]:
    """All kinds of replicas laid out, with the slot, fusion and exchange of the first; whether they fit."""
    kinds: list[Kind] = []
    for search in searches:
        _adopt(search, kinds)
        if (plan := search.run(refine) or search.misfit) is None:
            return None, False
        kinds.append(_matching(search, plan, kinds))
    found = Draft(job, tuple(kinds))
    return found, found.lacking_gb <= 0


def _out_of_memory(found: Draft) -> OutOfMemory:
    """The error of a draft that does not fit."""
    job = found.job
    try:
        cost.check_memory(written(found, "hexiseq"), job.cluster, job.workload, job.places)
    except OutOfMemory as error:
        return error
    raise AssertionError("a plan that does not fit passed the memory check")


def _written(found: Draft, policy: str, cluster: Cluster, why: str) -> Plan:
    """The plan, with what it leaves out of the cluster."""
    inside = {place.index for place in found.job.places}
    return written(found, policy, tuple(
        ExcludedDevice(place.device.type, place.node_name, why) for place in cluster.places if place.index not in inside
    ))  # fmt: skip


def _subsets(job: Job) -> list[np.ndarray]:
    """Parts of the job's ranks worth a try: of few all there are, else whole types, classes of nodes and nodes."""
    everyone = np.arange(len(job.places))
    if len(everyone) <= FEW_DEVICES:
        found = _all_subsets(job)
    else:
        by_speed = sorted(job.cluster.devices, key=lambda d: -d.attention_forward_tflops)
        keep = [by_speed[:n] for n in range(1, len(by_speed))]
        keep += [[device for device in by_speed if device is not without] for without in by_speed]
        found = [everyone[np.array([device in kept for device in job.devices])[job.device]] for kept in keep]
        start = 0
        for node in job.cluster.nodes:
            end = start + node.count * len(node.seats)
            found += [everyone[start:end], everyone[start : start + len(node.seats)]]
            found.append(np.concatenate([everyone[:start], everyone[end:]]))
            start = end
    unique = {ranks.tobytes(): ranks for ranks in found}
    return [ranks for ranks in unique.values() if 0 < len(ranks) < len(everyone)]


def _all_subsets(job: Job) -> list[np.ndarray]:
    """Every number of devices of each type on each node."""
    alike: dict[tuple[int, int], list[int]] = {}
    for rank, key in enumerate(zip(job.wires.node.tolist(), job.device.tolist(), strict=True)):
        alike.setdefault(key, []).append(rank)
    counts = itertools.product(*(range(len(ranks) + 1) for ranks in alike.values()))
    found = []
    for numbers in counts:
        chosen = [rank for ranks, n in zip(alike.values(), numbers, strict=True) for rank in ranks[:n]]
        found.append(np.array(sorted(chosen), int))
    return sorted(found, key=len, reverse=True)


def _explain(
    error: OutOfMemory, cluster: Cluster, workload: Workload, policy: str, drop_devices: bool, options: Options
) -> OutOfMemory:
    """The error with the largest length this policy fits on the cluster, whatever length was asked for."""
    fits, full_fits = _longest(cluster, workload, policy, drop_devices, options) or error.fits_seq_len, 0
    if fits < 2 and workload.recompute != "full" and error.shortage.device:
        full = dataclasses.replace(workload, recompute="full")
        full_fits = _longest(cluster, full, policy, drop_devices, options) or error.full_fits_seq_len
    return OutOfMemory(error.shortage, workload.recompute, fits, full_fits, error.change)


def _longest(cluster: Cluster, workload: Workload, policy: str, drop_devices: bool, options: Options) -> int:
    """Largest length of a fixed grid, a hundredth fine, that fits; 0 when none does."""
    slot = options.slot
    options = dataclasses.replace(options, deadline=time.thread_time() + EXPLAIN_SECONDS)
    parts: list[Sequence[Place]] = [cluster.places]
    if policy == "hexiseq" and drop_devices:
        everyone = Job(cluster, cluster.places, workload)
        parts += [[cluster.places[rank] for rank in ranks.tolist()] for ranks in _subsets(everyone)]
    limits = [(cost.longest_length(workload, places), places) for places in parts]

    def length(index: int) -> int:
        octave, step = divmod(index, 128)
        found = (128 + step << octave) >> 7
        return found // slot * slot if slot else found if found < 128 else found // 2 * 2

    def fits(index: int) -> bool:
        tokens = length(index)
        if tokens < 2 or options.late():
            return False
        shorter = dataclasses.replace(workload, seq_len=tokens)
        everyone = Job(cluster, cluster.places, shorter)
        for limit, places in limits:
            if tokens > limit:
                continue
            try:
                if policy != "hexiseq":
                    if isinstance(even_policies(everyone, options)[policy], ValueError):
                        continue
                elif (
                    isinstance(even_policies(everyone, options)["even"], ValueError)
                    and _search(Job(cluster, places, shorter), options, refine=False)[0] is None
                ):
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


def _even_rows(found: Mapping[str, Draft | ValueError]) -> tuple[Rival, ...]:
    return tuple(_row(name, found[name]) for name in EVEN_POLICIES)


def _row(name: str, found: Draft | Plan | ValueError) -> Rival:
    if isinstance(found, ValueError):
        return Rival(name, "out_of_memory" if isinstance(found, OutOfMemory) else "illegal", reason=str(found))
    assert found.predicted is not None
    return Rival(name, "ok", found.predicted.step_seconds, found.predicted.tokens_per_second)


def _check_dtype(cluster: Cluster, workload: Workload) -> None:
    for device in cluster.devices:
        if workload.dtype not in device.dtypes:
            place = next(place for place in cluster.places if place.device is device)
            common = [d for d in place.device.dtypes if all(d in other.dtypes for other in cluster.devices)]
            raise ValueError(
                f"{place.device.type} on node {place.node_name} cannot run {workload.dtype}; one dtype serves the "
                f"whole job: use {' or '.join(common) if common else 'devices with a dtype in common'}, or leave it out"
            )

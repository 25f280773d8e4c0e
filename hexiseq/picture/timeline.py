"""One layer as every rank lives through it: what the simulation expects, and what a run measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hexiseq.cluster import Cluster, Place
from hexiseq.cost import BACKWARD_LINEAR, ReplicaCost, Wires, match_places, passes, replica_cost
from hexiseq.picture.rows import Row, kinds_of, rows, runs
from hexiseq.plan import Plan, Replica
from hexiseq.simulate import Phase, Span, StepSimulation, simulate_step
from hexiseq.workload import Workload

EACH, MOST = 16, 16  # ranks with a row each; rows when ranks share them
MOST_SIMULATED = 32  # ranks; more take longer to simulate than to plan
EXCHANGES, TRAVELS = ("all-to-all", "dkv return"), ("kv", "dkv")  # what nothing hides; what runs beside kernels
PASSES = ("forward", "backward")

# compute, exchange, wait; travel: KV under way beside all these. Then a name, start and end in seconds.
Bar = tuple[str, str, float, float]
# A name, seconds of each rank's kernels (None: an exchange nothing hides), seconds of what travels meanwhile.
_Step = tuple[str, "np.ndarray | None", float]


@dataclass(frozen=True)
class Lane:
    """A rank, or one of several alike, in one layer; seconds since the layer began, wherever that is shown."""

    label: str
    forward: tuple[Bar, ...]
    backward: tuple[Bar, ...]


@dataclass(frozen=True)
class Timeline:
    """A layer forward and backward.

    Attributes:
        title: of the picture it is part of.
        source: where the times come from, in words.
        comparable: with the others of a run; a rehearsal's are not.
    """

    title: str
    source: str
    lanes: tuple[Lane, ...]
    comparable: bool = True

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n")

    @staticmethod
    def load(path: Path) -> Timeline:
        data = json.loads(path.read_text())
        lanes = tuple(Lane(lane["label"], _bars(lane["forward"]), _bars(lane["backward"])) for lane in data["lanes"])
        return Timeline(data["title"], data["source"], lanes)


def predicted(plan: Plan, cluster: Cluster, workload: Workload) -> Timeline:
    """What is expected of a layer: simulated, or by the cost model alone where that would take too long.

    Of many ranks in replicas alike one replica is looked at; the cost model knows its part of NICs that it shares.
    """
    places = match_places(plan, cluster)
    kinds = kinds_of(plan)
    shown = rows(plan, kinds, each=EACH, most=MOST)
    title = f"One layer of {workload.model.name}: {plan.policy}, {plan.seq_len:,} tokens on {plan.world_size:,} devices"
    drawn, ranks = _one_of_each(plan, kinds)
    if drawn.world_size <= MOST_SIMULATED and _alone(places, ranks):
        small = dataclasses.replace(workload, sequences=drawn.sequences)
        simulation = simulate_step(drawn, cluster, small, places=[places[rank] for rank in ranks], trace=True)
        found = _simulated(simulation, ranks)
        source = "predicted, simulated event by event"
    else:
        found = _estimated(plan, kinds, cluster, workload, places)
        source = "predicted by the cost model's sums (too many ranks to simulate here)"
    lanes = [Lane(_label(row), *found[row.ranks[0]]) for row in shown[: 2 * MOST]]
    return Timeline(title, source, tuple(lanes))


def measured(split: dict[str, Any], *, rehearsal: bool) -> Timeline:
    """What a run's ``step_split.json`` says of a layer. Raises KeyError or TypeError if it says something else."""
    ranks = [entry for entry in split["ranks"] if entry.get("layer")]
    together: dict[tuple, list[dict[str, Any]]] = {}
    for entry in ranks:
        key = (entry["node"], entry["device"], entry["rank"] if len(ranks) <= EACH else None)
        together.setdefault(key, []).append(entry)
    lanes = []
    for entries in list(together.values())[:MOST]:
        # The one that the others wait for.
        entry = max(entries, key=lambda found: found["compute_seconds"])
        device = f"CPU in place of {entry['device']}" if rehearsal else f"{entry['device']} on {entry['node']}"
        name = f"rank {entry['rank']}, {device}"
        if len(entries) > 1:
            name += f", busiest of {len(entries)}"
        lanes.append(Lane(name, _bars(entry["layer"]["forward"]), _bars(entry["layer"]["backward"])))
    what = f"measured, step {split['step']}"
    if rehearsal:
        what += " of the rehearsal: CPU processes and a small model, other times than those above"
    return Timeline("One layer", what, tuple(lanes), comparable=not rehearsal)


def _bars(found: Iterable[Sequence[Any]]) -> tuple[Bar, ...]:
    return tuple((str(kind), str(name), float(start), float(end)) for kind, name, start, end in found)


def _label(row: Row) -> str:
    rank = f"rank{'s' if len(row.ranks) > 1 else ''} {runs(row.ranks)}"
    more = f", 1 of {row.replicas} replicas" if row.replicas > 1 else ""
    return f"{rank}, {row.type} on {row.node}{more}"


def _one_of_each(plan: Plan, kinds: Sequence[Sequence[Replica]]) -> tuple[Plan, list[int]]:
    """The plan with one replica of each kind, and what its ranks were called."""
    if plan.world_size <= MOST_SIMULATED or len(kinds) == len(plan.replicas):
        return plan, list(range(plan.world_size))
    ranks = sorted(rank for alike in kinds for rank in alike[0].ranks)
    new = {rank: i for i, rank in enumerate(ranks)}

    def renamed(replica: Replica) -> Replica:
        groups = tuple(
            dataclasses.replace(
                group, shards=tuple(dataclasses.replace(shard, rank=new[shard.rank]) for shard in group.shards)
            )
            for group in replica.groups
        )
        return dataclasses.replace(replica, groups=groups)

    devices = tuple(plan.devices[rank] for rank in ranks)
    replicas = tuple(renamed(alike[0]) for alike in kinds)
    return dataclasses.replace(plan, replicas=replicas, devices=devices, predicted=None), ranks


def _alone(places: Sequence[Place], ranks: Sequence[int]) -> bool:
    """Whether no others have devices on the nodes of these ranks."""
    nodes = {places[rank].node for rank in ranks}
    return sum(place.node in nodes for place in places) == len(ranks)


def _simulated(simulation: StepSimulation, ranks: Sequence[int]) -> dict[int, tuple[tuple[Bar, ...], ...]]:
    """By rank, both passes of the layer that stands for most others."""
    layer = max((phase for phase in simulation.phases if phase.name == "forward"), key=lambda phase: phase.repeats)
    spans: dict[int, list[Span]] = {i: [] for i in range(len(ranks))}
    for span in simulation.spans:
        spans[span.rank].append(span)
        if span.peer is not None and span.name in EXCHANGES + TRAVELS:
            spans[span.peer].append(span)
    chosen = {p.name: p for p in simulation.phases if p.layer == layer.layer and p.micro_step == layer.micro_step}
    return {
        rank: tuple(_rank_bars(spans[i], chosen[name]) for name in PASSES) for i, rank in enumerate(ranks)
    }  # fmt: skip


def _rank_bars(spans: Sequence[Span], phase: Phase) -> tuple[Bar, ...]:
    start, length = phase.start, phase.end - phase.start

    def within(names: Iterable[str] | None) -> list[tuple[str, float, float]]:
        """Kernel calls, or transfers of these kinds, as far as they are in this phase."""
        clipped = (
            (span.name, max(0.0, span.start - start), min(length, span.end - start))
            for span in spans
            if (span.peer is None if names is None else span.peer is not None and span.name in names)
        )
        return sorted((part for part in clipped if part[1] < part[2]), key=lambda part: part[1:])

    calls = _joined([(_work(name), a, b) for name, a, b in within(None)], length)
    moving = _joined([("", a, b) for _, a, b in within(EXCHANGES)], length)
    travel = _joined([("", a, b) for _, a, b in within(TRAVELS)], length)
    bars: list[Bar] = [("compute", name, a, b) for name, a, b in calls]
    for a, b in _gaps([(a, b) for _, a, b in calls], length):
        at = a
        for _, c, d in moving:
            c, d = max(a, c), min(b, d)
            if c < d:
                bars += [("wait", "", at, c)] if c > at else []
                bars.append(("exchange", "all-to-all", c, d))
                at = d
        bars += [("wait", "", at, b)] if b > at else []
    return tuple(sorted([*bars, *(("travel", "KV", a, b) for _, a, b in travel)], key=lambda bar: bar[2:]))


def _work(name: str) -> str:
    return "linear" if name.startswith("linear") else "attention"


def _joined(parts: Sequence[tuple[str, float, float]], length: float) -> list[tuple[str, float, float]]:
    """Parts that touch, or overlap, or have less between them than one can see, as one."""
    found: list[tuple[str, float, float]] = []
    for name, start, end in parts:
        if found and found[-1][0] == name and start <= found[-1][2] + length / 1000:
            found[-1] = (name, found[-1][1], max(end, found[-1][2]))
        else:
            found.append((name, start, end))
    return found


def _gaps(parts: Sequence[tuple[float, float]], length: float) -> list[tuple[float, float]]:
    edges = [0.0, *(edge for part in parts for edge in part), length]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a > length / 1000]


def _estimated(
    plan: Plan, kinds: Sequence[Sequence[Replica]], cluster: Cluster, workload: Workload, places: Sequence[Place]
) -> dict[int, tuple[tuple[Bar, ...], ...]]:
    """The same by the cost model."""
    model, everyone = max(workload.model.kinds, key=lambda kind: kind.layers), Wires(cluster, places)
    found: dict[int, tuple[tuple[Bar, ...], ...]] = {}
    for alike in kinds:
        cost = replica_cost(plan, alike[0], dataclasses.replace(workload, model=model), places)
        steps = _steps(plan.exchange, cost, everyone.subset(cost.ranks), workload.recompute)
        for i, rank in enumerate(cost.ranks.tolist()):
            found[rank] = tuple(_in_turn(steps[name], i) for name in PASSES)
    return found


def _steps(exchange: str, cost: ReplicaCost, wires: Wires, recompute: str) -> dict[str, list[_Step]]:
    """Of each pass what comes after what: matrices, all-to-all, attention, all-to-all."""
    forwards, linears = passes(recompute)

    heads, kv, dkv = (wires.load(flow) for flow in (cost.exchange, cost.kv, cost.dkv))
    *exchanges, fetched, both, given, late = wires.seconds(np.concatenate([heads, kv, kv + dkv[:1], dkv]))

    def attend(first: int, kernels: np.ndarray, travel: float) -> list[_Step]:
        into, out = exchanges[first : first + 2]
        return [("all-to-all", None, into), ("attention", kernels, travel), ("all-to-all", None, out)]

    forward = attend(0, cost.attention_forward + cost.merge_forward, fetched)
    kernels = cost.attention_backward + cost.merge_backward
    if exchange == "ring":
        backward = attend(2, kernels, both)
        # The last gradients leave after the kernels, and are waited for unless the ring is slower anyhow.
        busy, moving = float(kernels.max()), backward[1][2]
        backward.insert(2, ("last dkv", None, max(busy + late, moving) - max(busy, moving)))
    else:
        backward = attend(2, kernels, fetched)
        backward.insert(2, ("dkv return", None, given))
    again = [("linear", (linears - 1 - BACKWARD_LINEAR) * cost.linear, 0.0), *(forwards - 1) * forward]
    return {
        "forward": [("linear", cost.linear, 0.0), *forward],
        "backward": [*again, *backward, ("linear", BACKWARD_LINEAR * cost.linear, 0.0)],
    }


def _in_turn(steps: Sequence[_Step], rank: int) -> tuple[Bar, ...]:
    """One after the other, all ranks together: a step takes the slowest rank's time, or its transfers'."""
    bars: list[Bar] = []
    at = 0.0
    for name, kernels, moving in steps:
        if kernels is None:
            bars.append(("exchange", name, at, at + moving))
            at += moving
            continue
        own, end = at + float(kernels[rank]), at + max(float(kernels.max()), moving)
        bars += [("compute", name, at, own), ("wait", "", own, end), ("travel", "KV", at, at + moving)]
        at = end
    return tuple(bar for bar in bars if bar[3] > bar[2])

"""Solve a plan and simulate a step of it: the time beside the prediction, who waits for whom. Starts no process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hexiseq.picture.rows import runs
from hexiseq.plan import Plan, align
from hexiseq.simulate import Stall, StepSimulation, simulate_step, write_trace
from recipes.job import Config, solve_config

KEYS = ("jitter", "seed", "stragglers", "window", "layers", "trace")
COLLECTIVES = {"gather": "parameters", "reduce": "reduced gradients"}
_MOST_RANKS = 64  # shown one by one


def run(config: Config, run_dir: Path) -> None:
    recipe = config["recipe"]
    _check(recipe)
    cluster, workload, plan = solve_config(config)
    settings = {key: recipe[key] for key in KEYS}
    try:
        simulation = simulate_step(plan, cluster, workload, **settings)
    except ValueError as error:
        raise ValueError(f"recipe=simulate: {error}") from None
    run_dir.mkdir(parents=True, exist_ok=True)
    plan.save(run_dir / "plan.json")
    written = ["plan.json", "simulation.json"]
    (run_dir / "simulation.json").write_text(json.dumps(_plain(plan, simulation, settings), indent=1) + "\n")
    if recipe["trace"]:
        write_trace(simulation, run_dir / "trace.json")
        written.append("trace.json")
    print("\n".join(report(plan, simulation, recipe["show"])))
    print(f"written: {', '.join(str(run_dir / name) for name in written)}")


def report(plan: Plan, simulation: StepSimulation, stalls: int) -> list[str]:
    """What is printed: simulated beside predicted, each rank's time, the `stalls` longest stalls."""
    assert plan.predicted is not None
    predicted, step = plan.predicted, simulation.step_seconds
    lines = [
        f"{plan.policy} plan, replicas of {_layout(plan)} ranks, "
        f"{plan.seq_len:,} tokens, slot {plan.slot:,}, fusion {plan.fusion}, exchange {plan.exchange}, "
        f"recompute {plan.recompute}{', offload' if plan.offload else ''}",
        f"simulated: {step:.4g} s a step, {simulation.tokens_per_second:,.0f} tokens/s, "
        f"utilisation {simulation.utilisation:.1%}",
        f"predicted: {predicted.step_seconds:.4g} s a step, {predicted.tokens_per_second:,.0f} tokens/s; "
        f"simulated / predicted {step / predicted.step_seconds:.3f}",
    ]
    rows = []
    for rank, (device, times) in enumerate(zip(simulation.devices, simulation.ranks, strict=True)):
        replica, group, _ = plan.place(rank)
        rows.append([
            str(rank), device.type, device.node, str(replica), str(group), f"{times.busy:.4g}",
            f"{times.exchange:.4g}", f"{times.stall:.4g}", f"{times.busy / step:.1%}",
        ])  # fmt: skip
    header = ["rank", "device", "node", "replica", "group", "busy s", "exchange s", "stall s", "busy"]
    lines += align(header, rows[:_MOST_RANKS])
    if len(rows) > _MOST_RANKS:
        lines.append(f"... {len(rows) - _MOST_RANKS} more ranks in simulation.json")
    if stalls and simulation.stalls:
        lines += ["longest stalls:", *(f"  {line}" for line in describe_stalls(plan, simulation)[:stalls])]
    return lines


def describe_stalls(plan: Plan, simulation: StepSimulation) -> list[str]:
    """Stalls in words, the longest first: who waited for what and whom, over which wire; ranks of a group together."""
    home = [plan.place(rank)[:2] for rank in range(plan.world_size)]
    alike: dict[tuple, list[Stall]] = {}
    for stall in simulation.stalls:
        # Parameters go round all ranks: only who comes late is worth a name.
        peers = None if stall.kind in COLLECTIVES and not stall.late else home[stall.peer]
        waiting = None if stall.kind in COLLECTIVES else home[stall.rank]
        alike.setdefault((waiting, peers, stall.kind, stall.late), []).append(stall)
    found = []
    for (_, _, kind, late), stalls in alike.items():
        seconds = dict.fromkeys((stall.rank for stall in stalls), 0.0)
        for stall in stalls:
            seconds[stall.rank] += stall.seconds
        longest = max(seconds.values())
        if longest < 1e-6 * simulation.step_seconds:
            continue
        main = max(stalls, key=lambda stall: stall.seconds)
        who, whom = (_ranks(plan, sorted(ranks)) for ranks in (seconds, {stall.peer for stall in stalls}))
        if late:
            cause = f"{whom} still at work; {main.wire}"
        elif kind in COLLECTIVES or kind == "host copy":
            cause = f"transfers under way; {main.wire}"
        else:
            cause = f"transfers under way, {whom} at the other end; {main.wire}"
        share = longest / simulation.step_seconds
        found.append(
            (longest, f"{who} waited up to {longest:.3g} s ({share:.1%}) for {COLLECTIVES.get(kind, kind)}: {cause}")
        )
    return [line for _, line in sorted(found, key=lambda item: -item[0])]


def _ranks(plan: Plan, ranks: Sequence[int]) -> str:
    """Ascending ranks, runs of them written as such, with what devices they are."""
    numbers = runs(ranks, most=len(ranks))
    kinds = dict.fromkeys(f"{plan.devices[rank].type} on {plan.devices[rank].node}" for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers} ({', '.join(kinds)})"


def _layout(plan: Plan) -> str:
    """Replicas alike and the ranks of their groups, such as ``2 x 4+4, 1 x 8``."""
    sizes = ["+".join(str(len(group.shards)) for group in replica.groups) for replica in plan.replicas]
    return ", ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes))


def _plain(plan: Plan, simulation: StepSimulation, settings: dict[str, Any]) -> dict[str, Any]:
    assert plan.predicted is not None
    fields = dataclasses.asdict(dataclasses.replace(simulation, spans=(), traced=()))
    del fields["spans"], fields["traced"]
    predicted = {key: getattr(plan.predicted, key) for key in ("step_seconds", "tokens_per_second")}
    return {
        "settings": settings,
        "predicted": predicted,
        "simulated_over_predicted": simulation.step_seconds / plan.predicted.step_seconds,
        "utilisation": simulation.utilisation,
        **fields,
    }


def _check(recipe: Config) -> None:
    if not isinstance(recipe["trace"], bool):
        raise ValueError(f"recipe.trace must be true or false, got {recipe['trace']!r}")
    if not isinstance(recipe["show"], int) or isinstance(recipe["show"], bool) or recipe["show"] < 0:
        raise ValueError(f"recipe.show must be an integer of at least 0, got {recipe['show']!r}")

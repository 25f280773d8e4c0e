"""Does a plan belong to this job: its workload, and the cluster's devices for its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hexiseq.cluster import Cluster, Place, offload_lacks
from hexiseq.plan import Plan
from hexiseq.workload import Workload


def check_workload(plan: Plan, workload: Workload) -> None:
    """Raise ValueError when the plan was made for another workload, naming the settings that would make it this one."""
    model = workload.model
    compared = (
        ("seq_len", plan.seq_len, workload.seq_len, f"data.seq_len={plan.seq_len}"),
        ("num_heads", plan.num_heads, model.heads, ""),
        ("num_kv_heads", plan.num_kv_heads, model.kv_heads, ""),
        ("dtype", plan.dtype, workload.dtype, f"strategy.dtype={plan.dtype}"),
        ("recompute", plan.recompute, workload.recompute, f"strategy.recompute={plan.recompute}"),
        ("offload", plan.offload, workload.offload, f"strategy.offload={str(plan.offload).lower()}"),
        ("sequences of a micro-step", plan.sequences, workload.sequences, f"trainer.sequences={plan.sequences}"),
    )
    differing = [row for row in compared if row[1] != row[2]]
    if differing:
        words = ", and ".join(
            f"the plan's {name} is {planned}, the workload's {wanted}" for name, planned, wanted, _ in differing
        )
        settings = [setting for *_, setting in differing]
        remedy = f"set {' '.join(settings)}, or make a new plan" if all(settings) else "make a new plan"
        raise ValueError(f"{words}; {remedy} for this job")


def check_offload(workload: Workload, places: Sequence[Place]) -> None:
    """Raise ValueError when the workload offloads and these places do not say what that takes."""
    if workload.offload and (lacking := offload_lacks(places)):
        raise ValueError(
            f'offload: {lacking}, or do without: strategy.offload=false, with a manual plan "offload": false in it'
        )


def match_places(plan: Plan, cluster: Cluster) -> tuple[Place, ...]:
    """The place of each rank: the next free one of the same device type and node, by rank.

    Raises:
        ValueError: the cluster has no (more) such device there, or it cannot run the plan's kernel.
    """
    free: dict[tuple[str, str], list[Place]] = {}
    for place in cluster.places:
        free.setdefault((place.device.type, place.node_name), []).append(place)
    found = []
    for rank, device in enumerate(plan.devices):
        places = free.get((device.type, device.node))
        if not places:
            there = sum(p.device.type == device.type and p.node_name == device.node for p in cluster.places)
            raise ValueError(
                f"the plan wants a {device.type} on node {device.node} for rank {rank}; cluster {cluster.name!r} has "
                f"{there} there (its devices: {_inventory(cluster)})"
            )
        place = places.pop(0)
        if device.kernel not in place.device.kernels:
            raise ValueError(
                f"the plan wants kernel {device.kernel} for rank {rank}; its device, a {device.type} on node "
                f"{device.node}, can run {', '.join(place.device.kernels)}"
            )
        found.append(place)
    return tuple(found)


def _inventory(cluster: Cluster) -> str:
    counts: dict[str, int] = {}
    for place in cluster.places:
        key = f"{place.device.type} on {place.node_name}"
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{count} {key}" for key, count in counts.items())

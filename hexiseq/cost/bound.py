"""A step time that no feasible plan beats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hexiseq.cluster import Cluster, Device, Node
from hexiseq.cost.memory import token_capacity
from hexiseq.cost.step import BACKWARD_ATTENTION, passes, predict, token_seconds
from hexiseq.cost.traffic import GB, Devices, exposed_traffic, parameter_traffic
from hexiseq.plan import Bound, Plan
from hexiseq.workload import Workload, all_pairs, attention_flops


def lower_bound(cluster: Cluster, workload: Workload) -> float:
    """Seconds of a step no feasible plan beats, on all of the cluster or a part of it.

    Compute is spread in fractions (`devices_bound`). Parameters pass every wire of the circle of all ranks, the first
    and the last of them while nothing is computed, so that the slowest wire a plan uses bounds it, and with it the
    devices it can have: those behind wires no slower. A plan on one node has that node's ports, one on several has
    their NICs, and the ports of nodes on which it has several ranks.
    """
    everyone = Devices.of(cluster.places)
    everything = devices_bound(everyone, workload)
    if math.isinf(everything):
        return float(_spread(_rates(everyone, workload), workload))  # nothing fits; compute alone is still true
    # One device alone gathers nothing from anybody.
    least = min(devices_bound(Devices([device], np.zeros(1, int)), workload) for device in cluster.devices)
    for node in cluster.nodes:
        least = min(least, _least(_node_rates(node, workload), workload, node.intra_gb_per_s))
    if sum(node.count for node in cluster.nodes) > 1:
        for slowest in sorted({rate for node in cluster.nodes for rate in _wires(node)}):
            rates = np.concatenate([_reached(node, slowest, workload) for node in cluster.nodes], axis=1)
            if rates.shape[1] > 1:
                least = min(least, _least(rates, workload, slowest))
    return max(everything, least)


def _wires(node: Node) -> tuple[float, float]:
    """GB/s that a plan across nodes gets to several devices of a node, and to one of them alone."""
    return min(node.intra_gb_per_s, node.network_gb_per_s), node.network_gb_per_s


def _node_rates(node: Node, workload: Workload) -> np.ndarray:
    """Rates of one node's devices: ``[kinds of work, devices]``."""
    return _all_rates([seat.device for seat in node.seats], workload)


def _reached(node: Node, slowest: float, workload: Workload) -> np.ndarray:
    """Rates of the devices on nodes of a class that no wire slower than that leads to: ``[kinds of work, devices]``.

    Where ports are slower there is one device a node, the best for every kind of work.
    """
    several, alone = _wires(node)
    rates = _node_rates(node, workload)
    if several < slowest:
        rates = rates.max(axis=1, keepdims=True) if alone >= slowest else rates[:, :0]
    return np.tile(rates, node.count)


def _least(rates: np.ndarray, workload: Workload, wire_gb_per_s: float) -> float:
    """Least seconds of any number, from two on, of devices of these rates around a circle of such a wire."""
    count = rates.shape[1]
    if count < 2:
        return math.inf
    best = np.sort(rates, axis=1)[:, ::-1].cumsum(axis=1)
    ranks, wire = np.arange(2, count + 1), wire_gb_per_s * GB
    path = _spread(best[:, 1:], workload) + exposed_traffic(workload, ranks) / wire
    return float(np.maximum(path, parameter_traffic(workload, ranks) / wire).min())


def devices_bound(devices: Devices, workload: Workload) -> float:
    """Seconds no feasible plan on these devices, or some of them, beats; infinite when memory cannot hold the tokens.

    Every kind of work is spread over all devices at their own rate for it, in fractions, with no traffic, merge or
    launch. Tokens respect memory when there is one sequence a micro-step. Valid because each kind ends with its
    slowest rank, and ``max(work_r / rate_r) >= sum(work) / sum(rate)``; leaving devices out only lowers the rates. Over
    several replicas it holds because throughput, a harmonic mean of rates, is superadditive.
    """
    spread = _spread(_rates(devices, workload), workload)
    if workload.sequences > 1:
        return spread
    capacity = [token_capacity(device, workload, len(devices.index)) for device in devices.distinct]
    seconds = [token_seconds(device, workload) for device in devices.distinct]
    counts = np.bincount(devices.index).tolist()
    freely = workload.seq_len / sum(count / s for count, s in zip(counts, seconds, strict=True))
    level = _level(workload.seq_len, seconds, capacity, counts)
    return spread + workload.accumulation * max(0.0, level - freely)


def compute_bound(devices: Devices, workload: Workload) -> float:
    """Seconds of all compute spread over these devices in fractions, whatever their memory."""
    return _spread(_rates(devices, workload), workload)


def _all_rates(devices: Sequence[Device], workload: Workload) -> np.ndarray:
    """Tokens a second, attention aside, and FLOP/s of attention forward and backward: ``[kinds of work, devices]``."""
    return np.array([
        [1 / token_seconds(d, workload), d.attention_forward_tflops * 1e12, d.attention_backward_tflops * 1e12]
        for d in devices
    ]).T  # fmt: skip


def _rates(devices: Devices, workload: Workload) -> np.ndarray:
    """The same of all devices together."""
    return _all_rates(devices.distinct, workload) @ np.bincount(devices.index)


def _spread(rates: Any, workload: Workload) -> Any:
    """Seconds of all compute of a step at summed `_rates`."""
    tokens, forward, backward = rates
    model, n = workload.model, workload.seq_len
    flops = model.heads * attention_flops(model, all_pairs(model, n))
    attention = flops * (passes(workload.recompute)[0] / forward + BACKWARD_ATTENTION / backward)
    return workload.sequences * workload.accumulation * (attention + n / tokens)


def bound(cluster: Cluster, workload: Workload) -> Bound:
    return Bound(lower_bound(cluster, workload))


def _level(total: float, seconds: Sequence[float], capacity: Sequence[float], counts: Sequence[int]) -> float:
    """Least time in which `total` tokens fit, each device at `seconds` a token up to `capacity`; infinite if none.

    Args:
        counts: devices of each kind.
    """
    filled, rate = 0.0, sum(count / s for count, s in zip(counts, seconds, strict=True))
    for time, i in sorted((capacity[i] * s, i) for i, s in enumerate(seconds)):
        if filled + rate * time >= total:
            return (total - filled) / rate
        filled += counts[i] * capacity[i]
        rate -= counts[i] / seconds[i]
    return math.inf


def with_prediction(plan: Plan, cluster: Cluster, workload: Workload) -> Plan:
    """The plan with `predicted`, `bound` and `gap` filled in."""
    predicted, limit = predict(plan, cluster, workload), bound(cluster, workload)
    gap = predicted.step_seconds / limit.step_seconds - 1
    return dataclasses.replace(plan, predicted=predicted, bound=limit, gap=gap)

"""What a plan costs: step time, traffic and memory, before anything runs. Formulas with units: ``docs/cost-model.md``.

The step is the slowest path through compute, all-to-all and KV exchange, or the busiest wire, whichever is longer.
Bytes and FLOPs follow what the runtime moves and computes for exactly these tokens and heads; only the rates are
estimates. Arrays are indexed by rank.
"""

from hexiseq.cost.bound import bound, compute_bound, devices_bound, lower_bound, with_prediction
from hexiseq.cost.layout import Counts, Kind, Layout, alike_replicas, make_layout, replica_kinds
from hexiseq.cost.matching import check_offload, check_workload, match_places
from hexiseq.cost.memory import (
    MEMORY_FRACTION,
    OutOfMemory,
    attention_bytes,
    check_memory,
    lacking_gb,
    longest_length,
    memory_gb,
    most_tokens,
    token_bytes,
    token_capacity,
    with_memory,
)
from hexiseq.cost.step import (
    BACKWARD_ATTENTION,
    BACKWARD_LINEAR,
    ReplicaCost,
    assess,
    assess_below,
    busy_seconds,
    copy_seconds,
    exposed_seconds,
    layer_bytes,
    optimizer_seconds,
    passes,
    predict,
    replica_cost,
    token_seconds,
)
from hexiseq.cost.traffic import Devices, Flow, Inside, Wires, accumulator_bytes, exposed_traffic, parameter_traffic

__all__ = [
    "BACKWARD_ATTENTION",
    "BACKWARD_LINEAR",
    "MEMORY_FRACTION",
    "Counts",
    "Devices",
    "Flow",
    "Inside",
    "Kind",
    "Layout",
    "OutOfMemory",
    "ReplicaCost",
    "Wires",
    "accumulator_bytes",
    "alike_replicas",
    "assess",
    "assess_below",
    "attention_bytes",
    "bound",
    "busy_seconds",
    "check_memory",
    "check_offload",
    "check_workload",
    "compute_bound",
    "copy_seconds",
    "devices_bound",
    "exposed_seconds",
    "exposed_traffic",
    "lacking_gb",
    "layer_bytes",
    "longest_length",
    "lower_bound",
    "make_layout",
    "match_places",
    "memory_gb",
    "most_tokens",
    "optimizer_seconds",
    "parameter_traffic",
    "passes",
    "predict",
    "replica_cost",
    "replica_kinds",
    "token_bytes",
    "token_capacity",
    "token_seconds",
    "with_memory",
    "with_prediction",
]

"""Event simulation of a plan: what every rank computes and waits for.

    ring = simulate_ring(plan, RingTimes(own_seconds, tick_seconds, kv_seconds, dkv_seconds=None))
    step = simulate_step(plan, cluster, workload)

`simulate_ring` takes what each kernel call and each transfer of one attention layer takes, measured ones for instance;
`simulate_step` has the whole optimizer step on the cluster's shared wires, and is the check on `hexiseq.cost`.
"""

from hexiseq.simulate.engine import Edge
from hexiseq.simulate.ring import (
    SEND_LAG,
    BlockSpan,
    RankSpan,
    RingMessage,
    RingSimulation,
    RingTimes,
    ring_blocks,
    ring_messages,
    simulate_ring,
)
from hexiseq.simulate.step import Phase, RankTimes, Span, Stall, StepSimulation, simulate_step
from hexiseq.simulate.trace import write_trace

__all__ = [
    "SEND_LAG",
    "BlockSpan",
    "Edge",
    "Phase",
    "RankSpan",
    "RankTimes",
    "RingMessage",
    "RingSimulation",
    "RingTimes",
    "Span",
    "Stall",
    "StepSimulation",
    "ring_blocks",
    "ring_messages",
    "simulate_ring",
    "simulate_step",
    "write_trace",
]

"""A simulated step as a trace that chrome://tracing and https://ui.perfetto.dev open."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hexiseq.simulate.step import Span, StepSimulation

_LANES = 1000  # of a rank at most: one to compute, the others for transfers in flight together
_MICROSECONDS = 1e6


def write_trace(simulation: StepSimulation, path: str | Path) -> None:
    """Write the trace-event file: a process for each node; for each rank a lane of kernel calls and lanes of transfers.

    Transfers are on the lanes of the rank that receives them; those in flight together on different ones. What is there
    is what was simulated event by event; layers that were extended by multiplication are not repeated.

    Raises:
        ValueError: the simulation was made without ``trace=True``.
    """
    if not simulation.spans:
        raise ValueError("the simulation has no events to write; make it with trace=True")
    nodes = {name: pid for pid, name in enumerate(dict.fromkeys(device.node for device in simulation.devices))}
    events: list[dict[str, Any]] = [_name("process_name", pid, 0, f"node {name}") for name, pid in nodes.items()]
    by_rank: dict[int, tuple[list[Span], list[Span]]] = defaultdict(lambda: ([], []))
    for span in simulation.spans:
        by_rank[span.rank][span.peer is not None].append(span)
    for rank, device in enumerate(simulation.devices):
        calls, transfers = by_rank[rank]
        pid, first = nodes[device.node], rank * _LANES
        events.append(_name("thread_name", pid, first, f"rank {rank} {device.type}: compute"))
        events += [_event(span, pid, first, "compute", {}) for span in sorted(calls, key=_start)]
        lanes: list[tuple[float, int]] = []  # when each is free again
        for span in sorted(transfers, key=_start):
            if lanes and lanes[0][0] <= span.start:
                lane = heapq.heappop(lanes)[1]
            else:
                lane = len(lanes) + 1
                name = f"rank {rank} {device.type}: receives" + (f" {lane}" if lane > 1 else "")
                events.append(_name("thread_name", pid, first + lane, name))
            heapq.heappush(lanes, (span.end, lane))
            events.append(_event(span, pid, first + lane, "transfer", {"from": span.peer, "bytes": round(span.size)}))
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _start(span: Span) -> tuple[float, float]:
    return span.start, span.end


def _event(span: Span, pid: int, tid: int, category: str, args: dict[str, Any]) -> dict[str, Any]:
    name = span.name if span.peer is None else f"{span.name} from {span.peer}"
    start = span.start * _MICROSECONDS
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": span.end * _MICROSECONDS - start,
            "pid": pid, "tid": tid, "args": args}  # fmt: skip


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}

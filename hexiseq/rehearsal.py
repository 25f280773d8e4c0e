"""Rehearse a plan on a machine without its devices: one CPU process per device, the same cuts, a smaller model.

Query and KV heads, groups, head ranges, slots per group and token shares stay the real plan's. Layers, widths, head
dimension and the slot's length shrink.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from hexiseq.cluster import Cluster, Device, Node, Seat
from hexiseq.plan import Plan, RankDevice, Replica, fits_slots, group_intervals, make_replica


def rehearse_plan(plan: Plan, seq_len: int) -> Plan:
    """The plan at about `seq_len` tokens, for CPU ranks in fp32. Shares are kept to within a token's rounding."""
    slots = max(replica.slots for replica in plan.replicas)
    if any(replica.slots != slots for replica in plan.replicas):
        raise ValueError("a rehearsal needs replicas of the same number of slots")
    slot = max(2, 2 * round(seq_len / slots / 2))
    tokens = slots * slot
    assert fits_slots(tokens, slot, slots)
    return dataclasses.replace(
        plan,
        seq_len=tokens,
        slot=slot,
        dtype="float32",
        replicas=tuple(_shrink_replica(replica, tokens, slot) for replica in plan.replicas),
        devices=tuple(RankDevice(d.type, d.node, "cpu") for d in plan.devices),
        predicted=None,
        bound=None,
        gap=None,
        rivals=(),
    )


def _shrink_replica(replica: Replica, seq_len: int, slot: int) -> Replica:
    runs = group_intervals(seq_len, slot, [group.slots for group in replica.groups])
    groups = []
    for group, run in zip(replica.groups, runs, strict=True):
        sizes = proportional([shard.num_tokens for shard in group.shards], sum(b - a for a, b in run))
        members = [(s.rank, size, s.num_heads) for s, size in zip(group.shards, sizes, strict=True)]
        groups.append((group.slots, members))
    return make_replica(seq_len, slot, groups, replica.sequences)


def proportional(shares: Sequence[int], total: int) -> list[int]:
    """Integers proportional to `shares` that sum to `total`; cumulative rounding keeps each within one of exact."""
    ends, running, whole = [0], 0, sum(shares)
    for share in shares:
        running += share
        ends.append(round(running * total / whole))
    return [b - a for a, b in pairwise(ends)]


def rehearse_model(
    config: Mapping[str, Any], shrink: Mapping[str, int], vocab_size: int, scale: float
) -> dict[str, Any]:
    """The Hugging Face config with the same heads and the sizes of `shrink`: layers, hidden, intermediate, head_dim.

    Args:
        scale: tokens of the rehearsal over those of the real sequence; a sliding window shrinks as much.
    """
    heads, layers = config["num_attention_heads"], min(shrink["layers"], config["num_hidden_layers"])
    changed: dict[str, Any] = {}
    if config.get("sliding_window") is not None:
        changed["sliding_window"] = max(1, round(config["sliding_window"] * scale))
    if config.get("max_window_layers") is not None:  # the layers before the first with a window
        changed["max_window_layers"] = config["max_window_layers"] * layers // config["num_hidden_layers"]
    if config.get("layer_types") is not None:
        changed["layer_types"] = list(config["layer_types"])[:layers]
    return {
        **config,
        **changed,
        "num_hidden_layers": layers,
        # Hugging Face insists on a multiple of the heads, whatever the head dimension.
        "hidden_size": heads * -(-shrink["hidden"] // heads),
        "intermediate_size": shrink["intermediate"],
        "head_dim": shrink["head_dim"],
        "vocab_size": vocab_size,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
    }


def rehearse_cluster(plan: Plan, core: Device, cores: int) -> Cluster:
    """The machine a rehearsal runs on, for its predictions: the plan's ranks as equal shares of `cores` CPU cores.

    Nodes keep the plan's names; all of them are this one machine, joined by its memory.
    """
    share = min(1.0, cores / plan.world_size)

    def seat(device: RankDevice) -> Seat:
        return Seat(
            dataclasses.replace(
                core,
                type=device.type,
                peak_tflops=core.peak_tflops * share,
                gemm_tflops=core.gemm_tflops * share,
                attention_forward_tflops=core.attention_forward_tflops * share,
                attention_backward_tflops=core.attention_backward_tflops * share,
                hbm_gb_per_s=core.hbm_gb_per_s * share,
                host_gb_per_s=core.hbm_gb_per_s * share / 2,  # reads and writes the one memory there is
                launch_us=core.launch_us / share,
            )
        )

    seats: dict[str, list[Seat]] = {}
    for device in plan.devices:
        seats.setdefault(device.node, []).append(seat(device))
    bandwidth = core.hbm_gb_per_s / 8
    return Cluster(
        "rehearsal",
        tuple(
            Node(
                name,
                tuple(there),
                intra_gb_per_s=bandwidth,
                nics=1,
                nic_gb_per_s=bandwidth,
                host_memory_gb=core.memory_gb * len(there),
            )
            for name, there in seats.items()
        ),
    )

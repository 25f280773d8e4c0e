"""The even splits every published system makes: ring, Ulysses and their grids. Rivals, and seeds of the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hexiseq.cluster import Place
from hexiseq.plan import EXCHANGES, Plan, RankDevice, fits_slots, make_replica
from hexiseq.workload import Workload

HEAD_FIRST, CONTEXT_FIRST = "head_first", "context_first"
# (slots, [(rank, tokens, heads), ...]) per group, outermost first.
Counts = list[tuple[int, list[tuple[int, int, int]]]]


class IllegalPolicy(ValueError):
    """A policy cannot run this job on these devices. The message names policy, value, limit and remedy."""


def build_plan(
    policy: str, workload: Workload, places: Sequence[Place], counts: Counts, slot: int, fusion: int, exchange: str
) -> Plan:
    """A plan of one replica over `places`, rank after rank."""
    model = workload.model
    return Plan(
        policy=policy,
        seq_len=workload.seq_len,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        slot=slot,
        fusion=fusion,
        exchange=exchange,
        recompute=workload.recompute,
        dtype=workload.dtype,
        replicas=(make_replica(workload.seq_len, slot, counts, workload.sequences),),
        devices=tuple(RankDevice(p.device.type, p.node_name, p.device.kernel) for p in places),
    )


def exchanges(plan: Plan, exchange: str | None) -> list[Plan]:
    """The plan with the exchange asked for; with each, its own first, where None leaves the choice open."""
    if exchange is None and all(len(replica.groups) == 1 for replica in plan.replicas):
        return [plan]  # nothing crosses groups
    wanted = [exchange] if exchange else [plan.exchange, *(e for e in EXCHANGES if e != plan.exchange)]
    return [plan if e == plan.exchange else plan.crossing(exchange=e) for e in wanted]


def head_limit(workload: Workload, width: int) -> str:
    """Why `width` ranks cannot share the heads evenly; empty when they can."""
    model = workload.model
    if model.heads % width:
        return f"{model.heads} query heads do not divide over {width} ranks"
    if model.kv_heads % width and width % model.kv_heads:
        return f"{model.kv_heads} KV heads do not divide over {width} ranks, nor can each be copied equally often"
    return ""


def legal_widths(workload: Workload, ranks: int) -> list[int]:
    """Group sizes of the even grids over `ranks`, the pure ring (1) first."""
    return [
        width
        for width in range(1, ranks + 1)
        if ranks % width == 0 and not head_limit(workload, width) and 2 * (ranks // width) <= workload.seq_len
    ]


def even_grid(
    policy: str,
    workload: Workload,
    places: Sequence[Place],
    width: int,
    slot: int | None = None,
    placement: str = HEAD_FIRST,
) -> Plan:
    """Equal groups of `width` ranks, equal tokens and heads, one replica.

    Args:
        placement: ``head_first``, groups of consecutive ranks; ``context_first``, consecutive ranks follow one another
            on the ring.

    Raises:
        IllegalPolicy: heads do not divide, or the sequence is too short.
    """
    ranks = len(places)
    groups = ranks // width
    if reason := head_limit(workload, width):
        widths = [w for w in legal_widths(workload, ranks) if w != width]
        remedy = f"use policy usp with groups of {widths[-1]}, or hexiseq" if widths else "use policy hexiseq"
        raise IllegalPolicy(f"policy {policy} on {ranks} ranks: {reason}; {remedy}, which splits heads unevenly")
    if workload.seq_len < 2 * groups:
        raise IllegalPolicy(
            f"policy {policy} on {ranks} ranks: {workload.seq_len} tokens are too few, its {groups} groups need at "
            f"least {2 * groups}; use a longer sequence or fewer devices"
        )
    slot, per_group = _even_slots(policy, workload.seq_len, groups, slot)
    model = workload.model
    counts: Counts = []
    short = sum(per_group) * slot - workload.seq_len
    for g, slots in enumerate(per_group):
        tokens = slots * slot - (short if g == 0 else 0)
        members = range(g * width, (g + 1) * width) if placement == HEAD_FIRST else range(g, ranks, groups)
        counts.append((slots, [
            (rank, tokens // width + (m < tokens % width), model.heads // width) for m, rank in enumerate(members)
        ]))  # fmt: skip
    return build_plan(policy, workload, places, counts, slot, fusion=1, exchange="ring")


def _even_slots(policy: str, seq_len: int, groups: int, slot: int | None) -> tuple[int, list[int]]:
    """Slot and slots per group, as equal as the sequence allows; one slot each where that is possible."""
    if slot is None:
        slot = 2 * -(-seq_len // (2 * groups))
        if not fits_slots(seq_len, slot, groups):
            # Awkward lengths: the largest slot whose shares differ by 3 % at most, else the finest.
            for total in even_totals(seq_len, groups):
                slot = 2 * -(-seq_len // (2 * total))
                if -(-total // groups) * slot * groups <= 1.03 * seq_len:
                    break
            else:
                slot = 2
    total = slots_for(policy, seq_len, slot)
    if total < groups:
        raise IllegalPolicy(
            f"policy {policy}: {seq_len} tokens make {total} slots of {slot}, fewer than its {groups} groups; "
            f"use a slot of at most {seq_len // groups // 2 * 2} tokens"
        )
    return slot, [total // groups + (g < total % groups) for g in range(groups)]


def even_totals(seq_len: int, least: int) -> Iterator[int]:
    """Numbers of slots, ascending from `least`, for which a slot exists that covers the sequence exactly."""
    for total in range(max(1, least), (seq_len + 1) // 2 + 1):
        if fits_slots(seq_len, 2 * -(-seq_len // (2 * total)), total):
            yield total


def slots_for(policy: str, seq_len: int, slot: int) -> int:
    """How many slots of a given size cover the sequence. Raises IllegalPolicy when no number does."""
    if slot < 2 or slot % 2:
        raise IllegalPolicy(f"policy {policy}: slot must be an even number of tokens, at least 2, got {slot}")
    total = -(-seq_len // slot)
    if not fits_slots(seq_len, slot, total):
        nearest = next(s for s in range(slot, 1, -2) if fits_slots(seq_len, s, -(-seq_len // s)))
        raise IllegalPolicy(
            f"policy {policy}: slots of {slot} tokens do not cover {seq_len} tokens, the last would be short by "
            f"{total * slot - seq_len}, more than its half; use a slot of {nearest}"
        )
    return total

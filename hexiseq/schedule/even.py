"""The even splits every published system makes: ring, Ulysses and their grids. Rivals, and seeds of the search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hexiseq.cost import Counts, Layout, make_layout
from hexiseq.plan import EXCHANGES, fits_slots
from hexiseq.workload import Workload

HEAD_FIRST, CONTEXT_FIRST = "head_first", "context_first"


class IllegalPolicy(ValueError):
    """A policy cannot run this job on these devices. The message names policy, value, limit and remedy."""


def lay_out(workload: Workload, counts: Counts, slot: int, fusion: int, exchange: str) -> Layout:
    """A replica of these groups for the workload."""
    model = workload.model
    return make_layout(counts, workload.seq_len, model.heads, model.kv_heads, slot, fusion, exchange,
                       workload.sequences)  # fmt: skip


def exchanges(layout: Layout, exchange: str | None) -> list[Layout]:
    """The layout with the exchange asked for; with each, its own first, where None leaves the choice open."""
    if exchange is None and len(layout.slots) == 1:
        return [layout]  # nothing crosses groups
    wanted = [exchange] if exchange else [layout.exchange, *(e for e in EXCHANGES if e != layout.exchange)]
    return [layout if e == layout.exchange else layout.crossing(exchange=e) for e in wanted]


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
    ranks: int,
    width: int,
    slot: int | None = None,
    placement: str = HEAD_FIRST,
) -> Layout:
    """Equal groups of `width` ranks, equal tokens and heads, one replica.

    Args:
        placement: ``head_first``, groups of consecutive ranks; ``context_first``, consecutive ranks follow one another
            on the ring.

    Raises:
        IllegalPolicy: heads do not divide, or the sequence is too short.
    """
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
    model, slots = workload.model, np.array(per_group)
    held = slots * slot
    held[0] -= held.sum() - workload.seq_len
    home, member = np.repeat(np.arange(groups), width), np.tile(np.arange(width), groups)
    first = member * (model.heads // width)
    return Layout(
        workload.seq_len, model.heads, model.kv_heads, slot, 1, "ring", workload.sequences, slots, home,
        ranks=np.arange(ranks) if placement == HEAD_FIRST else member * groups + home,
        tokens=held[home] // width + (member < held[home] % width),
        first=first,
        last=first + model.heads // width,
    )  # fmt: skip


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

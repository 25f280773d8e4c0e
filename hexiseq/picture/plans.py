"""The picture of a plan: who owns which tokens and query heads, how full memory is, how busy each device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from hexiseq.picture.canvas import (
    BAND,
    FAINT,
    LIMIT,
    LINE_INCHES,
    PALETTE,
    Boxes,
    Page,
    bare,
    bars,
    column_inches,
    drawing,
)
from hexiseq.picture.rows import Row, kinds_of, node_class, rows, runs
from hexiseq.plan import Interval, Plan

EACH = 64  # ranks drawn one by one
MOST = 32  # rows when they are not
_SIDE, _GAP = 0.15, 0.16
_NOTE_CHARACTERS = 170


def plan_page(plan: Plan, *, model: str, busy: Sequence[float] | None, note: str) -> Page:
    """Draw a plan on a page of its own.

    Args:
        model: its name, for the title.
        busy: by rank, the share of a step it computes; None leaves that column out.
        note: a line under the title.
    """
    found = rows(plan, kinds_of(plan), each=EACH, most=MOST)
    shown, rest = found[:EACH], found[EACH:]
    counts: dict[str, int] = {}
    for device in plan.devices:
        counts[device.type] = counts.get(device.type, 0) + 1
    colours = {kind: PALETTE[i % len(PALETTE)] for i, kind in enumerate(counts)}
    labels, notes = _labels(plan, shown), _excluded(plan)
    if rest:
        notes = [f"... and {sum(row.devices for row in rest):,} devices in replicas of other kinds", *notes]
    texts = column_inches(labels)
    pitch = 0.2 if len(shown) > MOST else 0.24
    with drawing():
        lanes = _lanes(plan, shown, busy)
        width = 2 * _SIDE + sum(texts) + sum(lane.inches + lane.tail + _GAP for lane in lanes)
        what = f"{plan.policy}: {model}{', ' if model else ''}{plan.seq_len:,} tokens"
        titles = [f"{what} on {plan.world_size:,} devices", _summary(plan), *([note] if note else [])]
        head = LINE_INCHES * len(titles) + 0.62
        body = pitch * len(shown)
        page = Page(width, head + body + 0.32 + LINE_INCHES * len(notes))
        page.titles(_SIDE, titles)
        page.legend(_SIDE, head - 0.33, [(f"{n:,} {kind}", colours[kind]) for kind, n in counts.items()])
        _background(page.axes(_SIDE, head, width - 2 * _SIDE, body), shown)

        left = _SIDE + 0.04
        for column, space in zip(zip(*labels, strict=True), texts, strict=True):
            if space:
                page.text(left, head - 0.1, column[0], color=FAINT)
                page.column(left, head, pitch, [text if text != above or column[0] != "node" else ""
                                                for above, text in itertools.pairwise(column)])  # fmt: skip
            left += space
        for lane in lanes:
            axes = page.axes(left, head, lane.inches, body)
            axes.set_ylim(len(shown), 0)
            axes.patch.set_visible(False)
            bare(axes)
            _draw(axes, lane, [colours[row.type] for row in shown])
            page.text(left, head - 0.1, lane.title, color=FAINT)
            page.column(left + lane.inches + 0.06, head, pitch, lane.values)
            left += lane.inches + lane.tail + _GAP
        page.column(_SIDE, head + body + 0.26, LINE_INCHES, notes, color=FAINT)
    return page


@dataclass(frozen=True)
class _Lane:
    """A column of bars.

    Attributes:
        parts: of each row, from where to where there are bars.
        values: written behind each row.
        end, ticks: of the axis.
        limits: behind gauges, how far each row's could go.
        inches, tail: of the bars and of the values behind them.
    """

    title: str
    parts: Sequence[Sequence[tuple[float, float]]]
    values: Sequence[str]
    end: float
    ticks: Sequence[str]
    inches: float
    limits: Sequence[float] = ()

    @property
    def tail(self) -> float:
        return column_inches([[value] for value in self.values])[0]


def _lanes(plan: Plan, shown: Sequence[Row], busy: Sequence[float] | None) -> list[_Lane]:
    def each(row: Row, least: str, most: str, unit: str = "") -> str:
        span = least if least == most else f"{least}-{most}"
        return f"{span}{unit}{' each' if len(row.ranks) > 1 else ''}"

    tokens, heads = [], []
    for row in shown:
        shares = [100 * sum(b - a for a, b in owned) / plan.seq_len for owned in row.tokens]
        tokens.append(each(row, f"{min(shares):.3g}", f"{max(shares):.3g}", "%"))
        counts = [b - a for a, b in row.heads]
        heads.append(each(row, str(min(counts)), str(max(counts))))
    intervals = [[interval for owned in row.tokens for interval in owned] for row in shown]
    lanes = [
        _Lane("tokens of the sequence", [_apart(row, plan.seq_len) for row in intervals], tokens, plan.seq_len,
              _thousands(plan.seq_len), 4.4),
        _Lane("query heads in the group", [_apart(row.heads, plan.num_heads) for row in shown], heads, plan.num_heads,
              _thousands(plan.num_heads), 2.2),
    ]  # fmt: skip
    if plan.predicted:
        used = [max(plan.predicted.memory_gb[rank] for rank in row.ranks) for row in shown]
        limits = [min(plan.predicted.memory_limit_gb[rank] for rank in row.ranks) for row in shown]
        values = [f"{a:.3g} / {b:.3g} GB" for a, b in zip(used, limits, strict=True)]
        most = max(limits)
        lanes.append(_Lane("memory (grey: limit)", [[(0.0, gb)] for gb in used], values, most,
                           ["0", f"{most / 2:.3g}", f"{most:.3g} GB"], 1.5, limits))  # fmt: skip
    if busy is not None:
        means = [sum(busy[rank] for rank in row.ranks) / len(row.ranks) for row in shown]
        lanes.append(_Lane("computing", [[(0.0, share)] for share in means], [f"{share:.0%}" for share in means], 1.0,
                           ["0", "", "100%"], 1.1, [1.0] * len(shown)))  # fmt: skip
    return lanes


def _apart(intervals: Sequence[Interval], end: int) -> list[tuple[float, float]]:
    """Bars with a hair of white between neighbours, where there is room for it."""
    hair = end / 600
    return [(a, b - hair if b - a > 4 * hair else b) for a, b in sorted(set(intervals)) if b > a]


def _draw(axes: Axes, lane: _Lane, colours: Sequence[str]) -> None:
    margin = 0.24 if lane.limits else 0.14
    bars(axes, [(0, limit, y + 0.1, y + 0.9) for y, limit in enumerate(lane.limits)], LIMIT)
    boxes: dict[str, Boxes] = {}
    for y, (parts, colour) in enumerate(zip(lane.parts, colours, strict=True)):
        boxes.setdefault(colour, []).extend((a, b, y + margin, y + 1 - margin) for a, b in parts)
    for colour, found in boxes.items():
        bars(axes, found, colour)
    axes.set_xlim(0, lane.end)
    axes.set_xticks([0, lane.end / 2, lane.end], lane.ticks)
    # Those at the ends must not run into the next lane's.
    first, _, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")


def _thousands(end: int) -> list[str]:
    return ["0", f"{end / 2:,.0f}" if end % 2 == 0 else "", f"{end:,}"]


def _background(axes: Axes, shown: Sequence[Row]) -> None:
    """A band for every other node, a line between groups of one node."""
    axes.set_xlim(0, 1)
    axes.set_ylim(len(shown), 0)
    axes.axis("off")
    starts = [0, *(y for y, (above, below) in enumerate(itertools.pairwise(shown), 1) if _node(above) != _node(below))]
    bands = zip(starts, [*starts[1:], len(shown)], strict=True)
    bars(axes, [(0, 1, start, end) for n, (start, end) in enumerate(bands) if n % 2 == 0], BAND)
    for y, (above, below) in enumerate(itertools.pairwise(shown), 1):
        if y not in starts and (above.replica, above.groups) != (below.replica, below.groups):
            axes.axhline(y, color=LIMIT, linewidth=0.6)


def _node(row: Row) -> tuple[int, str]:
    return (row.kind if row.replicas > 1 else 0), row.node


def _labels(plan: Plan, shown: Sequence[Row]) -> list[list[str]]:
    """Columns of text with their headers; columns that say nothing are empty."""
    alone = all(row.devices == 1 for row in shown)
    replicas = len(plan.replicas) > 1
    found = [["node", "rank" if alone else "ranks", "device", "replica" if replicas else "", "group"]]
    for row in shown:
        more = " ..." if row.replicas > 1 else ""
        found.append([
            row.node + more,
            runs(row.ranks) + more,
            row.type if alone else f"{len(row.ranks)} {row.type}",
            (f"{row.replicas} alike" if row.replicas > 1 else str(row.replica)) if replicas else "",
            runs(row.groups),
        ])  # fmt: skip
    return found


def _summary(plan: Plan) -> str:
    parts = []
    if plan.predicted:
        parts.append(f"predicted {plan.predicted.step_seconds:.3g} s a step, "
                     f"{plan.predicted.tokens_per_second:,.0f} tokens/s")  # fmt: skip
    if plan.gap is not None:
        parts.append(f"{plan.gap:.1%} above the bound")
    if len(plan.replicas) > 1:
        parts.append(f"{len(plan.replicas)} replicas, {plan.sequences} sequences at a time")
    return "; ".join([*parts, f"exchange {plan.exchange}", f"recompute {plan.recompute}", plan.dtype])


def _excluded(plan: Plan) -> list[str]:
    counts: dict[tuple[str, str, str], int] = {}
    for device in plan.excluded:
        key = (device.type, node_class(device.node), device.reason)
        counts[key] = counts.get(key, 0) + 1
    lines = [f"left out: {count} x {kind} on {node}: {reason}" for (kind, node, reason), count in counts.items()]
    lines = [line if len(line) <= _NOTE_CHARACTERS else f"{line[: _NOTE_CHARACTERS - 3]}..." for line in lines]
    return lines if len(lines) <= 6 else [*lines[:5], f"... and {len(lines) - 5} more kinds of devices left out"]

"""The picture of a layer: what every rank computes, exchanges and waits for, predicted and measured."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from hexiseq.picture.canvas import (
    BAND,
    FAINT,
    FONT,
    LINE_INCHES,
    PALETTE,
    Boxes,
    Page,
    bare,
    bars,
    column_inches,
    drawing,
)
from hexiseq.picture.timeline import PASSES, Bar, Lane, Timeline

_COLOURS = {
    "matrices and other kernels": PALETTE[0],
    "attention": PALETTE[4],
    "exchange": PALETTE[1],
    "wait": "#D9D9D9",
    "KV on its way": PALETTE[5],
}
_SIDE, _PITCH, _GAP, _INCHES = 0.15, 0.24, 0.3, 8.6
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def timeline_page(timelines: Sequence[Timeline]) -> Page:
    """Draw timelines below one another; the first one's title is the page's.

    All are on the same scale, unless they are of different things: then each has its own.
    """
    labels = column_inches([[lane.label] for timeline in timelines for lane in timeline.lanes])[0]
    with drawing():
        head = 0.62
        blocks = [LINE_INCHES + 0.2 + _PITCH * len(timeline.lanes) + 0.34 for timeline in timelines]
        page = Page(2 * _SIDE + labels + _INCHES + _GAP + 0.6, head + sum(blocks))
        page.titles(_SIDE, [timelines[0].title])
        page.legend(_SIDE, 0.43, _COLOURS.items())
        lengths = [{name: _length(timeline, name) for name in PASSES} for timeline in timelines]
        shared = all(timeline.comparable for timeline in timelines)
        top = head
        for timeline, own, block in zip(timelines, lengths, blocks, strict=True):
            spans = {name: max(length[name] for length in lengths) if shared else own[name] for name in PASSES}
            _block(page, top, labels, timeline, spans)
            top += block
    return page


def _length(timeline: Timeline, name: str) -> float:
    return max((bar[3] for lane in timeline.lanes for bar in getattr(lane, name)), default=0.0)


def _block(page: Page, top: float, labels: float, timeline: Timeline, spans: dict[str, float]) -> None:
    page.text(_SIDE, top + LINE_INCHES / 2, timeline.source, fontweight="bold")
    top += LINE_INCHES
    body = _PITCH * len(timeline.lanes)
    total = sum(spans.values()) or 1.0
    left = _SIDE + labels
    page.column(_SIDE, top + 0.2, _PITCH, [lane.label for lane in timeline.lanes])
    for name in PASSES:
        inches = _INCHES * spans[name] / total
        if inches:
            axes = page.axes(left, top + 0.2, inches, body)
            page.text(left, top + 0.1, name, color=FAINT)
            _draw(axes, [getattr(lane, name) for lane in timeline.lanes])
            _scale(axes, spans[name], inches)
        left += inches + (_GAP if name == PASSES[0] else 0.06)
    page.text(left, top + 0.1, "computing", color=FAINT)
    page.column(left, top + 0.2, _PITCH, [_computing(timeline, lane) for lane in timeline.lanes])


def _draw(axes: Axes, lanes: Sequence[Sequence[Bar]]) -> None:
    axes.set_ylim(len(lanes), 0)
    axes.set_facecolor(BAND)
    bare(axes)
    boxes: dict[str, Boxes] = {name: [] for name in _COLOURS}
    for y, lane in enumerate(lanes):
        for kind, name, start, end in lane:
            if kind == "travel":
                boxes["KV on its way"].append((start, end, y + 0.84, y + 0.94))
            else:
                boxes[_shown(kind, name)].append((start, end, y + 0.12, y + 0.8))
    for name, found in boxes.items():
        bars(axes, found, _COLOURS[name])


def _shown(kind: str, name: str) -> str:
    if kind == "compute":
        return "attention" if "attention" in name else "matrices and other kernels"
    return kind


def _scale(axes: Axes, seconds: float, inches: float) -> None:
    unit, name = next(((unit, name) for unit, name in _UNITS if seconds >= unit), _UNITS[-1])
    axes.set_xlim(0, seconds)
    axes.locator_params(axis="x", nbins=max(1, int(inches / 1.1)))
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= seconds]
    labels = [f"{tick / unit:.4g}" for tick in ticks]
    axes.set_xticks(ticks, [*labels[:-1], f"{labels[-1]} {name}"])
    axes.tick_params(labelsize=FONT - 0.5)


def _computing(timeline: Timeline, lane: Lane) -> str:
    total = sum(_length(timeline, name) for name in PASSES)
    busy = sum(end - start for name in PASSES for kind, _, start, end in getattr(lane, name) if kind == "compute")
    return f"{busy / total:.0%}" if total else ""

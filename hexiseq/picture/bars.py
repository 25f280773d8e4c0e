"""The jobs of a sweep side by side: tokens per second, predicted, simulated and measured."""

from __future__ import annotations

from hexiseq.picture.canvas import ALARM, BAND, FAINT, FONT, PALETTE, Page, bare, bars, column_inches, drawing
from hexiseq.picture.comparison import Comparison

_SIDE, _PITCH, _GAP, _INCHES = 0.15, 0.26, 0.2, 3.2


def comparison_page(comparison: Comparison) -> Page:
    """A row for each job, a lane for each way to know its speed, coloured by policy."""
    policies = list(dict.fromkeys(comparison.policies))
    colours = [PALETTE[policies.index(policy) % len(PALETTE)] for policy in comparison.policies]
    labels = column_inches([[label] for label in comparison.labels])[0] + 0.1
    lanes = comparison.lanes or {"tokens/s": [None] * len(comparison.labels)}
    most = {name: max((value for value in values if value), default=1.0) for name, values in lanes.items()}
    if comparison.alike:
        most = dict.fromkeys(most, max(most.values()))
    head, body = 0.66, _PITCH * len(comparison.labels)
    with drawing():
        page = Page(2 * _SIDE + labels + len(lanes) * (_INCHES + 0.8 + _GAP), head + body + 0.3)
        page.titles(_SIDE, [comparison.title])
        page.column(_SIDE, head, _PITCH, comparison.labels)
        left = _SIDE + labels
        for i, (name, values) in enumerate(lanes.items()):
            axes = page.axes(left, head, _INCHES, body)
            axes.set_ylim(len(values), 0)
            axes.set_xlim(0, most[name])
            axes.set_facecolor(BAND)
            bare(axes)
            axes.locator_params(axis="x", nbins=3)
            axes.set_xticks(ticks := [tick for tick in axes.get_xticks() if tick <= most[name]],
                            [f"{tick:,.10g}" for tick in ticks])  # fmt: skip
            for y, (value, colour) in enumerate(zip(values, colours, strict=True)):
                bars(axes, [(0.0, value or 0.0, y + 0.16, y + 0.84)], colour)
            page.text(left, head - 0.12, name, color=FAINT)
            page.column(left + _INCHES + 0.06, head, _PITCH, [f"{value:,.0f}" if value else "" for value in values])
            if not i:
                page.column(left + 0.08, head, _PITCH, comparison.problems, color=ALARM, fontsize=FONT)
            left += _INCHES + 0.8 + _GAP
    return page

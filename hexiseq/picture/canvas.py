"""What the pictures share: colours, a page measured in inches, SVG text that repeats."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

# Okabe and Ito's colours, told apart with every kind of colour vision.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#777777")
LIMIT, INK, FAINT, BAND, ALARM = "#E3E3E3", "#1A1A1A", "#5F5F5F", "#F6F6F6", "#B33A00"
FONT = 8.0
CHARACTER_INCHES = 0.068  # of text in `FONT`, with room to spare
LINE_INCHES = 0.18
# The same file for the same picture; text stays text, so that files are small and can be searched.
_STYLE: Any = {
    "svg.hashsalt": "hexiseq",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": FONT,
    "axes.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # names of models and nodes are no formulas
    "path.simplify": False,
}

Boxes = list[tuple[float, float, float, float]]  # left, right, top, bottom


class Page:
    """A figure whose axes and texts are placed in inches from its top left corner. Use it inside `drawing`."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        bottom = self.height - top - height
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)

    def text(self, left: float, top: float, text: str, **style: Any) -> None:
        if text:
            style = {"va": "center", "ha": "left", **style}
            self.figure.text(left / self.width, 1 - top / self.height, text, **style)

    def column(self, left: float, top: float, pitch: float, texts: Sequence[str], **style: Any) -> None:
        """Texts below one another, each in the middle of its row."""
        for y, text in enumerate(texts):
            self.text(left, top + pitch * (y + 0.5), text, **style)

    def titles(self, left: float, lines: Sequence[str]) -> None:
        """What it is, the figures, and what one must know besides."""
        self.text(left, 0.17, lines[0], fontsize=FONT + 3, fontweight="bold")
        for y, (line, colour) in enumerate(zip(lines[1:], (INK, ALARM), strict=False)):
            self.text(left, 0.4 + LINE_INCHES * y, line, color=colour)

    def legend(self, left: float, top: float, entries: Iterable[tuple[str, str]]) -> None:
        """Coloured squares with their names, in a line."""
        axes = self.axes(left, top - 0.07, self.width - left, 0.14)
        axes.set_xlim(0, self.width - left)
        axes.set_ylim(0, 1)
        axes.axis("off")
        x = 0.0
        for name, colour in entries:
            bars(axes, [(x, x + 0.14, 0.0, 1.0)], colour)
            self.text(left + x + 0.2, top, name)
            x += 0.42 + len(name) * CHARACTER_INCHES

    def svg(self) -> str:
        """SVG text: the same for the same page on every day."""
        FigureCanvasSVG(self.figure)
        out = io.StringIO()
        with drawing():
            # A key that is None is left out.
            self.figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        text = re.sub(r"<!--.*?-->\n?", "", out.getvalue(), flags=re.DOTALL)
        # A hundredth of a point is enough.
        text = re.sub(r'="[^"]*"', lambda value: re.sub(r"(\d\.\d\d)\d+", r"\1", value[0]), text)
        # Where the font is missing, one that is no wider.
        return text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, Arial, sans-serif")


def drawing() -> AbstractContextManager[None]:
    """The settings that pages are made and written with."""
    return matplotlib.rc_context(_STYLE)


def bars(axes: Axes, boxes: Iterable[tuple[float, float, float, float]], colour: str) -> None:
    """Boxes of one colour, as one path; see `Boxes`."""
    corners = [((a, t), (b, t), (b, u), (a, u), (a, t)) for a, b, t, u in boxes if b > a]
    if corners:
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(corners)
        outline = Path(np.array(corners).reshape(-1, 2), codes)
        axes.add_patch(PathPatch(outline, facecolor=colour, linewidth=0))


def bare(axes: Axes) -> None:
    """An axis at the bottom alone."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(left=False, labelleft=False, length=2.5, width=0.6, labelsize=FONT - 0.5, colors=FAINT, pad=2)


def column_inches(cells: Sequence[Sequence[str]]) -> list[float]:
    """How wide each column of a table of texts is; 0 where all are empty."""
    longest = (max(map(len, column)) for column in zip(*cells, strict=True))
    return [0.12 + CHARACTER_INCHES * length if length else 0.0 for length in longest]

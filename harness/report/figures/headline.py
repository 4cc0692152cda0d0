"""The figure for a front page: what privacy costs, a row for each task, a mark for each contestant, light and dark. The
only one that Matplotlib draws: `dpbench findings` makes it, no report does."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.analysis.naming import factor
from harness.report.figures import looks
from harness.report.figures.looks import Look

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "dpbench",
}
TICKS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
ROW, MARK, LINE = 0.14, 0.105, 0.15
"""Inches of a row without marks, of each mark in it, and of each line of its title."""
FIGURE_WIDTH = 1.35
"""A mark's figure reaches so many times as far as the end of its interval."""
LABEL = 24
"""Letters of a task's title in one line."""


@dataclass(frozen=True)
class Mark:
    """``ratio``: seconds over those of PyTorch without DP, ``low`` and ``high`` its 95 % interval, NaN where too few
    rounds were paired for one. ``own``: a contestant of this repository."""

    name: str
    look: Look
    ratio: float
    own: bool
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Part:
    """Tasks that were measured together. ``rows``: title of a task and its marks, the fastest first; ``note``: how they
    were measured; ``place``: where and when."""

    heading: str
    rows: Sequence[tuple[str, Sequence[Mark]]]
    note: str
    place: str = ""

    @property
    def height(self) -> float:
        """Return the inches that its rows take."""
        return sum(_height(title, marks) for title, marks in self.rows)


def _height(title: str, marks: Sequence[Mark]) -> float:
    return ROW + max(MARK * len(marks), LINE * len(textwrap.wrap(title, LABEL)))


@dataclass(frozen=True)
class Theme:
    """``band``: what lies behind every second row."""

    text: str
    quiet: str
    band: str
    dark: bool

    def colour(self, mark: Mark) -> str:
        """Return the colour of a contestant's mark on this page."""
        return looks.light(mark.look.colour) if self.dark else str(mark.look.colour)


THEMES = {
    "": Theme(text="#1B1F24", quiet="#57606A", band="#8A94A01E", dark=False),
    "dark": Theme(text="#E8EBEF", quiet="#A9B2BC", band="#8A94A02A", dark=True),
}
"""Suffix of the file -> theme. None has a background: the page's shines through."""


def draw(title: str, parts: Sequence[Part], theme: Theme) -> Figure:
    """Draw the figure: parts below each other on one scale, with letters that can still be read at half its width.

    Args:
        title: One line above all parts.
        parts: What is shown.
        theme: Colours.
    """
    heights = [part.height for part in parts]
    figure = Figure(figsize=(7.4, sum(heights) + 1.0 * len(parts) + 1.1), layout="constrained")
    figure.patch.set_alpha(0)
    grid = figure.subplots(len(parts), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})
    marks = [mark for part in parts for _, row in part.rows for mark in row]
    low = min(1.0, *(mark.ratio if math.isnan(mark.low) else mark.low for mark in marks)) / FIGURE_WIDTH
    high = max(1.0, *(mark.ratio if math.isnan(mark.high) else mark.high for mark in marks)) * 1.7
    below = [*parts[1:], None]
    for axes, part, other in zip(grid.flat, parts, below, strict=True):
        _part(axes, part, theme, is_said_below=other is not None and other.note == part.note)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], color=theme.text)
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.tick_params(length=0, labelbottom=True)
    seen = {mark.name: mark for mark in sorted(marks, key=lambda mark: not mark.own)}
    figure.legend(
        handles=[_handle(mark, theme) for mark in seen.values()],
        loc="outside upper left",
        ncols=3,
        frameon=False,
        labelcolor=theme.text,
        title=f"{title}\n",
        title_fontproperties={"size": 12, "weight": "bold"},
        alignment="left",
    ).get_title().set_color(theme.text)
    return figure


def _part(axes: Axes, part: Part, theme: Theme, is_said_below: bool) -> None:
    axes.set_title(part.heading, loc="left", fontsize=10.5, fontweight="bold", color=theme.text, pad=18)
    axes.annotate(part.place, (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8, color=theme.quiet)
    places, top = [], 0.0
    for number, (title, marks) in enumerate(part.rows):
        height = _height(title, marks)
        if number % 2 == 0:
            axes.axhspan(top, top + height, color=theme.band, linewidth=0)
        for k, mark in enumerate(marks):
            y = top + (height - MARK * len(marks)) / 2 + MARK * (k + 0.5)
            if not math.isnan(mark.low):
                axes.plot([mark.low, mark.high], [y, y], color=theme.colour(mark), linewidth=1.3)
            axes.add_line(_handle(mark, theme, mark.ratio, y))
            low, end = (mark.ratio, mark.ratio) if math.isnan(mark.high) else (mark.low, mark.high)
            before = end < 1.0 < end * FIGURE_WIDTH  # else the dotted line runs through the figure
            axes.annotate(
                f"{factor(mark.ratio)}",
                (low if before else end, y),
                (-5 if before else 5, 0),
                textcoords="offset points",
                ha="right" if before else "left",
                va="center",
                fontsize=7.5,
                color=theme.text if mark.own else theme.quiet,
                fontweight="bold" if mark.own else "normal",
            )
        places.append(top + height / 2)
        top += height
    axes.axvline(1.0, color=theme.text, linestyle=(0, (2, 2)), linewidth=1.0)
    axes.set_ylim(top, 0)
    axes.set_yticks(places, [textwrap.fill(title, LABEL) for title, _ in part.rows], color=theme.text)
    axes.spines["bottom"].set_color(theme.quiet)
    axes.patch.set_alpha(0)
    if not is_said_below:
        axes.set_xlabel(textwrap.fill(part.note, 92), loc="left", fontsize=8, color=theme.quiet)


def _handle(mark: Mark, theme: Theme, x: float = math.nan, y: float = math.nan) -> Line2D:
    colour = theme.colour(mark)
    return Line2D(
        [x],
        [y],
        color=colour,
        linestyle="",
        marker=mark.look.marker,
        fillstyle=mark.look.fill,
        markersize=6.5 if mark.own else 5.5,
        markerfacecoloralt="none",
        label=mark.name,
    )

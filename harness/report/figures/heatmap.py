"""More contestants than lines can be told apart: a grid of numbers, a row each, the darker the slower."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from harness.report.figures import looks

MOST_LINES = 8
"""Lines that can still be told apart; there are as many colours."""
ROW, ROW_WITH_INTERVAL = 0.19, 0.27
"""Inches."""
LONGEST = 40
"""Letters of a title that fit beside a grid."""
SLOWEST = 32.0
"""Factor from which on all squares are equally dark."""
SHADES = colormaps["YlOrBr"]
EMPTY = (0.95, 0.95, 0.95, 1.0)
WHITE_FROM = 0.6
"""Share of the scale from which on letters are white."""


@dataclass(frozen=True)
class HeatmapCell:
    """``text`` with ``interval`` in small letters below it; ``factor`` sets the shade, None: there is no number."""

    text: str
    factor: float | None = None
    interval: str = ""


Squares = Mapping[tuple[str, int], HeatmapCell]


def row_height(squares: Squares) -> float:
    """Inches that a row needs."""
    return ROW_WITH_INTERVAL if any(square.interval for square in squares.values()) else ROW


def draw(
    axes: Axes, names: Sequence[str], sizes: Sequence[int], squares: Squares, title: Callable[[str], str] = str
) -> None:
    """Row per name, shown by its title, column per batch size; a place without a square says so."""
    shade = LogNorm(1.0, SLOWEST, clip=True)
    colours = np.full((len(names), len(sizes), 4), EMPTY)
    for y, name in enumerate(names):
        for x, size in enumerate(sizes):
            square = squares.get((name, size), HeatmapCell("–"))
            depth = None if square.factor is None else float(shade(square.factor))
            if depth is not None:
                colours[y, x] = SHADES(0.9 * depth)
            ink = "#555555" if depth is None else "white" if depth >= WHITE_FROM else "black"
            style = "italic" if depth is None else "normal"
            raised = 0.17 if square.interval else 0.0
            _write(axes, x, y - raised, square.text, 7, color=ink, style=style)
            if square.interval:
                _write(axes, x, y + 0.24, square.interval, 5, color=ink)
    axes.imshow(colours, aspect="auto")
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(names)), [textwrap.shorten(title(name), LONGEST, placeholder="…") for name in names])
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        if looks.is_own(name):
            label.set_fontweight("bold")
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_xticks(np.arange(0.5, len(sizes) - 1), minor=True)
    axes.set_yticks(np.arange(0.5, len(names) - 1), minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color="white", linewidth=1.0)
    axes.spines[:].set_visible(False)


def _write(axes: Axes, x: float, y: float, text: str, size: float, **look: Any) -> None:
    # Clipped, though it never reaches the edge: the layout then does not measure every one of some hundred texts.
    axes.text(x, y, text, ha="center", va="center", fontsize=size, clip_on=True, **look)

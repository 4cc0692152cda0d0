"""Heat map for more contestants than lines can be told apart: a row of numbers each, the darker the slower."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.report.figures import looks
from harness.report.figures.drawing import Drawing, Style, width

MOST_LINES = 8
"""Lines that can still be told apart; there are as many colours."""
ROW, ROW_WITH_INTERVAL = 13.7, 19.4
"""Points."""
LONGEST = 40
"""Letters of a title that fit beside a grid."""
SLOWEST = 32.0
"""Factor from which on all squares are equally dark."""
SHADES = ("ffffe5", "fff7bc", "fee391", "fec44f", "fe9929", "ec7014", "cc4c02", "993404", "662506")
"""ColorBrewer's YlOrBr, which keeps its order for colour-blind eyes and on a grey printer."""
EMPTY = "#f2f2f2"
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
    """Return how many points a row needs."""
    return ROW_WITH_INTERVAL if any(square.interval for square in squares.values()) else ROW


def names_width(names: Sequence[str], title: Callable[[str], str]) -> float:
    """Return how many points the names beside a grid need."""
    return max(width(_short(title(name)), 8, _weight(name)) for name in names)


def draw(
    drawing: Drawing,
    left: float,
    top: float,
    right: float,
    names: Sequence[str],
    sizes: Sequence[int],
    squares: Squares,
    title: Callable[[str], str] = str,
) -> float:
    """Draw a row per name, shown by its title, and a column per batch size; a place without a square says so.

    Returns:
        Where the grid ends, its batch sizes included.
    """
    row, column = row_height(squares), (right - left) / len(sizes)
    for y, name in enumerate(names):
        above = top + y * row
        drawing.write(left - 5, above + row / 2 + 3, _short(title(name)), 8, anchor="end", style=_weight(name))
        for x, size in enumerate(sizes):
            square = squares.get((name, size), HeatmapCell("–"))
            depth = None if square.factor is None else depth_of(square.factor)
            beside = left + x * column
            colour = EMPTY if depth is None else shade(depth)
            drawing.rectangle(beside + 0.5, above + 0.5, beside + column - 0.5, above + row - 0.5, colour)
            ink = "#555555" if depth is None else "#ffffff" if depth >= WHITE_FROM else "#000000"
            style: Style = "italic" if depth is None else "normal"
            middle = above + row * (0.33 if square.interval else 0.5) + 2.6
            drawing.write(beside + column / 2, middle, square.text, 7, ink, "middle", style)
            if square.interval:
                drawing.write(beside + column / 2, above + row * 0.74 + 1.9, square.interval, 5, ink, "middle")
    for x, size in enumerate(sizes):
        drawing.write(left + (x + 0.5) * column, top + len(names) * row + 10, str(size), anchor="middle")
    return top + len(names) * row + 12


def depth_of(factor: float) -> float:
    """Return the share of the scale at which a factor stands: 0 up to 1, 1 from :data:`SLOWEST` on."""
    return min(1.0, max(0.0, math.log(factor) / math.log(SLOWEST)))


def shade(depth: float) -> str:
    """Return the colour at a share of the scale."""
    place = 0.9 * depth * (len(SHADES) - 1)
    first = min(int(place), len(SHADES) - 2)
    share = place - first
    lighter, darker = (bytes.fromhex(colour) for colour in SHADES[first : first + 2])
    return "#" + bytes(round(a * (1 - share) + b * share) for a, b in zip(lighter, darker, strict=True)).hex()


def _short(title: str) -> str:
    return textwrap.shorten(title, LONGEST, placeholder="…")


def _weight(name: str) -> Style:
    return "bold" if looks.is_own(name) else "normal"

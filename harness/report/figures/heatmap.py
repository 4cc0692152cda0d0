"""Heat map for more contestants than lines can be told apart: a row of numbers each, the darker the slower."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from harness.report.figures import looks
from harness.report.figures.panel import SMALL, Spec, layer

MOST_LINES = 8
"""Lines that can still be told apart; there are as many colours."""
ROW, ROW_WITH_INTERVAL, WIDTH = 18, 26, 400
"""Pixels: heights of a row, and what all columns take."""
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


def grid(
    names: Sequence[str],
    sizes: Sequence[int],
    squares: Squares,
    title: Callable[[str], str] = str,
    plain: Container[str] = (),
    above: str = "",
) -> Spec:
    """Return a row per name, shown by its title, and a column per batch size; a place without a square says so.
    ``plain``: names whose titles are in italics; ``above``: what stands above the grid."""
    shown = {name: textwrap.shorten(title(name), LONGEST, placeholder="…") for name in names}
    rows = []
    for name, size in itertools.product(names, sizes):
        square = squares.get((name, size), HeatmapCell("–"))
        depth = None if square.factor is None else depth_of(square.factor)
        ink = "#555555" if depth is None else "#ffffff" if depth >= WHITE_FROM else "#000000"
        place = {"row": shown[name], "size": str(size), "colour": EMPTY if depth is None else shade(depth), "ink": ink}
        rows.append({**place, "text": square.text, "interval": square.interval})
    has_intervals = any(row["interval"] for row in rows)
    styles = {"Weight": ("bold", looks.is_own), "Style": ("italic", plain.__contains__)}
    label = {
        f"labelFont{what}": {
            "condition": {"test": f"indexof({json.dumps([shown[n] for n in names if holds(n)])}, datum.value) >= 0"}
            | {"value": value},
            "value": "normal",
        }
        for what, (value, holds) in styles.items()
    }
    bare = {"title": None, "ticks": False, "domain": False, "grid": False}
    x: Spec = {"field": "size", "type": "nominal", "sort": [*map(str, sizes)]}
    x["axis"] = {**bare, "title": "batch size", "labelAngle": 0, "orient": "bottom"}
    y: Spec = {"field": "row", "type": "nominal", "sort": list(shown.values()), "axis": {**bare, **label}}
    words: Spec = {"type": "text", "fontSize": SMALL}
    return {
        "title": {"text": above, "anchor": "start", "fontSize": 12, "fontWeight": "normal"},
        "width": WIDTH,
        "height": {"step": ROW_WITH_INTERVAL if has_intervals else ROW},
        "layer": [
            layer(rows, {"type": "rect", "stroke": "#ffffff"}, x, y, color="colour"),
            layer(rows, {**words, "dy": -4 if has_intervals else 0}, x, y, text="text", color="ink"),
            layer(rows, {**words, "dy": 7, "fontSize": 7}, x, y, text="interval", color="ink"),
        ][: 3 if has_intervals else 2],
    }


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

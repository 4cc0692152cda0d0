"""A chart of a few curves on two logarithmic axes, as SVG: dpcore needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 420, 380
"""Pixels: narrow as a telephone, where its letters stay readable."""
_EDGE, _LEFT, _RIGHT, _TOP, _BOTTOM = 13, 70, 30, 46, 56
COLOURS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#475569", "#be185d")


@dataclass(frozen=True, eq=False)
class Curve:
    """``y`` over ``x``, both above 0, and how the line is drawn; ``dashes`` as in SVG."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    dashes: str = ""


@dataclass(frozen=True)
class Axis:
    """A label, how numbers are written, and the powers of ten at the ends."""

    label: str
    first: int
    last: int
    shown: Callable[[float], str] = "{:g}".format

    @classmethod
    def around(cls, label: str, values: np.ndarray) -> Axis:
        """Return an axis from the power of ten below all values to that above."""
        low, high = math.log10(float(np.min(values))), math.log10(float(np.max(values)))
        return cls(label, math.floor(low), max(math.ceil(high), math.floor(low) + 1))

    @property
    def ticks(self) -> list[float]:
        return [10.0**k for k in range(self.first, self.last + 1)]

    def place(self, value: float, start: float, end: float) -> float:
        """Return where a value stands between the places of the first and the last power; cut off at both."""
        part = (math.log10(max(value, 1e-300)) - self.first) / (self.last - self.first)
        return round(start + (end - start) * min(max(part, 0.0), 1.0), 1)


def chart(title: str, subtitle: str, x: Axis, y: Axis, curves: Sequence[Curve]) -> str:
    """Return the SVG of the curves, with their names in the upper left corner."""
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
    columns, rows = [x.place(t, left, right) for t in x.ticks], [y.place(t, bottom, top) for t in y.ticks]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(_EDGE, 20, title, size=14),
        _text(_EDGE, 37, subtitle, fill="#555"),
        *(_line(at, bottom, at, top) for at in columns),
        *(_line(left, at, right, at) for at in rows),
        *(_text(at, bottom + 18, x.shown(t), anchor="middle") for at, t in zip(columns, x.ticks, strict=True)),
        *(_text(left - 6, at + 4, y.shown(t), anchor="end") for at, t in zip(rows, y.ticks, strict=True)),
        _text((left + right) / 2, HEIGHT - 14, x.label, anchor="middle"),
        f'<g transform="translate({_EDGE} {(top + bottom) / 2}) rotate(-90)">',
        f"{_text(0, 0, y.label, anchor='middle')}</g>",
    ]
    for k, curve in enumerate(curves):
        points = " ".join(
            f"{x.place(a, left, right)},{y.place(b, bottom, top)}" for a, b in zip(curve.x, curve.y, strict=True)
        )
        style = f'stroke="{curve.colour}" stroke-width="2.5" stroke-dasharray="{curve.dashes}"'
        parts += [f'<polyline points="{points}" fill="none" {style}/>']
        at = top + 20 + 19 * k
        parts += [f'<line x1="{left + 14}" y1="{at}" x2="{left + 44}" y2="{at}" {style}/>']
        parts += [_text(left + 52, at + 4, curve.name)]
    return "\n".join([*parts, "</svg>"])


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#ddd"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, fill: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(words)}</text>'

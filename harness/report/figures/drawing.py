"""A page of lines, shapes and text in printer's points, written as SVG with letters as outlines.

Matplotlib lays a figure of some hundred texts out in a second; this needs a hundredth of it, because the outline and
width of every letter are looked up once.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]
Style = Literal["normal", "bold", "italic"]
FILES: Mapping[Style, str] = {"normal": "DejaVuSans", "bold": "DejaVuSans-Bold", "italic": "DejaVuSans-Oblique"}
EM = 512
"""Units of an outline per size of the letter: whole numbers keep files small, and are finer than any printer."""
HALVES: Mapping[str, tuple[float, float]] = {"left": (1, 0), "right": (-1, 0), "top": (0, 1), "bottom": (0, -1)}
"""Which half of a marker is filled -> the direction that points out of it (y downwards)."""


@dataclass(frozen=True)
class Text:
    """One line. ``x``, ``y``: its anchor on the baseline; ``turned``: it reads upwards."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: Anchor
    style: Style
    turned: bool = False


@dataclass(frozen=True)
class Mark:
    """A point's shape, named by a letter as in framework.toml. ``fill``: full, none, or the half that is filled."""

    x: float
    y: float
    shape: str
    size: float
    colour: str
    fill: str = "full"


@dataclass(frozen=True)
class Curve:
    """Points that are joined; ``dash``: lengths of strokes and gaps, none for a full line."""

    points: tuple[Point, ...]
    colour: str
    width: float
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Area:
    """A filled polygon."""

    points: tuple[Point, ...]
    colour: str
    opacity: float = 1.0


Item = Text | Mark | Curve | Area


@dataclass
class Drawing:
    """A figure's items in order: later ones lie above earlier ones. Both lengths are in points."""

    width: float
    height: float = 0.0
    items: list[Item] = field(default_factory=list)

    @property
    def texts(self) -> list[Text]:
        """All texts, in order."""
        return [item for item in self.items if isinstance(item, Text)]

    @property
    def marks(self) -> list[Mark]:
        """All markers, in order."""
        return [item for item in self.items if isinstance(item, Mark)]

    @property
    def curves(self) -> list[Curve]:
        """All lines, in order."""
        return [item for item in self.items if isinstance(item, Curve)]

    @property
    def areas(self) -> list[Area]:
        """All filled shapes, in order."""
        return [item for item in self.items if isinstance(item, Area)]

    def write(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 8,
        colour: str = "#000000",
        anchor: Anchor = "start",
        style: Style = "normal",
        turned: bool = False,
    ) -> None:
        """Add one line of text; ``y`` is its baseline."""
        self.items.append(Text(x, y, text, size, colour, anchor, style, turned))

    def curve(self, points: Iterable[Point], colour: str, width: float, dash: Sequence[float] = ()) -> None:
        """Add a line through ``points``."""
        self.items.append(Curve(tuple(points), colour, width, tuple(dash)))

    def rectangle(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        """Add a filled rectangle."""
        self.items.append(Area(((left, top), (right, top), (right, bottom), (left, bottom)), colour))

    def svg(self, title: str = "", description: str = "", reuse: bool = True) -> str:
        """Return the drawing as SVG on white.

        Args:
            title: What it shows.
            description: Where it comes from.
            reuse: Whether letters are defined once and referred to, which keeps the file small. Programs that draw it
                are faster without.
        """
        glyphs: dict[tuple[Style, str], str] = {}
        parts = [_element(item, glyphs if reuse else None) for item in self.items]
        defined = "".join(f'<path id="{name}" d="M0 0{outline(*glyph)}"/>' for glyph, name in glyphs.items())
        size = f"{_number(self.width)} {_number(self.height)}"
        width, height = size.split()
        return "".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}pt" height="{height}pt" viewBox="0 0 {size}" ',
                f'role="img"><title>{escape(title)}</title><desc>{escape(description)}</desc>',
                f"<defs>{defined}</defs>" if defined else "",
                f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n',
                "\n".join(parts),
                "</svg>\n",
            )
        )


def width(text: str, size: float, style: Style = "normal") -> float:
    """Return how wide a line of text is, in points."""
    return sum(advance(style, letter) for letter in text) * size / EM


@cache
def _font(style: Style) -> tuple[Any, Mapping[int, str], float]:
    """Return (glyphs, code of a letter -> name of its glyph, units of the font per unit of ours)."""
    from fontTools.ttLib import TTFont

    # The font that Matplotlib brings along; importing it would cost more than all figures do.
    package = importlib.util.find_spec("matplotlib")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("matplotlib is not installed; its fonts are needed for figures")
    file = Path(package.submodule_search_locations[0], "mpl-data", "fonts", "ttf", f"{FILES[style]}.ttf")
    font = TTFont(file, lazy=True)
    font.setGlyphOrder([f"glyph{i}" for i in range(font["maxp"].numGlyphs)])  # reading the font's own names takes long
    return font.getGlyphSet(), font.getBestCmap(), EM / font["head"].unitsPerEm


@cache
def outline(style: Style, letter: str) -> str:
    """Return the outline of a letter as an SVG path in units of ``EM``, y upwards, relative to where the pen stands."""
    from fontTools.pens.basePen import decomposeQuadraticSegment
    from fontTools.pens.recordingPen import DecomposingRecordingPen

    glyphs, names, scale = _font(style)
    pen = DecomposingRecordingPen(glyphs)
    glyphs[names.get(ord(letter), ".notdef")].draw(pen)
    x, y, start, parts = 0, 0, (0, 0), []

    def to(command: str, *points: tuple[float, float]) -> None:
        nonlocal x, y
        placed = [(round(px * scale), round(py * scale)) for px, py in points]
        parts.append(command + " ".join(f"{px - x} {py - y}" for px, py in placed))
        x, y = placed[-1]

    for command, points in pen.value:
        if command == "moveTo":
            to("m", *points)
            start = (x, y)
        elif command == "lineTo":
            to("l", *points)
        elif command == "qCurveTo":
            for curve in decomposeQuadraticSegment(points):
                to("q", *curve)
        else:
            parts.append("z")
            x, y = start
    return "".join(parts)


@cache
def advance(style: Style, letter: str) -> float:
    """Return the width of a letter in units of ``EM``."""
    glyphs, names, scale = _font(style)
    return float(glyphs[names.get(ord(letter), ".notdef")].width * scale)


def _element(item: Item, glyphs: dict[tuple[Style, str], str] | None) -> str:
    if isinstance(item, Text):
        return _text(item, glyphs)
    if isinstance(item, Mark):
        return _mark(item)
    if isinstance(item, Area):
        opacity = "" if item.opacity == 1 else f' fill-opacity="{item.opacity:g}"'
        return f'<path d="{_path(item.points)}Z" fill="{item.colour}"{opacity}/>'
    dash = f' stroke-dasharray="{" ".join(map(_number, item.dash))}"' if item.dash else ""
    stroke = f'stroke="{item.colour}" stroke-width="{_number(item.width)}"'
    return f'<path d="{_path(item.points)}" fill="none" {stroke}{dash}/>'


def _text(item: Text, glyphs: dict[tuple[Style, str], str] | None) -> str:
    at = {"start": 0.0, "middle": 0.5, "end": 1.0}[item.anchor] * width(item.text, item.size, item.style)
    turned = " rotate(-90)" if item.turned else ""
    scale = f"{item.size / EM:.6f}"
    place = f"translate({_number(item.x)} {_number(item.y)}){turned} translate({_number(-at)} 0)"
    transform = f'transform="{place} scale({scale} -{scale})" fill="{item.colour}"'
    x, parts = 0.0, []
    for letter in item.text:
        if glyphs is None:
            parts.append(f"M{round(x)} 0{outline(item.style, letter)}")
        elif outline(item.style, letter):
            name = glyphs.setdefault((item.style, letter), f"g{len(glyphs)}")
            parts.append(f'<use href="#{name}" x="{round(x)}"/>')
        x += advance(item.style, letter)
    if glyphs is None:
        return f'<path d="{"".join(parts)}" {transform}/>'
    return f'<g aria-label="{escape(item.text, {chr(34): "&quot;"})}" {transform}>{"".join(parts)}</g>'


def _mark(item: Mark) -> str:
    points = [(item.x + x * item.size / 2, item.y + y * item.size / 2) for x, y in SHAPES.get(item.shape, SHAPES["o"])]
    if item.shape in STROKES:
        joined = (points[i : i + 2] for i in range(0, len(points), 2))
        return f'<path d="{"".join(map(_path, joined))}" fill="none" stroke="{item.colour}" stroke-width="1.2"/>'
    inside = item.colour if item.fill == "full" else "#ffffff"
    outer = f'<path d="{_path(points)}Z" fill="{inside}" stroke="{item.colour}" stroke-width="0.9"/>'
    if item.fill not in HALVES:
        return outer
    half = _half(points, (item.x, item.y), HALVES[item.fill])
    return f'{outer}<path d="{_path(half)}Z" fill="{item.colour}"/>'


def _half(points: Sequence[Point], middle: Point, out: tuple[float, float]) -> list[Point]:
    """Return the part of a polygon that lies behind a line through ``middle``; ``out`` points away from it."""
    found: list[Point] = []
    depth = [(x - middle[0]) * out[0] + (y - middle[1]) * out[1] for x, y in points]
    for i, (x, y) in enumerate(points):
        (before_x, before_y), before = points[i - 1], depth[i - 1]
        if before * depth[i] < 0:
            share = before / (before - depth[i])
            found.append((before_x + share * (x - before_x), before_y + share * (y - before_y)))
        if depth[i] <= 0:
            found.append((x, y))
    return found


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(value: float) -> str:
    return re.sub(r"\.?0+$", "", f"{value:.2f}") if "." in f"{value:.2f}" else f"{value:.2f}"


def _polygon(corners: int, turn: float = 0.0, inner: float = 1.0) -> list[Point]:
    """Return a regular polygon or, with ``inner`` below 1, a star, within a circle of radius 1; one corner is on
    top."""
    steps = corners if inner == 1.0 else 2 * corners
    radius = [1.0 if inner == 1.0 or i % 2 == 0 else inner for i in range(steps)]
    angle = [2 * math.pi * i / steps + math.radians(turn) for i in range(steps)]
    return [(r * math.sin(a), -r * math.cos(a)) for r, a in zip(radius, angle, strict=True)]


_PLUS = [(-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35), (1, 0.35), (0.35, 0.35)]
_PLUS += [(-x, -y) for x, y in _PLUS]
SHAPES: Mapping[str, Sequence[Point]] = {
    "o": _polygon(24),
    "s": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "D": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
    "d": [(0, -1.2), (0.75, 0), (0, 1.2), (-0.75, 0)],
    "^": [(0, -1.1), (1.05, 0.9), (-1.05, 0.9)],
    "v": [(0, 1.1), (-1.05, -0.9), (1.05, -0.9)],
    "<": [(-1.1, 0), (0.9, -1.05), (0.9, 1.05)],
    ">": [(1.1, 0), (-0.9, 1.05), (-0.9, -1.05)],
    "P": _PLUS,
    "X": [((x - y) * math.sqrt(0.5), (x + y) * math.sqrt(0.5)) for x, y in _PLUS],
    "h": _polygon(6),
    "H": _polygon(6, 30),
    "p": _polygon(5),
    "8": _polygon(8, 22.5),
    "*": _polygon(5, 0, 0.45),
    "x": [(-0.9, -0.9), (0.9, 0.9), (-0.9, 0.9), (0.9, -0.9)],
    "_": [(-1.2, 0), (1.2, 0)],
}
"""Letter of a marker -> its corners, y downwards, or the ends of its strokes."""
STROKES = "x_"

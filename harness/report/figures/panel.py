"""Panels with two axes as Vega-Lite specifications; the title above them, and the legend and the notes below."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report.figures import looks
from harness.report.figures.looks import Look

Spec = dict[str, Any]
PAGE = 624.0
"""Pixels: the text width of a printed page (165 mm), 96 to the inch."""
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
"""Three names of letters of one width: what is laid out here fits wherever it is shown."""
LETTER, SMALL = 10.5, 9.5
"""Pixels: sizes of labels, and of notes and of names inside of a panel."""
TITLE_LETTERS, NOTE_LETTERS = 84, 96
"""Letters in a line of a figure's title and of its notes."""
GRID, EDGE, FAINT = "#dddddd", "#333333", "#6E7378"
CONFIG: Spec = {
    "font": FONT,
    "view": {"stroke": None},
    "axis": {"labelFontSize": LETTER, "titleFontSize": LETTER, "titleFontWeight": "normal", "labelLimit": 300}
    | {"gridColor": GRID, "domainColor": EDGE, "tickColor": EDGE, "labelOverlap": False},
}

Ticks = Sequence[tuple[float, str]]
"""Values of an axis with their labels; an empty label is a line of the grid alone."""


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``, logarithmic or straight. ``grid``: whether its ticks have a line."""

    low: float
    high: float
    log: bool = True
    ticks: Ticks = ()
    title: str = ""
    grid: bool = True

    def holds(self, value: float) -> bool:
        """Return whether a value lies on the axis."""
        return min(self.low, self.high) <= value <= max(self.low, self.high)

    def channel(self, name: str) -> Spec:
        """Return the encoding of a field by this axis."""
        values, labels = [float(value) for value, _ in self.ticks], [label for _, label in self.ticks]
        shown = f"{json.dumps(labels, ensure_ascii=False)}[indexof({json.dumps(values)}, datum.value)]"
        axis = {"values": values, "labelExpr": shown, "title": self.title or None, "grid": self.grid}
        kind = "log" if self.log else "linear"
        scale = {"type": kind, "domain": [float(self.low), float(self.high)], "nice": False, "zero": False}
        return {"field": name, "type": "quantitative", "scale": scale, "axis": axis if values else None}


@dataclass
class Panel:
    """Holds what lies between two axes; later points lie above earlier ones. ``title``: its lines."""

    x: Axis
    y: Axis
    width: float
    height: float
    title: Sequence[str] = ()
    lines: list[Spec] = field(default_factory=list)
    bars: list[Spec] = field(default_factory=list)
    marks: list[Spec] = field(default_factory=list)
    texts: list[Spec] = field(default_factory=list)
    bands: list[Spec] = field(default_factory=list)
    pieces: int = 0

    def curve(self, xs: Sequence[float], ys: Sequence[float], look: Look, thickness: float = 1.6) -> None:
        """Join points in the look's line, broken where a value is missing."""
        for x, y in zip(xs, ys, strict=True) if look.line else ():
            if math.isnan(y):
                self.pieces += 1
                continue
            drawn = {"piece": self.pieces, "colour": str(look.colour), "dash": looks.DASHES[look.line]}
            self.lines.append({"x": float(x), "y": float(y), "thickness": thickness, **drawn})
        self.pieces += 1

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], look: Look) -> None:
        """Fill what lies between two curves."""
        made = ({"x": float(x), "y": float(a), "y2": float(b)} for x, a, b in zip(xs, lows, highs, strict=True))
        self.bands += [{**one, "piece": self.pieces, "colour": str(look.colour)} for one in made]
        self.pieces += 1

    def mark(self, x: float, y: float, look: Look, size: float = 34.0) -> None:
        """Draw a point. ``size``: square pixels."""
        self.marks.append({"x": float(x), "y": float(y), "size": size, **_drawn(look)})

    def bar(self, place: float, low: float, high: float, look: Look, across: bool = False) -> None:
        """Draw an interval, upwards or ``across``; an end beyond the axis is an arrow at its edge."""
        if math.isnan(low) or math.isnan(high):
            return
        place = float(place)
        axis = self.x if across else self.y
        first, last = (min(max(float(end), axis.low), axis.high) for end in (low, high))
        ends = {"x": first, "x2": last, "y": place, "y2": place} if across else {"y": first, "y2": last, "x": place}
        self.bars.append({"x2": place, **ends, "colour": str(look.colour)})
        for value, end, arrow in zip((low, high), (first, last), "<>" if across else "v^", strict=True):
            if not axis.holds(value):
                x, y = (end, place) if across else (place, end)
                self.mark(x, y, Look(look.colour, arrow, ""))

    def write(self, x: float, y: float, text: str, colour: str = FAINT, align: str = "center") -> None:
        """Write at a point."""
        self.texts.append({"x": float(x), "y": float(y), "text": text, "colour": colour, "align": align})

    def name(self, x: float, y: float, text: str) -> bool:
        """Write a name beside a grey line, which is in no legend; False where another name is in its place, for
        elsewhere it would name another line."""
        room = SMALL / self.height
        others = [text for text in self.texts if text["align"] == "right" and text["x"] == x]
        if any(abs(self._up(y) - self._up(other["y"])) < room for other in others):
            return False
        most = int((self.width - 4) / (0.5 * SMALL))
        self.write(x, y, text if len(text) <= most else text[: most - 1] + "…", align="right")
        return True

    def _up(self, y: float) -> float:
        return math.log(y / self.y.low) / math.log(self.y.high / self.y.low)

    def spec(self) -> Spec:
        """Return the panel."""
        x, y = self.x.channel("x"), self.y.channel("y")
        longest = max((len(label) for _, label in self.x.ticks), default=0)
        if (longest + 2) * len(self.x.ticks) * 0.55 * LETTER > self.width:
            x["axis"]["labelAngle"] = -90
        line = {"color": "colour", "detail": "piece", "strokeDash": "dash", "strokeWidth": "thickness"}
        beside = [text for text in self.texts if text["align"] == "right"]
        above = [text for text in self.texts if text["align"] != "right"]
        layers = (
            layer(self.bands, {"type": "area", "opacity": 0.18}, x, y, y2="y2", color="colour", detail="piece"),
            layer(self.lines, {"type": "line"}, x, y, **line),
            layer(self.bars, {"type": "rule"}, x, y, x2="x2", y2="y2", color="colour"),
            layer(self.marks, {"type": "point", "opacity": 1}, x, y, **SHAPE, size="size"),
            layer(beside, {**WORDS, "align": "right", "dx": -3, "dy": -7}, x, y, text="text", color="colour"),
            layer(above, {**WORDS, "align": "center"}, x, y, text="text", color="colour"),
        )
        title = {"text": list(self.title), "anchor": "start", "frame": "group", "fontSize": 12, "fontWeight": "normal"}
        size = {"width": self.width, "height": self.height, **({"title": title} if any(self.title) else {})}
        shown = [one for one in layers if one["data"]["values"]]
        return {**size, "layer": shown or [layer([{}], {"type": "point", "opacity": 0}, x, y)]}


WORDS: Spec = {"type": "text", "fontSize": SMALL}
SHAPE = {"stroke": "colour", "fill": "fill", "shape": "shape"}
"""Channels of a point, and the fields that they show."""


def layer(rows: Sequence[Spec], mark: Spec, x: Spec, y: Spec, **fields: str) -> Spec:
    """Return a layer of rows, whose looks stand in them and need no scale. ``fields``: channel -> field."""
    own: Spec = {channel: {"field": name, "type": "nominal", "scale": None} for channel, name in fields.items()}
    own |= {channel: {"field": fields[channel]} for channel in ("x2", "y2", "detail", "text") if channel in fields}
    return {"data": {"values": list(rows)}, "mark": mark, "encoding": {"x": x, "y": y, **own}}


def page(title: str, panels: Sequence[Spec], notes: Sequence[str], style: Mapping[str, Look], columns: int = 1) -> Spec:
    """Return a figure: its title, the panels in so many columns, the legend (name -> look), the notes."""
    lines = textwrap.wrap(title, TITLE_LETTERS)
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": lines, "anchor": "start", "fontSize": 12, "fontWeight": "bold"},
        "background": "#ffffff",
        "config": CONFIG,
        "vconcat": [
            {"concat": list(panels), "columns": columns},
            *([_legend(style)] if style else []),
            _written(notes),
        ],
        "spacing": 8,
        "align": "none",
    }


LEGEND_COLUMNS, LEGEND_ROW, NOTE_ROW, HANDLE = 4, 16.0, 12.0, 34.0
"""The most columns of the legend; pixels of its rows, of a line of the notes, and of an entry's line and gap."""


def _legend(style: Mapping[str, Look]) -> Spec:
    """Return the legend (name -> look), placed by pixels."""
    widest = HANDLE + 0.62 * LETTER * max(map(len, style), default=0)
    columns = max(1, min(LEGEND_COLUMNS, len(style), int(PAGE / widest)))
    rows = math.ceil(len(style) / columns)
    entries = []
    for i, (name, look) in enumerate(style.items()):
        left, y = PAGE / columns * (i // rows), LEGEND_ROW * (i % rows + 0.5)
        ends = {"begin": left, "middle": left + 13, "end": left + 26, "behind": left + HANDLE, "y": y, "text": name}
        entries.append({**ends, **_drawn(look), "dash": looks.DASHES.get(look.line)})
    joined = [entry for entry in entries if entry["dash"]]
    across, down = Axis(0, PAGE, log=False), Axis(LEGEND_ROW * rows, 0, log=False).channel("y")
    layers = (
        layer(joined, {"type": "rule"}, across.channel("begin"), down, x2="end", color="colour", strokeDash="dash"),
        layer(entries, {"type": "point", "opacity": 1, "size": 34}, across.channel("middle"), down, **SHAPE),
        layer(entries, {**WORDS, "align": "left", "fontSize": LETTER}, across.channel("behind"), down, text="text"),
    )
    shown = [one for one in layers if one["data"]["values"]]
    return {"width": PAGE, "height": LEGEND_ROW * rows, "layer": shown}


def _drawn(look: Look) -> Spec:
    return {"shape": looks.SHAPES[look.marker], "colour": str(look.colour), "fill": looks.inside(look)}


def _written(notes: Sequence[str]) -> Spec:
    lines = [line for note in notes for line in textwrap.wrap(note, NOTE_LETTERS)]
    rows = [{"x": 0.0, "y": NOTE_ROW * (i + 0.5), "text": line} for i, line in enumerate(lines)]
    height = NOTE_ROW * len(lines)
    across, down = Axis(0, PAGE, log=False).channel("x"), Axis(height, 0, log=False).channel("y")
    mark = {**WORDS, "align": "left", "color": "#444444"}
    return {"width": PAGE, "height": height, "layer": [layer(rows, mark, across, down, text="text")]}


def over_sizes(
    panel: Panel,
    sizes: Sequence[int],
    shown: Mapping[int, tuple[float, float, float]],
    look: Look,
    sideways: float = 1.0,
    label: str = "",
) -> None:
    """Draw points over batch size with their bars, joined where neighbouring sizes were measured.

    Args:
        panel: Where; a bar that leaves it ends in an arrow.
        sizes: Batch sizes of the figure; the line breaks at those that ``shown`` lacks.
        shown: Batch size -> value, low, high; NaN for an end that is not known.
        look: Colour, marker and line.
        sideways: Factor by which the points are shifted, so that contestants do not hide each other.
        label: Written beside the last point where the look is grey, which is in no legend.
    """
    points = [(size * sideways, *shown.get(size, (math.nan,) * 3)) for size in sizes]
    panel.curve([x for x, *_ in points], [value for _, value, *_ in points], look)
    known = [point for point in points if not math.isnan(point[1])]
    for x, value, low, high in known:
        panel.bar(x, low, high, look)
        panel.mark(x, value, look)
    if label and known and look.colour == looks.GREY:
        panel.name(known[-1][0], known[-1][1], label)


def around(values: Iterable[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis of these points, whatever their intervals: those that leave it end in an
    arrow. It has no place for a zero."""
    shown = [value for value in values if value > 0] or [1.0]
    return min(shown) / 1.35, max(shown) * 1.35


def of_sizes(sizes: Sequence[int], title: str) -> Axis:
    """Return a logarithmic axis of batch sizes, a tick for each, with room beside the outer ones."""
    return Axis(min(sizes) / 1.6, max(sizes) * 1.6, ticks=[(float(size), str(size)) for size in sizes], title=title)


def plain(ends: tuple[float, float], title: str) -> Axis:
    """Return a logarithmic axis of plain numbers between these ends."""
    return Axis(*ends, ticks=plain_ticks(*ends), title=title)


def factors(ends: tuple[float, float], title: str, grid: bool = True) -> Axis:
    """Return a logarithmic axis of factors between these ends."""
    return Axis(*ends, ticks=factor_ticks(*ends), title=title, grid=grid)


def plain_ticks(low: float, high: float) -> Ticks:
    """Return ticks of a logarithmic axis in plain numbers. Under two decades the powers of ten alone would label it
    once or never, so 2 and 5 are labelled too; under one decade, every digit; where even those are few, steps as on a
    straight axis."""
    span = high / low
    if span < 3:
        return [(value, f"{value:g}") for value in _steps(low, high)]
    digits = (1, *range(2, 10)) if span < 6 else (1, 2, 5) if span < 100 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = 1 + (last - first) // 8
    found = [
        (digit * 10.0**power, f"{digit * 10.0**power:g}" if digit in digits and power % every == 0 else "")
        for power in range(first, last + 1)
        for digit in range(1, 10)
    ]
    return [(value, label) for value, label in found if low <= value <= high]


def _steps(low: float, high: float) -> list[float]:
    """Round values from low to high, four to eight of them."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * share for share in (1, 2, 2.5, 5, 10) if power * share >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


BESIDE_ONE = 0.15
"""Share of an axis of factors, from which on a side of its 1 has a tick of its own."""


def factor_ticks(low: float, high: float) -> Ticks:
    """Return powers of two. Where fewer than three of them are in sight, or a side of 1 would have none, halves between
    them, else steps as on a straight axis: an axis of factors between 0.7 and 1.4 has more than its 1."""
    if not 0.0 < low < high < math.inf:
        return []
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = 1 + (last - first) // 9
    powers = [2.0**power for power in range(first, last + 1) if power % step == 0]
    halves = [share * power for power in powers for share in (1.0, 1.5)]
    sides = [(low, min(1.0, high)), (max(1.0, low), high)]
    wide = [(a, b) for a, b in sides if b > a and math.log(b / a) > BESIDE_ONE * math.log(high / low)]
    found: list[float] = []
    for values in (powers, halves, _steps(low, high)):
        found = [value for value in values if low <= value <= high]
        if len(found) >= 3 and all(any(a <= value <= b and value != 1.0 for value in found) for a, b in wide):
            break
    return [(value, f"{value:g}×") for value in found]

"""Panels with two axes on a drawing; the title above them, and the legend and the notes below."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.report.figures import looks
from harness.report.figures.drawing import Drawing, Mark, Point, width
from harness.report.figures.looks import Look

PAGE = 468.0
"""Points: the text width of a printed page, so that 8-point letters are printed as 8 points."""
GRID, EDGE, FAINT = "#dddddd", "#333333", "#6E7378"
MARKER, NAME = 4.5, 6.0
"""Points: sizes of a marker and of the letters of a name inside of a panel."""
DASHES: Mapping[str, tuple[float, ...]] = {"-": (), "--": (4.5, 2), "-.": (6, 2, 1.2, 2), ":": (1.3, 2)}
TITLE_ROOM = 18.0
"""Points above the first panel."""

Ticks = Sequence[tuple[float, str]]
"""Values of an axis with their labels; an empty label is a line of the grid alone."""


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, logarithmic or straight."""

    low: float
    high: float
    log: bool = True

    def at(self, value: float) -> float:
        """Return where a value lies, 0 at the low end and 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def holds(self, value: float) -> bool:
        """Return whether a value lies on the axis."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Panel:
    """A rectangle of a drawing with an axis to the right and one upwards. Lengths are in points."""

    drawing: Drawing
    left: float
    top: float
    right: float
    bottom: float
    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> Point:
        """Return the place of a value on the page."""
        across, up = self.x.at(x), self.y.at(y)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def frame(
        self,
        x_ticks: Ticks,
        y_ticks: Ticks,
        title: Sequence[str] = (),
        x_label: str = "",
        y_label: str = "",
        grid: str = "xy",
    ) -> None:
        """Draw grid, axes, labels and the title, in lines, above the panel; the drawing reaches below them all.
        ``grid``: the axes whose ticks have a line."""
        turned = self._is_crowded(x_ticks)
        for value, label in x_ticks:
            x = self.at(value, self.y.low)[0]
            if "x" in grid:
                self.drawing.curve(((x, self.top), (x, self.bottom)), GRID, 0.5)
            if turned:
                self.drawing.write(x + 3, self.bottom + 5 + width(label, 8), label, turned=True)
            else:
                self.drawing.write(x, self.bottom + 10, label, anchor="middle")
        for value, label in y_ticks:
            y = self.at(self.x.low, value)[1]
            if "y" in grid:
                colour, thickness = (GRID, 0.5) if label else ("#eeeeee", 0.3)
                self.drawing.curve(((self.left, y), (self.right, y)), colour, thickness)
            self.drawing.write(self.left - 4, y + 3, label, anchor="end")
        corner = ((self.left, self.top), (self.left, self.bottom), (self.right, self.bottom))
        self.drawing.curve(corner, EDGE, 0.8)
        for i, line in enumerate(reversed(title)):
            self.drawing.write(self.left, self.top - 5 - 11 * i, line, 9)
        below = 7 + max((width(label, 8) for _, label in x_ticks), default=0.0) if turned else 12.0
        if x_label:
            below += 10
            self.drawing.write((self.left + self.right) / 2, self.bottom + below, x_label, anchor="middle")
        self.drawing.height = max(self.drawing.height, self.bottom + below + 8)
        if y_label:
            beside = max((width(label, 8) for _, label in y_ticks), default=0.0) + 9
            middle = (self.top + self.bottom) / 2
            self.drawing.write(self.left - beside, middle, y_label, anchor="middle", turned=True)

    def _is_crowded(self, x_ticks: Ticks) -> bool:
        """Return whether labels side by side would touch."""
        ends = [(self.at(value, self.y.low)[0], width(label, 8)) for value, label in x_ticks if label]
        near = any(b - a < (left + right) / 2 + 3 for (a, left), (b, right) in itertools.pairwise(ends))
        return near or sum(long + 5 for _, long in ends) > self.right - self.left

    def curve(self, xs: Sequence[float], ys: Sequence[float], look: Look, thickness: float = 1.2) -> None:
        """Join points in the look's line, broken where a value is missing."""
        if not look.line:
            return
        part: list[Point] = []
        for x, y in [*zip(xs, ys, strict=True), (math.nan, math.nan)]:
            if not math.isnan(y):
                part.append(self.at(x, y))
                continue
            if len(part) > 1:
                self.drawing.curve(part, str(look.colour), thickness, DASHES[look.line])
            part = []

    def mark(self, x: float, y: float, look: Look, size: float = MARKER) -> None:
        """Draw a point."""
        self.drawing.items.append(Mark(*self.at(x, y), look.marker, size, str(look.colour), look.fill))

    def bar(self, place: float, low: float, high: float, look: Look, across: bool = False) -> None:
        """Draw an interval, upwards or ``across``; an end beyond the axis is an arrow at its edge."""
        if math.isnan(low) or math.isnan(high):
            return
        colour, axis = str(look.colour), self.x if across else self.y
        thickness, cap, arrows, size = (0.8, 1.5, "<>", 3) if across else (1.0, 2.5, "v^", MARKER)
        ends = [min(max(value, axis.low), axis.high) for value in (low, high)]
        points = [(end, place) if across else (place, end) for end in ends]
        self.drawing.curve([self.at(*point) for point in points], colour, thickness)
        for value, point, arrow in zip((low, high), points, arrows, strict=True):
            x, y = self.at(*point)
            if axis.holds(value):
                ticks = ((x, y - cap), (x, y + cap)) if across else ((x - cap, y), (x + cap, y))
                self.drawing.curve(ticks, colour, thickness)
            else:
                self.mark(*point, Look(colour, arrow, ""), size)

    def name(self, x: float, y: float, text: str) -> bool:
        """Write a name beside a grey line, which is in no legend, inside of the panel; False where another name is in
        its place, for elsewhere it would name another line."""
        across, up = self.at(x, y)
        while text and width(text, NAME) > across - 2 - self.left:
            text = text[:-2].rstrip("…") + "…" if len(text) > 2 else ""
        others = [item.y for item in self.drawing.texts if item.size == NAME and self.left < item.x < self.right]
        taken = [y for y in others if self.top < y < self.bottom]
        baseline = max(self.top + NAME, up - 4)
        if any(abs(y - baseline) < NAME for y in taken):
            return False
        self.drawing.write(across - 2, baseline, text, NAME, FAINT, anchor="end")
        return True


def page(title: str) -> Drawing:
    """Return an empty page with its title, in smaller letters where it would be wider than the page."""
    drawing = Drawing(PAGE, TITLE_ROOM)
    drawing.write(4, 12, title, min(9.0, 9.0 * (PAGE - 8) / width(title, 9, "bold")), style="bold")
    return drawing


def folded(text: str, room: float, size: float = 9) -> list[str]:
    """Return the text in lines that are at most ``room`` points wide, but for a word that is wider alone."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def lines(
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


def around(values: Sequence[float]) -> Scale:
    """Return a logarithmic axis of these points, whatever their intervals: those that leave it end in an arrow. It has
    no place for a zero."""
    shown = [value for value in values if value > 0] or [1.0]
    return Scale(min(shown) / 1.35, max(shown) * 1.35)


def of_sizes(sizes: Sequence[int]) -> Scale:
    """Return a logarithmic axis of batch sizes with room beside the outer ones."""
    return Scale(min(sizes) / 1.6, max(sizes) * 1.6)


def size_ticks(sizes: Sequence[int]) -> Ticks:
    """Return a tick for every batch size."""
    return [(float(size), str(size)) for size in sizes]


def plain_ticks(scale: Scale) -> Ticks:
    """Return ticks of a logarithmic axis in plain numbers. Under two decades the powers of ten alone would label it
    once or never, so 2 and 5 are labelled too; under one decade, every digit; where even those are few, steps as on a
    straight axis."""
    span = scale.high / scale.low
    if span < 3:
        return [(value, f"{value:g}") for value in _steps(scale.low, scale.high)]
    digits = (1, *range(2, 10)) if span < 6 else (1, 2, 5) if span < 100 else (1,)
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    every = 1 + (last - first) // 8
    found = [
        (digit * 10.0**power, f"{digit * 10.0**power:g}" if digit in digits and power % every == 0 else "")
        for power in range(first, last + 1)
        for digit in range(1, 10)
    ]
    return [(value, label) for value, label in found if scale.holds(value)]


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


LEGEND_COLUMNS = 4
LEGEND_ROW, NOTE_ROW = 12.5, 9.0
LEGEND_HANDLE = 27.0
"""Points: a row of the legend, a line of the notes, the line and gaps of an entry."""


def legend_columns(widths: Sequence[float], room: float) -> int:
    """Return into how many columns entries of these widths fit, up to :data:`LEGEND_COLUMNS`. They are filled from top
    to bottom, the first ones by one entry more where they are not all full."""
    for columns in range(min(LEGEND_COLUMNS, len(widths)), 1, -1):
        if sum(float(column.max()) for column in np.array_split(widths, columns)) <= room:
            return columns
    return 1


def below(drawing: Drawing, notes: Sequence[str], style: Mapping[str, Look]) -> None:
    """Add the legend (name -> look) and the notes at the bottom; the drawing grows by the room that they take."""
    names = list(style)
    top = drawing.height
    widths = [LEGEND_HANDLE + 6 + width(name, 8) for name in names]
    columns = np.array_split(np.array(names, dtype=object), legend_columns(widths, PAGE)) if names else []
    x = 4.0
    for column in columns:
        for i, name in enumerate(column):
            y = top + 8 + LEGEND_ROW * i
            panel = Panel(drawing, x, y - 1, x + 20, y + 1, Scale(0, 1, log=False), Scale(0, 1, log=False))
            panel.curve((0, 1), (0.5, 0.5), style[name])
            panel.mark(0.5, 0.5, style[name])
            drawing.write(x + 24, y + 3, name)
        x += LEGEND_HANDLE + 6 + max(width(name, 8) for name in column)
    top += LEGEND_ROW * max(map(len, columns), default=0) + 4
    for i, line in enumerate(line for note in notes for line in textwrap.wrap(note, 118)):
        drawing.write(4, top + 8 + NOTE_ROW * i, line, 7, "#444444")
        drawing.height = top + 8 + NOTE_ROW * i + 5

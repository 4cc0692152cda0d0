"""The figure for a front page: what privacy costs at one batch size, a panel of bars per task, light and dark. The only
one that Matplotlib draws: `dpbench findings` makes it, no report does."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.analysis.naming import factor

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "svg.fonttype": "path",
    "svg.hashsalt": "dpbench",
}
LONGEST_BAR = 5.0
"""Ratio from which on a bar is cut and ends in an arrow: one slow framework must not squeeze all others."""
LABEL = 22
"""Letters of a name in one line."""
HEADING = 22
"""Letters of a panel's title in one line."""


@dataclass(frozen=True)
class Bar:
    """``ratio``: seconds over those of PyTorch without DP, ``low`` and ``high`` its 95 % interval, NaN where too few
    rounds were paired for one. ``own``: a contestant of this repository."""

    name: str
    ratio: float
    own: bool
    low: float = math.nan
    high: float = math.nan

    @property
    def end(self) -> float:
        """Where the bar or its interval ends."""
        return max(self.ratio, 0.0 if math.isnan(self.high) else self.high)


@dataclass(frozen=True)
class Theme:
    """``own`` and ``other``: colours of the bars."""

    text: str
    quiet: str
    own: str
    other: str


THEMES = {
    "": Theme(text="#1B1F24", quiet="#57606A", own="#D55E00", other="#A7AFB8"),
    "dark": Theme(text="#E8EBEF", quiet="#A9B2BC", own="#FF8A45", other="#5B646E"),
}
"""Suffix of the file -> theme. None has a background: the page's shines through."""


def draw(title: str, panels: Sequence[tuple[str, Sequence[Bar]]], note: str, theme: Theme) -> Figure:
    """Draw the figure, two panels side by side, with letters that can still be read at half its width.

    Args:
        title: One line above all panels.
        panels: Title of each panel and its bars, the fastest first.
        note: Where, when and how it was measured.
        theme: Colours.
    """
    lines = -(-len(panels) // 2)
    panels = [(textwrap.fill(heading, HEADING), bars) for heading, bars in panels]
    beside = [panels[2 * i : 2 * i + 2] for i in range(lines)]
    heights = [
        0.55 + 0.17 * max(heading.count("\n") for heading, _ in pair) + 0.3 * max(len(bars) for _, bars in pair)
        for pair in beside
    ]
    figure = Figure(figsize=(7.4, sum(heights) + 0.95), layout="constrained")
    figure.patch.set_alpha(0)
    grid = figure.subplots(lines, 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    longest = min(LONGEST_BAR, max(bar.end for _, bars in panels for bar in bars))
    for k, axes in enumerate(grid.flat):
        if k < len(panels):
            _panel(axes, *panels[k], longest, theme)
        else:
            axes.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=theme.text)
    figure.supxlabel(textwrap.fill(note, 105), x=0.01, ha="left", fontsize=8.5, color=theme.quiet)
    return figure


def _panel(axes: Axes, title: str, bars: Sequence[Bar], longest: float, theme: Theme) -> None:
    for y, bar in enumerate(bars):
        cut = bar.ratio > longest
        colour = theme.own if bar.own else theme.other
        axes.barh(y, min(bar.ratio, longest), height=0.68, color=colour)
        if not cut and not math.isnan(bar.low):
            axes.plot([bar.low, min(bar.high, longest)], [y, y], color=theme.text, linewidth=1.6)
        if cut:
            axes.plot(longest, y, marker=">", markersize=9, color=colour, clip_on=False)
        axes.annotate(
            f"{factor(bar.ratio)}×",
            # Beside the bar, but never across the line at 1.
            (max(1.0, min(longest if cut else bar.end, longest)), y),
            (9 if cut else 4, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color=theme.text,
            fontweight="bold" if bar.own else "normal",
        )
    axes.axvline(1.0, color=theme.text, linestyle=(0, (2, 2)), linewidth=1.0)
    axes.set_xlim(0, longest * 1.22)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_yticks(range(len(bars)), [textwrap.fill(bar.name, LABEL) for bar in bars], fontsize=9.5, linespacing=0.9)
    for label, bar in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_color(theme.text)
        label.set_fontweight("bold" if bar.own else "normal")
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    axes.patch.set_alpha(0)
    axes.set_title(title, loc="left", fontsize=10.5, color=theme.text, fontweight="bold")

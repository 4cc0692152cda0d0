"""Style and legend of the figures that Matplotlib draws, which are those of layers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from harness.report.figures import panel
from harness.report.figures.looks import Look

P = ParamSpec("P")

WIDTH = 6.5
"""Inches: the text width of a printed page, so that 8-point letters are printed as 8 points."""
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "dpbench",
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Make a function draw in the common style."""

    @wraps(draw)
    def drawn(*args: P.args, **named: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **named)

    return drawn


def log_values(axes: Axes) -> None:
    """A logarithmic y axis in plain numbers. Under two decades the powers of ten alone would label it once or never, so
    2 and 5 are labelled too; under one decade, every digit; where even those are few, steps as on a straight axis."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 3:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        return
    digits = "23456789" if high / low < 6 else "25" if high / low < 100 else ""

    def minor(value: float, _: int) -> str:
        return f"{value:g}" if f"{value:e}"[0] in digits else ""

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(minor))
    axes.tick_params(axis="y", which="minor", labelsize=8)
    axes.grid(which="minor", axis="y", linewidth=0.3, color="#e8e8e8")


LEGEND_ROW = 0.17
LEGEND_HANDLE, LEGEND_LETTER = 0.6, 0.062
"""Inches: a row; line, marker and gaps of an entry; a letter of its name."""


def legend_columns(names: Sequence[str]) -> int:
    """Return the columns that the figure has room for."""
    return panel.legend_columns([LEGEND_HANDLE + LEGEND_LETTER * len(name) for name in names], WIDTH)


def below(figure: Figure, where: str, notes: Sequence[str], names: Sequence[str], style: Mapping[str, Look]) -> None:
    """Below the figure: the legend (of ``names``), what the marks are, and ``where``: machine, rules, day and code.

    It lies outside of the figure's own area, so that any number of lines fits; saving crops around it all.
    """
    depth = 0.05
    if names:
        handles = [
            Line2D(
                [],
                [],
                color=style[n].colour,
                marker=style[n].marker,
                fillstyle=style[n].fill,
                linestyle=style[n].line,
                markersize=4,
                label=n,
            )
            for n in names
        ]
        columns = legend_columns(names)
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.0, 0.0),
            ncols=columns,
            frameon=False,
            borderpad=0.2,
            labelspacing=0.3,
        )
        depth += 0.05 + LEGEND_ROW * -(-len(names) // columns)
    text = [*notes, where]
    lines = [line for part in text for line in textwrap.wrap(part, 118)]
    y = -depth / figure.get_size_inches()[1]
    figure.text(0.01, y, "\n".join(lines), ha="left", va="top", fontsize=7, color="#444444")

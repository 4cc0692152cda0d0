"""Figures of layers, made with Matplotlib. Every one stands alone: units, machine,
day, n."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from harness.analysis import layer_frames, stats
from harness.analysis.layer_frames import MEGABYTE
from harness.analysis.naming import number
from harness.layers import LAYERS
from harness.report import model
from harness.report.figures import axes as shared
from harness.report.figures import looks
from harness.report.figures.axes import WIDTH, styled
from harness.report.figures.looks import MARKERS, PALETTE, Fill, Look

GREY = "#888888"
OWN = {"pytorch": "torch.nn", "opacus": "Opacus", "dpcore": "dpcore"}


QUANTITIES = {"runtime": "runtime", "memory": "peak memory"}


def _measured(frame: pd.DataFrame) -> list[str]:
    """The quantities of which there are factors: no empty panel where a run counted no memory."""
    return [what for what in QUANTITIES if frame[what].notna().any()] or ["runtime"]


@styled
def factors(contestant: str, passes: str, frame: pd.DataFrame, where: str) -> Figure:
    """Runtime (top) and memory (bottom) over torch.nn by layer, batch sizes side by side; the paper's in grey."""
    mine = frame[(frame.contestant == contestant) & (frame.passes == passes)]
    names = [name for name in LAYERS if name in set(mine.layer)]
    sizes = sorted(mine.batch_size.unique())
    whats = _measured(mine)
    figure = Figure(figsize=(WIDTH, 1.6 + 1.5 * len(whats)), layout="constrained")
    panels = figure.subplots(len(whats), 1, sharex=True, squeeze=False)[:, 0]
    shades = _shades(sizes)
    with_paper = False
    for axes, what in zip(panels, whats, strict=True):
        old = layer_frames.published(what).set_index(["layer", "batch_size"]).dp_factor
        for size in sizes:
            at = [(i + _offset(size, sizes), name) for i, name in enumerate(names)]
            published = [(x, old[name, size]) for x, name in at if (name, size) in old.index]
            if published:
                with_paper = True
                axes.plot(*zip(*published, strict=True), marker="_", markersize=7, color=GREY, linestyle="", zorder=1)
            here = mine[(mine.batch_size == size) & mine[what].notna()]
            places = [names.index(name) + _offset(size, sizes) for name in here.layer]
            _points(axes, places, here, what, Look(shades[size], "o", "-"))
        for i in range(1, len(names)):
            axes.axvline(i - 0.5, color="#eeeeee", linewidth=0.6, zorder=0)
        _factor_axis(axes)
        axes.set_ylabel(f"{QUANTITIES[what]} / torch.nn (log)")
        axes.grid(axis="x", visible=False)
    panels[-1].set_xticks(range(len(names)), names, rotation=40, ha="right")
    panels[-1].set_xlim(-0.5, len(names) - 0.5)
    _title(figure, f"{contestant} ({passes.replace('_', ' ')}) over torch.nn, by layer and batch size")
    n = model.usual(mine[mine.runtime_n > 0].runtime_n)
    style = {f"batch {size}": Look(shades[size], "o", "") for size in sizes}
    if with_paper:
        style["the paper, at the same batch"] = Look(GREY, "_", "")
    notes = [
        f"Points, left to right and light to dark: batch sizes. Runtime: {_rounds(n)}.",
        *(["The paper: Opacus 1.0 on an A100 in 2021, forward and backward without clipping."] if with_paper else []),
        *_absent(mine),
    ]
    shared.below(figure, where, notes, list(style), style)
    return figure


@styled
def modes(size: int, frame: pd.DataFrame, where: str) -> Figure:
    """All DP contestants at one batch size: runtime (left) and memory factor (right), a row per layer."""
    private = frame[frame.column == "dp"]
    pairs = list(dict.fromkeys(zip(private.contestant, private.passes, strict=True)))
    names = [name for name in LAYERS if name in set(private.layer)]
    labels = [_label(pair) for pair in pairs]
    style = {label: _look(*pair) for label, pair in zip(labels, pairs, strict=True)}
    row = max(0.27, 0.09 + 0.055 * len(pairs))
    figure = Figure(figsize=(WIDTH, 0.9 + row * len(names)), layout="constrained")
    whats = _measured(private)
    panels = figure.subplots(1, len(whats), sharey=True, squeeze=False)[0]
    for axes, what in zip(panels, whats, strict=True):
        for k, (pair, label) in enumerate(zip(pairs, labels, strict=True)):
            mine = private[(private.contestant == pair[0]) & (private.passes == pair[1])]
            here = mine[mine[what].notna()]
            shift = 0.76 * (k - (len(pairs) - 1) / 2) / max(1, len(pairs))
            places = [names.index(name) + shift for name in here.layer]
            _points(axes, places, here, what, style[label], sideways=True)
        axes.axvline(1.0, color="#000000", linestyle=":", linewidth=1.0)
        for i in range(1, len(names)):
            axes.axhline(i - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
        axes.grid(axis="y", visible=False)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        _minor_labels(axes.xaxis, axes.get_xlim())
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(f"{QUANTITIES[what]} / torch.nn (log; left is {'faster' if what == 'runtime' else 'less'})")
    panels[0].set_yticks(range(len(names)), names)
    _title(figure, f"Layers with DP over torch.nn without, batch {size}")
    n = model.usual(private[private.runtime_n > 0].runtime_n)
    notes = [
        f"Runtime: {_rounds(n)}. Between two lines: one layer, the contestants in the order of the legend."
        " Filled: forward, backward and the clipped sum. Open: forward and backward with per-sample gradients only, "
        "which leaves the clipping to be paid.",
        *_absent_by(private),
    ]
    shared.below(figure, where, notes, labels, style)
    return figure


def _label(pair: tuple[str, str]) -> str:
    return f"{pair[0]} ({pair[1].replace('_', ' ')})"


MODULES = ("mha", "rnn", "gru", "lstm")


@styled
def modules(framework: str, cells: pd.DataFrame, where: str) -> Figure:
    """The paper's appendix figure: torch.nn, the library's own module without DP, and with DP; milliseconds and MB."""
    own = cells[(cells.framework == framework) & (cells.column == "own_module")]
    names = [name for name in MODULES if name in set(own.layer)] or list(dict.fromkeys(own.layer))[:4]
    dp = cells[(cells.framework == framework) & (cells.column == "dp")]
    wanted = [("pytorch", "module", "plain"), (framework, "own_module", "plain")]
    lines: list[tuple[str, Look, pd.DataFrame]] = []
    for who, column, passes in wanted:
        part = cells[(cells.framework == who) & (cells.column == column) & (cells.passes == passes)]
        for contestant, group in part.groupby("contestant", sort=False):
            lines.append((str(contestant), replace(looks.of(str(contestant)), line=":", fill="none"), group))
    for (contestant, passes), group in dp.groupby(["contestant", "passes"], sort=False):
        pair = str(contestant), str(passes)
        lines.append((_label(pair), _look(*pair), group))
    style = {label: look for label, look, _ in lines}
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    grid = figure.subplots(2, max(1, len(names)), squeeze=False, sharex=True)
    for place, name in enumerate(names):
        for row, (value, scale, low, high) in enumerate(
            (("median_ms", 1.0, "low_ms", "high_ms"), ("peak", MEGABYTE, None, None))
        ):
            axes: Axes = grid[row, place]
            for label, _, frame in lines:
                mine = frame[(frame.layer == name) & frame[value].notna()].sort_values("batch_size")
                if mine.empty:
                    continue
                bars = [mine[value] - mine[low], mine[high] - mine[value]] if low and high else None
                axes.errorbar(
                    mine.batch_size,
                    mine[value] / scale,
                    yerr=bars,
                    color=style[label].colour,
                    marker=style[label].marker,
                    linestyle=style[label].line,
                    markersize=3.5,
                    linewidth=1.0,
                    capsize=2,
                )
            _batch_axis(axes, sorted(cells[cells.layer == name].batch_size.unique()))
            if axes.has_data():
                shared.log_values(axes)
            if row == 0:
                axes.set_title(name, loc="left")
            else:
                axes.set_xlabel("batch size (log)")
    grid[0, 0].set_ylabel("ms a pass (log)")
    grid[1, 0].set_ylabel("peak MB (log)")
    _title(figure, f"torch.nn, {OWN.get(framework, framework)}'s own module without DP, and with DP")
    notes = [_processes(cells)]
    shared.below(figure, where, notes, [label for label, _, _ in lines], style)
    return figure


@styled
def sweep(contestant: str, passes: str, frame: pd.DataFrame, where: str) -> Figure:
    """The paper's embedding figure: runtime and memory factor over num_embeddings, a line per batch size."""
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = sorted(frame.batch_size.unique())
    shades = _shades(sizes)
    style = {f"batch {size}": Look(shades[size], MARKERS[i % len(MARKERS)], "-") for i, size in enumerate(sizes)}
    for size in sizes:
        mine = frame[frame.batch_size == size].sort_values("num_embeddings")
        for axes, what in ((left, "runtime"), (right, "memory")):
            known = mine[mine[what].notna()]
            bars = None
            if what == "runtime":
                bars = [(known.runtime - known.runtime_low).fillna(0), (known.runtime_high - known.runtime).fillna(0)]
            axes.errorbar(
                known.num_embeddings,
                known[what],
                yerr=bars,
                color=shades[size],
                marker=style[f"batch {size}"].marker,
                markersize=3.5,
                linewidth=1.1,
                capsize=2,
            )
        right.plot(mine.num_embeddings, mine.predicted_overhead, color=shades[size], linestyle="--", linewidth=0.8)
    for axes, what in ((left, "runtime"), (right, "memory")):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("num_embeddings (log)")
        axes.set_ylabel(f"{what} / torch.nn (log)")
        _factor_axis(axes)
    left.set_title("Runtime", loc="left")
    right.set_title("Peak memory (dashed: the paper's law)", loc="left")
    _title(figure, f"Embedding of width 100: {contestant} ({passes.replace('_', ' ')}) over torch.nn")
    ratios = frame.drop_duplicates("num_embeddings").sort_values("num_embeddings")
    n = model.usual(frame[frame.runtime_n > 0].runtime_n)
    notes = [
        f"L/C from left to right: {', '.join(map(number, ratios.L_over_C))}; in the paper, which counts blocks of 512 "
        f"bytes: {', '.join(f'{value:,g}' for value in ratios.paper_L_over_C)}. Law: (bC + (1 + b)L) / (bC + 2L), of "
        f"a gradient per example. Runtime: {_rounds(n)}.",
        *_absent(frame),
    ]
    shared.below(figure, where, notes, list(style), style)
    return figure


@styled
def law(predicted: pd.DataFrame, where: str) -> Figure:
    """Predicted against measured peak: without DP, Opacus by the paper's law and by today's, dpcore by its own."""
    panels = (
        ("without DP: bC + 2L", predicted[predicted.column != "dp"]),
        ("Opacus: bC + (1 + b)L", predicted[(predicted.framework == "opacus") & (predicted.law == "bC + (1 + b)L")]),
        ("Opacus: bC + 2L + 2bL", predicted[predicted.law == "bC + 2L + 2bL"]),
        ("dpcore: its own", predicted[(predicted.framework == "dpcore") & (predicted.law == "dpcore")]),
    )
    shown = [(title, frame) for title, frame in panels if len(frame)]
    columns = 2 if len(shown) > 1 else 1
    lines = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(WIDTH, 0.5 + 2.6 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    names = [name for name in LAYERS if name in set(predicted.layer)]
    kinds = list(dict.fromkeys(LAYERS[name].kind for name in names))
    style = {kind: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)], "") for i, kind in enumerate(kinds)}
    low, high = (
        f([predicted.predicted_mb.agg(k), predicted.measured_mb.agg(k)]) for f, k in ((min, "min"), (max, "max"))
    )
    ends = np.array([low / 1.5, high * 1.5])
    for k, axes in enumerate(grid.flat):
        if k >= len(shown):
            axes.set_visible(False)
            continue
        title, frame = shown[k]
        for kind in kinds:
            mine = frame[frame.kind == kind]
            look = style[kind]
            axes.plot(
                mine.measured_mb,
                mine.predicted_mb,
                color=look.colour,
                marker=look.marker,
                markersize=3.5,
                linestyle="",
                markeredgewidth=0.5,
                alpha=0.85,
            )
        axes.plot(ends, ends, color="#000000", linewidth=0.8)
        axes.plot(ends, ends / 2, color="#000000", linewidth=0.6, linestyle=":")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        axes.tick_params(labelbottom=True, labelleft=True)
        axes.set_title(title, loc="left")
        if k % columns == 0:
            axes.set_ylabel("predicted MB (log)")
        if k + columns >= len(shown):
            axes.set_xlabel("measured peak MB (log)")
    _title(figure, "The memory law: predicted against measured peak of a pass")
    notes = [
        "A point per layer, batch size and contestant. Full line: predicted = measured; dotted: half of it. Below the "
        "line are intermediate results and workspaces, which no law counts. MB: 10⁶ bytes."
    ]
    shared.below(figure, where, notes, kinds, style)
    return figure


# ---- shared


def _look(contestant: str, passes: str) -> Look:
    """A contestant's own colour and marker; open where only per-sample gradients are formed."""
    own = looks.of(contestant)
    fill: Fill = "none" if passes == "per_sample" else "full" if own.fill == "none" else own.fill
    return replace(own, line="-", fill=fill)


def _absent(frame: pd.DataFrame) -> list[str]:
    """Cells without runtime and memory, which the table of the report gives a state and a reason."""
    gone = frame[frame.runtime.isna() & frame.memory.isna()]
    places = [
        f"{layer} at {', '.join(map(str, sorted(group.batch_size)))}"
        for layer, group in gone.groupby("layer", sort=False)
    ]
    return [f"Not measured: {'; '.join(places)}."] if places else []


def _absent_by(frame: pd.DataFrame) -> list[str]:
    """The same of one batch size and several contestants."""
    gone = frame[frame.runtime.isna() & frame.memory.isna()]
    places = [
        f"{layer} by {', '.join(dict.fromkeys(group.contestant))}" for layer, group in gone.groupby("layer", sort=False)
    ]
    return [f"Not measured: {'; '.join(places)}."] if places else []


def _rounds(n: int) -> str:
    return (
        f"mean of n = {n} paired rounds, bar: 95 % interval (Student's t on log-ratios)"
        if n >= stats.INTERVAL_ROUNDS
        else f"{model.count(n, 'round', 'rounds')}, too few for an interval"
    )


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=9, fontweight="bold")


def _shades(sizes: Sequence[int]) -> Mapping[int, Any]:
    """Light to dark blue: an order, in print too."""
    import matplotlib

    colours = matplotlib.colormaps["viridis_r"](np.linspace(0.2, 1.0, max(2, len(sizes))))
    return {size: colours[i] for i, size in enumerate(sizes)}


def _offset(size: int, sizes: Sequence[int]) -> float:
    width = min(0.66, 0.2 * (len(sizes) - 1))
    return 0.0 if len(sizes) < 2 else width * (sizes.index(size) / (len(sizes) - 1) - 0.5)


def _points(
    axes: Axes,
    places: Sequence[float],
    frame: pd.DataFrame,
    what: str,
    look: Look,
    sideways: bool = False,
) -> None:
    """The factors ``what`` at these places of the other axis; runtimes with their interval where there is one."""
    values = frame[what].to_numpy()
    bars = None
    if what == "runtime":
        ends = (values - frame.runtime_low.to_numpy(), frame.runtime_high.to_numpy() - values)
        bars = np.array(ends, dtype=float)  # no bar where it is NaN
    x, y = (values, places) if sideways else (places, values)
    axes.errorbar(
        x,
        y,
        xerr=bars if sideways else None,
        yerr=None if sideways else bars,
        color=look.colour,
        marker=look.marker,
        markersize=4 if sideways else 3.5,
        fillstyle=look.fill,
        capsize=2,
        elinewidth=0.8,
        linestyle="",
    )


def _factor_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.axhline(1.0, color="#000000", linestyle=":", linewidth=1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    _minor_labels(axes.yaxis, axes.get_ylim())


def _minor_labels(axis: Any, limits: tuple[float, float]) -> None:
    """2 and 5 are labelled too where the powers of ten alone are fewer than three."""
    ratio = max(limits) / max(min(limits), 1e-12)
    digits = "23456789" if ratio < 6 else "25" if ratio < 300 else ""
    axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}×" if f"{value:e}"[0] in digits else ""))
    axis.set_tick_params(which="minor", labelsize=8)


def _batch_axis(axes: Axes, sizes: Iterable[int]) -> None:
    ticks = list(sizes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(t) for t in ticks], rotation=90 if len(ticks) > 3 else 0)
    axes.xaxis.set_minor_locator(NullLocator())


def _processes(cells: pd.DataFrame) -> str:
    n = model.usual(cells[cells.n > 0].n)
    if n <= 1:
        return "Milliseconds: one process a point, the median of its passes, bar: 95 % interval over them."
    kind = "lowest to highest process" if n < 6 else "distribution-free 95 % interval"
    return f"Milliseconds: median of n = {n} processes (the median of its passes each), bar: {kind}."

"""Figures as PDF, SVG and PNG, readable at the width of a printed page (165 mm) and with colour-blind eyes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullLocator

from harness.analysis import stats
from harness.analysis.frames import Tables
from harness.analysis.naming import factor, machine_slug, number, slug
from harness.report import model
from harness.report.figures import heatmap
from harness.report.figures.heatmap import HeatmapCell
from harness.report.model import Picture, Section
from harness.store.cache import check_replaceable

WIDTH = 6.5
"""Inches: the text width of a printed page, so that 8-point letters are printed as 8 points."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7B4FA3")
"""Okabe and Ito's colours (told apart by colour-blind people), two more for long lists; markers differ besides."""
MARKERS = "os^Dv<>PX*hd"
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
PAPER_EPOCHS = 20
PAPER_BATCH_SIZE = 512


@dataclass(frozen=True)
class Look:
    """``line``: empty where points are not joined; ``is_open``: the marker is hollow."""

    colour: Any
    marker: str
    line: Literal["-", ":", "--", ""]
    is_open: bool = False


def looks(tables: Tables) -> dict[str, Look]:
    """The same look for a contestant in all figures of a report. Without DP: black and dotted."""
    private = dict(zip(tables.raw.contestant, tables.raw.private, strict=True))
    coloured = [c for c in PALETTE if c != "#000000"]
    shown: dict[str, Look] = {}
    for i, name in enumerate(tables.order):
        number_of_private = sum(private[other] for other in tables.order[:i])
        colour = coloured[number_of_private % len(coloured)] if private[name] else "#000000"
        shown[name] = Look(colour, MARKERS[i % len(MARKERS)], "-" if private[name] else ":")
    return shown


def pictures(tables: Tables, section: Section) -> dict[str, list[Picture]]:
    """The figures of a section by kind: ``seconds-per-epoch``, ``relative-to-pytorch``, ``cumulative-seconds``."""
    style = looks(tables)
    found: dict[str, list[Picture]] = {"seconds-per-epoch": [], "relative-to-pytorch": [], "cumulative-seconds": []}
    for task, synthetic, group in model.blocks(section.of(tables.cells)):
        if (group.state == "ok").any():
            stem = file_name("seconds-per-epoch", section, group, task)
            title = f"{model.task_title(task, synthetic)}: seconds per epoch over batch size"
            draw = partial(seconds, tables, section, task, synthetic, group, style)
            found["seconds-per-epoch"].append(Picture(stem, title, draw))
    relatives = section.of(tables.ratios)
    if len(relatives):
        stem = file_name("relative-to-pytorch", section, relatives)
        title = f"Seconds per epoch relative to {relatives.baseline.iloc[0]} (without DP)"
        found["relative-to-pytorch"].append(Picture(stem, title, partial(relative, tables, section, style)))
    runs = cumulative_runs(tables, section)
    if runs:
        shown = pd.concat([run.cells for run in runs])
        extended = any(run.measured_epochs < PAPER_EPOCHS for run in runs)
        stem = file_name("cumulative-seconds", section, shown.assign(extrapolated=shown.extrapolated | extended))
        title = f"Cumulative seconds over {PAPER_EPOCHS} epochs, compile time included"
        found["cumulative-seconds"].append(Picture(stem, title, partial(cumulative, tables, section, runs, style)))
    return found


def draw(pictures: Iterable[Picture], folder: Path) -> list[Path]:
    """Draws figures into ``folder`` (which must exist); returns the files written."""
    with matplotlib.rc_context(STYLE):
        return [path for picture in pictures for path in save(picture.draw(), folder / picture.stem)]


def file_name(kind: str, section: Section, shown: pd.DataFrame, task: str = "") -> str:
    """Kind, task, protocol, device, isolation and machine; then ``extrapolated`` and ``synthetic`` where they apply."""
    flags = [flag for flag in ("extrapolated", "synthetic") if shown[flag].any()]
    return slug(kind, task, section.protocol, section.device, section.isolation, machine_slug(section.machine), *flags)


def save(figure: Figure, stem: Path) -> list[Path]:
    """PDF, SVG and PNG without a date inside: the same records make the same bytes."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    area = figure.get_tightbbox(canvas.get_renderer()).padded(0.06)
    # Layout and area are found; finding them anew for each format would take most of the time of a report.
    figure.set_layout_engine("none")
    metadata: Mapping[str, Mapping[str, Any]] = {
        ".pdf": {"CreationDate": None},
        ".svg": {"Date": None},
        ".png": {"Software": None},
    }
    paths = [stem.with_name(stem.name + suffix) for suffix in metadata]
    for path in paths:
        figure.savefig(check_replaceable(path), dpi=200, metadata=dict(metadata[path.suffix]), bbox_inches=area)
    return paths


def seconds(
    tables: Tables, section: Section, task: str, synthetic: bool, group: pd.DataFrame, style: Mapping[str, Look]
) -> Figure:
    """Median seconds per epoch over batch size, both axes logarithmic, with intervals; of a crowd, a grid."""
    if group.contestant.nunique() > heatmap.CROWD:
        return _seconds_of_a_crowd(tables, section, task, synthetic, group, style)
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.add_subplot()
    ok = group[group.state == "ok"]
    names = list(dict.fromkeys(group.contestant))
    sizes = sorted(group.batch_size.unique())
    for i, name in enumerate(names):
        mine = ok[ok.contestant == name].sort_values("batch_size")
        if mine.empty:
            continue
        bars = [mine["median"] - mine.low, mine.high - mine["median"]]
        line(axes, mine.batch_size * shift(i, len(names)), mine["median"], bars, style[name])
    log_axes(axes, sizes)
    axes.set_ylabel("median seconds per epoch (log)")
    axes.set_xlabel("batch size (log; contestants side by side)")
    marks = _flags(ok)
    axes.set_title(f"{model.task_title(task, synthetic)}: seconds per epoch{marks}", loc="left", fontweight="bold")
    shown = [name for name in names if name in set(ok.contestant)]
    _below(figure, tables, section, [_bars(ok), *_failures(group)], shown, style)
    return figure


def _seconds_of_a_crowd(
    tables: Tables, section: Section, task: str, synthetic: bool, group: pd.DataFrame, style: Mapping[str, Look]
) -> Figure:
    ok = group[group.state == "ok"]
    private = dict(zip(tables.raw.contestant, tables.raw.private, strict=True))
    fastest = ok[ok.contestant.map(private)].groupby("batch_size")["median"].min()
    n = model.usual(ok.n)
    squares = {
        (row.contestant, row.batch_size): HeatmapCell(
            number(row.median) + ("ᵈ" if row.disturbed else "") + ("ᶠ" if row.failed else ""),
            # Where nothing private was measured there is nothing to compare with.
            max(1.0, row.median / fastest.get(row.batch_size, float("inf"))),
            (f"[{number(row.low)}, {number(row.high)}]" if row.n > 1 else "") + (f" n={row.n}" if row.n != n else ""),
        )
        if row.state == "ok"
        else HeatmapCell(row.state)
        for row in group.itertuples()
    }
    sizes = sorted(group.batch_size.unique())
    names = sorted(heatmap.by_speed(group.contestant.unique(), sizes, squares), key=lambda name: private[name])
    figure = Figure(figsize=(WIDTH, 0.6 + heatmap.row_height(squares) * len(names)), layout="constrained")
    axes = figure.add_subplot()
    heatmap.draw(axes, names, sizes, squares)
    plain = sum(not private[name] for name in names)
    both = 0 < plain < len(names)
    if both:
        axes.axhline(plain - 0.5, color="black", linewidth=0.8)
    axes.set_xlabel("batch size")
    title = f"{model.task_title(task, synthetic)}: seconds per epoch{_flags(ok)}"
    axes.set_title(title, loc="left", fontweight="bold")
    notes = [
        f"Number: median seconds. {model.spread_note(n)}",
        "Shade: factor over the fastest private one of the same batch size." + " Above the line: without DP." * both,
        *([model.DISTURBED_NOTE] if ok.disturbed.any() else []),
        *(["ᶠ some processes failed."] if ok.failed.any() else []),
        *_common_reasons(group[group.state != "ok"]),
    ]
    _below(figure, tables, section, notes, [], style)
    return figure


def _common_reasons(failed: pd.DataFrame) -> Iterator[str]:
    """What a state means, where it means the same for all."""
    for state, rows in failed.groupby("state", sort=True):
        reasons = {model.short(reason) for reason in rows.reason}
        if len(reasons) == 1:
            yield f"{state}: {reasons.pop().rstrip('.')}."


ROWS_UP_TO = 3
"""Batch sizes that are shown as rows in the figure of ratios; more become an axis."""


def relative(tables: Tables, section: Section, style: Mapping[str, Look]) -> Figure:
    """Seconds relative to PyTorch without DP with 95 % intervals, a panel per task."""
    frame = section.of(tables.ratios)
    panels = list(model.blocks(frame))
    names = [n for n in tables.order if n in set(frame.contestant)]
    sizes = sorted(frame.batch_size.unique())
    in_rows = len(sizes) <= ROWS_UP_TO
    rows = [(name, size) for name in names for size in sizes]
    crowded = not in_rows and len(names) > heatmap.CROWD
    columns = 2 if len(panels) > 1 and not crowded else 1
    lines = -(-len(panels) // columns)
    cells = section.of(tables.cells)
    squares = [_squares_of_ratios(group, _states(cells, task, synthetic)) for task, synthetic, group in panels]
    height = 2.2
    if in_rows:
        height = 0.45 + 0.17 * len(rows)
    elif crowded:
        height = 0.45 + max(map(heatmap.row_height, squares)) * len(names)
    figure = Figure(figsize=(WIDTH, 0.6 + lines * height), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=not (in_rows or crowded))
    base = str(frame.baseline.iloc[0])
    for k, axes in enumerate(grid.flat):
        if k >= len(panels):
            axes.set_visible(False)
            continue
        task, synthetic, group = panels[k]
        if in_rows:
            _relative_rows(axes, group, rows, _states(cells, task, synthetic), style, labelled=k % columns == 0)
        elif crowded:
            heatmap.draw(axes, heatmap.by_speed(names, sizes, squares[k]), sizes, squares[k])
        else:
            _relative_lines(axes, group, sizes, style)
            axes.set_ylabel(f"seconds / {base} (log)" if k % columns == 0 else "")
        axes.tick_params(labelbottom=True)
        axes.set_title(model.task_title(task, synthetic) + _flags(group), loc="left")
    title = f"Seconds per epoch relative to {base} (without DP)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, fontweight="bold")
    if in_rows:
        figure.supxlabel(
            f"seconds of the contestant · batch size / seconds of {base} (log; left is faster)", fontsize=8
        )
    else:
        figure.supxlabel("batch size" if crowded else "batch size (log; contestants side by side)", fontsize=8)
    most, least = int(frame.n.max()), int(frame.n.min())
    fewer = f" (down to {least} where pairs were disturbed or are missing)" if least < most else ""
    point, bar = ("Number", "brackets") if crowded else ("Point", "bar")
    notes = [
        f"{point}: mean of {most} paired rounds{fewer}; {bar}: 95 % interval (Student's t on log-ratios)."
        if most > 1
        else f"{point}: one paired round, of which there is no interval.",
        *(["The darker, the larger; up to 1 no shade."] if crowded else []),
        *([model.DISTURBED_PAIRS_NOTE] if crowded and frame.disturbed.any() else []),
    ]
    _below(figure, tables, section, notes, [] if in_rows or crowded else names, style)
    return figure


def _states(cells: pd.DataFrame, task: str, synthetic: bool) -> dict[tuple[str, int], str]:
    here = cells[(cells.task == task) & (cells.synthetic == synthetic)]
    return {(row.contestant, row.batch_size): row.state for row in here.itertuples()}


def _squares_of_ratios(
    group: pd.DataFrame, states: Mapping[tuple[str, int], str]
) -> dict[tuple[str, int], HeatmapCell]:
    """Ratios with their intervals; in place of a ratio that lacks, why."""
    missing = {place: HeatmapCell("no pair" if state == "ok" else state) for place, state in states.items()}
    return missing | {
        (row.contestant, row.batch_size): HeatmapCell(
            factor(row.ratio) + ("ᵈ" if row.disturbed else ""),
            max(1.0, row.ratio),
            "" if pd.isna(row.low) else f"[{factor(row.low)}, {factor(row.high)}]",
        )
        for row in group.itertuples()
    }


def _relative_rows(
    axes: Axes,
    group: pd.DataFrame,
    rows: Sequence[tuple[str, int]],
    states: Mapping[tuple[str, int], str],
    style: Mapping[str, Look],
    labelled: bool,
) -> None:
    """A row per contestant and batch size; where there is no ratio, the reason in its place."""
    by_place = {(row.contestant, row.batch_size): row for row in group.itertuples()}
    for y, place in enumerate(rows):
        row: Any = by_place.get(place)
        if row is None:
            why = states.get(place, "not measured").replace("ok", "no pair")
            axes.text(0.03, y, why, transform=axes.get_yaxis_transform(), va="center", color="#555555", style="italic")
            continue
        look = style[place[0]]
        bars = None if pd.isna(row.low) else [[row.ratio - row.low], [row.high - row.ratio]]
        axes.errorbar(row.ratio, y, xerr=bars, color=look.colour, marker=look.marker, markersize=4, capsize=2.5)
    axes.axvline(1.0, color="#000000", linestyle=":")
    axes.set_xscale("log", base=2)
    factors(axes.xaxis)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [f"{name} · {size}" for name, size in rows] if labelled else [""] * len(rows))


def _relative_lines(axes: Axes, group: pd.DataFrame, sizes: Sequence[int], style: Mapping[str, Look]) -> None:
    """Ratio over batch size, a line per contestant."""
    names = list(dict.fromkeys(group.contestant))
    for i, name in enumerate(names):
        mine = group[group.contestant == name].sort_values("batch_size")
        bars = [(mine.ratio - mine.low).fillna(0.0), (mine.high - mine.ratio).fillna(0.0)]
        line(axes, mine.batch_size * shift(i, len(names)), mine.ratio, bars, style[name])
    axes.axhline(1.0, color="#000000", linestyle=":")
    axes.set_xscale("log", base=2)
    label_sizes(axes, sizes)
    axes.set_yscale("log", base=2)
    factors(axes.yaxis)


class FactorLocator(Locator):
    """Powers of two; where fewer than three of them are in sight, ever finer fractions of them: an axis of factors
    between 0.7 and 1.4 has more than its 1."""

    SHARES = ((1.0,), (1.0, 1.5), (1.0, 1.25, 1.5, 1.75), tuple(1.0 + i / 10 for i in range(10)))

    def __call__(self) -> list[float]:
        low, high = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        if not 0.0 < vmin < vmax < math.inf:
            return []
        first, last = math.floor(math.log2(vmin)), math.ceil(math.log2(vmax))
        step = 1 + (last - first) // 9
        powers = [power for power in range(first, last + 1) if power % step == 0]
        found: list[float] = []
        for shares in self.SHARES:
            found = [share * 2.0**power for power in powers for share in shares]
            found = [value for value in found if vmin <= value <= vmax]
            if len(found) >= 3:
                break
        return found


def factors(axis: Axis) -> None:
    """A logarithmic axis of factors."""
    axis.set_major_locator(FactorLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axis.set_minor_locator(NullLocator())


def shift(i: int, count: int) -> float:
    """Contestants stand side by side instead of on top of each other: one factor for all points of a contestant."""
    return float(2.0 ** ((i - (count - 1) / 2) * min(0.09, 0.5 / count)))


def line(axes: Axes, x: pd.Series, y: pd.Series, bars: list[pd.Series], look: Look) -> None:
    axes.errorbar(
        x,
        y,
        yerr=bars,
        color=look.colour,
        marker=look.marker,
        linestyle=look.line,
        markersize=4,
        capsize=2.5,
        elinewidth=1.0,
    )


@dataclass(frozen=True)
class CumulativeRun:
    """One panel: per contestant the cumulative seconds of each process, [processes, PAPER_EPOCHS]."""

    task: str
    synthetic: bool
    batch_size: int
    curves: Mapping[str, np.ndarray]
    compiles: bool
    measured_epochs: int
    cells: pd.DataFrame


def cumulative_runs(tables: Tables, section: Section) -> list[CumulativeRun]:
    """Per task at batch size 512, or the largest that was measured."""
    runs = []
    cells = section.of(tables.cells)
    raw = section.of(tables.raw)
    raw = raw[~raw.superseded & (raw.purpose == "time") & (raw.state == "ok") & raw.seconds.notna()]
    for task, synthetic, group in model.blocks(cells[cells.state == "ok"]):
        sizes = sorted(group.batch_size.unique())
        size = PAPER_BATCH_SIZE if PAPER_BATCH_SIZE in sizes else sizes[-1]
        here = raw[(raw.task == task) & (raw.synthetic == synthetic) & (raw.batch_size == size)]
        curves = {
            str(name): np.array(
                [cumulative_seconds(tables.records[i].epoch_seconds, _compile(raw, i)) for i in rows.index]
            )
            for name, rows in here.groupby("contestant", sort=False)
        }
        shown = group[group.batch_size == size]
        runs.append(
            CumulativeRun(
                task,
                synthetic,
                int(size),
                curves,
                bool((here.compile_seconds > 0).any()),
                int(here.epochs.min()),
                shown,
            )
        )
    return runs


def _compile(raw: pd.DataFrame, index: int) -> float:
    value = raw.at[index, "compile_seconds"]
    return 0.0 if pd.isna(value) else float(value)


def cumulative_seconds(epoch_seconds: Sequence[float], compile_seconds: float) -> np.ndarray:
    """Seconds from the start to the end of epochs 1 to 20, compilation first. [PAPER_EPOCHS]

    Where fewer epochs were measured, the process's median epoch stands for the others.
    """
    measured = list(epoch_seconds)[:PAPER_EPOCHS]
    rest = [stats.process_value(epoch_seconds)] * (PAPER_EPOCHS - len(measured))
    return compile_seconds + np.cumsum(measured + rest)


def cumulative(tables: Tables, section: Section, runs: Sequence[CumulativeRun], style: Mapping[str, Look]) -> Figure:
    """The paper's figure: cumulative seconds over 20 epochs, compile time included, a panel per task."""
    columns = 2 if len(runs) > 1 else 1
    lines = -(-len(runs) // columns)
    figure = Figure(figsize=(WIDTH, 0.6 + 2.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    epochs = np.arange(1, PAPER_EPOCHS + 1)
    for k, axes in enumerate(grid.flat):
        if k >= len(runs):
            axes.set_visible(False)
            continue
        run = runs[k]
        for name in [n for n in tables.order if n in run.curves]:
            look = style[name]
            curves = run.curves[name]
            middle = np.median(curves, axis=0)
            known = run.measured_epochs
            axes.plot(epochs[:known], middle[:known], color=look.colour, linestyle=look.line)
            axes.plot(epochs[known - 1 :], middle[known - 1 :], color=look.colour, linestyle=(0, (4, 2)), linewidth=0.9)
            axes.plot(epochs[::5], middle[::5], color=look.colour, marker=look.marker, markersize=4, linestyle="")
            axes.fill_between(
                epochs, curves.min(axis=0), curves.max(axis=0), color=look.colour, alpha=0.18, linewidth=0
            )
        log_values(axes)
        axes.set_xticks([1, 5, 10, 15, 20])
        axes.set_xlim(0.5, PAPER_EPOCHS + 0.5)
        flag = ", extrapolated" if run.cells.extrapolated.any() else ""
        axes.set_title(f"{model.task_title(run.task, run.synthetic)}\nbatch {run.batch_size}{flag}", loc="left")
        if k % columns == 0:
            axes.set_ylabel("cumulative seconds (log)")
        if k + columns >= len(runs):
            axes.set_xlabel("epoch")
    extended = min(run.measured_epochs for run in runs) < PAPER_EPOCHS
    title = "Cumulative seconds over 20 epochs, compile time included" + (", extrapolated" if extended else "")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, fontweight="bold")
    notes = ["Line: median over processes; band: lowest to highest process."]
    gone = section.of(tables.cells)
    gone = gone[gone.state != "ok"]
    missing = [
        f"{row.contestant} on {row.task} ({row.state})"
        for run in runs
        for row in gone[(gone.task == run.task) & (gone.batch_size == run.batch_size)].itertuples()
    ]
    if missing:
        notes.append(f"Not shown: {', '.join(missing)}.")
    if extended:
        notes.append("Dashed: beyond the measured epochs, each process goes on with its median epoch.")
    shown = [n for n in tables.order if any(n in run.curves for run in runs)]
    _below(figure, tables, section, notes, shown, style)
    return figure


MOST_LEVEL_LABELS = 4
"""Batch sizes whose labels fit below a panel side by side."""


def label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    if len(sizes) > MOST_LEVEL_LABELS:
        axes.tick_params(axis="x", labelrotation=45)


def log_axes(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    label_sizes(axes, sizes)
    axes.set_xlim(min(sizes) / 1.6, max(sizes) * 1.6)
    log_values(axes)


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


def _flags(frame: pd.DataFrame) -> str:
    return " (extrapolated)" if frame.extrapolated.any() else ""


def _bars(ok: pd.DataFrame) -> str:
    n = model.usual(ok.n)
    if n == 1:
        return "Point: one process."
    kind = "lowest to highest process" if n < 6 else "distribution-free 95 % interval"
    return f"Point: median of n = {n} processes (median of its epochs each); bar: {kind}."


def _failures(group: pd.DataFrame) -> Iterator[str]:
    for (contestant, state), rows in group[group.state != "ok"].groupby(["contestant", "state"], sort=False):
        yield f"{contestant} at {', '.join(map(str, sorted(rows.batch_size)))}: {state}."
    disturbed = group[(group.state == "ok") & (group.disturbed > 0)]
    if len(disturbed):
        yield "Disturbed: " + ", ".join(f"{r.contestant} at {r.batch_size}" for r in disturbed.itertuples()) + "."


LEGEND_COLUMNS = 4
LEGEND_ROW = 0.17
LEGEND_HANDLE, LEGEND_LETTER = 0.6, 0.062
"""Inches: a row; line, marker and gaps of an entry; a letter of its name."""


def legend_columns(names: Sequence[str]) -> int:
    """As many columns as the figure is wide, up to :data:`LEGEND_COLUMNS`. Matplotlib fills them from top to bottom,
    the first ones by one entry more where they are not all full."""
    for columns in range(min(LEGEND_COLUMNS, len(names)), 1, -1):
        filled = np.array_split([LEGEND_HANDLE + LEGEND_LETTER * len(name) for name in names], columns)
        if sum(float(column.max()) for column in filled) <= WIDTH:
            return columns
    return 1


def _below(
    figure: Figure,
    tables: Tables,
    section: Section,
    notes: Sequence[str],
    names: Sequence[str],
    style: Mapping[str, Look],
) -> None:
    below(figure, f"{section.title}; measured {model.provenance(tables, section)}.", notes, names, style)


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
                markerfacecolor="none" if style[n].is_open else None,
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

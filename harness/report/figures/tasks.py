"""Figures as PDF, SVG and PNG, readable at the width of a printed page (165 mm) and with colour-blind eyes."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullLocator

from harness.analysis import stats
from harness.analysis.frames import Tables
from harness.analysis.naming import factor, number, slug
from harness.report import model
from harness.report.figures import heatmap, looks
from harness.report.figures.heatmap import HeatmapCell
from harness.report.figures.looks import Look
from harness.report.model import Picture, Section
from harness.store.cache import check_replaceable

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
PAPER_EPOCHS = 20
PAPER_BATCH_SIZE = 512


def pictures(tables: Tables, section: Section) -> dict[str, list[Picture]]:
    """The figures of a section by kind: ``seconds-per-epoch``, ``relative-to-pytorch``, ``cumulative-seconds``."""
    found: dict[str, list[Picture]] = {"seconds-per-epoch": [], "relative-to-pytorch": [], "cumulative-seconds": []}
    for task, synthetic, group in model.blocks(section.of(tables.cells)):
        if (group.state == "ok").any():
            title = f"{model.task_title(task, synthetic)}: seconds per epoch over batch size"
            draw = partial(seconds, tables, section, task, synthetic, group)
            stem = file_name("seconds-per-epoch", tables, section, group, task)
            found["seconds-per-epoch"].append(picture(stem, title, tables, section, group, draw))
    relatives = section.of(tables.ratios)
    if len(relatives):
        stem = file_name("relative-to-pytorch", tables, section, relatives)
        title = "Seconds per epoch relative to PyTorch without DP"
        draw = partial(relative, tables, section)
        found["relative-to-pytorch"].append(picture(stem, title, tables, section, relatives, draw))
    runs = cumulative_runs(tables, section)
    if runs:
        shown = pd.concat([run.cells for run in runs])
        extended = any(run.measured_epochs < PAPER_EPOCHS for run in runs)
        shown = shown.assign(extrapolated=shown.extrapolated | extended)
        stem = file_name("cumulative-seconds", tables, section, shown)
        title = f"Cumulative seconds over {PAPER_EPOCHS} epochs, compile time included"
        draw = partial(cumulative, tables, section, runs)
        found["cumulative-seconds"].append(picture(stem, title, tables, section, shown, draw))
    return found


def picture(
    stem: str, title: str, tables: Tables, section: Section, shown: pd.DataFrame, draw: Callable[[], Figure]
) -> Picture:
    """A figure with its provenance, which its file carries too. ``shown``: the numbers in it."""
    doubts = " Extrapolated from parts of epochs." if shown.extrapolated.any() else ""
    doubts += " Synthetic data in place of the genuine." if shown.synthetic.any() else ""
    return Picture(stem, title, draw, f"{section.title}; measured {model.provenance(tables, section)}.{doubts}")


def draw(pictures: Iterable[Picture], folder: Path) -> list[Path]:
    """Draws figures into ``folder`` (which must exist); returns the files written."""
    with matplotlib.rc_context(STYLE):
        return [path for shown in pictures for path in save(shown.draw(), folder / shown.stem, shown)]


def file_name(kind: str, tables: Tables, section: Section, shown: pd.DataFrame, task: str = "") -> str:
    """Kind and task; what tells the section from the report's main one; ``synthetic`` where it applies. What else was
    measured how stands in the caption and in the file's metadata, so that names stay the same from run to run."""
    flags = ["synthetic"] if shown.synthetic.any() else []
    return slug(kind, task, model.section_names(model.sections(tables))[section], *flags)


def save(figure: Figure, stem: Path, shown: Picture) -> list[Path]:
    """SVG, and from it PDF and PNG, with title and provenance but no date.

    The same records make the same bytes of SVG and PNG; the objects of the PDF come in no fixed order.
    """
    import vl_convert

    figure.draw_without_rendering()
    area = figure.get_tightbbox().padded(0.06)
    # Layout and area are found; finding them anew would take most of the time of a report.
    figure.set_layout_engine("none")
    text = io.StringIO()
    metadata = {"Title": shown.title, "Description": shown.provenance, "Date": None}
    figure.savefig(text, format="svg", metadata=metadata, bbox_inches=area)
    svg = text.getvalue()
    # Drawing each format by itself takes three times as long, most of it for fonts inside of the PDF.
    contents = {
        ".pdf": _with_info(vl_convert.svg_to_pdf(svg), shown),
        ".svg": svg.encode(),
        ".png": _png(vl_convert.svg_to_png(svg, scale=PIXELS_PER_POINT), shown),
    }
    for suffix, content in contents.items():
        check_replaceable(stem.with_name(stem.name + suffix)).write_bytes(content)
    return [stem.with_name(stem.name + suffix) for suffix in contents]


PIXELS_PER_POINT = 2.0
"""Scale of the PNG, for 144 dots per inch. Rasterising is a good part of the time of a report."""


def _png(content: bytes, shown: Picture) -> bytes:
    """The picture on white, with its provenance, in as many colours as such a drawing has."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt("Title", shown.title)
    info.add_itxt("Description", shown.provenance)
    with Image.open(io.BytesIO(content)) as image:
        page = Image.new("RGB", image.size, "white")
        page.paste(image, mask=image.getchannel("A"))
    buffer = io.BytesIO()
    page.save(buffer, "PNG", pnginfo=info, compress_level=6)
    return buffer.getvalue()


def _with_info(pdf: bytes, shown: Picture) -> bytes:
    """The PDF with title and provenance, as an incremental update: only what is new is appended to the file."""
    trailer = pdf[pdf.rindex(b"trailer") :]
    size, root = (int(found[1]) for found in re.finditer(rb"/(?:Size|Root) (\d+)", trailer))
    before = int(trailer.split(b"startxref")[1].split()[0])

    def text(words: str) -> bytes:
        return b"<FEFF" + words.encode("utf-16-be").hex().upper().encode() + b">"

    at = len(pdf) + 1
    info = b"%d 0 obj\n<</Title %s /Subject %s>>\nendobj\n" % (size, text(shown.title), text(shown.provenance))
    xref = b"xref\n%d 1\n%010d 00000 n \n" % (size, at)
    ends = b"trailer\n<</Size %d /Root %d 0 R /Info %d 0 R /Prev %d>>" % (size + 1, root, size, before)
    return b"%s\n%s%s%s\nstartxref\n%d\n%%%%EOF\n" % (pdf, info, xref, ends, at + len(info))


FEWEST_SIZES = 3
"""Batch sizes that make a curve; fewer are shown as numbers."""


def _as_grid(names: Sequence[str], sizes: Sequence[int]) -> bool:
    return len(names) > heatmap.MOST_LINES or len(sizes) < FEWEST_SIZES


def seconds(tables: Tables, section: Section, task: str, synthetic: bool, group: pd.DataFrame) -> Figure:
    """Median seconds per epoch over batch size, both axes logarithmic, with intervals; of many, a grid."""
    sizes = sorted(group.batch_size.unique())
    if _as_grid(list(group.contestant.unique()), sizes):
        return _seconds_as_grid(tables, section, task, synthetic, group)
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.add_subplot()
    ok = group[group.state == "ok"]
    names = list(dict.fromkeys(ok.contestant))
    style = looks.of_all(names, _private(tables))
    log_axes(axes, sizes)
    limits(axes, ok["median"])
    for i, name in enumerate(names):
        mine = ok[ok.contestant == name].set_index("batch_size")
        line(axes, sizes, mine[["median", "low", "high"]], style[name], shift(i, len(names)), tables.title(name))
    log_values(axes)
    axes.set_ylabel("median seconds per epoch (log)")
    axes.set_xlabel("batch size (log; contestants side by side)")
    axes.set_title(f"{model.task_title(task, synthetic)}: seconds per epoch", loc="left", fontweight="bold")
    below_task(figure, tables, section, [_bars(ok), *_failures(tables, group), *_scaled(ok)], names, style)
    return figure


def _private(tables: Tables) -> dict[str, bool]:
    return dict(zip(tables.raw.contestant, tables.raw.private, strict=True))


def _scaled(shown: pd.DataFrame) -> list[str]:
    """Said once in a figure; which cells they are stands in the tables."""
    if not shown.extrapolated.any():
        return []
    some = "All" if shown.extrapolated.all() else "Some values are"
    return [f"{some} extrapolated from parts of epochs."]


def limits(axes: Axes, values: pd.Series) -> None:
    """The y axis of the points, whatever their intervals: those that leave it end in an arrow."""
    axes.set_ylim(values.min() / 1.35, values.max() * 1.35)


def _seconds_as_grid(tables: Tables, section: Section, task: str, synthetic: bool, group: pd.DataFrame) -> Figure:
    ok = group[group.state == "ok"]
    private = _private(tables)
    fastest = ok[ok.contestant.map(private)].groupby("batch_size")["median"].min()
    n = model.usual(ok.n)
    squares = {
        (row.contestant, row.batch_size): HeatmapCell(
            number(row.median) + ("ᵈ" if row.disturbed else "") + ("ᶠ" if row.failed else ""),
            # Where nothing private was measured there is nothing to compare with.
            max(1.0, row.median / fastest.get(row.batch_size, float("inf"))),
            (model.interval(row.low, row.high) + (f" n={row.n}" if row.n != n else "")).strip(),
        )
        if row.state == "ok"
        else HeatmapCell(row.state)
        for row in group.itertuples()
    }
    sizes = sorted(group.batch_size.unique())
    names = sorted(dict.fromkeys(group.contestant), key=lambda name: private[name])
    figure = Figure(figsize=(WIDTH, 0.6 + heatmap.row_height(squares) * len(names)), layout="constrained")
    axes = figure.add_subplot()
    heatmap.draw(axes, names, sizes, squares, tables.title)
    plain = sum(not private[name] for name in names)
    both = 0 < plain < len(names)
    if both:
        axes.axhline(plain - 0.5, color="black", linewidth=0.8)
    axes.set_xlabel("batch size")
    axes.set_title(f"{model.task_title(task, synthetic)}: seconds per epoch", loc="left", fontweight="bold")
    notes = [
        f"Number: median seconds. {model.spread_note(n)}",
        "Shade: factor over the fastest private one of the same batch size." + " Above the line: without DP." * both,
        *([model.DISTURBED_NOTE] if ok.disturbed.any() else []),
        *(["ᶠ some processes failed."] if ok.failed.any() else []),
        *_common_reasons(group[group.state != "ok"]),
        *_scaled(ok),
    ]
    below_task(figure, tables, section, notes, [], {})
    return figure


def _common_reasons(failed: pd.DataFrame) -> Iterator[str]:
    """What a state means, where it means the same for all."""
    for state, rows in failed.groupby("state", sort=True):
        reasons = {model.short(reason) for reason in rows.reason}
        if len(reasons) == 1:
            yield f"{state}: {reasons.pop().rstrip('.')}."


def relative(tables: Tables, section: Section) -> Figure:
    """Seconds relative to PyTorch without DP with 95 % intervals, a panel per task."""
    frame = section.of(tables.ratios)
    panels = list(model.blocks(frame))
    names = [n for n in tables.order if n in set(frame.contestant)]
    sizes = sorted(frame.batch_size.unique())
    own = [list(dict.fromkeys(group.contestant)) for _, _, group in panels]
    as_grid = _as_grid(max(own, key=len), sizes)
    columns = 2 if len(panels) > 1 and not as_grid else 1
    lines = -(-len(panels) // columns)
    cells = section.of(tables.cells)
    squares = [_squares_of_ratios(group, _states(cells, task, synthetic)) for task, synthetic, group in panels]
    height = [0.45 + heatmap.row_height(s) * len(n) for s, n in zip(squares, own, strict=True)]
    style = looks.of_all(names, _private(tables))
    figure = Figure(figsize=(WIDTH, 0.6 + (sum(height) if as_grid else lines * 2.2)), layout="constrained")
    ratios = {"height_ratios": height} if as_grid else {}
    grid = figure.subplots(lines, columns, squeeze=False, gridspec_kw=ratios, sharex=not as_grid, sharey=not as_grid)
    for k, axes in enumerate(grid.flat):
        if k >= len(panels):
            axes.set_visible(False)
            continue
        task, synthetic, group = panels[k]
        if as_grid:
            heatmap.draw(axes, own[k], sorted(group.batch_size.unique()), squares[k], tables.title)
        else:
            limits(axes, frame.ratio)
            _relative_lines(axes, group, sizes, style, tables.title)
            axes.set_ylabel("seconds / those without DP (log)" if k % columns == 0 else "")
        axes.tick_params(labelbottom=True)
        axes.set_title(model.task_title(task, synthetic), loc="left")
    title = "Seconds per epoch relative to PyTorch without DP"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, fontweight="bold")
    figure.supxlabel("batch size" if as_grid else "batch size (log; contestants side by side)", fontsize=8)
    notes = [
        f"Without DP: {model.baselines(frame)}.",
        f"{'Number' if as_grid else 'Point'}: {model.rounds_note(frame.n, 'brackets' if as_grid else 'bar')}",
        *(["The darker, the larger; up to 1 no shade."] if as_grid else []),
        *([model.DISTURBED_PAIRS_NOTE] if as_grid and frame.disturbed.any() else []),
        *_scaled(frame),
    ]
    below_task(figure, tables, section, notes, [] if as_grid else names, style)
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


def _relative_lines(
    axes: Axes, group: pd.DataFrame, sizes: Sequence[int], style: Mapping[str, Look], title: Callable[[str], str]
) -> None:
    """Ratio over batch size, a line per contestant."""
    axes.axhline(1.0, color="#000000", linestyle=":")
    axes.set_xscale("log", base=2)
    label_sizes(axes, sizes)
    axes.set_xlim(min(sizes) / 1.6, max(sizes) * 1.6)
    axes.set_yscale("log", base=2)
    factors(axes.yaxis)
    names = list(dict.fromkeys(group.contestant))
    for i, name in enumerate(names):
        mine = group[group.contestant == name].set_index("batch_size")
        line(axes, sizes, mine[["ratio", "low", "high"]], style[name], shift(i, len(names)), title(name))


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


def line(
    axes: Axes, sizes: Sequence[int], shown: pd.DataFrame, look: Look, sideways: float = 1.0, label: str = ""
) -> None:
    """Points over batch size with their bars, joined where neighbouring sizes were measured.

    Args:
        axes: With its limits set: a bar that leaves them ends in an arrow.
        sizes: Batch sizes of the figure; the line breaks at those that ``shown`` lacks.
        shown: Value, low, high; indexed by batch size.
        look: Colour, marker and line.
        sideways: Factor by which the points are shifted, so that contestants do not hide each other.
        label: Written beside the last point where the look is grey, which is in no legend.
    """
    shown = shown.reindex(sizes)
    value, low, high = (shown[column].to_numpy(dtype=float) for column in shown.columns)
    x = np.array(sizes, dtype=float) * sideways
    bottom, top = axes.get_ylim()
    drawn_low, drawn_high = np.maximum(low, bottom), np.minimum(high, top)
    axes.errorbar(
        x,
        value,
        yerr=[np.nan_to_num(value - drawn_low), np.nan_to_num(drawn_high - value)],
        color=look.colour,
        marker=look.marker,
        fillstyle=look.fill,
        linestyle=look.line,
        markersize=4,
        capsize=0 if np.isnan(low).all() else 2.5,
        elinewidth=1.0,
        zorder=1.8 if look.colour == looks.GREY else 2.0,
    )
    for beyond, edge, arrow in ((low < bottom, bottom, "v"), (high > top, top, "^")):
        if beyond.any():  # an empty line outside of the axes would take room at the origin
            edges = np.full(beyond.sum(), edge)
            axes.plot(x[beyond], edges, marker=arrow, markersize=4, color=look.colour, linestyle="", clip_on=False)
    if label and look.colour == looks.GREY and not np.isnan(value).all():
        last = int(np.flatnonzero(~np.isnan(value))[-1])
        _beside(axes, label, (x[last], value[last]))


def _beside(axes: Axes, label: str, at: tuple[float, float]) -> None:
    """A name beside a grey line, which is in no legend: inside of the axes, so that it takes no room from them."""
    written = axes.annotate(label, at, (-2, 4), textcoords="offset points", ha="right", fontsize=6, color="#6E7378")
    written.set_in_layout(False)


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


def cumulative(tables: Tables, section: Section, runs: Sequence[CumulativeRun]) -> Figure:
    """The paper's figure: cumulative seconds over 20 epochs, compile time included, a panel per task."""
    everyone = [name for name in tables.order if any(name in run.curves for run in runs)]
    style = looks.of_all(everyone, _private(tables))
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
            axes.plot(
                epochs[::5],
                middle[::5],
                color=look.colour,
                marker=look.marker,
                fillstyle=look.fill,
                markersize=4,
                linestyle="",
            )
            if look.colour == looks.GREY:  # in no legend
                _beside(axes, tables.title(name), (PAPER_EPOCHS, float(middle[-1])))
            axes.fill_between(
                epochs, curves.min(axis=0), curves.max(axis=0), color=look.colour, alpha=0.18, linewidth=0
            )
        log_values(axes)
        axes.set_xticks([1, 5, 10, 15, 20])
        axes.set_xlim(0.5, PAPER_EPOCHS + 0.5)
        axes.set_title(f"{model.task_title(run.task, run.synthetic)}\nbatch {run.batch_size}", loc="left")
        if k % columns == 0:
            axes.set_ylabel("cumulative seconds (log)")
        if k + columns >= len(runs):
            axes.set_xlabel("epoch")
    extended = min(run.measured_epochs for run in runs) < PAPER_EPOCHS
    figure.suptitle(
        "Cumulative seconds over 20 epochs, compile time included", x=0.01, ha="left", fontsize=9, fontweight="bold"
    )
    notes = ["Line: median over processes; band: lowest to highest process."]
    gone = section.of(tables.cells)
    gone = gone[gone.state != "ok"]
    missing = sum(((gone.task == run.task) & (gone.batch_size == run.batch_size)).sum() for run in runs)
    if missing:
        cells = model.count(missing, "cell without a time is", "cells without a time are")
        notes.append(f"{cells} not shown; the table of failures says why.")
    if extended:
        notes.append("Dashed: extrapolated, beyond the measured epochs each process goes on with its median epoch.")
    notes += _scaled(pd.concat([run.cells for run in runs]))
    below_task(figure, tables, section, notes, everyone, style)
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


def _bars(ok: pd.DataFrame) -> str:
    n = model.usual(ok.n)
    if n < stats.INTERVAL_ROUNDS:
        return f"Point: median of n = {model.count(n, 'process', 'processes')}, too few for an interval."
    kind = "lowest to highest process" if n < 6 else "distribution-free 95 % interval"
    return f"Point: median of n = {n} processes (median of its epochs each); bar: {kind}."


def _failures(tables: Tables, group: pd.DataFrame) -> Iterator[str]:
    for (contestant, state), rows in group[group.state != "ok"].groupby(["contestant", "state"], sort=False):
        yield f"{tables.title(contestant)} at {', '.join(map(str, sorted(rows.batch_size)))}: {state}."
    disturbed = group[(group.state == "ok") & (group.disturbed > 0)]
    if len(disturbed):
        cells = ", ".join(f"{tables.title(r.contestant)} at {r.batch_size}" for r in disturbed.itertuples())
        yield f"Disturbed: {cells}."


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


def below_task(
    figure: Figure,
    tables: Tables,
    section: Section,
    notes: Sequence[str],
    names: Sequence[str],
    style: Mapping[str, Look],
) -> None:
    where = f"{model.readable(section, section.of(tables.raw))}, rules {section.protocol}."
    named = {name: tables.title(name) for name in names if style[name].colour != looks.GREY}
    below(figure, where, notes, list(named.values()), {title: style[name] for name, title in named.items()})


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

"""Figures of the end-to-end tables, readable at the width of a printed page (165 mm) and with colour-blind eyes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import pandas as pd

from harness.analysis import stats
from harness.analysis.frames import Tables
from harness.analysis.naming import factor, number, slug
from harness.analysis.tidy import rows_of
from harness.report import model
from harness.report.figures import heatmap, looks, panel
from harness.report.figures.heatmap import HeatmapCell
from harness.report.figures.looks import Look
from harness.report.figures.panel import Axis, Panel, Spec
from harness.report.model import Picture, Section

PAPER_EPOCHS = 20
PAPER_BATCH_SIZE = 512


def pictures(tables: Tables, section: Section) -> dict[str, list[Picture]]:
    """Return the figures of a section by kind: ``seconds-per-epoch``, ``relative-to-pytorch``,
    ``cumulative-seconds``."""
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
    stem: str, title: str, tables: Tables, section: Section, shown: pd.DataFrame, draw: Callable[[], Spec]
) -> Picture:
    """Return a figure with its provenance, which its file carries too. ``shown``: the numbers in it."""
    doubts = " Extrapolated from parts of epochs." if shown.extrapolated.any() else ""
    doubts += " Synthetic data in place of the genuine." if shown.synthetic.any() else ""
    return Picture(stem, title, draw, f"{section.title}; measured {model.provenance(tables, section)}.{doubts}")


def file_name(kind: str, tables: Tables, section: Section, shown: pd.DataFrame, task: str = "") -> str:
    """Kind and task; what tells the section from the report's main one; ``synthetic`` where it applies. What else was
    measured how stands in the caption and in the file's metadata, so that names stay the same from run to run."""
    flags = ["synthetic"] if shown.synthetic.any() else []
    return slug(kind, task, model.section_names(model.sections(tables))[section], *flags)


FEWEST_SIZES = 3
"""Batch sizes that make a curve; fewer are shown as numbers."""


def _as_grid(names: Sequence[str], sizes: Sequence[int]) -> bool:
    return len(names) > heatmap.MOST_LINES or len(sizes) < FEWEST_SIZES


def seconds(tables: Tables, section: Section, task: str, synthetic: bool, group: pd.DataFrame) -> Spec:
    """Return median seconds per epoch over batch size, both axes logarithmic, with intervals; of many, a grid."""
    sizes = sorted(group.batch_size.unique())
    title = f"{model.task_title(task, synthetic)}: seconds per epoch"
    if _as_grid(list(group.contestant.unique()), sizes):
        return _seconds_as_grid(tables, section, title, group)
    ok = group[group.state == "ok"]
    names = list(dict.fromkeys(ok.contestant))
    style = looks.of_all(names, _private(tables))
    x = panel.of_sizes(sizes, "batch size (log; contestants side by side)")
    one = Panel(x, panel.plain(panel.around(ok["median"]), "median seconds per epoch (log)"), WIDTH, HEIGHT)
    for i, name in enumerate(names):
        shown = points(ok[ok.contestant == name], "median")
        panel.over_sizes(one, sizes, shown, style[name], shift(i, len(names)), tables.title(name))
    notes = [_bars(ok, tables.title), *_failures(tables, group), *_scaled(ok)]
    return page(title, [one.spec()], tables, section, notes, names, style)


WIDTH, HEIGHT = 540, 250
"""Pixels of a panel that stands alone."""
HALF, LOW = 228, 180
"""Pixels of one that has another beside it."""
TITLE_LETTERS = 38
"""Letters in a line of such a panel's title."""


def points(rows: pd.DataFrame, value: str, scale: float = 1.0) -> dict[int, tuple[float, float, float]]:
    """Return batch size -> value, low, high, over ``scale``, of one contestant's rows."""
    columns = zip(rows.batch_size, rows[value], rows.low, rows.high, strict=True)
    return {int(size): (middle / scale, low / scale, high / scale) for size, middle, low, high in columns}


def _private(tables: Tables) -> dict[str, bool]:
    return dict(zip(tables.raw.contestant, tables.raw.private, strict=True))


def _scaled(shown: pd.DataFrame) -> list[str]:
    """Said once in a figure; which cells they are stands in the tables."""
    if not shown.extrapolated.any():
        return []
    some = "All" if shown.extrapolated.all() else "Some values are"
    return [f"{some} extrapolated from parts of epochs."]


def _seconds_as_grid(tables: Tables, section: Section, title: str, group: pd.DataFrame) -> Spec:
    ok = group[group.state == "ok"]
    private = _private(tables)
    fastest = ok[ok.contestant.map(private)].groupby("batch_size")["median"].min()
    n = model.usual(ok.n)
    squares = {
        (row.contestant, row.batch_size): HeatmapCell(
            number(row.median) + model.marks(row).replace("ᵉ", ""),
            # Where nothing private was measured there is nothing to compare with.
            max(1.0, row.median / fastest.get(row.batch_size, float("inf"))),
            (model.interval(row.low, row.high) + (f" n={row.n}" if row.n != n else "")).strip(),
        )
        if row.state == "ok"
        else HeatmapCell(row.state)
        for row in rows_of(group)
    }
    sizes = sorted(group.batch_size.unique())
    names = sorted(dict.fromkeys(group.contestant), key=lambda name: private[name])
    plain = [name for name in names if not private[name]]
    notes = [
        f"Number: median seconds. {model.spread_note(n)}",
        "Shade: factor over the fastest private one of the same batch size."
        + " In italics: without DP." * (0 < len(plain) < len(names)),
        *([model.DISTURBED_NOTE] if (ok.disturbed.astype(bool) & ~ok.swamped).any() else []),
        *([f"‼ {model.SWAMPED_NOTE}."] if ok.swamped.any() else []),
        *(["ᶠ some processes failed."] if ok.failed.any() else []),
        *_common_reasons(group[group.state != "ok"]),
        *_scaled(ok),
    ]
    shown = heatmap.grid(names, sizes, squares, tables.title, plain)
    return page(title, [shown], tables, section, notes, [], {})


def _common_reasons(failed: pd.DataFrame) -> Iterator[str]:
    """Yield what a state means, where it means the same for all."""
    for state, rows in failed.groupby("state", sort=True):
        reasons = {model.short(reason) for reason in rows.reason}
        if len(reasons) == 1:
            yield f"{state}: {reasons.pop().rstrip('.')}."


def relative(tables: Tables, section: Section) -> Spec:
    """Return seconds relative to PyTorch without DP with 95 % intervals, a panel per task."""
    frame = section.of(tables.ratios)
    groups = list(model.blocks(frame))
    names = [n for n in tables.order if n in set(frame.contestant)]
    sizes = sorted(frame.batch_size.unique())
    as_grid = _as_grid(max((list(group.contestant.unique()) for _, _, group in groups), key=len), sizes)
    style = looks.of_all(names, _private(tables))
    if as_grid:
        panels, columns = list(_relative_grids(tables, section, groups)), 1
    else:
        panels, columns = list(_relative_lines(groups, sizes, panel.around(frame.ratio), style, tables.title)), 2
    notes = [
        f"Without DP: {model.baselines(frame)}.",
        f"{'Number' if as_grid else 'Point'}: {model.rounds_note(frame.n, 'brackets' if as_grid else 'bar')}",
        *(["The darker, the larger; up to 1 no shade."] if as_grid else []),
        *([model.DISTURBED_PAIRS_NOTE] if as_grid and (frame.disturbed.astype(bool) & ~frame.swamped).any() else []),
        *([f"‼ {model.SWAMPED_NOTE}."] if as_grid and frame.swamped.any() else []),
        *_scaled(frame),
    ]
    title = "Seconds per epoch relative to PyTorch without DP"
    return page(title, panels, tables, section, notes, [] if as_grid else names, style, columns)


Blocks = Sequence[tuple[str, bool, pd.DataFrame]]
"""Task, whether on synthetic data, rows."""


def _relative_grids(tables: Tables, section: Section, groups: Blocks) -> Iterator[Spec]:
    cells = section.of(tables.cells)
    for task, synthetic, group in groups:
        squares = _squares_of_ratios(group, _states(cells, task, synthetic))
        names, sizes = list(dict.fromkeys(group.contestant)), sorted(group.batch_size.unique())
        yield heatmap.grid(names, sizes, squares, tables.title, above=model.task_title(task, synthetic))


def _titles(tasks: Sequence[tuple[str, bool]], *more: str) -> list[list[str]]:
    """Return the titles of panels beside each other, in lines that fit, all of as many; ``more`` lines at the end."""
    wrapped = [textwrap.wrap(model.task_title(*task), TITLE_LETTERS) for task in tasks]
    most = max(map(len, wrapped))
    return [[""] * (most - len(lines)) + lines + list(more) for lines in wrapped]


def _states(cells: pd.DataFrame, task: str, synthetic: bool) -> dict[tuple[str, int], str]:
    here = cells[(cells.task == task) & (cells.synthetic == synthetic)]
    return {(row.contestant, row.batch_size): row.state for row in rows_of(here)}


def _squares_of_ratios(
    group: pd.DataFrame, states: Mapping[tuple[str, int], str]
) -> dict[tuple[str, int], HeatmapCell]:
    """Return ratios with their intervals; in place of a ratio that lacks, why."""
    missing = {place: HeatmapCell("no pair" if state == "ok" else state) for place, state in states.items()}
    return missing | {
        (row.contestant, row.batch_size): HeatmapCell(
            factor(row.ratio) + ("‼" if row.swamped else "ᵈ" if row.disturbed else ""),
            max(1.0, row.ratio),
            "" if pd.isna(row.low) else f"[{factor(row.low)}, {factor(row.high)}]",
        )
        for row in rows_of(group)
    }


def _relative_lines(
    groups: Blocks,
    sizes: Sequence[int],
    ends: tuple[float, float],
    style: Mapping[str, Look],
    title: Callable[[str], str],
) -> Iterator[Spec]:
    """Yield ratio over batch size, a panel per task, a line per contestant."""
    titles = _titles([(task, synthetic) for task, synthetic, _ in groups])
    x = panel.of_sizes(sizes, "batch size (log; side by side)")
    for k, ((_, _, group), above) in enumerate(zip(groups, titles, strict=True)):
        y = panel.factors(ends, "seconds / those without DP (log)" if k % 2 == 0 else "")
        one = Panel(x, y, HALF if len(groups) > 1 else WIDTH, LOW, above)
        if y.holds(1.0):
            one.curve((x.low, x.high), (1.0, 1.0), looks.line("#000000", ":"), 1.2)
        names = list(dict.fromkeys(group.contestant))
        for i, name in enumerate(names):
            shown = points(group[group.contestant == name], "ratio")
            panel.over_sizes(one, sizes, shown, style[name], shift(i, len(names)), title(name))
        yield one.spec()


def shift(i: int, count: int) -> float:
    """Return contestants stand side by side instead of on top of each other: one factor for all points of a
    contestant."""
    return float(2.0 ** ((i - (count - 1) / 2) * min(0.09, 0.5 / count)))


@dataclass(frozen=True)
class CumulativeRun:
    """One panel: per contestant the cumulative seconds of each process, [processes, PAPER_EPOCHS]."""

    task: str
    synthetic: bool
    batch_size: int
    curves: Mapping[str, np.ndarray]
    measured_epochs: int
    cells: pd.DataFrame


@lru_cache(maxsize=64)
def cumulative_runs(tables: Tables, section: Section) -> list[CumulativeRun]:
    """Return per task at batch size 512, or the largest that was measured."""
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
        runs.append(CumulativeRun(task, synthetic, int(size), curves, int(here.epochs.min()), shown))
    return runs


def _compile(raw: pd.DataFrame, index: int) -> float:
    value = raw.at[index, "compile_seconds"]
    return 0.0 if pd.isna(value) else float(value)


def cumulative_seconds(epoch_seconds: Sequence[float], compile_seconds: float) -> np.ndarray:
    """Return seconds from the start to the end of epochs 1 to 20, compilation first, shape [PAPER_EPOCHS].

    Where fewer epochs were measured, the process's median epoch stands for the others.
    """
    measured = list(epoch_seconds)[:PAPER_EPOCHS]
    rest = [stats.process_value(epoch_seconds)] * (PAPER_EPOCHS - len(measured))
    return compile_seconds + np.cumsum(measured + rest)


def cumulative(tables: Tables, section: Section, runs: Sequence[CumulativeRun]) -> Spec:
    """Return the paper's figure: cumulative seconds over 20 epochs, compile time included, a panel per task."""
    everyone = [name for name in tables.order if any(name in run.curves for run in runs)]
    style = looks.of_all(everyone, _private(tables))
    named, panels = True, []
    titles = _titles([(run.task, run.synthetic) for run in runs])
    for k, (run, above) in enumerate(zip(runs, titles, strict=True)):
        values = np.concatenate([curves.ravel() for curves in run.curves.values()])
        ends = float(values.min()) / 1.2, float(values.max()) * 1.2
        ticks = [(epoch, str(epoch)) for epoch in (1, 5, 10, 15, 20)]
        x = Axis(0.5, PAPER_EPOCHS + 0.5, log=False, ticks=ticks, title="epoch")
        y = panel.plain(ends, "cumulative seconds (log)" if k % 2 == 0 else "")
        one = Panel(x, y, HALF if len(runs) > 1 else WIDTH, LOW, [*above, f"batch {run.batch_size}"])
        for name in sorted(run.curves, key=lambda n: -np.median(run.curves[n][:, -1])):
            named &= _accumulated(one, run.curves[name], run.measured_epochs, style[name], tables.title(name))
        panels.append(one.spec())
    extended = min(run.measured_epochs for run in runs) < PAPER_EPOCHS
    notes = ["Line: median over processes; band: lowest to highest process."]
    gone = section.of(tables.cells)
    gone = gone[gone.state != "ok"]
    missing = sum(((gone.task == run.task) & (gone.batch_size == run.batch_size)).sum() for run in runs)
    if missing:
        cells = model.count(missing, "cell without a time is", "cells without a time are")
        notes.append(f"{cells} not shown; the table of failures says why.")
    if not named:
        notes.append("Grey lines without a name had no room for one; the table has them.")
    if extended:
        notes.append("Dashed: extrapolated, beyond the measured epochs each process goes on with its median epoch.")
    notes += _scaled(pd.concat([run.cells for run in runs]))
    title = "Cumulative seconds over 20 epochs, compile time included"
    return page(title, panels, tables, section, notes, everyone, style, columns=2)


def _accumulated(one: Panel, curves: np.ndarray, known: int, look: Look, title: str) -> bool:
    """Draw one contestant's ``curves`` [processes, epochs]: their median, dashed after ``known`` epochs, and their
    band. False where a grey line finds no room for its name."""
    epochs = range(1, PAPER_EPOCHS + 1)
    middle, low, high = (f(curves, axis=0) for f in (np.median, np.min, np.max))
    one.band(epochs, low, high, look)
    one.curve(epochs[:known], middle[:known], replace(look, line=look.line or "-"))
    one.curve(epochs[known - 1 :], middle[known - 1 :], replace(look, line="--"), 1.2)
    for epoch in epochs[::5]:
        one.mark(epoch, middle[epoch - 1], look)
    return look.colour != looks.GREY or one.name(PAPER_EPOCHS, middle[-1], title)  # grey is in no legend


def _bars(ok: pd.DataFrame, title: Callable[[str], str]) -> str:
    names = [f"{title(row.contestant)} at {row.batch_size}" for row in rows_of(ok)]
    each = " (median of its epochs each)" if (ok.n >= stats.INTERVAL_ROUNDS).any() else ""
    return f"Point: median of {model.processes(ok.n, names)}{each}{model.bars_note(ok.n)}."


def _failures(tables: Tables, group: pd.DataFrame) -> Iterator[str]:
    for (contestant, state), rows in group[group.state != "ok"].groupby(["contestant", "state"], sort=False):
        yield f"{tables.title(contestant)} at {', '.join(map(str, sorted(rows.batch_size)))}: {state}."
    disturbed = group[(group.state == "ok") & (group.disturbed > 0)]
    if len(disturbed):
        cells = ", ".join(f"{tables.title(r.contestant)} at {r.batch_size}" for r in rows_of(disturbed))
        yield f"Disturbed: {cells}."


def page(
    title: str,
    panels: Sequence[Spec],
    tables: Tables,
    section: Section,
    notes: Sequence[str],
    names: Sequence[str],
    style: Mapping[str, Look],
    columns: int = 1,
) -> Spec:
    """Return a figure with the legend of ``names``, the notes, and where and when it was measured."""
    where = f"{model.readable(section, model.processes_of(tables, section))}, rules {section.protocol}."
    legend = {tables.title(name): style[name] for name in names if style[name].colour != looks.GREY}
    return panel.page(title, panels, [*notes, where], legend, columns)

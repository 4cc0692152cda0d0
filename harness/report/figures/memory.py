"""Peak memory over batch size: a figure per task, with what failed at the batch size at which it failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.analysis.frames import Tables
from harness.report import model
from harness.report.figures import tasks as task_figures
from harness.report.figures.tasks import Look
from harness.report.model import MEBIBYTE, Picture, Section

FEWEST_SIZES = 3
"""Batch sizes; fewer make no curve, and the table says as much."""
INSTRUMENTS = {
    "peak_resident_growth": "Linux' count of resident pages (VmHWM), whichever allocator holds them, above the loaded "
    "data and model, in a process that measures nothing else",
    "nvml_process_peak": "the GPU driver (NVML), seen every 0.1 s",
    "cuda_peak_allocated": "the framework's own CUDA allocator, bytes that tensors occupied",
}
"""Notion of memory -> what counted it. The first that is on record for a task on its device is drawn."""
HOST = ("peak_resident_growth",)
ON_GPU = ("nvml_process_peak", "cuda_peak_allocated")
ROW = 0.07
"""Share of the height that the failures of one contestant take above the curves."""


def pictures(tables: Tables, section: Section) -> dict[str, list[Picture]]:
    """``peak-memory``: a figure per task with at least ``FEWEST_SIZES`` batch sizes of one notion."""
    style = {
        name: replace(look, line="-" if look.line == "-" else "--") for name, look in task_figures.looks(tables).items()
    }
    found: list[Picture] = []
    for task, synthetic, rows in model.blocks(section.of(tables.memory)):
        notion = next((n for n in (ON_GPU if section.device == "cuda" else HOST) if n in set(rows.notion)), None)
        measured = rows[rows.notion == notion]
        if measured.batch_size.nunique() < FEWEST_SIZES:
            continue
        stem = task_figures.file_name("peak-memory", section, measured.assign(extrapolated=False), task)
        title = f"{model.task_title(task, synthetic)}: peak memory over batch size"
        failed = model.memory_failures(tables, section, task, synthetic)
        draw = partial(over_batch_size, tables, section, task, synthetic, measured, failed, style)
        found.append(Picture(stem, title, draw))
    return {"peak-memory": found}


def over_batch_size(
    tables: Tables,
    section: Section,
    task: str,
    synthetic: bool,
    measured: pd.DataFrame,
    failed: pd.DataFrame,
    style: Mapping[str, Look],
) -> Figure:
    """MiB over batch size, both logarithmic. Contestants without DP are dashed."""
    figure = Figure(figsize=(task_figures.WIDTH, 3.4), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name in tables.order if name in {*measured.contestant, *failed.contestant}]
    for name in names:
        mine = measured[measured.contestant == name].sort_values("batch_size")
        values = [mine[column] / MEBIBYTE for column in ("median", "low", "high")]
        bars = [values[0] - values[1], values[2] - values[0]]
        task_figures.line(axes, mine.batch_size, values[0], bars, style[name])
    task_figures.log_axes(axes, sorted({*measured.batch_size, *failed.batch_size}))
    _mark(axes, failed, [name for name in names if name in set(failed.contestant)], style)
    axes.set_xlabel("batch size (log)")
    axes.set_ylabel("peak memory, MiB (log)")
    axes.set_title(f"{model.task_title(task, synthetic)}: peak memory", loc="left", fontweight="bold")
    task_figures.below(
        figure,
        f"{section.title}; measured {model.provenance(tables, section)}.",
        [_points(measured), f"Instrument: {INSTRUMENTS[measured.notion.iloc[0]]}.", *_in_words(failed, names)],
        [name for name in names if name in set(measured.contestant)],
        style,
    )
    return figure


def _mark(axes: Axes, failed: pd.DataFrame, names: Sequence[str], style: Mapping[str, Look]) -> None:
    """A row of states per contestant above the highest point, each at its batch size."""
    low, high = axes.get_ylim()
    share = ROW * len(names)
    axes.set_ylim(low, high * (high / low) ** (share / (1 - share)))
    for i, name in enumerate(names):
        for row in failed[failed.contestant == name].itertuples():
            axes.text(
                row.batch_size,
                1 - ROW * (i + 0.5),
                f"× {row.state}",
                transform=axes.get_xaxis_transform(),
                color=style[name].colour,
                ha="center",
                va="center",
                fontsize=7,
            )


def _points(measured: pd.DataFrame) -> str:
    n = model.usual(measured.n)
    if n == 1:
        return "Point: n = 1 process."
    bar = "lowest to highest" if n < 6 else "distribution-free 95 % interval"
    return f"Point: median of n = {n} processes; bar: {bar}."


def _in_words(failed: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """The marks, from the top row to the lowest."""
    by_state = {
        (name, state): ", ".join(map(str, sorted(rows.batch_size)))
        for (name, state), rows in failed.groupby(["contestant", "state"])
    }
    lines = [f"{name} at {sizes}: {state}" for (name, state), sizes in by_state.items()]
    lines.sort(key=lambda line: names.index(line.partition(" at ")[0]))
    return [f"× {'; '.join(lines)}."] if lines else []

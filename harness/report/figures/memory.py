"""Peak memory over batch size: a figure per task, with what failed at the batch size at which it failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pandas as pd

from harness.analysis.frames import Tables
from harness.analysis.tidy import rows_of
from harness.report import model
from harness.report.figures import looks, panel
from harness.report.figures import tasks as task_figures
from harness.report.figures.looks import Look
from harness.report.figures.panel import Panel, Spec
from harness.report.model import MEBIBYTE, Picture, Section

FEWEST_SIZES = 3
"""Batch sizes; fewer make no curve, and the table says as much."""
INSTRUMENTS = {
    "peak_resident_growth": "resident pages as Linux counts them (VmHWM), without those of files, whichever allocator "
    "holds them, above the loaded data and model, in a process that measures nothing else",
    "nvml_process_peak": "the GPU driver (NVML), seen every 0.1 s",
    "cuda_peak_allocated": "the framework's own CUDA allocator, bytes that tensors occupied",
}
"""Metric of memory -> what counted it. The first that is on record for a task on its device is drawn."""
HOST = ("peak_resident_growth",)
ON_GPU = ("nvml_process_peak", "cuda_peak_allocated")
ROW = 0.07
"""Share of the height that the failures of one contestant take above the curves."""


def pictures(tables: Tables, section: Section) -> dict[str, list[Picture]]:
    """``peak-memory``: a figure per task with at least ``FEWEST_SIZES`` batch sizes of one metric."""
    private = dict(zip(tables.raw.contestant, tables.raw.private, strict=True))
    found: list[Picture] = []
    for task, synthetic, rows in model.blocks(section.of(tables.memory)):
        metric = next((n for n in (ON_GPU if section.device == "cuda" else HOST) if n in set(rows.metric)), None)
        # A growth of nothing has no place on a logarithmic axis; the table shows it.
        measured = rows[(rows.metric == metric) & (rows["median"] > 0)]
        if measured.batch_size.nunique() < FEWEST_SIZES:
            continue
        measured = measured.assign(extrapolated=False)
        stem = task_figures.file_name("peak-memory", tables, section, measured, task)
        title = f"{model.task_title(task, synthetic)}: peak memory over batch size"
        failed = model.memory_failures(tables, section, task, synthetic)
        style = looks.of_all([n for n in tables.order if n in {*measured.contestant, *failed.contestant}], private)
        draw = partial(over_batch_size, tables, section, task, synthetic, measured, failed, style)
        found.append(task_figures.picture(stem, title, tables, section, measured, draw))
    return {"peak-memory": found}


def over_batch_size(
    tables: Tables,
    section: Section,
    task: str,
    synthetic: bool,
    measured: pd.DataFrame,
    failed: pd.DataFrame,
    style: Mapping[str, Look],
) -> Spec:
    """MiB over batch size, both logarithmic. Contestants without DP are dotted."""
    names = [name for name in tables.order if name in {*measured.contestant, *failed.contestant}]
    sizes = sorted({*measured.batch_size, *failed.batch_size})
    lost = [name for name in names if name in set(failed.contestant)]
    low, high = panel.around(measured["median"] / MEBIBYTE)
    share = ROW * len(lost)
    top = high * (high / low) ** (share / (1 - share))  # a row of states per contestant above the highest point
    y = panel.plain((low, top), "peak memory, MiB (log)")
    one = Panel(panel.of_sizes(sizes, "batch size (log)"), y, task_figures.WIDTH, task_figures.HEIGHT)
    for name in names:
        shown = task_figures.points(measured[measured.contestant == name], "median", MEBIBYTE)
        panel.over_sizes(one, sizes, shown, style[name], label=tables.title(name))
    for i, name in enumerate(lost):
        height = top / (top / low) ** (ROW * (i + 0.9))
        for row in rows_of(failed[failed.contestant == name]):
            one.write(row.batch_size, height, f"× {row.state}", str(style[name].colour))
    notes = [
        _points(measured, tables.title),
        f"Instrument: {INSTRUMENTS[measured.metric.iloc[0]]}.",
        *_in_words(tables, failed, names),
    ]
    with_points = [name for name in names if name in set(measured.contestant)]
    title = f"{model.task_title(task, synthetic)}: peak memory"
    return task_figures.page(title, [one.spec()], tables, section, notes, with_points, style)


def _points(measured: pd.DataFrame, title: Callable[[str], str]) -> str:
    names = [f"{title(row.contestant)} at {row.batch_size}" for row in rows_of(measured)]
    return f"Point: median of {model.processes(measured.n, names)}{model.bars_note(measured.n)}."


def _in_words(tables: Tables, failed: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return the marks, from the top row to the lowest."""
    by_state = {
        (name, state): ", ".join(map(str, sorted(rows.batch_size)))
        for (name, state), rows in failed.groupby(["contestant", "state"])
    }
    ordered = sorted(by_state.items(), key=lambda item: names.index(item[0][0]))
    lines = [f"{tables.title(name)} at {sizes}: {state}" for (name, state), sizes in ordered]
    return [f"× {'; '.join(lines)}."] if lines else []

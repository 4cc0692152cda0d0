"""The line of a process in the terminal: what is measured, and the result."""

from __future__ import annotations

from statistics import median
from textwrap import shorten

from harness.plan.e2e import Job
from harness.plan.layers import LayerJob
from harness.run.held import is_held, released
from harness.run.remaining import Key
from harness.store.record import Record
from harness.worker import memory


def title_of(job: Job | LayerJob) -> str:
    """``imdb-lstm · opacus-hooks · batch 64``: what is the same in all cells of a run is left out."""
    cell = job.cell
    return " · ".join(part for part in (cell.layer or cell.task, cell.runner, cell.passes) if part) + (
        f" · batch {cell.batch_size}"
    )


def key_of(job: Job | LayerJob) -> Key:
    """Return what tells how long a process takes, from the general to the particular."""
    cell = job.cell
    return (job.purpose, cell.layer or cell.task, str(cell.batch_size), cell.runner, cell.passes or "")


def outcome_of(record: Record) -> str:
    """Return what the line of a finished process says: its figure, or its state and the beginning of the reason."""
    if is_held(record):
        return f"{outcome_of(released(record))}, if its replay is the same"
    if record.state != "ok":
        return record.state + (f": {shorten(record.reason, 120, placeholder=' …')}" if record.reason else "")
    if record.epoch_seconds:
        is_extrapolated = record.timed is not None and record.timed.extrapolated
        is_disturbed = record.load is not None and record.load.disturbed
        marks = ["extrapolated"] * is_extrapolated + ["disturbed"] * is_disturbed
        return f"{number(median(record.epoch_seconds))} s per epoch" + (f" ({', '.join(marks)})" if marks else "")
    if record.layer is not None and record.layer.pass_seconds:
        return f"{number(1e3 * median(record.layer.pass_seconds))} ms per pass"
    peak = record.layer.parts.peak if record.layer and record.layer.parts else record.memory.get(memory.GROWTH)
    return "ok" if peak is None else f"peak {number(peak / 2**20)} MiB"


def number(value: float) -> str:
    """Three significant digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"

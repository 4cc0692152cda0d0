"""The chapter of the memory frontier: the largest physical batch in a budget, and the throughput there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from harness.analysis import naming, stats, tidy
from harness.analysis.naming import number
from harness.analysis.tidy import SECTION, rows_of
from harness.report import model
from harness.report.figures import frontier as figure
from harness.report.model import MEBIBYTE, MISSING, Chapter, Grid, Picture
from harness.store.record import Record
from harness.worker import memory

PLACE = [*SECTION, "task", "synthetic", "budget_bytes"]


def chapters(records: Sequence[Record]) -> Iterable[Chapter]:
    """Yield one chapter a section; none where no record is of kind frontier."""
    raw = probes([r for r in records if r.cell.kind == "frontier"])
    if raw.empty:
        return
    found = frontiers(raw)
    sections = model.sections_of(raw)
    names = model.section_names(sections)
    for section in sections:
        here, of_here = section.of(raw), section.of(found)
        when = model.measured(here)
        pictures = tuple(
            Picture(
                naming.slug("memory-frontier", task, names[section], "synthetic" if synthetic else ""),
                f"{model.task_title(task, synthetic)}: throughput and peak memory over the physical batch size",
                partial(figure.draw, section, task, synthetic, group, here, tuple(endings(group))),
                f"{section.title}; measured {when}.",
            )
            for task, synthetic, group in model.blocks(of_here)
            if group.batch_size.notna().any()
        )
        grids = tuple(_grid(task, synthetic, group) for task, synthetic, group in model.blocks(of_here))
        frames = {"frontier": of_here, "frontier-probes": here}
        yield Chapter("Memory frontier", section, grids, pictures, frames, when, in_terminal=True)


def probes(records: Sequence[Record]) -> pd.DataFrame:
    """Return one row per probe, of the latest run of each contestant and task in a section and budget."""
    rows = []
    for r in records:
        if r.purpose != "probe" or r.probe is None:
            continue
        state, reason = tidy.admitted(r)
        seconds = r.probe.step_seconds if state == "ok" else []
        growth = r.memory.get("cuda_peak_allocated", r.memory.get(memory.GROWTH_WITH_COMPILE))
        rows.append(
            {
                "machine": naming.machine_label(r.machine),
                "device": r.cell.device,
                "protocol": r.cell.protocol,
                "isolation": r.cell.isolation,
                "task": r.cell.task,
                "synthetic": bool(r.data and r.data.synthetic),
                "budget_bytes": r.probe.budget_bytes or r.probe.device_bytes or 0,
                "contestant": r.cell.contestant,
                "framework": r.cell.framework,
                "private": r.cell.private,
                "batch_size": r.cell.batch_size,
                "stage": r.probe.stage,
                "state": state,
                "reason": " ".join((reason or "").split()),
                "peak_bytes": growth if state in {"ok", "oom"} else None,
                "start_up_bytes": r.probe.start_up_bytes,
                "examples_per_second": r.cell.batch_size * len(seconds) / sum(seconds) if seconds else None,
                "first_step_seconds": r.probe.first_step_seconds,
                "steps": len(seconds),
                "train_size": r.data.train_size if r.data else None,
                "disturbed": bool(r.load and r.load.disturbed),
                "run": r.block.run,
                "round": r.block.round,
                "started": r.started,
                "when": r.when,
                "commit": r.source.commit,
                "dirty": r.source.dirty,
            }
        )
    raw = pd.DataFrame(rows)
    if raw.empty:
        return raw
    for column in ("peak_bytes", "examples_per_second", "start_up_bytes", "first_step_seconds", "train_size"):
        raw[column] = raw[column].astype(float)
    latest = raw.sort_values("when", kind="stable").groupby([*PLACE, "contestant"]).run.transform("last")
    return raw[raw.run == latest.sort_index()].reset_index(drop=True)


def frontiers(raw: pd.DataFrame) -> pd.DataFrame:
    """Return one row per contestant and task: ``batch_size``, the largest that fits (NaN where none does), ``misfit``,
    the smallest larger one that did not, if only in one process of several (NaN where the search ended before, so that
    the frontier is a lower bound), ``ended``: the state that ended the search, peak memory there, and the throughput
    with its spread."""
    rows = []
    for place, group in raw.groupby([*PLACE, "contestant"], sort=False):
        where = dict(zip([*PLACE, "contestant"], place, strict=True))
        search = group[group.stage == "search"]
        misfit = group[group.state == "oom"].batch_size.min()
        fits = group[(group.state == "ok") & ~(group.batch_size >= misfit)].sort_values(["batch_size", "peak_bytes"])
        ended = search[~search.state.isin(["ok", "oom"])]
        size = fits.batch_size.max()
        there = group[(group.stage == "throughput") & (group.batch_size == size)]
        at = there[there.state == "ok"]
        rate = stats.median_interval(at.examples_per_second.tolist()) if len(at) else None
        rows.append(
            {
                **where,
                "private": bool(group.private.iloc[0]),
                "batch_size": size,
                "misfit": misfit,
                "ended": ended.state.iloc[-1] if len(ended) else "oom" if pd.notna(misfit) else "ok",
                "reason": ended.reason.iloc[-1] if len(ended) else "",
                "whole_training_set": bool(len(fits) and size >= fits.train_size.iloc[-1]),
                "peak_bytes": fits.peak_bytes.iloc[-1] if len(fits) else None,
                "bytes_per_example": _slope(fits),
                "start_up_bytes": search.start_up_bytes.median(),
                "examples_per_second": rate.median if rate else None,
                "low": rate.low if rate else None,
                "high": rate.high if rate else None,
                "n": rate.n if rate else 0,
                "failed": len(there) - len(at),
                "not_again": sorted(search[(search.state == "ok") & (search.batch_size >= misfit)].batch_size),
                "disturbed": int(at.disturbed.sum()),
                "probes": len(search),
            }
        )
    frame = pd.DataFrame(rows)
    for column in ("batch_size", "misfit", "peak_bytes", "bytes_per_example", "examples_per_second", "low", "high"):
        frame[column] = frame[column].astype(float)
    fastest_first = {**dict.fromkeys(PLACE, True), "examples_per_second": False, "contestant": True}
    return frame.sort_values(list(fastest_first), ascending=list(fastest_first.values()))


def _slope(fits: pd.DataFrame) -> float | None:
    """Return bytes by which the peak grows with an example: from the nearest size that is a third smaller than the
    largest, or else the farthest that is a tenth smaller (between nearer ones the allocator's noise would count)."""
    known = fits[fits.peak_bytes.notna()]
    if known.empty:
        return None
    last = known.iloc[-1]
    far = known[known.batch_size <= last.batch_size / 1.5]
    near = known[known.batch_size <= last.batch_size / 1.1]
    if near.empty:
        return None
    other = far.iloc[-1] if len(far) else near.iloc[0]
    return float((last.peak_bytes - other.peak_bytes) / (last.batch_size - other.batch_size))


def _grid(task: str, synthetic: bool, group: pd.DataFrame) -> Grid:
    on_cuda = group.device.iloc[0] == "cuda"
    n = model.usual(group[group.n > 0].n)
    columns: model.Columns = {
        "contestant": lambda r: r.contestant,
        "largest batch": _batch,
        "does not fit": lambda r: MISSING if pd.isna(r.misfit) else f"{r.misfit:.0f}",
        "peak MiB": lambda r: number(r.peak_bytes / MEBIBYTE),
        # A peak that micro-batches bound does not fall with the batch; a slope below 0 is the allocator's noise.
        "KiB an example": lambda r: "≤ 0" if r.bytes_per_example <= 0 else number(r.bytes_per_example / 1024),
        "examples / s": lambda r: _rate(r, n),
        "start-up MiB": lambda r: number(r.start_up_bytes / MEBIBYTE),
    }
    budget = number(group.budget_bytes.iloc[0] / MEBIBYTE)
    notes = [
        f"Budget: {budget} MiB "
        + ("of the device." if on_cuda else "above start-up (model and data in place, no step)."),
        "Peak: "
        + ("bytes of tensors on the device" if on_cuda else "resident growth of the process during the steps")
        + ", compilation included; KiB an example: by how much it grows with the batch.",
        model.spread_note(n) if n else "No throughput was measured.",
        *endings(group),
    ]
    if group.disturbed.any():
        notes.append(model.DISTURBED_NOTE)
    return model.listed(f"{model.task_title(task, synthetic)}: largest physical batch", group, columns, notes)


def _batch(row: Any) -> str:
    if pd.isna(row.batch_size):
        return "none" if row.ended == "oom" else str(row.ended)
    return ("" if row.ended == "oom" else "≥ ") + f"{row.batch_size:.0f}"


def endings(group: pd.DataFrame) -> Iterable[str]:
    """Yield a sentence for each kind of search that did not end at the memory budget."""
    whole = group[(group.ended == "ok") & group.whole_training_set]
    if len(whole):
        yield f"≥ the whole training set fits: {', '.join(whole.contestant)}."
    cut = group[(group.ended == "ok") & ~group.whole_training_set & group.batch_size.notna()]
    if len(cut):
        yield f"≥ no larger size was tried, by the ceiling or the longest step of the run: {', '.join(cut.contestant)}."
    for r in rows_of(group[~group.ended.isin(["ok", "oom"])]):
        yield f"{r.ended}: {r.contestant}: {model.short(r.reason)}"
    for r in rows_of(group[group.failed > 0]):
        yield f"{r.contestant}: at its frontier {r.failed} of {r.failed + r.n} further processes failed."
    for r in rows_of(group[group.not_again.str.len() > 0]):
        sizes = ", ".join(f"{size:.0f}" for size in r.not_again)
        yield f"{r.contestant}: {sizes} fitted in the search and did not in a further process."


def _rate(row: Any, usual_n: int) -> str:
    if not row.n:
        return MISSING
    spread = model.interval(row.low, row.high)
    return f"{number(row.examples_per_second)}{'ᵈ' if row.disturbed else ''}{spread}" + (
        "" if row.n == usual_n else f" n={row.n}"
    )

"""Tables of pages, made from committed records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis import frames, naming
from harness.analysis.frames import Tables
from harness.analysis.naming import factor
from harness.analysis.tidy import rows_of
from harness.errors import BadInput
from harness.published import board as who_wins
from harness.published import compute as computing
from harness.published.index import FOLDER, Entry
from harness.report import contents, standings
from harness.report.chapters import fastest_peer
from harness.report.formats import markdown
from harness.report.model import doubts
from harness.store import read
from harness.store.record import Record
from harness.tasks import TASKS

LIBRARY = "dpcore"
ENGINE, LOOP = f"{LIBRARY}-native", f"{LIBRARY}-loop"
"""Contestants of those who install the wheel for Linux: by the library's own loop, and by the one that README shows."""


def ratios(entries: Sequence[Entry], sizes: Sequence[int] = ()) -> str:
    """Return the table of dpcore's time over that of the fastest peer and of PyTorch without DP.

    A ratio is taken within one run. Where several runs hold a cell, the newest one is shown.

    Args:
        entries: Runs whose records are read; those without end-to-end times add nothing.
        sizes: Batch sizes to show; all if empty.
    """
    rows = against(entries, sizes)
    rows = rows[rows.contestant.str.startswith(f"{LIBRARY}-")]
    shown = {(row.task, row.batch_size, row.contestant, row.against): _ratio(row) for row in rows_of(rows)}
    order = list(TASKS)
    cells = sorted({key[:3] for key in shown}, key=lambda key: (order.index(key[0]), *key[1:]))
    lines = ["| task | batch | contestant | over the fastest peer | over PyTorch without DP |", "|:--|--:|:--|:--|:--|"]
    for cell in cells:
        peer, plain = (shown.get((*cell, against), "–") for against in (fastest_peer.PEER, fastest_peer.WITHOUT_DP))
        lines.append(f"| {cell[0]} | {cell[1]} | {cell[2]} | {peer} | {plain} |")
    return "\n".join(lines)


def sentence(entries: Sequence[Entry], size: int) -> str:
    """Return the result at one batch size in a sentence: dpcore's smallest and largest ratio over the tasks, in the
    loop that README shows and by its Engine.

    Raises:
        BadInput: The runs hold no time of dpcore at this batch size.
    """
    rows = against(entries, [size])
    shown = [name for name in (LOOP, ENGINE) if name in set(rows.contestant)]
    if not shown:
        raise BadInput(f"No run of {', '.join(e.name for e in entries)} has a time of {ENGINE} at {size}.")
    mine = rows[rows.contestant.isin(shown)]
    parts = []
    for against_what, whom in (
        (fastest_peer.PEER, "the fastest other exact framework"),
        (fastest_peer.WITHOUT_DP, "PyTorch without DP"),
    ):
        here = mine[mine.against == against_what]
        spans = [_span(here[here.contestant == name].ratio) for name in shown]
        engine = f" ({spans[1]} by `Engine`)" if len(spans) > 1 else ""
        parts.append(f"{spans[0]} of the time of {whom}{engine}")
    where = " and ".join(dict.fromkeys(naming.where(m, sorted(str(e.date) for e in entries)) for m in mine.machine))
    tasks = "task" if mine.task.nunique() == 1 else "tasks"
    partly = "" if mine.extrapolated.all() else "partly "
    scaled = f", {partly}extrapolated from parts of epochs" if mine.extrapolated.any() else ""
    return (
        f"**Training with DP in {naming.titles()[shown[0]]} takes {', and '.join(parts)}** ({mine.task.nunique()} "
        f"{tasks} at batch {size}, {where}{scaled})."
    )


def _span(values: pd.Series) -> str:
    low, high = factor(values.min()), factor(values.max())
    return low if low == high else f"{low} to {high}"


def against(entries: Sequence[Entry], sizes: Sequence[int] = ()) -> pd.DataFrame:
    """Return every private contestant's time over that of the fastest peer and of PyTorch without DP.

    The rows are those of :func:`harness.report.chapters.fastest_peer.frame`, in the order of the tasks. A ratio is
    taken within one run; where several runs hold a cell, the newest one counts.

    Args:
        entries: Runs whose records are read; those without end-to-end times add nothing.
        sizes: Batch sizes to keep; all if empty.
    """
    found = [fastest_peer.frame(tables) for entry in sorted(entries, key=_age) if (tables := _tables(entry.file))]
    rows = pd.concat([f for f in found if len(f)], ignore_index=True)
    rows = rows[(rows.protocol.str.startswith("verified-v")) & (rows.batch_size.isin(sizes) if sizes else True)]
    rows = rows.drop_duplicates(["task", "batch_size", "contestant", "against"], keep="last")
    return rows.sort_values("task", key=lambda column: column.map(list(TASKS).index), kind="stable")


def _ratio(row: Any) -> str:
    few = "" if row.n == 5 else f" n={row.n}"
    bounds = "" if math.isnan(row.low) else f" [{factor(row.low)}, {factor(row.high)}]"
    return f"{factor(row.ratio)}{doubts(row)}{bounds} {row.other}{few}"


def grids(entries: Sequence[Entry], title: str) -> str:
    """Return those tables of the report over all entries whose title matches a pattern such as ``*: accuracy``.

    Raises:
        BadInput: No table has such a title.
    """
    report = contents.build(read.load(*(FOLDER / entry.file for entry in entries)))
    found = [grid for chapter in report.chapters for grid in chapter.grids if fnmatchcase(grid.title, title)]
    if not found:
        raise BadInput(
            f"No table of {', '.join(e.name for e in entries)} has a title like {title!r}; see its report.md."
        )
    return "\n\n".join(map(markdown.table, found))


def winners(chosen: Sequence[tuple[Entry, Sequence[str]]]) -> str:
    """Return who wins where and by how much over all of them: a paragraph, and a line for every task and batch size.

    Args:
        chosen: Runs, each with the tasks that are taken from it; none: all of them.

    Raises:
        BadInput: The runs hold no time with DP of these tasks.
    """
    return _told(standings.text, chosen)


def board(chosen: Sequence[tuple[Entry, Sequence[str]]], sizes: Sequence[int] = ()) -> str:
    """Return who wins where as a table, a row for each library.

    Args:
        chosen: As :func:`winners` has them.
        sizes: Batch sizes to show; all if empty.

    Raises:
        BadInput: The runs hold no time with DP of these tasks and sizes.
    """
    return _told(lambda tables: who_wins.text(tables, sizes), chosen)


def compute(entries: Sequence[Entry]) -> str:
    """Return the sentence that says how many hours of which machines some runs took."""
    return computing.statement([(entry, _records(entry.file)) for entry in entries])


def _told(tell: Callable[[Tables], str], chosen: Sequence[tuple[Entry, Sequence[str]]]) -> str:
    kept = [
        record for entry, tasks in chosen for record in _records(entry.file) if not tasks or record.cell.task in tasks
    ]
    found = tell(frames.build(kept)) if kept else ""
    if not found:
        raise BadInput(f"No run of {', '.join(entry.name for entry, _ in chosen)} has a time with DP of these tasks.")
    return found


def _age(entry: Entry) -> tuple[str, str]:
    return max(r.started for r in _records(entry.file)), entry.name


@cache
def _records(file: str) -> list[Record]:
    return read.load(Path(FOLDER, file))


@cache
def _tables(file: str) -> Tables | None:
    kept = [r for r in _records(file) if r.cell.kind == "e2e" and r.purpose != "memory"]
    timed = any(r.purpose == "time" and r.state == "ok" for r in kept)
    return frames.build(kept) if timed else None

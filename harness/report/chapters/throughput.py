"""Examples and tokens per second, and the share of the speed without DP that is left."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from harness.analysis import energy
from harness.analysis.frames import Tables
from harness.analysis.naming import number
from harness.analysis.tidy import CELL
from harness.report.chapters import costs
from harness.report.chapters.tables import seconds_notes
from harness.report.model import MISSING, Columns, Grid, Section, blocks, listed, task_title, times
from harness.tasks import TASKS, TOKEN_LOSS


def frame(tables: Tables) -> pd.DataFrame:
    """Return the cells that have a time with ``examples_per_second``, ``tokens_per_second`` (every position counts,
    padding too; none where inputs are not tokens) and, of ``over_twin``, its bounds ``twin_low`` and ``twin_high``: the
    time over that of the same framework without DP, paired in blocks. ``joules_`` and the name of a counter: joules per
    example, where there are any. ``utilisation``: the model's FLOPs (forward and backward, whatever the contestant
    computes besides) a second over the machine's measured peak; none where no peak of that precision was measured."""
    found = tables.cells[(tables.cells.state == "ok") & tables.cells.task.isin(TASKS)].copy()
    sizes = found.task.map(lambda task: TASKS[task].train_size)
    tokens = found.task.map(lambda task: TASKS[task].tokens or float("nan"))
    found["examples_per_second"] = sizes / found["median"]
    found["tokens_per_second"] = found.examples_per_second * tokens
    found = _with_joules(found, tables)
    floors = costs.floor(tables)
    if floors.empty:
        found["utilisation"] = float("nan")
    else:
        share = floors.assign(utilisation=floors.arithmetic_seconds / floors.seconds)[[*CELL, "utilisation"]]
        found = found.merge(share, on=CELL, how="left")
    names = {"dp": "over_twin", "dp_low": "twin_low", "dp_high": "twin_high"}
    if tables.overheads.empty or found.empty:
        return found.assign(twin=None, over_twin=float("nan"), twin_low=float("nan"), twin_high=float("nan"))
    ratios = tables.overheads[[*CELL, "twin", *names]].rename(columns=names)
    return found.merge(ratios, on=CELL, how="left")


JOULES = "joules_"


def _with_joules(found: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """With a column for each counter that says something of any cell."""
    timed = tables.raw[(tables.raw.purpose == "time") & (tables.raw.state == "ok") & ~tables.raw.superseded]
    cells = {cell: energy.median(tables.records[i] for i in rows) for cell, rows in timed.groupby(CELL).groups.items()}
    for counter in sorted({counter for joules in cells.values() for counter in joules}):
        places = found[CELL].itertuples(index=False, name=None)
        found[JOULES + counter] = [cells.get(place, {}).get(counter, float("nan")) for place in places]
    return found


def without_joules(tables: Tables, section: Section) -> str | None:
    """Return one sentence on why a section has no joules per example, of all or of some counters; None where it has,
    or its records are of before they were looked for."""
    raw = section.of(tables.raw)
    timed = raw[(raw.purpose == "time") & (raw.state == "ok") & ~raw.superseded]
    return energy.missing(tables.records[i] for i in timed.index)


def of_texts(shown: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of tasks that predict tokens, whose speed is told in tokens everywhere."""
    return shown[[TASKS[task].loss == TOKEN_LOSS for task in shown.task]]


def grids(shown: pd.DataFrame, missing: str | None = None) -> Iterator[Grid]:
    """Yield a grid per task of what :func:`frame` returns; ``missing``: a note for the first of them."""
    for task, synthetic, group in blocks(shown):
        counters = [c for c in group.columns if c.startswith(JOULES) and group[c].notna().any()]
        has_tokens, has_peak = (bool(group[c].notna().any()) for c in ("tokens_per_second", "utilisation"))
        columns: Columns = {
            "contestant": lambda r: r.contestant,
            "batch": lambda r: str(r.batch_size),
            "examples/s": lambda r: number(r.examples_per_second),
            **({"tokens/s": lambda r: number(r.tokens_per_second)} if has_tokens else {}),
            **({"of peak": lambda r: _percent(r.utilisation)} if has_peak else {}),
            **{f"J/example, {c.removeprefix(JOULES)}": partial(_value, c) for c in counters},
            "time over twin": lambda r: times(r.over_twin, r.twin_low, r.twin_high),
            "twin": lambda r: r.twin if isinstance(r.twin, str) else MISSING,
        }
        notes = ["From the median seconds per epoch. The twin is the same without DP; paired in blocks, 95 % interval."]
        if has_tokens:
            notes.append(f"Tokens: {TASKS[task].tokens} positions of every example, padding included.")
        if has_peak:
            notes.append(
                "Of peak: the FLOPs of the model's forward and backward pass, a second, over the float32 product that "
                "was measured on this machine with the same threads (model FLOP utilisation). What DP computes besides "
                "is not counted."
            )
        if counters:
            notes.append(
                "Joules: what the machine's counters moved by while the clock ran, all that ran there included, less "
                "what the idle machine took before the run; median over processes."
            )
        notes += [missing] if missing else []
        missing = None
        notes += [note for note in seconds_notes(group, ()) if note.startswith(("ᵉ", "ᵈ"))]
        yield listed(f"{task_title(task, synthetic)}: examples per second", group, columns, notes)


def _value(column: str, row: Any) -> str:
    return number(getattr(row, column))


def _percent(share: float) -> str:
    return MISSING if pd.isna(share) else f"{100 * share:.0f} %"

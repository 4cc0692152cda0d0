"""The main result of a section at one look: tasks by contestants, and one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pandas as pd

from harness.analysis.frames import Tables, rows_of
from harness.analysis.naming import factor, number
from harness.report.model import Section, blocks, doubts, task_title

BATCH_SIZE = 512
"""The one that is shown of a task, if it was measured; else the largest."""
DARKEST = 16.0
"""Ratio from which on all cells are equally dark."""


@dataclass(frozen=True)
class Square:
    """``text``: ratio, seconds or state; ``shade``: 0 (as fast as without DP, or faster) to 1; ``cell``: its name."""

    text: str
    shade: float
    cell: str


@dataclass(frozen=True)
class Column:
    """A task at one batch size. ``squares``: by contestant."""

    title: str
    batch_size: int
    squares: Mapping[str, Square]


@dataclass(frozen=True)
class Overview:
    """``rows``: contestants with DP, the fastest first, then those without; ``private``: how many are of the first."""

    sentence: str
    columns: Sequence[Column]
    rows: Sequence[str]
    private: int


@lru_cache(maxsize=4)
def of(tables: Tables, section: Section) -> Overview | None:
    """Return the main result of a section; None where nothing was timed in it."""
    cells = section.of(tables.cells)
    if not (cells.state == "ok").any():
        return None
    ratios = section.of(tables.ratios)
    columns, fastest = [], []
    for task, synthetic, group in blocks(cells):
        sizes = sorted(group.batch_size[group.state == "ok"].unique())
        if not sizes:
            continue
        size = BATCH_SIZE if BATCH_SIZE in sizes else sizes[-1]
        here = group[group.batch_size == size]
        over = _ratios(ratios, task, synthetic, size)
        columns.append(Column(task_title(task, synthetic), int(size), _squares(here, over)))
        timed = here[(here.state == "ok") & here.private]
        if len(timed):
            best = timed.loc[timed["median"].idxmin()].contestant
            fastest.append((task_title(task, synthetic), str(best), over[best].ratio if best in over else math.nan))
    private = dict(zip(cells.contestant, cells.private, strict=True))
    shown = [name for name in tables.order if any(name in column.squares for column in columns)]
    rows = sorted(shown, key=lambda name: not private[name])
    return Overview(_sentence(tables, fastest), columns, rows, sum(private[name] for name in rows))


def _ratios(ratios: pd.DataFrame, task: str, synthetic: bool, size: int) -> Mapping[str, Any]:
    if ratios.empty:
        return {}
    here = ratios[(ratios.task == task) & (ratios.synthetic == synthetic) & (ratios.batch_size == size)]
    return {row.contestant: row for row in rows_of(here)}


def _squares(here: pd.DataFrame, over: Mapping[str, Any]) -> Mapping[str, Square]:
    base = next(iter(over.values())).baseline if over else None
    found = {}
    for row in rows_of(here):
        ratio = over.get(row.contestant)
        if row.state != "ok":
            found[row.contestant] = Square(row.state, 0.0, row.cell)
        elif ratio is not None:
            shade = min(1.0, max(0.0, math.log(ratio.ratio) / math.log(DARKEST)))
            found[row.contestant] = Square(f"{factor(ratio.ratio)}×{doubts(ratio)}", shade, row.cell)
        elif row.contestant == base:
            found[row.contestant] = Square(f"1.00×{doubts(row)}", 0.0, row.cell)
        else:
            found[row.contestant] = Square(f"{number(row.median)} s{doubts(row)}", 0.0, row.cell)
    return found


def _sentence(tables: Tables, fastest: Sequence[tuple[str, str, float]]) -> str:
    """Return who is the fastest with DP, by task, and what that costs."""
    if not fastest:
        return "No contestant with DP has a time."
    known = [ratio for _, _, ratio in fastest if not math.isnan(ratio)]
    cost = ""
    if known:
        low, high = factor(min(known)), factor(max(known))
        cost = f", in {low if low == high else f'{low} to {high}'} of the time of PyTorch without DP"
    names = list(dict.fromkeys(name for _, name, _ in fastest))
    if len(names) == 1:
        tasks = "every task" if len(fastest) > 1 else fastest[0][0]
        return f"With DP, {tables.title(names[0])} is the fastest on {tasks}{cost}."
    parts = [f"{tables.title(name)} on {_listed([task for task, who, _ in fastest if who == name])}" for name in names]
    return f"Fastest with DP: {'; '.join(parts)}{cost}."


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

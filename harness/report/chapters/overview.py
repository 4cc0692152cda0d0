"""The main result of a section at one look: tasks by contestants, and one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pandas as pd

from harness.analysis.frames import Tables
from harness.analysis.naming import factor, number
from harness.analysis.standing import Standing, standings
from harness.analysis.tidy import PLACE, rows_of
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

    task: str
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
    first = standings(tables)
    columns, found = [], []
    for task, synthetic, group in blocks(cells):
        sizes = sorted(group.batch_size[group.state == "ok"].unique())
        if not sizes:
            continue
        size = BATCH_SIZE if BATCH_SIZE in sizes else sizes[-1]
        here = group[group.batch_size == size]
        over = _ratios(ratios, task, synthetic, size)
        columns.append(Column(task, task_title(task, synthetic), int(size), _squares(here, over)))
        place = (*(here.iloc[0][column] for column in PLACE), size)
        if place in first:
            best = over.get(first[place].first)
            found.append((task_title(task, synthetic), first[place], best.ratio if best else math.nan))
    private = dict(zip(cells.contestant, cells.private, strict=True))
    shown = [name for name in tables.order if any(name in column.squares for column in columns)]
    rows = sorted(shown, key=lambda name: not private[name])
    return Overview(_sentence(tables, found), columns, rows, sum(private[name] for name in rows))


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


def _sentence(tables: Tables, found: Sequence[tuple[str, Standing, float]]) -> str:
    """Return who is the fastest with DP, task by task, and what that costs; who cannot be told from whom; who was timed
    alone. ``found``: task, its leader, and the leader's time over that of PyTorch without DP (NaN: not known)."""
    if not found:
        return "No contestant with DP has a time."
    told = [one for one in found if one[1].is_shown]
    said = [_fastest(tables, told, len(told) == len(found))] if told else []
    pairs: dict[tuple[str, str, bool], list[str]] = {}
    for task, standing, _ in found:
        if (other := standing.untold) is not None:
            both = tables.title(standing.first), tables.title(other.contestant), other.evidence == "overlap"
            pairs.setdefault(both, []).append(f"{task} ({other.basis})")
    for (a, b, overlap), tasks in pairs.items():
        where = _listed(tasks)
        few = f"Too few undisturbed rounds to tell {a} from {b} on {where}."
        said.append(f"{a} and {b} cannot be told apart on {where}." if overlap else few)
    alone: dict[str, list[str]] = {}
    for task, standing, _ in found:
        if standing.runner_up is None:
            alone.setdefault(tables.title(standing.first), []).append(task)
    said += [f"No other framework than that of {name} was timed with DP on {_listed(t)}." for name, t in alone.items()]
    return " ".join(said)


def _fastest(tables: Tables, told: Sequence[tuple[str, Standing, float]], everywhere: bool) -> str:
    known = [ratio for _, _, ratio in told if not math.isnan(ratio)]
    cost = ""
    if known:
        low, high = factor(min(known)), factor(max(known))
        cost = f", in {low if low == high else f'{low} to {high}'} of the time of PyTorch without DP"
    tasks: dict[str, list[str]] = {}
    for task, standing, _ in told:
        tasks.setdefault(tables.title(standing.first), []).append(task)
    if len(tasks) == 1:
        (name, where), *_ = tasks.items()
        places = "every task" if everywhere and len(where) > 1 else _listed(where)
        return f"With DP, {name} is the fastest on {places}{cost}."
    return f"Fastest with DP: {'; '.join(f'{name} on {_listed(where)}' for name, where in tasks.items())}{cost}."


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (("; " if "," in "".join(words) else ", ").join(words[:-1]), words[-1])))

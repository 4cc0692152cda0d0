"""The paper against what was measured: ratios then and now, order of the contestants, the paper's findings as claims.

The paper ran on an NVIDIA A100 in 2021. Its seconds are never compared with ours, only what is free of the machine's
speed in the first place: ratios and ranks within one machine. What a claim says in figures is computed from the paper's
own table by the same function that computes it from the records; the figures in its text are only quoted beside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pandas as pd

from harness.analysis import stats
from harness.analysis.frames import Tables
from harness.analysis.naming import BASELINE_ROW, PAPER_ORDER
from harness.analysis.pairs import paired
from harness.analysis.tidy import PLACE, rows_of

MINIMUM_RANKED = 3
"""Fewer rows have no order worth a correlation."""
TOLERANCE = 1.25
"""The paper's figures are rounded and from another machine: its ranges are widened by this factor at both ends."""

PICTURES = ("mnist-cnn", "cifar10-cnn")
SMALL = (*PICTURES, "imdb-embedding")
ALL = (*SMALL, "imdb-lstm")
SMALLEST, LARGEST = 16, 2048
BEYOND = (4096, 8192)
JAX, OPACUS, TFP, BACKPACK, PYVACY = "JAX (DP)", "Opacus", "Custom TFP (XLA)", "BackPACK", "PyVacy"
DP_ROWS = tuple(row for row in PAPER_ORDER if row != BASELINE_ROW)


@lru_cache(maxsize=4)  # every section and every format asks for it
def then_and_now(tables: Tables) -> pd.DataFrame:
    """Return seconds relative to PyTorch without DP, in the paper and measured, for contestants that stand for a row of
    it."""
    if tables.paper_ratios.empty:
        return pd.DataFrame()
    base = tables.published[tables.published.paper_row == BASELINE_ROW].set_index(["task", "batch_size"]).seconds
    old = tables.published.set_index(["task", "batch_size", "paper_row"]).seconds
    rows = []
    for row in tables.paper_ratios.to_dict("records"):
        key = (row["task"], row["batch_size"])
        paper_row = tables.rows.get(row["contestant"])
        if (*key, paper_row) in old.index:
            rows.append({**row, "paper_row": paper_row, "paper_ratio": old[(*key, paper_row)] / base[key]})
    return pd.DataFrame(rows)


@lru_cache(maxsize=4)
def rank_correlation(tables: Tables) -> pd.DataFrame:
    """Spearman's correlation of published and measured seconds over contestants, for every task and batch size at which
    at least three rows of the paper were measured."""
    rows = []
    old = tables.published.set_index(["task", "batch_size", "paper_row"]).seconds
    ok = tables.cells[tables.cells.state == "ok"]
    for place, group in ok.groupby([*PLACE, "batch_size"], sort=False):
        where = dict(zip([*PLACE, "batch_size"], place, strict=True))
        keys = [(where["task"], where["batch_size"], tables.rows.get(name)) for name in group.contestant]
        ranked = group[[key in old.index for key in keys]]
        if len(ranked) >= MINIMUM_RANKED:
            then = [old[key] for key in keys if key in old.index]
            rows.append(
                {
                    **where,
                    "rows": len(ranked),
                    "spearman": stats.rank_correlation(then, ranked["median"]),
                    "n": int(ranked.n.min()),
                    "extrapolated": bool(ranked.extrapolated.any()),
                    "disturbed": bool((ranked.disturbed > 0).any()),
                }
            )
    return pd.DataFrame(rows)


Place = tuple[str, int]
"""Task and batch size; 0 where a value is not of one batch size."""


@dataclass(frozen=True)
class Measured:
    """One value that a claim is about, with its 95 % interval where there is one."""

    place: Place
    value: float
    low: float
    high: float


def exactly(place: Place, value: float) -> Measured:
    """Return a value without an interval."""
    return Measured(place, value, value, value)


class PaperTable:
    """The paper's Table 1. It says nothing of first epochs."""

    def __init__(self, published: pd.DataFrame) -> None:
        self._seconds: dict[tuple[str, Place], float] = {
            (line.paper_row, (line.task, int(line.batch_size))): float(line.seconds) for line in rows_of(published)
        }

    def places(self, row: str) -> set[Place]:
        """Return where this row has a time."""
        return {place for name, place in self._seconds if name == row}

    def seconds(self, row: str, place: Place) -> float:
        return self._seconds[row, place]

    def ratio(self, row: str, base: str, place: Place) -> Measured | None:
        """Return seconds of ``row`` over those of ``base``."""
        return exactly(place, self._seconds[row, place] / self._seconds[base, place])

    def first_epoch(self, row: str, place: Place) -> float | None:
        """Return the first epoch, compilation included, over an ordinary one."""
        return None


@dataclass(frozen=True)
class Basis:
    """Basis of one value: rounds or processes, and what is doubtful about them."""

    n: int
    extrapolated: bool
    disturbed: bool


class Records:
    """One section of the records: its times on genuine data, of the contestants that stand for a row of the paper.

    ``used``: what every value rests on that was asked for since it was last cleared. Measures combine values in many
    ways; so none of them can forget what one of its parts rests on.
    """

    def __init__(self, tables: Tables, section: Mapping[str, Any]) -> None:
        def here(frame: pd.DataFrame) -> pd.DataFrame:
            keep = (frame.state == "ok") & ~frame.synthetic.astype(bool)
            for column, value in section.items():
                keep &= frame[column] == value
            return frame[keep]

        self._records = tables.records
        self._contestant = {
            row: next((name for name in tables.order if tables.rows.get(name) == row), None) for row in PAPER_ORDER
        }
        self.used: list[Basis] = []
        self._medians: dict[str, dict[Place, float]] = {row: {} for row in PAPER_ORDER}
        self._basis: dict[tuple[str, Place], Basis] = {}
        cells = here(tables.cells)
        for row, name in self._contestant.items():
            for cell in rows_of(cells[cells.contestant == name]):
                place = (cell.task, int(cell.batch_size))
                self._medians[row][place] = float(cell.median)
                # A minority of disturbed processes does not move a median.
                disturbed = 2 * cell.disturbed >= cell.n
                self._basis[row, place] = Basis(int(cell.n), bool(cell.extrapolated), bool(disturbed))
        timed = here(tables.raw[~tables.raw.superseded & (tables.raw.purpose == "time")])
        self._processes: dict[Place, pd.DataFrame] = dict(iter(timed.groupby(["task", "batch_size"])))
        self._ratios: dict[tuple[str, str, Place], tuple[Measured, Basis] | None] = {}

    def places(self, row: str) -> set[Place]:
        return set(self._medians[row])

    def seconds(self, row: str, place: Place) -> float:
        self.used.append(self._basis[row, place])
        return self._medians[row][place]

    def ratio(self, row: str, base: str, place: Place) -> Measured | None:
        key = (row, base, place)
        if key not in self._ratios:
            a, b = self._contestant[base], self._contestant[row]
            assert a is not None and b is not None
            result, _, disturbed = paired(self._processes[place], {}, a, b)
            scaled = any(self._basis[name, place].extrapolated for name in (row, base))
            self._ratios[key] = (
                None
                if result is None
                else (Measured(place, result.ratio, result.low, result.high), Basis(result.n, scaled, disturbed))
            )
        found = self._ratios[key]
        if found is None:
            return None
        self.used.append(found[1])
        return found[0]

    def first_epoch(self, row: str, place: Place) -> float | None:
        self.used.append(self._basis[row, place])
        mine = self._processes[place]
        mine = mine[mine.contestant == self._contestant[row]]
        found = [
            value
            for i, seconds, compiling in zip(mine.index, mine.seconds, mine.compile_seconds, strict=True)
            if (value := _first_over_ordinary(self._records[i].epoch_seconds, seconds, compiling)) is not None
        ]
        return float(np.median(found)) if found else None


def _first_over_ordinary(epochs: Sequence[float], median: float, compiling: float) -> float | None:
    """Return the first epoch with compilation. Where that came before the clock (protocols with a warm-up) its seconds
    are on record; else the first of several epochs holds it."""
    if not math.isnan(compiling):
        return 1.0 + compiling / median
    return epochs[0] / median if len(epochs) > 2 else None


Source = PaperTable | Records
Measure = Callable[[Source], Iterable[Measured]]
AnySource = TypeVar("AnySource")
Subject = ParamSpec("Subject")


def measuring(
    measure: Callable[Concatenate[AnySource, Subject], Iterable[Measured]],
) -> Callable[Subject, Callable[[AnySource], Iterable[Measured]]]:
    """Return what takes what a measure is about, and returns the measure of any source."""
    return lambda *subject, **named: lambda source: measure(source, *subject, **named)


def _shared(source: Source, rows: Sequence[str], tasks: Sequence[str], sizes: Sequence[int] | None) -> list[Place]:
    """Return where all of these rows have a time."""
    found = set.intersection(*(source.places(row) for row in rows))
    return sorted(place for place in found if place[0] in tasks and (sizes is None or place[1] in sizes))


@measuring
def ratio(
    source: Source, row: str, base: str, tasks: Sequence[str], sizes: Sequence[int] | None = None
) -> Iterable[Measured]:
    """Yield seconds of ``row`` over seconds of ``base``."""
    for place in _shared(source, (row, base), tasks, sizes):
        found = source.ratio(row, base, place)
        if found is not None:
            yield found


def lead(row: str, tasks: Sequence[str], sizes: Sequence[int] | None = None) -> Measure:
    """Return seconds of the fastest other DP row over those of ``row``: above 1 it is the fastest."""
    return _least(row, tasks, sizes, lambda source, other, place: source.ratio(other, row, place))


def slowest(row: str, tasks: Sequence[str]) -> Measure:
    """Return seconds of ``row`` over those of the slowest other DP row: above 1 it is the slowest."""
    return _least(row, tasks, None, lambda source, other, place: source.ratio(row, other, place))


@measuring
def _least(
    source: Source,
    row: str,
    tasks: Sequence[str],
    sizes: Sequence[int] | None,
    ratio: Callable[[Source, str, Place], Measured | None],
) -> Iterable[Measured]:
    """Return the least ratio with any other DP row, place by place."""
    for place in _shared(source, (row,), tasks, sizes):
        others = [other for other in DP_ROWS if other != row and place in source.places(other)]
        ratios = [ratio(source, other, place) for other in others]
        if known := [one for one in ratios if one is not None]:
            yield min(known, key=lambda one: one.value)


@measuring
def order_of(source: Source, tasks: Sequence[str], table: PaperTable) -> Iterable[Measured]:
    """Yield share of the pairs of DP rows whose order is that of the paper's table, a value per task and batch size."""
    everywhere = sorted(set.union(*(source.places(row) for row in DP_ROWS)))
    for place in everywhere:
        rows = [r for r in DP_ROWS if place in source.places(r) and place in table.places(r)]
        pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
        if place[0] in tasks and len(rows) >= MINIMUM_RANKED:
            same = [
                (source.seconds(a, place) < source.seconds(b, place))
                == (table.seconds(a, place) < table.seconds(b, place))
                for a, b in pairs
            ]
            yield exactly(place, float(np.mean(same)))


@measuring
def reduction(source: Source, row: str, tasks: Sequence[str]) -> Iterable[Measured]:
    """Yield seconds at batch size 16 over those at 2048, a value per task."""
    places = source.places(row)
    for task in tasks:
        if {(task, SMALLEST), (task, LARGEST)} <= places:
            yield exactly((task, 0), source.seconds(row, (task, SMALLEST)) / source.seconds(row, (task, LARGEST)))


@measuring
def mean_reduction(source: Source, row: str, tasks: Sequence[str] = ALL) -> Iterable[Measured]:
    """Yield the mean of :func:`reduction` over the tasks, where each has it."""
    values = [m.value for m in reduction(row, tasks)(source)]
    if len(values) == len(tasks):
        yield exactly(("mean", 0), float(np.mean(values)))


@measuring
def first_epoch(source: Source, row: str) -> Iterable[Measured]:
    """Yield largest first epoch over an ordinary one, of all tasks and batch sizes."""
    found = {place: source.first_epoch(row, place) for place in sorted(source.places(row))}
    known = {place: value for place, value in found.items() if value is not None}
    if known:
        place = max(known, key=lambda p: known[p])
        yield exactly(place, known[place])


@measuring
def strongest(source: Source, rows: Sequence[str]) -> Iterable[Measured]:
    """Least reduction from 16 to 2048 of these rows over the greatest of the others, a value per task; above 1 the
    effect is strongest for them."""
    for task in ALL:
        found = {row: m.value for row in PAPER_ORDER for m in reduction(row, (task,))(source)}
        others = [value for row, value in found.items() if row not in rows]
        if others and set(rows) <= set(found):
            yield exactly((task, 0), min(found[row] for row in rows) / max(others))


@measuring
def gap_beyond(source: Source, row: str, base: str, tasks: Sequence[str]) -> Iterable[Measured]:
    """Yield the gap ``row`` / ``base`` at each batch size beyond 2048 over the gap at 2048: under 1 it closes."""
    for place in _shared(source, (row, base), tasks, BEYOND):
        if place_at := _shared(source, (row, base), (place[0],), (LARGEST,)):
            then, now = source.ratio(row, base, place_at[0]), source.ratio(row, base, place)
            if then is not None and now is not None:
                yield exactly(place, now.value / then.value)


ABOVE_ONE, BELOW_ONE = (1.0, math.inf), (0.0, 1.0)

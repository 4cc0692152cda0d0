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
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis import stats
from harness.analysis.frames import PLACE, SECTION, Tables, paired, rows_of
from harness.analysis.naming import BASELINE_ROW, PAPER_ORDER, factor

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


def _shared(source: Source, rows: Sequence[str], tasks: Sequence[str], sizes: Sequence[int] | None) -> list[Place]:
    """Return where all of these rows have a time."""
    found = set.intersection(*(source.places(row) for row in rows))
    return sorted(place for place in found if place[0] in tasks and (sizes is None or place[1] in sizes))


def _ratio(row: str, base: str, tasks: Sequence[str], sizes: Sequence[int] | None = None) -> Measure:
    """Yield seconds of ``row`` over seconds of ``base``."""

    def measure(source: Source) -> Iterable[Measured]:
        for place in _shared(source, (row, base), tasks, sizes):
            found = source.ratio(row, base, place)
            if found is not None:
                yield found

    return measure


def _lead(row: str, tasks: Sequence[str], sizes: Sequence[int] | None = None) -> Measure:
    """Return seconds of the fastest other DP row over those of ``row``: above 1 it is the fastest."""
    return _least(row, tasks, sizes, lambda source, other, place: source.ratio(other, row, place))


def _slowest(row: str, tasks: Sequence[str]) -> Measure:
    """Return seconds of ``row`` over those of the slowest other DP row: above 1 it is the slowest."""
    return _least(row, tasks, None, lambda source, other, place: source.ratio(row, other, place))


def _least(
    row: str, tasks: Sequence[str], sizes: Sequence[int] | None, ratio: Callable[[Source, str, Place], Measured | None]
) -> Measure:
    """Return the least ratio with any other DP row, place by place."""

    def measure(source: Source) -> Iterable[Measured]:
        for place in _shared(source, (row,), tasks, sizes):
            others = [other for other in DP_ROWS if other != row and place in source.places(other)]
            ratios = [ratio(source, other, place) for other in others]
            if known := [one for one in ratios if one is not None]:
                yield min(known, key=lambda one: one.value)

    return measure


def _order(tasks: Sequence[str], table: PaperTable) -> Measure:
    """Yield share of the pairs of DP rows whose order is that of the paper's table, a value per task and batch size."""

    def measure(source: Source) -> Iterable[Measured]:
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

    return measure


def _reduction(row: str, tasks: Sequence[str]) -> Measure:
    """Yield seconds at batch size 16 over those at 2048, a value per task."""

    def measure(source: Source) -> Iterable[Measured]:
        places = source.places(row)
        for task in tasks:
            if {(task, SMALLEST), (task, LARGEST)} <= places:
                yield exactly((task, 0), source.seconds(row, (task, SMALLEST)) / source.seconds(row, (task, LARGEST)))

    return measure


def _mean_reduction(row: str, tasks: Sequence[str] = ALL) -> Measure:
    def measure(source: Source) -> Iterable[Measured]:
        values = [m.value for m in _reduction(row, tasks)(source)]
        if len(values) == len(tasks):
            yield exactly(("mean", 0), float(np.mean(values)))

    return measure


def _first_epoch(row: str) -> Measure:
    """Yield largest first epoch over an ordinary one, of all tasks and batch sizes."""

    def measure(source: Source) -> Iterable[Measured]:
        found = {place: source.first_epoch(row, place) for place in sorted(source.places(row))}
        known = {place: value for place, value in found.items() if value is not None}
        if known:
            place = max(known, key=lambda p: known[p])
            yield exactly(place, known[place])

    return measure


def _strongest(rows: Sequence[str]) -> Measure:
    """Least reduction from 16 to 2048 of these rows over the greatest of the others, a value per task; above 1 the
    effect is strongest for them."""

    def measure(source: Source) -> Iterable[Measured]:
        for task in ALL:
            found = {row: m.value for row in PAPER_ORDER for m in _reduction(row, (task,))(source)}
            others = [value for row, value in found.items() if row not in rows]
            if others and set(rows) <= set(found):
                yield exactly((task, 0), min(found[row] for row in rows) / max(others))

    return measure


def _gap_beyond(row: str, base: str, tasks: Sequence[str]) -> Measure:
    """Yield the gap ``row`` / ``base`` at each batch size beyond 2048 over the gap at 2048: under 1 it closes."""

    def measure(source: Source) -> Iterable[Measured]:
        for place in _shared(source, (row, base), tasks, BEYOND):
            if place_at := _shared(source, (row, base), (place[0],), (LARGEST,)):
                then, now = source.ratio(row, base, place_at[0]), source.ratio(row, base, place)
                if then is not None and now is not None:
                    yield exactly(place, now.value / then.value)

    return measure


@dataclass(frozen=True)
class Claim:
    """A finding of the paper. ``quoted``: its text's figure, only shown. ``bounds``: what agrees with it where it is a
    statement (faster, slowest, closes) or not in the paper's table; else the range of its table, widened."""

    section: str
    about: str
    quoted: str
    measure: Measure
    bounds: tuple[float, float] | None = None


ABOVE_ONE, BELOW_ONE = (1.0, math.inf), (0.0, 1.0)


def _stated(figure: float) -> tuple[float, float]:
    """Return the range of a figure of the text that its table does not hold."""
    return figure / TOLERANCE, figure * TOLERANCE


def all_claims(table: PaperTable) -> tuple[Claim, ...]:
    """Return every claim of the paper on its end-to-end results."""
    small = (16, 32, 64, 128, 256)
    return (
        Claim(
            "3.1.3",
            "Opacus / PyTorch without DP: MNIST, CIFAR-10, embedding",
            "2× to 2.9×",
            _ratio(OPACUS, BASELINE_ROW, SMALL),
        ),
        Claim("3.1.3", "Opacus / PyTorch without DP: LSTM", "25× to 30×", _ratio(OPACUS, BASELINE_ROW, ("imdb-lstm",))),
        Claim(
            "3.1.3",
            "JAX (DP) is the fastest on MNIST and embedding: next / JAX (DP)",
            "consistently the lowest",
            _lead(JAX, ("mnist-cnn", "imdb-embedding")),
            ABOVE_ONE,
        ),
        Claim(
            "3.1.3",
            "JAX (DP) beats PyTorch without DP at 16 to 256 on MNIST and embedding: PyTorch / JAX (DP)",
            "at smaller batch sizes",
            _ratio(BASELINE_ROW, JAX, ("mnist-cnn", "imdb-embedding"), small),
            ABOVE_ONE,
        ),
        Claim(
            "3.1.3",
            "JAX (DP) is the fastest on CIFAR-10 at 16 to 128: next / JAX (DP)",
            "at smaller batch sizes",
            _lead(JAX, ("cifar10-cnn",), small[:-1]),
            ABOVE_ONE,
        ),
        Claim(
            "3.1.3",
            "Opacus surpasses JAX (DP) on CIFAR-10 at 256 to 2048: JAX (DP) / Opacus",
            "at larger batch sizes",
            _ratio(JAX, OPACUS, ("cifar10-cnn",), (256, 512, 1024, 2048)),
            ABOVE_ONE,
        ),
        Claim(
            "3.1.3",
            "Opacus is the fastest on CIFAR-10 at 2048: next / Opacus",
            "the lowest",
            _lead(OPACUS, ("cifar10-cnn",), (LARGEST,)),
            ABOVE_ONE,
        ),
        Claim(
            "3.1.3",
            "Custom TFP (XLA) is the fastest on LSTM: next / Custom TFP (XLA)",
            "consistently the lowest",
            _lead(TFP, ("imdb-lstm",)),
            ABOVE_ONE,
        ),
        Claim(
            "Table 1",
            "LSTM: share of pairs of DP rows in the order of the table",
            "",
            _order(("imdb-lstm",), table),
            (1.0, 1.0),
        ),
        Claim(
            "3.1.3",
            "PyVacy is the slowest: PyVacy / next",
            "consistently the highest",
            _slowest(PYVACY, ALL),
            ABOVE_ONE,
        ),
        Claim("3.1.3", "Opacus / JAX (DP) at 2048: MNIST", "1.4×", _ratio(OPACUS, JAX, ("mnist-cnn",), (LARGEST,))),
        Claim(
            "3.1.3", "Opacus / JAX (DP) at 2048: embedding", "3×", _ratio(OPACUS, JAX, ("imdb-embedding",), (LARGEST,))
        ),
        Claim(
            "3.1.3", "Opacus / Custom TFP (XLA) at 2048: LSTM", "7×", _ratio(OPACUS, TFP, ("imdb-lstm",), (LARGEST,))
        ),
        Claim("3.1.3", "Opacus / JAX (DP) at 2048: LSTM", "2.4×", _ratio(OPACUS, JAX, ("imdb-lstm",), (LARGEST,))),
        *(
            claim
            for row, quoted, mean, tasks in (
                (OPACUS, "17× to 75×", "40×", ALL),
                (BASELINE_ROW, "", "37.8×", ALL),
                (JAX, "", "12.8×", ALL),
                (BACKPACK, "", "10.5×", PICTURES),
                (TFP, "", "6.3×", ALL),
                (PYVACY, "", "1×", ALL),
            )
            for claim in (
                Claim(
                    "3.1.3" if quoted else "Table 1",
                    f"{row}: seconds at batch 16 / at 2048, by task",
                    quoted,
                    _reduction(row, tasks),
                ),
                Claim(
                    "3.1.3",
                    f"{row}: seconds at batch 16 / at 2048, mean of {len(tasks)} tasks",
                    mean,
                    _mean_reduction(row, tasks),
                ),
            )
        ),
        Claim(
            "3.1.3",
            "The batch size matters most to Opacus and PyTorch: their least reduction / the greatest other",
            "strongest for Opacus and PyTorch",
            _strongest((OPACUS, BASELINE_ROW)),
            ABOVE_ONE,
        ),
        Claim("3.1.3", "JAX (DP): first epoch / median epoch, largest", "101×", _first_epoch(JAX), _stated(101.0)),
        Claim(
            "3.1.3", "Custom TFP (XLA): first epoch / median epoch, largest", "625×", _first_epoch(TFP), _stated(625.0)
        ),
        *(
            claim
            for base in (JAX, TFP)
            for claim in (
                Claim(
                    "3.1.3",
                    f"Beyond 2048 the gap Opacus / {base} closes: the gap there / at 2048",
                    "may close the gap",
                    _gap_beyond(OPACUS, base, ALL),
                    BELOW_ONE,
                ),
                Claim(
                    "3.1.3",
                    f"Beyond 2048 Opacus outperforms {base}: Opacus / {base}",
                    "may even outperform",
                    _ratio(OPACUS, base, ALL, BEYOND),
                    BELOW_ONE,
                ),
            )
        ),
    )


UNTESTABLE = "cannot be tested here"
UNDECIDED = "undecided"


@lru_cache(maxsize=4)
def claims(tables: Tables) -> pd.DataFrame:
    """Return every claim in every section, judged by :func:`outcome` or ``cannot be tested here``, with the measured
    range and, over the places that the paper's table has too, the geometric mean of measured over published.

    ``own_table``: whether the paper's own table agrees with what its text states.
    ``cells`` and ``paper_cells``: how many values were measured, and how many the paper's table has. ``n``: the fewest
    rounds or processes behind one of them. Values of fewer than three processes, which have no interval, and disturbed
    ones, which allow no verdict elsewhere either, are shown and not judged.
    """
    table = PaperTable(tables.published)
    rows = []
    for key in sorted(set(tables.raw[SECTION].itertuples(index=False, name=None))):
        section = dict(zip(SECTION, key, strict=True))
        source = Records(tables, section)
        for claim in all_claims(table):
            then, found, judged, used = list(claim.measure(table)), [], [], []
            source.used.clear()
            # A measure asks for the parts of a value just before it yields it.
            for value in claim.measure(source):
                found.append(value)
                if all(b.n >= stats.INTERVAL_ROUNDS and not b.disturbed for b in source.used):
                    judged.append(value)
                used += source.used
                source.used.clear()
            bounds = claim.bounds or widened(then)
            rows.append(
                {
                    **section,
                    "paper_section": claim.section,
                    "claim": claim.about,
                    "quoted": claim.quoted,
                    "paper": span([m.value for m in then]),
                    "measured": span([m.value for m in found]),
                    "cells": len(found),
                    "paper_cells": len(then),
                    "n": min((b.n for b in used), default=0),
                    "extrapolated": any(b.extrapolated for b in used),
                    "disturbed": any(b.disturbed for b in used),
                    "here_over_paper": here_over_paper(found, then),
                    "outcome": outcome(judged, bounds),
                    "own_table": outcome(then, bounds),
                }
            )
    return pd.DataFrame(rows)


def outcome(found: Sequence[Measured], bounds: tuple[float, float]) -> str:
    """``holds`` if the 95 % interval (the value alone, where there is none) of every value lies inside of the bounds,
    ``does not hold`` if one lies outside, else ``undecided``: a wide interval overlaps any bounds and shows nothing."""
    if not found:
        return UNTESTABLE
    intervals = [(m.value, m.value) if math.isnan(m.low) else (m.low, m.high) for m in found]
    if any(high < bounds[0] or low > bounds[1] for low, high in intervals):
        return "does not hold"
    return "holds" if all(bounds[0] <= low and high <= bounds[1] for low, high in intervals) else UNDECIDED


def widened(then: Sequence[Measured]) -> tuple[float, float]:
    """Return the paper's range, widened by the tolerance of an outcome."""
    values = [m.value for m in then]
    return min(values) / TOLERANCE, max(values) * TOLERANCE


def here_over_paper(found: Sequence[Measured], then: Sequence[Measured]) -> float:
    """Return the geometric mean of measured over published values."""
    old = {m.place: m.value for m in then}
    logs = [math.log(m.value / old[m.place]) for m in found if old.get(m.place) and m.value]
    return math.exp(float(np.mean(logs))) if logs else math.nan


def span(values: Sequence[float]) -> str:
    """Return the smallest and the largest value as text."""
    if not values:
        return ""
    low, high = factor(min(values)), factor(max(values))
    return low if low == high else f"{low}–{high}"

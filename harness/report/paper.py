"""The paper against what was measured: ratios then and now, order of the contestants, the paper's figures as claims.

The paper ran on an NVIDIA A100 in 2021. Its seconds are never compared with ours, only what is free of the machine's
speed in the first place: ratios and ranks within one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from harness.report.naming import BASELINE_ROW, factor
from harness.report.table import PLACE, SECTION, Tables, paired

MINIMUM_RANKED = 3
"""Fewer rows have no order worth a correlation."""
TOLERANCE = 1.25
"""Figures of the paper are rounded and from another machine: its ranges are widened by this factor at both ends."""

PICTURES = ("mnist-cnn", "cifar10-cnn")
SMALL = (*PICTURES, "imdb-embedding")
ALL = (*SMALL, "imdb-lstm")


def then_and_now(tables: Tables) -> pd.DataFrame:
    """Seconds relative to PyTorch without DP, in the paper and measured, for contestants that stand for a row of it."""
    if tables.ratios.empty:
        return pd.DataFrame()
    base = tables.published[tables.published.paper_row == BASELINE_ROW].set_index(["task", "batch_size"]).seconds
    old = tables.published.set_index(["task", "batch_size", "paper_row"]).seconds
    rows = []
    for row in tables.ratios.to_dict("records"):
        key = (row["task"], row["batch_size"])
        paper_row = tables.rows.get(row["contestant"])
        if (*key, paper_row) in old.index:
            rows.append({**row, "paper_row": paper_row, "paper_ratio": old[(*key, paper_row)] / base[key]})
    return pd.DataFrame(rows)


def rank_correlation(tables: Tables) -> pd.DataFrame:
    """Spearman's correlation of published and measured seconds over contestants, for every task and batch size at which
    at least three rows of the paper were measured."""
    rows = []
    old = tables.published.set_index(["task", "batch_size", "paper_row"]).seconds
    ok = tables.cells[tables.cells.state == "ok"]
    for place, group in ok.groupby([*PLACE, "batch_size"], sort=False):
        where = dict(zip([*PLACE, "batch_size"], place, strict=True))
        pairs = [
            (old[key], median)
            for name, median in zip(group.contestant, group["median"], strict=True)
            if (key := (where["task"], where["batch_size"], tables.rows.get(name))) in old.index
        ]
        if len(pairs) >= MINIMUM_RANKED:
            then, now = zip(*pairs, strict=True)
            rows.append({**where, "rows": len(pairs), "spearman": float(scipy_stats.spearmanr(then, now).statistic)})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Measured:
    """One measured value that a claim is held against, with its 95 % interval where there is one."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Claim:
    """A figure of the paper. ``low`` to ``high`` agrees with it; ``measure`` finds our values in one section."""

    section: str
    about: str
    figure: str
    low: float
    high: float
    measure: Callable[[Tables, dict[str, Any]], Iterable[Measured]]


Measure = Callable[[Tables, dict[str, Any]], Iterable[Measured]]


def _contestant(tables: Tables, paper_row: str) -> str | None:
    return next((name for name in tables.order if tables.rows.get(name) == paper_row), None)


def _genuine(tables: Tables, section: dict[str, Any]) -> pd.DataFrame:
    """Cells of a section with a time, on genuine data."""
    cells = tables.cells[(tables.cells.state == "ok") & ~tables.cells.synthetic.astype(bool)]
    for column, value in section.items():
        cells = cells[cells[column] == value]
    return cells


def _ratio(row: str, base: str, tasks: Sequence[str], sizes: Sequence[int] | None = None) -> Measure:
    """Seconds of ``row`` over seconds of ``base``, paired in rounds."""

    def measure(tables: Tables, section: dict[str, Any]) -> Iterable[Measured]:
        a, b = _contestant(tables, base), _contestant(tables, row)
        cells = _genuine(tables, section)
        current = tables.raw[~tables.raw.superseded]
        for task in tasks:
            here = cells[(cells.task == task) & cells.contestant.isin([a, b])]
            for size in sorted(here.batch_size.unique()):
                if a is None or b is None or (sizes and size not in sizes):
                    continue
                place = {**section, "task": task, "synthetic": False, "batch_size": size}
                result, _, _ = paired(current, place, a, b)
                if result is not None:
                    yield Measured(result.ratio, result.low, result.high)

    return measure


def _reduction(row: str, tasks: Sequence[str]) -> Measure:
    """Median seconds at batch size 16 over those at 2048, a value per task."""

    def measure(tables: Tables, section: dict[str, Any]) -> Iterable[Measured]:
        cells = _genuine(tables, section)
        mine = cells[cells.contestant == _contestant(tables, row)]
        for task in tasks:
            median = mine[mine.task == task].set_index("batch_size")["median"]
            if 16 in median.index and 2048 in median.index:
                value = float(median[16] / median[2048])
                yield Measured(value, value, value)

    return measure


def _mean_reduction(row: str) -> Measure:
    def measure(tables: Tables, section: dict[str, Any]) -> Iterable[Measured]:
        values = [m.value for m in _reduction(row, ALL)(tables, section)]
        if len(values) == len(ALL):
            mean = float(np.mean(values))
            yield Measured(mean, mean, mean)

    return measure


def _first_epoch(row: str) -> Measure:
    """Largest (compile seconds + an epoch) over an epoch, of all tasks and batch sizes."""

    def measure(tables: Tables, section: dict[str, Any]) -> Iterable[Measured]:
        cells = _genuine(tables, section)
        mine = cells[cells.contestant == _contestant(tables, row)]
        if tables.compile.empty:
            return
        keys = [*SECTION, "task", "synthetic", "batch_size", "contestant"]
        both = mine.merge(tables.compile, on=keys, suffixes=("", "_compile"))
        if len(both):
            value = float((1.0 + both.median_compile / both["median"]).max())
            yield Measured(value, value, value)

    return measure


def _rank(row: str, tasks: Sequence[str]) -> Measure:
    """Place of ``row`` among the private contestants that stand for a row of the paper, 1 is the fastest."""

    def measure(tables: Tables, section: dict[str, Any]) -> Iterable[Measured]:
        cells = _genuine(tables, section)
        cells = cells[cells.private.astype(bool) & cells.contestant.isin(list(tables.rows))]
        name = _contestant(tables, row)
        for task in tasks:
            for _, group in cells[cells.task == task].groupby("batch_size"):
                if name in set(group.contestant) and len(group) > 1:
                    place = float(group.set_index("contestant")["median"].rank()[name])
                    yield Measured(place, place, place)

    return measure


def _range(section: str, about: str, low: float, high: float, measure: Measure) -> Claim:
    return Claim(section, about, f"{low:g}–{high:g}×", low / TOLERANCE, high * TOLERANCE, measure)


def _single(section: str, about: str, figure: float, measure: Measure) -> Claim:
    return Claim(section, about, f"{figure:g}×", figure / TOLERANCE, figure * TOLERANCE, measure)


JAX, OPACUS, TFP = "JAX (DP)", "Opacus", "Custom TFP (XLA)"
CLAIMS: tuple[Claim, ...] = (
    _range(
        "3.1.3",
        "Opacus / PyTorch without DP: MNIST, CIFAR-10, embedding",
        2.0,
        2.9,
        _ratio(OPACUS, BASELINE_ROW, SMALL),
    ),
    _range("3.1.3", "Opacus / PyTorch without DP: LSTM", 25.0, 30.0, _ratio(OPACUS, BASELINE_ROW, ("imdb-lstm",))),
    Claim(
        "3.1.3",
        "JAX (DP): place among DP frameworks on MNIST and embedding",
        "1",
        1.0,
        1.0,
        _rank(JAX, ("mnist-cnn", "imdb-embedding")),
    ),
    Claim("3.1.3", "Custom TFP (XLA): place among DP frameworks on LSTM", "1", 1.0, 1.0, _rank(TFP, ("imdb-lstm",))),
    _single("3.1.3", "Opacus / JAX (DP) at 2048: MNIST", 1.4, _ratio(OPACUS, JAX, ("mnist-cnn",), (2048,))),
    _single("3.1.3", "Opacus / JAX (DP) at 2048: embedding", 3.0, _ratio(OPACUS, JAX, ("imdb-embedding",), (2048,))),
    _single("3.1.3", "Opacus / Custom TFP (XLA) at 2048: LSTM", 7.0, _ratio(OPACUS, TFP, ("imdb-lstm",), (2048,))),
    _single("3.1.3", "Opacus / JAX (DP) at 2048: LSTM", 2.4, _ratio(OPACUS, JAX, ("imdb-lstm",), (2048,))),
    _range("3.1.3", "Opacus: seconds at batch 16 / at 2048, by task", 17.0, 75.0, _reduction(OPACUS, ALL)),
    *(
        _single("3.1.3", f"{row}: seconds at batch 16 / at 2048, mean of four tasks", figure, _mean_reduction(row))
        for row, figure in (
            (OPACUS, 40.0),
            (BASELINE_ROW, 37.8),
            (JAX, 12.8),
            ("BackPACK", 10.5),
            (TFP, 6.3),
            ("PyVacy", 1.0),
        )
    ),
    _single("3.1.3", "JAX (DP): first epoch / median epoch, largest", 101.0, _first_epoch(JAX)),
    _single("3.1.3", "Custom TFP (XLA): first epoch / median epoch, largest", 625.0, _first_epoch(TFP)),
)


def claims(tables: Tables) -> pd.DataFrame:
    """Every claim in every section: ``holds``, ``does not hold`` or ``cannot be tested here``, with the measured range.

    It holds if all measured values agree with the paper's range, widened by ``TOLERANCE``: their 95 % interval (or the
    value alone, where there is none) overlaps it.
    """
    rows = []
    for key in sorted(set(tables.raw[SECTION].itertuples(index=False, name=None))):
        section = dict(zip(SECTION, key, strict=True))
        for claim in CLAIMS:
            found = list(claim.measure(tables, section))
            agree = [_overlaps(m, claim) for m in found]
            outcome = "cannot be tested here" if not found else "holds" if all(agree) else "does not hold"
            rows.append(
                {
                    **section,
                    "paper_section": claim.section,
                    "claim": claim.about,
                    "paper": claim.figure,
                    "measured": _span([m.value for m in found]),
                    "cells": len(found),
                    "outcome": outcome,
                }
            )
    return pd.DataFrame(rows)


def _overlaps(m: Measured, claim: Claim) -> bool:
    low, high = (m.value, m.value) if np.isnan(m.low) else (m.low, m.high)
    return bool(low <= claim.high and high >= claim.low)


def _span(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = factor(min(values)), factor(max(values))
    return low if low == high else f"{low}–{high}"

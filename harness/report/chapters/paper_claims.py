"""The claims of the paper, each as a measure of its table and of ours, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis import stats
from harness.analysis.frames import Tables
from harness.analysis.naming import BASELINE_ROW, factor
from harness.analysis.tidy import SECTION
from harness.report.chapters.paper import (
    ABOVE_ONE,
    ALL,
    BACKPACK,
    BELOW_ONE,
    BEYOND,
    JAX,
    LARGEST,
    OPACUS,
    PICTURES,
    PYVACY,
    SMALL,
    TFP,
    TOLERANCE,
    Measure,
    Measured,
    PaperTable,
    Records,
    first_epoch,
    gap_beyond,
    lead,
    mean_reduction,
    order_of,
    ratio,
    reduction,
    slowest,
    strongest,
)
from harness.report.model import MISSING, Columns, Grid, listed, times


@dataclass(frozen=True)
class Claim:
    """A finding of the paper. ``quoted``: its text's figure, only shown. ``bounds``: what agrees with it where it is a
    statement (faster, slowest, closes) or not in the paper's table; else the range of its table, widened. ``section``:
    of the paper."""

    about: str
    quoted: str
    measure: Measure
    bounds: tuple[float, float] | None = None
    section: str = "3.1.3"


def _stated(figure: float) -> tuple[float, float]:
    """Return the range of a figure of the text that its table does not hold."""
    return figure / TOLERANCE, figure * TOLERANCE


def all_claims(table: PaperTable) -> tuple[Claim, ...]:
    """Return every claim of the paper on its end-to-end results."""
    small = (16, 32, 64, 128, 256)
    return (
        Claim(
            "Opacus / PyTorch without DP: MNIST, CIFAR-10, embedding", "2× to 2.9×", ratio(OPACUS, BASELINE_ROW, SMALL)
        ),
        Claim("Opacus / PyTorch without DP: LSTM", "25× to 30×", ratio(OPACUS, BASELINE_ROW, ("imdb-lstm",))),
        Claim(
            "JAX (DP) is the fastest on MNIST and embedding: next / JAX (DP)",
            "consistently the lowest",
            lead(JAX, ("mnist-cnn", "imdb-embedding")),
            ABOVE_ONE,
        ),
        Claim(
            "JAX (DP) beats PyTorch without DP at 16 to 256 on MNIST and embedding: PyTorch / JAX (DP)",
            "at smaller batch sizes",
            ratio(BASELINE_ROW, JAX, ("mnist-cnn", "imdb-embedding"), small),
            ABOVE_ONE,
        ),
        Claim(
            "JAX (DP) is the fastest on CIFAR-10 at 16 to 128: next / JAX (DP)",
            "at smaller batch sizes",
            lead(JAX, ("cifar10-cnn",), small[:-1]),
            ABOVE_ONE,
        ),
        Claim(
            "Opacus surpasses JAX (DP) on CIFAR-10 at 256 to 2048: JAX (DP) / Opacus",
            "at larger batch sizes",
            ratio(JAX, OPACUS, ("cifar10-cnn",), (256, 512, 1024, 2048)),
            ABOVE_ONE,
        ),
        Claim(
            "Opacus is the fastest on CIFAR-10 at 2048: next / Opacus",
            "the lowest",
            lead(OPACUS, ("cifar10-cnn",), (LARGEST,)),
            ABOVE_ONE,
        ),
        Claim(
            "Custom TFP (XLA) is the fastest on LSTM: next / Custom TFP (XLA)",
            "consistently the lowest",
            lead(TFP, ("imdb-lstm",)),
            ABOVE_ONE,
        ),
        Claim(
            "LSTM: share of pairs of DP rows in the order of the table",
            "",
            order_of(("imdb-lstm",), table),
            (1.0, 1.0),
            section="Table 1",
        ),
        Claim("PyVacy is the slowest: PyVacy / next", "consistently the highest", slowest(PYVACY, ALL), ABOVE_ONE),
        Claim("Opacus / JAX (DP) at 2048: MNIST", "1.4×", ratio(OPACUS, JAX, ("mnist-cnn",), (LARGEST,))),
        Claim("Opacus / JAX (DP) at 2048: embedding", "3×", ratio(OPACUS, JAX, ("imdb-embedding",), (LARGEST,))),
        Claim("Opacus / Custom TFP (XLA) at 2048: LSTM", "7×", ratio(OPACUS, TFP, ("imdb-lstm",), (LARGEST,))),
        Claim("Opacus / JAX (DP) at 2048: LSTM", "2.4×", ratio(OPACUS, JAX, ("imdb-lstm",), (LARGEST,))),
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
                    f"{row}: seconds at batch 16 / at 2048, by task",
                    quoted,
                    reduction(row, tasks),
                    section="3.1.3" if quoted else "Table 1",
                ),
                Claim(
                    f"{row}: seconds at batch 16 / at 2048, mean of {len(tasks)} tasks",
                    mean,
                    mean_reduction(row, tasks),
                ),
            )
        ),
        Claim(
            "The batch size matters most to Opacus and PyTorch: their least reduction / the greatest other",
            "strongest for Opacus and PyTorch",
            strongest((OPACUS, BASELINE_ROW)),
            ABOVE_ONE,
        ),
        Claim("JAX (DP): first epoch / median epoch, largest", "101×", first_epoch(JAX), _stated(101.0)),
        Claim("Custom TFP (XLA): first epoch / median epoch, largest", "625×", first_epoch(TFP), _stated(625.0)),
        *(
            claim
            for base in (JAX, TFP)
            for claim in (
                Claim(
                    f"Beyond 2048 the gap Opacus / {base} closes: the gap there / at 2048",
                    "may close the gap",
                    gap_beyond(OPACUS, base, ALL),
                    BELOW_ONE,
                ),
                Claim(
                    f"Beyond 2048 Opacus outperforms {base}: Opacus / {base}",
                    "may even outperform",
                    ratio(OPACUS, base, ALL, BEYOND),
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


def findings(title: str, stated: pd.DataFrame, notes: Sequence[str], doubts: Callable[[Any], str]) -> Grid:
    """Return a table of claims as they are judged.

    Args:
        title: The table's.
        stated: A row per claim, as :func:`claims` has it.
        notes: Below the table.
        doubts: What marks a measured value of a row.
    """
    columns: Columns = {
        "claim": lambda r: r.claim,
        "its text": lambda r: r.quoted or MISSING,
        "its table": lambda r: (r.paper or MISSING) + ("ᵗ" if r.own_table == "does not hold" else ""),
        "measured": lambda r: f"{r.measured}{doubts(r)}" if r.measured else MISSING,
        "places": lambda r: f"{r.cells} of {r.paper_cells}" if r.cells and r.paper_cells else str(r.cells or MISSING),
        "n": lambda r: str(r.n) if r.cells and r.n else MISSING,
        "here / table": lambda r: times(r.here_over_paper),
        "outcome": lambda r: r.outcome,
    }
    if (stated.own_table == "does not hold").any():
        notes = (*notes, "ᵗ The paper's own table does not bear the statement out everywhere.")
    return listed(title, stated, columns, notes)

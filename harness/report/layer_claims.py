"""The paper's findings on layers (its section on microbenchmarks) against what was measured.

As for the end-to-end findings, a claim is a function of a source: applied to the paper's own tables and to the records,
so that neither side is typed in; what its text says is only quoted beside. The paper's tables are cut to the layers and
batch sizes that were measured here, so that a factor that grows with the batch is compared at the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from harness.report import layer_table
from harness.report.layer_table import LayerTables
from harness.report.paper import (
    ABOVE_ONE,
    BELOW_ONE,
    TOLERANCE,
    Measured,
    exactly,
    here_over_paper,
    outcome,
    span,
    widened,
)
from harness.report.table import SECTION

What = Literal["runtime", "memory"]
Pair = Literal["dp / module", "own / module", "dp / own"]
"""Of the paper's columns: torch.nn, the DP library's own module without DP, with DP."""
Place = tuple[str, int]
"""Row of the paper's tables and batch size."""

NORMS = ("LayerNorm", "InstanceNorm", "GroupNorm")
RECURRENT = ("RNN", "GRU", "LSTM")


@dataclass(frozen=True)
class Source:
    """Factors by what, pair of columns and place, with their 95 % interval where there is one."""

    values: Mapping[tuple[What, Pair, Place], Measured]

    def places(self) -> set[Place]:
        return {place for _, _, place in self.values}

    def only(self, places: set[Place]) -> Source:
        return Source({key: value for key, value in self.values.items() if key[2] in places})

    def factors(self, what: What, pair: Pair, rows: Sequence[str]) -> list[Measured]:
        found = [m for (w, p, place), m in self.values.items() if (w, p) == (what, pair) and place[0] in rows]
        return sorted(found, key=lambda m: (rows.index(m.place[0]), m.place[1]))


def paper_source() -> Source:
    """The paper's Tables 2 and 3."""
    values: dict[tuple[What, Pair, Place], Measured] = {}
    kinds: tuple[tuple[What, str], ...] = (("runtime", "ms"), ("memory", "mb"))
    for what, unit in kinds:
        for r in layer_table.published(what).to_dict("records"):
            place = (str(r["paper_row"]), int(r["batch_size"]))
            module, own, dp = (float(r[f"{column}_module_{unit}"]) for column in ("nn", "dp", "gsm"))
            values[what, "dp / module", place] = exactly(place, dp / module)
            if not math.isnan(own):
                values[what, "own / module", place] = exactly(place, own / module)
                values[what, "dp / own", place] = exactly(place, dp / own)
    return Source(values)


def record_source(factors: pd.DataFrame, contestant: str, passes: str) -> Source:
    """What was measured of one DP contestant, and of its framework's own modules, in the factors of one section."""
    values: dict[tuple[What, Pair, Place], Measured] = {}
    known = factors[factors.paper_row.notna()]
    mine = known[(known.contestant == contestant) & (known.passes == passes)]
    own = known[(known.column == "own_module") & known.framework.isin(mine.framework)]
    for pair, frame, prefix in (("dp / module", mine, ""), ("dp / own", mine, "own_"), ("own / module", own, "")):
        for r in frame.to_dict("records"):
            place = (str(r["paper_row"]), int(r["batch_size"]))
            runtime, low, high = (float(r[f"{prefix}runtime{end}"]) for end in ("", "_low", "_high"))
            memory = float(r[f"{prefix}memory"])
            if not math.isnan(runtime):
                values["runtime", pair, place] = Measured(place, runtime, low, high)  # type: ignore[index]
            if not math.isnan(memory):
                values["memory", pair, place] = exactly(place, memory)  # type: ignore[index]
    return Source(values)


Measure = Callable[[Source], Iterable[Measured]]


def _factors(what: What, pair: Pair, rows: Sequence[str]) -> Measure:
    return lambda source: source.factors(what, pair, rows)


def _largest(what: What, pair: Pair, rows: Sequence[str]) -> Measure:
    """The largest factor of all these rows and batch sizes."""

    def measure(source: Source) -> Iterable[Measured]:
        found = source.factors(what, pair, rows)
        if found:
            top = max(found, key=lambda m: m.value)
            yield Measured(("largest", 0), top.value, top.low, top.high)

    return measure


def _growth(what: What, pair: Pair, rows: Sequence[str]) -> Measure:
    """The factor at a row's largest batch size over the one at its smallest, a value per row."""

    def measure(source: Source) -> Iterable[Measured]:
        for row in rows:
            found = source.factors(what, pair, (row,))
            if len(found) > 1:
                yield exactly((row, 0), found[-1].value / found[0].value)

    return measure


def _own_share(rows: Sequence[str]) -> Measure:
    """(own module / torch.nn) over (DP / own module): above 1 the module costs more than the DP."""

    def measure(source: Source) -> Iterable[Measured]:
        wrapped = {m.place: m.value for m in source.factors("runtime", "dp / own", rows)}
        for m in source.factors("runtime", "own / module", rows):
            if m.place in wrapped:
                yield exactly(m.place, m.value / wrapped[m.place])

    return measure


@dataclass(frozen=True)
class Claim:
    """As :class:`harness.report.paper.Claim`."""

    about: str
    quoted: str
    measure: Measure
    bounds: tuple[float, float] | None = None


CLAIMS = (
    Claim(
        "Runtime, DP / torch.nn: convolution, norms, attention",
        "1.2× to 2.9×",
        _factors("runtime", "dp / module", ("Conv", *NORMS, "MHA")),
    ),
    Claim("Runtime, DP / torch.nn: linear, the largest", "up to 5.5×", _largest("runtime", "dp / module", ("Linear",))),
    Claim(
        "Runtime, DP / torch.nn: embedding, the largest",
        "up to 49×",
        _largest("runtime", "dp / module", ("Embedding",)),
    ),
    Claim(
        "Runtime: the overhead of linear and embedding grows with the batch: at the largest / at the smallest",
        "increases with the batch size",
        _growth("runtime", "dp / module", ("Linear", "Embedding")),
        ABOVE_ONE,
    ),
    Claim(
        "Runtime, DP / torch.nn: RNN, GRU, LSTM, the largest",
        "up to 18×",
        _largest("runtime", "dp / module", RECURRENT),
    ),
    Claim(
        "Runtime: the overhead of RNN, GRU, LSTM falls with the batch: at the largest / at the smallest",
        "decreases as the batch size increases",
        _growth("runtime", "dp / module", RECURRENT),
        BELOW_ONE,
    ),
    Claim(
        "Runtime, own module without DP / torch.nn: RNN, GRU, LSTM, the largest",
        "up to 11×",
        _largest("runtime", "own / module", RECURRENT),
    ),
    Claim(
        "Runtime: most of the overhead of RNN, GRU, LSTM is the own module's: (own / torch.nn) / (DP / own)",
        "responsible for most of this overhead",
        _own_share(RECURRENT),
        ABOVE_ONE,
    ),
    Claim("Runtime, DP / own module: RNN, GRU, LSTM", "~2×", _factors("runtime", "dp / own", RECURRENT)),
    Claim(
        "Memory, DP / torch.nn: norms, attention, RNN, GRU, LSTM",
        "up to 1.5×",
        _factors("memory", "dp / module", (*NORMS, "MHA", *RECURRENT)),
        (0.0, 1.5 * TOLERANCE),
    ),
    Claim("Memory, DP / torch.nn: linear, the largest", "up to 129×", _largest("memory", "dp / module", ("Linear",))),
    Claim(
        "Memory, DP / torch.nn: embedding, the largest", "up to 334×", _largest("memory", "dp / module", ("Embedding",))
    ),
    Claim(
        "Memory: the overhead of linear and embedding grows with the batch: at the largest / at the smallest",
        "increases with the batch size",
        _growth("memory", "dp / module", ("Linear", "Embedding")),
        ABOVE_ONE,
    ),
    Claim(
        "Memory: the overhead of the convolution grows with the batch: at the largest / at the smallest",
        "increases slightly with the batch size",
        _growth("memory", "dp / module", ("Conv",)),
        ABOVE_ONE,
    ),
    Claim(
        "Memory, own module without DP / torch.nn: attention, RNN, GRU, LSTM",
        "slightly less",
        _factors("memory", "own / module", ("MHA", *RECURRENT)),
        BELOW_ONE,
    ),
)


def claims(tables: LayerTables) -> pd.DataFrame:
    """Every claim for every DP contestant and kind of pass in every section; columns as of the end-to-end claims."""
    everything = paper_source()
    rows = []
    if tables.factors.empty:
        return pd.DataFrame()
    private = tables.factors[tables.factors.column == "dp"]
    for key in private[[*SECTION, "contestant", "passes"]].drop_duplicates().itertuples(index=False, name=None):
        *section, contestant, passes = key
        whole = tables.factors
        for column, value in zip(SECTION, section, strict=True):
            whole = whole[whole[column] == value]
        source = record_source(whole, str(contestant), str(passes))
        timed = whole[(whole.contestant == contestant) & (whole.passes == passes) & whole.runtime.notna()]
        rounds = int(timed.runtime_n.min()) if len(timed) else 0
        table = everything.only(source.places())
        for claim in CLAIMS:
            then, found = list(claim.measure(table)), list(claim.measure(source))
            whole_table = list(claim.measure(everything))
            bounds = claim.bounds or (widened(then) if then else (math.nan, math.nan))
            rows.append(
                {
                    **dict(zip([*SECTION, "contestant", "passes"], key, strict=True)),
                    "claim": claim.about,
                    "quoted": claim.quoted,
                    "paper_everywhere": span([m.value for m in whole_table]),
                    "paper": span([m.value for m in then]),
                    "measured": span([m.value for m in found]),
                    "cells": len(found),
                    "paper_cells": len(whole_table),
                    "n": rounds,
                    "here_over_paper": here_over_paper(found, then),
                    "outcome": outcome(found if then else [], bounds),
                    "own_table": outcome(whole_table, claim.bounds or widened(whole_table)),
                }
            )
    return pd.DataFrame(rows)

"""The paper's findings on layers (its section on microbenchmarks) against what was measured.

As for the end-to-end findings, a claim is a function of a source: applied to the paper's own tables and to the records,
so that neither side is typed in; what its text says is only quoted beside. The paper's tables are cut to the layers and
batch sizes at which the same quantity was measured here, so that a factor that grows with the batch is compared at the
same batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from harness.analysis import layer_frames
from harness.analysis import memory_law as law
from harness.analysis.layer_frames import BASELINE, LayerTables
from harness.analysis.naming import number
from harness.analysis.tidy import SECTION
from harness.report.chapters import memory
from harness.report.chapters.paper import (
    ABOVE_ONE,
    BELOW_ONE,
    TOLERANCE,
    Measured,
    exactly,
    measuring,
)
from harness.report.chapters.paper_claims import UNTESTABLE, here_over_paper, outcome, span, widened

What = Literal["runtime", "memory", "L/C/b", "share", "error"]
"""``L/C/b``: L/C over the batch size. ``share``: of the peak, that the paper's laws explain. ``error``: of the
predicted overhead over the embedding sweep."""
Pair = Literal["dp / module", "own / module", "dp / own", "module", "dp"]
"""The paper's columns: torch.nn, the DP library's own module without DP, with DP."""
Place = tuple[str, int]
"""Row of the paper's tables (for ``error`` the regime, with the number of embeddings behind it) and batch size."""
Key = tuple[What, Pair, Place]

NORMS = ("LayerNorm", "InstanceNorm", "GroupNorm")
RECURRENT = ("RNN", "GRU", "LSTM")
DIRECT = (*NORMS, "Linear", "Embedding")
"""The layers of torch.nn that Opacus supports directly, without the convolution."""
SMALL_RATIO, LARGE_RATIO = (0.0, 1 / law.FAR), (1 / law.FAR, math.inf)
"""L/C much smaller than b, and not so."""
CONSTANT = (1 / TOLERANCE, TOLERANCE)


@dataclass(frozen=True)
class Source:
    """Factors by what, pair of columns and place, with their 95 % interval where there is one."""

    values: Mapping[Key, Measured]

    def only(self, other: Source) -> Source:
        """Return what ``other`` has a value of as well."""
        return Source({key: value for key, value in self.values.items() if key in other.values})

    def factors(self, what: What, pair: Pair, rows: Sequence[str]) -> list[Measured]:
        found = [m for (w, p, place), m in self.values.items() if (w, p) == (what, pair) and place[0] in rows]
        return sorted(found, key=lambda m: (rows.index(m.place[0]), m.place[1]))


def paper_source() -> Source:
    """Return the paper's Tables 2 to 4."""
    values: dict[Key, Measured] = {}
    kinds: tuple[tuple[What, str], ...] = (("runtime", "ms"), ("memory", "mb"))
    for what, unit in kinds:
        for r in layer_frames.published(what).to_dict("records"):
            place = (str(r["paper_row"]), int(r["batch_size"]))
            module, own, dp = (float(r[f"{column}_module_{unit}"]) for column in ("nn", "dp", "gsm"))
            values[what, "dp / module", place] = exactly(place, dp / module)
            if not math.isnan(own):
                values[what, "own / module", place] = exactly(place, own / module)
                values[what, "dp / own", place] = exactly(place, dp / own)
    for r in layer_frames.published("memory_breakdown").to_dict("records"):
        place = (str(r["paper_row"]), int(r["batch_size"]))
        values["L/C/b", "module", place] = exactly(place, float(r["L_mb"]) / float(r["C_mb"]) / place[1])
    for r in memory.of_the_paper().to_dict("records"):
        place = (str(r["paper_row"]), int(r["batch_size"]))
        if pair := SHARES.get(r["law"]):
            values["share", pair, place] = exactly(place, float(r["share"]))
    return Source(values)


SHARES: Mapping[str, Pair] = {memory.NON_DP: "module", memory.PAPER_DP: "dp"}
"""The laws that the paper's text gives shares of."""


def record_source(
    factors: pd.DataFrame, predicted: pd.DataFrame, swept: pd.DataFrame, contestant: str, passes: str
) -> Source:
    """Return what was measured of one DP contestant, of its framework's own modules and, for the law without DP, of
    torch.nn, in one section. ``predicted`` and ``swept``: of :mod:`harness.report.chapters.memory`."""
    values: dict[Key, Measured] = {}
    known = factors[factors.paper_row.notna()]
    mine = known[(known.contestant == contestant) & (known.passes == passes)]
    own = known[(known.column == "own_module") & known.framework.isin(mine.framework)]
    for pair, frame, prefix in (("dp / module", mine, ""), ("dp / own", mine, "own_"), ("own / module", own, "")):
        for r in frame.to_dict("records"):
            place = (str(r["paper_row"]), int(r["batch_size"]))
            runtime, low, high = (float(r[f"{prefix}runtime{end}"]) for end in ("", "_low", "_high"))
            peak = float(r[f"{prefix}memory"])
            if not math.isnan(runtime):
                values["runtime", pair, place] = Measured(place, runtime, low, high)  # type: ignore[index]
            if not math.isnan(peak):
                values["memory", pair, place] = exactly(place, peak)  # type: ignore[index]
    for r in mine.to_dict("records"):
        place = (str(r["paper_row"]), int(r["batch_size"]))
        if not (math.isnan(r["runtime"]) and math.isnan(r["memory"])):
            values["L/C/b", "module", place] = exactly(place, float(r["L"]) / float(r["C"]) / place[1])
    for r in _of(predicted, contestant, passes) + _of(predicted, BASELINE, "plain"):
        share = SHARES.get(r["law"]) if isinstance(r["paper_row"], str) else None
        if share == ("dp" if r["column"] == "dp" else "module"):
            place = (str(r["paper_row"]), int(r["batch_size"]))
            values["share", share, place] = exactly(place, float(r["share"]))
    for r in _of(swept, contestant, passes):
        if r["materialises"] and not math.isnan(r["overhead_error"]):
            place = (f"{r['regime']}, {r['num_embeddings']}", int(r["batch_size"]))
            values["error", "dp", place] = exactly(place, float(r["overhead_error"]))
    return Source(values)


def _of(frame: pd.DataFrame, contestant: str, passes: str) -> list[dict[Hashable, Any]]:
    if frame.empty:
        return []
    return frame[(frame.contestant == contestant) & (frame.passes == passes)].to_dict("records")


Measure = Callable[[Source], Iterable[Measured]]


def _factors(what: What, pair: Pair, rows: Sequence[str]) -> Measure:
    return lambda source: source.factors(what, pair, rows)


@measuring
def _largest(source: Source, what: What, pair: Pair, rows: Sequence[str]) -> Iterable[Measured]:
    """Yield the largest factor of all these rows and batch sizes."""
    found = source.factors(what, pair, rows)
    if found:
        top = max(found, key=lambda m: m.value)
        yield Measured(("largest", 0), top.value, top.low, top.high)


@measuring
def _growth(source: Source, what: What, pair: Pair, rows: Sequence[str]) -> Iterable[Measured]:
    """Yield the factor at a row's largest batch size over the one at its smallest, a value per row."""
    for row in rows:
        found = source.factors(what, pair, (row,))
        if len(found) > 1:
            yield exactly((row, 0), found[-1].value / found[0].value)


@measuring
def _own_share(source: Source, rows: Sequence[str]) -> Iterable[Measured]:
    """Yield (own module / torch.nn) over (DP / own module): above 1 the module costs more than the DP."""
    wrapped = {m.place: m.value for m in source.factors("runtime", "dp / own", rows)}
    for m in source.factors("runtime", "own / module", rows):
        if m.place in wrapped:
            yield exactly(m.place, m.value / wrapped[m.place])


@measuring
def _weakening(source: Source, what: What, pair: Pair, row: str) -> Iterable[Measured]:
    """Return growth of the factor per doubling of the batch at the large end divided by that at the small end. Below 1,
    it flattens out."""
    found = source.factors(what, pair, (row,))
    if len(found) > 2:
        first, last = (
            (b.value / a.value) ** (1 / math.log2(b.place[1] / a.place[1])) for a, b in (found[:2], found[-2:])
        )
        yield exactly((row, 0), last / first)


@measuring
def _mean(source: Source, what: What, pair: Pair, rows: Sequence[str]) -> Iterable[Measured]:
    """Return the mean over all these rows and batch sizes."""
    if found := source.factors(what, pair, rows):
        yield exactly(("mean", 0), statistics.fmean(m.value for m in found))


@measuring
def _mean_error(source: Source, regime: law.Regime) -> Iterable[Measured]:
    """Return the mean error of the predicted overhead over the cells of the embedding sweep of this regime."""
    found = [m.value for (w, _, place), m in source.values.items() if w == "error" and place[0].startswith(regime)]
    if found:
        yield exactly(("mean", 0), statistics.fmean(found))


@dataclass(frozen=True)
class Claim:
    """A claim on layers, as :class:`harness.report.chapters.paper.Claim` is one on tasks. ``show``: how its values are
    written, smallest and largest."""

    about: str
    quoted: str
    measure: Measure
    bounds: tuple[float, float] | None = None
    show: Callable[[Sequence[float]], str] = span


def _numbers(values: Sequence[float]) -> str:
    return "–".join(dict.fromkeys(number(value) for value in (min(values), max(values)))) if values else ""


def _percent(values: Sequence[float]) -> str:
    return "–".join(dict.fromkeys(f"{value:.1%}" for value in (min(values), max(values)))) if values else ""


def _signed(values: Sequence[float]) -> str:
    return "–".join(dict.fromkeys(f"{value:+.1%}" for value in (min(values), max(values)))) if values else ""


def _within(mean: float, deviation: float) -> tuple[float, float]:
    """Return the range of a mean ± standard deviation of the text that no table holds."""
    return mean - deviation, mean + deviation


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
    Claim(
        "Memory: the overhead of norms, attention, RNN, GRU, LSTM hardly changes: at the largest batch / the smallest",
        "relatively constant",
        _growth("memory", "dp / module", (*NORMS, "MHA", *RECURRENT)),
        CONSTANT,
    ),
    Claim(
        "(L/C) / b: norms, attention, RNN, GRU, LSTM",
        "much smaller than the batch size",
        _factors("L/C/b", "module", (*NORMS, "MHA", *RECURRENT)),
        SMALL_RATIO,
        _numbers,
    ),
    Claim(
        "(L/C) / b: linear, embedding",
        "substantial compared to the batch size",
        _factors("L/C/b", "module", ("Linear", "Embedding")),
        LARGE_RATIO,
        _numbers,
    ),
    Claim("(L/C) / b: convolution", "L/C ≪ b", _factors("L/C/b", "module", ("Conv",)), SMALL_RATIO, _numbers),
    Claim(
        "Memory: the growth of the convolution's overhead weakens: a doubling of the largest batches / of the smallest",
        "weakens as the batch size increases",
        _weakening("memory", "dp / module", "Conv"),
        BELOW_ONE,
    ),
    Claim(
        "Memory law: share of the peak that bC + 2L explains: norms, linear, embedding",
        "56.5% ± 8.7%",
        _mean("share", "module", DIRECT),
        show=_percent,
    ),
    Claim(
        "Memory law: share of the peak that bC + (1 + b)L explains: norms, linear, embedding",
        "57.5% ± 14.9%",
        _mean("share", "dp", DIRECT),
        show=_percent,
    ),
    Claim(
        "Memory law: share of the peak that bC + 2L explains: convolution",
        "17.7% ± 7.1%",
        _mean("share", "module", ("Conv",)),
        show=_percent,
    ),
    Claim(
        "Memory law: share of the peak that bC + (1 + b)L explains: convolution",
        "6.15% ± 0.03%",
        _mean("share", "dp", ("Conv",)),
        show=_percent,
    ),
    Claim(
        "Memory law: error of the predicted overhead over the embedding sweep, L/C ≪ b",
        "overestimates by 41% ± 17.6%",
        _mean_error("L/C << b"),
        _within(0.41, 0.176),
        _signed,
    ),
    Claim(
        "Memory law: error of the predicted overhead over the embedding sweep, L/C ≫ b",
        "underestimates by 23.3% ± 6.3%",
        _mean_error("L/C >> b"),
        _within(-0.233, 0.063),
        _signed,
    ),
)
ELSEWHERE = (
    "Not judged: why a layer costs what it costs, which the paper attributes and no figure shows. The paper's remark "
    "on Opacus' LSTM (2.4 times JAX's median epoch, without JAX's first epoch of 101) is of whole epochs: see the "
    "end-to-end findings, where such were measured."
)
"""Further claims of the paper's section on results."""


def claims(tables: LayerTables) -> pd.DataFrame:
    """Return every claim for every DP contestant and kind of pass in every section; columns as of the end-to-end
    claims."""
    everything = paper_source()
    predicted, swept = memory.predictions(tables.cells), memory.sweep(tables.factors)
    rows = []
    if tables.factors.empty:
        return pd.DataFrame()
    private = tables.factors[tables.factors.column == "dp"]
    for key in private[[*SECTION, "contestant", "passes"]].drop_duplicates().itertuples(index=False, name=None):
        *section, contestant, passes = key
        whole, law_here, sweep_here = (_in(frame, section) for frame in (tables.factors, predicted, swept))
        source = record_source(whole, law_here, sweep_here, str(contestant), str(passes))
        timed = whole[(whole.contestant == contestant) & (whole.passes == passes) & whole.runtime.notna()]
        rounds = int(timed.runtime_n.min()) if len(timed) else 0
        table = everything.only(source)
        for claim in CLAIMS:
            then, found = list(claim.measure(table)), list(claim.measure(source))
            whole_table = list(claim.measure(everything))
            bounds = claim.bounds or (widened(then) if then else None)
            own = claim.bounds or widened(whole_table)
            rows.append(
                {
                    **dict(zip([*SECTION, "contestant", "passes"], key, strict=True)),
                    "claim": claim.about,
                    "quoted": claim.quoted,
                    "paper_everywhere": claim.show([m.value for m in whole_table]),
                    "paper": claim.show([m.value for m in then]),
                    "measured": claim.show([m.value for m in found]),
                    "cells": len(found),
                    "paper_cells": len(whole_table),
                    "n": rounds,
                    "here_over_paper": here_over_paper(found, then),
                    "outcome": outcome(found, bounds) if bounds else UNTESTABLE,
                    "own_table": outcome(whole_table, own),
                }
            )
    return pd.DataFrame(rows)


def _in(frame: pd.DataFrame, section: Sequence[Any]) -> pd.DataFrame:
    for column, value in zip(SECTION, section, strict=True):
        frame = frame[frame[column] == value] if len(frame) else frame
    return frame

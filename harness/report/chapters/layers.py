"""The chapters of layers: the paper's Tables 2 to 4 beside what was measured, the memory law, the embedding sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from harness.analysis import layer_frames, naming
from harness.analysis import memory_law as law
from harness.analysis.layer_frames import BASELINE, MEGABYTE, PUBLISHED_LABEL, LayerTables
from harness.analysis.naming import factor, number
from harness.analysis.tidy import rows_of
from harness.layers import SWEEP
from harness.report import model
from harness.report.chapters import layer_claims, memory
from harness.report.chapters import layer_costs as costs
from harness.report.chapters.paper import TOLERANCE
from harness.report.chapters.paper_claims import findings
from harness.report.figures import layers as layer_figures
from harness.report.model import MISSING, Chapter, Grid, Picture, Section
from harness.store.record import Record

SWEPT = {layer.name for layer in SWEEP}
PASSES = {
    "plain": "forward and backward",
    "per_sample": "forward and backward with per-sample gradients (the paper's pass)",
    "clipped": "forward and backward with the clipped sum",
}


def chapters(records: Sequence[Record]) -> Iterable[Chapter]:
    """Chapter by chapter, section by section; none where no record is of kind layer."""
    tables = layer_frames.build(records)
    if tables is None:
        return
    found = {
        "predictions": memory.predictions(tables.cells),
        "sweep": memory.sweep(tables.factors),
        "claims": layer_claims.claims(tables),
    }
    found["errors"] = memory.overhead_errors(found["sweep"])
    sections = model.sections_of(tables.raw)
    for section, name in model.section_names(sections).items():
        yield from _of_section(tables, section, name, found)


def _of_section(
    tables: LayerTables, section: Section, section_name: str, found: Mapping[str, pd.DataFrame]
) -> Iterator[Chapter]:
    raw, cells, factors = section.of(tables.raw), section.of(tables.cells), section.of(tables.factors)
    older = len(section.of(tables.superseded))
    left_out = [f"Left out: {older} process(es) of cells that were measured again with newer code."] if older else []
    when = model.measured(raw)
    main, main_factors = (f[~f.layer.isin(SWEPT)] if len(f) else f for f in (cells, factors))
    where = f"{model.readable(section, raw)}, rules {section.protocol}."

    def picture(kind: str, title: str, draw: Any, *arguments: Any) -> Picture:
        stem = naming.slug(kind, section_name)
        return Picture(stem, title, partial(draw, *arguments, where), f"{section.title}; measured {when}.")

    def chapter(
        title: str,
        grids: Iterable[Grid] = (),
        pictures: Iterable[Picture] = (),
        in_terminal: bool = False,
        **frames: pd.DataFrame,
    ) -> Chapter:
        """``frames``: by the stem of the CSV file, with _ for -."""
        of_here = {stem.replace("_", "-"): frame for stem, frame in frames.items()}
        return Chapter(title, section, tuple(grids), tuple(pictures), of_here, when, in_terminal=in_terminal)

    pairs = [(c, p) for c, p in tables.contestants if len(main[(main.contestant == c) & (main.passes == p)])]
    private = [pair for pair in pairs if (main[main.contestant == pair[0]].column == "dp").all()]
    beside = [
        picture(f"layer-modes_batch-{size}", f"All contestants by layer at batch {size}", layer_figures.modes, size, g)
        for size, g in _last_sizes(main_factors)
        if (g.column == "dp").any()
    ]
    grids: Iterable[Grid] = _side_by_side(main_factors, private, left_out)
    yield chapter("Layers: contestants side by side", grids, beside, in_terminal=True)
    title, draw = "Runtime and memory of {} over torch.nn by layer", layer_figures.factors
    yield chapter(
        "Layers: runtime",
        (g for pair in private for g in _paper_layout("runtime", main, main_factors, *pair)),
        (picture(f"layer-factors_{c}_{p}", title.format(c), draw, c, p, main_factors) for c, p in private),
        layer_runtime_and_memory=cells,
        layer_factors=factors,
    )
    counted = private if raw.purpose.eq("memory").any() else []
    grids = (g for pair in counted for g in _paper_layout("memory", main, main_factors, *pair))
    yield chapter("Layers: peak memory", grids)
    own = [
        picture(
            f"layer-modules_{name}", f"torch.nn, {name}'s own module, and with DP", layer_figures.modules, name, main
        )
        for name in dict.fromkeys(main[main.column == "own_module"].framework)
    ]
    yield chapter("Layers: torch.nn, own module, DP", pictures=own)
    yield chapter("Layers: where the memory is", (*costs.breakdown(main), *costs.parts(main, pairs)))
    predicted = section.of(found["predictions"])
    if len(predicted):
        yield chapter(
            "The memory law",
            (*costs.shares(predicted), *_reproduction(main)),
            [picture("memory-law", "Predicted against measured peak memory", layer_figures.law, predicted)],
            in_terminal=True,
            memory_law=predicted,
            memory_law_of_the_paper=memory.of_the_paper(),
        )
        yield chapter("The memory law, cell by cell", costs.predictions(predicted, tables.contestants))
    swept, errors = section.of(found["sweep"]), section.of(found["errors"])
    if len(swept):
        by_pair = swept[swept.column == "dp"].groupby(["contestant", "passes"], sort=False)
        pictures = [
            picture(f"embedding-sweep_{c}_{p}", f"Embedding sweep: {c}", layer_figures.sweep, c, p, group)
            for (c, p), group in by_pair
        ]
        grids = (*_sweep(swept), *_errors(errors))
        yield chapter("The embedding sweep", grids, pictures, embedding_sweep=swept, embedding_sweep_errors=errors)
    between = section.of(tables.spread)
    if len(between):
        yield chapter("Layers: spread between runs", _spread(between), in_terminal=True, layer_spread=between)
    claims = section.of(found["claims"])
    yield chapter("The paper's findings on layers", _claims(claims), layer_claims=claims)


def _paper_layout(
    what: str, cells: pd.DataFrame, factors: pd.DataFrame, contestant: str, passes: str
) -> Iterator[Grid]:
    """Yield the paper's Table 2 (mean milliseconds) or 3 (peak MB) for one DP contestant, the published values beside;
    for the runtime a second one of medians with their intervals."""
    mine = factors[(factors.contestant == contestant) & (factors.passes == passes)]
    if mine.empty:
        return
    by_place = {(r["layer"], r["batch_size"], r["contestant"], r["passes"]): r for r in cells.to_dict("records")}
    own_modules = cells[(cells.column == "own_module") & (cells.framework == mine.framework.iloc[0])].contestant
    columns = ((BASELINE, "plain"), (next(iter(own_modules), ""), "plain"), (contestant, passes))
    unit, value, scale = ("ms", "mean_ms", 1.0) if what == "runtime" else ("mb", "peak", MEGABYTE)
    old = layer_frames.published(what).set_index(["layer", "batch_size"])
    n = model.usual(cells[cells.n > 0].n)
    rows, medians = [], []
    for r in mine.to_dict("records"):
        place = (r["layer"], r["batch_size"])
        three = [by_place.get((*place, *column)) for column in columns]
        before = old.loc[place] if place in old.index else None
        published = [
            MISSING if before is None or pd.isna(before[column]) else _published(before[column], column)
            for column in (f"nn_module_{unit}", f"dp_module_{unit}", f"gsm_module_{unit}", "dp_factor")
        ]
        over = math.nan if three[0] is None or three[2] is None else three[2][value] / three[0][value]
        name, size = r["layer"], str(r["batch_size"])
        rows.append((name, size, *(_number(c, value, scale) for c in three), model.times(over), *published))
        if what == "runtime":
            ratio = model.times(r["runtime"], r["runtime_low"], r["runtime_high"])
            medians.append((name, size, *(_timed(c, n) for c in three), ratio))
    notes = tuple(_notes(what, cells, contestant, passes, n))
    head = ("layer", "batch", "torch.nn", "own module", "DP", "factor")
    old_head = tuple(f"paper: {name}" for name in ("nn.module", "DPModule", "GSM", "factor"))
    kind = "mean milliseconds" if what == "runtime" else "peak MB"
    yield Grid(f"{contestant}: {kind}, {PASSES[passes]}", (*head, *old_head), tuple(rows), notes)
    if what == "runtime":
        yield Grid(f"{contestant}: median milliseconds, {PASSES[passes]}", head, tuple(medians), notes)


def _published(value: float, column: str) -> str:
    return f"{factor(value)}×" if column == "dp_factor" else number(value)


def _number(cell: Mapping[str, Any] | None, value: str, scale: float) -> str:
    if cell is None:
        return MISSING
    return str(cell["failed"] or MISSING) if math.isnan(cell[value]) else number(cell[value] / scale)


def _timed(cell: Mapping[str, Any] | None, usual_n: int) -> str:
    """Return median [low, high]."""
    if cell is None:
        return MISSING
    if math.isnan(cell["median_ms"]):
        return str(cell["failed"] or MISSING)
    spread = f" [{number(cell['low_ms'])}, {number(cell['high_ms'])}]"
    other = "" if cell["n"] == usual_n else f" n={cell['n']}"
    return f"{number(cell['median_ms'])}{'ᵈ' if cell['disturbed'] else ''}{spread}{other}"


def _notes(what: str, cells: pd.DataFrame, contestant: str, passes: str, n: int) -> Iterator[str]:
    if what == "runtime":
        yield (
            f"n = {n} process{'' if n == 1 else 'es'} per cell unless shown. Mean: of all passes, as the paper has it; "
            f"its factor is the ratio of means. Median: over processes of the medians of their passes "
            f"[{_brackets(n)}]; its factor is paired in blocks, with its 95 % interval from n = 3 on."
        )
        if cells.disturbed.any():
            yield model.DISTURBED_NOTE
    else:
        counted = "PyTorch's profiler on a CPU; what scipy, oneDNN and MKL take by themselves is not seen"
        yield f"Highest sum of the bytes alive in a pass, 10⁶ bytes (CUDA: its caching allocator; {counted})."
    yield f"Paper: {PUBLISHED_LABEL}."
    mine = cells[(cells.contestant == contestant) & (cells.passes == passes) & (cells.failed != "")]
    for (state, reason), group in mine.groupby(["state", "reason"], sort=False):
        places = ", ".join(f"{r.layer} at {r.batch_size}" for r in rows_of(group))
        yield f"{group.failed.iloc[0] or state}: {places}: {model.short(reason)}"


def _brackets(n: int) -> str:
    if n < 2:
        return "95 % interval over the passes of the one process, which says nothing of other processes"
    return "lowest, highest process" if n < 6 else "distribution-free 95 % interval"


def _side_by_side(factors: pd.DataFrame, private: Sequence[tuple[str, str]], left_out: Sequence[str]) -> Iterator[Grid]:
    """Yield factors of all DP contestants, a grid for runtime and one for memory of each kind of pass."""
    for passes in ("per_sample", "clipped"):
        names = [c for c, p in private if p == passes]
        mine = factors[(factors.passes == passes) & factors.contestant.isin(names)] if len(factors) else factors
        if mine.empty:
            continue
        places = list(dict.fromkeys(zip(mine.layer, mine.batch_size, strict=True)))
        by_place = {(r["layer"], r["batch_size"], r["contestant"]): r for r in mine.to_dict("records")}
        for what in ("runtime", "memory"):
            if mine[what].isna().all() and what == "memory":
                continue
            rows = tuple(
                (
                    layer,
                    str(size),
                    *(model.times(by_place.get((layer, size, name), {}).get(what, math.nan)) for name in names),
                )
                for layer, size in places
            )
            title = f"{'Runtime' if what == 'runtime' else 'Peak memory'} over torch.nn: {PASSES[passes]}"
            notes = [_rounds_note(mine), *left_out] if what == "runtime" else []
            yield Grid(title, ("layer", "batch", *names), rows, tuple(notes))


def _rounds_note(factors: pd.DataFrame) -> str:
    n = sorted(set(factors.runtime_n[factors.runtime.notna()]))
    if n in ([], [1]):
        return "n = 1 process per side: a factor of medians over its passes, without an interval between processes."
    rounds = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
    return f"n = {rounds} paired rounds; the 95 % intervals stand in the tables of each contestant and in the CSV file."


def _last_sizes(factors: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield the smallest and the largest batch size at which at least half of the layers were measured."""
    if factors.empty:
        return
    known = factors[factors.runtime.notna() | factors.memory.notna()]
    counts = known.groupby("batch_size").layer.nunique()
    sizes = counts[counts >= 0.5 * counts.max()].index if len(counts) else []
    for size in sorted({min(sizes), max(sizes)} if len(sizes) else ()):
        yield int(size), factors[factors.batch_size == size]


def _reproduction(cells: pd.DataFrame) -> Iterator[Grid]:
    """Yield why 129 and 334 do not come out again."""
    factors = memory.reproduction(cells)
    if factors.empty:
        return
    measured = list(factors.columns[5:])
    rows = tuple(
        (str(r["layer"]), str(r["batch_size"]), *(model.times(r[c]) for c in factors.columns[2:]))
        for r in factors.to_dict("records")
    )
    notes = (
        "Peak with DP over peak without. Its baseline less one L: PyTorch 1.10's zero_grad kept the old gradient, so "
        "the paper's peak without DP held a third L beside module and gradient, and its factors are smaller than they "
        "would be today; since PyTorch 2.0 the gradient is freed. Today's law: (bC + 2L + 2bL) / (bC + 2L). "
        f"{MISSING} not measured here; the reason stands below the table of peak memory.",
    )
    header = ("layer", "batch", "the paper", "its baseline less one L", "today's law", *measured)
    yield Grid("The paper's largest memory factors, then and now", header, rows, notes)


def _sweep(swept: pd.DataFrame) -> Iterator[Grid]:
    for (contestant, passes), group in swept[swept.column == "dp"].groupby(["contestant", "passes"], sort=False):
        columns: model.Columns = {
            "embeddings": lambda r: str(r.num_embeddings),
            "L/C": lambda r: number(r.L_over_C),
            "paper: L/C": lambda r: MISSING if math.isnan(r.paper_L_over_C) else f"{r.paper_L_over_C:,g}",
            "batch": lambda r: str(r.batch_size),
            "runtime": lambda r: model.times(r.runtime, r.runtime_low, r.runtime_high),
            "memory": lambda r: model.times(r.memory),
            "predicted memory": lambda r: model.times(r.predicted_overhead),
            "error": lambda r: (
                MISSING if not r.materialises or math.isnan(r.overhead_error) else f"{r.overhead_error:+.0%}"
            ),
            "regime": lambda r: r.regime,
        }
        note = (
            "Factors over torch.nn. Predicted: (bC + (1 + b)L) / (bC + 2L), the paper's law; error: over measured, "
            "only of contestants that hold a gradient per example. The paper's L/C counts whole blocks of 512 bytes, "
            "which CUDA's allocator takes for small tensors."
        )
        rows = group.sort_values(["num_embeddings", "batch_size"])
        yield model.listed(f"{contestant} ({passes}): embedding sweep", rows, columns, (note, _rounds_note(group)))


def _errors(errors: pd.DataFrame) -> Iterator[Grid]:
    if errors.empty:
        return
    columns: model.Columns = {
        "contestant": lambda r: f"{r.contestant} ({r.passes})",
        "regime": lambda r: r.regime,
        "error": lambda r: _signed(r.error, r.error_sd),
        "approximated": lambda r: _signed(r.approximate_error, r.approximate_sd),
        "cells": lambda r: str(r.n),
        "the paper's text": lambda r: memory.QUOTED_ERRORS.get(r.regime, MISSING),
    }
    notes = (
        "How far the paper's law over- (+) or underestimates (-) the memory overhead, mean ± standard deviation. "
        f"Approximated: by the paper's formula of the regime; << and >> are read as a factor of {law.FAR:g}, which it "
        "does not say.",
        "The paper's own values of the sweep stand in a figure only, so its 41 % cannot be computed from its tables; "
        "its 23.3 % can be approached: the embedding rows of its Table 3 alone give "
        f"{_published_embedding()}.",
    )
    yield model.listed("Over- and underestimates of the memory overhead", errors, columns, notes)


def _published_embedding() -> str:
    rows = memory.of_the_paper()
    mine = rows[(rows.paper_row == "Embedding") & (rows.law == memory.PAPER_DP)]
    found = law.spread(mine.overhead_error.tolist())
    return _signed(found.mean, found.deviation)


def _signed(mean: float, deviation: float) -> str:
    return f"{mean:+.1%}" + ("" if math.isnan(deviation) else f" ± {deviation:.1%}")


def _spread(between: pd.DataFrame) -> Iterator[Grid]:
    """Yield the spread by contestant in short, then of every cell, a grid per contestant."""
    yield _spread_in_short(between)
    has_times, has_peaks = between.runtime_spread.notna().any(), between.memory_spread.notna().any()
    shown = "ms of each run, oldest first"
    if between.runs.max() > layer_frames.RUNS_SHOWN:
        shown = "ms [lowest, highest run]"
    columns = [*((shown, "spread") if has_times else ()), *(("spread of the peak",) if has_peaks else ())]
    for (contestant, passes), group in between.groupby(["contestant", "passes"], sort=False):
        rows = []
        for r in rows_of(group):
            row = [r.layer, str(r.batch_size), str(r.runs)]
            if has_times:
                row += [_runs(r), MISSING if math.isnan(r.runtime_spread) else f"{r.runtime_spread:.1%}"]
            if has_peaks:
                row.append(MISSING if math.isnan(r.memory_spread) else f"{r.memory_spread:.2%}")
            rows.append(tuple(row))
        notes = ["Spread: (largest - smallest) / median of the runs' values."]
        if group.disturbed.any():
            notes.append(model.DISTURBED_NOTE)
        header = ("layer", "batch", "runs", *columns)
        yield Grid(f"{contestant} ({passes}): between runs", header, tuple(rows), tuple(notes))


def _runs(r: Any) -> str:
    if math.isnan(r.median_ms):
        return MISSING
    mark = "ᵈ" if r.disturbed else ""
    if r.runs > layer_frames.RUNS_SHOWN:
        return f"{number(r.median_ms)}{mark} [{number(r.lowest_ms)}, {number(r.highest_ms)}]"
    return ", ".join(number(float(value)) for value in r.runs_ms.split()) + mark


def _spread_in_short(between: pd.DataFrame) -> Grid:
    rows = []
    everything = [("all", between), *between.groupby(["contestant", "passes"], sort=False)]
    for who, group in [*everything[1:], everything[0]]:
        name = who if isinstance(who, str) else f"{who[0]} ({who[1]})"
        for what, values in (("runtime", group.runtime_spread.dropna()), ("peak memory", group.memory_spread.dropna())):
            if len(values):
                worst = group.loc[values.idxmax()]
                rows.append(
                    (
                        name,
                        what,
                        str(len(values)),
                        f"{values.median():.1%}",
                        f"{values.quantile(0.9):.1%}",
                        f"{values.max():.1%} ({worst.layer} at {worst.batch_size})",
                    )
                )
    header = ("contestant", "of", "cells", "median spread", "nine tenths under", "largest")
    notes = [
        "Spread: (largest - smallest) / median of the runs' values of a cell; a run's value is the median over its "
        "processes of the medians of their passes (of their peaks for memory). It has no interval: of the same code on "
        "the same machine, it is what a difference between two runs has to exceed."
    ]
    if between.memory_spread.isna().all():
        notes.append("Of no cell did two runs count memory.")
    return Grid("Between runs, in short", header, tuple(rows), tuple(notes))


def _claims(stated: pd.DataFrame) -> Iterator[Grid]:
    if stated.empty:
        return
    for (contestant, passes), group in stated.groupby(["contestant", "passes"], sort=False):
        if not group.cells.any():
            continue
        notes = [
            "Its table: the same quantity from the paper's own tables, at the layers and batch sizes measured here "
            "(everywhere, where none was). Here / table: geometric mean over the places of both.",
            "Holds: every measured value, with all of its 95 % interval where there is one, lies in the range of the "
            f"paper's table widened by a factor of {TOLERANCE:g} at both ends, or, for a statement, on its side of the "
            "limit. Does not hold: one lies outside with all of it. Undecided: neither, some interval reaches over a "
            "bound. Places: measured values, of those that the paper's tables have (a largest value and a mean are "
            "one); a claim that holds does so at these only. n: the fewest rounds behind one of this contestant's "
            "factors; with 1 there is no interval, and a value is judged by itself. Much smaller, ≪ and ≫: by a factor "
            f"of {law.FAR:g} and more; constant: within a factor of {TOLERANCE:g}; errors over the sweep: within mean "
            "± standard deviation of its text.",
            layer_claims.ELSEWHERE,
        ]
        shown = group.assign(paper=group.paper.where(group.paper != "", group.paper_everywhere))
        yield findings(f"{contestant} ({passes}): the paper's findings", shown, notes, lambda _: "")

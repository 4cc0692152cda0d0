"""The end-to-end tables as grids of text, which Markdown and the terminal show alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.frames import PUBLISHED_LABEL, Tables
from harness.analysis.naming import machine_slug, number
from harness.analysis.tidy import SECTION, rows_of
from harness.report import model
from harness.report.chapters import paper, paper_claims
from harness.report.model import (
    DISTURBED_PAIRS_NOTE,
    MEBIBYTE,
    METRICS,
    MISSING,
    Grid,
    Section,
    blocks,
    count,
    doubt_notes,
    doubts,
    interval,
    marks,
    memory_failures,
    short,
    spread_note,
    task_title,
    usual,
)


@lru_cache(maxsize=64)  # the terminal and every file show it
def seconds(tables: Tables, section: Section) -> list[Grid]:
    """Return the main table, a grid per task: median seconds per epoch [range or interval] and n, failures in place."""
    return [_seconds_grid(task, synthetic, group) for task, synthetic, group in blocks(section.of(tables.cells))]


def seconds_and_published(tables: Tables, section: Section) -> list[Grid]:
    """Return the main table with the paper's values below each task."""
    grids = []
    found = zip(blocks(section.of(tables.cells)), seconds(tables, section), strict=True)
    for (task, _, group), grid in found:
        old = published(tables, task, sorted(group.batch_size.unique()))
        grids += [grid, *([old] if old else [])]
    return grids


def _seconds_grid(task: str, synthetic: bool, group: pd.DataFrame) -> Grid:
    sizes = sorted(group.batch_size.unique())
    usual_n = usual(group[group.state == "ok"].n)
    by_place = {(row.contestant, row.batch_size): row for row in rows_of(group)}
    # Only a library's own loop (protocol as_shipped) samples in its own way.
    sampling = group[group.own_sampling.notna()].groupby("contestant").own_sampling.first()
    body = tuple(
        (
            name,
            *([str(sampling.get(name, MISSING))] if len(sampling) else []),
            *(_seconds_cell(by_place.get((name, size)), usual_n) for size in sizes),
        )
        for name in dict.fromkeys(group.contestant)
    )
    title = f"{task_title(task, synthetic)}: median seconds per epoch"
    header = ("contestant", *(["samples"] if len(sampling) else []), *(f"batch {size}" for size in sizes))
    return Grid(title, header, body, tuple(seconds_notes(group, body)))


def _seconds_cell(row: Any, usual_n: int) -> str:
    if row is None:
        return MISSING
    if row.state != "ok":
        return str(row.state)
    spread = interval(row.low, row.high)
    return f"{number(row.median)}{marks(row)}{spread}" + ("" if row.n == usual_n else f" n={row.n}")


def seconds_notes(group: pd.DataFrame, body: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    """Yield the legend of the marks that occur, and the reason of every failure."""
    ok = group[group.state == "ok"]
    if len(ok):
        yield spread_note(usual(ok.n))
    if ok.extrapolated.any():
        yield "ᵉ extrapolated: a part of an epoch was measured and scaled up to a whole one."
    disturbed = ok[(ok.disturbed > 0) & ~ok.swamped]
    if len(disturbed):
        where = ", ".join(f"{r.contestant} at {r.batch_size} ({r.disturbed} of {r.n})" for r in rows_of(disturbed))
        yield f"ᵈ disturbed, other programs took processor time or the machine changed its speed: {where}."
    if ok.swamped.any():
        places = ", ".join(f"{row.contestant} at {row.batch_size}" for row in rows_of(ok[ok.swamped]))
        yield f"‼ {model.SWAMPED_NOTE}: {places}."
    for row in rows_of(ok[ok.failed > 0]):
        yield f"ᶠ {row.contestant} at {row.batch_size}, besides the {row.n} shown: {row.failures}: {short(row.reason)}"
    failed = group[group.state != "ok"]
    for (contestant, state, reason), rows in failed.groupby(["contestant", "state", "reason"], sort=False):
        sizes = ", ".join(map(str, sorted(rows.batch_size)))
        yield f"{state}: {contestant} at {sizes}: {short(reason)}"
    if ok.own_sampling.notna().any():
        yield (
            "Samples: how the library's own loop draws its batches (unseeded: the same seed gave other weights in a "
            "second process). Only Poisson samples are what the accountant assumes."
        )
    if twins := sorted({name for name in ok.judged_as if isinstance(name, str)}):
        yield (
            f"The gate judged a small network of the same structure ({', '.join(twins)}); of the task itself steps of "
            "every process were compared with the reference."
        )
    older = int(group.superseded.sum())
    if older:
        yield (
            f"Left out: {count(older, 'process', 'processes')} measured with an earlier adapter or environment, or "
            "for a part of an epoch where whole epochs exist."
        )
    if any(MISSING in row for row in body):
        yield f"{MISSING} not measured."


def published(tables: Tables, task: str, sizes: list[int]) -> Grid | None:
    """Return the paper's values of a task at these batch sizes, or None where the paper has none of them."""
    frame = tables.published[(tables.published.task == task) & tables.published.batch_size.isin(sizes)]
    if frame.empty:
        return None
    cells = {(row.paper_row, row.batch_size): f"{row.seconds:.2f}" for row in rows_of(frame)}
    title = f"{task_title(task, False)}: {PUBLISHED_LABEL} (another machine; median of 20 epochs of one process)"
    return model.by_size(title, cells, head="framework")


@lru_cache(maxsize=64)
def ratios(tables: Tables, section: Section) -> list[Grid]:
    """Return seconds over those of PyTorch without DP, paired in blocks."""
    grids = []
    for task, synthetic, group in blocks(section.of(tables.ratios)):
        n = usual(group.n)
        cells = {(row.contestant, row.batch_size): _ratio_cell(row, n) for row in rows_of(group)}
        notes = [f"Over {model.baselines(group)}; {model.rounds_note(group.n, 'brackets')}"]
        notes += doubt_notes(group, DISTURBED_PAIRS_NOTE)
        if group.left_out.sum():
            pairs = count(int(group.left_out.sum()), "pair", "pairs")
            notes.append(f"Left out: {pairs} with a disturbed process; such a ratio has no ᵈ, though its time has.")
        title = f"{task_title(task, synthetic)}: seconds relative to PyTorch without DP"
        grids.append(model.by_size(title, cells, notes, "no block holds both."))
    return grids


def side_by_side(tables: Tables) -> list[Grid]:
    """Return the same ratios of several sections in one table, a column each; of tasks that two sections measured."""
    grids = []
    for task, synthetic, group in blocks(tables.ratios):
        columns = [(section, here) for section in model.sections(tables) if len(here := section.of(group))]
        if len(columns) < 2:
            continue
        cells = [{(r.contestant, r.batch_size): _ratio_cell(r, r.n) for r in rows_of(frame)} for _, frame in columns]
        keys = dict.fromkeys(key for cell in cells for key in cell)
        # What only one section has is to be compared with nothing, and comes last.
        in_order = sorted(keys, key=lambda key: sum(key in cell for cell in cells) < 2)
        rows = tuple((who, str(size), *(cell.get((who, size), MISSING) for cell in cells)) for who, size in in_order)
        names = _short([section for section, _ in columns])
        notes = [f"{name}: {s.title}, over {model.baselines(f)}." for name, (s, f) in zip(names, columns, strict=True)]
        header = ("contestant", "batch", *names)
        title = f"{task_title(task, synthetic)}: seconds relative to PyTorch without DP, side by side"
        grids.append(Grid(title, header, rows, (*notes, "Nothing is pooled.", *doubt_notes(group))))
    return grids


def _short(sections: Sequence[Section]) -> list[str]:
    """Return a name of each section for the head of a column: its processor and machine; a number where that is no
    difference."""
    names = [f"{s.machine.partition(',')[0]} {machine_slug(s.machine).partition(' ')[0]}" for s in sections]
    return names if len({*names}) == len(names) else [str(number) for number in range(1, 1 + len(names))]


def overheads(tables: Tables, section: Section) -> list[Grid]:
    """Return the time of every private contestant that has a non-private twin, as framework times DP, and compiling
    apart."""
    grids = []
    for task, synthetic, group in blocks(section.of(tables.overheads)):
        columns: model.Columns = {
            "contestant": lambda r: r.contestant,
            "twin": lambda r: r.twin,
            "batch": lambda r: str(r.batch_size),
            "framework": lambda r: model.times(r.framework, r.framework_low, r.framework_high),
            "DP": lambda r: model.times(r.dp, r.dp_low, r.dp_high),
            "total": lambda r: model.times(r.total, r.total_low, r.total_high),
            "compile s (in epochs)": lambda r: number(r.compile) + model.bracketed(r.compile / r.seconds),
            "of the twin": lambda r: number(r.compile_twin),
            "n": lambda r: str(r.n),
            "": doubts,
        }
        base = group.baseline.iloc[0]
        notes = [
            f"Framework: the twin (the same without DP) over {base}. DP: the contestant over its twin. Total: the "
            f"contestant over {base}, which is their product where all rounds hold all three. Each the mean over "
            "n paired rounds with its 95 % interval.",
            "Compile: seconds before the first epoch and, in brackets, how many ordinary epochs of this contestant "
            "they take; in none of the factors.",
        ]
        if group.left_out.any():
            notes.append("Rounds with a disturbed process are left out where two others remain.")
        notes += doubt_notes(group)
        title = f"{task_title(task, synthetic)}: what the overhead is made of"
        grids.append(model.listed(title, group, columns, notes))
    return grids


def _ratio_cell(row: Any, usual_n: int) -> str:
    return model.times(row.ratio, row.low, row.high, doubts(row)) + ("" if row.n == usual_n else f" n={row.n}")


def values(
    frame: pd.DataFrame,
    title: str,
    scale: float = 1.0,
    notes: tuple[str, ...] = (),
    failed: Mapping[tuple[str, int], str] | None = None,
) -> list[Grid]:
    """Return median [low, high] of a frame of cells, a grid per task; the values are divided by ``scale``. ``failed``:
    (contestant, batch size) -> the state that stands in place of a value."""
    grids = []
    for task, synthetic, group in blocks(frame):
        n = usual(group.n)
        cells = {
            (row.contestant, row.batch_size): number(row.median / scale)
            + interval(row.low / scale, row.high / scale)
            + ("" if row.n == n else f" n={row.n}")
            for row in rows_of(group)
        }
        cells |= {place: state for place, state in (failed or {}).items() if place not in cells}
        whole = f"{task_title(task, synthetic)}: {title}"
        grids.append(model.by_size(whole, cells, (*notes, spread_note(n)), "nothing recorded."))
    return grids


def compile_seconds(tables: Tables, section: Section) -> list[Grid]:
    """Return a table per task of the seconds of compiling and warming up."""
    notes = (
        "Warm-up of every compiled shape less the same number of ordinary steps; before the clock, in no epoch above.",
    )
    return values(section.of(tables.compile), "compile and warm-up seconds", notes=notes)


def memory(tables: Tables, section: Section) -> list[Grid]:
    """Return one grid per task and metric of memory, the leanest contestant first; the metric is in the title."""
    here = section.of(tables.memory)
    if here.empty:
        return []
    grids = []
    timed = section.of(tables.cells[tables.cells.state == "ok"])
    for metric, all_tasks in here.groupby("metric", sort=False):
        about = [f"{metric}: {METRICS[metric]}."] if metric in METRICS else []
        for task, synthetic, group in blocks(all_tasks):
            ran = timed[(timed.task == task) & (timed.synthetic == synthetic)].contestant
            failures = rows_of(memory_failures(tables, section, task, synthetic))
            failed = {(str(r.contestant), int(r.batch_size)): str(r.state) for r in failures}
            shown = {*group.contestant, *(name for name, _ in failed)}
            without = [name for name in dict.fromkeys(ran) if name not in shown]
            gap = [f"Timed, but without this memory on record: {', '.join(without)}."] if without else []
            grids += values(_leanest_first(group), f"MiB of {metric}", MEBIBYTE, (*about, *gap), failed)
    return grids


def _leanest_first(group: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a task ordered as times are: by the geometric mean, over the batch sizes that a contestant
    has, of its bytes over the fewest there."""
    values = group["median"].clip(lower=1.0)
    over = np.log(values / values.groupby(group.batch_size).transform("min"))
    mean = over.groupby(group.contestant).transform("mean")
    return group.loc[mean.sort_values(kind="stable").index]


def first_metric(tables: Tables, grids: list[Grid]) -> list[Grid]:
    """Return those grids of memory that show the first metric on record."""
    metrics = [] if tables.memory.empty else list(tables.memory.metric.unique())
    present = [n for n in (*METRICS, *metrics) if any(grid.title.endswith(f": MiB of {n}") for grid in grids)]
    return [grid for grid in grids if present and grid.title.endswith(f": MiB of {present[0]}")]


def gate_summary(tables: Tables, section: Section) -> list[Grid]:
    """Return the gate in a line per contestant: how many checks passed on each task, and the first that failed."""
    here = section.of(tables.gate)
    if here.empty:
        return []
    tasks = list(here.task.unique())
    rows = []
    for contestant, mine in here.groupby("contestant", sort=False):
        verdicts = {}
        for task, checks in mine.groupby("task", sort=False):
            failed = checks[~checks.passed.astype(bool)]
            first = f"; FAILED: {failed.check.iloc[0]}" if len(failed) else ""
            verdicts[task] = f"{len(checks) - len(failed)} of {len(checks)}{first}"
        rows.append((str(contestant), *(verdicts.get(task, MISSING) for task in tasks)))
    header = ("contestant", *(task_title(str(task), False) for task in tasks))
    note = "Checks that passed. All of them, with error and limit, stand in report.html and in gate.csv."
    return [Grid("Admission gate: checks passed", header, tuple(rows), (note, *_judged_as(tables, section, tasks)))]


def _judged_as(tables: Tables, section: Section, tasks: Sequence[str]) -> Iterator[str]:
    """Yield one note where smaller networks were judged in place of these tasks."""
    raw = model.processes_of(tables, section)
    gates = raw[(raw.purpose == "gate") & raw.task.isin(tasks) & raw.judged_as.notna()]
    if twins := sorted(set(zip(gates.task, gates.judged_as, strict=True))):
        yield f"Judged by a small network of the same structure: {', '.join(f'{t} by {twin}' for t, twin in twins)}."


def gate(tables: Tables, section: Section) -> list[Grid]:
    """Return a table per task of every check of the gate."""
    here = section.of(tables.gate)
    grids = []
    for task, group in here.groupby("task", sort=False) if len(here) else ():
        rows = tuple(
            (r.contestant, r.check, _measure(r.error), _measure(r.limit), "passed" if r.passed else "FAILED", r.detail)
            for r in rows_of(group)
        )
        header = ("contestant", "check", "error", "limit", "verdict", "detail")
        note = "Each check in its own measure; the largest error over all records. Passed: error <= limit."
        notes = (note, *_judged_as(tables, section, [str(task)]))
        grids.append(Grid(f"{task_title(str(task), False)}: admission gate", header, rows, notes))
    return grids


def _measure(value: float | None, digits: int = 5) -> str:
    return MISSING if value is None or pd.isna(value) else f"{value:.{digits}g}"


def privacy(tables: Tables, section: Section) -> list[Grid]:
    """Return a table per task of the ε that was spent."""
    grids = []
    for task, synthetic, group in blocks(section.of(tables.privacy)):
        columns: model.Columns = {
            "contestant": lambda r: r.contestant,
            "batch": lambda r: str(r.batch_size),
            "steps": lambda r: str(r.steps),
            "δ": lambda r: f"{r.delta:g}",
            "ε (RDP)": lambda r: _measure(r.rdp, 4),
            "ε (PLD)": lambda r: _measure(r.pld, 4),
            "ε (its own)": lambda r: _measure(r.own, 4),
        }
        gap = "void: the protocol does not sample as the accountant assumes, or the library has no accountant."
        grids.append(model.listed(f"{task_title(task, synthetic)}: privacy spent", group, columns, gap=gap))
    return grids


def accuracy(tables: Tables, section: Section) -> list[Grid]:
    """Return a table per task of the test accuracy."""
    grids = []
    for task, synthetic, group in blocks(section.of(tables.accuracy)):
        columns: model.Columns = {
            "contestant": lambda r: r.contestant,
            "batch": lambda r: str(r.batch_size),
            "after steps": lambda r: str(r.after_steps),
            "median test accuracy": lambda r: f"{r.median:.2%}",
            "lowest – highest": lambda r: MISSING if math.isnan(r.low) else f"{r.low:.2%} – {r.high:.2%}",
            "n": lambda r: str(r.n),
        }
        grids.append(model.listed(f"{task_title(task, synthetic)}: accuracy", group, columns))
    return grids


def coverage(tables: Tables, section: Section) -> list[Grid]:
    """Return the table of how many cells are in each state."""
    here = section.of(tables.coverage)
    if here.empty:
        return []
    columns = [c for c in here.columns if c not in SECTION]
    rows = tuple(tuple(str(getattr(r, c)) for c in columns) for r in rows_of(here))
    return [Grid("Coverage: cells by state", tuple(columns), rows)]


def against_the_paper(tables: Tables, section: Section) -> list[Grid]:
    """Return ratios then and now, rank correlation, claims. The paper's machine was another one: no seconds are
    compared."""
    grids = []
    now = section.of(paper.then_and_now(tables))
    for task, synthetic, group in blocks(now):
        rows = tuple(
            (r.contestant, r.paper_row, str(r.batch_size), model.times(r.paper_ratio), _ratio_cell(r, r.n), str(r.n))
            for r in rows_of(group)
        )
        header = ("contestant", "row of the paper", "batch", "paper", "measured", "n")
        title = f"{task_title(task, synthetic)}: seconds relative to PyTorch without DP, {PUBLISHED_LABEL}, and here"
        grids.append(Grid(title, header, rows, tuple(doubt_notes(group))))
    ranks = section.of(paper.rank_correlation(tables))
    if len(ranks):
        order = tuple(
            (task_title(r.task, r.synthetic), str(r.batch_size), f"{r.spearman:.2f}{doubts(r)}", str(r.rows), str(r.n))
            for r in rows_of(ranks)
        )
        note = (
            "Spearman's correlation of published and measured seconds over the rows of the paper that were measured; "
            "n: the fewest processes behind a median."
        )
        columns = ("task", "batch", "rank correlation", "rows", "n")
        grids.append(Grid("Order of the contestants", columns, order, (note, *doubt_notes(ranks))))
    stated = section.of(paper_claims.claims(tables))
    usual_section = stated.paper_section.mode()[0]
    elsewhere = stated.paper_section != usual_section
    stated = stated.assign(claim=stated.claim.mask(elsewhere, stated.claim + " (" + stated.paper_section + ")"))
    notes = (
        f"Claims: of section {usual_section} of the paper unless shown. "
        "Its text: as quoted. Its table: the same quantity computed from the paper's own Table 1; first epochs and "
        "batches beyond 2048 are not in it. Here / table: geometric mean over the tasks and batch sizes of both.",
        "Holds: every measured value on genuine data lies with all of its 95 % interval in the range of the paper's "
        f"table widened by a factor of {paper.TOLERANCE:g} at both ends, or, for a statement, on its side of 1. "
        "Does not hold: one lies outside with all of it. Undecided: neither, some interval reaches over a bound. "
        "Fastest and slowest are among those rows of the paper that were measured. Values of fewer than three "
        "processes and disturbed ones are shown and not judged.",
        "Places: measured values, of those that the paper's table has; a claim that holds does so at these only. n: "
        f"the fewest rounds or processes behind one of them. {_stand_ins(tables)}",
        *doubt_notes(stated),
    )
    grids.append(paper_claims.findings("The paper's findings", stated, notes, doubts))
    return grids


def _stand_ins(tables: Tables) -> str:
    """Return which contestants speak for the paper's rows: some are not the program that the paper ran."""
    here = [f"{name} for {tables.rows[name]}" for name in tables.order if name in tables.rows]
    return f"Rows of the paper are stood for by {', '.join(here)}." if here else "No row of the paper was measured."


def versions(tables: Tables, section: Section) -> list[Grid]:
    """Return the table of what the contestants ran on."""
    rows = tuple((r.contestant, r.versions) for r in rows_of(section.of(tables.versions)))
    return [Grid("Versions", ("contestant", "python and packages"), rows)] if rows else []

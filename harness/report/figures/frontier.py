"""The memory frontier of a task: throughput and peak memory over the physical batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from harness.analysis import naming
from harness.analysis.naming import number
from harness.report import model
from harness.report.figures import looks, panel
from harness.report.figures import tasks as task_figures
from harness.report.figures.looks import Look
from harness.report.figures.panel import Axis, Panel, Spec
from harness.report.model import MEBIBYTE, Section


def draw(
    section: Section, task: str, synthetic: bool, group: pd.DataFrame, raw: pd.DataFrame, endings: Sequence[str]
) -> Spec:
    """Left: examples per second over batch size, up to the frontier. Right: peak memory, and the budget.

    Args:
        section: Where it was measured.
        task: Name of the task.
        synthetic: Whether its data were.
        group: The frontier, a row per contestant.
        raw: All probes of the section.
        endings: What else a reader has to know of it.
    """
    titles = naming.titles()
    names = list(group.contestant)
    style = looks.of_all(names, dict(zip(group.contestant, group.private, strict=True)))
    here = raw[(raw.task == task) & (raw.synthetic == synthetic) & (raw.stage == "search")]
    ok = here[here.state == "ok"]
    budget = group.budget_bytes.iloc[0] / MEBIBYTE
    # Of a run that was cut short there may be no search on record.
    tried = [int(size) for size in (*here.batch_size, *group.batch_size) if size > 0] or [1]
    smallest, largest = min(tried), max(tried)
    ticks = [(float(2**k), str(2**k)) for k in range(20) if smallest <= 2**k <= largest]
    rates = [*ok.examples_per_second, *group.examples_per_second, *group.low, *group.high]
    # A process that did not grow has no place on a logarithmic axis; the table shows it.
    ok = ok.assign(peak_bytes=ok.peak_bytes.where(ok.peak_bytes > 0))
    peaks = [*(ok.peak_bytes / MEBIBYTE), budget]
    x = Axis(smallest / 1.6, largest * 1.6, ticks=ticks, title="physical batch size (log)")
    words = (("Throughput", "examples per second (log)"), ("Peak memory (dashed: the budget)", "peak MiB (log)"))
    left, right = (
        Panel(
            x,
            panel.plain(panel.around(value for value in values if not math.isnan(value)), label),
            task_figures.HALF,
            task_figures.LOW,
            [title],
        )
        for (title, label), values in zip(words, (rates, peaks), strict=True)
    )
    if budget > 0:
        right.curve((x.low, x.high), (budget, budget), looks.line("#000000", "--"), 1.0)
    for name in names:
        mine = ok[ok.contestant == name].sort_values("batch_size")
        _curve(left, list(mine.batch_size), list(mine.examples_per_second), style[name])
        _curve(right, list(mine.batch_size), list(mine.peak_bytes / MEBIBYTE), style[name])
        frontier = group[group.contestant == name].iloc[0]
        if frontier.n:
            left.bar(frontier.batch_size, frontier.low, frontier.high, style[name])
            open_mark = Look(style[name].colour, style[name].marker, "", "none")
            left.mark(frontier.batch_size, frontier.examples_per_second, open_mark, 90)
        if pd.notna(frontier.misfit) and budget > 0:
            right.mark(frontier.misfit, budget, Look(style[name].colour, "x", ""), 60)
    notes = [
        "Small points: one process each, of the search."
        + _at_the_frontier(group[group.n > 0].n)
        + " Crosses: the smallest size that did not fit.",
        *endings,
        f"{model.readable(section, raw)}, rules {section.protocol}.",
    ]
    title = f"{model.task_title(task, synthetic)}: what fits into {number(budget)} MiB"
    legend = {titles.get(name, name): look for name, look in style.items()}
    return panel.page(title, [left.spec(), right.spec()], notes, legend, columns=2)


def _at_the_frontier(n: pd.Series) -> str:
    """Return what the large points are. ``n``: further processes of every contestant that has some."""
    if n.empty:
        return ""
    if (n == 1).all():
        return " Large open points: at the frontier, one further process."
    counted = model.processes(n, noun="further process")
    return f" Large open points: at the frontier, median of {counted}{model.bars_note(n)}."


def _curve(one: Panel, sizes: Sequence[int], values: Sequence[float], look: Look) -> None:
    one.curve(sizes, values, look, 1.2)
    for size, value in zip(sizes, values, strict=True):
        if not math.isnan(value):
            one.mark(size, value, look, 16)

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
from harness.report.figures.drawing import Drawing
from harness.report.figures.looks import Look
from harness.report.figures.panel import Panel
from harness.report.model import MEBIBYTE, Section


def draw(
    section: Section, task: str, synthetic: bool, group: pd.DataFrame, raw: pd.DataFrame, endings: Sequence[str]
) -> Drawing:
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
    drawing = panel.page(f"{model.task_title(task, synthetic)}: what fits into {number(budget)} MiB")
    smallest, largest = here.batch_size.min(), here.batch_size.max()
    ticks = panel.size_ticks([2**k for k in range(20) if smallest <= 2**k <= largest])
    x = panel.of_sizes([smallest, largest])
    rates = [*ok.examples_per_second, *group.examples_per_second, *group.low, *group.high]
    # A process that did not grow has no place on a logarithmic axis; the table shows it.
    ok = ok.assign(peak_bytes=ok.peak_bytes.where(ok.peak_bytes > 0))
    peaks = [*(ok.peak_bytes / MEBIBYTE), budget]
    places = task_figures.columns(2, 216.0)
    panels = [
        Panel(drawing, *place, x, panel.around([value for value in values if not math.isnan(value)]))
        for place, values in zip(places, (rates, peaks), strict=True)
    ]
    words = (("Throughput", "examples per second (log)"), ("Peak memory (dashed: the budget)", "peak MiB (log)"))
    for one, (title, label) in zip(panels, words, strict=True):
        one.frame(ticks, panel.plain_ticks(one.y), [title], "physical batch size (log)", label)
    left, right = panels
    if budget > 0:
        drawing.curve((right.at(x.low, budget), right.at(x.high, budget)), "#000000", 0.8, panel.DASHES["--"])
    for name in names:
        mine = ok[ok.contestant == name].sort_values("batch_size")
        _curve(left, list(mine.batch_size), list(mine.examples_per_second), style[name])
        _curve(right, list(mine.batch_size), list(mine.peak_bytes / MEBIBYTE), style[name])
        frontier = group[group.contestant == name].iloc[0]
        if frontier.n:
            left.bar(frontier.batch_size, frontier.low, frontier.high, style[name])
            open_mark = Look(style[name].colour, style[name].marker, "", "none")
            left.mark(frontier.batch_size, frontier.examples_per_second, open_mark, 8)
        if pd.notna(frontier.misfit) and budget > 0:
            right.mark(frontier.misfit, budget, Look(style[name].colour, "x", ""), 6)
    notes = [
        "Small points: one process each, of the search."
        + _at_the_frontier(group[group.n > 0].n)
        + " Crosses: the smallest size that did not fit.",
        *endings,
        f"{model.readable(section, raw)}, rules {section.protocol}.",
    ]
    panel.below(drawing, notes, {titles.get(name, name): look for name, look in style.items()})
    return drawing


def _at_the_frontier(n: pd.Series) -> str:
    """Return what the large points are. ``n``: further processes of every contestant that has some."""
    if n.empty:
        return ""
    if (n == 1).all():
        return " Large open points: at the frontier, one further process."
    counted = model.processes(n, noun="further process")
    return f" Large open points: at the frontier, median of {counted}{model.bars_note(n)}."


def _curve(one: Panel, sizes: Sequence[int], values: Sequence[float], look: Look) -> None:
    one.curve(sizes, values, look, 1.0)
    for size, value in zip(sizes, values, strict=True):
        if not math.isnan(value):
            one.mark(size, value, look, 3)

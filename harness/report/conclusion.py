"""The result of a run in sentences: for every task and batch size, who was the fastest with DP, and at what price."""

from __future__ import annotations

from collections.abc import Iterator

from harness.analysis.naming import factor, number
from harness.analysis.standing import standings
from harness.analysis.tidy import PLACE, SECTION, rows_of
from harness.report import model
from harness.report.model import Report


def sentences(report: Report) -> Iterator[str]:
    """Yield one sentence per section, task and batch size of the end-to-end records; none where nothing private was
    timed."""
    if report.tables is None or report.tables.cells.empty:
        return
    cells, where = report.tables.cells, [*PLACE, "batch_size"]
    timed = cells[cells.private & (cells.state == "ok") & cells["median"].notna()]
    if timed.empty:
        return
    several = len(timed[SECTION].drop_duplicates()) > 1
    prices = {
        tuple(getattr(row, column) for column in (*where, "contestant")): (
            f"; {factor(row.ratio)} times that of {row.baseline}{model.interval(row.low, row.high)}, n = {row.n}"
        )
        for row in rows_of(report.tables.ratios)
    }
    found = standings(report.tables)
    yield "Fastest with DP, by paired rounds:"
    disturbed = False
    for place, group in timed.groupby(where, sort=False):
        standing = found[place]
        best = group[group.contestant == standing.first].iloc[0]
        section = f" ({best.machine}, {best.protocol})" if several else ""
        what = f"{model.task_title(best.task, best.synthetic)}, batch {best.batch_size}{section}"
        doubt = "too disturbed to be a result" if best.swamped else "disturbed" if best.disturbed else ""
        marks = [*(["extrapolated"] if best.extrapolated else []), *([doubt] if doubt else [])]
        seconds = f"{number(best['median'])} s per epoch" + (f" ({', '.join(marks)})" if marks else "")
        other = standing.untold
        overlap = other is not None and other.evidence == "overlap"
        why = "cannot be told from" if overlap else "too few undisturbed rounds to tell it from"
        rival = f"; {why} {other.contestant} ({other.basis})" if other is not None else ""
        if other is None and (after := standing.runner_up) is not None and after.times is not None:
            lead = model.interval(after.times.low, after.times.high)
            rival = f"; {after.contestant}, the next, takes {factor(after.times.ratio)} times as long{lead}"
        yield f"  {what}: {best.contestant}, {seconds}{rival}{prices.get((*place, best.contestant), '')}"
        disturbed |= bool(best.disturbed)
    if timed.swamped.any():
        yield f"{timed.swamped.sum()} of {len(timed)} cells with DP are {model.SWAMPED_NOTE}."
    elif disturbed:
        yield "Other programs took processor time: repeat what is disturbed on a quiet machine before you use it."

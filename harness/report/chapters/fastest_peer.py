"""Compare each private contestant with the fastest private one of another framework, and with PyTorch without DP, the
faster of eager and compiled. Both are chosen cell by cell, by what was measured here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from harness.analysis import frames, pairs
from harness.analysis.frames import Tables
from harness.analysis.naming import BASELINE_FRAMEWORK
from harness.analysis.tidy import PLACE, rows_of
from harness.report.model import Grid, Section, blocks, by_size, doubt_notes, doubts, task_title, times, usual
from harness.tasks import TASKS

PEER, WITHOUT_DP = "peer", "without DP"


def frame(tables: Tables) -> pd.DataFrame:
    """Return a row per private contestant, batch size and opponent (``against``: peer or without DP): its seconds over
    those of ``other``, the mean over paired rounds as in ``tables.ratios``; ``low`` and ``high`` are for the truly
    fastest of the candidates, see :func:`harness.analysis.stats.against_fastest`, and ``candidates`` counts them."""
    current = tables.raw[~tables.raw.superseded]
    ok = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    rows = [
        dict(zip([*PLACE, "batch_size"], place, strict=True)) | row
        for place, group in ok.groupby([*PLACE, "batch_size"], sort=False)
        for row in _rows(group)
    ]
    position = {name: i for i, name in enumerate(tables.order)}
    tasks = {name: i for i, name in enumerate(TASKS)}
    rows.sort(
        key=lambda row: (
            tasks.get(row["task"], len(tasks)),
            row["against"] != PEER,
            position[row["contestant"]],
            row["batch_size"],
        )
    )
    return frames.with_swamped(pd.DataFrame(rows), tables.cells)


def _rows(group: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Return the rows of one batch size in one block of the table."""
    # Plain dictionaries: small frames would make a report of ten thousand records wait for a minute.
    sides = pairs.by_block(group)
    framework = dict(zip(group.contestant, group.framework, strict=True))
    private = dict(zip(group.contestant, group.private, strict=True))
    extrapolated = set(group.contestant[group.extrapolated])
    for contestant in (name for name in sides if private[name]):
        others = [c for c in sides if private[c] and framework[c] != framework[contestant]]
        plain = [c for c in sides if not private[c] and framework[c] == BASELINE_FRAMEWORK]
        for against, candidates in ((PEER, others), (WITHOUT_DP, plain)):
            found = pairs.against_fastest(sides, candidates, contestant)
            if found is not None:
                scaled = not extrapolated.isdisjoint((found["other"], contestant))
                yield {"contestant": contestant, "against": against, **found, "extrapolated": scaled}


TITLES = {PEER: "seconds over those of the fastest peer", WITHOUT_DP: "seconds over those of PyTorch without DP"}


def grids(numbers: pd.DataFrame, section: Section) -> Iterable[Grid]:
    """Yield a grid per task and opponent; each cell names whom it was compared with."""
    for task, synthetic, of_task in blocks(section.of(numbers)):
        for against, group in of_task.groupby("against", sort=False):
            n = usual(group.n)
            cells = {(r.contestant, r.batch_size): _cell(r, n) for r in rows_of(group)}
            notes = [
                f"Mean of {n} paired rounds unless shown, against the one that leads in this cell; under "
                "1 the contestant is the faster one."
                if n > 1
                else "One paired round unless shown, of which there is no interval; under 1 the contestant is faster.",
                "Brackets: at least 95 % for the time over that of the truly fastest of the candidates, whoever it is "
                "(Student's t on log-ratios against each; the lower end is shared among all of them, by Bonferroni, "
                "and so far away where rounds are few). The ratio is against the one that looked fastest: where "
                "several are close, its luck makes it too large rather than too small.",
            ]
            if against == PEER:
                notes.append("Peer: a private contestant of another framework that the admission gate let in.")
            else:
                notes.append("PyTorch without DP: the faster of eager and compiled where both were measured.")
            if group.left_out.any():
                notes.append("Rounds with a disturbed process are left out where two others remain.")
            title = f"{task_title(task, synthetic)}: {TITLES[str(against)]}"
            yield by_size(title, cells, (*notes, *doubt_notes(group)))


def _cell(row: Any, usual_n: int) -> str:
    few = "" if row.n == usual_n else f" n={row.n}"
    return f"{times(row.ratio, row.low, row.high, doubts(row))} {row.other}{few}"

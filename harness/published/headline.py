"""Figures of README and results: what DP costs, from committed records."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from harness.analysis import naming
from harness.analysis.naming import factor
from harness.analysis.tidy import rows_of
from harness.errors import BadInput
from harness.paths import ROOT
from harness.published import tables
from harness.published.index import Entry
from harness.report.chapters import fastest_peer
from harness.report.figures import headline, looks
from harness.report.figures.headline import Mark, Part
from harness.report.model import task_title
from harness.tasks import PAPER_TASKS

FOLDER = ROOT / "plots"
TITLE = "What privacy costs: time of an epoch over PyTorch without DP"
Shown = tuple[Sequence[Entry], int]
"""Runs and the batch size that is shown of them."""


def block(shown: Sequence[Shown], path: Path) -> str:
    """Return the figure as HTML, with its numbers as text for those who cannot see it. ``path``: of the light picture
    from the page, without its ending."""
    said = []
    for part in _parts(shown):
        said.append(f"{part.heading} ({part.place}).")
        for title, marks in part.rows:
            said.append(f"{title}: {', '.join(f'{mark.name} {factor(mark.ratio)}' for mark in marks)}.")
    return "\n".join(
        (
            "<picture>",
            f'  <source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">',
            f'  <img src="{path}.svg" width="100%" alt="{TITLE}. {" ".join(said)}">',
            "</picture>",
        )
    )


def files(shown: Sequence[Shown], stem: str) -> Mapping[Path, bytes]:
    """Return the pictures named ``stem``, light and dark, as SVG and PNG: path -> content."""
    import matplotlib

    parts = _parts(shown)
    runs = ", ".join(entry.name for entries, _ in shown for entry in entries)
    said = " ".join(f"{part.place}. {part.note}" for part in parts)
    metadata = {"Title": TITLE, "Description": f"{said} Runs: {runs}."}
    found: dict[Path, bytes] = {}
    with matplotlib.rc_context(headline.STYLE):
        for suffix, theme in headline.THEMES.items():
            figure = headline.draw(TITLE, parts, theme)
            for kind, apart in (("svg", {"Date": None}), ("png", {"Software": None})):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, dpi=200, metadata={**metadata, **apart})
                found[FOLDER / f"{'-'.join(filter(None, (stem, suffix)))}.{kind}"] = buffer.getvalue()
    return found


def _parts(shown: Sequence[Shown]) -> list[Part]:
    found = [(_rows(entries, size), entries, size) for entries, size in shown]
    by_speed = list(dict.fromkeys(name for rows, _, _ in found for name in rows.sort_values("ratio").contestant))
    style = looks.of_all(by_speed, dict.fromkeys(by_speed, True))
    titles = naming.titles()
    return [
        Part(
            f"{_era(rows.task.unique())}, batch {size}",
            [
                (
                    task_title(str(task), False),
                    [
                        Mark(
                            titles.get(r.contestant, r.contestant),
                            style[r.contestant],
                            r.ratio,
                            looks.is_own(r.contestant),
                            r.low,
                            r.high,
                        )
                        for r in rows_of(group.sort_values("ratio"))
                    ],
                )
                for task, group in rows.groupby("task", sort=False)
            ],
            _note(rows),
            _place(rows, entries),
        )
        for rows, entries, size in found
    ]


def _era(tasks: Sequence[str]) -> str:
    return "The paper's tasks of 2021" if set(tasks) <= set(PAPER_TASKS) else "Tasks of today"


def _rows(entries: Sequence[Entry], size: int) -> pd.DataFrame:
    rows = tables.against(entries, [size])
    rows = rows[rows.against == fastest_peer.WITHOUT_DP]
    if rows.empty:
        raise BadInput(f"No run of {', '.join(e.name for e in entries)} has times at batch size {size}.")
    return rows


def _place(rows: pd.DataFrame, entries: Sequence[Entry]) -> str:
    days = sorted(str(entry.date) for entry in entries)
    kinds = [re.sub(r", \d+ cores.*", "", entry.machine) for entry in entries]
    used = [naming.where(machine, days).partition(", ")[2] for machine in rows.machine]
    heaps = [entry.heap for entry in entries if entry.heap]
    return ", ".join(" and ".join(dict.fromkeys(said)) for said in (kinds, used, heaps) if said)


def _note(rows: pd.DataFrame) -> str:
    least, most = rows.n.min(), rows.n.max()
    rounds = f"{most}" if least == most else f"{least} to {most}"
    lines = ", lines: 95 % intervals of three rounds or more" if rows.low.notna().any() else ""
    measured = "One round each, so no interval" if most == 1 else f"Mean of {rounds} paired rounds{lines}"
    scaled = "all " if rows.extrapolated.all() else "some " if rows.extrapolated.any() else ""
    scaled = f", {scaled}extrapolated from parts of epochs" if scaled else ""
    return (
        f"Left is better. {measured}{scaled}. PyTorch without DP (dotted): the faster of eager and "
        "compiled, where both were measured. Updates were checked against a float64 reference."
    )

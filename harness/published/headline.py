"""Figures of README and results: what DP costs at one batch size, from committed records."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from harness.analysis import naming
from harness.analysis.frames import rows_of
from harness.analysis.naming import factor
from harness.errors import BadInput
from harness.paths import ROOT
from harness.published import tables
from harness.published.index import Entry
from harness.report.chapters import fastest_peer
from harness.report.figures import headline, looks
from harness.report.model import task_title

FOLDER = ROOT / "plots"
TITLE = "What privacy costs: time of an epoch over PyTorch without DP"


def block(entries: Sequence[Entry], size: int, path: Path) -> str:
    """Return the figure as HTML, with its numbers as text for those who cannot see it. ``path``: of the light picture
    from the page, without its ending."""
    said = [
        f"{title}: " + ", ".join(f"{bar.name} {factor(bar.ratio)}" for bar in bars) + "."
        for title, bars in _panels(_rows(entries, size))
    ]
    return "\n".join(
        (
            "<picture>",
            f'  <source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">',
            f'  <img src="{path}.svg" width="100%" alt="{TITLE}; batch {size}. {" ".join(said)}">',
            "</picture>",
        )
    )


def files(entries: Sequence[Entry], size: int, stem: str) -> Mapping[Path, bytes]:
    """Return the pictures named ``stem``, light and dark, as SVG and PNG: path -> content."""
    import matplotlib

    rows = _rows(entries, size)
    runs = ", ".join(entry.name for entry in entries)
    metadata = {"Title": TITLE, "Description": f"{_note(rows, entries, size)} Runs: {runs}."}
    found: dict[Path, bytes] = {}
    with matplotlib.rc_context(headline.STYLE):
        for suffix, theme in headline.THEMES.items():
            figure = headline.draw(TITLE, _panels(rows), _note(rows, entries, size), theme)
            for kind, apart in (("svg", {"Date": None}), ("png", {"Software": None})):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, dpi=200, metadata={**metadata, **apart})
                found[FOLDER / f"{'-'.join(filter(None, (stem, suffix)))}.{kind}"] = buffer.getvalue()
    return found


def _rows(entries: Sequence[Entry], size: int) -> pd.DataFrame:
    rows = tables.against(entries, [size])
    rows = rows[rows.against == fastest_peer.WITHOUT_DP]
    if rows.empty:
        raise BadInput(f"No run of {', '.join(e.name for e in entries)} has times at batch size {size}.")
    return rows


def _panels(rows: pd.DataFrame) -> list[tuple[str, list[headline.Bar]]]:
    titles = naming.titles()
    return [
        (
            task_title(str(task), False),
            [
                headline.Bar(titles.get(r.contestant, r.contestant), r.ratio, looks.is_own(r.contestant), r.low, r.high)
                for r in rows_of(group.sort_values("ratio"))
            ],
        )
        for task, group in rows.groupby("task", sort=False)
    ]


def _note(rows: pd.DataFrame, entries: Sequence[Entry], size: int) -> str:
    machines = " and ".join(dict.fromkeys(naming.where(m, sorted(str(e.date) for e in entries)) for m in rows.machine))
    least, most = rows.n.min(), rows.n.max()
    rounds = f"{most}" if least == most else f"{least} to {most}"
    lines = ", lines: 95 % intervals of three rounds or more" if rows.low.notna().any() else ""
    measured = "One round each, so no interval" if most == 1 else f"Mean of {rounds} paired rounds{lines}"
    scaled = "all " if rows.extrapolated.all() else "some " if rows.extrapolated.any() else ""
    scaled = f", {scaled}extrapolated from parts of epochs" if scaled else ""
    return (
        f"Shorter is better. Batch {size}. {machines}. {measured}{scaled}. PyTorch without DP "
        "(dotted): the faster of eager and compiled, where both were measured. Every update was checked against a "
        "float64 reference."
    )

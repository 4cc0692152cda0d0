"""Columns: of several machines beside each other, and of exported tables, each explained."""

from __future__ import annotations

import json
import re

from harness.paths import ROOT
from harness.report import contents
from harness.report.formats import page
from tests.support import record_factory as factory


def test_two_machines_stand_side_by_side_and_are_not_pooled():
    def run(machine, slower):
        return [
            factory.record(
                framework=name, private=name != "pytorch", seconds=(s,), round=i, machine=machine, run=run_id
            )
            for run_id in [machine["id"]]
            for i in range(3)
            for name, s in (("pytorch", 1.0), ("opacus", slower))
        ]

    here, there = run(factory.MACHINE, 2.0), run(factory.OTHER_MACHINE, 4.0)
    report = contents.build([*here, *there])
    shown = page.page(report, {})
    assert shown.index("Side by side</h3>") < shown.index("Seconds per epoch</h3>")
    chapter = next(c for c in report.chapters if c.title == "Side by side")
    (grid,) = chapter.grids
    assert grid.header[:2] == ("contestant", "batch") and len({*grid.header}) == 4
    for name, machine in zip(grid.header[2:], (factory.MACHINE, factory.OTHER_MACHINE), strict=True):
        assert machine["id"] in name and any(note.startswith(f"{name}: ") for note in grid.notes)
    ((who, size, *ratios),) = grid.rows
    assert (who, size) == ("opacus-hooks", "512") and [r[:2] for r in sorted(ratios)] == ["2.", "4."], ratios
    assert "Side by side" not in {c.title for c in contents.build(here).chapters}


def test_every_column_of_a_committed_runs_tables_is_explained():
    columns = (ROOT / "docs" / "columns.md").read_text()
    words = set(re.findall(r"`(\w+)`", columns))
    # A family is written once, with the ends of its other names.
    words |= {f"{word}{end}" for word in words for end in words if end.startswith("_")}
    kept = json.loads((ROOT / "proofs" / "golden" / "reports.json").read_text())
    exported = {column for header in kept["headers"] for column in header}
    assert exported and not exported - words, sorted(exported - words)

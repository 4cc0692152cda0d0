"""A duel of real environments: the workers of a side import that side's dpcore, and only that."""

from __future__ import annotations

import pytest
from rich.console import Console

from harness.compare.run import DuelOptions
from tests.planted.__main__ import fight

pytestmark = pytest.mark.frameworks


def test_a_clip_bug_planted_into_head_is_caught(tmp_path):
    options = DuelOptions(layers=("layer-norm",), batch_sizes=(16,), seconds=0.1, memory=False)
    duel = fight("clip-bug", options, tmp_path / "out", Console(quiet=True))
    (cell,) = duel.cells
    assert (cell.verdict, cell.alerts, duel.exit_code) == ("wrong", ["gate"], 1)
    assert cell.gate["base"] == "passed" and "clipped-sum" in cell.gate["head"]
    assert duel.base.versions["dpcore"]["torch"] == duel.head.versions["dpcore"]["torch"]

"""A comparison of real environments: the workers of a side import that side's dpcore, and only that."""

from __future__ import annotations

import pytest
from rich.console import Console

from harness.compare.options import ComparisonOptions
from tests.planted.__main__ import compare

pytestmark = pytest.mark.frameworks


def test_a_clip_bug_planted_into_head_is_caught(tmp_path):
    options = ComparisonOptions(layers=("layer-norm",), batch_sizes=(16,), seconds=0.1, memory=False)
    comparison = compare("clip-bug", options, tmp_path / "out", Console(quiet=True))
    (cell,) = comparison.cells
    assert (cell.verdict, cell.alerts, comparison.exit_code) == ("wrong", ["gate"], 1)
    assert cell.gate["base"] == "passed" and "clipped-sum" in cell.gate["head"]
    assert comparison.base.versions["dpcore"]["torch"] == comparison.head.versions["dpcore"]["torch"]

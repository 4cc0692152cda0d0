"""The proof program: its faults change what they say, and its table counts and simulates right."""

from __future__ import annotations

import ast
import json

import numpy as np
import pytest

from harness.analysis.sequential import Rule
from harness.compare.record import Comparison, Pair, Process, SideFacts, conclude
from harness.plan.registry import ROOT
from tests.planted import table
from tests.planted.__main__ import stored
from tests.planted.faults import FAULTS, plant

RULE = Rule(rounds=20)


def comparison(ratios: list[float], **head: object) -> Comparison:
    pairs = [
        Pair(
            number=number,
            order=("base", "head"),
            base=Process(state="ok", seconds=1.0),
            head=Process.model_validate({"state": "ok", "seconds": ratio, **head}),
        )
        for number, ratio in enumerate(ratios)
    ]
    side = SideFacts(asked=".", title="", commit=None, dirty=None, content="", package=None, locks={}, versions={})
    return Comparison(
        started="",
        command="",
        base=side,
        head=side,
        alpha=RULE.alpha,
        threshold=RULE.threshold,
        max_rounds=RULE.rounds,
        timed_cells=1,
        isolation="venv",
        threads=1,
        seconds=0.5,
        machine={},
        minutes=0.1 * len(pairs),
        finished=True,
        cells=[conclude("cell", "layer", pairs, None, None, None, RULE)],
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_tree_differs_by_its_fault_and_still_parses(name, tmp_path):
    plant("none", tmp_path / "clean")
    plant(name, tmp_path / "head")
    files = {path.relative_to(tmp_path / "head") for path in (tmp_path / "head").rglob("*.py")}
    assert files == {path.relative_to(tmp_path / "clean") for path in (tmp_path / "clean").rglob("*.py")}
    texts = {f: ((tmp_path / "clean" / f).read_text(), (tmp_path / "head" / f).read_text()) for f in files}
    changed = {str(f) for f, (clean, planted) in texts.items() if clean != planted}
    assert changed == set(FAULTS[name].texts)
    for file in changed:
        ast.parse((tmp_path / "head" / file).read_text())


def test_caught_missed_and_false_ones_are_counted():
    slower, equal = [1.1, 1.11, 1.1, 1.09, 1.1], [1.0, 1.001, 0.999, 1.0, 1.002]
    found = table.tally(
        "slow-10",
        [comparison(slower), comparison(slower), comparison(equal), comparison([1.0], state="crashed", seconds=None)],
    )
    assert (found.comparisons, found.caught, found.missed, found.false, found.unfinished) == (4, 2, 1, 0, 1)
    assert found.minutes == pytest.approx((0.5, 0.5))
    quiet = table.tally("none", [comparison(equal), comparison(slower)])
    assert (quiet.caught, quiet.missed, quiet.false) == (0, 0, 1)
    called = table.tally("none", [comparison(equal), comparison([1.03, 1.031, 1.03, 1.029, 1.03])])
    assert (called.called, called.false, quiet.called) == (1, 0, 0)
    other = table.tally("memory", [comparison(slower)])
    assert (other.caught, other.missed, other.false) == (0, 1, 1)


def test_curves_come_from_the_recorded_pairs_and_say_that_they_are_simulated():
    rng = np.random.default_rng(0)
    quiet = [comparison(list(np.exp(0.03 * rng.standard_normal(8)))) for _ in range(10)]
    said = table.summary({"none": quiet})
    assert said["simulated"]["recorded_pairs"] == 80
    alerts = {row["effect"]: row["alert"] for row in said["simulated"]["curve"]}
    assert alerts[0.0] < 0.01 and alerts[0.10] > 0.99
    assert alerts[0.02] < alerts[0.05] < alerts[0.07]
    text = table.markdown(said)
    assert "Not measured: simulated" in text and "| 5 % |" in text
    assert "cannot show a bias" in text
    header, dashes, row = text[text.index("| planted") :].splitlines()[:3]
    assert "called, no alert" in header and header.count("|") == dashes.count("|") == row.count("|")
    few = table.summary({"none": quiet[:1]})
    assert few["simulated"] is None and "No curves yet" in table.markdown(few)


def test_the_committed_table_is_what_its_comparisons_give():
    folder = ROOT / "results" / "comparisons" / "alerts-2026-11-20"
    written = json.loads((folder / "alerts.json").read_text())
    said = table.summary(stored(folder))
    # Processors differ in the last digit of a logarithm.
    for found, kept in zip(json.loads(json.dumps(said["faults"])), written["faults"], strict=True):
        for name, value in kept.items():
            assert found.pop(name) == (pytest.approx(value, rel=1e-9) if isinstance(value, float | list) else value), (
                name
            )
        assert not found
    alerts = [row["alert"] for row in said["simulated"]["curve"]]
    assert alerts == pytest.approx([row["alert"] for row in written["simulated"]["curve"]], abs=0.01)

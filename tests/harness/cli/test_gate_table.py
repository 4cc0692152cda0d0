"""The gate's table and exit code: one row each, and a declared rejection is the expected verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import gate as gate_table
from harness.cli.gate import Judged
from harness.gate.admission import Verdict
from harness.plan.registry import Contestant, Framework, Variant
from harness.store.record import Gate, GateCheck

NEAR = GateCheck(check="update: some clipped", error=4e-5, limit=5e-5, passed=True)
FAR = GateCheck(check="update: all clipped", error=1e-6, limit=5e-5, passed=True)
OFF = GateCheck(check="update: one, clipped", error=0.7, limit=5e-5, passed=False)
WORSE = GateCheck(check="sensitivity", error=9e6, limit=1.0, passed=False)
BROKEN = GateCheck(check="noise", error=None, limit=None, passed=False, detail="raised RuntimeError: no step yet")


def judged(
    state: str, *checks: GateCheck, task: str = "mnist-cnn", reason: str | None = None, fault: str = ""
) -> Judged:
    variant = Variant("v", "t", True, expected_rejection={"every-task": fault} if fault else {})
    framework = Framework("f", "t", "h", "l", "3.11", Path("."), (variant,))
    passed = bool(checks) and all(check.passed for check in checks)
    return Judged(
        Contestant(framework, variant), task, Verdict(state, reason, Gate(passed=passed, key="", checks=checks), {})
    )


def test_one_row_each_with_the_check_that_decides() -> None:
    rows = gate_table.table_rows([judged("ok", NEAR, FAR), judged("ok", NEAR, OFF, WORSE, BROKEN)], [], False)
    assert [(row["check"], row["verdict"]) for row in rows] == [(NEAR.check, "passed"), (OFF.check, "rejected")]
    assert "3 of 4 checks failed: update, sensitivity, noise" in rows[1]["detail"]
    every = gate_table.table_rows([judged("ok", NEAR, OFF, WORSE, BROKEN)], [], True)
    assert [row["check"] for row in every] == [check.check for check in (NEAR, OFF, WORSE, BROKEN)]


def test_what_a_passed_check_has_to_tell_stands_in_its_row() -> None:
    told = GateCheck(
        check="clip bound", error=6e-4, limit=1e-3, passed=True, detail="finding: by 6e-04; moved by 1.0006 C"
    )
    (row,) = gate_table.table_rows([judged("ok", NEAR, told)], [], False)
    assert row["verdict"] == "passed" and row["detail"] == "all of 2 checks; finding: by 6e-04"


def test_an_adapter_that_only_raises_shows_what_it_raised() -> None:
    (row,) = gate_table.table_rows([judged("ok", BROKEN)], [], False)
    assert row["verdict"] == "rejected" and "no step yet" in row["detail"]


def test_what_cannot_be_installed_is_one_row_for_all_tasks() -> None:
    absent = [judged("unsupported", task=t, reason="not installable offline") for t in ("mnist-cnn", "imdb-lstm")]
    (row,) = gate_table.table_rows(absent, [], False)
    assert (row["task"], row["verdict"], row["detail"]) == (
        "mnist-cnn, imdb-lstm",
        "unsupported",
        "not installable offline",
    )


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (judged("ok", NEAR), True),
        (judged("ok", OFF), False),
        (judged("ok", OFF, fault="clips the batch"), True),
        (judged("ok", NEAR, fault="clips the batch"), False),
        (judged("crashed", reason="it broke"), False),
        (judged("crashed", reason="it broke", fault="clips the batch"), False),
        (judged("unsupported", reason="not here"), True),
        (judged("unsupported", reason="not here", fault="clips the batch"), True),
    ],
)
def test_only_the_expected_verdict_is_no_finding(one: Judged, expected: bool) -> None:
    assert one.as_expected is expected
    assert ("Every verdict is the expected one" in gate_table.summary([one])) is expected
    assert ("f-v on mnist-cnn" in gate_table.summary([one])) is not expected


def test_a_mutant_must_be_rejected_and_the_right_ones_must_pass() -> None:
    wrong = judged("ok", OFF).contestant
    for name, checks, expected in (
        ("clips-batch", (OFF,), True),
        ("clips-batch", (NEAR,), False),
        ("exact-plain", (NEAR,), True),
    ):
        variant = replace(wrong.variant, name=name)
        framework = replace(wrong.framework, name="mutants", variants=(variant,))
        assert replace(judged("ok", *checks), contestant=Contestant(framework, variant)).as_expected is expected

"""Exit codes mean: 0 a number everywhere, 1 a finding, 2 bad input, 3 something could not be measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import gate as gate_table
from harness.cli.options import exit_code
from harness.gate import admission
from harness.gate.admission import Verdict
from harness.plan import registry
from harness.store.record import Gate
from harness.worker.result import Check, Result
from tests.support.driver import ROOT

FRAMEWORK = """\
name = "private"
title = "t"
home = "h"
licence = "l"
python = "3.11"
[[variants]]
name = "one"
title = "t"
private = true
default = true
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a user whose packages cannot be had: their index is a closed port."""
    folder = tmp_path / "frameworks" / "private"
    folder.mkdir(parents=True)
    (folder / "framework.toml").write_text(FRAMEWORK)
    (folder / "adapter.py").write_text("")
    (folder / "requirements.txt").write_text("no-such-package-anywhere==1.0\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    closed = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PYTHONPATH": str(ROOT)}
    return {
        **kept,
        **closed,
        "DPBENCH_CACHE": str(tmp_path / "cache"),
        "DPBENCH_FRAMEWORKS": str(folder.parent),
    }


@pytest.mark.parametrize(
    "verb",
    [
        "run e2e --preset smoke --tasks logreg --synthetic --no-memory --threads 1 --frameworks private --out run",
        "env make private",
        "gate --frameworks private --tasks logreg",
    ],
    ids=["run", "env make", "gate"],
)
def test_what_could_not_be_installed_is_no_success(environment: dict[str, str], tmp_path: Path, verb: str) -> None:
    command = [sys.executable, "-m", "harness", *verb.split()]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "not installable here" in " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("states", "expected", "missing", "code"),
    [
        ({"ok": 3}, 0, 0, 0),
        ({"ok": 3, "unsupported": 1}, 0, 0, 0),
        ({"ok": 3, "unsupported": 1}, 0, 1, 3),
        ({"ok": 3, "rejected": 1}, 1, 0, 0),
        ({"ok": 3, "rejected": 2}, 1, 0, 1),
        ({"ok": 3, "rejected": 2, "crashed": 1}, 1, 0, 3),
        ({"ok": 3}, 0, 2, 3),
    ],
)
def test_only_a_declared_absence_is_no_failure(states: dict[str, int], expected: int, missing: int, code: int) -> None:
    assert exit_code(states, expected, missing) == code


def test_an_exception_in_every_failed_check_is_a_crash_and_no_wrong_update() -> None:
    right, raised = Check("update: a", 0.0, 1.0, True), Check("update: b", None, None, False, "raised OSError: no home")
    wrong = Check("update: c", 2.0, 1.0, False)
    crashed = admission._verdict(Result("ok", checks=[right, raised, raised]), "key", None)
    assert crashed.state == "crashed" and crashed.reason == "update: b raised OSError: no home (2 of 3 checks)"
    found = admission._verdict(Result("ok", checks=[right, raised, wrong]), "key", None)
    assert found.state == "ok" and not found.passed


def test_a_gate_that_did_not_run_is_no_finding() -> None:
    (contestant,) = registry.select(["dpcore-native"])
    nothing = Gate(passed=False, key="", checks=[])
    crashed = gate_table.Judged(contestant, "mnist-cnn", Verdict("crashed", "no disk", nothing, {}))
    assert not crashed.is_finding and not crashed.as_expected
    rejected = gate_table.Judged(contestant, "mnist-cnn", Verdict("ok", None, nothing, {}))
    assert rejected.is_finding


@pytest.mark.parametrize("verb", ["list", "list --details", "list frameworks", "data list", "doctor"])
def test_an_encoding_that_lacks_letters_ends_no_command(environment: dict[str, str], verb: str) -> None:
    environment |= {"PYTHONIOENCODING": "latin-1", "COLUMNS": "60"}
    done = subprocess.run([sys.executable, "-m", "harness", *verb.split()], env=environment, capture_output=True)
    # What doctor finds on a busy machine is another matter.
    assert done.returncode in ((0, 1) if verb == "doctor" else (0,)) and b"Traceback" not in done.stderr, done.stderr
    done.stdout.decode("latin-1")

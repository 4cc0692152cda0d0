"""Every verb, however it was started: closed streams, a working directory that is gone, a locale that is not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT
from tests.support import record_factory as factory


def dpbench(*arguments: str, after: str = "", cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it by a shell; ``after``: what follows the command there."""
    there = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    line = f'exec "$0" -m harness "$@" {after}'
    return subprocess.run(
        ["bash", "-c", line, sys.executable, *arguments],
        env=there,
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize("after", [">&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_fault_of_the_user(after: str) -> None:
    done = dpbench("list", after=after)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f'rmdir {gone}; exec "$0" -m harness run e2e --preset smoke'
    there = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line, sys.executable], env=there, cwd=gone, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.endswith(
        "The working directory is gone; change to one that is there.\n"
    )


def test_texts_are_utf_8_whatever_the_locale_says(tmp_path: Path) -> None:
    factory.write([factory.record(reason="für σ", state="crashed")], tmp_path / "übung")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = dpbench("report", "übung", cwd=tmp_path, **plain)
    assert done.returncode == 0, done.stderr
    assert "für σ" in (tmp_path / "übung" / "report" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "e2e", "--out", ""], "--out is empty: give a value, or leave it out."),
        (["report", "records", "--out="], "--out is empty: give a value, or leave it out."),
        (["report", ""], "An argument is empty: give a value, or leave it out."),
        (["run", "frontier", "--seconds", "0"], "--seconds is 0.0: it must be above 0 and finite."),
    ],
)
def test_a_variable_that_was_not_set_is_not_the_current_folder(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = dpbench(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"dpbench: {said}\n") and not [*tmp_path.iterdir()]

"""The end of a run: what is there is shown, also where somebody has stopped it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from harness.cli import outcome
from harness.store.folder import RunFolder
from tests.support import record_factory as factory


def stopped(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_run_ends_with_a_table_of_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory.write(factory.quick_run(rounds=2), tmp_path / "records")
    run: Any = SimpleNamespace(folder=RunFolder(tmp_path), execute=stopped)
    with pytest.raises(typer.Exit) as ended:
        outcome.carry_out(run, False, False)
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.exit_code == 130 and "the same command goes on" in said and "Fastest with DP" in said


def test_one_that_left_nothing_says_how_to_go_on_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Any = SimpleNamespace(folder=RunFolder(tmp_path), execute=stopped)
    with pytest.raises(typer.Exit):
        outcome.carry_out(run, False, False)
    assert "the same command goes on" in " ".join(capsys.readouterr().out.split())

"""What the tests of all kinds of runs share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli import main as cli
from harness.plan.registry import EXTRA_FOLDERS
from tests.support.phantom_layer import PHANTOM


@pytest.fixture
def refusal(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What ``dpbench`` with these arguments says on standard error, in this process, before it ends with exit code 2:
    bad input is refused before anything is started."""
    monkeypatch.setenv("DPBENCH_CACHE", str(cache))
    monkeypatch.setenv(EXTRA_FOLDERS, str(PHANTOM.parent))

    def log(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dpbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return log

"""``make test-versions``: a pair that cannot run does not pass, and a pair that runs has the tests' own pins."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.dpcore import versions


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The commands that were run; every one of them succeeds, without a Python of its own."""
    commands = []

    def run(command, **options):
        commands.append([str(part) for part in command])
        if "venv" in commands[-1]:
            Path(commands[-1][-1]).mkdir(parents=True, exist_ok=True)
        output = "2.6.0\n" if "-c" in commands[-1] else "3 passed, 1 skipped in 2.0s\n"
        return SimpleNamespace(returncode=0, stdout=output, stderr="")

    monkeypatch.setattr(versions.subprocess, "run", run)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions.shutil, "which", lambda name: f"/bin/{name}" if name == "python3.11" else None)
    return commands


def test_a_missing_python_fails_with_the_remedy(ran, capsys):
    assert versions.main(["--torch", "2.9.1"]) == 1
    said = capsys.readouterr().out
    assert "torch 2.9.1, Python 3.12: not run: there is no Python 3.12 here" in said
    assert "pip install uv" in said and "--allow-missing" in said
    assert versions.main(["--torch", "2.9.1", "--allow-missing"]) == 0
    assert not ran


def test_a_missing_python_fails_also_where_another_pair_passes(ran, capsys):
    assert versions.main(["--torch", "2.6.0", "2.9.1"]) == 1
    assert "torch 2.6.0, no warning at import; 3 passed, 1 skipped" in capsys.readouterr().out


def test_the_whole_suite_runs_unless_less_is_asked_for(ran):
    for options, tests in (
        ([], ["tests/dpcore"]),
        (["--tests", "messages"], ["tests/dpcore/test_messages.py"]),
        (["--quick"], [f"tests/dpcore/test_{name}.py" for name in versions.QUICK]),
    ):
        assert versions.main(["--torch", "2.6.0", *options]) == 0
        assert ran[-1][-len(tests) :] == tests and ran[-1][ran[-1].index("not slow") - 1] == "-m"
    assert all((Path(__file__).parent / f"test_{name}.py").exists() for name in versions.QUICK)


def test_a_failure_of_any_kind_counts(ran, monkeypatch):
    succeeds = versions.subprocess.run
    for failing in ("pip", "error", "pytest"):

        def run(command, failing=failing, check=False, **options):
            done = succeeds(command, **options)
            if failing in map(str, command):
                if check:
                    raise subprocess.CalledProcessError(1, command)
                done.returncode, done.stderr = 1, "it failed"
            return done

        monkeypatch.setattr(versions.subprocess, "run", run)
        folder = versions.folder_of("2.6.0", "3.11")
        (folder / "ready").unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        assert versions.main(["--torch", "2.6.0"]) == 1, failing


def test_an_environment_is_removed_where_that_is_asked_for(ran):
    folder = versions.folder_of("2.6.0", "3.11")
    folder.mkdir(parents=True)
    assert versions.main(["--torch", "2.6.0"]) == 0 and folder.exists()
    assert versions.main(["--torch", "2.6.0", "--remove"]) == 0 and not folder.exists()


def test_an_environment_has_the_tests_pins_and_its_own_torch():
    pins = versions.packages("2.6.0")
    assert pins[0] == "torch==2.6.0" and sum(pin.startswith("torch==") for pin in pins) == 1
    assert {"opacus", "lightning", "pytest", "numpy"} <= {re.split("=", pin)[0] for pin in pins}
    assert versions.packages(versions.NEWEST)[0] == "torch"


def test_every_python_and_the_oldest_torch_are_among_the_pairs():
    assert {python for _, python in versions.PAIRS} == {"3.11", "3.12", "3.13"}
    project = (Path(__file__).parents[2] / "dpcore" / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', project)
    assert versions.PAIRS[0][0].startswith(f"{oldest}.") and versions.PAIRS[-1][0] == versions.NEWEST

"""A repository of another owner: git's own sentence is on the screen, and no record lacks its commit in silence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.compare import sides
from harness.errors import BadInput
from harness.worker import machine


@pytest.fixture
def of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    place = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", "-b", "main", str(place)], check=True)
    subprocess.run(
        [
            "git",
            "-C",
            str(place),
            "-c",
            "user.name=n",
            "-c",
            "user.email=e",
            "commit",
            "-q",
            "--allow-empty",
            "-m",
            "m",
        ],
        check=True,
    )
    try:
        os.chown(place, 12345, 12345)
        os.chown(place / ".git", 12345, 12345)
    except PermissionError:
        pytest.skip("only root may give a folder to another user")
    return place


def test_a_side_of_another_owner_is_refused_in_git_s_words(of_another: Path) -> None:
    with pytest.raises(BadInput, match=r"--base is 'main', and git does not read .*dubious ownership"):
        sides.commit_of("--base", "main", of_another)


def test_the_commit_of_another_owner_s_checkout_is_not_unknown_in_silence(
    of_another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.commit.cache_clear()
    git = machine.git
    monkeypatch.setattr(machine, "git", lambda *arguments: git(*arguments, folder=of_another))
    monkeypatch.setattr(machine, "ROOT", of_another)
    try:
        assert machine.commit() == (None, None)
        assert "dubious ownership" in str(machine.why_no_commit())
    finally:
        machine.commit.cache_clear()


def test_a_repository_that_the_shell_names_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = machine.git("rev-parse", "HEAD")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert machine.git("rev-parse", "HEAD") == commit and commit[0]

"""A git requirement without its server: git's own settings say where a copy lies."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import pytest

from harness.environments import venv
from harness.plan.registry import Framework

ADDRESS = "https://example.invalid/somebody/tiny"
"""A server that no name leads to."""
BACKEND = '''
"""Builds a wheel of one module with the standard library, so that the test needs no package registry."""
import zipfile


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "tiny-1.0-py3-none-any.whl"
    files = {
        "tiny.py": open("tiny.py").read(),
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    with zipfile.ZipFile(f"{folder}/{name}", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr("tiny-1.0.dist-info/RECORD", "".join(f"{path},,\\n" for path in files))
    return name
'''


def _git(where: Path, *arguments: str) -> str:
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
    identity = dict.fromkeys(names, "t@example.invalid")
    command = ["git", "-C", str(where), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **identity}
    ).stdout.strip()


def test_a_pinned_commit_is_installed_out_of_a_mirror_that_git_s_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    _git(clone, "init", "--quiet", "--initial-branch=main")
    (clone / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (clone / "backend.py").write_text(BACKEND)
    for text in ("old", "new"):
        # Different at every run: pip keeps the wheels of commits that it has built before.
        (clone / "tiny.py").write_text(f"text = {text!r}  # {secrets.token_hex(8)}\n")
        _git(clone, "add", ".")
        _git(clone, "commit", "--quiet", "--message", text)
    commit = _git(clone, "rev-parse", "HEAD")
    _git(clone, "update-ref", "refs/pull/1/head", commit)
    _git(clone, "reset", "--quiet", "--hard", "HEAD~1")  # no branch holds it
    _git(tmp_path, "clone", "--quiet", "--mirror", str(clone), "tiny.git")
    settings = tmp_path / "gitconfig"
    settings.write_text(f'[url "{(tmp_path / "tiny.git").as_uri()}"]\n\tinsteadOf = {ADDRESS}\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "requirements.txt").write_text("# nothing\n")
    framework = Framework("tiny", "t", "h", "l", "3.11", folder, ())
    framework.requirements_without_dependencies.write_text(f"tiny @ git+{ADDRESS}@{commit}\n")
    environment = venv.ensure(framework, lambda text: None)
    code = "import tiny, importlib.metadata as m; print(tiny.text, m.distribution('tiny').read_text('direct_url.json'))"
    told = subprocess.run([str(environment.python), "-c", code], capture_output=True, text=True, check=True).stdout
    # What pip notes down is the public address.
    assert told.startswith("new ") and commit in told and ADDRESS in told

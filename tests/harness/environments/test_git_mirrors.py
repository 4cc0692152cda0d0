"""Git requirements out of bundles and mirrors: the pinned commit is installed without its server, or one sentence."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.environments import git_mirrors, venv
from harness.errors import BadInput
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


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with two commits of the package ``tiny``; the older one says "old"."""
    folder = tmp_path / "clone"
    folder.mkdir()
    _git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(BACKEND)
    for text in ("old", "new"):
        # Different at every run: pip keeps the wheels of commits that it has built before.
        (folder / "tiny.py").write_text(f"text = {text!r}  # {secrets.token_hex(8)}\n")
        _git(folder, "add", ".")
        _git(folder, "commit", "--quiet", "--message", text)
    return folder


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Framework:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "requirements.txt").write_text("# nothing\n")
    return Framework("tiny", "t", "h", "l", "3.11", folder, ())


def _pin(framework: Framework, commit: str) -> None:
    framework.requirements_without_dependencies.write_text(f"tiny @ git+{ADDRESS}@{commit}\n")


def _installed(environment: venv.Environment) -> str:
    code = "import tiny, importlib.metadata as m; print(tiny.text, m.distribution('tiny').read_text('direct_url.json'))"
    return subprocess.run([str(environment.python), "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("form", ["tiny.bundle", "tiny.git", "tiny"])
def test_git_finds_the_pinned_commit_in_each_form(form: str, clone: Path, tmp_path: Path) -> None:
    mirrors = tmp_path / "mirrors"
    mirrors.mkdir()
    if form == "tiny.bundle":
        _git(clone, "bundle", "create", "--quiet", str(mirrors / form), "--all")
    else:
        _git(tmp_path, "clone", "--quiet", *(["--mirror"] if form == "tiny.git" else []), str(clone), f"mirrors/{form}")
    commit = _git(clone, "rev-parse", "HEAD~1")
    with git_mirrors.redirected([git_mirrors.GitPin("tiny", ADDRESS, commit)], mirrors) as environment:
        subprocess.run(
            ["git", "clone", "--quiet", ADDRESS, str(tmp_path / "copy")], check=True, env={**os.environ, **environment}
        )
    assert "'old'" in _git(tmp_path / "copy", "show", f"{commit}:tiny.py")


def test_a_commit_that_no_branch_holds_is_installed_without_its_server(
    clone: Path, framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = _git(clone, "rev-parse", "HEAD")
    _git(clone, "update-ref", "refs/pull/1/head", commit)
    _git(clone, "reset", "--quiet", "--hard", "HEAD~1")
    mirrors = tmp_path / "mirrors"
    mirrors.mkdir()
    _git(clone, "bundle", "create", "--quiet", str(mirrors / "tiny.bundle"), "--all")
    _pin(framework, commit)
    monkeypatch.setenv(git_mirrors.VARIABLE, str(mirrors))
    told = _installed(venv.ensure(framework, lambda text: None))
    # What pip notes down is the public address: the copy that the user named leaves no trace.
    assert told.startswith("new ") and commit in told and ADDRESS in told and str(mirrors) not in told


def test_a_bundle_without_the_commit_is_one_sentence(
    clone: Path, framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _git(clone, "bundle", "create", "--quiet", str(tmp_path / "tiny.bundle"), "--all")
    _pin(framework, "1" * 40)
    monkeypatch.setenv(git_mirrors.VARIABLE, str(tmp_path))
    with pytest.raises(venv.EnvironmentFault, match=r"tiny\.bundle does not hold commit 1{40}, which tiny is"):
        venv.ensure(framework, lambda text: None)
    assert venv.existing() == []


def test_a_broken_bundle_is_one_sentence(framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.bundle").write_text("not a bundle")
    _pin(framework, "1" * 40)
    monkeypatch.setenv(git_mirrors.VARIABLE, str(tmp_path))
    with pytest.raises(venv.EnvironmentFault, match=r"git cannot read .*tiny\.bundle .*git bundle create tiny\.bundle"):
        venv.ensure(framework, lambda text: None)


def test_other_repositories_keep_their_address_and_the_users_git_settings_stay(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _git(clone, "bundle", "create", "--quiet", str(tmp_path / "tiny.bundle"), "--all")
    commit = _git(clone, "rev-parse", "HEAD")
    pins = git_mirrors.git_pins(
        [f"tiny @ git+{ADDRESS}.git@{commit}", f"absent @ git+{ADDRESS}-absent@{commit}", "numpy==2.4.6"]
    )
    assert [pin.package for pin in pins] == ["tiny", "absent"]
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "somebody")
    with git_mirrors.redirected(pins, tmp_path) as environment:
        asked = subprocess.run(
            ["git", "config", "--get-regexp", r"^(url|user\.name)"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    assert sorted(line.split()[-1] for line in asked if line.startswith("url.")) == [f"{ADDRESS}.git"]
    assert "user.name somebody" in asked
    with git_mirrors.redirected(pins, None) as environment:
        assert environment == {}


def test_a_folder_that_is_none_is_bad_input_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(git_mirrors.VARIABLE, "")  # the option sets it for the process, and it must not stay
    with pytest.raises(BadInput, match="is no folder"):
        git_mirrors.folder({git_mirrors.VARIABLE: str(tmp_path / "absent")})
    assert git_mirrors.folder({}) is None
    done = CliRunner().invoke(app, ["env", "make", "pyvacy_git", "--git-mirrors", str(tmp_path / "absent")])
    assert isinstance(done.exception, BadInput) and git_mirrors.VARIABLE in str(done.exception)

"""What the CI jobs call: a wheel against a release, the comment of a pull request, the history's commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.ci import wheel as wheel_check
from harness.cli.ci import app
from harness.errors import BadInput

ROOT = Path(__file__).resolve().parents[3]
HISTORY = Path("results/history")


def make_wheel(folder: Path, name: str, version: str) -> Path:
    """The smallest wheel that pip takes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def read_outputs(path: Path) -> dict[str, str]:
    """As the runner reads them: name<<END, lines, END."""
    outputs: dict[str, str] = {}
    lines = iter(path.read_text().split("\n"))
    for line in lines:
        if "<<" in line:
            name, end = line.split("<<", 1)
            value = []
            for inner in lines:
                if inner == end:
                    break
                value.append(inner)
            outputs[name] = "\n".join(value)
        else:
            assert line == "", f"not in the runner's format: {line!r}"
    return outputs


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files by which a runner listens to a step."""
    for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
        (tmp_path / name).touch()
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


def test_a_pattern_must_mean_one_wheel_of_the_package(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "dist", "some_library", "1.2.0")
    for pattern in ("dist/*.whl", str(wheel), str(tmp_path / "dist" / "*.whl")):
        found, version = wheel_check.find_wheel(pattern, tmp_path, "Some.Library")
        assert (found, str(version)) == (wheel, "1.2.0")
    with pytest.raises(BadInput, match="is a wheel of some-library, not of other"):
        wheel_check.find_wheel("dist/*.whl", tmp_path, "other")
    with pytest.raises(BadInput, match="is no name of a distribution"):
        wheel_check.find_wheel("dist/*.whl", tmp_path, "--index-url=x")
    make_wheel(tmp_path / "dist", "some_library", "1.3.0")
    with pytest.raises(BadInput, match=r"1\.2\.0.*1\.3\.0.*exactly one"):
        wheel_check.find_wheel("dist/*.whl", tmp_path, "some-library")
    with pytest.raises(BadInput, match="means nothing"):
        wheel_check.find_wheel("build/*.whl", tmp_path, "some-library")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadInput, match="not the name of a wheel"):
        wheel_check.find_wheel("notes.txt", tmp_path, "some-library")


def test_the_last_release_is_the_newest_that_pip_would_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.9", "0.10", "0.11rc1"):
        make_wheel(tmp_path, "some_library", version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert wheel_check.last_release("some-library") == "0.10"
    with pytest.raises(BadInput, match="The last release of no-such-library was not found"):
        wheel_check.last_release("no-such-library")


@pytest.mark.parametrize(
    ("code", "verdict"), [(0, "none-proven"), (1, "regression"), (2, "bad-input"), (3, "failed"), (-9, "failed")]
)
def test_the_verdict_is_that_of_the_exit_code(code: int, verdict: str, job: Path) -> None:
    text = "| layer | verdict |\nverdict<<end\nnone-proven\nend\n::set-output name=verdict::none-proven"
    markdown = job / "comparison.md"
    markdown.write_text("of an earlier run")
    ran: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> int:
        assert not markdown.exists()
        ran.append(command)
        if code in (0, 1):
            markdown.write_text(text)
        return code

    more = {"layers": "linear,lstm", "threshold": "0.1", "minutes": ""}
    comparison = wheel_check.WheelComparison("some-library", job / "a.whl", "1.1", markdown, more)
    assert wheel_check.compare_wheel(comparison, run=run) == code
    outputs = read_outputs(job / "GITHUB_OUTPUT")
    # What the measured code says of itself does not become an output.
    assert outputs["verdict"] == verdict
    assert outputs["markdown"] == (text if code in (0, 1) else "")
    assert (job / "GITHUB_STEP_SUMMARY").read_text() == (text + "\n" if code in (0, 1) else "")
    words = list(ran[0])
    assert words[words.index("--base") + 1] == "some-library==1.1"
    assert words[words.index("--head") + 1] == str(job / "a.whl")
    assert words[words.index("--layers") + 1] == "linear,lstm"
    assert "--minutes" not in words


def test_a_crash_is_no_regression(job: Path) -> None:
    """Python ends with 1 after an exception, which is the code of a regression."""
    comparison = wheel_check.WheelComparison("some-library", job / "a.whl", "1.1", job / "comparison.md", {})
    assert wheel_check.compare_wheel(comparison, run=lambda command: 1) == 3
    outputs = read_outputs(job / "GITHUB_OUTPUT")
    assert (outputs["verdict"], outputs["markdown"]) == ("failed", "")


def test_the_comparison_that_is_run_exists(job: Path) -> None:
    """Every option of the command is one of ``dpbench compare``."""
    make_wheel(job, "some_library", "1.0")
    arguments = ["compare", "--package", "some-library", "--wheel", "*.whl", "--workspace", str(job)]
    arguments += ["--base", "some-library==0.9", "--layers", "linear", "--frameworks", "opacus", "--batch-sizes", "64"]
    arguments += ["--threshold", "0.05", "--minutes", "1", "--threads", "1", "--dry-run", "true", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert (said["base"], said["head"]) == ("0.9", "1.0")
    shown = subprocess.run(
        [sys.executable, "-m", "harness", "compare", "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
    ).stdout
    for option in (word for word in said["command"] if word.startswith("--")):
        assert f"{option} " in shown, option
    assert read_outputs(job / "GITHUB_OUTPUT")["verdict"] == "dry-run"


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--dry-run", "perhaps", "--dry-run is 'perhaps': choose true or false."),
        ("--tolerate", "1", "--tolerate is '1': choose true or false."),
        ("--base", "newest", "The base 'newest' is not a version"),
    ],
)
def test_bad_input_is_one_sentence(option: str, value: str, sentence: str, job: Path) -> None:
    make_wheel(job, "some_library", "1.0")
    arguments = ["compare", "--package", "some-library", "--wheel", "*.whl", "--workspace", str(job), option, value]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, BadInput)
    assert str(error).startswith(sentence)


# ---- the history


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x", *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of a repository with one run in its history; ``tmp_path/origin`` is the repository."""
    git(tmp_path, "init", "-q", "--bare", "-b", "main", "origin")
    git(tmp_path, "clone", "-q", "origin", "clone")
    folder = tmp_path / "clone"
    git(folder, "checkout", "-q", "-b", "main")
    (folder / HISTORY).mkdir(parents=True)
    (folder / HISTORY / "one.json").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    git(folder, "push", "-q", "origin", "main")
    return folder


def runs(clone: Path) -> str:
    return git(clone.parent / "origin", "ls-tree", "-r", "--name-only", "main")


def publish(clone: Path, **more: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / ".ci" / "publish_history.sh"
    return subprocess.run([script], cwd=clone, env=os.environ | more, capture_output=True, text=True)


def test_new_runs_are_committed_even_when_somebody_pushed_meanwhile(clone: Path) -> None:
    assert publish(clone).stdout.startswith("No new run")
    git(clone.parent, "clone", "-q", "origin", "other")
    other = clone.parent / "other"
    (other / "code.py").touch()
    git(other, "add", ".")
    git(other, "commit", "-qm", "code")
    git(other, "push", "-q", "origin", "HEAD:main")
    (clone / HISTORY / "machine").mkdir()
    (clone / HISTORY / "machine" / "two.json").write_text("2")
    (clone / "unrelated.txt").touch()
    assert "pushed to main" in publish(clone).stdout
    assert runs(clone).split() == ["code.py", "results/history/machine/two.json", "results/history/one.json"]


def test_a_history_only_grows(clone: Path) -> None:
    (clone / HISTORY / "one.json").write_text("rewritten")
    (clone / HISTORY / "two.json").write_text("2")
    done = publish(clone)
    assert done.returncode == 2 and "one.json" in done.stderr and "only grows" in done.stderr
    assert "two.json" not in runs(clone)


def program(folder: Path, name: str, script: str) -> str:
    """A search path on which ``name`` is first a program of this text."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_or_a_pull_request_is_opened(clone: Path) -> None:
    (clone / HISTORY / "two.json").write_text("2")
    path = program(clone.parent / "bin", "gh", 'echo "$@"')
    said = publish(clone, PUBLISH_BY="pull-request", PATH=path).stdout.split()
    assert said[:4] == ["pr", "create", "--base", "main"]
    assert "two.json" not in runs(clone)
    assert "two.json" in git(clone.parent / "origin", "ls-tree", "-r", "--name-only", said[5])
    done = publish(clone, PUBLISH_BY="post")
    assert done.returncode == 2 and "choose commit or pull-request" in done.stderr


def test_a_comment_calls_nobody_by_name_and_fits(tmp_path: Path) -> None:
    text = tmp_path / "comparison.md"
    text.write_text("to @everyone <!-- hidden -->\n" + "ü" * 50_000 + "@" * 50_000)
    path = program(tmp_path / "bin", "gh", f'echo "$@" > {tmp_path}/said; cat > {tmp_path}/body')
    env = os.environ | {"PATH": path, "FILE": str(text), "PULL_REQUEST": "7", "REPOSITORY": "owner/name"}
    subprocess.run(["make", "comment"], cwd=ROOT, env=env, check=True, capture_output=True)
    body = (tmp_path / "body").read_text()
    assert "@" not in body and "<!--" not in body and "everyone" in body and len(body) < 65_536
    assert "pr comment 7 --repo owner/name --edit-last --create-if-none" in (tmp_path / "said").read_text()

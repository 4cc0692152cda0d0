"""What the CI jobs call: a wheel against a release, the comment of a pull request, the history's commit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from harness.ci import github
from harness.ci import wheel as wheel_check
from harness.cli.ci import app
from harness.compare import report as compare_report
from harness.errors import BadInput


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


# ---- GitHub


class FakeGitHub(BaseHTTPRequestHandler):
    """As much of the REST interface as is used; ``comments`` of pull request 7, ``asked`` for the tests."""

    comments: ClassVar[list[dict[str, Any]]]
    asked: ClassVar[list[tuple[str, str, Any]]]
    may_write: ClassVar[bool]

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.command, self.path, body))
        assert self.headers["Authorization"] == "Bearer secret"
        if self.command != "GET" and not self.may_write:
            self._answer(403, {"message": "Resource not accessible by integration"})
        elif self.path.startswith("/repos/owner/name/issues/7/comments") and self.command == "GET":
            page = int(self.path.rsplit("page=", 1)[1])
            self._answer(200, self.comments[100 * (page - 1) : 100 * page])
        elif self.path == "/repos/owner/name/issues/7/comments":
            self.comments.append({"id": 1000 + len(self.comments), "user": {"login": github.BOT}, "body": body["body"]})
            self._answer(201, self.comments[-1])
        elif self.path == "/repos/owner/name/pulls":
            self._answer(201, {"number": 8})
        else:
            one = next(c for c in self.comments if c["id"] == int(self.path.rsplit("/", 1)[1]))
            one["body"] = body["body"]
            self._answer(200, one)

    do_GET = do_POST = do_PATCH = _handle

    def _answer(self, code: int, value: Any) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeGitHub]]:
    FakeGitHub.comments, FakeGitHub.asked, FakeGitHub.may_write = [], [], True
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeGitHub) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setenv("GITHUB_API_URL", f"http://127.0.0.1:{running.server_port}")
        monkeypatch.setenv("GITHUB_TOKEN", "secret")
        yield FakeGitHub
        running.shutdown()


def comment(file: Path) -> Any:
    arguments = ["comment", "--repository", "owner/name", "--pull-request", "7", "--file", str(file)]
    return CliRunner().invoke(app, arguments)


def test_a_pull_request_has_one_comment_that_is_renewed(server: type[FakeGitHub], job: Path) -> None:
    marker = github.MARKER.format(name="compare")
    assert marker == compare_report.MARKER
    server.comments = [{"id": i, "user": {"login": "a-person"}, "body": "so be it"} for i in range(120)]
    server.comments[3]["body"] = f"{marker} quoted by a person"
    file = job / "comparison.md"
    file.write_text(f"{marker}\nfirst, to @everyone")
    assert "created" in comment(file).output
    file.write_text("second " + "x" * 100_000)
    assert "renewed" in comment(file).output
    assert len(server.comments) == 121
    assert server.comments[3]["body"].endswith("quoted by a person")
    last = server.comments[-1]["body"]
    assert last.startswith(marker + "\nsecond")
    assert len(last) < 65536
    posted = next(body["body"] for method, _, body in server.asked if method == "POST")
    assert posted.count(marker) == 1
    assert "first" in posted.splitlines()[1]
    assert "@everyone" not in posted  # a bot calls nobody by name because measured code wants it to


def test_where_the_token_may_not_the_text_goes_to_the_job_s_page(server: type[FakeGitHub], job: Path) -> None:
    server.may_write = False
    (job / "comparison.md").write_text("| slower |")
    done = comment(job / "comparison.md")
    assert done.exit_code == 0
    assert "not allowed" in done.output
    assert (job / "GITHUB_STEP_SUMMARY").read_text() == "| slower |\n"


def test_outside_of_a_job_it_says_what_is_missing(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_API_URL", raising=False)
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    (job / "comparison.md").touch()
    assert "GITHUB_API_URL and GITHUB_TOKEN is not set" in str(comment(job / "comparison.md").exception)
    assert "cannot be read" in str(comment(job / "missing.md").exception)


def test_a_forge_that_says_nothing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections wait in its queue
        place = github.GitHubClient(f"http://127.0.0.1:{silent.getsockname()[1]}", "owner/name", "secret")
        with pytest.raises(BadInput, match="gave no answer to GET pulls in time"):
            place.ask("GET", "pulls")


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
    (folder / github.HISTORY).mkdir(parents=True)
    (folder / github.HISTORY / "one.json").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    git(folder, "push", "-q", "origin", "main")
    return folder


def runs(clone: Path) -> str:
    return git(clone.parent / "origin", "ls-tree", "-r", "--name-only", "main")


def test_new_runs_are_committed_even_when_somebody_pushed_meanwhile(clone: Path) -> None:
    assert github.publish_history(clone, "commit", "main", None).startswith("No new run")
    git(clone.parent, "clone", "-q", "origin", "other")
    other = clone.parent / "other"
    (other / "code.py").touch()
    git(other, "add", ".")
    git(other, "commit", "-qm", "code")
    git(other, "push", "-q", "origin", "HEAD:main")
    (clone / github.HISTORY / "machine").mkdir()
    (clone / github.HISTORY / "machine" / "two.json").write_text("2")
    (clone / "unrelated.txt").touch()
    assert "pushed to main" in github.publish_history(clone, "commit", "main", None)
    assert runs(clone).split() == ["code.py", "results/history/machine/two.json", "results/history/one.json"]


def test_a_history_only_grows(clone: Path) -> None:
    (clone / github.HISTORY / "one.json").write_text("rewritten")
    (clone / github.HISTORY / "two.json").write_text("2")
    with pytest.raises(BadInput, match=r"one\.json was changed or removed"):
        github.publish_history(clone, "commit", "main", None)
    assert "two.json" not in runs(clone)


def test_without_git_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="git, which is not installed"):
        github.publish_history(tmp_path, "commit", "main", None)


def test_or_a_pull_request_is_opened(clone: Path, server: type[FakeGitHub]) -> None:
    (clone / github.HISTORY / "two.json").write_text("2")
    place = github.GitHubClient.of_the_job("owner/name")
    assert "pull request 8" in github.publish_history(clone, "pull-request", "main", place)
    assert "two.json" not in runs(clone)
    (asked,) = [body for method, path, body in server.asked if path.endswith("/pulls")]
    assert asked["base"] == "main"
    assert "two.json" in git(clone.parent / "origin", "ls-tree", "-r", "--name-only", asked["head"])
    with pytest.raises(BadInput, match="choose commit or pull-request"):
        github.publish_history(clone, "post", "main", None)

"""What a user reads where there is no engine, or one that cannot do what is asked of it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import docker
import docker.errors
import psutil
import pytest

from harness import engine, harbour
from harness.errors import BadInput
from harness.registry import ROOT
from tests.harness.engines import PretendedEngine


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("unix:///nowhere/docker.sock", r"there is no socket /nowhere/docker\.sock; install Docker or Podman"),
        ("tcp://127.0.0.1:9", r"nothing listens there; start the engine .* with -H and this address"),
        ("http://127.0.0.1:9", r"an address begins with unix://, tcp:// or ssh://; write it so"),
        ("tcp://nothing.invalid:2375", r"repair the engine or the way to it"),
    ],
)
def test_one_sentence_says_why_and_what_to_do(
    host: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(engine.HOST, host)
    monkeypatch.setattr(engine, "elsewhere", lambda than: [])
    with pytest.raises(BadInput, match=words) as refusal:
        engine.connect()
    assert str(refusal.value).endswith("or use --isolation venv.") and "\n" not in str(refusal.value)


def test_a_socket_that_this_user_may_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise docker.errors.DockerException("('Connection aborted.', PermissionError(13, 'Permission denied'))")

    monkeypatch.setattr(docker, "from_env", refuse)
    monkeypatch.delenv(engine.HOST, raising=False)
    with pytest.raises(BadInput, match=r"docker\.sock: this user may not open its socket; join its group .*log in"):
        engine.connect()


def test_an_engine_at_another_usual_place_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(engine.HOST, "unix:///nowhere/docker.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "docker.sock"))
        with pytest.raises(BadInput, match=f"; set DOCKER_HOST=unix://{tmp_path}/docker.sock, where there is one"):
            engine.connect()


def test_what_a_run_refuses_and_what_doctor_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    on = PretendedEngine().on

    def connected(**facts: object) -> engine.Engine:
        return replace(on, facts={**on.facts, "cgroup": "1", **facts})

    monkeypatch.setattr(engine, "connect", lambda: connected(memory_limit=False, pids_limit=False))
    with pytest.raises(BadInput, match=r"cannot limit memory and processes \(cgroup v1\).*cgroup v2.*--isolation venv"):
        harbour.Harbour("cpu")
    monkeypatch.setattr(engine, "connect", lambda: connected(cpuset=False))
    assert engine.unlimited(harbour.Harbour("cpu").engine.facts) == ["processors"]


def test_what_a_process_made_is_nobodys_when_it_has_ended() -> None:
    code = "from harness import engine; print(engine.owner())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        found = {engine.OWNER: process.stdout.read().strip(), engine.DEADLINE: "0"}
        assert found[engine.OWNER].split(":")[1] == str(process.pid)
        # Not waited for: its number is still taken.
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert engine.is_orphan(found)
    assert engine.is_orphan(found)
    assert not engine.is_orphan(engine.labels(0))
    elsewhere = {engine.OWNER: "another:1:1", engine.DEADLINE: str(int(time.time()) + 60)}
    assert not engine.is_orphan(elsewhere) and engine.is_orphan({**elsewhere, engine.DEADLINE: "1"})


def test_make_measures_in_environments_where_no_engine_answers(tmp_path: Path) -> None:
    venv = Path(sys.executable).parent.parent
    if shutil.which("make") is None or not (venv / "bin" / "dpbench").exists():
        pytest.skip("skipped: no make, or dpbench is not installed beside this Python")
    made_before = ["-o", f"{venv}/ready", f"VENV={venv}"]
    command = ["make", *made_before, "bench-e2e", "ISOLATION=docker", "PRESET=smoke", "ARGS=--help"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment[engine.HOST] = f"unix://{tmp_path}/no.sock"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"no socket {tmp_path}/no.sock" in done.stderr
    assert "measuring in virtual environments instead" in done.stdout and "--isolation venv:" in done.stdout

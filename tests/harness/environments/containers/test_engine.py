"""What a user reads where there is no engine, or one that cannot do what is asked of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import docker.errors
import psutil
import pytest

from harness.environments.containers import engine
from harness.environments.containers import executor as container
from harness.environments.containers.backend import ContainerBackend
from harness.environments.executor import Inbox, Limits
from harness.errors import BadInput
from harness.plan.registry import ROOT
from tests.support.engines import PretendedEngine


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("unix:///nowhere/docker.sock", r"there is no socket /nowhere/docker\.sock; install Docker or Podman"),
        ("tcp://127.0.0.1:9", r"see this machine's files, .* unix:// does; run dpbench on that machine"),
        ("ssh://me@there", r"see this machine's files"),
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
        ContainerBackend.connected("cpu")
    monkeypatch.setattr(engine, "connect", lambda: connected(cpuset=False))
    assert engine.unlimited(ContainerBackend.connected("cpu").engine.facts) == ["processors"]


def test_our_own_system_calls_where_the_engine_takes_a_list() -> None:
    on = PretendedEngine().on
    assert engine.security(on) == ["no-new-privileges:true"]
    privileges, calls = engine.security(replace(on, facts={**on.facts, "seccomp": True}))
    profile = json.loads(calls.removeprefix("seccomp="))
    assert privileges == "no-new-privileges:true" and profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = [rule for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"]
    names = {name for rule in allowed if "args" not in rule for name in rule["names"]}
    assert {"read", "mmap", "futex", "execve", "sched_setaffinity"} <= names
    assert not names & {"socket", "clone", "io_uring_setup", "ptrace", "bpf", "mount", "unshare", "setns", "keyctl"}
    families = [rule["args"][0]["value"] for rule in allowed if rule["names"] == ["socket"]]
    assert families == [1, 2, 10, 16], "and not 40, AF_VSOCK"


class Streams:
    """A container's streams as :func:`harness.environments.containers.executor._follow` sees them: lines that are
    there, then an end."""

    def __init__(self, *lines: bytes, is_endless: bool = False, is_lost: bool = False) -> None:
        self.inbox = Inbox()
        self.inbox.is_endless = is_endless
        self.is_lost, self.tail = is_lost, b""
        for line in (*lines, None):
            self.inbox.put(line)

    def close(self) -> None:
        self.inbox.close()


RESULT = b'{"event": "result", "state": "ok", "interrupted": true}'


def ending(streams: Streams, code: int, seconds: float = 60.0) -> dict[str, Any]:
    limits = Limits(2**30, seconds)
    outcome = container._follow(streams, 0.0, limits, lambda event: None)  # type: ignore[arg-type]
    return outcome.settled({"ExitCode": code}, limits).result


def test_every_ending_of_a_container_has_its_true_reason() -> None:
    claimed = ending(Streams(), 88)
    assert claimed["state"] == "crashed" and "exit code 88, which says that the harness is gone" in claimed["reason"]
    with pytest.raises(engine.EngineGone, match="connection to the container was lost"):
        ending(Streams(is_lost=True), 88)
    endless = ending(Streams(is_endless=True), 137)
    assert endless["state"] == "crashed" and "a line of more than 8 MiB without an end" in endless["reason"]
    killed, broken = ending(Streams(), 137), ending(Streams(), 139)
    assert killed["interrupted"] and "killed by signal 9" in killed["reason"]
    assert "interrupted" not in broken and "killed by signal 11" in broken["reason"]
    assert "interrupted" not in ending(Streams(RESULT, b'{"event": "done"}'), 0)


def test_what_a_container_said_before_its_time_was_over_is_heard() -> None:
    assert ending(Streams(RESULT, b'{"event": "done"}'), 0, seconds=-1.0)["state"] == "ok"


def test_what_a_process_made_is_nobodys_when_it_has_ended() -> None:
    code = "from harness.environments.containers import engine; print(engine.owner())"
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

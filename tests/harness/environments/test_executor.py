"""One worker process that behaves badly: its ending has its true reason, and nothing of it is left."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.environments import executor
from harness.environments.executor import Limits, Patience, Venv
from harness.environments.memory_limit import MemoryLimit
from harness.plan.registry import ROOT
from harness.worker.request import Request
from harness.worker.result import Result

LIMITS = Limits(2**40, 120.0)


def request(how: str, note: str = "") -> Request:
    """``note``: a file for what the worker has to say."""
    needed = [field.name for field in dataclasses.fields(Request) if field.default is dataclasses.MISSING]
    facts: dict[str, Any] = dict.fromkeys(needed, "")
    return Request(**{**facts, "variant": how, "task": note, "threads": 1, "device": "cpu", "mode": "memory"})


def run(how: str, note: str = "", limits: Limits = LIMITS) -> Result:
    place = Venv(Path(sys.executable), {}, "tests.support.rude_worker", ROOT)
    return place.run(request(how, note), limits, lambda event: None)


def test_only_the_harness_says_that_a_process_was_interrupted():
    assert run("finished") == Result("ok")


@pytest.mark.parametrize(("how", "from_outside"), [("SIGKILL", True), ("SIGTERM", True), ("SIGSEGV", False)])
def test_a_process_that_somebody_killed_is_told_from_one_that_broke(how, from_outside):
    result = run(how)
    assert result.state == "crashed" and f"was killed by {how} before it had a result" in str(result.reason)
    assert result.interrupted is from_outside


def test_a_line_without_an_end_is_a_crash_with_that_reason():
    result = run("endless")
    assert result.state == "crashed" and "a line of more than 8 MiB without an end" in str(result.reason)


def test_bytes_that_are_no_text_are_noise():
    assert run("no text").state == "ok"


@pytest.mark.parametrize("how", ["silent", "chatter"])
def test_neither_silence_nor_chatter_outlasts_the_time(how):
    result = run(how, limits=Limits(2**40, 0.5))
    assert (result.state, result.reason) == ("timeout", "no result within 0 s.")


@pytest.mark.parametrize("has_group", [True, False])
def test_a_daemon_ends_with_its_cell(tmp_path, monkeypatch, has_group):
    if not has_group:
        monkeypatch.setattr("harness.environments.memory_limit._make_group", lambda limit: (None, "watchdog"))
    note = tmp_path / "pid"
    assert run("daemon", str(note)).state == "ok"
    assert not psutil.pid_exists(int(note.read_text()))


def test_time_in_which_the_harness_was_stopped_is_nobodys(monkeypatch):
    now = 0.0
    monkeypatch.setattr(executor.time, "monotonic", lambda: now)
    patience = Patience(10.0)
    for now in (0.1, 0.2, 3600.0, 3600.1):  # noqa: B007 (the clock above reads it)
        assert not patience.is_over
    assert patience.left == pytest.approx(10.0 - 0.3 - 2 * executor.POLL_SECONDS)


def test_what_was_said_before_the_time_was_over_is_heard(monkeypatch, tmp_path):
    """As after Ctrl-Z: the worker has ended long ago, and by the clock its time is over."""
    order = tmp_path / "request.json"
    order.write_text(request("finished").to_json())
    command = [sys.executable, "-m", "tests.support.rude_worker", str(order)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    process.wait()
    limit = MemoryLimit(2**40)
    try:
        result = executor._follow(process, limit, Limits(2**40, -1.0), lambda event: None)
    finally:
        limit.close()
        executor.kill_tree(process)
    assert result["state"] == "ok"


def test_a_stop_longer_than_the_time_loses_nothing(tmp_path):
    """The harness is stopped while its worker, which is not, finishes."""
    code = (
        "from tests.harness.environments.test_executor import *\n"
        "place = Venv(Path(sys.executable), {}, 'tests.support.rude_worker', ROOT)\n"
        "go = lambda event: None\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(place.run(request('finished'), Limits(2**40, 30.0), go).state, flush=True)\n"
    )
    harness = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=-1, stdout=-1, text=True)
    assert harness.stdout is not None and harness.stdin is not None
    assert harness.stdout.readline() == "ready\n"
    harness.stdin.write("\n")
    harness.stdin.flush()
    while not psutil.Process(harness.pid).children():
        if harness.poll() is not None:
            break
        time.sleep(0.001)
    harness.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    harness.send_signal(signal.SIGCONT)
    output, _ = harness.communicate(timeout=120)
    assert output == "ok\n"

"""A time waits for its untimed replay: what counts until then, and what becomes of it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.analysis import tidy
from harness.store import folder as store
from harness.store.read import load
from harness.store.record import Record
from tests.support.driver import Driver

E2E = ("run", "e2e", "--preset", "smoke", "--repeats", "0", "--rounds", "2")
TWO_TASKS = ("--tasks", "logreg,ffnn")


@pytest.fixture
def driver(cache: Path, tmp_path: Path) -> Driver:
    return Driver(E2E, cache, tmp_path / "run")


def first(driver: Driver, purpose: str = "time") -> dict[str, Record]:
    return {r.cell.name: r for r in driver.records(purpose) if r.block.round == 0}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_a_run_stopped_after_the_first_table_counts_no_time_and_goes_on(driver: Driver, tmp_path: Path) -> None:
    driver.environment["DRIVE_WITH_REPORT"] = "1"
    command = driver.command("noop,plain", *TWO_TASKS)
    process = subprocess.Popen(command, env=driver.environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = ""
    while said.count("These are the first times of") < 2:
        said += process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    after, _ = process.communicate(timeout=240)
    assert "none counts before its memory process" in said and "Fastest with DP" in said
    assert "if its replay is the same" in said and "goes on from there" in after
    times, memory = first(driver), first(driver, "memory")
    waiting = {name for name, r in times.items() if r.interrupted}
    assert len(times) == 4 and len(waiting) >= 2
    assert all(memory[name].state == "ok" for name in times.keys() - waiting), "what is compared has a replay"
    store.pack(driver.out, tmp_path / "pack.jsonl")
    for place in (driver.out, tmp_path / "pack.jsonl"):
        raw = tidy.tidy(load(place))
        counted = raw[(raw.purpose == "time") & (raw.state == "ok")]
        assert set(counted.cell) == times.keys() - waiting
    page = next((driver.out / "report").glob("report*.md")).read_text()
    assert "not compared yet with its untimed replay" in page

    del driver.environment["DRIVE_WITH_REPORT"]
    assert driver.run("noop,plain", *TWO_TASKS).returncode == 0
    settled = first(driver)
    for name, one in settled.items():
        assert (one.state, one.reason, one.interrupted) == ("ok", None, False)
        assert one.timed is not None and one.timed.replay_error == 0.0
        assert one.epoch_seconds == times[name].epoch_seconds, "nothing is timed again"


def test_a_time_whose_weights_are_lost_before_the_comparison_is_measured_again(driver: Driver) -> None:
    process = driver.start("noop,plain", *TWO_TASKS)
    wait_for(lambda: len(list(driver.out.glob("records/*.r0.time.*.json"))) == 4)
    process.kill()
    process.wait()
    before = first(driver)
    waiting = {name for name, r in before.items() if r.interrupted}
    assert waiting
    shutil.rmtree(driver.out / "scratch")
    assert driver.run("noop,plain", *TWO_TASKS).returncode == 0
    for name, one in first(driver).items():
        assert one.state == "ok" and one.timed is not None and one.timed.replay_error == 0.0
        assert one.block.moment != before[name].block.moment or name not in waiting


def test_what_trains_otherwise_than_its_replay_counts_nowhere(driver: Driver) -> None:
    """Nor does a time whose replay failed."""
    tasks = ("--tasks", "logreg")
    done = driver.run("noop,local,forgetful", *tasks)
    assert done.returncode == 3, done.stdout + done.stderr
    found = {(r.cell.variant, r.block.round, r.purpose): r for p in ("time", "memory") for r in driver.records(p)}
    differ = "timed = replayed: the weights after the first timed steps differ from an untimed replay by"
    for place in (("local", 0, "time"), ("local", 0, "memory")):
        assert found[place].state == "rejected" and str(found[place].reason).startswith(differ)
    assert f"phantom-local/64/verified-v2/cpu/venv: rejected: {differ}" in done.stdout
    later = found["local", 1, "time"]
    assert later.state == "rejected" and str(later.reason).startswith(f"as in round 1: {differ}")
    for number in (0, 1):
        one = found["forgetful", number, "time"]
        assert (one.state, one.interrupted) == ("crashed", False)
        assert str(one.reason).startswith("its memory process, which is its untimed replay, ended as crashed: ")
        assert "it does not know how this went" in one.log_tail
    assert {found["noop", number, "time"].state for number in (0, 1)} == {"ok"}
    assert "9: 3 crashed, 3 ok, 3 rejected" in done.stdout
    before = driver.files()
    assert driver.run("noop,local,forgetful", *tasks).returncode == 3
    assert driver.files() == before


def test_no_later_time_counts_where_the_first_one_was_not_compared(driver: Driver) -> None:
    """Nothing compares those of later rounds: they counted, whatever had become of the weights of the first."""
    assert driver.run("noop,careless,evasive", "--tasks", "logreg").returncode == 3
    found = {(r.cell.variant, r.block.round): r for r in driver.records()}
    assert {found["noop", number].state for number in (0, 1)} == {"ok"}
    reasons = {
        "careless": "the memory process left no weights to compare",
        "evasive": "it would rather not be compared",
    }
    for name, reason in reasons.items():
        for number in (0, 1):
            one = found[name, number]
            assert (one.state, one.interrupted) == ("crashed", False) and reason in str(one.reason)


def test_later_times_wait_as_long_as_the_first_one_does(driver: Driver) -> None:
    """Where another process has taken away the weights of the first round, which is measured again."""
    assert driver.run("thief", "--tasks", "logreg").returncode == 3
    found = driver.records()
    assert [r.state for r in found] == ["crashed", "crashed"] and all(r.interrupted for r in found)

"""The memory frontier: the search as a pure function, and whole runs with fakes of known bytes and seconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.environments import memory_limit
from harness.report.chapters.frontier import frontiers, probes
from harness.run.frontier import Fit, Search, largest_fit, next_size
from harness.store.record import Record
from tests.support.driver import Driver


def explore(limit: int, search: Search, ceiling: int, seconds_each: float = 0.0) -> tuple[int, list[int]]:
    """(frontier, sizes in the order of their probes) where everything up to ``limit`` fits."""
    seen: dict[int, Fit] = {}
    while (size := next_size(seen, search, ceiling)) is not None:
        assert 1 <= size <= ceiling and size not in seen
        seen[size] = Fit(size <= limit, seconds_each * size)
    return largest_fit(seen), list(seen)


@pytest.mark.parametrize("limit", [1, 2, 63, 64, 65, 100, 127, 128, 1000, 4095, 5000])
def test_without_slack_the_search_finds_the_frontier_exactly(limit: int) -> None:
    found, probes = explore(limit, Search(first=64, resolution=0.0), ceiling=100_000)
    assert found == limit
    assert len(probes) <= 2 * 17


@pytest.mark.parametrize("limit", [70, 333, 1000, 5000])
def test_the_resolution_bounds_the_error_and_saves_probes(limit: int) -> None:
    found, probes = explore(limit, Search(first=64, resolution=0.1), ceiling=100_000)
    assert limit / 1.1 - 1 <= found <= limit
    assert len(probes) < len(explore(limit, Search(first=64, resolution=0.0), ceiling=100_000)[1])


def test_where_nothing_fits_the_search_halves_down_to_one_and_ends() -> None:
    assert explore(0, Search(first=64), ceiling=1000) == (0, [64, 32, 16, 8, 4, 2, 1])


def test_the_ceiling_is_probed_and_never_passed() -> None:
    assert explore(10**9, Search(first=64), ceiling=300) == (300, [64, 128, 256, 300])
    assert explore(10**9, Search(first=64), ceiling=10) == (10, [10])


def test_no_size_is_tried_whose_step_would_take_too_long() -> None:
    assert explore(10**9, Search(first=64, longest_step_seconds=3.0), 10**6, seconds_each=0.01) == (256, [64, 128, 256])


@pytest.fixture
def driver(cache: Path, tmp_path: Path) -> Driver:
    return Driver(("run", "frontier", "--tasks", "logreg", "--seconds", "0.02"), cache, tmp_path / "run")


def probed(driver: Driver, stage: str) -> list[Record]:
    return [r for r in driver.records("probe") if r.probe is not None and r.probe.stage == stage]


MIB = 2**20


def test_known_bytes_have_a_known_frontier(driver: Driver) -> None:
    """1 MiB an example and 30.5 MiB above start-up: 30 examples fit, whatever Python and numpy hold themselves."""
    done = driver.run("hungry", "--budget", str(30.5 / 1024), "--first", "20", "--resolution", "0", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    states = {r.cell.batch_size: r for r in probed(driver, "search")}
    assert max(size for size, r in states.items() if r.state == "ok") in {29, 30}
    for size, r in states.items():
        assert r.probe is not None and r.probe.budget_bytes == int(30.5 * MIB) and r.cell.kind == "frontier"
        if r.state == "ok":
            assert r.probe.start_up_bytes is not None and r.probe.start_up_bytes > 10 * MIB
            assert r.memory["peak_resident_growth_with_compile"] == pytest.approx(size * MIB, abs=0.75 * MIB)
        else:
            assert r.state == "oom" and ("budget" in str(r.reason) or "memory limit" in str(r.reason))
    rounds = probed(driver, "throughput")
    assert [r.block.round for r in rounds] == [1, 2] and {r.state for r in rounds} <= {"ok", "oom"}
    assert all(r.probe is not None and r.probe.step_seconds for r in rounds if r.state == "ok")


def test_a_size_that_fits_only_once_is_not_the_frontier(driver: Driver) -> None:
    """In the search 30 examples fit; the further processes take 1.2 MiB each, of which 25 fit."""
    done = driver.run("moody", "--budget", str(30.5 / 1024), "--first", "20", "--resolution", "0.1", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert max(r.cell.batch_size for r in probed(driver, "search") if r.state == "ok") in {28, 29, 30}
    rounds = probed(driver, "throughput")
    sizes = sorted({r.cell.batch_size for r in rounds}, reverse=True)
    assert [r.state for r in rounds if r.cell.batch_size == sizes[-1]] == ["ok", "ok"] and 21 <= sizes[-1] <= 25
    assert len(sizes) > 1 and all(r.state == "oom" for r in rounds if r.cell.batch_size in sizes[:-1])
    assert "did not fit again" in done.stderr + done.stdout
    assert frontiers(probes(rounds + probed(driver, "search"))).batch_size.tolist() == [sizes[-1]]


def test_what_a_library_tries_in_its_first_four_steps_counts_as_memory_and_not_as_time(driver: Driver) -> None:
    done = driver.run("trying", "--budget", "1", "--first", "16", "--largest", "16", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    for r in (*probed(driver, "search"), *probed(driver, "throughput")):
        assert r.state == "ok" and r.probe is not None and r.probe.first_step_seconds is not None
        assert r.probe.first_step_seconds >= 0.5 and r.probe.step_seconds and min(r.probe.step_seconds) < 0.5
        assert r.memory["peak_resident_growth_with_compile"] > 15 * MIB


def test_far_beyond_the_budget_the_harness_ends_the_process(driver: Driver) -> None:
    done = driver.run("glutton", "--budget", "0.2", "--first", "2")
    assert done.returncode == 0, done.stderr
    found = probed(driver, "search")
    assert {r.state for r in found} == {"oom"} and {r.cell.batch_size for r in found} == {2, 1}
    assert all("memory limit" in str(r.reason) for r in found)
    assert not probed(driver, "throughput")


def test_a_search_goes_on_where_it_stopped_and_measures_nothing_twice(driver: Driver) -> None:
    arguments = ("noop", "--budget", "0.2", "--largest", "512", "--rounds", "2")
    assert driver.run(*arguments).returncode == 0
    before = {p.name: p.read_text() for p in (driver.out / "records").iterdir()}
    lost = next(name for name in before if ".b256." in name)
    (driver.out / "records" / lost).unlink()
    assert driver.run(*arguments).returncode == 0
    after = {p.name: p.read_text() for p in (driver.out / "records").iterdir()}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {lost}
    other = driver.run("noop", "--budget", "0.3", "--largest", "512", "--rounds", "2")
    assert other.returncode == 2 and "budget_bytes" in other.stderr


def test_every_other_ending_stops_the_search_and_is_a_record(driver: Driver) -> None:
    limits = ("--budget", "0.2", "--longest-step", "0.5")
    assert driver.run("crash,refuses,unfit,slow", *limits).returncode == 3
    # One that hangs is waited for to the end: not for as long as the others may take on a busy machine.
    hanging = Driver(tuple(driver.verb), Path(driver.environment["DPBENCH_CACHE"]), driver.out.with_name("hanging"))
    assert hanging.run("hang", "--timeout", "5", *limits).returncode == 3
    found: dict[str, list[Record]] = {}
    for r in (*probed(driver, "search"), *probed(hanging, "search")):
        found.setdefault(r.cell.variant, []).append(r)
    states = {name: [r.state for r in of] for name, of in found.items()}
    assert states["hang"] == ["timeout"] and states["refuses"] == ["unsupported"] and states["unfit"] == ["rejected"]
    assert states["crash"] == ["crashed"]
    assert sorted(r.cell.batch_size for r in found["slow"]) == [64, 128, 256]
    assert {r.cell.variant for r in probed(driver, "throughput")} == {"slow"}


def test_on_cuda_the_device_decides(driver: Driver) -> None:
    driver.environment["DRIVE_WITH_GPU"] = "1"
    done = driver.run("device", "--device", "cuda", "--first", "128", "--resolution", "0.1", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    states = {r.cell.batch_size: r for r in probed(driver, "search")}
    assert max(size for size, r in states.items() if r.state == "ok") == 288
    assert states[512].state == "oom" and "CUDA out of memory" in str(states[512].reason)
    assert all(r.probe is not None and r.probe.device_bytes == 1000 * MIB for r in states.values())
    refused = driver.run("device", "--device", "cuda", "--budget", "1", "--fresh")
    assert refused.returncode == 2 and "the device's memory" in refused.stderr


def test_a_moved_limit_holds_for_the_watchdog_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "_make_group", lambda limit_bytes: (None, "watchdog"))
    code = "held = bytearray(b'1') * (64 * 2**20); print(len(held), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        limit = memory_limit.MemoryLimit(2**40)
        limit.adopt(child.pid)
        assert not limit.exceeded(child.pid)
        limit.move(200 * MIB)
        assert not limit.exceeded(child.pid)
        limit.move(32 * MIB)
        assert limit.exceeded(child.pid) and limit.limit_bytes == 32 * MIB
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "0"), "--budget is 0.0: it must be above 0 GiB"),
        (("--budget", "nan"), "--budget is nan"),
        (("--budget", "inf"), "--budget is inf"),
        (("--budget", "1e300"), "--budget is 1e+300"),
        (("--first", "0"), "--first is 0"),
        (("--largest", "3"), "--largest is 3"),
        (("--resolution", "1"), "--resolution is 1.0"),
        (("--longest-step", "0"), "--longest-step is 0.0"),
        (("--tasks", "mnist"), "no task 'mnist'"),
        (("--rounds", "0"), "--rounds is 0"),
        (("--device", "cuda"), "no GPU"),
    ],
)
def test_bad_input_is_one_sentence(
    driver: Driver, refusal: Callable[..., str], arguments: tuple[str, ...], words: str
) -> None:
    said = refusal(*driver.arguments("noop", *arguments))
    assert words in said and len(said.strip().splitlines()) == 1

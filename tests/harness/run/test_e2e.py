"""The run loop with fake contestants: what is measured, what is recorded when things go wrong, what survives a kill."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.store import record
from harness.store.record import Timed
from tests.support.driver import DRIVE, ROOT, Driver

# Beside other tests every time is disturbed, and would be taken twice.
E2E = ("run", "e2e", "--preset", "smoke", "--tasks", "logreg", "--repeats", "0")


@pytest.fixture
def driver(cache: Path, tmp_path: Path) -> Driver:
    return Driver(E2E, cache, tmp_path / "run")


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """The driver of a finished run of the phantoms noop and plain, which tests may look at and repeat."""
    made = Driver(E2E, cache, tmp_path_factory.mktemp("finished") / "run")
    assert made.run("noop,plain").returncode == 0
    return made


def test_a_run_times_every_cell_and_says_what_it_is(driver: Driver) -> None:
    driver.environment["DRIVE_WITH_REPORT"] = "1"
    done = driver.run("noop,plain,padded", "--rounds", "1", "--batch-sizes", "64,512")
    assert done.returncode == 0, done.stderr
    times = driver.records()
    assert len(times) == 3 * 2
    assert {r.state for r in times} == {"ok"}
    assert len(driver.records("memory")) == 3 * 2
    one = times[0]
    assert one.data is not None and one.data.synthetic and one.timed is not None
    assert one.epoch_seconds[0] >= one.timed.measured_seconds[0] > 0
    assert one.seeds is not None and one.machine["threads"] == 1
    assert one.machine["peaks"] == {"flops_per_second": 1e9, "bytes_per_second": 2e9}
    padded = [r for r in times if r.cell.variant == "padded"]
    assert all(r.timed is not None and 0 < r.timed.padding_fraction < 0.5 for r in padded)
    assert "synthetic" in done.stdout.lower()
    assert list(driver.out.rglob("*synthetic*.png"))


def test_without_time_only_memory_is_measured_in_every_round(driver: Driver) -> None:
    driver.environment["DRIVE_WITH_REPORT"] = "1"
    done = driver.run("noop,plain", "--no-time", "--rounds", "2", "--batch-sizes", "16,64,512")
    assert done.returncode == 0, done.stderr
    measured = driver.records("memory")
    assert len(measured) == 2 * 2 * 3 and {r.state for r in measured} == {"ok"}
    assert all("peak_resident_growth" in r.memory for r in measured)
    assert not driver.records("time")
    # Whether there is a figure too depends on the machine: such small contestants may not grow by one page.
    assert "MiB of peak_resident_growth" in (driver.out / "report" / "report_synthetic.md").read_text()


def test_blocks_hold_every_contestant_once_and_orders_differ(driver: Driver) -> None:
    short = ("--rounds", "4", "--batch-sizes", "512", "--budget-seconds", "0.01", "--no-memory")
    # On a busy machine one of the twelve may end without a time: it has its place in its block all the same.
    assert driver.run("noop,plain,padded", *short).returncode in {0, 3}
    blocks: dict[int, list[tuple[int, str]]] = {}
    for r in driver.records():
        blocks.setdefault(r.block.round, []).append((r.block.order, r.cell.contestant))
    orders = {tuple(name for _, name in sorted(block)) for block in blocks.values()}
    assert len(blocks) == 4 and all(len(set(order)) == 3 for order in orders)
    assert len(orders) > 1


def test_epsilon_is_that_of_the_whole_epoch(finished: Driver) -> None:
    by_variant = {r.cell.variant: r for r in finished.records()}
    private = by_variant["noop"].epsilon
    assert private is not None and private.steps == 472  # ceil(30162 / 64)
    assert private.pld is not None and private.rdp is not None and 0 < private.pld <= private.rdp
    assert by_variant["plain"].epsilon is None


class Sleeps:
    """The sleeps of a sleeper, as it saw them: on a busy machine what lies between two of them takes time, too."""

    def __init__(self, driver: Driver) -> None:
        lines = Path(driver.environment["DPBENCH_TEST_SLEPT"]).read_text().splitlines()
        self.found = [tuple(map(float, line.split())) for line in lines]
        assert min(end - start for start, end in self.found) >= 0.01

    def __len__(self) -> int:
        return len(self.found)

    def alone(self, first: int, end: int) -> float:
        """Seconds of these sleeps, without what lies between them."""
        return sum(after - before for before, after in self.found[first:end])


def is_by_the_harness(timed: Timed) -> bool:
    """Whether the harness's own clock counted, as on a busy machine, where the worker's may differ from it by what
    either waited for a processor."""
    counted, worker = sum(timed.measured_seconds), sum(timed.part_seconds)
    return counted == pytest.approx(sum(timed.referee_seconds)) and counted > worker


def test_known_sleeps_are_timed(driver: Driver) -> None:
    driver.environment["DPBENCH_TEST_SLEPT"] = str(driver.out.with_name("slept.txt"))
    run = ("sleeper", "--subset", "0.05", "--no-memory", "--fresh")
    steps = 24
    # Once in a while a busy machine holds up the process between its clock and the first or the last sleep.
    for _attempt in range(5):
        Path(driver.environment["DPBENCH_TEST_SLEPT"]).unlink(missing_ok=True)
        assert driver.run(*run).returncode == 0
        (one,) = driver.records()
        assert one.timed is not None and one.timed.extrapolated and one.timed.steps_timed == steps
        slept = Sleeps(driver)
        # Steps before the clock and the replay after it sleep, too; the timed ones are so many in a row. The clock may
        # halt between two of them, so what lies there is not always counted.
        alone = [slept.alone(k, k + steps) for k in range(len(slept) - steps + 1)]
        seconds = sum(one.timed.part_seconds)
        assert seconds >= min(alone)
        (counted,) = one.timed.measured_seconds
        assert counted == pytest.approx(seconds) or is_by_the_harness(one.timed)
        assert one.epoch_seconds[0] == pytest.approx(counted * 472 / 24)
        if any(slept_alone <= seconds <= 1.1 * slept_alone for slept_alone in alone):
            return
    pytest.fail(f"the clock says {seconds} s; {steps} sleeps in a row took {min(alone)} s and more")


def test_a_budget_longer_than_an_epoch_times_several_and_changes_no_epsilon(driver: Driver) -> None:
    driver.environment["DPBENCH_TEST_SLEPT"] = str(driver.out.with_name("slept.txt"))
    arguments = ["--budget-seconds", "1.5", "--batch-sizes", "8192", "--no-memory"]
    assert driver.run("sleeper,noop", *arguments).returncode == 0
    found = {r.cell.variant: r for r in driver.records()}
    # Four steps of 10 ms: an epoch takes 40 ms, of which 37 fit; fewer where a busy machine holds up the warm-up.
    slow = found["sleeper"]
    assert slow.timed is not None and slow.epsilon is not None
    assert 2 <= slow.timed.epochs <= 37 and not slow.timed.extrapolated
    assert slow.timed.epochs == len(slow.epoch_seconds) == len(slow.timed.measured_seconds)
    # Without what its threads waited for a processor, of which some may fall into the sleep: more than three steps.
    assert min(slow.epoch_seconds) > 0.8 * 0.04
    slept, count = Sleeps(driver), 4 * slow.timed.epochs
    # Less than two epochs each; how close is asked of known sleeps alone, above, for a busy machine counts more here.
    most = math.inf if is_by_the_harness(slow.timed) else 1.9
    # The clock halts in some of them, so what lies between two sleeps is not always counted.
    over = [
        statistics.median(
            seconds / slept.alone(k + 4 * number, k + 4 * number + 4)
            for number, seconds in enumerate(slow.epoch_seconds)
        )
        for k in range(len(slept) - count + 1)
    ]
    assert any(1.0 <= ratio < most for ratio in over), over
    fast = found["noop"]
    assert fast.timed is not None and 2 <= fast.timed.epochs <= 100 and fast.epsilon is not None
    assert fast.epsilon.steps == slow.epsilon.steps == slow.timed.steps_per_epoch == 4


def test_memory_that_is_freed_late_hides_none_of_the_steps(driver: Driver) -> None:
    assert driver.run("late", "--subset", "0.02").returncode == 0
    (memory,) = (r.memory for r in driver.records("memory"))
    assert memory["peak_resident_growth"] == pytest.approx(32 * 2**20, rel=0.1)
    assert memory["resident_kept_after_warm_up"] < 2**20


def test_the_harness_own_memory_figures_are_nobody_elses_to_give(driver: Driver) -> None:
    assert driver.run("modest", "--no-time").returncode == 0
    (memory,) = (r.memory for r in driver.records("memory"))
    assert memory["peak_resident_growth"] == pytest.approx(32 * 2**20, rel=0.1)
    assert memory["peak_resident_growth_with_compile"] >= 31 * 2**20 and memory["its_own"] == 1


def test_as_shipped_times_the_own_loop_and_says_how_it_samples(driver: Driver) -> None:
    arguments = ["--protocol", "as_shipped", "--epochs", "2", "--batch-sizes", "10054"]  # three steps an epoch
    done = driver.run("own,own-unseeded,own-fickle,noop", *arguments)
    found = {r.cell.variant: r for r in driver.records()}
    own = found["own"]
    assert own.state == "ok" and own.timed is not None and not own.timed.extrapolated
    assert (own.timed.own_sampling, own.timed.updates, own.timed.replay_error) == ("poisson", 3, 0.0)
    assert len(own.epoch_seconds) == 2 and 0.03 <= min(own.epoch_seconds) < 1.0
    assert own.epsilon is not None and own.epsilon.steps == 6
    unseeded = found["own-unseeded"]
    assert unseeded.state == "ok" and unseeded.epsilon is None and unseeded.timed is not None
    assert unseeded.timed.replay_error is not None and unseeded.timed.replay_error > 0.1
    assert found["own-fickle"].state == "rejected" and "replay" in str(found["own-fickle"].reason)
    assert found["noop"].state == "unsupported" and "no loop of its own" in str(found["noop"].reason)
    assert done.returncode == 1
    memory = {r.cell.variant: r.memory for r in driver.records("memory")}
    assert set(memory["own"]) == {"peak_resident_growth_with_compile"}


def test_a_declared_rejection_is_no_news_and_gets_no_time(driver: Driver) -> None:
    done = driver.run("unfit,noop")
    found = {r.cell.variant: r for r in driver.records()}
    assert found["noop"].state == "ok" and done.returncode == 0
    assert found["unfit"].state == "rejected" and not found["unfit"].epoch_seconds
    assert "it is unfit" in str(found["unfit"].reason)


EXPECTED = {
    "crash": ("crashed", "something the framework did not like"),
    "vanish": ("crashed", "exit code 7"),
    "glutton": ("oom", "memory limit"),
    "hang": ("timeout", "no result within"),
    "nan": ("rejected", "not finite"),
    "idle": ("rejected", "unchanged"),
    "deferred": ("rejected", "deferred"),
    "fickle": ("rejected", "replay"),
    "refuses": ("unsupported", "does not want to"),
    "shapeless": ("crashed", "shape"),
}


def test_every_failure_is_a_record_with_its_reason(driver: Driver, cache: Path, tmp_path: Path) -> None:
    limits = ("--memory-limit", "0.4", "--budget-seconds", "0.01")
    names = ",".join(name for name in EXPECTED if name != "hang")
    done = driver.run(f"{names},noop", "--timeout", "30", *limits)
    found = {r.cell.variant: r for r in driver.records()}
    # One that hangs is waited for to the end: not for as long as the others may take on a busy machine.
    hanging = Driver(E2E, cache, tmp_path / "hanging")
    assert hanging.run("hang", "--timeout", "5", *limits).returncode == 3
    found |= {r.cell.variant: r for r in hanging.records()}
    assert found.keys() == EXPECTED.keys() | {"noop"}
    assert found["noop"].state == "ok"
    for variant, (state, words) in EXPECTED.items():
        assert (found[variant].state, words in str(found[variant].reason)) == (state, True), found[variant]
        assert not found[variant].epoch_seconds or state == "rejected"
    assert "something the framework did not like" in found["crash"].log_tail
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_an_adapter_that_fails_the_gate_is_not_timed(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unfit"
    folder.mkdir()
    (folder / "framework.toml").write_text(
        'name = "unfit"\ntitle = "t"\nhome = "h"\nlicence = "l"\npython = "3.11"\n'
        '[[variants]]\nname = "unfit"\ntitle = "t"\nprivate = true\ndefault = true\n'
    )
    driver = Driver(E2E, cache, tmp_path / "run")
    script = tmp_path / "drive.py"
    script.write_text(DRIVE.read_text().replace("str(FAKES)", repr(str(tmp_path))))
    command = driver.command("noop")
    command[1], command[command.index("phantom-noop")] = str(script), "unfit"
    done = subprocess.run(command, env=driver.environment, capture_output=True, text=True)
    assert done.returncode == 1
    (time_record,) = driver.records("time")
    assert time_record.state == "rejected" and not time_record.epoch_seconds


def test_a_cell_that_cannot_run_is_recorded_in_every_round_but_started_once(driver: Driver) -> None:
    driver.run("hang", "--timeout", "4", "--rounds", "3", "--no-memory")
    first, *later = driver.records()
    assert first.state == "timeout" and first.wall_seconds >= 4.0
    assert [r.state for r in later] == ["timeout"] * 2
    assert all(r.reason == f"as in round 1: {first.reason}" and r.wall_seconds < 4.0 for r in later)


def test_a_second_run_measures_nothing_again(finished: Driver) -> None:
    before = finished.files()
    assert finished.run("noop,plain").returncode == 0
    assert finished.files() == before


def test_a_table_comes_when_a_task_has_its_first_times(driver: Driver) -> None:
    driver.environment["DRIVE_WITH_REPORT"] = "1"
    given = ("noop,plain", "--batch-sizes", "32,64", "--no-memory")
    done = driver.run(*given)
    assert done.returncode == 0, done.stderr
    before, told, after = done.stdout.partition("These are the first times")
    assert told and "Fastest with DP" in before and "batch 32" in before and "batch 64" not in before
    assert "batch 64" in after and "the first times of" not in driver.run(*given).stdout


def test_minutes_end_a_run_after_a_whole_round_and_more_of_them_go_on(driver: Driver) -> None:
    done = driver.run("noop,plain", "--rounds", "3", "--minutes", "0.0001")
    assert done.returncode == 0 and "Time is up" in done.stdout, done.stdout + done.stderr
    first = driver.files()
    assert {r.block.round for r in driver.records()} == {0} and len(driver.records()) == 2
    again = driver.run("noop,plain", "--rounds", "3")
    assert again.returncode == 0 and "Time is up" not in again.stdout
    assert first.items() <= driver.files().items() and {r.block.round for r in driver.records()} == {0, 1, 2}


def test_minutes_that_are_left_make_rounds_beyond_the_plan(driver: Driver) -> None:
    """Until one framework's ratio is narrow. (A busy machine may keep it wide in the most rounds that there are.) How
    many each cell has, and why it has no more, stays in the folder."""
    done = driver.run("noop,sleeper", "--subset", "0.01", "--no-memory", "--minutes", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = len({r.block.round for r in driver.records()})
    (said,) = json.loads((driver.out / "sessions.json").read_text()).values()
    assert said["sessions"] == rounds >= 5 and said["why"] in ("the interval is narrow", "as many as there may be")


def test_minutes_end_the_first_round_too_and_say_what_has_no_time(driver: Driver) -> None:
    sizes = ("--batch-sizes", "64,512", "--no-memory", "--rounds", "1")
    done = driver.run("noop,plain", *sizes, "--minutes", "0.0001")
    assert done.returncode == 3 and "2 cells have no time yet" in done.stdout, done.stdout + done.stderr
    assert len(driver.records()) == 2
    assert driver.run("noop,plain", *sizes).returncode == 0
    assert len(driver.records()) == 4


def test_a_block_of_which_a_half_is_missing_is_measured_anew_as_a_whole(driver: Driver) -> None:
    short = ("--rounds", "2", "--batch-sizes", "64,512")
    assert driver.run("noop,plain", *short).returncode == 0
    shutil.rmtree(driver.out / "scratch")  # what is there for comparison may be lost at any time
    before = {(r.cell.batch_size, r.block.round, r.cell.variant): r for r in driver.records()}
    (lost,) = (name for name in driver.files() if ".phantom-noop.b512.r0.time." in name)
    (driver.out / "records" / lost).unlink()
    assert driver.run("noop,plain", *short).returncode == 0
    assert {r.state for r in driver.records()} == {"ok"}
    after = {(r.cell.batch_size, r.block.round, r.cell.variant): r for r in driver.records()}
    assert {where for where in before if after[where] != before[where]} == {(512, 0, "noop"), (512, 0, "plain")}
    for size in (64, 512):
        for number in (0, 1):
            assert len({after[size, number, variant].block.moment for variant in ("noop", "plain")}) == 1


def test_a_run_with_a_variable_that_libraries_read_says_so_and_is_no_other_one_s(driver: Driver) -> None:
    driver.environment["DPCORE_NATIVE"] = "0"
    assert driver.run("noop", "--no-memory").returncode == 0
    (one,) = driver.records()
    assert one.machine["variables"] == {"DPCORE_NATIVE": "0"}
    del driver.environment["DPCORE_NATIVE"]
    refused = driver.run("noop", "--no-memory")
    assert refused.returncode == 2 and "place.variables ({'DPCORE_NATIVE': '0'} then, None now)" in refused.stderr


def test_other_options_need_fresh_and_old_records_are_kept(driver: Driver) -> None:
    assert driver.run("noop").returncode == 0
    old = driver.files()
    refused = driver.run("noop", "--seed", "1")
    assert refused.returncode == 2 and "--fresh" in refused.stderr and "seed" in refused.stderr
    assert driver.files() == old
    assert driver.run("noop", "--seed", "1", "--fresh").returncode == 0
    aside = {p.name: p.read_text() for p in (driver.out / "earlier").glob("*/records/*.json")}
    assert aside == old


def test_a_run_that_stands_gets_more_sizes_and_rounds_and_keeps_what_it_has(driver: Driver) -> None:
    assert driver.run("noop", "--no-memory").returncode == 0
    old = driver.files()
    assert driver.run("noop", "--no-memory", "--batch-sizes", "16,64", "--rounds", "2").returncode == 0
    assert {name: text for name, text in driver.files().items() if name in old} == old
    assert {(r.cell.batch_size, r.block.round) for r in driver.records()} == {(16, 0), (16, 1), (64, 0), (64, 1)}
    assert len({r.block.run for r in driver.records()}) == 1
    fewer = driver.run("noop", "--no-memory", "--batch-sizes", "64")
    assert fewer.returncode == 2 and "report A B" in fewer.stderr


def test_two_runs_into_one_folder_are_refused(driver: Driver) -> None:
    first = driver.start("sleeper", "--subset", "1")
    try:
        wait_for(lambda: (driver.out / "plan.json").exists())
        second = driver.run("sleeper", "--subset", "1")
        assert second.returncode == 2 and "Another run is at work" in second.stderr
    finally:
        first.kill()
        first.wait()


def wait_for(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


RUN = ("noop,sleeper", "--rounds", "2", "--subset", "0.1")
RECORDS = 2 + 2 + 4  # gates, memory, times


@pytest.mark.parametrize("victim", ["runner", "worker"])
@pytest.mark.parametrize(
    "finished", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_kill_9_loses_and_doubles_nothing(driver: Driver, victim: str, finished: int) -> None:
    process = driver.start(*RUN)
    wait_for(lambda: len(list(driver.out.glob("records/*.json"))) >= finished + 1 and workers(process.pid))
    survivors = driver.files()
    if victim == "runner":
        orphans = workers(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not any(alive(pid) for pid in orphans), 5)
    else:
        for pid in workers(process.pid):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=120)
    done = driver.run(*RUN)
    after = driver.files()
    assert len(after) == RECORDS
    kept = {name: text for name, text in survivors.items() if not record.parse(text, name).interrupted}
    assert {name: after[name] for name in kept} == kept
    if victim == "runner":
        assert [(r.state, r.reason) for r in driver.records()] == [("ok", None)] * 4 and done.returncode == 0
    else:
        crashed = [r for purpose in ("time", "memory") for r in driver.records(purpose) if r.state != "ok"]
        assert done.returncode == 0 and not crashed, "a killed worker is tried again"
    assert not list(driver.out.rglob("*.part"))


def workers(parent: int) -> list[int]:
    import psutil

    try:
        children = psutil.Process(parent).children(recursive=True)
        return [c.pid for c in children if "harness.worker.e2e" in " ".join(c.cmdline())]
    except psutil.Error:
        return []


def alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_who_kills_the_run_again_and_again_ends_no_run_of_others(driver: Driver) -> None:
    command = ("patricide,noop", "--no-memory", "--budget-seconds", "0.01")
    for _ in range(3):
        assert driver.run(*command).returncode == -signal.SIGKILL
    done = driver.run(*command)
    found = {r.cell.variant: r for r in driver.records()}
    assert done.returncode == 3 and found["noop"].state == "ok"
    assert found["patricide"].state == "crashed" and "killed 3 times while" in str(found["patricide"].reason)


def test_who_forges_its_result_ends_no_run_of_others(driver: Driver) -> None:
    done = driver.run("forger,noop", "--budget-seconds", "0.01")
    found = {r.cell.variant: r for r in driver.records()}
    assert done.returncode in {1, 3} and "Traceback" not in done.stderr
    assert found["noop"].state == "ok"
    assert found["forger"].state in {"crashed", "rejected"} and found["forger"].reason


def test_a_lost_replay_is_made_again_with_the_time_that_needs_it(driver: Driver) -> None:
    assert driver.run("noop", "--rounds", "2", "--budget-seconds", "0.01").returncode == 0
    (first,) = driver.out.glob("records/*.r0.time.*.json")
    (memory,) = driver.out.glob("records/*.r0.memory.*.json")
    former = memory.read_text()
    shutil.rmtree(driver.out / "scratch")
    assert driver.run("noop", "--rounds", "2", "--budget-seconds", "0.01").returncode == 0
    assert memory.read_text() == former, "nothing needs it"
    first.unlink()
    assert driver.run("noop", "--rounds", "2", "--budget-seconds", "0.01").returncode == 0
    assert memory.read_text() != former
    (one,) = record.read(first)
    assert one.timed is not None and one.timed.replay_error == 0.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_is_asked_to_end_says_how_to_go_on(driver: Driver, number: signal.Signals) -> None:
    # Under nohup, or in a shell's background, the tests themselves ignore it, and so would what they start.
    process = subprocess.Popen(
        driver.command(*RUN),
        env=driver.environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    wait_for(lambda: workers(process.pid))
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number and "goes on from there" in output
    assert not list(driver.out.glob("scratch/*.attempts"))


def test_a_changed_harness_refuses_the_run(driver: Driver, tmp_path: Path) -> None:
    """In a tree of its own: nobody edits this one while tests run."""
    tree = tmp_path / "tree"
    for name in ("harness", "frameworks", "dpcore", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    driver.environment["PYTHONPATH"] = str(tree)
    command = [
        argument.replace(str(DRIVE), str(tree / "tests" / "support" / "drive.py")) for argument in driver.command(*RUN)
    ]
    process = subprocess.Popen(command, env=driver.environment, cwd=tree, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(driver.out.glob("records/*.json"))) >= 4)
    with (tree / "harness" / "worker" / "clock.py").open("a") as file:
        file.write("# a thumb on the scale\n")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2 and "clock.py changed during the run" in error


@pytest.mark.parametrize("kib", [pytest.param(0, marks=pytest.mark.slow), 8, pytest.param(36, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_sentence_and_loses_nothing(driver: Driver, tmp_path: Path, kib: int) -> None:
    """A real small file system, filled up but for ``kib`` KiB, so that it runs full at three moments."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        driver.out = small / "run"
        filler = small / "filler"
        with filler.open("wb") as file:
            file.write(b"\0" * (4 * 2**20 - kib * 1024))
        full = driver.run(*RUN)
        assert full.returncode == 2 and "Traceback" not in full.stderr, full.stderr
        assert "No space left" in full.stderr and len(full.stderr.strip().splitlines()) == 1
        survivors = driver.files()
        for name, text in survivors.items():
            record.parse(text, name)
        filler.unlink()
        assert driver.run(*RUN).returncode == 0
        after = driver.files()
        kept = {n: text for n, text in survivors.items() if not record.parse(text, n).interrupted}
        assert len(after) == RECORDS and {n: after[n] for n in kept} == kept
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_corrupt_record_is_named_and_left_alone(driver: Driver, finished: Driver) -> None:
    shutil.copytree(finished.out, driver.out)
    victim = next((driver.out / "records").glob("*.time.*.json"))
    victim.write_text(victim.read_text()[:100])
    done = driver.run("noop,plain")
    assert done.returncode == 2 and victim.name in done.stderr and "not a record" in done.stderr
    victim.write_text(json.dumps({"schema": 99}))
    done = driver.run("noop,plain")
    assert done.returncode == 2 and "schema 99" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tasks", "mnist"), "There is no task 'mnist'"),
        (("--batch-sizes", "0"), "Batch size 0 is impossible"),
        (("--batch-sizes", "999999"), "30162 training examples"),
        (("--batch-sizes", "many"), "whole numbers"),
        (("--frameworks", "opaque"), "no framework 'opaque'"),
        (("--frameworks", "phantom-ghost"), "no framework 'phantom-ghost'"),
        (("--sigma=-1",), "--sigma is -1.0"),
        (("--subset", "0"), "--subset is 0.0"),
        (("--rounds", "0"), "--rounds is 0"),
        (("--protocol", "mine"), "no protocol 'mine'"),
        (("--protocol", "as_shipped", "--subset", "0.5"), "times whole epochs"),
        (("--device", "cuda"), "no GPU"),
        (("--device", "tpu"), "choose cpu or cuda"),
        (("--preset", "huge"), "no preset 'huge'"),
        (("--isolation", "hope"), "choose venv"),
        (("--memory-limit", "-3"), "--memory-limit is -3.0"),
        (("--memory-limit", "inf"), "--memory-limit is inf"),
        (("--memory-limit", "1e300"), "--memory-limit is 1e+300"),
        (("--seed", "-1"), "--seed is -1"),
        (("--budget-seconds", "inf"), "--budget-seconds is inf"),
        (("--timeout", "inf"), "--timeout is inf"),
        (("--no-memory", "--no-time"), "leave nothing to measure"),
    ],
)
def test_bad_input_is_one_sentence(
    driver: Driver, refusal: Callable[..., str], arguments: tuple[str, ...], words: str
) -> None:
    said = refusal(*driver.arguments("noop", *arguments))
    assert words in said and len(said.strip().splitlines()) == 1
    assert not driver.out.exists()


def test_an_unwritable_folder_is_bad_input(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    driver.out = tmp_path / "file" / "run"
    done = driver.run("noop")
    assert done.returncode == 2 and "--out" in done.stderr and "Traceback" not in done.stderr

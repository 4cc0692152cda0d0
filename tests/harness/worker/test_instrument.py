"""The instrument measured: known sleeps, known bytes, its own overhead, its start-up, the limits that it sets."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from harness.cli import doctor
from harness.contract import Array
from harness.environments import memory_limit
from harness.worker import machine, speed_probe
from harness.worker.clock import ForeignLoad, timed_steps

ATTEMPTS = 40


class Sleeper(doctor.Phantom):
    """Knows how long its steps lasted: a busy machine wakes it late."""

    lasted = 0.0

    def step(self, indices: Array, mask: Array | None) -> None:
        start = time.perf_counter()
        super().step(indices, mask)
        self.lasted += time.perf_counter() - start


@pytest.mark.parametrize("milliseconds", [5, 10, 50])
def test_known_sleeps_are_measured_within_5_percent(milliseconds: int) -> None:
    errors: list[float] = []
    while len(errors) < ATTEMPTS and min(errors, default=1.0) > 0.05:
        sleeper = Sleeper(milliseconds / 1e3)
        measured = timed_steps(sleeper, [(doctor.NO_INDICES, None)] * 8)
        assert sleeper.lasted >= 8 * milliseconds / 1e3
        errors.append(measured / sleeper.lasted - 1.0)
    assert 0.0 <= min(errors) <= 0.05
    assert doctor.sleep_error(milliseconds / 1e3, steps=2) >= 0.0


@pytest.mark.parametrize("mib", [0, 1, 4, 16])
def test_known_bytes_are_measured(mib: int) -> None:
    errors = [abs(doctor.bytes_error(mib * 2**20)) for _ in range(3)]
    assert min(errors) <= max(doctor.BYTES_SLACK, 0.05 * mib * 2**20)


def test_overhead_is_under_half_a_percent_of_the_shortest_step() -> None:
    assert doctor.overhead_seconds() < 0.005 * doctor.SHORTEST_STEP_SECONDS


def test_the_clock_waits_for_the_device() -> None:
    class Late(doctor.Phantom):
        def synchronize(self) -> None:
            time.sleep(0.03)

    # Once before the clock starts (not counted) and once before it stops (counted).
    # The fastest of some: a busy machine makes a sleep longer, never shorter.
    seconds: list[float] = []
    while len(seconds) < ATTEMPTS and min(seconds, default=1.0) >= 0.055:
        seconds.append(timed_steps(Late(), [(doctor.NO_INDICES, None)]))
    assert 0.03 <= min(seconds) < 0.055


@pytest.fixture
def one_processor() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


TICKS = 0.1
"""Seconds by which counts of ticks of 10 ms may be off."""


def test_foreign_load_does_not_count_its_own_process(one_processor: None) -> None:
    load = ForeignLoad()
    with load.watch():
        before, end = time.process_time(), time.monotonic() + 1.0
        while time.monotonic() < end:
            np.ones(1000).sum()
        own = time.process_time() - before
    # Whatever else runs here: what is left of one processor.
    assert load.foreign <= load.available - own + TICKS


def test_foreign_load_sees_another_process(one_processor: None) -> None:
    busy = psutil.Popen([sys.executable, "-c", "while True: pass"])
    try:
        load = ForeignLoad()
        used = 0.0
        with load.watch():
            before = busy.cpu_times().user
            while used < 0.5:  # its own count says how much there is to be seen
                time.sleep(0.1)
                used = busy.cpu_times().user - before
    finally:
        busy.kill()
        busy.wait()
    assert load.foreign >= used - TICKS
    assert 0.0 < load.share <= 1.0 + TICKS


def test_the_memory_limit_stops_a_process_and_says_so() -> None:
    limit = memory_limit.MemoryLimit(200 * 2**20)
    code = "import time\nhoard = []\nwhile True: hoard.append(bytearray(2**22)); time.sleep(0.002)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        limit.adopt(process.pid)
        deadline = time.monotonic() + 60
        while not limit.exceeded(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert limit.exceeded(process.pid)
    finally:
        process.kill()
        process.wait()
        limit.close()


def test_the_watchdog_counts_the_whole_tree() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; x = bytearray(60 * 2**20); time.sleep(90)'])\n"
        "time.sleep(90)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while memory_limit.tree_resident(process.pid) < 60 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert memory_limit.tree_resident(process.pid) >= 60 * 2**20
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert memory_limit.tree_resident(process.pid) == 0


def test_help_is_quick_and_imports_no_framework() -> None:
    code = (
        "import sys; sys.argv = ['dpbench', '--help']\n"
        "from harness.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'jax', 'tensorflow', 'pandas', 'scipy', 'matplotlib', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    seconds: dict[str, list[float]] = {code: [], "import typer, rich.console": []}
    for program in [*seconds] * 5:
        before = _children_seconds()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        seconds[program].append(_children_seconds() - before)
        assert done.returncode == 0, done.stderr
    # The design asks for 0.3 s on a quiet machine; CI machines are shared, so processor time, and some room: on slow
    # ones, as many times what the command line's own two libraries take to load (2.7 times were measured).
    help_, libraries = (min(of) for of in seconds.values())
    assert help_ < max(0.6, 4.0 * libraries)


def _children_seconds() -> float:
    """Processor seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_canary_does_the_same_work_each_time() -> None:
    values = [speed_probe.seconds() for _ in range(5)]
    assert min(values) > 0 and max(values) < 20 * min(values)


def test_the_machine_has_an_identity_without_a_name() -> None:
    facts = machine.describe()
    assert facts["cores"] >= 1 and facts["memory_bytes"] > 2**30 and len(facts["id"]) == 8


def test_doctor_reports_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    doctor.examine(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert len(report["checks"]) == len(doctor.CHECKS)
    assert {c["state"] for c in report["checks"]} <= {"ok", "warning", "fault"}


FAMILY = """
import subprocess, sys
from harness.worker import memory as resident

child = "import sys; block = b'x' * (48 << 20); print('ready', flush=True); sys.stdin.read()"
resident.reset_peak()
before = resident.now()
process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
process.stdout.readline()
alive = resident.now() - before, resident.peak() - before
process.communicate("")
ended = resident.now() - before, resident.peak() - before
resident.reset_peak()
print(*alive, *ended, resident.peak() - before)
"""


def test_memory_of_children_counts_while_they_live_and_when_they_have_ended() -> None:
    """In a process of its own: what counts of those that ended is the largest, and this one has had others."""
    done = subprocess.run([sys.executable, "-c", FAMILY], capture_output=True, text=True, check=True)
    now, peak, now_after, peak_after, peak_anew = map(int, done.stdout.split())
    assert min(now, peak, peak_after) >= 48 * 2**20
    assert max(now_after, peak_anew) < 24 * 2**20


MAPS = """
import mmap, sys
from harness.worker import memory
memory.settle()
before = memory.now()
memory.reset_peak()
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    total = sum(mapped[at] for at in range(0, len(mapped), 4096))
    print(memory.of_files() >= 2**26, memory.now() - before, memory.peak() - before)
"""


def test_mapped_pages_of_a_file_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "library").write_bytes(bytes(2**26))
    command = [sys.executable, "-c", MAPS, str(tmp_path / "library")]
    is_mapped, now, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert is_mapped == "True"
    assert abs(int(now)) < 2**22 and abs(int(peak)) < 2**22

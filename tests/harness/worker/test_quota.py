"""The process finds what a control group leaves of the processors, by both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.worker import quota

BUSY = """
import time
from harness.worker import quota
from harness.worker.clock import ForeignLoad
load = ForeignLoad()
with load.watch():
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pass
print(quota.group().processors, load.throttled)
"""


def process(folder: Path, system: str, own: str, root: str, files: dict[str, str]) -> Path:
    """A folder of /proc of a process whose control groups are mounted in ``folder``/mount."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(f"0::{own}\n" if system == "cgroup2" else f"4:memory:/x\n1:cpu,cpuacct:{own}\n0::/\n")
    kinds = "rw" if system == "cgroup2" else "rw,cpu,cpuacct"
    lines = f"24 1 0:2 / /elsewhere rw - tmpfs tmpfs rw\n25 1 0:3 {root} {folder}/mount rw - {system} cgroup {kinds}\n"
    (proc / "mountinfo").write_text(lines)
    for name, text in files.items():
        (folder / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mount" / name).write_text(text)
    return proc


HALF = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n", "cpu.stat": "nr_periods 8\nnr_throttled 6\n"}
FREE = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("system", "own", "root", "files", "processors"),
    [
        ("cgroup2", "/pod/box", "/", {"pod/box/cpu.max": "50000 100000\n"}, 0.5),
        ("cgroup2", "/pod/box", "/", {"pod/box/cpu.max": "max 100000\n", "pod/cpu.max": "20000 100000\n"}, 0.2),
        ("cgroup2", "/", "/", {"cpu.max": "50000 100000\n"}, 0.5),
        ("cgroup2", "/pod", "/", {"pod/cpu.max": "max 100000\n"}, None),
        ("cgroup2", "/pod", "/", {"pod/cpu.max": "99900000 100000\n"}, None),
        ("cgroup", "/box", "/", {f"box/{k}": v for k, v in HALF.items()}, 0.5),
        ("cgroup", "/docker/1", "/docker/1", HALF, 0.5),
        ("cgroup", "/docker/1", "/elsewhere", HALF, 0.5),
        ("cgroup", "/box", "/", {f"box/{k}": v for k, v in FREE.items()}, None),
        ("cgroup", "/box", "/", {}, None),
    ],
)
def test_the_least_that_the_groups_above_a_process_leave_is_its_quota(
    tmp_path: Path, system: str, own: str, root: str, files: dict[str, str], processors: float | None
) -> None:
    found = quota.group(process(tmp_path, system, own, root, files))
    assert (found and found.processors) == processors
    if found is not None and "cpu.stat" in files:
        assert found.periods() == (8, 6)


def test_a_machine_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert quota.group(tmp_path) is None


LIMITS = {
    "a tenth of a processor": (
        ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "10000"),
        ("/sys/fs/cgroup", "cpu.max", "10000 100000"),
    ),
    "a GiB": (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", str(2**30)),
        ("/sys/fs/cgroup", "memory.max", str(2**30)),
    ),
}


@pytest.fixture
def limited(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The file that moves a process into a control group with such a limit, made here."""
    name = f"dpbench-test-{os.getpid()}"
    for mount, limit, text in LIMITS[request.param]:
        folder = Path(mount, name)
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(text)
            yield folder / "cgroup.procs"
            return
        except OSError:
            continue
        finally:
            folder.rmdir()
    pytest.skip("this kernel, or this user, makes no control group with a limit")


def inside(group: Path, code: str) -> list[float]:
    """Return what a Python prints that runs in a control group."""
    command = ["sh", "-c", f'echo $$ > {group} && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


@pytest.mark.parametrize("limited", ["a tenth of a processor"], indirect=True)
def test_a_process_with_a_tenth_of_a_processor_is_told(limited: Path) -> None:
    processors, stopped = inside(limited, BUSY)
    assert processors == 0.1 and stopped > 0


@pytest.mark.parametrize("limited", ["a GiB"], indirect=True)
def test_a_worker_gets_no_more_memory_than_the_control_group_has(limited: Path) -> None:
    code = "from harness.environments.memory_limit import default_limit; print(default_limit())"
    (limit,) = inside(limited, code)
    assert 2**28 < limit < 0.9 * 2**30

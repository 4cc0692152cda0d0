"""A memory limit on a worker's process tree: a cgroup where this process may make one, else a watchdog.

Never an address-space limit: frameworks reserve far more addresses than they use.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from pathlib import Path

import psutil

from harness.errors import BadInput
from harness.worker import quota

V2 = Path("/sys/fs/cgroup")
V1 = Path("/sys/fs/cgroup/memory")
EMPTYING_SECONDS = 5.0


class MemoryLimit:
    """``kind`` says what enforces the limit. Call ``adopt(pid)`` right after the start, ``exceeded(pid)`` now and then
    and once after the end, ``close`` at last."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._group, self.kind = _make_group(limit_bytes)
        self._watched_peak = 0

    def adopt(self, pid: int) -> None:
        """Move a fresh process into the limited group."""
        if self._group is not None:
            try:
                (self._group / "cgroup.procs").write_text(str(pid))
            except OSError:
                self.close()
                self.kind = "watchdog"

    def move(self, limit_bytes: int) -> None:
        """Another limit from now on, for a process whose start-up is not to count."""
        self.limit_bytes = limit_bytes
        self._watched_peak = 0
        if self._group is not None:
            file = self._group / ("memory.max" if self.kind == "cgroup v2" else "memory.limit_in_bytes")
            try:
                file.write_text(str(limit_bytes))
            except (
                OSError
            ):  # already beyond it, and nothing to reclaim: the wider limit stands, and the watchdog watches
                self.kind = "watchdog"

    def exceeded(self, pid: int) -> bool:
        """Return whether the limit was passed: the kernel killed inside the group, or the tree's resident set is too
        large."""
        if self._group is not None and (self.kind != "watchdog" or _kills(self._group)):
            return _kills(self._group) > 0
        self._watched_peak = max(self._watched_peak, tree_resident(pid))
        return self._watched_peak > self.limit_bytes

    def members(self) -> set[int]:
        """Return the numbers of the processes in the limited group; none where there is no group."""
        with contextlib.suppress(OSError):
            return {int(pid) for pid in (self._group / "cgroup.procs").read_text().split()} if self._group else set()
        return set()

    def close(self) -> None:
        """End what is left in the group, and removes it."""
        if self._group is not None:
            _empty(self._group)
            with contextlib.suppress(OSError):
                self._group.rmdir()
            self._group = None


def _make_group(limit_bytes: int) -> tuple[Path | None, str]:
    name = f"dpbench-{os.getpid()}-{os.urandom(4).hex()}"
    candidates = (
        ("cgroup v2", V2 / name, "memory.max", V2 / "cgroup.controllers"),
        ("cgroup v1", V1 / name, "memory.limit_in_bytes", V1 / "memory.limit_in_bytes"),
    )
    for kind, group, limit_file, marker in candidates:
        if not marker.exists():
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit_file).write_text(str(limit_bytes))
            return group, kind
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
    return None, "watchdog"


def _empty(group: Path) -> None:
    """Kill every process of the group: at once by the kernel (cgroup v2), else until none is left."""
    deadline = time.monotonic() + EMPTYING_SECONDS
    with contextlib.suppress(OSError):
        while (left := (group / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            if (group / "cgroup.kill").exists():
                (group / "cgroup.kill").write_text("1")
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)


def _kills(group: Path) -> int:
    """Return how often the kernel's out-of-memory killer struck inside the group."""
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in (group / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def tree_resident(pid: int) -> int:
    """Return bytes resident in a process and its children; 0 once it is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in family:
        with contextlib.suppress(psutil.Error):
            total += member.memory_info().rss
    return total


MOST_GIBIBYTES = 2**20


def from_gibibytes(size: float | None, option: str) -> int | None:
    """Bytes; None for None. Raises :class:`BadInput`, naming the ``option``, for what is no size of a memory."""
    if size is not None and not 0.0 < size <= MOST_GIBIBYTES:
        raise BadInput(f"{option} is {size}: it must be above 0 GiB, and at most {MOST_GIBIBYTES}.")
    return None if size is None else int(size * 2**30)


def default_limit() -> int:
    """Nine tenths of the memory that is available now, to the machine and to the control groups that this process is
    in: both must survive what a contestant does."""
    return int(min(psutil.virtual_memory().available, *map(_room, quota.groups("memory")), math.inf) * 0.9)


def _room(group: Path) -> float:
    """Return the bytes that a control group may take beside those that the kernel cannot drop."""
    for most, used, file in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
            limit, taken = (int((group / name).read_text()) for name in (most, used))
            droppable = re.search(rf"^{file} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
            return max(0, limit - taken + int(droppable[1] if droppable else 0))
    return math.inf

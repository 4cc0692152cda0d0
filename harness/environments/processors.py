"""Processors and their time, of a process and of all that it started, as Linux tells them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

LOOK_SECONDS = 0.2
LISTS_CHILDREN = Path("/proc/thread-self/children").exists()
"""Whether this kernel lists a thread's children (CONFIG_PROC_CHILDREN); where it does not, all processes are asked for
their parent, which takes some milliseconds."""


@contextmanager
def quietest(threads: int) -> Iterator[list[list[int]]]:
    """Keep this thread, and what it starts, on so many processors, those that others used least a moment ago: all that
    are compared get the same ones, and a busy neighbour falls on none where there is room beside it.

    Yields:
        Their numbers, and then those of as many others with the same memory, as often as there are so many.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield [[]]
        return
    allowed = sorted(os.sched_getaffinity(0))
    chosen = allowed[:threads]
    if threads < len(allowed):
        busy = dict(enumerate(psutil.cpu_percent(interval=LOOK_SECONDS, percpu=True)))
        chosen = sorted(sorted(allowed, key=lambda number: busy.get(number, 100.0))[:threads])
    left = [number for number in allowed if number not in chosen and _node(number) == _node(chosen[0])]
    os.sched_setaffinity(0, chosen)
    try:
        yield [chosen, *(left[at : at + threads] for at in range(0, len(left) - threads + 1, threads))]
    finally:
        os.sched_setaffinity(0, allowed)


def _node(processor: int) -> str:
    """Return which part of the machine's memory lies nearest to it; empty where the kernel does not say."""
    return next((node.name for node in Path(f"/sys/devices/system/cpu/cpu{processor}").glob("node[0-9]*")), "")


def tree_seconds(pid: int) -> float:
    """Seconds, in ticks of 10 ms: of the process, of its living descendants and of those that have ended and were
    waited for; 0 where there is no such process, or no /proc."""
    ticks = 0
    for process in _tree(pid):
        with suppress(OSError, ValueError):  # it has ended meanwhile
            # The name in parentheses may hold anything. User and system time, its own and of ended children.
            ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_clock(pid: int) -> float:
    """Seconds of processor time, to the microsecond: of the process and its living descendants, threads that have ended
    included; 0 where the kernel does not say."""
    return sum(map(_process_clock, tree_members(pid)))


def _process_clock(pid: int) -> float:
    try:
        # As clock_getcpuclockid(3) makes it on Linux: the number's complement, and "scheduled time of the process".
        return time.clock_gettime((~pid << 3) | 2)
    except (OSError, OverflowError):
        return 0.0


def tree_waited(pid: int) -> dict[str, float]:
    """Seconds that each living thread of the tree was ready and waited for a processor, by its folder; empty where the
    kernel does not count."""
    waited: dict[str, float] = {}
    for process in _tree(pid):
        for thread in process.glob("task/*/schedstat"):
            with suppress(OSError, ValueError, IndexError):
                waited[str(thread)] = int(thread.read_text().split()[1]) / 1e9
    return waited


def tree_members(pid: int) -> list[int]:
    """Return the numbers of the process and of its living descendants."""
    return [int(process.name) for process in _tree(pid)]


def tree_processors(pid: int) -> set[int]:
    """Return the processors on which any thread of them may run."""
    found: set[int] = set()
    for process in _tree(pid):
        for thread in process.glob("task/*"):
            with suppress(OSError):
                found |= os.sched_getaffinity(int(thread.name))
    return found


def keep_on(pid: int, processors: Collection[int]) -> None:
    """Keep this thread, and every thread of the process and its living descendants, on these processors."""
    os.sched_setaffinity(0, processors)
    for process in _tree(pid):
        for thread in process.glob("task/*"):
            with suppress(OSError):
                os.sched_setaffinity(int(thread.name), processors)


def _tree(pid: int) -> Iterator[Path]:
    """Yield the folders in /proc of the process and of its living descendants."""
    if not LISTS_CHILDREN:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                yield Path("/proc") / str(member.pid)
        return
    todo = [str(pid)]
    while todo:
        process_folder = Path("/proc") / todo.pop()
        yield process_folder
        for children in process_folder.glob("task/*/children"):
            with suppress(OSError):
                todo += children.read_text().split()

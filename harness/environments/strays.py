"""End what a worker started and left running, wherever it went: into a session of its own, or away from its parent.

On Linux this process becomes the parent of what its descendants orphan (PR_SET_CHILD_SUBREAPER), so that a daemon
cannot leave its tree of processes. Standard library and psutil only.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import psutil

MARK = "DPBENCH_CELL"
"""Environment variable of a worker, inherited by what it starts: tells the strays of workers side by side apart."""
SUBREAPER = 36
SECONDS = 5.0

_lock = threading.Lock()
_under_way: set[str] = set()


@contextmanager
def ended() -> Iterator[dict[str, str]]:
    """Around a worker: environment variables for it. Whatever it has started is dead after the block.

    Where it ran alone, every process that has become this one's descendant meanwhile is taken for its own; beside other
    workers only those that carry its mark.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    mark = os.urandom(8).hex()
    before = {process.pid for process in _descendants()}
    with _lock:
        _under_way.add(mark)
        alone = len(_under_way) == 1
    try:
        yield {MARK: mark}
    finally:
        with _lock:
            alone = alone and len(_under_way) == 1
            _under_way.discard(mark)
        _end(before, None if alone else mark)


def beside(worker: int, mark: str, group: Collection[int]) -> list[int]:
    """Return the numbers of processes that a worker made this process's children in the place of its own (Linux's
    CLONE_PARENT): what counts the worker's tree leaves them out. They are of its session, carry its mark, or are
    members of its control ``group``; one that has ended and that nobody asked for is still of the session."""
    found = []
    for process in _children():
        if process.pid != worker:
            with suppress(OSError, psutil.Error):
                if process.pid in group or os.getsid(process.pid) == worker or _carries(process, mark):
                    found.append(process.pid)
    return found


def _children() -> list[psutil.Process]:
    try:
        return list(psutil.Process().children())
    except psutil.Error:
        return []


def _end(before: set[int], mark: str | None) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        left = [p for p in _descendants() if p.pid not in before and (mark is None or _carries(p, mark))]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        for process in left:
            with suppress(OSError):  # one whose parent is still there is that one's to ask for
                os.waitpid(process.pid, os.WNOHANG)
        if not left:
            return
        time.sleep(0.01)


def _descendants() -> list[psutil.Process]:
    try:
        return list(psutil.Process().children(recursive=True))
    except psutil.Error:
        return []


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark)
    except psutil.Error:
        return False

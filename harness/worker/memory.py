"""Peak resident memory of this process and of those that it started, as Linux counts it. Standard library only."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import socket
import struct
import time
from contextlib import nullcontext, suppress
from pathlib import Path

GROWTH = "peak_resident_growth"
"""Highest resident set during the steps, less the resident set with model and data loaded, before any step."""

KEPT_AFTER_WARM_UP = "resident_kept_after_warm_up"
"""How much of that growth was already there before the first steady step: compiled code, buffers, what an allocator
keeps. The growth of the steps themselves is the difference."""

GROWTH_WITH_COMPILE = "peak_resident_growth_with_compile"
"""The same, with the warm-up (and so compilation) inside."""


def now() -> int:
    """Bytes resident now (VmRSS), of the whole process tree, without pages of files.

    Of a library's file Linux maps what stands in its cache beside the page that is needed, which depends on how the
    file was once written: 41 or 17 MiB of PyTorch's in one training, by two installers.
    """
    return sum(now_of(pid) for pid in ("self", *descendants()))


def now_of(pid: str) -> int:
    """Bytes resident now, of one process."""
    return _status("VmRSS", pid) - _status("RssFile", pid)


def of_files() -> int:
    """Bytes of files that are mapped and resident now, of the whole process tree."""
    return sum(_status("RssFile", pid) for pid in ("self", *descendants()))


def peak() -> int:
    """Highest VmRSS since the start or the last :func:`reset_peak` (VmHWM), less the pages of files now. The peaks of
    living children are added to it, and that of the largest which ended since, where it was larger than all that ended
    before: more the kernel does not keep. An upper bound of these: their peaks need not fall together."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    living = sum(_status("VmHWM", pid) for pid in ("self", *descendants())) - of_files()
    return living + (ended if ended > _ended_before else 0)


_ended_before = 0
"""Largest child that had ended at the last :func:`reset_peak`."""


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind (prctl PR_SET_CHILD_SUBREAPER), so that a process
    which detaches itself stays in the tree."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


class Ranks:
    """Resident growth and processor time of every process of this tree, each by itself."""

    def __init__(self) -> None:
        self.loaded = {pid: now_of(pid) for pid in (str(os.getpid()), *descendants())}

    def begin(self) -> None:
        """Begin the steps."""
        self.loaded = {pid: min(loaded, now_of(pid)) for pid, loaded in self.loaded.items()}
        self.begun = {pid: _processor_seconds(pid) for pid in self.loaded}

    def end(self, steps: int) -> dict[int, tuple[int, float]]:
        """Return (peak growth, processor seconds of a step) by process."""
        grown = {p: _status("VmHWM", p) - _status("RssFile", p) - loaded for p, loaded in self.loaded.items()}
        return {int(p): (max(0, grown[p]), (_processor_seconds(p) - self.begun[p]) / steps) for p in grown}


def _processor_seconds(pid: str) -> float:
    return time.clock_gettime(~int(pid) << 3 | 2)  # Linux's number of a process's clock (posix-timers.h)


SENT = "sent_per_step"
"""Bytes that rank 0 sent to the other ranks in a step, by the kernel's count of its connections."""


def sent() -> int:
    """Return the bytes that arrived at the other ends of this process's TCP connections (Linux's tcpi_bytes_acked)."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, struct.error):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    count += struct.unpack_from("=Q", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), 120)[0]
    return count


def settle() -> None:
    """Frees what is free, so that a baseline does not count garbage or pages that the C allocator merely keeps."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


STEADY_BYTES = 2**20
STEADY_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 10.0


def steady() -> int:
    """Bytes resident once they stand still. Some frameworks (JAX) copy placed data in the background and free the
    original later: a baseline taken meanwhile would be too high, and the growth above it too low."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    settle()
    before = now()
    while time.monotonic() < deadline:
        time.sleep(STEADY_SECONDS)
        settle()
        after = now()
        if abs(after - before) <= STEADY_BYTES:
            break
        before = after
    return now()


def reset_peak() -> None:
    """Lets VmHWM start again from the current resident set (kernel documentation, proc(5), clear_refs 5)."""
    global _ended_before
    for pid in ("self", *descendants()):
        with suppress(OSError) if pid != "self" else nullcontext():
            Path(f"/proc/{pid}/clear_refs").write_text("5")
    _ended_before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def descendants() -> list[str]:
    """Process numbers of all living children, theirs included."""
    parents: dict[str, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            # The name in parentheses may hold anything; state and parent follow its last one.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(parent, []).append(stat.parent.name)
    found: list[str] = []
    todo = [str(os.getpid())]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def _status(key: str, pid: str = "self") -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        if pid != "self":  # it has ended meanwhile
            return 0
        raise
    for line in lines:
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    if pid != "self":
        return 0
    raise OSError(f"/proc/self/status has no {key}; peak resident memory needs Linux.")

"""Peak resident memory of this process, as Linux counts it. Standard library only."""

from __future__ import annotations

import ctypes
import gc
import time
from pathlib import Path

NOTION = "peak_resident_growth"
"""Highest resident set during the steps, less the resident set with model and data loaded, before any step."""

NOTION_KEPT = "resident_kept_after_warm_up"
"""How much of that growth was already there before the first steady step: compiled code, buffers, what an allocator
keeps. The growth of the steps themselves is the difference."""

NOTION_WITH_COMPILE = "peak_resident_growth_with_compile"
"""The same, with the warm-up (and so compilation) inside."""


def now() -> int:
    """Bytes resident now (VmRSS)."""
    return _status("VmRSS")


def peak() -> int:
    """Highest VmRSS since the start or the last :func:`reset_peak` (VmHWM)."""
    return _status("VmHWM")


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
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}; peak resident memory needs Linux.")

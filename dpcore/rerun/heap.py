"""The memory that a process has freed and the C library keeps."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""glibc's numbers for two of its settings (malloc.h)."""
MOST_KEPT = 2**31 - 1
"""Bytes that are free at the heap's end and stay there: the largest number that glibc takes."""
OF_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc's; None with another C library, which has no such heap."""
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None


def give_back() -> None:
    """Return to the system what a large, rare piece of work has freed.

    The heap keeps the pages below its last block in use, so that without this a process stays as large as its largest
    batch ever was. Every free page has to be looked at and later asked for again: not for what every step does.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        keep_pages()
        trim(0)


@functools.cache
def keep_pages() -> None:
    """Let glibc keep what is freed, blocks of any size among it, once in a process.

    With its own settings it asks the system for every block of 32 MB and more, and hands it back, as it does with what
    is free at the heap's end: a step of a small GPT-2 at 64 examples had 500 MB of pages cleared, a sixth of its time.
    What the environment says of the heap holds.
    """
    set_option = _of_glibc("mallopt")
    if set_option is None or any(name in os.environ for name in OF_USER) or "GLIBC_TUNABLES" in os.environ:
        return
    set_option(_MMAP_MAX, 0)
    set_option(_TRIM_THRESHOLD, MOST_KEPT)

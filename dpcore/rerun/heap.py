"""The memory that a process has freed and the C library keeps."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function; None with another C library, which has no such heap."""
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None


def give_back() -> None:
    """Return to the system what a large, rare piece of work has freed.

    The heap keeps the pages below its last block in use, so that without this a process stays as large as its largest
    batch ever was. Every free page has to be looked at and later asked for again: not for what every step does.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)

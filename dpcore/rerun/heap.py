"""The memory that a process has freed and the C library keeps."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

LARGEST_OF_HEAP = 31 * 2**20
"""Bytes of a block just below 32 MB, from which on glibc asks the system for every block and hands it back."""


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
        keep_pages()
        trim(0)


@functools.cache
def keep_pages() -> None:
    """Let glibc keep up to twice :data:`LARGEST_OF_HEAP` that is free at the heap's end, once in a process.

    A backward pass frees what the forward pass has put there, last block first. With its first settings glibc hands
    those pages back within every step, and the next step has to have them cleared again: 3,000 pages and some 4 % of a
    step of a small vision transformer. The settings rise by themselves when a larger block is freed, as ordinary
    training does sooner or later; so one is, of which no page is ever touched. ``MALLOC_TRIM_THRESHOLD_`` and its kin
    in the environment forbid that, and hold.
    """
    torch.empty(LARGEST_OF_HEAP, dtype=torch.uint8)

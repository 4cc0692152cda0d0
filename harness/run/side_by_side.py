"""Run pieces of work in threads, each of which waits for a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import psutil

T = TypeVar("T")


def side_by_side(
    work: Sequence[Callable[[], T]],
    slots: int,
    let_end: tuple[type[BaseException], ...] = (),
    at_error: Callable[[], object] = lambda: None,
) -> list[T]:
    """Do all of it, so many pieces at once, and return what they return, or raise the first error once nothing is under
    way.

    Args:
        work: the pieces.
        slots: how many at once.
        let_end: errors after which what is under way goes on to its end; after any other its processes are killed.
        at_error: called before they are, so that no thread starts another one.
    """
    pool = ThreadPoolExecutor(slots)
    try:
        return [future.result() for future in [pool.submit(one) for one in work]]
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        if not isinstance(error, let_end):
            at_error()
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        raise
    finally:
        pool.shutdown(wait=True)

"""Numbers that only grow on a machine, so that "the newer record" means the one that was made later even where the
wall clock was set back in between."""

from __future__ import annotations

import time

from harness.store import cache

FILE = "sequence"


def take() -> int:
    """Return the next number: milliseconds since 1970, or one more than the last number taken where the clock stands
    behind it. A lost or unreadable file costs the memory of the last one only."""
    path = cache.own() / FILE
    with cache.locked(path.with_suffix(".lock")):
        try:
            last = int(path.read_text())
        except (OSError, ValueError):
            last = 0
        number = max(last + 1, time.time_ns() // 10**6)
        cache.write_atomically(path, str(number).encode())
    return number

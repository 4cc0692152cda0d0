"""Few numbers in the place of many: from the sketches of two sets of arrays follows how far the sets lie apart.

Every entry is added, with a sign drawn for its place, to one of WIDTH sums (a count sketch). The expected square of the
distance of two sketches is the square of the distance of the arrays, with a relative standard deviation of about
sqrt(2 / WIDTH), 9 %: enough to tell a rounding from a fault. Standard library and numpy only.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

WIDTH = 256
CHUNK = 2**20
"""Entries whose places are drawn at once, so that a large array needs little memory more."""


def of(arrays: Mapping[str, np.ndarray]) -> list[float]:
    """WIDTH sums over all entries, of arrays of any shapes; the same names and shapes always draw the same places."""
    sums = np.zeros(WIDTH)
    for name in sorted(arrays):
        flat = np.asarray(arrays[name]).reshape(-1)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK].astype(np.float64)
            places = rng.integers(0, 2 * WIDTH, part.size)
            sums += np.bincount(places >> 1, weights=np.where(places & 1, part, -part), minlength=WIDTH)
    return [float(value) for value in sums]


DIGEST_WIDTH = 8
DIGEST_MARGIN = 3.0
"""Of the estimated distance of two digests, whose relative standard deviation is 25 %."""


def digest(update: np.ndarray) -> list[float]:
    """Return the length of an update and a sketch of it in DIGEST_WIDTH sums, few enough for a record."""
    sums = np.reshape(of({"update": update}), (-1, DIGEST_WIDTH)).sum(0)
    return [float(f"{value:.6g}") for value in (float(np.linalg.norm(update)), *sums)]


def differ(one: Sequence[float], other: Sequence[float], limit: float) -> bool:
    """Return whether the updates behind two digests are farther apart than ``limit``, relative to their length."""
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return True
    allowed = limit * max(a[0], b[0])
    return bool(abs(a[0] - b[0]) > allowed or np.linalg.norm(a[1:] - b[1:]) > DIGEST_MARGIN * allowed)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """|a - b| / |a|, estimated, of the arrays behind two sketches; infinite where either holds no number, or one is
    zero and the other is not."""
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    distance, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(a))
    return 0.0 if distance == 0.0 else distance / size if size else math.inf

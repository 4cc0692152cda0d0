"""The speed probe: a fixed piece of work whose seconds say how fast the machine is right now. It has nothing to do
with any framework, so a change in it is a change of the machine."""

from __future__ import annotations

import time

import numpy as np

SIZE = 384
PRODUCTS = 6
COPY_BYTES = 32 * 2**20
REPEATS = 3

_rng = np.random.default_rng(0)
_left = _rng.standard_normal((SIZE, SIZE))
_right = _rng.standard_normal((SIZE, SIZE))
_source = np.ones(COPY_BYTES, dtype=np.uint8)
_target = np.empty_like(_source)


def seconds() -> float:
    """Fastest of three: PRODUCTS float64 matrix products (arithmetic) and one copy (memory bandwidth)."""
    return min(_once() for _ in range(REPEATS))


def _once() -> float:
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        _left @ _right
    np.copyto(_target, _source)
    return time.perf_counter() - start

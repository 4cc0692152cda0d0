"""Peaks of this machine's processors: float32 arithmetic and memory traffic, measured before a run.

The report divides the arithmetic and the bytes of a task by these two figures: an implementation on the same threads is
not faster than the larger quotient. They are measured in a process of their own, because a BLAS library takes its
number of threads from the environment in which it starts, and on as many processors as a worker gets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from harness.environments import variables

SIZE = 1024
"""Size of the matrix product: large enough that arithmetic and not memory traffic takes the time."""
COPY_BYTES = 64 * 2**20
"""Bytes that each thread copies: several times the caches."""
SECONDS = 0.3
"""How long each of the two is repeated; the fastest time counts."""


@lru_cache
def measure(threads: int) -> dict[str, float] | None:
    """``flops_per_second`` of a float32 matrix product and ``bytes_per_second`` of a copy (bytes read plus bytes
    written) on ``threads`` processors; None where they could not be measured. Takes about a second."""
    environment = {**os.environ, **dict.fromkeys(variables.POOLS, str(threads))}
    done = subprocess.run(
        [sys.executable, "-m", "harness.run.peaks", str(threads)], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        return None
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _fastest(work: Callable[[], object]) -> float:
    work()  # the first touches the memory and starts the threads
    end = time.perf_counter() + SECONDS
    best = float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _measure_here(threads: int) -> dict[str, float]:
    import numpy as np

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    left = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    out = np.empty_like(left)
    product = _fastest(lambda: np.matmul(left, left, out=out))
    pairs = [(np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:  # numpy lets go of the interpreter while it copies
        copy = _fastest(lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs)))
    return {"flops_per_second": 2 * SIZE**3 / product, "bytes_per_second": 2 * COPY_BYTES * threads / copy}


if __name__ == "__main__":
    print(json.dumps(_measure_here(int(sys.argv[1]))))

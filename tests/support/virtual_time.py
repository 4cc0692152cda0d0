"""A clock on which only sleeping takes time: what a busy machine does to a sleep of milliseconds decides no test.

The clock's truth on the real machine has tests of its own (test_instrument, test_layer_run); with this one, tests of
what is concluded from seconds are the same on every machine.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest

LOOK_SECONDS = 1e-4
"""Every look at the clock takes this long, so that loops that wait for it to move come to an end."""

SPREAD = 0.02
"""Standard deviation of the logarithm of how long a sleep takes over what was asked."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces ``time.perf_counter``, ``time.sleep`` and the referee's clock in this process; other processes took no
    part of it."""
    now = 0.0
    luck = random.Random(0)

    def look() -> float:
        nonlocal now
        now += LOOK_SECONDS
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds * luck.lognormvariate(0.0, SPREAD)

    monkeypatch.setattr(time, "perf_counter", look)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr("harness.environments.referee.time", SimpleNamespace(monotonic=look))
    # Busy ticks are the kernel's, on the kernel's clock.
    monkeypatch.setattr("harness.worker.clock._cpu_seconds", lambda ranks: None)

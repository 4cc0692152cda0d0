"""The warm-up: how many steps it makes, and what it says that a later one costs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from harness.worker import measurement
from harness.worker.measurement import Measurement


def calibrated(monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> tuple[float, float, int]:
    """Calibrate where steps take these seconds, one after the other."""
    monkeypatch.setattr(measurement, "timed_steps", lambda adapter, batches: next(seconds))
    monkeypatch.setattr(measurement, "warm_up_batch", lambda *_: None)
    process = SimpleNamespace(
        emit=lambda event: None, request=SimpleNamespace(batch_size=16), setting=None, adapter=None
    )
    return Measurement.calibrate(process)  # type: ignore[arg-type]


def test_what_is_done_once_is_not_taken_for_what_a_step_costs(monkeypatch):
    """dpcore examines its first three batches, at ten times a step: with that for a step's cost, a budget of 8 s was 4
    steps, where PyTorch made 36 and was the faster for it."""
    assert calibrated(monkeypatch, iter([2.5, 2.5, 2.5, 0.25, 9.0])) == (7.75, 0.25, measurement.SETTLING_STEPS + 1)


def test_long_steps_are_made_twice(monkeypatch):
    assert calibrated(monkeypatch, iter([60.0, 20.0, 9.0])) == (80.0, 20.0, 2)

"""The warm-up: how many steps it makes, and what it says that a later one costs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.contract import Unsupported
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


def test_a_contestant_with_correlated_noise_has_no_measured_cells(monkeypatch):
    """Its steps would be compared with what independent noise leaves, and every epsilon is independent noise's."""
    adapter = SimpleNamespace(noise_factor=lambda steps: [1.0] * steps)
    monkeypatch.setattr(measurement, "load_create", lambda path: lambda variant: adapter)
    for name in ("setting_of", "starting_parameters", "require"):
        monkeypatch.setattr(measurement, name, lambda *_: None)
    request: Any = SimpleNamespace(
        task="logreg", initial_seed=0, synthetic=False, dataset_size=100, batch_size=10, folder="", variant="previous"
    )
    with pytest.raises(Unsupported, match=r"noise is correlated over steps.*the gate alone judges it"):
        Measurement(request, lambda event: None)

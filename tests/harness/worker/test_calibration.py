"""The warm-up: how many steps it makes, and what it says that a later one costs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.contract import Unsupported
from harness.tasks import TASKS
from harness.worker import measurement
from harness.worker.measurement import Measurement


def calibrated(
    monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float], turn_steps: int = 1
) -> tuple[float, float, int]:
    """Calibrate where stretches of so many steps take these seconds, one after the other."""

    def timed(adapter: object, batches: list[object]) -> float:
        assert len(batches) == turn_steps
        return next(seconds)

    monkeypatch.setattr(measurement, "timed_steps", timed)
    monkeypatch.setattr(measurement, "warm_up_batch", lambda *_: None)
    request = SimpleNamespace(batch_size=16, turn_steps=turn_steps)
    process = SimpleNamespace(emit=lambda event: None, request=request, setting=None, adapter=None)
    return Measurement.calibrate(process)  # type: ignore[arg-type]


def test_what_is_done_once_is_not_taken_for_what_a_step_costs(monkeypatch):
    """dpcore examines its first three batches, at ten times a step: with that for a step's cost, a budget of 8 s was 4
    steps, where PyTorch made 36 and was the faster for it."""
    assert calibrated(monkeypatch, iter([2.5, 2.5, 2.5, 0.25, 9.0])) == (7.75, 0.25, measurement.SETTLING_STEPS + 1)


def test_long_steps_are_made_twice(monkeypatch):
    assert calibrated(monkeypatch, iter([60.0, 20.0, 9.0])) == (80.0, 20.0, 2)


def test_steps_that_end_with_work_for_all_of_them_are_planned_from_whole_turns(monkeypatch):
    """A flush of dpcore's lazy tables takes as long as fifty steps: with one for each a turn would be one step."""
    assert calibrated(monkeypatch, iter([16.0, 0.25]), turn_steps=128) == (16.25, 0.25 / 128, 256)


def planned(task: str = "logreg", **more: Any) -> Measurement:
    """Return a process that has not begun."""
    found = Measurement.__new__(Measurement)
    found.task = TASKS[task]
    found.request = SimpleNamespace(  # type: ignore[assignment]
        **{"turn_seconds": 0.1, "turn_steps": 1, "steps": None, "budget_seconds": 6.0, "epochs": 1} | more
    )
    found.whole_epoch = 625
    return found


@pytest.mark.parametrize(
    ("least", "step_seconds", "turn", "uncounted"),
    [(1, 0.06, 2, 0), (1, 0.01, 10, 1), (128, 0.06, 128, 0), (128, 1e-4, 1000, 0)],
)
def test_a_turn_has_its_least_steps_of_which_all_are_counted(least, step_seconds, turn, uncounted):
    process = planned(turn_steps=least)
    assert (process.turn(step_seconds), process.uncounted(turn)) == (turn, uncounted)


def test_there_are_no_more_steps_than_a_replay_reads_weights():
    small, large = planned(), planned("recsys-1m")
    assert (small.steps(2e-3), small.epochs(2e-3)) == (625, 4)
    assert (large.steps(2e-3), large.epochs(2e-3)) == (625, 1)
    large.whole_epoch = 10_000
    assert large.steps(2e-3) * large.task.weight_bytes <= measurement.MOST_READ
    assert large.steps(60.0) == measurement.MINIMUM_STEPS


def test_beside_the_first_steps_there_is_a_whole_turn():
    assert planned(turn_steps=128).steps(60.0) == measurement.MINIMUM_STEPS + 128


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

"""The replay of a contestant whose ``synchronize`` does work for all steps before it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from harness.contract import Setting
from harness.tasks import TASKS, Task
from harness.worker.batches import setting_of
from harness.worker.clock import Batch
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import pool as gate_pool
from harness.worker.measurement import Measurement
from harness.worker.replay import replay
from tests.support.gate_numpy import Exact, Values
from tests.support.timed_request import timed_request

TASK = TASKS["logreg"]
BATCH = 16
ENDS = (4, 9, 12)
HALT = 9
REQUEST = timed_request(TASK, BATCH, TASK.learning_rate)


class Later(Exact):
    """Draws one number for the noise of all steps since ``synchronize``: equal in law, and never the same numbers."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.made = self.waiting = 0

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.made, self.waiting = self.made + 1, self.waiting + 1
        super().step(indices, mask)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape)

    def synchronize(self) -> None:
        s = self.setting
        unit = s.learning_rate / s.batch_size * s.noise_multiplier * s.max_grad_norm * self.waiting**0.5
        rng = np.random.default_rng([s.seed, self.made, self.waiting])
        self.waiting = 0
        for name, value in self.weights.items():
            self.weights[name] = (value - unit * rng.standard_normal(value.shape)).astype(np.float32)


def replayed(turn_steps: int) -> tuple[dict[str, np.ndarray], list[Batch]]:
    """Return what the replay of stretches that end at ENDS leaves, and their batches."""
    m = Measurement.__new__(Measurement)
    m.request, m.task, m.adapter = dataclasses.replace(REQUEST, turn_steps=turn_steps), TASK, Later()
    m.setting, m.initial = setting_of(m.request), gate_cases.starting_weights(TASK)
    rng = np.random.default_rng(7)
    batches: list[Batch] = [(rng.choice(gate_pool.POOL_SIZE, BATCH, replace=False), None) for _ in range(ENDS[-1])]
    m.adapter.build(TASK, m.setting, m.initial)
    m.adapter.place(*gate_pool.pool(TASK))
    weights = []
    for t, (rows, mask) in enumerate(batches):
        m.adapter.step(rows, mask)
        if t + 1 in ENDS:
            m.adapter.synchronize()
        if t + 1 in (HALT, ENDS[-1]):
            weights.append(dict(m.adapter.parameters()))
    return replay(m, batches, HALT, *weights, ends=ENDS), batches


@pytest.mark.parametrize("turn_steps", [1, 128])
def test_it_waits_where_the_clock_stopped(turn_steps: int) -> None:
    """Else whoever's noise depends on where that was is rejected, though it made the same steps."""
    found, _ = replayed(turn_steps)
    for where in ("", "_end"):
        same = [np.array_equal(found[f"timed{where}/{n}"], found[f"replayed{where}/{n}"]) for n in TASK.parameters]
        assert all(same) is (turn_steps > 1)


def test_the_steps_in_detail_are_single_ones_with_the_noise_of_one() -> None:
    found, batches = replayed(128)
    numbers = [int(number) for number in found["numbers"]]
    assert {HALT - 1, len(batches) - 1} <= set(numbers) and found["jump"][0] < 1.0
    for i, number in enumerate(numbers):
        np.testing.assert_array_equal(found[f"{i}/rows"], batches[number][0])
    moved = [found[f"{i}/after/{n}"] - found[f"{i}/before/{n}"] for i in range(len(numbers)) for n in TASK.parameters]
    unit = TASK.learning_rate / BATCH * REQUEST.noise_multiplier
    assert all(0.5 * unit < np.abs(each).max() < 8 * unit for each in moved if each.size > 1)

"""Many steps of the task's own AdamW against AdamW in float64.

Its update hides the gradient that it gets, and with the task's own eps the truth cannot be told beforehand, for what a
step does depends on its noise. So the noise is read off first, from a run with the same seed whose optimizer hides
nothing, and AdamW is written out here with it. Ends of epochs, empty batches, batches that adapters take in pieces and
the steps after the warm-up come by meanwhile. Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.contract import Setting
from harness.optimizer import AdamW
from harness.tasks import Task
from harness.worker.gate import cases as gate_cases
from harness.worker.gate.driver import Driver
from harness.worker.gate.noise import Score

CHECK = "update: the task's own AdamW"
STEPS = (43, 130)
"""The fewer where the trained values are more than MOST_VALUES, whose steps take long. The other number is beyond the
warm-up of every task."""
MOST_VALUES = 4_000_000
WINDOW = 5
"""So many steps are compared together, but for the first ones: there an update is little more than a sign."""
COORDINATES = 2**16
"""So many of the trained values are followed at most: AdamW takes each by itself."""
PIECES = 128
"""Rows, without a gradient, of a batch that adapters take in pieces."""
REAL_STEPS = 3
"""Steps with a gradient, at places that are drawn."""
SLACK = 10.0
"""On the tolerance of an update, for as many steps as AdamW remembers."""
FIXED = 30.0
"""Weights beyond it do not move by a rate of AdamW: float32 is too coarse there."""


def applies(task: Task | None, private: bool) -> bool:
    """Return whether a task has such steps: without noise they would be signs, which rounding decides."""
    return private and task is not None and isinstance(task.optimizer, AdamW)


def own_steps(driver: Driver) -> Score:
    """Return the relative error of the steps that are farthest from what they ought to be."""
    steps = STEPS[driver.task.trained_count <= MOST_VALUES]
    real = {int(t) for t in driver.rng.choice(np.arange(WINDOW, steps), REAL_STEPS, replace=False)}
    batches = _batches(driver, steps, real)
    start = driver.starts[True]
    places = np.unique(np.linspace(0, start.size - 1, min(start.size, COORDINATES)).astype(np.int64))
    places = places[np.abs(start[places]) < FIXED]
    noise = _noise(driver, batches, real, places)
    setting = driver.build_own(saturated=True)
    weights = [start[places]]
    sums: dict[int, np.ndarray] = {}
    before: dict[int, dict[str, np.ndarray]] = {}
    for t, batch in enumerate(batches):
        if t in real:
            before[t] = dict(driver.adapter.parameters())
        driver.adapter.step(*batch)
        driver.adapter.synchronize()
        if (t + 1) % WINDOW == 0:
            weights.append(driver.weights()[places])
    for t, values in before.items():
        sums[t] = driver.sum_at(values, batches[t], setting.max_grad_norm)[places]
    deviation = setting.noise_multiplier * setting.max_grad_norm
    gradients = [(deviation * z + sums.get(t, 0.0)) / setting.batch_size for t, z in enumerate(noise)]
    expected = [weights[0]]
    for t, after in enumerate(adamw(setting, weights[0], gradients), start=1):
        if t % WINDOW == 0:
            expected.append(after)
    return _compared(weights, expected)


def adamw(setting: Setting, weights: np.ndarray, gradients: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the weights after each step, float64. Written out after the paper."""
    constants = setting.optimizer
    assert isinstance(constants, AdamW)
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for step, gradient in enumerate(gradients, start=1):
        mean = constants.beta1 * mean + (1 - constants.beta1) * gradient
        square = constants.beta2 * square + (1 - constants.beta2) * gradient**2
        rate = setting.learning_rate * constants.share(step)
        root = np.sqrt(square / (1 - constants.beta2**step)) + constants.eps
        weights = weights - rate * constants.weight_decay * weights
        weights = weights - rate * (mean / (1 - constants.beta1**step)) / root
        yield weights


def _batches(driver: Driver, steps: int, real: set[int]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    zero = gate_cases.zero_gradient_rows(driver.task)
    some = driver.cases["some clipped"].batches[0]
    found = []
    for t in range(steps):
        rows, repeats = (zero if t % 8 == 1 else zero[:0]), 1
        if t in real:
            rows = some
        elif t == 1 and driver.sizes[1] >= PIECES:
            repeats = PIECES // len(zero)
        found.append(driver.batch(rows, repeats))
    return found


def _noise(
    driver: Driver, batches: list[tuple[np.ndarray, np.ndarray | None]], real: set[int], places: np.ndarray
) -> list[np.ndarray]:
    """Return the noise of every step, in standard deviations, as the gate's own optimizer shows it."""
    before, rate, deviation = driver.build_noise(driver.seed)
    found = []
    starts: dict[int, dict[str, np.ndarray]] = {}
    for t, batch in enumerate(batches):
        if t in real:
            starts[t] = dict(driver.adapter.parameters())
        driver.adapter.step(*batch)
        driver.adapter.synchronize()
        after = driver.weights()
        found.append((before - after)[places] / rate / deviation)
        before = after
    for t, values in starts.items():
        found[t] -= driver.sum_at(values, batches[t], driver.norm)[places] / deviation
    return found


def _compared(weights: list[np.ndarray], expected: list[np.ndarray]) -> Score:
    """The first window is left out."""
    worst = Score(0.0, 1.0, "")
    for i in range(1, len(weights) - 1):
        moved, wanted = weights[i] - weights[i + 1], expected[i] - expected[i + 1]
        size = float(np.linalg.norm(wanted))
        rounding = WINDOW * 2.0**-24 * float(np.linalg.norm(weights[i]))
        limit = SLACK * gate_cases.TOLERANCE + rounding / size
        error = float(np.linalg.norm(moved - wanted)) / size
        if not error / limit <= worst.value / worst.limit:
            worst = Score(error, limit, f"relative L2 error, worst in steps {i * WINDOW + 1} to {(i + 1) * WINDOW}")
    return worst

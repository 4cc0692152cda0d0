"""The noise in the timed path: of many steps without a gradient, and what is left of steps that have one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from harness.tasks import FLOAT32
from harness.worker.clock import timed_steps
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import correlation
from harness.worker.gate import noise as gate_noise
from harness.worker.gate.cases import TOLERANCE, Case
from harness.worker.gate.check import FINDING, Check, check, scored
from harness.worker.gate.driver import NOISE_MULTIPLIER, Driver
from harness.worker.gate.noise import Score

SEED_DISTANCES = (1, 27_720, 2**16)
"""From one seed to others that must not share its noise: 27,720 is divisible by every number up to 12, and 2^16 by
every power of two up to it, so that a stream which depends on little of the seed repeats itself."""
NOISE_VALUES = 10_000_000
NOISE_STEPS = (42, 6144)
"""Least and most steps; between them, as many as give NOISE_VALUES values."""
ALTERNATING_STEPS = 256
"""Steps that are on empty batches and on examples with p = 1 by turns; later ones are empty."""
PAIRED_STEPS = 1024
"""The last steps, of which every two are compared."""
OTHER_VALUES = 4_000
OTHER_STEPS = 4
"""Taken of a run with another seed: at least so many values and steps."""
REPRODUCED_STEPS = 8
BURST_STEPS, BURSTS = 24, (2, 64)
"""Steps that nobody pauses or looks at, as under the clock; least and most such bursts, as many as give OTHER_VALUES
values. More steps than dpcore's lazy tables draw one by one."""
COORDINATE_VALUES = 8_000_000
REAL_NOISE_MULTIPLIER = 0.02
"""Chosen so small that a wrong gradient under the noise would show."""
REAL_NOISE_CASES = ("some clipped", "none clipped", "all clipped", f"{gate_cases.MOST_ROWS} rows")
REAL_NOISE_VALUES = 1_500
"""Values of noise that are looked at on every such batch, by as many seeds as that takes."""
REAL_NOISE_STEPS = 4
"""Steps on each such batch where noise is correlated over them: the later ones have what earlier ones leave."""
STATED = f"{FINDING}its noise is correlated over steps, and judged by the factor that it states; "
REPRODUCTION_LIMIT = 1e-6
NOISE_CHECKS = (
    "mean 0",
    "standard deviation sigma C / B",
    "on empty batches",
    "on zero gradients",
    "normal",
    "tails",
    "fine enough",
    "independent coordinates",
    "no coordinates alike",
    "independent at all shifts",
    "independent steps",
    "no step comes again",
    "fresh per seed",
    "same seed, same noise",
    "on real batches",
    "on a large batch",
)


def _noise_run(driver: Driver, seed: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """([steps, parameters], [parameters]): noise in units of its nominal standard deviation, from batches without
    gradient: empty ones in even steps, examples with p = 1 in odd ones; and how coarsely float32 tells that of the
    first NOISE_STEPS[0] steps. Noise that is correlated over steps is made white by the factor that is stated for it,
    and is judged as any other: what its factor does not explain shows."""
    before, rate, deviation = driver.build_noise(seed)
    unit = rate * deviation
    zero = gate_cases.zero_gradient_rows(driver.task)
    found = np.empty((steps, before.size), dtype=np.float32)
    largest = np.abs(before)
    steady = min(steps, NOISE_STEPS[0]) - 1
    for t in range(steps):
        driver.step(zero if t % 2 and t < ALTERNATING_STEPS else zero[:0])
        after = driver.weights()
        found[t] = (before - after) / unit
        before = after
        if t == steady:
            largest = np.maximum(largest, np.abs(after))
    return correlation.white(found, _factor(driver, steps)), np.spacing(largest.astype(np.float32)) / unit


def _burst_run(driver: Driver, seed: int) -> np.ndarray:
    """[bursts, parameters]: the sum of a burst's noise in units of its nominal standard deviation. The first half of
    its steps is on empty batches, the other on examples with p = 1, whose rows of tables are read anew."""
    before, rate, deviation = driver.build_noise(seed)
    unit = rate * deviation * math.sqrt(BURST_STEPS)
    zero = gate_cases.zero_gradient_rows(driver.task)
    found = []
    for _ in range(int(np.clip(math.ceil(OTHER_VALUES / before.size), *BURSTS))):
        timed_steps(
            driver.adapter, [driver.batch(zero[: len(zero) * (2 * t // BURST_STEPS)]) for t in range(BURST_STEPS)]
        )
        after = driver.weights()
        found.append((before - after) / unit)
        before = after
    return np.array(found)


def _factor(driver: Driver, steps: int) -> np.ndarray | None:
    return correlation.factor(driver.adapter.noise_factor(steps), steps)


def noise_checks(driver: Driver) -> Iterator[Check]:
    parameters = driver.task.trained_count
    steps = int(np.clip(math.ceil(NOISE_VALUES / parameters), *NOISE_STEPS))
    z, grid = _noise_run(driver, driver.seed, steps)
    mean, spread = gate_noise.moments(z, driver.slices, 2)
    if _factor(driver, steps) is None:
        bursts = gate_noise.moments(_burst_run(driver, driver.other_seed), driver.slices, 2)
        told_bursts = [dataclasses.replace(b, where=f"{BURST_STEPS} steps at once, {b.where}") for b in bursts]
        mean, spread = gate_noise.worst([mean, told_bursts[0]]), gate_noise.worst([spread, told_bursts[1]])
    yield scored("noise: mean 0", mean)
    deviation = math.sqrt(np.square(z).mean(dtype=np.float64))
    told = "" if _factor(driver, steps) is None else STATED
    spread = dataclasses.replace(spread, where=f"{told}{spread.where}; overall {deviation:.4f} of sigma C / B")
    yield scored("noise: standard deviation sigma C / B", spread)
    for name, rows in (("empty batches", z[::2]), ("zero gradients", z[1:ALTERNATING_STEPS:2])):
        score = gate_noise.largest({name: gate_noise.spread_score(rows)})
        yield scored(f"noise: on {name}", score)
    yield scored("noise: normal", gate_noise.normality(z))
    yield scored("noise: tails", gate_noise.tails(z))
    yield scored("noise: fine enough", gate_noise.fineness(z[: NOISE_STEPS[0]], grid))
    some = z[: max(OTHER_STEPS, COORDINATE_VALUES // parameters)]
    yield scored(
        "noise: independent coordinates",
        gate_noise.independent_coordinates(some, driver.slices, driver.task.parameters),
    )
    yield scored("noise: no coordinates alike", gate_noise.alike(z, driver.slices))
    yield scored("noise: independent at all shifts", gate_noise.independent_shifts(z))
    yield scored("noise: independent steps", gate_noise.independent_steps(z[-PAIRED_STEPS:], driver.slices))
    yield scored("noise: no step comes again", gate_noise.repeated(z, driver.slices))
    fewer = max(OTHER_STEPS, math.ceil(OTHER_VALUES / parameters))
    seeds = [driver.other_seed, *(driver.seed + distance for distance in SEED_DISTANCES)]
    runs = {seed: _noise_run(driver, seed, fewer)[0] for seed in seeds}
    score = gate_noise.independent_runs(z, runs, driver.slices)
    listed = ", ".join(map(str, [driver.seed, *seeds]))
    yield scored("noise: fresh per seed", dataclasses.replace(score, where=f"{score.where}; seeds {listed}"))
    again, _ = _noise_run(driver, driver.seed, REPRODUCED_STEPS)
    error = float(np.linalg.norm(again - z[:REPRODUCED_STEPS])) / math.sqrt(again.size)
    detail = f"{REPRODUCED_STEPS} steps, in standard deviations"
    yield check("noise: same seed, same noise", error, REPRODUCTION_LIMIT, detail)


def real_noise_check(driver: Driver) -> Iterator[Check]:
    """The update under little noise, less the float64 truth, is that noise: mean, spread, and no remainder in the
    direction of the update. Noise that follows the norms of the examples, or their number, does so here. Where
    products are rounded to fewer bits, that would drown the noise: there the same step without noise is taken off,
    which another check has held against the truth. So it is off later steps, at their own weights, where noise is
    correlated."""
    known = [*driver.cases.values(), *gate_cases.size_cases(driver.task, driver.reference)]
    cases = [case for case in known if case.name in REAL_NOISE_CASES]
    streams = range(1, 1 + math.ceil(REAL_NOISE_VALUES / driver.task.trained_count))
    scores = []
    for case in cases:
        rows = case.batches[0]
        expected = driver.truth(case) if driver.task.precision == FLOAT32 else driver.single_step(rows)
        if _factor(driver, REAL_NOISE_STEPS) is None:
            steps = np.stack([noisy_step(driver, case, REAL_NOISE_MULTIPLIER, rows, stream) for stream in streams])
            noise = steps - expected
        else:
            runs = [_correlated_steps(driver, case, REAL_NOISE_MULTIPLIER, expected, stream) for stream in streams]
            noise, expected = (np.concatenate(parts) for parts in zip(*runs, strict=True))
        scores.append(residual(driver, case, REAL_NOISE_MULTIPLIER, noise, expected, len(cases)))
    yield scored("noise: on real batches", gate_noise.worst(scores))


def residual(
    driver: Driver, case: Case, multiplier: float, noise: np.ndarray, expected: np.ndarray, batches: int = 1
) -> Score:
    """Score what the displacements by noisy steps are beside the expected ones, or the one of all; ``batches``: how
    many such scores a check takes."""
    unit = case.learning_rate / (case.batch_size * case.repeats) * multiplier * case.max_grad_norm
    z = noise / unit
    directions = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    along = float((z * directions).sum() / math.sqrt(len(z)))
    mean, spread = gate_noise.moments(z, driver.slices, 3 * batches)
    score = gate_noise.worst([mean, spread, gate_noise.largest({"along the update": along}, 3 * batches)])
    rows = len(case.batches[0]) * case.repeats
    return dataclasses.replace(score, where=f"sigma {multiplier:g}, {case.name}, {rows} rows; {score.where}")


def _correlated_steps(
    driver: Driver, case: Case, multiplier: float, expected: np.ndarray, stream: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (noise made white, updates without it), [steps, parameters], of a run on the rows of one batch: the first
    update as it is expected, and those of later weights as the adapter itself computes them."""
    rows, weights = case.batches[0], [driver.starts[case.saturated]]
    updates, values = [expected], []
    noisy_step(driver, case, multiplier, rows, stream)
    for _ in range(REAL_NOISE_STEPS - 1):
        values.append({name: np.array(value) for name, value in driver.adapter.parameters().items()})
        weights.append(driver.weights())
        driver.step(rows, case.repeats)
    weights.append(driver.weights())
    scale = case.learning_rate / (case.batch_size * case.repeats)
    updates += [scale * driver.sum_at(v, driver.batch(rows, case.repeats), case.max_grad_norm) for v in values]
    noise = -np.diff(weights, axis=0) - np.stack(updates)
    return correlation.white(noise, _factor(driver, REAL_NOISE_STEPS)), np.stack(updates)


def noisy_step(driver: Driver, case: Case, multiplier: float, rows: np.ndarray, stream: int = 0) -> np.ndarray:
    """Return the displacement by one step with noise on these rows."""
    divisor = case.batch_size * case.repeats
    seed = driver.seed + case.repeats + 64 * stream  # a stream of its own for each
    start = driver.build(divisor, case.learning_rate, case.max_grad_norm, multiplier, seed)
    driver.step(rows, case.repeats)
    return start - driver.weights()


def no_noise_check(driver: Driver) -> Iterator[Check]:
    rows = next(iter(driver.cases.values())).batches[0]
    first = driver.single_step(rows)
    start = driver.build(seed=driver.other_seed)
    driver.step(rows)
    error = float(np.linalg.norm(start - driver.weights() - first) / np.linalg.norm(first))
    yield check("no noise", error, TOLERANCE, "same step, other seed: relative change of the update")


class LargeBatch:
    """The batch of that name, which adapters take in several pieces. It has so many rows that its step is made once,
    for its update and for its noise."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.case = driver.cases["large batch"]
        self._moved: np.ndarray | None = None

    def update(self, expected: np.ndarray, limit: float) -> np.ndarray:
        """Return its displacement without noise. Where a step without rows has the same noise, that is the difference
        of the two, if it is right within ``limit``; elsewhere it is a step of its own."""
        if self.driver.setting.private:
            found = self._with_noise() - noisy_step(self.driver, self.case, NOISE_MULTIPLIER, self.case.batches[0][:0])
            if float(np.linalg.norm(found - expected)) <= limit * float(np.linalg.norm(expected)):
                return found
        return self.driver.displacement(self.case)

    def _with_noise(self) -> np.ndarray:
        if self._moved is None:
            self._moved = noisy_step(self.driver, self.case, NOISE_MULTIPLIER, self.case.batches[0])
        return self._moved

    def noise(self) -> Iterator[Check]:
        """Of a batch in several pieces noise is added once, and added."""
        expected = self.driver.truth(self.case)
        noise = self._with_noise()[None] - expected
        score = residual(self.driver, self.case, NOISE_MULTIPLIER, noise, expected)
        yield scored("noise: on a large batch", score)

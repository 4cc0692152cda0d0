"""The admission gate: what an adapter does in its timed path against what DP-SGD is.

Runs inside the worker, in the framework's environment; drives ``build``, ``place``, ``step``, ``synchronize`` and
``parameters`` only, so that what is checked is what is timed. Standard library and numpy only.

Every verdict is an ``error`` and a ``limit`` in the check's own measure and passes if error <= limit; an error that is
not a number fails.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from harness import gate_cases, gate_noise, sampling
from harness.clock import Batch, timed_steps
from harness.contract import Adapter, Setting, Unsupported
from harness.gate_cases import BATCH, LARGE_ROWS, Case
from harness.gate_noise import Score
from harness.tasks import Task, check_parameters

Check = dict[str, Any]
"""The fields of ``record.GateCheck``."""

TOLERANCE = {"float64": 2e-5, "float32": 5e-5, "tf32": 5e-3, "float16": 1e-2, "bfloat16": 3e-2}
"""Relative L2 error of an update. Float32 arithmetic gives 1e-7 to 1e-5; the rest is room for clip factors with a
margin, C/(|g| + 1e-6) or C(1 - 2^-16)/|g|, which are right too."""

TENSOR_SLACK = 20.0
TENSOR_FLOOR = 1e-3
"""A parameter tensor whose share of the update is smaller than this is measured against this share."""

SENSITIVITY_MARGIN = 1e-4

NOISE_MULTIPLIER = 1.5
"""Not the 1.1 of the protocols, lest a constant pass."""
NOISE_SEEDS = (101, 202)
NOISE_RATE = BATCH / 64
NOISE_VALUES = 200_000
NOISE_STEPS = (4, 64)
"""Least and most steps; between them, as many as give NOISE_VALUES values."""
REAL_NOISE_MULTIPLIER = 0.02
"""So little that a wrong gradient under the noise would show."""
REPRODUCTION_LIMIT = 1e-6

REPLAY_SIZES = (16, 5, 0, 12, 1, 16, 9, 14)
REPLAY_RATE = BATCH / 4096
REPLAY_LIMIT = 1e-4
"""The difference is zero where kernels are deterministic; atomic adds on a GPU change the order of sums, which eight
steps then amplify."""

DEFERRED_LIMIT = 0.5
DEFERRED_ATTEMPTS = 3

BUDGET_BELOW = 1e-3
BUDGET_ABOVE = (1.02, 0.02)


def run_gate(
    create: Callable[[], Adapter],
    task: Task,
    setting: Setting,
    static_shapes: bool,
    reference: Mapping[str, np.ndarray],
    budget: Mapping[str, float] | None = None,
) -> list[Check]:
    """All checks of one adapter on one task, as a list; arguments of :func:`checks`."""
    return list(checks(create, task, setting, static_shapes, reference, budget))


def checks(
    create: Callable[[], Adapter],
    task: Task,
    setting: Setting,
    static_shapes: bool,
    reference: Mapping[str, np.ndarray],
    budget: Mapping[str, float] | None = None,
) -> Iterator[Check]:
    """Yields each check as soon as it is known.

    ``setting``: the cell's own; device, threads, precision and the budget check come from it. ``reference``: what
    ``frameworks.reference`` stored for the task. ``budget``: ``steps``, ``delta`` and the ε of the two judges, ``rdp``
    and ``pld``, for ``setting``. An exception in the adapter fails the check it fell into; :class:`Unsupported` goes
    through.
    """
    driver = Driver(create(), task, setting, static_shapes, reference)
    yield from _guarded("parameters", driver.parameter_checks)
    for case in driver.cases:
        yield from _guarded(f"update: {case.name}", functools.partial(driver.update_check, case))
    yield from _guarded("update: worst tensor", driver.worst_tensor_check)
    if setting.private:
        yield from _guarded("sensitivity", driver.sensitivity_check)
        yield from _guarded("noise", driver.noise_checks)
        yield from _guarded("noise: on a real batch", driver.real_noise_check)
    else:
        yield from _guarded("no noise", driver.no_noise_check)
    yield from _guarded("timed = replayed", driver.replay_check)
    yield from _guarded("deferred work", driver.deferred_check)
    if setting.private and budget is not None:
        yield from _guarded("budget", functools.partial(driver.budget_check, budget))


def _guarded(name: str, run: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from run()
    except (Unsupported, MemoryError):
        raise
    except Exception as error:
        yield _check(name, None, None, f"raised {type(error).__name__}: {error}"[:500])


def _check(name: str, error: float | None, limit: float | None, detail: str = "") -> Check:
    if error is not None and not math.isfinite(error):
        error, detail = None, f"not finite; {detail}"
    passed = error is not None and limit is not None and bool(error <= limit)
    return {
        "check": name,
        "error": None if error is None else float(error),
        "limit": None if limit is None else float(limit),
        "passed": passed,
        "detail": detail,
    }


def _scored(name: str, score: Score) -> Check:
    return _check(name, score.value, score.limit, score.where)


class Driver:
    """An adapter with the gate's data; measures displacements as flat float64 vectors over all parameters."""

    def __init__(
        self, adapter: Adapter, task: Task, setting: Setting, static: bool, reference: Mapping[str, np.ndarray]
    ) -> None:
        self.adapter = adapter
        self.task = task
        self.setting = setting
        self.static = static
        self.reference = reference
        self.cases = gate_cases.cases(task, reference, setting.private)
        self.norm = gate_cases.clipping_norm(reference)
        self.tolerance = TOLERANCE[setting.precision]
        self.slices: dict[str, slice] = {}
        end = 0
        for name, shape in task.parameters.items():
            self.slices[name] = slice(end, end + math.prod(shape))
            end = self.slices[name].stop
        self.starts = {key: self._flat(gate_cases.starting_weights(task, key)) for key in (False, True)}
        self.updates: dict[bytes, np.ndarray] = {}
        """Measured displacements of single steps at the gate's ordinary setting, by their rows."""
        self.worst = Score(0.0, 0.0, "")
        self.placed = False

    # -- driving ------------------------------------------------------------------------------------------------

    def _flat(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([np.asarray(values[name], dtype=np.float64).ravel() for name in self.slices])

    def weights(self) -> np.ndarray:
        return self._flat(self.adapter.parameters())

    def build(
        self,
        batch_size: int = BATCH,
        learning_rate: float = float(BATCH),
        max_grad_norm: float | None = None,
        noise_multiplier: float = 0.0,
        seed: int = NOISE_SEEDS[0],
        saturated: bool = False,
    ) -> np.ndarray:
        """Back to the starting weights, which it returns."""
        setting = dataclasses.replace(
            self.setting,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_grad_norm=self.norm if max_grad_norm is None else max_grad_norm,
            noise_multiplier=noise_multiplier,
            seed=seed,
            padded_sizes=(BATCH, LARGE_ROWS) if self.static else (),
        )
        self.adapter.build(self.task, setting, gate_cases.starting_weights(self.task, saturated))
        if not self.placed:
            self.adapter.place(*gate_cases.placed(self.task))
            self.placed = True
        return self.starts[saturated]

    def batch(self, rows: np.ndarray) -> Batch:
        return sampling.pad(rows, (BATCH, LARGE_ROWS)) if self.static else (rows, None)

    def step(self, rows: np.ndarray) -> None:
        self.adapter.step(*self.batch(rows))
        self.adapter.synchronize()

    def displacement(self, case: Case) -> np.ndarray:
        """Starting minus final weights of a case, without noise."""
        divisor = case.batch_size * case.repeats
        start = self.build(divisor, case.learning_rate, case.max_grad_norm, saturated=case.saturated)
        for rows in case.driven_batches:
            self.step(rows)
        return start - self.weights()

    def single_step(self, rows: np.ndarray) -> np.ndarray:
        """Displacement of one step at the ordinary setting, where it is the (clipped) sum itself."""
        key = rows.tobytes()
        if key not in self.updates:
            self.updates[key] = self.displacement(Case("", (rows,), self.norm))
        return self.updates[key]

    # -- checks ---------------------------------------------------------------------------------------------------

    def parameter_checks(self) -> Iterator[Check]:
        self.build()
        values = self.adapter.parameters()
        fault = check_parameters(self.task, values)
        count = sum(value.size for value in values.values())
        yield _check(
            "parameters: names, shapes, count",
            abs(count - self.task.parameter_count) + (fault is not None),
            0.0,
            fault or f"{count} parameters",
        )
        if fault is None:
            worst = float(np.abs(self._flat(values) - self.starts[False]).max())
            yield _check("parameters: as given to build", worst, 0.0, "largest difference of any weight")

    def update_check(self, case: Case) -> Iterator[Check]:
        """Relative L2 error over all parameters. To the tolerance comes the float32 rounding of the weights that move,
        at most half a unit in the last place, 2^-24 |w|, at every step."""
        truth = gate_cases.truth_name(case, self.setting.private)
        expected = self._flat(gate_cases.unpack(truth, self.task, self.reference))
        found = self.displacement(case)
        if (
            len(case.batches) == 1
            and not case.saturated
            and case.batch_size == BATCH
            and case.max_grad_norm == self.norm
        ):
            self.updates[case.batches[0].tobytes()] = found
        size = float(np.linalg.norm(expected))
        error = float(np.linalg.norm(found - expected))
        if size == 0.0:
            # |g| = 1 would move the weights by learning_rate / batch_size.
            unit = case.learning_rate / case.batch_size
            detail = "must not move; measured in units of |g|"
            yield _check(f"update: {case.name}", error / unit, REPRODUCTION_LIMIT, detail)
            return
        touched = expected != 0
        moved = np.where(touched, self.starts[case.saturated], 0.0)
        rounding = len(case.batches) * 2.0**-24 * moved
        limit = case.slack * self.tolerance + float(np.linalg.norm(rounding)) / size
        if len(case.batches) == 1:
            self._note_tensors(case, found - expected, expected, rounding)
        yield _check(
            f"update: {case.name}",
            error / size,
            limit,
            f"relative L2 error; rows {', '.join(str(len(b)) for b in case.batches)}, C {case.max_grad_norm:.4g}, "
            f"|update| {size:.4g}",
        )

    def _note_tensors(self, case: Case, difference: np.ndarray, expected: np.ndarray, rounding: np.ndarray) -> None:
        """Keeps the worst ratio of a tensor's error to its own limit."""
        floor = TENSOR_FLOOR * float(np.linalg.norm(expected))
        for name, part in self.slices.items():
            size = max(floor, float(np.linalg.norm(expected[part])))
            limit = TENSOR_SLACK * self.tolerance + float(np.linalg.norm(rounding[part])) / size
            error = float(np.linalg.norm(difference[part])) / size
            error = math.inf if math.isnan(error) else error
            if error / limit > self.worst.value / (self.worst.limit or 1.0):
                self.worst = Score(error, limit, f"{name} in {case.name}")

    def worst_tensor_check(self) -> Iterator[Check]:
        yield _check(
            "update: worst tensor", self.worst.value, self.worst.limit, f"relative L2 error of {self.worst.where}"
        )

    def sensitivity_check(self) -> Iterator[Check]:
        ratios = {}
        for name, fewer, more in gate_cases.sensitivity_pairs(self.task, self.reference):
            moved = self.single_step(more) - self.single_step(fewer)
            ratios[name] = float(np.linalg.norm(moved)) / self.norm
        where = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name])
        # Each of the two sums carries its own rounding of the weights.
        rounding = 2 * 2.0**-24 * float(np.linalg.norm(self.starts[False])) / self.norm
        limit = 1.0 + max(SENSITIVITY_MARGIN, self.tolerance) + rounding
        yield _check("sensitivity", ratios[where], limit, f"|change of the sum| / C, worst for {where}")

    def _noise_run(self, seed: int, steps: int) -> np.ndarray:
        """[steps, parameters]: noise in units of its nominal standard deviation, from batches without gradient: empty
        ones in even steps, examples with p = 1 in odd ones."""
        before = self.build(learning_rate=NOISE_RATE, noise_multiplier=NOISE_MULTIPLIER, seed=seed, saturated=True)
        zero = gate_cases.zero_gradient_rows(self.task)
        found = np.empty((steps, before.size))
        for t in range(steps):
            self.step(zero if t % 2 else zero[:0])
            after = self.weights()
            found[t] = before - after
            before = after
        return found / (NOISE_RATE / BATCH * NOISE_MULTIPLIER * self.norm)

    def noise_checks(self) -> Iterator[Check]:
        steps = int(np.clip(math.ceil(NOISE_VALUES / self.task.parameter_count), *NOISE_STEPS))
        z = self._noise_run(NOISE_SEEDS[0], steps)
        mean, spread = gate_noise.moments(z, self.slices)
        yield _scored("noise: mean 0", mean)
        deviation = float(np.sqrt(np.square(z).mean()))
        spread = dataclasses.replace(spread, where=f"{spread.where}; overall {deviation:.4f} of sigma C / B")
        yield _scored("noise: standard deviation sigma C / B", spread)
        for name, rows in (("empty batches", z[::2]), ("zero gradients", z[1::2])):
            score = gate_noise.largest({name: gate_noise.spread_score(rows)})
            yield _scored(f"noise: on {name}", score)
        yield _scored("noise: normal", gate_noise.normality(z))
        yield _scored(
            "noise: independent coordinates", gate_noise.independent_coordinates(z, self.slices, self.task.parameters)
        )
        yield _scored("noise: independent steps", gate_noise.independent_steps(z))
        yield _scored("noise: fresh per seed", gate_noise.independent_runs(z, self._noise_run(NOISE_SEEDS[1], steps)))
        again = self._noise_run(NOISE_SEEDS[0], steps)
        error = float(np.linalg.norm(again - z)) / math.sqrt(z.size)
        yield _check(
            "noise: same seed, same noise", error, REPRODUCTION_LIMIT, f"{steps} steps, in standard deviations"
        )

    def real_noise_check(self) -> Iterator[Check]:
        """The update under little noise, less the float64 truth, is that noise: mean, spread, and no remainder in the
        direction of the update."""
        case = next(case for case in self.cases if case.name == "some clipped")
        expected = self._flat(gate_cases.unpack(gate_cases.truth_name(case, True), self.task, self.reference))
        multiplier = max(REAL_NOISE_MULTIPLIER, 10 * self.tolerance)
        start = self.build(noise_multiplier=multiplier)
        self.step(case.batches[0])
        z = (start - self.weights() - expected)[None] / (multiplier * self.norm)
        mean, spread = gate_noise.moments(z, self.slices)
        direction = expected / np.linalg.norm(expected)
        scores = {
            f"mean, {mean.where}": mean.value,
            f"standard deviation, {spread.where}": spread.value,
            "along the update": float(z[0] @ direction),
        }
        score = gate_noise.largest(scores)
        limit = gate_noise.normal_limit(2 * len(self.slices) + 3)
        yield _check("noise: on a real batch", score.value, limit, f"sigma {multiplier:g}; {score.where}")

    def no_noise_check(self) -> Iterator[Check]:
        rows = self.cases[0].batches[0]
        first = self.single_step(rows)
        start = self.build(seed=NOISE_SEEDS[1], noise_multiplier=0.0)
        self.step(rows)
        error = float(np.linalg.norm(start - self.weights() - first) / np.linalg.norm(first))
        yield _check("no noise", error, self.tolerance, "same step, other seed: relative change of the update")

    def _replay_batches(self) -> list[np.ndarray]:
        rng = np.random.default_rng(gate_cases.SEED)
        rows = gate_cases.POOL_SIZE - gate_cases.COPIES - gate_cases.OUTLIERS
        return [rng.choice(rows, size=size, replace=False).astype(np.int64) for size in REPLAY_SIZES]

    def _build_replay(self) -> np.ndarray:
        return self.build(
            learning_rate=REPLAY_RATE, noise_multiplier=self.setting.noise_multiplier if self.setting.private else 0.0
        )

    def replay_check(self) -> Iterator[Check]:
        """The same steps in one burst under the clock, and one by one with a look at the weights after each."""
        batches = [self.batch(rows) for rows in self._replay_batches()]
        start = self._build_replay()
        timed_steps(self.adapter, batches)
        burst = start - self.weights()
        self._build_replay()
        for indices, mask in batches:
            self.adapter.step(indices, mask)
            self.adapter.synchronize()
            after = self.weights()
        single = start - after
        error = float(np.linalg.norm(burst - single) / np.linalg.norm(single))
        yield _check(
            "timed = replayed", error, max(REPLAY_LIMIT, self.tolerance), f"relative L2 after {len(batches)} steps"
        )

    def deferred_check(self) -> Iterator[Check]:
        """Work left for after the clock makes the first reading of the weights slow. The share of the time that the
        first reading took longer than a second one; the best of a few attempts, as chance delays do not repeat."""
        batches = [self.batch(rows) for rows in self._replay_batches()]
        shares = []
        for _ in range(DEFERRED_ATTEMPTS):
            self._build_replay()
            seconds = timed_steps(self.adapter, batches)
            start = time.perf_counter()
            self.adapter.parameters()
            first = time.perf_counter() - start
            self.adapter.parameters()
            second = time.perf_counter() - start - first
            shares.append(max(0.0, first - second) / (seconds + first))
            if shares[-1] < DEFERRED_LIMIT / 2:
                break
        yield _check(
            "deferred work",
            min(shares),
            DEFERRED_LIMIT,
            f"share of the time that came after the clock: {seconds:.3g} s timed, {first:.3g} s first reading, "
            f"{second:.3g} s second",
        )

    def budget_check(self, budget: Mapping[str, float]) -> Iterator[Check]:
        """By how much the adapter's own ε leaves [tight - 0.001, 1.02 Rényi + 0.02]; it may have none."""
        self.adapter.build(self.task, self.setting, gate_cases.starting_weights(self.task))
        own = self.adapter.epsilon(int(budget["steps"]), float(budget["delta"]))
        if own is None:
            yield _check("budget", 0.0, 0.0, "the adapter reports no epsilon")
            return
        low = budget["pld"] - BUDGET_BELOW
        high = BUDGET_ABOVE[0] * budget["rdp"] + BUDGET_ABOVE[1]
        error = 0.0 if low <= own <= high else max(low - own, own - high)
        yield _check(
            "budget",
            error,
            0.0,
            f"epsilon {own:.4f} after {int(budget['steps'])} steps at delta {budget['delta']:g}; "
            f"tight {budget['pld']:.4f}, Renyi {budget['rdp']:.4f}",
        )

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
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from harness.contract import Adapter, Setting, Unsupported, require
from harness.optimizer import SGD, Optimizer
from harness.tasks import FLOAT32, Task, check_parameters
from harness.worker import sampling
from harness.worker.clock import Batch, timed_steps
from harness.worker.gate import adam, diagnosis
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import noise as gate_noise
from harness.worker.gate.cases import BATCH, LATE_LAST, TOLERANCE, Case
from harness.worker.gate.noise import Score
from harness.worker.reading import transparent

Check = dict[str, Any]
"""The fields of ``record.GateCheck``."""

TENSOR_SLACK = 20.0
TENSOR_FLOOR = 1e-3
"""A parameter tensor whose share of the update is smaller than this is measured against this share."""

SENSITIVITY_MARGIN = 1e-4

LARGE_CASE = "large batch"
LAST_STEPS = f"update: the last {LATE_LAST} of many steps"
NOISE_MULTIPLIER = 1.5
"""Not the 1.1 of the protocols, lest a constant pass."""
NOISE_SEED_BITS = 30
SEED_DISTANCES = (1, 27_720, 2**16)
"""From one seed to others that must not share its noise: 27,720 is divisible by every number up to 12, and 2^16 by
every power of two up to it, so that a stream which depends on little of the seed repeats itself."""
NOISE_RATE = 1 / 1024
"""Over the batch size: so small that the examples with p = 1 keep it while the weights wander."""
EPOCH_STEPS = 13
"""Steps of an epoch where many are looked at, so that some epochs end meanwhile."""
NOISE_VALUES = 10_000_000
NOISE_STEPS = (42, 6144)
"""Least and most steps; between them, as many as give NOISE_VALUES values."""
ALTERNATING_STEPS = 256
"""Steps that are on empty batches and on examples with p = 1 by turns; later ones are empty."""
PAIRED_STEPS = 1024
"""The last steps, of which every two are compared."""
OTHER_VALUES = 4_000
OTHER_STEPS = 4
"""Of a run with another seed: at least so many values and steps."""
REPRODUCED_STEPS = 8
COORDINATE_VALUES = 8_000_000
REAL_NOISE_MULTIPLIER = 0.02
"""So little that a wrong gradient under the noise would show."""
REAL_NOISE_CASES = ("some clipped", "none clipped", "all clipped", f"{gate_cases.MOST_ROWS} rows")
REAL_NOISE_VALUES = 1_500
"""Values of noise that are looked at on every such batch, by as many seeds as that takes."""
REPRODUCTION_LIMIT = 1e-6

REPLAY_SIZES = (16, 5, 0, 12, 1, 16, 9, 14)
REPLAY_RATE = BATCH / 4096
REPLAY_LIMIT = 1e-4
"""The difference is zero where kernels are deterministic; atomic adds on a GPU change the order of sums, which eight
steps then amplify."""

DEFERRED_LIMIT = 0.5
DEFERRED_ATTEMPTS = 3

EXCESS_LIMIT = 1e-3
"""By how much the clipped gradient of one example may miss C where a parameter is large. Float32 sums of squares stay
below it; a wrong norm does not."""
EXCESS_FINDING = 1e-5
"""From here on it is told, though float32 explains it: the noise is calibrated to C."""
RAISED = "raised "
"""How the detail of a check begins that an exception ended."""
FINDING = "finding: "
"""How the detail of a check begins that passes and has something to tell."""

BOUND_CHECK = f"clip bound: one example, {gate_cases.LARGE_PARAMETER.parameter_count:.1e} parameters"
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

COPIES_CHECK = "clip bound: copies of one example"
FROZEN_CHECK = "parameters: frozen ones stay"

BUDGET_BELOW = 1e-3
BUDGET_ABOVE = (1.02, 0.02)


def run_gate(
    create: Callable[[], Adapter],
    task: Task,
    setting: Setting,
    static_shapes: bool,
    reference: Mapping[str, np.ndarray],
    budget: Mapping[str, float] | None = None,
    entropy: int | None = None,
) -> list[Check]:
    """All checks of one adapter on one task, as a list; arguments of :func:`checks`."""
    return list(checks(create, task, setting, static_shapes, reference, budget, entropy))


def checks(
    create: Callable[[], Adapter],
    task: Task,
    setting: Setting,
    static_shapes: bool,
    reference: Mapping[str, np.ndarray],
    budget: Mapping[str, float] | None = None,
    entropy: int | None = None,
) -> Iterator[Check]:
    """Yields each check as soon as it is known.

    ``setting``: the cell's own; device, threads, precision and the budget check come from it. ``reference``: what
    ``frameworks._tools.reference`` stored for the task. ``budget``: ``steps``, ``delta`` and the ε of the two
    judges, ``rdp``
    and ``pld``, for ``setting``. ``entropy``: what places and seeds are drawn from; None, for an adapter to be judged,
    draws it. An exception in the adapter fails the check it fell into; :class:`Unsupported` goes through.
    """
    driver = Driver(create(), task, setting, static_shapes, reference, entropy)
    yield from _guarded("parameters", driver.parameter_checks)
    if driver.frozen:
        yield from _guarded(FROZEN_CHECK, driver.frozen_check)
    for case in driver.cases:
        yield from _guarded(f"update: {case.name}", functools.partial(driver.update_check, case))
    yield from _guarded("update: sizes", driver.sizes_check)
    yield from _guarded("update: many steps", driver.late_checks)
    yield from _guarded("update: worst tensor", driver.worst_tensor_check)
    if adam.applies(task, setting.private):
        yield from _guarded(adam.CHECK, driver.own_optimizer_check)
    if setting.private:
        yield from _guarded("sensitivity", driver.sensitivity_check)
        yield from _guarded(COPIES_CHECK, driver.copies_check)
        yield from _guarded("noise", driver.noise_checks)
        yield from _guarded("noise: on real batches", driver.real_noise_check)
        yield from _guarded("noise: on a large batch", driver.large_noise_check)
    else:
        yield from _guarded("no noise", driver.no_noise_check)
    yield from _guarded("timed = replayed", driver.replay_check)
    yield from _guarded("deferred work", driver.deferred_check)
    if setting.private and budget is not None:
        yield from _guarded("budget", functools.partial(driver.budget_check, budget))
    if setting.private:
        yield from _guarded("clip bound", functools.partial(bound_check, create, setting, static_shapes))


def names(private: bool, has_budget: bool, task: Task | None = None) -> list[str]:
    """The checks of a gate that passed, in their order; without a task, those that every one has. A test compares them
    with those of a gate."""
    found = ["parameters: names, shapes, count", "parameters: as given to build"]
    found += [FROZEN_CHECK] if task is not None and task.trained_count < task.parameter_count else []
    found += [f"update: {name}" for name in gate_cases.names(private, task)]
    found += ["update: sizes", "update: many steps", LAST_STEPS, "update: worst tensor"]
    found += [adam.CHECK] if adam.applies(task, private) else []
    if private:
        found += ["sensitivity", COPIES_CHECK, *(f"noise: {name}" for name in NOISE_CHECKS)]
    else:
        found += ["no noise"]
    found += ["timed = replayed", "deferred work"]
    found += ["budget"] if private and has_budget else []
    return [*found, BOUND_CHECK] if private else found


def _guarded(name: str, run: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from run()
    except (Unsupported, MemoryError):
        raise
    except Exception as error:
        yield _check(name, None, None, f"{RAISED}{type(error).__name__}: {error}"[:500])


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


def bound_check(create: Callable[[], Adapter], setting: Setting, static: bool) -> Iterator[Check]:
    """How far one example with a large parameter moves the weights, over C.

    By an adapter of its own, whose task is none of the benchmark's: one that cannot take it has nothing measured.
    """
    example = gate_cases.large_example()
    bound = float(np.float32(example.norm / 4))
    task = dataclasses.replace(gate_cases.LARGE_PARAMETER, precision=setting.precision)
    size = task.parameter_count
    alone = dataclasses.replace(
        setting,
        batch_size=1,
        dataset_size=len(example.x),
        learning_rate=1.0,
        max_grad_norm=bound,
        noise_multiplier=0.0,
        padded_sizes=(1,) if static else (),
        optimizer=SGD(),
    )
    rows = np.zeros(1, dtype=np.int64)
    try:
        adapter = create()
        adapter.build(task, alone, example.weights)
        adapter.place(example.x, example.y)
        adapter.step(rows, np.ones(1, dtype=bool) if static else None)
        adapter.synchronize()
        found = adapter.parameters()
    except Exception as error:
        yield _check(BOUND_CHECK, 0.0, EXCESS_LIMIT, f"not measured ({type(error).__name__}: {error})"[:300])
        return
    squares = sum(
        float(np.square(np.asarray(found[name], dtype=np.float64) - start).sum())
        for name, start in example.weights.items()
    )
    excess = math.sqrt(squares) / bound - 1.0
    told = f"{FINDING}clip bound exceeded by {excess:.1e} at {size:.1e} parameters; " if excess > EXCESS_FINDING else ""
    yield _check(BOUND_CHECK, abs(excess), EXCESS_LIMIT, f"{told}moved by {1.0 + excess:.6f} C")


class Driver:
    """An adapter with the gate's data; measures displacements as flat float64 vectors over all trained parameters."""

    def __init__(
        self,
        adapter: Adapter,
        task: Task,
        setting: Setting,
        static: bool,
        reference: Mapping[str, np.ndarray],
        entropy: int | None,
    ) -> None:
        self.entropy = secrets.randbits(NOISE_SEED_BITS) if entropy is None else entropy
        rng = np.random.default_rng(self.entropy)
        require(adapter, setting)
        self.adapter = adapter
        self.task = task
        self.frozen = [name for name in task.parameters if name not in task.trained_parameters]
        self.setting = setting
        self.static = static
        self.reference = reference
        self.cases = gate_cases.cases(task, reference, setting.private)
        self.norm = gate_cases.clipping_norm(reference)
        self.slices: dict[str, slice] = {}
        end = 0
        for name, shape in task.trained_parameters.items():
            self.slices[name] = slice(end, end + math.prod(shape))
            end = self.slices[name].stop
        self.starts = {key: self._flat(gate_cases.starting_weights(task, key)) for key in (False, True)}
        self.updates: dict[bytes, np.ndarray] = {}
        """Measured displacements of single steps at the gate's ordinary setting, by their rows."""
        self.large: np.ndarray | None = None
        self.worst = Score(0.0, 0.0, "")
        self.placed = False
        self.seed, self.other_seed = (int(seed) for seed in rng.integers(1, 2**NOISE_SEED_BITS, 2))
        self.rng = rng
        some = self.case("some clipped").batches[0]
        self.layout = gate_cases.Layout(task, (int(some[0]), int(some[1])), rng)
        self.sizes = (BATCH, gate_cases.large_rows(task))

    def case(self, name: str) -> Case:
        """Return the case of this name."""
        return next(case for case in self.cases if case.name == name)

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
        seed: int | None = None,
        saturated: bool = False,
        optimizer: Optimizer | None = None,
        initial: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Back to the starting weights, which it returns, or to ``initial``. Without an ``optimizer`` one of the task's
        kind whose update is the rate times the gradient that it gets: the privatised gradient is what all the checks
        look at."""
        setting = dataclasses.replace(
            self.setting,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_grad_norm=self.norm if max_grad_norm is None else max_grad_norm,
            noise_multiplier=noise_multiplier,
            seed=self.seed if seed is None else seed,
            padded_sizes=self.sizes if self.static else (),
        )
        if optimizer is None:
            setting = transparent(setting, learning_rate)
        else:
            setting = dataclasses.replace(setting, optimizer=optimizer)
        self.adapter.build(self.task, setting, initial or gate_cases.starting_weights(self.task, saturated))
        if not self.placed:
            self.adapter.place(*self.layout.data())
            self.placed = True
        return self.starts[saturated]

    def build_own(self, saturated: bool = False) -> Setting:
        """Build with what the cell itself has, the epoch's length aside, and return that setting."""
        own = self.setting
        self.build(
            self._short_epochs,
            own.learning_rate,
            own.max_grad_norm,
            own.noise_multiplier,
            saturated=saturated,
            optimizer=own.optimizer,
        )
        return dataclasses.replace(own, batch_size=self._short_epochs)

    def build_noise(self, seed: int) -> tuple[np.ndarray, float, float]:
        """Return (starting weights, displacement by a gradient of 1, standard deviation of the noise)."""
        size = self._short_epochs
        before = self.build(size, NOISE_RATE * size, noise_multiplier=NOISE_MULTIPLIER, seed=seed, saturated=True)
        return before, NOISE_RATE, NOISE_MULTIPLIER * self.norm

    def sum_at(self, weights: Mapping[str, np.ndarray], batch: Batch, max_grad_norm: float) -> np.ndarray:
        """Return the adapter's own clipped sum of a batch at any weights."""
        self.build(max_grad_norm=max_grad_norm, initial=weights)
        self.adapter.step(*batch)
        self.adapter.synchronize()
        return self._flat(weights) - self.weights()

    def batch(self, rows: np.ndarray, repeats: int = 1) -> Batch:
        """Copies of these rows of the pool as the adapter gets them."""
        placed = self.layout.rows(rows, repeats)
        return sampling.pad(placed, self.sizes) if self.static else (placed, None)

    def step(self, rows: np.ndarray, repeats: int = 1) -> None:
        self.adapter.step(*self.batch(rows, repeats))
        self.adapter.synchronize()

    def displacement(self, case: Case) -> np.ndarray:
        """Starting minus final weights of a case, without noise."""
        divisor = case.batch_size * case.repeats
        start = self.build(
            divisor, case.learning_rate, case.max_grad_norm, saturated=case.saturated, optimizer=case.optimizer
        )
        for rows in case.batches:
            self.step(rows, case.repeats)
        return start - self.weights()

    def truth(self, case: Case) -> np.ndarray:
        """The displacement that a right adapter makes."""
        name = gate_cases.truth_name(case, self.setting.private)
        return self._flat(gate_cases.unpack(name, self.task, self.reference))

    @property
    def _short_epochs(self) -> int:
        """The expected batch size with which an epoch has EPOCH_STEPS steps."""
        return -(-self.setting.dataset_size // EPOCH_STEPS)

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
            given = gate_cases.starting_weights(self.task)
            worst = max(float(np.abs(values[name] - given[name]).max()) for name in self.task.parameters)
            yield _check("parameters: as given to build", worst, 0.0, "largest difference of any weight")

    def frozen_check(self) -> Iterator[Check]:
        """Frozen parameters are those that were given, bit by bit, after steps with gradients and noise; where AdamW is
        the task's, with one that lets weights decay."""
        given = gate_cases.starting_weights(self.task)
        decays = next((case for case in self.cases if case.optimizer is not None), None)
        self.build(
            learning_rate=float(BATCH) if decays is None else decays.learning_rate,
            noise_multiplier=NOISE_MULTIPLIER if self.setting.private else 0.0,
            optimizer=None if decays is None else decays.optimizer,
        )
        for rows in self._replay_batches():
            self.step(rows)
        found = self.adapter.parameters()
        moved = {name: float(np.abs(found[name] - given[name]).max()) for name in self.frozen}
        where = max(moved, key=lambda name: math.inf if math.isnan(moved[name]) else moved[name])
        yield _check(FROZEN_CHECK, moved[where], 0.0, f"largest change of any of {len(moved)} tensors: {where}")

    def update_check(self, case: Case) -> Iterator[Check]:
        """Relative L2 error over all parameters. To the tolerance comes the float32 rounding of the weights that move,
        at most half a unit in the last place, 2^-24 |w|, at every step."""
        expected = self.truth(case)
        found = self._large_update(case, expected) if case.name == LARGE_CASE else self.displacement(case)
        if (
            len(case.batches) == 1
            and not case.saturated
            and case.batch_size == BATCH
            and case.max_grad_norm == self.norm
            and case.optimizer is None
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
        limit = self._limit(case, expected)
        if len(case.batches) == 1:
            self._note_tensors(case, found - expected, expected)
        rows = ", ".join(str(len(batch) * case.repeats) for batch in case.batches)
        detail = f"relative L2 error; rows {rows}, C {case.max_grad_norm:.4g}, |update| {size:.4g}"
        if not error <= limit * size and len(case.batches) == 1:
            sizes = len(case.batches[0]) * case.repeats, case.batch_size * case.repeats
            told = diagnosis.of(found, expected, self.slices, *sizes, case.max_grad_norm)
            detail = f"{told}; {detail}" if told else detail
        yield _check(f"update: {case.name}", error / size, limit, detail)

    def _large_update(self, case: Case, expected: np.ndarray) -> np.ndarray:
        """As :meth:`displacement`. So many rows take long, and their noise is looked at, too: where a step without rows
        has the same noise, the difference of the two is the update. Elsewhere it is a step of its own."""
        if self.setting.private:
            found = self._noisy_step(case, NOISE_MULTIPLIER, case.batches[0]) - self._noisy_step(
                case, NOISE_MULTIPLIER, case.batches[0][:0]
            )
            error = float(np.linalg.norm(found - expected))
            if error <= self._limit(case, expected) * float(np.linalg.norm(expected)):
                return found
        return self.displacement(case)

    def _limit(self, case: Case, expected: np.ndarray, readings: int = 0) -> float:
        """On the relative L2 error of a case, given its displacement."""
        rounding = self._rounding(case, expected, readings or len(case.batches))
        size = float(np.linalg.norm(expected))
        return case.slack * TOLERANCE + float(np.linalg.norm(rounding)) / size + self._arithmetic(case, size)

    def _arithmetic(self, case: Case, size: float) -> float:
        """Return what the task's precision may move the update of a case by, over its length ``size``; in float32
        nothing, but for many steps near kinks. Where it is not known of a case by itself, it is the largest share of
        any single step."""
        known = self._rounded_by_tensor(case)
        if known is not None:
            return float(np.linalg.norm(known)) / size
        return 0.0 if self.task.precision == FLOAT32 else self._largest_arithmetic

    @functools.cached_property
    def _single_steps(self) -> list[Case]:
        """Those that move the weights, and of which it is known what the task's precision rounds away."""
        cases = [*self.cases, *gate_cases.size_cases(self.task, self.reference)]
        known = [case for case in cases if len(case.batches) == 1 and self._rounded_by_tensor(case) is not None]
        return [case for case in known if self.truth(case).any()]

    @functools.cached_property
    def _largest_arithmetic(self) -> float:
        return max(self._arithmetic(case, float(np.linalg.norm(self.truth(case)))) for case in self._single_steps)

    @functools.cached_property
    def _largest_by_tensor(self) -> np.ndarray:
        """What the task's precision may move each trained tensor by, over the length of the whole update: the largest
        of all single steps, for the rounding of a few values is one draw of them, and differs by half an order of
        magnitude from step to step."""
        shares = [np.zeros(len(self.slices))]
        for case in self._single_steps:
            known = self._rounded_by_tensor(case)
            assert known is not None
            shares.append(known / np.linalg.norm(self.truth(case)))
        return np.stack(shares).max(0)

    def _rounded_by_tensor(self, case: Case) -> np.ndarray | None:
        """Return how far each trained tensor may be moved: by the task's precision, or in many steps of float32 by what
        a single update may be off by. None where it is not known, as of most cases in float32."""
        known = self.reference.get(gate_cases.rounding_name(case, self.setting.private))
        if known is None:
            return None
        return known if self.task.precision == FLOAT32 else gate_cases.ROUNDING_FACTOR * known

    def _rounding(self, case: Case, expected: np.ndarray, steps: int) -> np.ndarray:
        """The float32 rounding of the weights that move, at most half a unit in the last place in every step."""
        return steps * 2.0**-24 * np.where(expected != 0, self.starts[case.saturated], 0.0)

    def sizes_check(self) -> Iterator[Check]:
        """Batches of one row, of two, and so on: one size that an adapter takes differently from its neighbours. Where
        shapes are static, those that fit into the smaller one."""
        found = {}
        cases = gate_cases.size_cases(self.task, self.reference)
        cases = [case for case in cases if not self.static or len(case.batches[0]) <= BATCH]
        for case in cases:
            expected = self.truth(case)
            error = float(np.linalg.norm(self.single_step(case.batches[0]) - expected) / np.linalg.norm(expected))
            found[case.name] = error / self._limit(case, expected)
        where = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
        detail = f"relative L2 error over its limit, worst of {len(cases)} sizes up to {cases[-1].name}: {where}"
        yield _check("update: sizes", found[where], 1.0, detail)

    def late_checks(self) -> Iterator[Check]:
        """Many steps in one build: all of them, and the last few by themselves. What goes wrong from some step on, or
        where an epoch ends, an adapter does only there."""
        early, whole = gate_cases.late_cases(self.task, self.reference)
        size = self._short_epochs
        weights = [self.build(size, whole.learning_rate / whole.batch_size * size, whole.max_grad_norm)]
        for batches in (early.batches, whole.batches[len(early.batches) :]):
            for rows in batches:
                self.step(rows)
            weights.append(self.weights())
        count = len(whole.batches)
        last = gate_cases.last_case(self.task, self.reference)
        for name, case, start, expected, steps in (
            ("update: many steps", whole, 0, self.truth(whole), count),
            (LAST_STEPS, last, 1, self.truth(whole) - self.truth(early), LATE_LAST),
        ):
            error = float(np.linalg.norm(weights[start] - weights[2] - expected) / np.linalg.norm(expected))
            yield _check(name, error, self._limit(case, expected, steps), f"relative L2 error; {count} steps")

    def _note_tensors(self, case: Case, difference: np.ndarray, expected: np.ndarray) -> None:
        """Keeps the worst ratio of a tensor's error to its own limit."""
        rounding = self._rounding(case, expected, 1)
        floor = TENSOR_FLOOR * float(np.linalg.norm(expected))
        lowered = self._largest_by_tensor * float(np.linalg.norm(expected))
        for (name, part), share in zip(self.slices.items(), lowered, strict=True):
            size = max(floor, float(np.linalg.norm(expected[part])))
            limit = TENSOR_SLACK * TOLERANCE + float(np.linalg.norm(rounding[part]) + share) / size
            error = float(np.linalg.norm(difference[part])) / size
            error = math.inf if math.isnan(error) else error
            if error / limit > self.worst.value / (self.worst.limit or 1.0):
                self.worst = Score(error, limit, f"{name} in {case.name}")

    def worst_tensor_check(self) -> Iterator[Check]:
        yield _check(
            "update: worst tensor", self.worst.value, self.worst.limit, f"relative L2 error of {self.worst.where}"
        )

    def own_optimizer_check(self) -> Iterator[Check]:
        yield _scored(adam.CHECK, adam.own_steps(self))

    def sensitivity_check(self) -> Iterator[Check]:
        """How far one example more moves the sum. Where the sums round to fewer bits, those of the other examples may
        differ by what that moves the larger one; an example that is alone has no others."""
        cases = {case.name: case for case in self.cases}
        larger = {cases[name].batches[0].tobytes(): name for name in ("some clipped", "outlier")}
        beyond, ratios, limits = {}, {}, {}
        for name, fewer, more in gate_cases.sensitivity_pairs(self.task, self.reference):
            moved = self.single_step(more) - self.single_step(fewer)
            ratios[name] = float(np.linalg.norm(moved)) / self.norm
            limits[name] = self._bound_limit(2)
            if len(fewer):
                known = self._rounded_by_tensor(cases[larger[more.tobytes()]])
                limits[name] += 0.0 if known is None else float(np.linalg.norm(known)) / self.norm
            beyond[name] = math.inf if math.isnan(ratios[name]) else ratios[name] - limits[name]
        where = max(beyond, key=lambda name: beyond[name])
        yield _check("sensitivity", ratios[where], limits[where], f"|change of the sum| / C, worst for {where}")

    def _bound_limit(self, sums: int) -> float:
        """How far one example may move the weights, over C: each of so many sums carries the float32 rounding of the
        weights."""
        return 1.0 + SENSITIVITY_MARGIN + sums * 2.0**-24 * float(np.linalg.norm(self.starts[False])) / self.norm

    def copies_check(self) -> Iterator[Check]:
        """Copies of one example move the sum by no more than C each, whatever the arithmetic: however their gradients
        are rounded, the length of the sum is at most the sum of lengths, and each was to be at most C as it is
        released. One alone, and for some as many as a batch holds."""
        cases = {case.name: case for case in self.cases}
        high, outlier = cases["all clipped"].batches[0], cases["outlier"].batches[0][-1:]
        rows = [*high, *outlier]
        ratios = {}
        for row, repeats in [*((row, 1) for row in rows), (high[0], BATCH), (outlier[0], BATCH)]:
            alone = np.array([row], dtype=np.int64)
            case = Case("", (alone,), self.norm, repeats=repeats)
            moved = self.single_step(alone) if repeats == 1 else self.displacement(case)
            ratios[f"row {row} of the pool, {repeats} of it"] = float(np.linalg.norm(moved)) / self.norm
        where = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name])
        yield _check(COPIES_CHECK, ratios[where], self._bound_limit(1), f"|sum| / C for each copy, worst for {where}")

    def _noise_run(self, seed: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """([steps, parameters], [parameters]): noise in units of its nominal standard deviation, from batches without
        gradient: empty ones in even steps, examples with p = 1 in odd ones; and how coarsely float32 tells that of the
        first NOISE_STEPS[0] steps."""
        before, rate, deviation = self.build_noise(seed)
        unit = rate * deviation
        zero = gate_cases.zero_gradient_rows(self.task)
        found = np.empty((steps, before.size), dtype=np.float32)
        largest = np.abs(before)
        steady = min(steps, NOISE_STEPS[0]) - 1
        for t in range(steps):
            self.step(zero if t % 2 and t < ALTERNATING_STEPS else zero[:0])
            after = self.weights()
            found[t] = (before - after) / unit
            before = after
            if t == steady:
                largest = np.maximum(largest, np.abs(after))
        return found, np.spacing(largest.astype(np.float32)) / unit

    def noise_checks(self) -> Iterator[Check]:
        parameters = self.task.trained_count
        steps = int(np.clip(math.ceil(NOISE_VALUES / parameters), *NOISE_STEPS))
        z, grid = self._noise_run(self.seed, steps)
        mean, spread = gate_noise.moments(z, self.slices)
        yield _scored("noise: mean 0", mean)
        deviation = math.sqrt(np.square(z).mean(dtype=np.float64))
        spread = dataclasses.replace(spread, where=f"{spread.where}; overall {deviation:.4f} of sigma C / B")
        yield _scored("noise: standard deviation sigma C / B", spread)
        for name, rows in (("empty batches", z[::2]), ("zero gradients", z[1:ALTERNATING_STEPS:2])):
            score = gate_noise.largest({name: gate_noise.spread_score(rows)})
            yield _scored(f"noise: on {name}", score)
        yield _scored("noise: normal", gate_noise.normality(z))
        yield _scored("noise: tails", gate_noise.tails(z))
        yield _scored("noise: fine enough", gate_noise.fineness(z[: NOISE_STEPS[0]], grid))
        some = z[: max(OTHER_STEPS, COORDINATE_VALUES // parameters)]
        yield _scored(
            "noise: independent coordinates",
            gate_noise.independent_coordinates(some, self.slices, self.task.parameters),
        )
        yield _scored("noise: no coordinates alike", gate_noise.alike(z, self.slices))
        yield _scored("noise: independent at all shifts", gate_noise.independent_shifts(z))
        yield _scored("noise: independent steps", gate_noise.independent_steps(z[-PAIRED_STEPS:], self.slices))
        yield _scored("noise: no step comes again", gate_noise.repeated(z, self.slices))
        fewer = max(OTHER_STEPS, math.ceil(OTHER_VALUES / parameters))
        seeds = [self.other_seed, *(self.seed + distance for distance in SEED_DISTANCES)]
        runs = {seed: self._noise_run(seed, fewer)[0] for seed in seeds}
        score = gate_noise.independent_runs(z, runs, self.slices)
        listed = ", ".join(map(str, [self.seed, *seeds]))
        yield _scored("noise: fresh per seed", dataclasses.replace(score, where=f"{score.where}; seeds {listed}"))
        again, _ = self._noise_run(self.seed, REPRODUCED_STEPS)
        error = float(np.linalg.norm(again - z[:REPRODUCED_STEPS])) / math.sqrt(again.size)
        yield _check(
            "noise: same seed, same noise",
            error,
            REPRODUCTION_LIMIT,
            f"{REPRODUCED_STEPS} steps, in standard deviations",
        )

    def real_noise_check(self) -> Iterator[Check]:
        """The update under little noise, less the float64 truth, is that noise: mean, spread, and no remainder in the
        direction of the update. Noise that follows the norms of the examples, or their number, does so here. Where
        products are rounded to fewer bits, that would drown the noise: there the same step without noise is taken off,
        which another check has held against the truth."""
        known = [*self.cases, *gate_cases.size_cases(self.task, self.reference)]
        cases = [case for case in known if case.name in REAL_NOISE_CASES]
        seeds = range(1, 1 + math.ceil(REAL_NOISE_VALUES / self.task.trained_count))
        scores = [self._noisy_update(case, REAL_NOISE_MULTIPLIER, seeds, len(cases)) for case in cases]
        yield _scored("noise: on real batches", gate_noise.worst(scores))

    def large_noise_check(self) -> Iterator[Check]:
        """The same for a batch that adapters take in several pieces, under much noise: it is added once, and added."""
        score = self._noisy_update(self.case(LARGE_CASE), NOISE_MULTIPLIER, range(1))
        yield _scored("noise: on a large batch", score)

    def _noisy_update(self, case: Case, multiplier: float, streams: range, batches: int = 1) -> Score:
        """Score the noise of one step for each of the streams; ``batches``: how many such scores a check takes."""
        is_lowered = self.task.precision != FLOAT32 and case.name != LARGE_CASE
        expected = self.single_step(case.batches[0]) if is_lowered else self.truth(case)
        unit = case.learning_rate / (case.batch_size * case.repeats) * multiplier * case.max_grad_norm
        steps = [self._noisy_step(case, multiplier, case.batches[0], stream) for stream in streams]
        z = (np.stack(steps) - expected) / unit
        direction = expected / np.linalg.norm(expected)
        along = float((z @ direction).sum() / math.sqrt(len(z)))
        mean, spread = gate_noise.moments(z, self.slices, 3 * batches)
        score = gate_noise.worst([mean, spread, gate_noise.largest({"along the update": along}, 3 * batches)])
        rows = len(case.batches[0]) * case.repeats
        return dataclasses.replace(score, where=f"sigma {multiplier:g}, {case.name}, {rows} rows; {score.where}")

    def _noisy_step(self, case: Case, multiplier: float, rows: np.ndarray, stream: int = 0) -> np.ndarray:
        """The displacement by one step with noise on these rows. That of many rows is made once."""
        is_large = case.name == LARGE_CASE and len(rows) > 0
        if is_large and self.large is not None:
            return self.large
        divisor = case.batch_size * case.repeats
        seed = self.seed + case.repeats + 64 * stream  # a stream of its own for each
        start = self.build(divisor, case.learning_rate, case.max_grad_norm, multiplier, seed)
        self.step(rows, case.repeats)
        moved = start - self.weights()
        if is_large:
            self.large = moved
        return moved

    def no_noise_check(self) -> Iterator[Check]:
        rows = self.cases[0].batches[0]
        first = self.single_step(rows)
        start = self.build(seed=self.other_seed, noise_multiplier=0.0)
        self.step(rows)
        error = float(np.linalg.norm(start - self.weights() - first) / np.linalg.norm(first))
        yield _check("no noise", error, TOLERANCE, "same step, other seed: relative change of the update")

    def _replay_batches(self) -> list[np.ndarray]:
        rng = np.random.default_rng(gate_cases.SEED)
        rows = gate_cases.POOL_SIZE - gate_cases.COPIES - gate_cases.OUTLIERS
        return [rng.choice(rows, size=size, replace=False).astype(np.int64) for size in REPLAY_SIZES]

    def _build_replay(self) -> np.ndarray:
        """With the task's own optimizer."""
        if isinstance(self.setting.optimizer, SGD):
            return self.build(learning_rate=REPLAY_RATE, noise_multiplier=self.setting.noise_multiplier)
        self.build_own()
        return self.starts[False]

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
        yield _check("timed = replayed", error, REPLAY_LIMIT, f"relative L2 after {len(batches)} steps")

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
        """Compare the adapter's own ε with [tight - 0.001, 1.02 Rényi + 0.02], Rényi by the conversion of 2017.

        It may have none. What is above the same window by the conversion of today is safe, and told as a finding.
        """
        self.adapter.build(self.task, self.setting, gate_cases.starting_weights(self.task))
        own = self.adapter.epsilon(int(budget["steps"]), float(budget["delta"]))
        if own is None:
            yield _check("budget", 0.0, 0.0, "the adapter reports no epsilon")
            return
        low = budget["pld"] - BUDGET_BELOW
        today, high = (BUDGET_ABOVE[0] * budget[name] + BUDGET_ABOVE[1] for name in ("rdp", "of_2017"))
        error = 0.0 if low <= own <= high else max(low - own, own - high)
        told = f"{FINDING}its epsilon is {own / budget['rdp']:.2f} times today's Renyi bound; " if own > today else ""
        yield _check(
            "budget",
            error,
            0.0,
            f"{told}epsilon {own:.4f} after {int(budget['steps'])} steps at delta {budget['delta']:g}; "
            f"tight {budget['pld']:.4f}, Renyi {budget['rdp']:.4f}, by the conversion of 2017 {budget['of_2017']:.4f}",
        )

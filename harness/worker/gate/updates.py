"""Updates against the float64 truth: single steps of every kind and size, and many of them in one build. And how far
one example moves the weights: by no more than C, whatever is beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from harness.contract import Adapter, Setting
from harness.optimizer import SGD
from harness.worker import sketch
from harness.worker.clock import timed_steps
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import diagnosis
from harness.worker.gate.cases import BATCH, LATE_LAST, Case
from harness.worker.gate.check import FINDING, Check, check, scored, worst
from harness.worker.gate.driver import Driver, Room
from harness.worker.gate.noise import Score
from harness.worker.gate.noise_checks import REPRODUCTION_LIMIT, LargeBatch

LAST_STEPS = f"update: the last {LATE_LAST} of many steps"
EXCESS_LIMIT = 1e-3
"""By how much the clipped gradient of one example may miss C where a parameter is large. Float32 sums of squares stay
below it; a wrong norm does not."""
EXCESS_FINDING = 1e-5
"""From here on it is told, though float32 explains it: the noise is calibrated to C."""
BOUND_CHECK = f"clip bound: one example, {gate_cases.LARGE_PARAMETER.parameter_count:.1e} parameters"
COPIES_CHECK = "clip bound: copies of one example"


class Updates:
    """The updates of an adapter, of which the worst tensor is remembered."""

    def __init__(self, driver: Driver, room: Room, large: LargeBatch) -> None:
        self.driver, self.room, self.large = driver, room, large
        self.worst = Score(0.0, 0.0, "")

    def of_case(self, case: Case) -> Iterator[Check]:
        """Relative L2 error over all parameters. To the tolerance comes the float32 rounding of the weights that move,
        at most half a unit in the last place, 2^-24 |w|, at every step."""
        expected = self.driver.truth(case)
        limit = self.room.limit(case, expected) if expected.any() else REPRODUCTION_LIMIT
        is_large = case is self.large.case
        found = self.large.update(expected, limit) if is_large else self.driver.displacement(case)
        self.driver.note(case, found)
        size = float(np.linalg.norm(expected))
        error = float(np.linalg.norm(found - expected))
        if size == 0.0:
            # |g| = 1 would move the weights by learning_rate / batch_size.
            unit = case.learning_rate / case.batch_size
            yield check(f"update: {case.name}", error / unit, limit, "must not move; measured in units of |g|")
            return
        if len(case.batches) == 1:
            self._note_tensors(case, found - expected, expected)
        rows = ", ".join(str(len(batch) * case.repeats) for batch in case.batches)
        detail = f"relative L2 error; rows {rows}, C {case.max_grad_norm:.4g}, |update| {size:.4g}"
        if not error <= limit * size and len(case.batches) == 1:
            sizes = len(case.batches[0]) * case.repeats, case.batch_size * case.repeats
            told = diagnosis.of(found, expected, self.driver.slices, *sizes, case.max_grad_norm)
            detail = f"{told}; {detail}" if told else detail
        yield check(f"update: {case.name}", error / size, limit, detail, sketch.digest(found))

    def sizes(self) -> Iterator[Check]:
        """Batches of one row, of two, and so on: one size that an adapter takes differently from its neighbours. Where
        shapes are static, those that fit into the smaller one."""
        found = {}
        cases = gate_cases.size_cases(self.driver.task, self.driver.reference)
        cases = [case for case in cases if not self.driver.static or len(case.batches[0]) <= BATCH]
        for case in cases:
            expected = self.driver.truth(case)
            error = np.linalg.norm(self.driver.single_step(case.batches[0]) - expected) / np.linalg.norm(expected)
            found[case.name] = float(error) / self.room.limit(case, expected)
        where = worst(found)
        detail = f"relative L2 error over its limit, worst of {len(cases)} sizes up to {cases[-1].name}: {where}"
        yield check("update: sizes", found[where], 1.0, detail)

    def late(self) -> Iterator[Check]:
        """Many steps in one build, without a pause, as under the clock: all of them, and the last few by themselves.
        What goes wrong from some step on, or where an epoch ends, an adapter does only there."""
        driver = self.driver
        early, whole = gate_cases.late_cases(driver.task, driver.reference)
        size = driver.short_epochs
        weights = [driver.build(size, whole.learning_rate / whole.batch_size * size, whole.max_grad_norm)]
        for batches in (early.batches, whole.batches[len(early.batches) :]):
            timed_steps(driver.adapter, [driver.batch(rows) for rows in batches])
            weights.append(driver.weights())
        count = len(whole.batches)
        last = gate_cases.last_case(driver.task, driver.reference)
        for name, case, start, expected, steps in (
            ("update: many steps", whole, 0, driver.truth(whole), count),
            (LAST_STEPS, last, 1, driver.truth(whole) - driver.truth(early), LATE_LAST),
        ):
            error = float(np.linalg.norm(weights[start] - weights[2] - expected) / np.linalg.norm(expected))
            yield check(name, error, self.room.limit(case, expected, steps), f"relative L2 error; {count} steps")

    def _note_tensors(self, case: Case, difference: np.ndarray, expected: np.ndarray) -> None:
        """Keep the worst ratio of a tensor's error to its own limit."""
        for name, (size, limit) in self.room.tensor_limits(case, expected).items():
            error = float(np.linalg.norm(difference[self.driver.slices[name]])) / size
            error = math.inf if math.isnan(error) else error
            if error / limit > self.worst.value / (self.worst.limit or 1.0):
                self.worst = Score(error, limit, f"relative L2 error of {name} in {case.name}")

    def worst_tensor(self) -> Iterator[Check]:
        yield scored("update: worst tensor", self.worst)


def sensitivity_check(driver: Driver, room: Room) -> Iterator[Check]:
    """How far one example more moves the sum. Where the sums round to fewer bits, those of the other examples may
    differ by what that moves the larger one; an example that is alone has no others."""
    larger = {driver.cases[name].batches[0].tobytes(): name for name in ("some clipped", "outlier")}
    beyond, ratios, limits = {}, {}, {}
    for name, fewer, more in gate_cases.sensitivity_pairs(driver.task, driver.reference):
        moved = driver.single_step(more) - driver.single_step(fewer)
        ratios[name] = float(np.linalg.norm(moved)) / driver.norm
        limits[name] = room.of_one_example(2)
        if len(fewer):
            known = room.by_tensor(driver.cases[larger[more.tobytes()]])
            limits[name] += 0.0 if known is None else float(np.linalg.norm(known)) / driver.norm
        beyond[name] = ratios[name] - limits[name]
    where = worst(beyond)
    yield check("sensitivity", ratios[where], limits[where], f"|change of the sum| / C, worst for {where}")


def copies_check(driver: Driver, room: Room) -> Iterator[Check]:
    """Copies of one example move the sum by no more than C each, whatever the arithmetic: however their gradients
    are rounded, the length of the sum is at most the sum of lengths, and each was to be at most C as it is
    released. One alone, and for some as many as a batch holds."""
    high, outlier = driver.cases["all clipped"].batches[0], driver.cases["outlier"].batches[0][-1:]
    rows = [*high, *outlier]
    ratios = {}
    for row, repeats in [*((row, 1) for row in rows), (high[0], BATCH), (outlier[0], BATCH)]:
        alone = np.array([row], dtype=np.int64)
        case = Case("", (alone,), driver.norm, repeats=repeats)
        moved = driver.single_step(alone) if repeats == 1 else driver.displacement(case)
        ratios[f"row {row} of the pool, {repeats} of it"] = float(np.linalg.norm(moved)) / driver.norm
    where = worst(ratios)
    yield check(COPIES_CHECK, ratios[where], room.of_one_example(1), f"|sum| / C for each copy, worst for {where}")


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
        yield check(BOUND_CHECK, 0.0, EXCESS_LIMIT, f"not measured ({type(error).__name__}: {error})"[:300])
        return
    squares = sum(
        float(np.square(np.asarray(found[name], dtype=np.float64) - start).sum())
        for name, start in example.weights.items()
    )
    excess = math.sqrt(squares) / bound - 1.0
    told = f"{FINDING}clip bound exceeded by {excess:.1e} at {size:.1e} parameters; " if excess > EXCESS_FINDING else ""
    yield check(BOUND_CHECK, abs(excess), EXCESS_LIMIT, f"{told}moved by {1.0 + excess:.6f} C")

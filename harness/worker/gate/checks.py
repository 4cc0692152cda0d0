"""The admission gate: what an adapter does in its timed path against what DP-SGD is.

Runs inside the worker, in the framework's environment. Standard library and numpy only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from harness.contract import Adapter, Setting
from harness.optimizer import SGD
from harness.tasks import Task, check_parameters
from harness.worker.clock import timed_steps
from harness.worker.gate import adam, noise_checks
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import pool as gate_pool
from harness.worker.gate.cases import BATCH
from harness.worker.gate.check import FINDING, Check, check, guarded, scored, worst
from harness.worker.gate.driver import NOISE_MULTIPLIER, Driver, Room
from harness.worker.gate.updates import (
    BOUND_CHECK,
    COPIES_CHECK,
    LAST_STEPS,
    Updates,
    bound_check,
    copies_check,
    sensitivity_check,
)

REPLAY_SIZES = (16, 5, 0, 12, 1, 16, 9, 14)
REPLAY_RATE = BATCH / 4096
REPLAY_LIMIT = 1e-4
"""The difference is zero where kernels are deterministic; atomic adds on a GPU change the order of sums, which eight
steps then amplify."""

DEFERRED_LIMIT = 0.5
DEFERRED_ATTEMPTS = 3
FROZEN_CHECK = "parameters: frozen ones stay"
BUDGET_BELOW = 1e-3
BUDGET_ABOVE = (1.02, 0.02)


def checks(
    create: Callable[[], Adapter],
    task: Task,
    setting: Setting,
    static_shapes: bool,
    reference: Mapping[str, np.ndarray],
    budget: Mapping[str, float] | None = None,
    entropy: int | None = None,
) -> Iterator[Check]:
    """Yield each check as soon as it is known.

    ``setting``: the cell's own; device, threads, precision and the budget check come from it. ``reference``: what
    ``frameworks._tools.reference`` stored for the task. ``budget``: ``steps``, ``delta`` and the ε of the two
    judges, ``rdp`` and ``pld``, for ``setting``. ``entropy``: what places and seeds are drawn from; None, for an
    adapter to be judged, draws it. An exception in the adapter fails the check it fell into; :class:`Unsupported` goes
    through.
    """
    driver = Driver(create(), task, setting, static_shapes, reference, entropy)
    room, large = Room(driver), noise_checks.LargeBatch(driver)
    updates = Updates(driver, room, large)
    yield from guarded("parameters", partial(_parameters, driver))
    if _has_frozen(task):
        yield from guarded(FROZEN_CHECK, partial(_frozen, driver))
    for case in driver.cases.values():
        yield from guarded(f"update: {case.name}", partial(updates.of_case, case))
    yield from guarded("update: sizes", updates.sizes)
    yield from guarded("update: many steps", updates.late)
    yield from guarded("update: worst tensor", updates.worst_tensor)
    if adam.applies(task, setting.private):
        yield from guarded(adam.CHECK, lambda: iter([scored(adam.CHECK, adam.own_steps(driver))]))
    if setting.private:
        yield from guarded("sensitivity", partial(sensitivity_check, driver, room))
        yield from guarded(COPIES_CHECK, partial(copies_check, driver, room))
        yield from guarded("noise", partial(noise_checks.noise_checks, driver))
        yield from guarded("noise: on real batches", partial(noise_checks.real_noise_check, driver))
        yield from guarded("noise: on a large batch", large.noise)
    else:
        yield from guarded("no noise", partial(noise_checks.no_noise_check, driver))
    yield from guarded("timed = replayed", partial(_replay, driver))
    yield from guarded("deferred work", partial(_deferred, driver))
    if setting.private and budget is not None:
        yield from guarded("budget", partial(_budget, driver, budget))
    if setting.private:
        yield from guarded("clip bound", partial(bound_check, create, setting, static_shapes))


def _has_frozen(task: Task | None) -> bool:
    return task is not None and task.trained_count < task.parameter_count


def names(private: bool, has_budget: bool, task: Task | None = None) -> list[str]:
    """The checks of a gate that passed, in their order; without a task, those that every one has. A test compares them
    with those of a gate."""
    found = ["parameters: names, shapes, count", "parameters: as given to build"]
    found += [FROZEN_CHECK] if _has_frozen(task) else []
    found += [f"update: {name}" for name in gate_cases.names(private, task)]
    found += ["update: sizes", "update: many steps", LAST_STEPS, "update: worst tensor"]
    found += [adam.CHECK] if adam.applies(task, private) else []
    if private:
        found += ["sensitivity", COPIES_CHECK, *(f"noise: {name}" for name in noise_checks.NOISE_CHECKS)]
    else:
        found += ["no noise"]
    found += ["timed = replayed", "deferred work"]
    found += ["budget"] if private and has_budget else []
    return [*found, BOUND_CHECK] if private else found


def _parameters(driver: Driver) -> Iterator[Check]:
    driver.build()
    values = driver.adapter.parameters()
    fault = check_parameters(driver.task, values)
    count = sum(value.size for value in values.values())
    yield check(
        "parameters: names, shapes, count",
        abs(count - driver.task.parameter_count) + (fault is not None),
        0.0,
        fault or f"{count} parameters",
    )
    if fault is None:
        given = gate_cases.starting_weights(driver.task)
        worst = max(float(np.abs(values[name] - given[name]).max()) for name in driver.task.parameters)
        yield check("parameters: as given to build", worst, 0.0, "largest difference of any weight")


def _budget(driver: Driver, budget: Mapping[str, float]) -> Iterator[Check]:
    """Compare the adapter's own ε with [tight - 0.001, 1.02 Rényi + 0.02], Rényi by the conversion of 2017.

    It may have none. What is above the same window by the conversion of today is safe, and told as a finding.
    """
    driver.adapter.build(driver.task, driver.setting, gate_cases.starting_weights(driver.task))
    own = driver.adapter.epsilon(int(budget["steps"]), float(budget["delta"]))
    if own is None:
        yield check("budget", 0.0, 0.0, "the adapter reports no epsilon")
        return
    low = budget["pld"] - BUDGET_BELOW
    today, high = (BUDGET_ABOVE[0] * budget[name] + BUDGET_ABOVE[1] for name in ("rdp", "of_2017"))
    error = 0.0 if low <= own <= high else max(low - own, own - high)
    told = f"{FINDING}its epsilon is {own / budget['rdp']:.2f} times today's Renyi bound; " if own > today else ""
    yield check(
        "budget",
        error,
        0.0,
        f"{told}epsilon {own:.4f} after {int(budget['steps'])} steps at delta {budget['delta']:g}; "
        f"tight {budget['pld']:.4f}, Renyi {budget['rdp']:.4f}, by the conversion of 2017 {budget['of_2017']:.4f}",
    )


def _frozen(driver: Driver) -> Iterator[Check]:
    """Frozen parameters are those that were given, bit by bit, after steps with gradients and noise; where AdamW is
    the task's, with one that lets weights decay."""
    given = gate_cases.starting_weights(driver.task)
    decays = driver.cases.get(gate_cases.ADAM_STEPS)
    driver.build(
        learning_rate=float(BATCH) if decays is None else decays.learning_rate,
        noise_multiplier=NOISE_MULTIPLIER if driver.setting.private else 0.0,
        optimizer=None if decays is None else decays.optimizer,
    )
    for rows in _replay_batches(driver):
        driver.step(rows)
    found = driver.adapter.parameters()
    frozen = driver.task.parameters.keys() - driver.task.trained_parameters.keys()
    moved = {name: float(np.abs(found[name] - given[name]).max()) for name in sorted(frozen)}
    where = worst(moved)
    yield check(FROZEN_CHECK, moved[where], 0.0, f"largest change of any of {len(moved)} tensors: {where}")


def _replay_batches(driver: Driver) -> list[np.ndarray]:
    rng = np.random.default_rng(gate_pool.SEED)
    rows = gate_pool.POOL_SIZE - gate_pool.COPIES - gate_pool.OUTLIERS
    return [rng.choice(rows, size=size, replace=False).astype(np.int64) for size in REPLAY_SIZES]


def _build_replay(driver: Driver) -> np.ndarray:
    """With the task's own optimizer."""
    if isinstance(driver.setting.optimizer, SGD):
        return driver.build(learning_rate=REPLAY_RATE, noise_multiplier=driver.setting.noise_multiplier)
    driver.build_own()
    return driver.starts[False]


def _replay(driver: Driver) -> Iterator[Check]:
    """The same steps in one burst under the clock, and one by one with a look at the weights after each."""
    batches = [driver.batch(rows) for rows in _replay_batches(driver)]
    start = _build_replay(driver)
    timed_steps(driver.adapter, batches)
    burst = start - driver.weights()
    _build_replay(driver)
    for indices, mask in batches:
        driver.adapter.step(indices, mask)
        driver.adapter.synchronize()
        after = driver.weights()
    single = start - after
    error = float(np.linalg.norm(burst - single) / np.linalg.norm(single))
    yield check("timed = replayed", error, REPLAY_LIMIT, f"relative L2 after {len(batches)} steps")


def _deferred(driver: Driver) -> Iterator[Check]:
    """Work left for after the clock makes the first reading of the weights slow. The share of the time that the
    first reading took longer than a second one; the best of a few attempts, as chance delays do not repeat."""
    batches = [driver.batch(rows) for rows in _replay_batches(driver)]
    shares = []
    for _ in range(DEFERRED_ATTEMPTS):
        _build_replay(driver)
        seconds = timed_steps(driver.adapter, batches)
        start = time.perf_counter()
        driver.adapter.parameters()
        first = time.perf_counter() - start
        driver.adapter.parameters()
        second = time.perf_counter() - start - first
        shares.append(max(0.0, first - second) / (seconds + first))
        if shares[-1] < DEFERRED_LIMIT / 2:
            break
    yield check(
        "deferred work",
        min(shares),
        DEFERRED_LIMIT,
        f"share of the time that came after the clock: {seconds:.3g} s timed, {first:.3g} s first reading, "
        f"{second:.3g} s second",
    )

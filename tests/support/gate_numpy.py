"""Logistic regression and the small ReLU network in plain numpy: truth, a right adapter and wrong ones for the gate."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from harness.contract import Adapter, Setting
from harness.data import load
from harness.tasks import TASKS, Linear, Task
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import pool as gate_pool
from harness.worker.gate.cases import Case
from harness.worker.gate.noise import normal_limit, residual_scores
from harness.worker.request import Request

Values = dict[str, np.ndarray]


def gradients(task: Task, weights: Values, x: np.ndarray, y: int) -> Values:
    """Of one example's own loss, in the precision of the weights, for networks of Linear layers with ReLU between."""
    layers = [layer for layer in task.layers if isinstance(layer, Linear)]
    inputs, value = [], x.astype(weights[f"{layers[0].name}.weight"].dtype)
    for layer in layers:
        inputs.append(value)
        value = weights[f"{layer.name}.weight"] @ value + weights[f"{layer.name}.bias"]
        if layer is not layers[-1]:
            value = np.maximum(value, 0)
    if task.loss == "binary_cross_entropy":
        error = 1 / (1 + np.exp(-value)) - y
    else:
        exponentials = np.exp(value - value.max())
        error = exponentials / exponentials.sum()
        error[y] -= 1
    found = {}
    for layer, entered in zip(layers[::-1], inputs[::-1], strict=True):
        found[f"{layer.name}.weight"], found[f"{layer.name}.bias"] = np.outer(error, entered), error
        error = (weights[f"{layer.name}.weight"].T @ error) * (entered > 0)
    return found


def norm(values: Values) -> float:
    return float(np.sqrt(sum(float(np.square(v).sum()) for v in values.values())))


def total(task: Task, weights: Values, x: np.ndarray, y: np.ndarray, max_grad_norm: float | None) -> Values:
    sums = {name: np.zeros_like(value) for name, value in weights.items()}
    for example, label in zip(x, y, strict=True):
        found = gradients(task, weights, example, int(label))
        length = norm(found)
        factor = 1.0 if max_grad_norm is None or length <= max_grad_norm else max_grad_norm / length
        for name in sums:
            sums[name] = sums[name] + factor * found[name]
    return sums


def reference(task: Task, instability: np.ndarray | None = None) -> Values:
    """The same content as ``frameworks._tools.reference``, but for the instabilities: zero, or as they are given."""
    x, y = gate_pool.pool(task)
    starts = {
        key: {name: value.astype(np.float64) for name, value in gate_cases.starting_weights(task, key).items()}
        for key in (False, True)
    }
    norms = [norm(gradients(task, starts[False], a, int(b))) for a, b in zip(x, y, strict=True)]
    found: Values = {"norms": np.array(norms), "instability": np.zeros(len(x)) if instability is None else instability}

    def moved(case: Case, bound: float | None) -> Values:
        start = starts[case.saturated]
        weights = dict(start)
        for rows in case.batches:
            sums = total(task, weights, x[rows], y[rows], bound)
            weights = {n: weights[n] - case.learning_rate / case.batch_size * sums[n] for n in weights}
        return {name: start[name] - weights[name] for name in start}

    for private in (True, False):
        for case in gate_cases.stored_cases(task, found, private):
            displacement = moved(case, case.max_grad_norm if private else None)
            found |= gate_cases.pack(gate_cases.truth_name(case, private), displacement)
    if gate_cases.has_kinks(task):
        apart = []
        for case in gate_cases.late_cases(task, found):
            bounds = case.max_grad_norm, case.max_grad_norm * (1.0 - gate_cases.TOLERANCE)
            exact, lower = (moved(case, bound) for bound in bounds)
            apart.append({name: lower[name] - exact[name] for name in exact})
        early, whole = apart
        last = {name: whole[name] - early[name] for name in whole}
        cases = gate_cases.late_cases(task, found)[1], gate_cases.last_case(task, found)
        for case, parts in zip(cases, (whole, last), strict=True):
            lengths = [np.linalg.norm(parts[name]) for name in task.trained_parameters]
            found[gate_cases.rounding_name(case, True)] = np.array(lengths)
    return found


def step_reference(request: Request, checked: Path) -> dict[str, object]:
    """What ``frameworks._tools.step_reference`` says of the steps in ``checked``, for networks of Linear layers."""
    task = TASKS[request.task]
    data = load(request.data, "train", synthetic=request.synthetic)
    with np.load(checked) as archive:
        found = dict(archive)
    numbers = [int(number) for number in found["numbers"]]
    rate = request.learning_rate / request.batch_size
    bound = request.max_grad_norm if request.private else None

    def moved(i: int, part: str) -> np.ndarray:
        way = {n: found[f"{i}/before/{n}"].astype(np.float64) - found[f"{part}/{n}"] for n in task.parameters}
        return flat(task, way) / rate

    truths, differences, noisy = [], [], []
    for i in range(len(numbers)):
        before = {name: found[f"{i}/before/{name}"].astype(np.float64) for name in task.parameters}
        halves = np.array_split(found[f"{i}/rows"], 2)
        one, other = (flat(task, total(task, before, data.x[rows], data.y[rows], bound)) for rows in halves)
        truths.append(one + other)
        differences.append(one - other)
        noisy.append(moved(i, f"{i}/after"))
        if i == 0:
            exact = moved(i, "exact")
    result: dict[str, object] = {
        "update_error": float(np.linalg.norm(exact - truths[0]) / np.linalg.norm(truths[0])),
        "update_limit": 2e-3,
    }
    if request.private:
        z = (np.stack(noisy) - np.stack(truths)) / (request.noise_multiplier * request.max_grad_norm)
        alone = {"at the halt": int(found["steps"][1]) - 1, "at the end": max(numbers)}
        scores = residual_scores(z, np.stack(truths), np.stack(differences), numbers, alone)
        result |= {"noise_scores": scores, "noise_limit": normal_limit(len(scores))}
    return result


def flat(task: Task, values: Values) -> np.ndarray:
    return np.concatenate([values[name].ravel() for name in task.parameters])


class Exact(Adapter):
    """Right: float32, one example at a time."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        self.task, self.setting = task, setting
        self.weights = {name: value.copy() for name, value in initial.items()}
        self.rng = np.random.default_rng(setting.seed)

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        s = self.setting
        rows = indices if mask is None else indices[mask]
        sums = total(self.task, self.weights, self.x[rows], self.y[rows], s.max_grad_norm if s.private else None)
        for name in self.weights:
            change = sums[name]
            if s.private:
                change = change + s.noise_multiplier * s.max_grad_norm * self.normal(change.shape)
            self.weights[name] = (self.weights[name] - s.learning_rate / s.batch_size * change).astype(np.float32)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape)

    def synchronize(self) -> None:
        pass

    def parameters(self) -> Values:
        return {name: value.copy() for name, value in self.weights.items()}


class Laplace(Exact):
    """The right variance, heavier tails."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.laplace(scale=0.5**0.5, size=shape)


class TwoPercentLess(Exact):
    """Slightly too little noise."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return 0.98 * super().normal(shape)


class SameForAllRows(Exact):
    """One vector of noise for all rows of a matrix."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(super().normal(shape[-1:]), shape)


class EveryThirdStep(Exact):
    """Draws three noises and goes round."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.count = 0

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.rng = np.random.default_rng([self.setting.seed, self.count % 3])
        self.count += 1
        super().step(indices, mask)


class Shifted(Exact):
    """Noise with a mean."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return 0.05 + super().normal(shape)


class NanOnOutliers(Exact):
    """What an overflow does."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(indices, mask)
        if np.abs(self.x[indices]).max(initial=0) > 10:
            self.weights["fc1.weight"][0, 0] = np.nan


class RaisesOnEmpty(Exact):
    """Cannot take an empty batch."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if len(indices) == 0:
            raise IndexError("no rows")
        super().step(indices, mask)


class NoisyTwin(Exact):
    """Without privacy, with noise."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(indices, mask)
        self.weights["fc2.bias"] += np.float32(1e-2) * self.normal(2).astype(np.float32)


class SlowToRead(Exact):
    """Reading takes long, every time: slow, and honest."""

    def parameters(self) -> Values:
        time.sleep(0.001)
        return super().parameters()


class WorksWhenRead(Exact):
    """Remembers the steps and takes them when somebody looks."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.todo: list = []

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.todo.append((indices, mask))

    def parameters(self) -> Values:
        for indices, mask in self.todo:
            super().step(indices, mask)
        self.todo = []
        return super().parameters()


class Reports(Exact):
    """Reports a given ε."""

    def __init__(self, value: float) -> None:
        self.value = value

    def epsilon(self, steps: int, delta: float) -> float | None:
        return self.value

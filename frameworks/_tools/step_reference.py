"""Some steps of a measured cell again in float64, in an environment with PyTorch:
``python -m frameworks._tools.step_reference --task ... --checked FILE.npz --x X.npy --y Y.npy ...``.

FILE is what :mod:`harness.worker.replay` left: weights before and after some steps, with noise, of the first one
also without, and the rows of the data that they took.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
from collections.abc import Mapping

import numpy as np
import torch

from dpcore import reference
from frameworks._shared.torch import models as torch_models
from frameworks._tools import bfloat16
from frameworks._tools.reference import PERTURBATION
from harness.tasks import FLOAT32, FULL_TASKS, TASKS, Task
from harness.worker.gate import noise as gate_noise
from harness.worker.gate.cases import ROUNDING_FACTOR

TOLERANCE = 1e-3
INSTABILITY_ROWS = 64
INSTABILITY_FACTOR = 5.0
"""An example next to a kink of the network has another gradient in float32. How much of the sum that is, is measured:
the weights move by what float32 rounds away, and the sum of so many rows with them."""
DIRECTIONS = 4
ALL_ROWS_FACTOR = 2.0
"""A sum that is beyond the limit of so few rows is judged by all of them, with the weights moved in as many directions:
the one example next to a kink may be another one, and lie beside it in one direction only. What all rows show needs
less slack than what a part of them shows."""

Arrays = Mapping[str, np.ndarray]


def compare(
    task: Task, found: Arrays, x: np.ndarray, y: np.ndarray, bound: float | None, rate: float, deviation: float
) -> dict[str, object]:
    """``update_error`` and its limit, ``noise_scores`` and theirs.

    ``x``, ``y``: the whole training data. ``bound``: C, None without privacy. ``rate``: learning rate over batch size.
    ``deviation``: sigma C. Without it every step is compared as the first one is, and the worst is told.
    """
    numbers = [int(number) for number in found["numbers"]]
    _, halt = (int(value) for value in found["steps"])
    truths, differences, moved, errors = [], [], [], []
    for i in range(len(numbers)):
        rows = found[f"{i}/rows"]
        before = {name: found[f"{i}/before/{name}"] for name in task.parameters}
        one, other = (_sum(task, before, *_some(x, y, half), bound) for half in np.array_split(rows, 2))
        truths.append(one + other)
        differences.append(one - other)
        moved.append((_flat(task, found, f"{i}/before") - _flat(task, found, f"{i}/after")) / rate)
        if i == 0 or not deviation:
            end = _flat(task, found, "exact" if i == 0 else f"{i}/after")
            exact = (_flat(task, found, f"{i}/before") - end) / rate
            found_error = _error(task, before, exact, truths[-1], *_some(x, y, rows[:INSTABILITY_ROWS]), bound, rate)
            if found_error[0] > found_error[1]:
                everything = _some(x, y, rows)
                found_error = _error(
                    task, before, exact, truths[-1], *everything, bound, rate, ALL_ROWS_FACTOR, DIRECTIONS
                )
            errors.append(found_error)
    error, limit = max(errors, key=lambda both: both[0] / both[1])
    if any(_frozen_moved(task, found, i) for i in range(len(numbers))):
        error = math.inf
    result: dict[str, object] = {"update_error": error, "update_limit": limit}
    if deviation:
        z = (np.stack(moved) - np.stack(truths)) / deviation
        alone = {"at the halt": halt - 1, "at the end": max(numbers)}
        scores = gate_noise.residual_scores(z, np.stack(truths), np.stack(differences), numbers, alone)
        rows = _some(x, y, found["0/rows"][:INSTABILITY_ROWS])
        share = _rounded_away(task, {name: found[f"0/before/{name}"] for name in task.parameters}, *rows, bound)
        # Eight bits move the updates themselves, and so what is found along them.
        lengths = np.linalg.norm(np.stack(truths), axis=1)
        allowance = share * float(lengths.sum()) / math.sqrt(len(lengths)) / deviation
        scores |= {name: max(0.0, scores[name] - allowance) for name in scores if name.startswith("along")}
        result |= {"noise_scores": scores, "noise_limit": gate_noise.normal_limit(len(scores))}
    return result


def _error(
    task: Task,
    before: Arrays,
    exact: np.ndarray,
    truth: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    bound: float | None,
    rate: float,
    factor: float = INSTABILITY_FACTOR,
    directions: int = 1,
) -> tuple[float, float]:
    """(relative error, limit) of a sum that ought to be ``truth``; ``x``, ``y``: some of its rows. ``factor``: slack of
    what these show in so many ``directions``."""
    scale = float(np.linalg.norm(truth)) or 1.0
    moving = [before[name].astype(np.float64) for name in task.trained_parameters]
    rounding = 2.0**-24 * math.sqrt(sum(float(np.square(v).sum()) for v in moving)) / rate
    near = _sum(task, before, x, y, bound)
    moved = max(
        float(np.linalg.norm(_sum(task, _perturbed(before, seed), x, y, bound) - near)) for seed in range(directions)
    )
    instability = moved / (float(np.linalg.norm(near)) or 1.0)
    error = float(np.linalg.norm(exact - truth)) / scale
    lowered = _rounded_away(task, before, x, y, bound)
    return error, TOLERANCE + factor * instability + rounding / scale + lowered


def _rounded_away(task: Task, weights: Arrays, x: np.ndarray, y: np.ndarray, bound: float | None) -> float:
    """What the task's precision may move a sum by, over its length, as these rows show it; in float32 nothing."""
    if task.precision == FLOAT32:
        return 0.0
    exact = _sum(task, weights, x, y, bound)
    with bfloat16.arithmetic(task):
        moved = float(np.linalg.norm(_sum(task, weights, x, y, bound) - exact))
    return ROUNDING_FACTOR * moved / (float(np.linalg.norm(exact)) or 1.0)


def _some(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    chosen = x[rows]
    return chosen.astype(np.float32) / 255 if chosen.dtype == np.uint8 else chosen, y[rows]


def _sum(task: Task, weights: Arrays, x: np.ndarray, y: np.ndarray, bound: float | None) -> np.ndarray:
    """The float64 sum of (clipped) gradients over the trained parameters as one vector."""
    model = torch_models.build_model(task, weights, torch.float64)
    inputs, labels = torch_models.place(x, y, "cpu")
    sums = reference.clipped_sum(model, torch_models.loss_fn(task), inputs, labels, 1.0 if bound is None else bound)
    values = sums.plain if bound is None else sums.clipped
    holder = copy.deepcopy(model)
    for name, parameter in holder.named_parameters():
        parameter.data = values.get(name, torch.zeros_like(parameter)).detach()
    canonical = torch_models.read_parameters(holder, task)
    return np.concatenate([canonical[name].ravel() for name in task.trained_parameters])


def _flat(task: Task, found: Arrays, part: str) -> np.ndarray:
    return np.concatenate([found[f"{part}/{name}"].astype(np.float64).ravel() for name in task.trained_parameters])


def _frozen_moved(task: Task, found: Arrays, i: int) -> bool:
    frozen = [name for name in task.parameters if name not in task.trained_parameters]
    return any(not np.array_equal(found[f"{i}/before/{name}"], found[f"{i}/after/{name}"]) for name in frozen)


def _perturbed(weights: Arrays, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: v * (1 + PERTURBATION * rng.standard_normal(v.shape)) for name, v in weights.items()}


def main() -> None:
    """Prints what :func:`compare` returns as JSON."""
    parser = argparse.ArgumentParser(description=compare.__doc__)
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--checked", required=True)
    parser.add_argument("--x", required=True, help=".npy of training inputs")
    parser.add_argument("--y", required=True, help=".npy of training labels")
    parser.add_argument("--bound", type=float, help="C; without it the sum is not clipped")
    parser.add_argument("--rate", type=float, required=True, help="learning rate over batch size")
    parser.add_argument("--deviation", type=float, default=0.0, help="sigma C")
    chosen = parser.parse_args()
    # A full task's gradients take an hour on one processor, where nothing is timed meanwhile.
    torch.set_num_threads(len(os.sched_getaffinity(0)) if chosen.task in FULL_TASKS else 1)
    with np.load(chosen.checked, allow_pickle=False) as stored:
        found = {name: stored[name] for name in stored.files}
    x, y = np.load(chosen.x, mmap_mode="r"), np.load(chosen.y, mmap_mode="r")
    print(json.dumps(compare(TASKS[chosen.task], found, x, y, chosen.bound, chosen.rate, chosen.deviation)))


if __name__ == "__main__":
    main()

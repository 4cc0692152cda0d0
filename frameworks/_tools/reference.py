"""Computes the gate's expected updates in float64: ``python -m frameworks._tools.reference --task mnist-cnn --out
FILE.npz``.

The bridge between the gate's cases, which know no framework, and ``dpcore.reference``, which knows no harness.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from dpcore import reference
from frameworks._shared.torch import models as torch_models
from frameworks._tools import bfloat16
from harness.optimizer import AdamW
from harness.tasks import FLOAT32, GATE_TASKS, TASKS, Task, known_task
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import pool as gate_pool
from harness.worker.gate.cases import Case

PERTURBATION = 1e-6
"""Relative change of every weight: what the rounding of float32 contractions amounts to."""


LARGE = 5_000_000
"""Weights of a model of which a case has several copies and gradients: more than one at once need much memory."""


def gate_reference(task: Task, at_once: int = 1) -> dict[str, np.ndarray]:
    """Return ``norms`` and ``instability`` [pool] of the pool's examples, then the displacement of every case, float64;
    where the task's precision is lower, how far its rounding moves that of the cases that have such a figure, by
    tensor. ``at_once``: how many cases, each in a process; none of them knows of another."""
    x, y = torch_models.place(*gate_pool.pool(task), "cpu")
    models = {
        saturated: torch_models.build_model(task, gate_cases.starting_weights(task, saturated), torch.float64)
        for saturated in (False, True)
    }
    found = _pool_facts(task, models[False], x, y)
    wanted = {
        gate_cases.truth_name(case, private)
        for private in (True, False)
        for case in gate_cases.stored_cases(task, found, private)
    }
    every = gate_cases.stored_cases(task, found, private=True)
    starts = [models[case.saturated] for case in every]
    for case, moved in zip(every, _of_cases(task, starts, every, x, y, at_once), strict=True):
        for private, displacement in moved.items():
            name = gate_cases.truth_name(case, private)
            if name in wanted:
                found |= gate_cases.pack(name, displacement)
    if task.precision != FLOAT32:
        return found | _rounded_away(task, found, wanted, models, x, y)
    return found | _led_away(task, found, models[False], x, y, at_once) if gate_cases.has_kinks(task) else found


def _led_away(
    task: Task, found: dict[str, np.ndarray], start: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, at_once: int
) -> dict[str, np.ndarray]:
    """Return how far each trained tensor is moved in the many steps, and in the last few of them, where the bound is
    lower by what a single update may be off by: a kink passed a step earlier or later changes more than that."""
    late = gate_cases.late_cases(task, found)
    lower = [replace(case, max_grad_norm=case.max_grad_norm * (1.0 - gate_cases.TOLERANCE)) for case in late]
    apart: list[list[np.ndarray]] = []
    for case, moved in zip(late, _of_cases(task, [start, start], lower, x, y, at_once), strict=True):
        exact = gate_cases.unpack(gate_cases.truth_name(case, True), task, found)
        apart.append([moved[True][name] - exact[name] for name in task.trained_parameters])
    whole = late[1]
    of_last = [a - b for a, b in zip(apart[1], apart[0], strict=True)]
    pairs = (whole, apart[1]), (gate_cases.last_case(task, found), of_last)
    return {gate_cases.rounding_name(case, True): np.array([np.linalg.norm(a) for a in parts]) for case, parts in pairs}


def _rounded_away(
    task: Task,
    found: dict[str, np.ndarray],
    wanted: set[str],
    models: dict[bool, torch.nn.Module],
    x: torch.Tensor,
    y: torch.Tensor,
) -> dict[str, np.ndarray]:
    """How far the task's precision moves each trained tensor in every wanted case; and in the last few of the many
    steps, whose updates may cancel where their rounding does not."""
    early, whole = gate_cases.late_cases(task, found)
    result: dict[str, np.ndarray] = {}
    kept: dict[tuple[str, bool], list[np.ndarray]] = {}
    for case in gate_cases.stored_cases(task, found, private=True):
        with bfloat16.arithmetic(task):
            moved = _displacements(task, models[case.saturated], case, x, y)
        for private, displacement in moved.items():
            name = gate_cases.truth_name(case, private)
            if name in wanted:
                exact = gate_cases.unpack(name, task, found)
                apart = [displacement[n] - exact[n] for n in task.trained_parameters]
                result[gate_cases.rounding_name(case, private)] = np.array([np.linalg.norm(a) for a in apart])
                if case.name in (early.name, whole.name):
                    kept[case.name, private] = apart
    last = gate_cases.last_case(task, found)
    for private in (True, False):
        if (early.name, private) in kept and (whole.name, private) in kept:
            pairs = zip(kept[whole.name, private], kept[early.name, private], strict=True)
            result[gate_cases.rounding_name(last, private)] = np.array([np.linalg.norm(a - b) for a, b in pairs])
    return result


def _pool_facts(task: Task, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
    """Norm of each example's gradient, and by how much, relative to it, the gradient moves when the weights move by
    what float32 rounds away. Large only next to a kink of the network; zero for networks without one."""
    loss = torch_models.loss_fn(task)
    norms = np.array([float(reference.norm(g)) for g in reference.example_gradients(model, loss, x, y)])
    instability = np.zeros(len(x))
    if gate_cases.has_kinks(task):
        moved = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in moved.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.mul_(1 + PERTURBATION * noise)
        pairs = zip(
            reference.example_gradients(model, loss, x, y), reference.example_gradients(moved, loss, x, y), strict=True
        )
        changes = [float(reference.norm({name: a[name] - b[name] for name in a})) for a, b in pairs]
        instability = np.array(changes) / np.maximum(norms, np.finfo(float).tiny)
    return {"norms": norms, "instability": instability}


def _of_cases(
    task: Task, starts: list[torch.nn.Module], cases: list[Case], x: torch.Tensor, y: torch.Tensor, at_once: int
) -> Iterable[dict[bool, dict[str, np.ndarray]]]:
    """Return the displacements of every case, of which the longest ones are taken first: no process works alone at the
    end."""
    one = partial(_displacements, task)
    order = sorted(range(len(cases)), key=lambda i: -sum(map(len, cases[i].batches)))
    arguments = [starts[i] for i in order], [cases[i] for i in order], [x] * len(order), [y] * len(order)
    if at_once == 1:
        found = list(map(one, *arguments))
    else:
        # Threads would wait for the interpreter; forked, a process need not import PyTorch.
        with ProcessPoolExecutor(at_once, get_context("fork")) as pool:
            found = list(pool.map(one, *arguments))
    return [found[order.index(i)] for i in range(len(cases))]


def _displacements(
    task: Task, start: torch.nn.Module, case: Case, x: torch.Tensor, y: torch.Tensor
) -> dict[bool, dict[str, np.ndarray]]:
    """Starting minus final weights under the canonical names, with clipping (key True) and without (False). Frozen
    ones stay."""
    loss = torch_models.loss_fn(task)
    before = torch_models.canonical_parameters(start, task)
    models = {private: copy.deepcopy(start) for private in (True, False)}
    memory: dict[tuple[bool, str], tuple[torch.Tensor, torch.Tensor]] = {}
    for step, rows in enumerate(case.batches):
        truth = reference.clipped_sum(models[True], loss, x[rows], y[rows], case.max_grad_norm)
        sums = {True: truth.clipped}
        if step > 0:  # before the first step both stand at the same weights
            truth = reference.clipped_sum(models[False], loss, x[rows], y[rows], case.max_grad_norm)
        sums[False] = truth.plain
        for private, model in models.items():
            for name, parameter in model.named_parameters():
                if name in sums[private]:
                    gradient = sums[private][name] / case.batch_size
                    if case.optimizer is None:
                        parameter.data -= case.learning_rate * gradient
                    else:
                        known = memory.get((private, name), (torch.zeros_like(gradient), torch.zeros_like(gradient)))
                        memory[private, name] = _adamw(
                            parameter.data, gradient, known, step + 1, case.learning_rate, case.optimizer
                        )
    return {
        private: {
            name: (before[name] - parameter).detach().numpy()
            for name, parameter in torch_models.canonical_parameters(model, task).items()
        }
        for private, model in models.items()
    }


def _adamw(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    memory: tuple[torch.Tensor, torch.Tensor],
    step: int,
    rate: float,
    constants: AdamW,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Changes ``weights``; the new memory. Written out after the paper, not by ``torch.optim``."""
    mean = constants.beta1 * memory[0] + (1 - constants.beta1) * gradient
    square = constants.beta2 * memory[1] + (1 - constants.beta2) * gradient**2
    rate *= constants.share(step)
    root = (square / (1 - constants.beta2**step)).sqrt() + constants.eps
    weights -= rate * constants.weight_decay * weights
    weights -= rate * (mean / (1 - constants.beta1**step)) / root
    return mean, square


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True, choices=sorted([*TASKS, *GATE_TASKS]))
    parser.add_argument("--out", required=True, type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more seldom pay for batches of one example
    task = known_task(chosen.task)
    found = gate_reference(task, min(len(os.sched_getaffinity(0)), 4) if task.parameter_count <= LARGE else 1)
    part = chosen.out.with_name(f"{chosen.out.name}.{os.getpid()}.part")
    with open(part, "wb") as file:
        np.savez(file, **found)
    os.replace(part, chosen.out)


if __name__ == "__main__":
    sys.exit(main())

"""Asks the reference about many steps near kinks, with torch: ``python -m tests.support.late_kinks OUT``.

Writes how far an exact adapter ends from the reference whose bound is lower by what a single update may be off by, over
the length of the displacement, and how much of that the reference allows; of all steps and of the last few.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from frameworks._shared.torch import models
from frameworks._tools import reference
from harness.tasks import TASKS, Task
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import pool as gate_pool


def flat(task: Task, displacement: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([displacement[name].ravel() for name in task.trained_parameters])


def said(task: Task) -> dict[str, list[float]]:
    """Return (error, what is allowed of it) by case; of a task without kinks nothing is allowed."""
    found = reference.gate_reference(task)
    x, y = models.place(*gate_pool.pool(task), "cpu")
    start = models.build_model(task, gate_cases.starting_weights(task, False), torch.float64)
    cases = gate_cases.late_cases(task, found)
    ends = []
    for tolerance in (0.0, gate_cases.TOLERANCE):
        lowered = [replace(case, max_grad_norm=case.max_grad_norm * (1.0 - tolerance)) for case in cases]
        early, whole = (flat(task, reference._displacements(task, start, case, x, y)[True]) for case in lowered)
        ends.append({cases[1].name: whole, gate_cases.last_case(task, found).name: whole - early})
    result = {}
    for case in (cases[1], gate_cases.last_case(task, found)):
        size = float(np.linalg.norm(ends[0][case.name]))
        error = float(np.linalg.norm(ends[1][case.name] - ends[0][case.name])) / size
        known = found.get(gate_cases.rounding_name(case, True), np.zeros(1))
        result[case.name] = [error, float(np.linalg.norm(known)) / size]
    return result


def main(out: Path) -> None:
    torch.set_num_threads(1)
    out.write_text(json.dumps({name: said(TASKS[name]) for name in ("ffnn", "logreg")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A measured step with one example beside a kink, with torch: ``python -m tests.support.kink_steps OUT``.

Writes what the step's reference says of a step that took the other side of the kink, as float32 may, and of one that
counted an example twice. Neither example is among the first rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from frameworks._tools import step_reference
from harness.tasks import TASKS
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import pool as gate_pool

TASK = TASKS["ffnn"]
ROWS = np.arange(100, dtype=np.int64)
ROW = 90
"""Of the example: behind the 64 rows that the reference looks at first."""
SIDE = 1e-8

Arrays = dict[str, np.ndarray]


def at_kink(weights: Arrays, x: np.ndarray, unit: int, side: float) -> Arrays:
    """Return the weights with the bias of a hidden unit such that the example's activation before ReLU is ``side``."""
    names = list(TASK.parameters)
    weight, bias = (np.asarray(weights[name], dtype=np.float64) for name in names[:2])
    moved = bias.copy()
    moved[unit] = side - weight[unit] @ x[ROW].astype(np.float64).ravel()
    return {**{n: np.asarray(v, dtype=np.float64) for n, v in weights.items()}, names[1]: moved}


def said(before: Arrays, found: np.ndarray, x: np.ndarray, y: np.ndarray) -> dict[str, object]:
    """Return what the reference says of a step without privacy whose sum was ``found``."""
    ends, start = {}, 0
    for name, value in before.items():
        ends[name] = value - found[start : start + value.size].reshape(value.shape)
        start += value.size
    step = {"numbers": np.array([0]), "steps": np.array([1, 1]), "0/rows": ROWS}
    step |= {f"0/before/{name}": value for name, value in before.items()}
    step |= {f"{part}/{name}": value for part in ("0/after", "exact") for name, value in ends.items()}
    return step_reference.compare(TASK, step, x, y, None, 1.0, 0.0)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    x, y = gate_pool.pool(TASK)
    weights = gate_cases.starting_weights(TASK)
    rows = x[ROWS], y[ROWS]

    def change(unit: int) -> float:
        on, off = (step_reference._sum(TASK, at_kink(weights, x, unit, s), *rows, None) for s in (SIDE, -SIDE))
        return float(np.linalg.norm(on - off) / np.linalg.norm(on))

    unit = max(range(16), key=change)
    before = at_kink(weights, x, unit, SIDE)
    truth = step_reference._sum(TASK, before, *rows, None)
    other_side = step_reference._sum(TASK, at_kink(weights, x, unit, -SIDE), *rows, None)
    plain = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    calm = step_reference._sum(TASK, plain, *rows, None)
    twice = step_reference._sum(TASK, plain, x[[ROW]], y[[ROW]], None)
    found = {
        "right": said(before, truth, x, y),
        "other side": said(before, other_side, x, y),
        "twice": said(plain, calm + twice, x, y),
        "twice beside a kink": said(before, truth + twice, x, y),
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

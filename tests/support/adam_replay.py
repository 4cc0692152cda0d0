"""The replay of a measured cell whose optimizer is Adam, by an interpreter with torch: ``python -m
tests.support.adam_replay OUT NAME ...`` writes, by the name of a mutant, what the step's reference says of it.
``NAME@bf16``: with bfloat16 products.

On the small transformer, with examples drawn here: what a worker does, without a harness around it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from frameworks._tools import step_reference
from harness import tasks
from harness.contract import Adapter
from harness.worker.batches import setting_of
from harness.worker.clock import Batch
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import pool as gate_pool
from harness.worker.measurement import Measurement
from harness.worker.reading import reading_rate
from harness.worker.replay import replay
from tests.mutants.adapter import create
from tests.support.timed_request import timed_request

TASK = tasks.GATE_TASKS["small-llama"]
LOWERED = "bf16"
BATCH, STEPS, HALT = 24, 6, 4
_REQUEST = timed_request(TASK, BATCH, TASK.learning_rate)
SIGMA, BOUND = _REQUEST.noise_multiplier, _REQUEST.max_grad_norm


def measurement(adapter: Adapter, task: tasks.Task) -> Measurement:
    """Return a measurement as the worker has it after ``build`` and ``place``."""
    found = Measurement.__new__(Measurement)
    found.request, found.task, found.adapter = timed_request(task, BATCH, TASK.learning_rate), task, adapter
    found.setting = setting_of(found.request)
    found.initial = gate_cases.starting_weights(task)
    adapter.build(task, found.setting, found.initial)
    adapter.place(*gate_pool.pool(task))
    return found


def compared(name: str) -> dict[str, object]:
    """``replay_error`` at the halt and at the end, and what the reference says of the steps."""
    variant, _, precision = name.partition("@")
    task = tasks.GATE_TASKS[f"{TASK.name}-bf16"] if precision == LOWERED else TASK
    m = measurement(create(variant), task)
    rng = np.random.default_rng(7)
    batches: list[Batch] = [
        (rng.choice(gate_pool.POOL_SIZE, size=BATCH, replace=False).astype(np.int64), None) for _ in range(STEPS)
    ]
    weights = []
    for t, (rows, mask) in enumerate(batches):
        m.adapter.step(rows, mask)
        if t + 1 in (HALT, STEPS):
            weights.append(dict(m.adapter.parameters()))
    found = replay(m, batches, HALT, *weights, ends=(HALT, STEPS))
    rate = reading_rate(TASK.optimizer, TASK.learning_rate) / BATCH
    x, y = gate_pool.pool(TASK)
    said = step_reference.compare(task, found, x, y, BOUND, rate, SIGMA * BOUND)
    apart = max(
        float(np.abs(found[f"timed{where}/{n}"] - found[f"replayed{where}/{n}"]).max())
        for where in ("", "_end")
        for n in TASK.parameters
    )
    return {**said, "apart": apart, "jump": float(found["jump"][0])}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    out.write_text(json.dumps({name: compared(name) for name in names}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

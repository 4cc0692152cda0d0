"""The gate on wrong adapters, by an interpreter with torch: ``python -m tests.support.mutant_gates OUT NAME ...``.

Writes {variant: checks}, every named mutant on the smallest task that has what it spoils.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch

from frameworks._tools import reference
from harness.contract import Setting
from harness.plan import registry
from harness.tasks import GATE_TASKS, known_task
from harness.worker.gate.checks import checks
from tests.mutants.adapter import create

TASK = {"embedding-off": "imdb-embedding", "drops-recurrent": "imdb-lstm"}
ORDINARY_TASK = "mnist-cnn"
TASKS_BEFORE = ("mnist-cnn", "imdb-embedding", "imdb-lstm")
BUDGET = {"steps": 500, "delta": 1e-5, "rdp": 0.525, "pld": 0.094, "of_2017": 0.7}


def _task_of(name: str, variant: registry.Variant) -> str:
    if any(variant.why_unsupported(task) is None for task in TASKS_BEFORE):
        return TASK.get(name, ORDINARY_TASK)
    return next(task for task in GATE_TASKS if variant.why_unsupported(task) is None)


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    known = {}
    found = {}
    framework = registry.load(registry.ROOT / "tests" / "mutants")
    for name in names:
        variant = framework.variant(name)
        task = known_task(_task_of(name, variant))
        if task.name not in known:
            known[task.name] = reference.gate_reference(task)
        setting = Setting(
            variant=name,
            private=variant.private,
            batch_size=64,
            dataset_size=task.train_size,
            noise_multiplier=1.1 if variant.private else 0.0,
            max_grad_norm=1.0,
            learning_rate=task.learning_rate,
            seed=5,
            precision=task.precision,
            optimizer=task.optimizer,
        )
        start = time.perf_counter()
        truth, is_static = known[task.name], variant.static_shapes
        found[name] = list(checks(partial(create, name), task, setting, is_static, truth, BUDGET))
        print(f"{name} {time.perf_counter() - start:.1f} s", file=sys.stderr)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

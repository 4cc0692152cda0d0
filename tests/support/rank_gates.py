"""Some checks of the gate on two processes, by an interpreter with torch: ``python -m tests.support.rank_gates OUT``.

Writes {contestant: checks} of the mutants in tests/mutants/ranked.py and of PyTorch's own ways.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from frameworks._tools import reference
from harness.contract import Setting
from harness.paths import ROOT
from harness.tasks import known_task
from harness.worker.gate.driver import Driver, Room
from harness.worker.gate.noise_checks import LargeBatch, real_noise_check
from harness.worker.gate.updates import Updates
from harness.worker.process import load_create

MUTANTS = ("joined", "draws-on-every-rank", "divides-by-its-share")
WAYS = ("ddp", "fsdp2")
PAYLOADS = {"ddp": {"all_reduce": 420}, "fsdp2": {"all_gather": 2 * 840, "reduce_scatter": 840}}
"""A step's: 105 numbers; the one row of weights is dealt out as two, and gathered twice."""
CASES = ("some clipped", "one, clipped", "empty", "other C, B and rate")


def main(out: Path) -> None:
    torch.set_num_threads(1)
    task = known_task("logreg")
    truth = reference.gate_reference(task)
    found = {}
    for name in (*MUTANTS, *WAYS):
        file, private = (
            (ROOT / "tests/mutants/ranked.py", True)
            if name in MUTANTS
            else (ROOT / "frameworks/pytorch/adapter.py", False)
        )
        setting = Setting(name, private, 64, task.train_size, 1.1 if private else 0.0, 1.0, 0.1, 5, world_size=2)
        driver = Driver(load_create(file)(name), task, setting, False, truth, 0)
        updates = Updates(driver, Room(driver), LargeBatch(driver))
        checks = [check for case in CASES if case in driver.cases for check in updates.of_case(driver.cases[case])]
        found[name] = [*checks, *(real_noise_check(driver) if private else ())]
        if name in WAYS:
            driver.step(rows := driver.cases["some clipped"].batches[0])  # DDP agrees on its buckets in its first ones
            driver.step(rows)
            given = driver.adapter.exchanged(*driver.batch(rows))
            found[name].append({"check": "payload", "passed": [*given.values()] == [PAYLOADS[name]] * 2})
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

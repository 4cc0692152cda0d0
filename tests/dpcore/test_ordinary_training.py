"""The adapter of PyTorch without DP, to which all others are compared."""

from __future__ import annotations

import numpy as np
import pytest

from frameworks.pytorch import adapter as pytorch
from harness.contract import Setting
from harness.task import initial_parameters
from harness.tasks import GATE_TASKS


@pytest.mark.parametrize(("name", "moves"), [("small-vit", True), ("small-wrn", False)])
def test_an_empty_batch_is_a_step_of_its_optimizer(name, moves):
    """AdamW moves by its momentum and decay all the same. It did not, and was rejected on every modern task."""
    task = GATE_TASKS[name]
    settings = {"private": False, "noise_multiplier": 0.0, "max_grad_norm": 1.0, "seed": 0, "threads": 1}
    sizes = {"batch_size": 4, "dataset_size": 8, "learning_rate": 0.01}
    adapter = pytorch.create("eager")
    adapter.build(task, Setting("eager", optimizer=task.optimizer, **settings, **sizes), initial_parameters(task, 0))
    rng = np.random.default_rng(0)
    adapter.place(rng.normal(size=(8, *task.input_shape)).astype(np.float32), rng.integers(0, task.classes, 8))
    adapter.step(np.arange(4), None)
    before = adapter.parameters()
    adapter.step(np.arange(0), None)
    after = adapter.parameters()
    assert {not np.array_equal(after[parameter], before[parameter]) for parameter in before} == {moves}

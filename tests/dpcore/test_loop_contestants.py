"""The benchmark's contestants that are loops look at a model once, as the engine does: not again under the clock."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor, nn

from frameworks.dpcore.adapter import create
from harness.contract import Setting
from harness.tasks import TASKS, initial_parameters
from harness.worker.gate import pool as gate_pool

TASK = TASKS["logreg"]


@pytest.mark.parametrize("variant", ["loop", "auto", "banded"])
def test_a_second_build_starts_anew_and_looks_at_nothing_again(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [0], nn.Linear.forward

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        calls[0] += 1
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    setting = Setting(variant, True, 16, gate_pool.POOL_SIZE, 1.1, 1.0, TASK.learning_rate, seed=5)
    adapter, found = create(variant), []
    for _ in range(2):
        calls[0] = 0
        adapter.build(TASK, setting, initial_parameters(TASK, 3))
        adapter.place(*gate_pool.pool(TASK))
        for batch in np.split(np.arange(48), 3):
            adapter.step(batch, None)
        found.append((calls[0], dict(adapter.parameters())))
    (first, weights), (second, again) = found
    assert second <= 4 < first, "three steps are three passes, or one more piece, once the model is known"
    assert all(np.array_equal(weights[name], again[name]) for name in weights), "weights and noise start anew"

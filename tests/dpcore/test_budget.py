"""The promise of ``make_private_with_epsilon``: after all the rounds, epsilon is within the target."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine

RATES = (512 / 12_500, 0.3, 1 / 7, 0.01)
QUICK = {(512 / 12_500, 5), (0.3, 1), (0.3, 5)}
"""Rates and epochs that CI asks the tight accountant about, which takes some seconds for each; the count of steps is
made before any accountant sees it, and the Rényi accountant is asked about all."""


@pytest.mark.parametrize(
    ("accountant", "epochs", "sample_rate"),
    [
        pytest.param(name, n, q, marks=[] if name == "rdp" or (q, n) in QUICK else [pytest.mark.slow])
        for name in ("prv", "rdp")
        for n in (1, 5)
        for q in RATES
    ],
)
def test_the_steps_of_whole_rounds_stay_within_the_target(sample_rate: float, epochs: int, accountant: str) -> None:
    """1 / q is rarely a whole number, and the loader rounds it up in every round."""
    model = nn.Linear(2, 2)
    engine = PrivacyEngine(accountant=accountant)
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(40, 2))),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=epochs,
        max_grad_norm=1.0,
        sample_rate=sample_rate,
        expected_batch_size=10,
    )
    steps = epochs * len(loader)
    engine.accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=sample_rate, steps=steps)
    assert 3.0 - 1e-4 < engine.get_epsilon(1e-5) <= 3.0

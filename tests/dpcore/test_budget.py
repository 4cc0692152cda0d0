"""The promise of ``make_private_with_epsilon``: after all the rounds, epsilon is within the target."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import BudgetError, PrivacyEngine
from dpcore.accountants import create_accountant
from tests.dpcore.private_setup import make, step

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


def test_a_budget_sees_failure_probabilities() -> None:
    """They were left out where no more steps were made than planned: epsilon was infinite in the end."""
    model = nn.Linear(2, 2)
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(40, 2)), batch_size=10),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
    )
    (x,) = next(iter(loader))
    engine.accountant.add_failure_probability(1e-3)
    assert not engine.within_budget(optimizer)
    private(x).mean().backward()
    with pytest.raises(BudgetError, match="would bring epsilon to inf"):
        optimizer.step()
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("kind", ["prv", "rdp", "gdp"])
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"steps": -99}, "steps is -99.*cannot be taken back"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"steps": math.inf}, "steps is inf"),
        ({"noise_multiplier": math.inf}, "noise_multiplier is inf"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"sample_rate": 1.5}, "sample_rate is 1.5"),
    ],
)
def test_an_accountant_counts_and_loads_no_wrong_number(kind: str, wrong: dict[str, float], name: str) -> None:
    accountant = create_accountant(kind)
    accountant.step(noise_multiplier=1.0, sample_rate=0.1, steps=100)
    entry = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 1} | wrong
    before = list(accountant.history)
    with pytest.raises(ValueError, match=name):
        accountant.step(**entry)
    with pytest.raises(ValueError, match=name):
        accountant.load_state_dict({"mechanism": kind, "history": [(1.0, 0.1, 100), tuple(entry.values())]})
    assert accountant.history == before


@pytest.mark.parametrize("epsilon", [0.7, 1.1])
def test_epsilon_is_not_computed_at_every_step(epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a small model took forty times as long. The step beyond the budget is the same one."""
    accountant = create_accountant("rdp")
    while accountant.get_epsilon(1e-3) <= epsilon:
        accountant.step(noise_multiplier=4.0, sample_rate=1 / 6)
    engine, model, optimizer, loader = make(engine=PrivacyEngine(accountant="rdp"), noise_multiplier=4.0)
    computed = []
    compute = type(engine.accountant).get_epsilon
    monkeypatch.setattr(
        type(engine.accountant), "get_epsilon", lambda self, *a, **k: (computed.append(1), compute(self, *a, **k))[1]
    )
    engine.set_budget(epsilon, 1e-2)
    engine.set_budget(epsilon, 1e-3)
    rounds = (batch for _ in range(99) for batch in loader)
    with pytest.raises(BudgetError):
        for x, y in rounds:
            step(model, optimizer, x, y)
    assert len(engine.accountant) == len(accountant) - 1 > 25
    assert len(computed) < 20
    engine.set_budget(epsilon + 0.1, 1e-3)
    step(model, optimizer, *next(rounds))


def test_a_budget_follows_a_schedule_of_the_noise() -> None:
    engine, model, optimizer, loader = make(engine=PrivacyEngine(accountant="rdp"), noise_multiplier=8.0)
    engine.set_budget(1.0, 1e-3)
    with pytest.raises(BudgetError):
        for x, y in (batch for _ in range(99) for batch in loader):
            step(model, optimizer, x, y)
            optimizer.noise_multiplier *= 0.8
    assert engine.get_epsilon(1e-3) <= 1.0
    engine.accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=loader.sample_rate)
    assert engine.accountant.get_epsilon(1e-3) > 1.0

"""The audits: sound on what is right, and able to see the two classical bugs in the engine's own step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpcore import Engine, GaussianNoise
from dpcore.accountants import PLDAccountant
from dpcore.accountants.gdp import gaussian_epsilon
from dpcore.audit import audit_run, audit_step, run_epsilon
from dpcore.clipping import bound_with_margin

DELTA = 1e-5
CLIP = 0.7


class HalvedNoise(GaussianNoise):
    """Planted bug: half the noise that is accounted for."""

    def add_(self, target, std, step):
        return super().add_(target, std / 2, step)


@pytest.fixture
def larger_sensitivity(monkeypatch):
    """Planted bug: clips at 1.5 C, within dpcore, because a clipping rule that does so is refused."""

    def longer(max_grad_norm, error, dtype):
        return 1.5 * bound_with_margin(max_grad_norm, error, dtype)

    monkeypatch.setattr("dpcore.microbatch.accumulator.bound_with_margin", longer)


@pytest.fixture
def halved_noise():
    return {"noise": HalvedNoise}


def _accountant(sigma: float, q: float = 1.0, steps: int = 1) -> float:
    accountant = PLDAccountant()
    accountant.step(noise_multiplier=sigma, sample_rate=q, steps=steps)
    return accountant.get_epsilon(DELTA)


def _release(rows: np.ndarray, included: np.ndarray, seed: int, noise=GaussianNoise, **options) -> np.ndarray:
    """One step of dpcore's engine on an embedding with a row per canary: [rows] released values over C.

    A canary's gradient is a huge number in its own row, so each row is a mechanism of its own with a Dirac canary, and
    a single step is as many independent trials as there are rows.
    """
    model = nn.Embedding(len(rows), 1)
    engine = Engine(
        model,
        lambda outputs, y: 1e4 * outputs.sum((1, 2)),
        max_grad_norm=CLIP,
        noise_multiplier=1.0,
        expected_batch_size=3,
        noise=noise(seed),
        physical_batch_size=2**16,
        **options,
    )
    x = torch.from_numpy(rows[included])[:, None]
    engine.privatize(x, torch.zeros(len(x)))
    assert model.weight.grad is not None
    return model.weight.grad.flatten().double().numpy() * 3 / CLIP


def _engine_sample(**options):
    seeds = iter(range(1000))

    def sample(included: bool, count: int) -> np.ndarray:
        return _release(np.arange(count), np.full(count, included), next(seeds), **options)

    return sample


@pytest.mark.parametrize("gaussian", [True, False])
def test_the_engines_step_is_consistent_with_its_accountant(gaussian):
    audit = audit_step(
        _engine_sample(), epsilon=_accountant(1.0), delta=DELTA, trials=40_000, gaussian=gaussian, confidence=0.999
    )
    assert not audit.violated
    # Not vacuous: much of the true 4.377 is seen. (Without the assumption 1.55 to 2.3, of twelve series of seeds.)
    assert audit.epsilon_lower > (3.6 if gaussian else 1.2)
    assert "consistent" in str(audit)


@pytest.mark.parametrize("bug", ["halved_noise", "larger_sensitivity"])
def test_planted_bugs_are_caught_in_the_engines_step(bug, request):
    options = request.getfixturevalue(bug) or {}
    audit = audit_step(_engine_sample(**options), epsilon=_accountant(1.0), delta=DELTA, trials=20_000, gaussian=True)
    assert audit.violated, str(audit)
    assert audit.epsilon_lower > 5.5
    assert "VIOLATED" in str(audit)


def test_halved_noise_is_caught_without_any_assumption():
    audit = audit_step(_engine_sample(noise=HalvedNoise), epsilon=_accountant(1.0), delta=DELTA, trials=100_000)
    assert audit.violated, str(audit)


@pytest.mark.slow
@pytest.mark.usefixtures("larger_sensitivity")
def test_a_larger_sensitivity_is_caught_without_any_assumption():
    assert audit_step(_engine_sample(), epsilon=_accountant(1.0), delta=DELTA, trials=1_000_000).violated


def _gaussian_sample(sigma: float, seed: int):
    rng = np.random.default_rng(seed)
    return lambda included, count: included + sigma * rng.standard_normal(count)


def test_known_anchors():
    """σ = 1, a million trials per world, half of them judged: some 3.1 of 4.377; half the noise, 1e5: above 4.377."""
    epsilon = _accountant(1.0)
    assert epsilon == pytest.approx(4.377, abs=1e-3)
    right = audit_step(_gaussian_sample(1.0, 0), epsilon=epsilon, delta=DELTA, trials=1_000_000)
    assert 2.9 < right.epsilon_lower < 3.9
    assert not right.violated
    halved = audit_step(_gaussian_sample(0.5, 1), epsilon=epsilon, delta=DELTA, trials=100_000)
    assert halved.violated


@pytest.mark.parametrize("gaussian", [True, False])
def test_wrong_alarms_are_rarer_than_stated(gaussian):
    """200 audits of a right mechanism that is as leaky as its epsilon allows. The stated rate is 5 %; more than 20 of
    200 would have a probability of 1.2e-3 at that rate."""
    assert stats.binom.sf(20, 200, 0.05) < 1.2e-3
    sigma = 0.4
    epsilon = gaussian_epsilon(DELTA, 1 / sigma)
    alarms = sum(
        audit_step(_gaussian_sample(sigma, seed), epsilon=epsilon, delta=DELTA, trials=400, gaussian=gaussian).violated
        for seed in range(200)
    )
    assert alarms <= 20


def test_wrong_alarms_of_randomised_response():
    """The mechanism for which the assumption-free bound is exact at delta 0, and theorem 5.2 too."""
    epsilon = 1.0
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    rng = np.random.default_rng(0)

    def respond(included: np.ndarray) -> np.ndarray:
        return np.where(rng.random(len(included)) < truth, included, ~included).astype(float)

    steps = [
        audit_step(lambda included, n: respond(np.full(n, included)), epsilon=epsilon, delta=0.0, trials=2000)
        for _ in range(200)
    ]
    runs = [
        audit_run(respond, canaries=1000, guesses=1000, epsilon=epsilon, delta=0.0, seed=seed) for seed in range(200)
    ]
    for audits in (steps, runs):
        assert sum(audit.violated for audit in audits) <= 20
        assert np.mean([audit.epsilon_lower for audit in audits]) > 0.75


def test_one_run_of_the_engine():
    rows = np.arange(50_000)
    seeds = iter(range(100))

    def audit(**options):
        return audit_run(
            lambda included: _release(rows, included, next(seeds), **options),
            canaries=len(rows),
            guesses=200,
            epsilon=_accountant(1.0),
            delta=DELTA,
            seed=11,
        )

    right, halved = audit(), audit(noise=HalvedNoise)
    assert not right.violated
    assert 1.5 < right.epsilon_lower < halved.epsilon_lower


def test_one_run_catches_a_forgotten_noise():
    rows = np.arange(20_000)

    class NoNoise(GaussianNoise):
        def add_(self, target, std, step):
            return target

    audit = audit_run(
        lambda included: _release(rows, included, 0, noise=NoNoise),
        canaries=len(rows),
        guesses=2000,
        epsilon=_accountant(1.0),
        delta=1e-9,
        seed=3,
    )
    assert audit.violated, str(audit)


def test_the_bound_of_one_run_by_brute_force():
    """Theorem 5.2 term by term."""
    m, r, v, delta, confidence = 60, 30, 27, 1e-4, 0.95
    found = run_epsilon(m, r, v, delta, confidence)

    def probability(epsilon: float) -> float:
        q = math.exp(epsilon) / (1 + math.exp(epsilon))
        tail = [sum(math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(max(0, u), r + 1)) for u in range(v + 1)]
        return tail[v] + 2 * m * delta * max((tail[v - i] - tail[v]) / i for i in range(1, v + 1))

    assert probability(found) == pytest.approx(1 - confidence, abs=1e-6)
    assert run_epsilon(m, r, 15, delta, confidence) == 0.0
    assert run_epsilon(m, r, v, 0.0, confidence) > found


def test_bad_input():
    with pytest.raises(ValueError, match="shape"):
        audit_step(lambda included, count: np.zeros(3), epsilon=1.0, delta=DELTA, trials=100)
    with pytest.raises(ValueError, match="not a number"):
        audit_step(lambda included, count: np.full(count, np.nan), epsilon=1.0, delta=DELTA, trials=100)
    with pytest.raises(ValueError, match="trials is 2"):
        audit_step(_gaussian_sample(1.0, 0), epsilon=1.0, delta=DELTA, trials=2)
    with pytest.raises(ValueError, match="guesses is 30"):
        audit_run(lambda included: included, canaries=20, guesses=30, epsilon=1.0, delta=DELTA)

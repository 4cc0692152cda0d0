"""The risk of attacks beside exact curves, two other packages, and attacks that are made."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from dpcore.accountants import create_accountant

RATES = np.array([1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.9])


def _of(*history):
    accountant = create_accountant("prv")
    for sigma, rate, steps in history:
        accountant.step(noise_multiplier=sigma, sample_rate=rate, steps=steps)
    return accountant


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (20.0, 400), (0.5, 2)])
def test_whole_batches_have_the_curve_of_a_gaussian(sigma, steps):
    mu = math.sqrt(steps) / sigma
    accountant, true = _of((sigma, 1.0, steps)), norm.sf(norm.isf(RATES) - mu)
    found = accountant.tpr_at(RATES)
    assert (found >= true * (1 - 1e-9)).all() and found == pytest.approx(true, rel=1e-3)
    assert mu <= accountant.mu() <= mu + 1e-3
    assert accountant.advantage() == pytest.approx(2 * norm.cdf(mu / 2) - 1, abs=1e-4)


@pytest.mark.parametrize(("sigma", "rate"), [(0.8, 0.2), (2.0, 0.01), (0.5, 0.5)])
def test_one_step_has_the_curve_of_its_best_attack(sigma, rate):
    """Removal and addition both; who knows neither loses nothing by mixing the two."""
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 200_001)
    without, member = norm.sf(x / sigma), (1 - rate) * norm.sf(x / sigma) + rate * norm.sf((x - 1) / sigma)
    found = _of((sigma, rate, 1))
    removal = np.interp(RATES, without[::-1], member[::-1])
    addition = np.interp(RATES, (1 - member), (1 - without))
    worst = np.maximum(removal, addition)
    assert (found.tpr_at(RATES) >= worst - 1e-7).all()
    large = RATES >= 1e-3
    mixed = _least_concave(np.concatenate([without, 1 - member]), np.concatenate([member, 1 - without]))
    assert found.tpr_at(RATES)[large] == pytest.approx(mixed(RATES)[large], abs=1e-4)


def _least_concave(fpr, tpr):
    """The smallest concave curve above these points."""
    lines = np.tan(np.linspace(1e-4, math.pi / 2 - 1e-4, 4000))
    above = np.array([np.max(tpr - slope * fpr) for slope in lines])
    return lambda rates: np.array([np.min(above + lines * rate) for rate in rates])


@pytest.mark.parametrize(
    "history",
    [
        [(1.1, 256 / 60_000, 3525)],
        [(4.0, 0.2, 2000)],
        [(10.0, 0.5, 100)],
        [(0.8, 0.01, 400), (1.2, 0.02, 300)],
        [(2.0, 1e-3, 20_000)],
    ],
)
def test_other_accountants_agree_from_below(history):
    """dp_accounting's own curve is an upper bound too, of a coarser grid."""
    from dp_accounting.pld import privacy_loss_distribution as judge

    composed = None
    for sigma, rate, steps in history:
        one = judge.from_gaussian_mechanism(
            sigma, sampling_prob=rate, use_connect_dots=True, value_discretization_interval=1e-4
        ).self_compose(steps)
        composed = one if composed is None else composed.compose(one)
    accountant = _of(*history)
    assert accountant.advantage() == pytest.approx(composed.get_delta_for_epsilon(0.0), abs=1e-3)
    for rate in (1e-3, 1e-2, 0.1, 0.5):
        epsilons = np.linspace(0.0, 12.0, 6001)
        deltas = np.array(composed.get_delta_for_epsilon(epsilons))
        lines = np.concatenate([np.exp(epsilons) * rate + deltas, 1 - np.exp(-epsilons) * (1 - deltas - rate)])
        assert accountant.tpr_at(rate) == pytest.approx(lines.min(), rel=1e-3)


JUDGED = json.loads((Path(__file__).parent / "data" / "riskcal.json").read_text())


@pytest.mark.parametrize(("run", "found"), [(each["run"], each["found"]) for each in JUDGED["runs"]])
def test_riskcal_agrees(run, found):
    """Rates of proofs/risk_judge.py, which says why these may be a little too low; dpcore's must not be below them."""
    accountant = _of(run)
    ours = np.array([accountant.advantage(), *accountant.tpr_at(np.array(JUDGED["rates"]))])
    assert (ours >= np.array(found) - 1e-5).all() and ours == pytest.approx(np.array(found), abs=1e-3)


def test_the_curve_falls_and_is_convex_and_symmetric():
    accountant = _of((0.7, 0.05, 200))
    alpha = np.linspace(0.0, 1.0, 2001)
    beta = accountant.trade_off(alpha)
    assert beta[0] <= 1.0 and beta[-1] == 0.0 and (np.diff(beta) <= 1e-15).all() and (np.diff(beta, 2) >= -1e-9).all()
    assert accountant.trade_off(beta) == pytest.approx(alpha, abs=1e-6)
    assert accountant.tpr_at(0.1) == 1.0 - accountant.trade_off(0.1) and isinstance(accountant.tpr_at(0.1), float)
    assert (beta <= norm.cdf(norm.isf(alpha) - accountant.mu()) + 1e-9).sum() < len(alpha)
    assert (beta >= norm.cdf(norm.isf(alpha) - accountant.mu()) - 1e-9).all()


def test_more_steps_and_failures_risk_more():
    few, many, failing = _of((1.0, 0.1, 10)), _of((1.0, 0.1, 100)), _of((1.0, 0.1, 10))
    failing.add_failure_probability(1e-3)
    assert (few.tpr_at(RATES) < many.tpr_at(RATES)).all() and few.mu() < many.mu()
    assert failing.tpr_at(1e-9) >= few.tpr_at(1e-9) + 1e-3 and failing.advantage() > few.advantage()
    assert failing.mu() == math.inf or failing.mu() > few.mu()


def test_no_steps_risk_nothing_and_no_noise_everything():
    assert _of().tpr_at(0.25) == 0.25 and _of().mu() < 1e-6 and _of().advantage() == 0.0
    for bare in (_of((0.0, 0.1, 1)), _of((1e-3, 0.1, 100))):
        assert bare.tpr_at(1e-6) == 1.0 and bare.mu() == math.inf and bare.advantage() == 1.0


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan"), "0.1", [0.5, 2.0]])
def test_a_rate_that_is_none(rate):
    for method, name in (("tpr_at", "fpr"), ("trade_off", "alpha")):
        with pytest.raises(ValueError, match=rf"^{name} is .*it is a rate, so it must lie in \[0, 1\]"):
            getattr(_of((1.0, 0.1, 10)), method)(rate)

"""Norms by random projections: upper-biased, with the failure probability that is stated, and charged to delta."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from dpcore import PrivacyError, reference
from dpcore.accountants import PLDAccountant, RDPAccountant
from dpcore.accountants.gdp import gaussian_log_delta
from dpcore.projection import JohnsonLindenstrauss, projected_clipped_sum
from tests.dpcore.comparison import odd_loss


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 6), torch.arange(count) % 3


def test_the_sum_is_that_of_the_bounds_factors():
    model, (x, y) = _model(), _batch(9)
    norms_as = JohnsonLindenstrauss(dimensions=10, failure_probability=1e-9)
    result = projected_clipped_sum(model, odd_loss, x, y, 0.3, norms_as)
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for factor, gradients in zip(result.factors, reference.example_gradients(model, odd_loss, x, y), strict=True):
        assert float(reference.norm(gradients) * factor) <= 0.3
        for name, gradient in gradients.items():
            expected[name] += factor * gradient
    for name, total in expected.items():
        torch.testing.assert_close(result.sums[name], total, rtol=1e-10, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_a_bound_is_too_small_as_often_as_stated():
    """120 independent steps, with a failure probability of 5 % to make failures visible."""
    model, (x, y) = _model(), _batch(40)
    norms_as = JohnsonLindenstrauss(dimensions=3, failure_probability=0.05)
    true = torch.stack([reference.norm(g) for g in reference.example_gradients(model, odd_loss, x, y)])
    failures = sum(
        int((projected_clipped_sum(model, odd_loss, x[:1], y[:1], 1.0, norms_as).norms < true[:1]).sum())
        for _ in range(120)
    )
    assert 1e-5 < stats.binom.cdf(failures, 120, 0.05) < 1 - 1e-5
    small = JohnsonLindenstrauss(dimensions=10, failure_probability=1e-12)
    assert bool((projected_clipped_sum(model, odd_loss, x, y, 1.0, small).norms >= true).all())


def test_hostile_and_empty_batches():
    model, (x, y) = _model(), _batch(4)
    norms_as = JohnsonLindenstrauss(dimensions=5, failure_probability=1e-6)
    x[2] = float("nan")
    result = projected_clipped_sum(model, odd_loss, x, y, 1.0, norms_as)
    assert result.nonfinite == 1
    empty = projected_clipped_sum(model, odd_loss, x[:0], y[:0], 1.0, norms_as)
    assert all(not total.any() for total in empty.sums.values())
    with pytest.raises(PrivacyError, match="one loss per example"):
        projected_clipped_sum(model, F.cross_entropy, x, y, 1.0, norms_as)


def test_examples_that_mix_are_refused():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    (x, y), norms_as = _batch(6), JohnsonLindenstrauss(dimensions=2, failure_probability=1e-3)
    with pytest.raises(PrivacyError, match="changes the losses of others"):
        projected_clipped_sum(nn.Sequential(Centred(), _model()), odd_loss, x, y, 0.3, norms_as)

    def contrasted(outputs, y):
        each = F.cross_entropy(outputs, y, reduction="none")
        return each / each.sum()

    with pytest.raises(PrivacyError, match="changes the losses of others"):
        projected_clipped_sum(_model(), contrasted, x, y, 0.3, norms_as)
    assert len(projected_clipped_sum(_model(), odd_loss, x[:1], y[:1], 0.3, norms_as).norms) == 1


def test_dropout_is_the_same_in_every_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))
    x, y = _batch(8)
    norms_as = JohnsonLindenstrauss(dimensions=10, failure_probability=1e-9)
    for _ in range(2):
        alone = [projected_clipped_sum(model, odd_loss, x[:1], y[:1], 0.1, norms_as) for _ in range(2)]
        for result in alone:
            assert float(torch.cat([s.flatten() for s in result.sums.values()]).norm()) <= 0.1


@pytest.mark.parametrize("accountant", [PLDAccountant, RDPAccountant])
def test_failures_are_charged_to_delta_with_the_factor_of_the_worse_direction(accountant):
    plain, failing = accountant(), accountant()
    for one in (plain, failing):
        one.step(noise_multiplier=1.1, sample_rate=0.01, steps=500)
    failing.add_failure_probability(500 * 0.01 * 1e-9)
    epsilon = failing.get_epsilon(1e-5)
    assert epsilon > plain.get_epsilon(1e-5)
    left = 1e-5 - math.exp(epsilon) * 5e-9
    assert plain.get_epsilon(left) <= epsilon <= plain.get_epsilon(left) + 1e-5
    again = accountant()
    again.load_state_dict(failing.state_dict())
    assert again.get_epsilon(1e-5) == epsilon
    failing.add_failure_probability(1e-4)
    assert failing.get_epsilon(1e-5) == math.inf


def test_a_mechanism_that_fails_as_stated_stays_within_what_is_charged():
    """Gaussian, μ = 1, but with probability F the example is published: both directions in closed form."""
    failure, delta = 1e-6, 1e-4
    accountant = PLDAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=1.0)
    accountant.add_failure_probability(failure)
    epsilon = accountant.get_epsilon(delta)
    # With the example: (1 - F) N(1, 1) + F elsewhere; without: N(0, 1).
    removed = (1 - failure) * math.exp(gaussian_log_delta(epsilon - math.log1p(-failure), 1.0)) + failure
    added = math.exp(gaussian_log_delta(epsilon + math.log1p(-failure), 1.0))
    assert max(removed, added) <= delta


def test_impossible_options_are_refused():
    with pytest.raises(ValueError, match="failure_probability is 0"):
        JohnsonLindenstrauss(dimensions=5, failure_probability=0.0)
    with pytest.raises(ValueError, match="dimensions is 0"):
        JohnsonLindenstrauss(dimensions=0, failure_probability=1e-9)
    with pytest.raises(ValueError, match="failure probability of 2"):
        PLDAccountant().add_failure_probability(2.0)
    assert JohnsonLindenstrauss(dimensions=50, failure_probability=1e-10).inflation > 1.5

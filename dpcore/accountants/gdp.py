"""Gaussian differential privacy by the central limit theorem (Bu et al. 2020): an approximation, never a bound."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import scipy

from dpcore.accountants.accountant import History, IAccountant, poisson_steps


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Return log delta of the Gaussian mechanism with sensitivity / deviation ``mu`` (Balle and Wang 2018).

    It is exact: delta = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ).
    """
    first, second = (
        scipy.special.log_ndtr(mu / 2 - epsilon / mu),
        epsilon + scipy.special.log_ndtr(-mu / 2 - epsilon / mu),
    )
    difference = second - first
    return float(first + math.log(-math.expm1(difference))) if difference < 0.0 else -math.inf


def gaussian_epsilon(delta: float, mu: float) -> float:
    """The smallest epsilon >= 0 with which the Gaussian mechanism is (epsilon, delta)-private."""
    if gaussian_log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    # By Chernoff's bound this epsilon suffices.
    upper = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-12
    return float(
        scipy.optimize.brentq(
            lambda eps: gaussian_log_delta(eps, mu) - math.log(delta), 0.0, upper, xtol=1e-13, rtol=1e-14
        )
    )


class GaussianAccountant(IAccountant):
    """Central-limit approximation, μ² = Σ T q² (e^{1/σ²} - 1).

    With ``get_epsilon(delta, poisson=False)`` that of batches of fixed size, drawn without replacement (Dong, Roth and
    Su 2022): μ² = Σ 2 T q² (e^{1/σ²} Φ(3/(2σ)) + 3 Φ(-1/(2σ)) - 2), which is more.

    It under-reports where few steps dominate (0.85 instead of 3.24 at q = 0.001, σ = 0.5, 1000 steps): use it to
    compare with papers that do, not to promise anything. Every reading warns of that.
    """

    def _epsilon(self, history: History, delta: float, **options: Any) -> float:
        steps = poisson_steps(history)
        assert steps is not None  # as get_epsilon has seen
        warnings.warn(
            "This epsilon is the central-limit approximation (gdp) and may lie far below the true one; it is no "
            'guarantee. Report the accountants "prv" or "rdp", which are bounds.',
            stacklevel=3,
        )
        squared = _of_poisson_batches if options.get("poisson", True) else _of_fixed_batches
        with np.errstate(over="ignore", divide="ignore"):  # noise so small that epsilon is infinite
            mu_sq = sum(t * q * q * squared(s) for s, q, t in steps)
        return gaussian_epsilon(delta, math.sqrt(mu_sq)) if mu_sq < math.inf else math.inf

    @classmethod
    def mechanism(cls) -> str:
        return "gdp"


def _of_poisson_batches(sigma: float) -> float:
    """Return μ² / q² of one step on a Poisson batch."""
    return float(np.expm1(np.float64(sigma) ** -2))


def _of_fixed_batches(sigma: float) -> float:
    """Return μ² / q² of one step on a batch of fixed size."""
    far, near = scipy.special.ndtr(1.5 / sigma), scipy.special.ndtr(-0.5 / sigma)
    return float(2.0 * (np.exp(np.float64(sigma) ** -2) * far + 3.0 * near - 2.0))

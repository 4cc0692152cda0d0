"""Rényi differential privacy (Mironov 2017; subsampled Gaussian: Mironov, Talwar and Zhang 2019): simple and looser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy

from dpcore.accountants.accountant import History, IAccountant, released_of
from dpcore.accountants.allocation import Epochs
from dpcore.arguments import check_number

DEFAULT_ALPHAS = tuple([1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64)))
ORDER_RULE = "it must hold orders of Rényi divergences, finite and above 1, for instance [2, 4, 8, 16, 32]"


def renyi_divergence(sample_rate: float, noise_multiplier: float, alpha: float) -> float:
    """D_α of one subsampled step, for any real α > 1: log E_{x ~ N(0, σ²)} (1 - q + q e^{(2x-1)/(2σ²)})^α / (α - 1).

    The trapezoidal rule on this analytic, rapidly decaying integrand converges exponentially: 16 points per deviation
    leave nothing beyond rounding.
    """
    q, sigma = sample_rate, noise_multiplier
    if q == 1.0:
        return alpha / (2 * sigma**2)
    # The integrand is a sum of Gaussians of deviation σ with centres from 0 to α.
    x = np.arange(-14.0 * sigma, alpha + 14.0 * sigma, sigma / 16)
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
    log_density = -(x**2) / (2 * sigma**2) - 0.5 * math.log(2 * math.pi) - math.log(16)
    return max(0.0, float(scipy.special.logsumexp(log_density + alpha * log_ratio)) / (alpha - 1))


def epsilon_of_renyi(divergence: float, alpha: float, delta: float) -> float:
    """Balle et al. 2020, theorem 21: ε = D + log((α-1)/α) - (log δ + log α)/(α-1), and at least 0."""
    return max(0.0, divergence + math.log1p(-1 / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1))


def renyi_epsilon(history: History, delta: float, alphas: Sequence[float] = DEFAULT_ALPHAS) -> tuple[float, float]:
    """(epsilon, best order) of a history with positive noise multipliers and sample rates."""
    epochs = [[Epochs(s, q[1], t, r) for s, q, t in history if isinstance(q, tuple)] for r in (True, False)]
    steps = [(s, q, t) for s, q, t in history if not isinstance(q, tuple)]
    # Of Poisson steps the removal is the worse direction, of epochs it need not be.
    left = delta - max(sum(epoch.lost for epoch in side) for side in epochs)
    if left <= 0.0:
        return math.inf, math.inf

    def divergence(alpha: float) -> float:
        of_epochs = max(sum(e.count * e.log_moment(alpha) for e in side) for side in epochs) / (alpha - 1)
        return of_epochs + sum(t * renyi_divergence(q, s, alpha) for s, q, t in steps)

    return min((epsilon_of_renyi(divergence(alpha), alpha, left), alpha) for alpha in alphas)


class RDPAccountant(IAccountant):
    """A valid upper bound, looser than the default accountant by some per cent (or by a factor for few steps)."""

    DEFAULT_ALPHAS = DEFAULT_ALPHAS

    def get_privacy_spent(self, *, delta: float, alphas: Sequence[float] | None = None) -> tuple[float, float]:
        """(epsilon, the order alpha that gave it); (0, 0) without steps.

        Args:
            delta: δ, in (0, 1).
            alphas: The orders to choose from, each above 1; None: ``DEFAULT_ALPHAS``.

        Raises:
            ValueError: delta is not in (0, 1), or an order is not above 1.
        """
        epsilon = self.get_epsilon(delta, alphas=alphas)
        released = released_of(self.history)
        if not released:
            return 0.0, 0.0
        if epsilon == math.inf:
            return math.inf, math.inf
        # Where steps may fail, epsilon holds at a smaller delta: that which the failures leave.
        left = delta - math.exp(epsilon) * self.failure_probability if self.failure_probability else delta
        return epsilon, renyi_epsilon(released, left, _orders(alphas))[1]

    def _epsilon(self, history: History, delta: float, **options: Any) -> float:
        return renyi_epsilon(history, delta, _orders(options.get("alphas")))[0]

    @classmethod
    def mechanism(cls) -> str:
        return "rdp"


def _orders(alphas: Sequence[float] | None) -> Sequence[float]:
    """Return the orders to choose from; ValueError where one is no order of a Rényi divergence above 1."""
    if alphas is None:
        return DEFAULT_ALPHAS
    orders = [check_number("alphas", alpha, lambda a: 1.0 < a < math.inf, ORDER_RULE) for alpha in alphas]
    if not orders:
        raise ValueError(f"alphas is empty; {ORDER_RULE}.")
    return orders

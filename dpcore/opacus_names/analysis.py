"""Privacy of one mechanism by functions, as Opacus' accountants have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpcore.accountants import gdp, rdp, utils
from dpcore.arguments import check_number

MAX_SIGMA = 1e6
"""The most noise that a calibration of Opacus' tries."""


def compute_rdp(*, q: float, noise_multiplier: float, steps: int, orders: float | Sequence[float]) -> Any:
    """Return the Rényi divergences of ``steps`` steps, one for each order, or a number for a number."""
    check_number("q", q, lambda value: 0.0 <= value <= 1.0, "it is a probability, so it must lie in [0, 1]")

    def of(alpha: float) -> float:
        if q == 0.0:
            return 0.0
        return steps * rdp.renyi_divergence(q, noise_multiplier, alpha) if noise_multiplier else math.inf

    return of(orders) if isinstance(orders, int | float) else np.array([of(alpha) for alpha in orders])


def get_privacy_spent(
    *,
    orders: float | Sequence[float],
    rdp: float | Sequence[float],
    delta: float,
) -> tuple[float, float]:
    """Return (epsilon, the order that gives it) of Rényi divergences, one for each order."""
    alphas, values = np.atleast_1d(orders).tolist(), np.atleast_1d(rdp).tolist()
    if len(alphas) != len(values):
        raise ValueError(f"There are {len(alphas)} orders and {len(values)} divergences; give one for each order.")
    return min((_epsilon(value, alpha, delta), alpha) for alpha, value in zip(alphas, values, strict=True))


_epsilon = rdp.epsilon_of_renyi


def compute_mu_poisson(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """Return μ of steps on Poisson batches, by the central limit theorem: an approximation, no bound."""
    return sample_rate * math.sqrt(steps * gdp._of_poisson_batches(noise_multiplier))


def compute_mu_uniform(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """Return μ of steps on batches of fixed size, by the central limit theorem: an approximation, no bound."""
    return sample_rate * math.sqrt(steps * gdp._of_fixed_batches(noise_multiplier))


def delta_eps_mu(*, eps: float, mu: float) -> float:
    """Return δ at ε of the Gaussian mechanism with sensitivity over deviation μ."""
    return math.exp(gdp.gaussian_log_delta(eps, mu))


def eps_from_mu(*, mu: float, delta: float) -> float:
    """Return ε at δ of the Gaussian mechanism with sensitivity over deviation μ."""
    return gdp.gaussian_epsilon(delta, mu)


def compute_eps_poisson(*, steps: int, noise_multiplier: float, sample_rate: float, delta: float) -> float:
    """Return ε of steps on Poisson batches, by the central limit theorem: an approximation, no bound."""
    return eps_from_mu(
        mu=compute_mu_poisson(steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate), delta=delta
    )


def compute_eps_uniform(*, steps: int, noise_multiplier: float, sample_rate: float, delta: float) -> float:
    """Return ε of steps on batches of fixed size, by the central limit theorem: an approximation, no bound."""
    return eps_from_mu(
        mu=compute_mu_uniform(steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate), delta=delta
    )


def get_noise_multiplier(*, accountant: str = "rdp", **options: Any) -> float:
    """Return the smallest noise multiplier that meets a target: by "rdp" when not told, as programs expect.

    They count with the accountant of that name: less noise, found by a tighter one, would seem to overspend.

    Args:
        accountant: The accountant's name.
        **options: As those of :func:`dpcore.accountants.utils.get_noise_multiplier`.

    Returns:
        The noise's deviation over ``max_grad_norm``.
    """
    return utils.get_noise_multiplier(accountant=accountant, **options)

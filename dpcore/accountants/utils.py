"""Calibration: the smallest noise for a privacy budget."""

from __future__ import annotations

import math
from typing import Any

from dpcore.accountants.registry import create_accountant

LARGEST_SIGMA = 1e6


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "prv",
    epsilon_tolerance: float | None = None,
    sigma_tolerance: float = 1e-6,
    **kwargs: Any,
) -> float:
    """The smallest noise multiplier, to ``sigma_tolerance``, whose epsilon does not exceed ``target_epsilon``.

    Give either ``steps`` or ``epochs`` (of ceil(1 / sample_rate) steps each). Never overshoots: the sigma returned is
    the end of the bracket that meets the budget. ``epsilon_tolerance`` is accepted for compatibility and not needed.
    ValueError where the budget cannot be met.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("Give exactly one of steps and epochs.")
    if not target_epsilon > 0.0:
        raise ValueError(f"target_epsilon is {target_epsilon}; it must be above 0.")
    if not 0.0 < sample_rate <= 1.0:
        raise ValueError(f"sample_rate is {sample_rate}; it must lie in (0, 1].")
    for name, count in (("epochs", epochs), ("steps", steps)):
        if count is not None and not count > 0:
            raise ValueError(f"{name} is {count}; it must be above 0, or there is nothing to add noise to.")
    if steps is None:
        assert epochs is not None
        # A round of the loader has a whole number of steps: five rounds at q = 0.3 are 20 steps, not ceil(16.7). The
        # relative slack keeps 1 / (1 / n) = n, whatever the rounding.
        round_steps = math.ceil(1 / sample_rate * (1 - 1e-12))
        steps = math.ceil(epochs * round_steps * (1 - 1e-12))

    def epsilon(sigma: float) -> float:
        judge = create_accountant(accountant)
        judge.step(noise_multiplier=sigma, sample_rate=sample_rate, steps=steps)
        return judge.get_epsilon(target_delta, **kwargs)

    low, high = 0.0, 1.0
    while epsilon(high) > target_epsilon:
        low, high = high, 2 * high
        if high > LARGEST_SIGMA:
            raise ValueError(f"Even a noise multiplier of {low:g} exceeds epsilon {target_epsilon}; raise the budget.")
    low_value, high_value = math.inf, epsilon(high) - target_epsilon
    # Regula falsi on log epsilon where both ends are finite, with a bisection whenever it stalls.
    side = 0
    while high - low > sigma_tolerance:
        middle = (low + high) / 2
        if math.isfinite(low_value) and side < 2:
            secant = high - high_value * (high - low) / (high_value - low_value)
            middle = min(max(secant, low + sigma_tolerance / 2), high - sigma_tolerance / 2)
        value = epsilon(middle) - target_epsilon
        if value > 0.0:
            side = 0 if side < 0 else side + 1
            low, low_value = middle, value
        else:
            side += 1
            high, high_value = middle, value
        if side >= 3:
            side = 0
    return high

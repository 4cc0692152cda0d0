"""Calibration: the smallest noise for a privacy budget."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from typing import Any

from dpcore.accountants.accountant import BINS, DELTA_RULE, Rate, count
from dpcore.accountants.registry import create_accountant
from dpcore.arguments import check_number

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
    sampling: str = "poisson",
    **kwargs: Any,
) -> float:
    """Return the smallest noise multiplier whose epsilon does not exceed the target.

    It never overshoots: the sigma returned is the end of the bracket that meets the budget.

    Args:
        target_epsilon: ε, above 0.
        target_delta: δ, in (0, 1).
        sample_rate: q, the chance of an example to be in a batch, in (0, 1].
        epochs: How many rounds of ceil(1 / sample_rate) steps each; or
        steps: how many steps. Give exactly one of the two.
        accountant: The accountant's name.
        epsilon_tolerance: Accepted for compatibility and not needed.
        sigma_tolerance: The result is above the smallest σ by no more than this.
        sampling: "poisson"; or, for epochs of round(1 / sample_rate) batches of which a begun one counts whole,
            "bins" or "shuffle".
        **kwargs: Options of the accountant's ``get_epsilon``.

    Raises:
        ValueError: a number is out of its range, or the budget cannot be met.
    """
    rule = "it must be above 0 and finite (training without noise is noise_multiplier=0.0 of make_private)"
    check_number("target_epsilon", target_epsilon, lambda e: 0.0 < e < math.inf, rule)
    check_number("target_delta", target_delta, lambda d: 0.0 < d < 1.0, DELTA_RULE)
    check_number("sigma_tolerance", sigma_tolerance, lambda t: t > 0.0, "it must be above 0, for instance 1e-6")
    rate, number = counted_as(sampling, sample_rate, epochs, steps)

    def epsilon(sigma: float) -> float:
        judge = create_accountant(accountant)
        count(judge, sigma, rate, number)
        return judge.get_epsilon(target_delta, **kwargs)

    return _smallest(epsilon, target_epsilon, sigma_tolerance)


def count_steps(sample_rate: float, epochs: float | None = None, steps: int | None = None) -> int:
    """Return ``steps``, or the number of steps of ``epochs`` rounds of ceil(1 / sample_rate) each.

    Raises:
        ValueError: not exactly one of the two is given, or a number is out of its range.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("Give exactly one of steps and epochs.")
    check_number("sample_rate", sample_rate, lambda q: 0.0 < q <= 1.0, "it must lie in (0, 1]")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            rule = "it must be above 0, or there is nothing to add noise to"
            check_number(name, value, lambda n: 0.0 < n < math.inf, rule)
    if steps is None:
        assert epochs is not None
        # A round of the loader has a whole number of steps: five rounds at q = 0.3 are 20 steps, not ceil(16.7). The
        # relative slack keeps 1 / (1 / n) = n, whatever the rounding.
        round_steps = math.ceil(1 / sample_rate * (1 - 1e-12))
        return math.ceil(epochs * round_steps * (1 - 1e-12))
    return steps


def counted_as(
    sampling: str, sample_rate: float, epochs: float | None = None, steps: int | None = None
) -> tuple[Rate, int]:
    """Return the rate and the number under which an accountant counts so many rounds, or steps.

    Raises:
        ValueError: there is no such sampler; or as :func:`count_steps`.
    """
    if sampling not in ("poisson", BINS, "shuffle"):
        raise ValueError(f"sampling is {sampling!r}; it must be 'poisson', 'bins' or 'shuffle'.")
    of_poisson = count_steps(sample_rate, epochs, steps)
    if sampling == "poisson":
        return sample_rate, of_poisson
    bins = max(1, round(1 / sample_rate))
    # A shuffled epoch without its last, shorter batch has so many at least.
    least = bins if sampling == BINS else max(1, int(1 / sample_rate + 1e-9))
    begun = -(-of_poisson // least) if epochs is None else math.ceil(epochs * (1 - 1e-12))
    return (BINS, bins) if sampling == BINS and bins > 1 else 1.0, begun


def customary_delta(examples: int) -> float:
    """Return the largest power of ten below 1 / ``examples``, for instance 1e-5 for 60,000."""
    return float(f"1e-{len(str(examples))}")


def rounded_up(epsilon: float, digits: int = 3) -> str:
    """Return ``epsilon`` in words with ``digits`` significant digits, never below its value: it is a bound."""
    if not math.isfinite(epsilon):
        return str(epsilon)
    upward = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(upward.plus(decimal.Decimal(epsilon))):.12g}"


def _smallest(epsilon: Callable[[float], float], target_epsilon: float, tolerance: float) -> float:
    """The smallest sigma, to ``tolerance``, whose epsilon is at most the target; from the side that is."""
    low, high = 0.0, 1.0
    while epsilon(high) > target_epsilon:
        low, high = high, 2 * high
        if high > LARGEST_SIGMA:
            raise ValueError(f"Even a noise multiplier of {low:g} exceeds epsilon {target_epsilon}; raise the budget.")
    low_value, high_value = math.inf, epsilon(high) - target_epsilon
    # Regula falsi on log epsilon where both ends are finite, with a bisection whenever it stalls.
    side = 0
    while high - low > tolerance:
        middle = (low + high) / 2
        if math.isfinite(low_value) and side < 2:
            secant = high - high_value * (high - low) / (high_value - low_value)
            middle = min(max(secant, low + tolerance / 2), high - tolerance / 2)
        if not low < middle < high:
            middle = (low + high) / 2
            if not low < middle < high:
                break  # no float lies between them
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

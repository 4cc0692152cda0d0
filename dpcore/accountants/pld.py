"""The tight accountant: the distribution of the privacy loss, discretised with a proof and composed by FFT.

One step on neighbours that differ by one example is the pair P = (1-q) N(0, σ²) + q N(1, σ²), Q = N(0, σ²) (an example
is removed) or the same pair swapped (added). With the privacy loss l = log dP/dQ under P,

    δ(ε) = E_P[(1 - e^{ε - l})_+],

and losses of independent steps add up. Four things keep the results bounds:

* Discretisation. The mass of each cell [kh, (k+1)h] of losses moves to the cell's two ends so that its mass under P and
  under Q stay as they are. That is a spread of e^{-l} with equal mean, and the integrand is convex in e^{-l}: δ can
  only grow, and only by O(h²) (the "connect the dots" construction of Doroshenko et al. 2022).
* The lower bound comes from the same distribution, by how much the spread can have added at most: see :func:`_lower`.
* Tilting. Instead of p(l) the FFT composes p(l) e^{λl} / M(λ) with λ chosen so that its mass lies around the answer.
  Rounding errors are then relative to δ, however small δ is, and the window need only cover some deviations.
* Tails and rounding. What leaves the window wraps around, losses beyond the largest considered count as infinite, the
  FFT has an error: each is bounded and charged against the bound at hand.

Where the loss has so heavy a tail that no λ concentrates it (q of 1e-9 with σ of 0.5), the FFT's error is absolute,
about 1e-16 times the number of steps that leave the most likely cell; for a delta below that the Rényi bound is
returned.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy

from dpcore.accountants.accountant import History, IAccountant, poisson_steps, released_of
from dpcore.accountants.composition import ERROR, LARGEST_WINDOW, TAIL_SHARE, Curve, choose_tilt, compose
from dpcore.accountants.gdp import gaussian_epsilon
from dpcore.accountants.losses import losses_of
from dpcore.accountants.rdp import renyi_epsilon
from dpcore.accountants.risk import Risk, check_rate, risk_of

MEANINGLESS = 500.0
"""An epsilon beyond which nothing is promised, e^ε leaves the floats, and the Rényi bound is tight enough."""


def _upper(curve: Curve, delta: float) -> float:
    """The smallest epsilon of which the curve proves that it suffices."""
    guess = curve.epsilon(delta - curve.lost)
    if not math.isfinite(guess):
        return math.inf
    # Wrapping only adds; rounding may have taken away.
    return max(guess, curve.epsilon(delta - curve.lost - curve.untilted(curve.rounding, guess)))


def _lower(curve: Curve, count: int, h: float, delta: float) -> float:
    """An epsilon that does not suffice: the true δ is still at least ``delta`` there.

    Write D(α) for the true curve at α = e^ε, convex and falling, and D' >= D for the spread one; E = D' - D. Each
    step's spread multiplies e^{-l} by a factor of mean 1 within [e^{-h}, e^h], so it is dominated in convex order by
    the factor that takes those two ends only. With V the product of ``count`` such independent factors, D'(α) <= E_V
    D(αV), hence

        E_V[E(αV)] <= E_V[D'(αV)] - D'(α) =: C.

    D is convex, so D(α) >= 2 D(αv) - D(α(2v - 1)) for v > 1; averaged over V > 1, with D = D' - E where it enters
    positively and D <= D' where it enters negatively,

        D(α) >= E[2 D'(αV) - D'(α(2V - 1)) | V > 1] - 2 C / P(V > 1):

    second order in h, and computable.
    """
    up = 1 / (1 + math.exp(h))
    # Beyond this many deviations lies less than TAIL_SHARE of delta.
    width = math.sqrt(count) * math.sqrt(-2 * math.log(TAIL_SHARE * delta)) / 2 + 1
    ups = np.arange(max(0, math.floor(count * up - width)), min(count, math.ceil(count * up + width)) + 1)
    weights = scipy.stats.binom.pmf(ups, count, up)
    log_v = h * (2.0 * ups - count)
    rising = log_v > 0
    positive, log_rising = weights[rising], log_v[rising]
    mass = float(positive.sum())
    log_twice = np.log1p(2 * np.expm1(log_rising))

    def bound(epsilon: float) -> float:
        average = float(weights @ curve.delta(epsilon + log_v)) + TAIL_SHARE * delta
        excess = average - float(curve.delta(np.array(epsilon)))
        value = positive @ (2 * curve.delta(epsilon + log_rising) - curve.delta(epsilon + log_twice)) / mass
        moved = curve.untilted(curve.wrapped + curve.rounding, epsilon + float(log_v[0]))
        slack = 6 * (curve.lost + curve.lifted + moved)
        return float(value) - 2 * max(0.0, excess) / mass - slack

    high, least, stride = curve.epsilon(delta), h - float(log_v[0]), ERROR / 16
    while True:
        low = high - stride
        if not math.isfinite(high) or low <= least:
            return 0.0
        if bound(low) >= delta:
            break
        high, stride = low, 2 * stride
    while high - low > 1e-9 + 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if bound(middle) >= delta else (low, middle)
    return low


def epsilon_upper(history: History, delta: float, error: float = ERROR) -> float:
    """An upper bound, to about ``error``, on the epsilon of a history with positive noise multipliers and rates."""
    exact = _exact(history, delta)
    if exact is not None:
        return exact
    renyi = renyi_epsilon(history, delta)[0]
    if renyi > MEANINGLESS:
        return renyi
    tight, largest = _direction(history, delta, True, False, error)[1], _largest_loss_of_addition(history)
    if largest > tight:
        tight = max(tight, min(largest, _direction(history, delta, False, False, error)[1]))
    # Both are bounds, and where the FFT cannot resolve delta this one remains.
    return min(tight, renyi)


def epsilon_bounds(history: History, delta: float, error: float = ERROR) -> tuple[float, float]:
    """(lower, upper) bounds, refined until they are within ``error`` of each other or the grid is at its finest.

    The lower one is 0 where the Rényi bound is above MEANINGLESS.
    """
    exact = _exact(history, delta)
    if exact is not None:
        return exact, exact
    renyi = renyi_epsilon(history, delta)[0]
    if renyi > MEANINGLESS:
        return 0.0, renyi
    bounds, largest = [_direction(history, delta, True, True, error)], _largest_loss_of_addition(history)
    if largest > bounds[0][0]:
        low, high = _direction(history, delta, False, True, error)
        bounds.append((low, min(high, largest)))
    upper = min(max(high for _, high in bounds), renyi)
    return max(low for low, _ in bounds), upper


def _largest_loss_of_addition(history: History) -> float:
    """An ε that always suffices where an example is added: a step's loss is -log(1 - q + q e^...), at most -log(1 - q).

    After few steps that is where the losses end, and the FFT's rounding may exceed what δ leaves there.
    """
    return sum(math.inf if isinstance(q, tuple) else t * -math.log1p(-min(q, 1.0 - 1e-16)) for _, q, t in history)


def _exact(history: History, delta: float) -> float | None:
    """Without subsampling the composition is one Gaussian mechanism with μ² = Σ T / σ².

    And an example that is drawn at all with probability at most delta needs no epsilon.
    """
    steps = poisson_steps(history)
    if steps is None:
        return None
    if sum(t * q for _, q, t in steps) <= delta:
        return 0.0
    if any(q < 1.0 for _, q, _ in steps):
        return None
    return gaussian_epsilon(delta, math.sqrt(sum(t / s**2 for s, _, t in steps)))


def _direction(
    history: History, delta: float, removal: bool, both: bool, error: float, least: bool = False
) -> tuple[float, float]:
    """(lower, upper) for removing or for adding an example; the lower one is 0 unless ``both``."""
    steps = losses_of(history, removal)
    total = sum(step.count for step in steps)
    mass = TAIL_SHARE * delta / total
    tilt = choose_tilt(steps, delta, mass, least)
    finest = max(32 * tilt.deviation, *(step.width(mass) for step in steps)) / LARGEST_WINDOW
    # Moving every step's loss by at most h moves their sum by at most their number times h.
    h = max(tilt.step_deviation / 16, error / 4 / total, finest)
    high = _upper(compose(steps, tilt, h, mass, delta), delta)
    if high == math.inf and not least:
        found = _direction(history, delta, removal, both, error, least=True)
        if found[1] < math.inf:
            return found
    while h / 2 >= finest and not (least and high == math.inf):
        h /= 2
        coarser, high = high, min(high, _upper(compose(steps, tilt, h, mass, delta), delta))
        # The error falls with h²: what is left is a third of the last improvement. None at all proves nothing: both
        # grids may still be too coarse for the bulk of a heavy-tailed loss.
        if 0.0 < coarser - high <= error / 2:
            break
    if not both or high == 0.0:
        return 0.0, high
    h = max(finest, min(h, math.sqrt(error / (6 * total * tilt.rate))))
    while True:
        curve = compose(steps, tilt, h, mass, delta)
        low, high = _lower(curve, total, h, delta), min(high, _upper(curve, delta))
        if high - low <= error or h / 2 < finest:
            return low, high
        h /= 2


class PLDAccountant(IAccountant):
    """The default accountant. ``get_epsilon`` is an upper bound on the true epsilon, within 1e-3 of it.

    For epochs of balls in bins it is within a thousandth of the true epsilon, or 1e-3 where that is more.

    The risks (:meth:`tpr_at`, :meth:`trade_off`, :meth:`advantage`, :meth:`mu`) hold against every attack that knows
    all other examples and all weights ever released, on whether one example was added or removed.
    """

    takes_bins = True

    def get_epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """(lower, upper) bounds on the true epsilon at ``delta``; the lower one is 0 where there are balls in bins."""
        upper = self.get_epsilon(delta)
        if upper in (0.0, math.inf):
            return upper, upper
        released = released_of(self.history)
        if poisson_steps(released) is None:
            return 0.0, upper  # the law of an epoch is an upper bound itself
        lower, tight = epsilon_bounds(released, delta)
        # Failures may raise epsilon, and need not.
        return lower, max(lower, tight if not self.failure_probability else upper)

    def trade_off(self, alpha: float | np.ndarray) -> Any:
        """Return the least rate of false negatives of any attack on membership, beside a rate of false positives.

        Args:
            alpha: The rate of false positives, in [0, 1], or an array of them.

        Returns:
            A lower bound of the same shape; 1 - ``alpha`` where nothing was released.

        Raises:
            ValueError: a rate is not in [0, 1].
        """
        least = self._risk().trade_off(check_rate("alpha", alpha))
        return least if np.ndim(alpha) else float(least)

    def tpr_at(self, fpr: float | np.ndarray) -> Any:
        """Return the largest true positive rate of any attack on membership, beside a false positive rate.

        Args:
            fpr: The false positive rate, in [0, 1], or an array of them.

        Returns:
            An upper bound of the same shape; ``fpr`` itself where nothing was released.

        Raises:
            ValueError: a rate is not in [0, 1].
        """
        return 1.0 - self.trade_off(check_rate("fpr", fpr) if np.ndim(fpr) else float(check_rate("fpr", fpr)))

    def advantage(self) -> float:
        """Return the largest difference of an attack's true and false positive rates: the total variation."""
        return self._risk().advantage

    def mu(self) -> float:
        """Return the smallest μ with which the run is μ-Gaussian private, for rates of errors of at least 1e-10."""
        return self._risk().mu

    def _risk(self) -> Risk:
        return risk_of(tuple(self.history), self.failure_probability)

    def _epsilon(self, history: History, delta: float, **options: Any) -> float:
        """``eps_error``: distance to the truth that is aimed at, 5e-4 if larger or not given.

        ``delta_error``, known to Opacus, is not needed: nothing is taken from delta.
        """
        return epsilon_upper(history, delta, min(ERROR, options.get("eps_error") or ERROR))

    @classmethod
    def mechanism(cls) -> str:
        return "prv"

"""Read off the privacy losses what an attack may find out: the trade-off between its two errors.

An attack that decides whether a person's example was in the data errs in two ways: it calls others members (false
positives, at the rate α) and members others (false negatives, at the rate β). A mechanism with δ(ε), for removal and
for addition, leaves it

    β >= f(α) = max over ε >= 0 of 1 - δ(ε) - e^ε α and of e^{-ε} (1 - δ(ε) - α),

whatever it knows and computes (Dong, Roth and Su 2022, proposition 2.12). Here δ is an upper bound at every ε, so that
f is a lower bound: an attack may do worse than what is said, never better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy

from dpcore.accountants.accountant import History, Rate, released_of, totals
from dpcore.accountants.composition import LARGEST_WINDOW, TAIL_SHARE, Curve, choose_tilt, compose
from dpcore.accountants.losses import losses_of
from dpcore.accountants.rdp import renyi_epsilon
from dpcore.arguments import check_number

SMALLEST_RATE = 1e-10
"""Rates of errors below are not looked at for μ: nobody could measure them."""

# The losses are composed around the answer to each of these deltas.
_FOCI = (1e-12, 1e-9, 1e-6, 1e-4, 1e-2, 0.3)
_ERROR = 2e-3
"""The grid's part of an epsilon, about; a true positive rate is off by as much, relative to it."""
_POINTS = 1000
_LARGEST_EPSILON = 500.0


@dataclass(frozen=True, eq=False)
class Risk:
    """The trade-off curve, convex, symmetric and linear between its corners.

    ``alpha`` and ``beta``: [corners], rates of false positives, rising, and of false negatives. ``failure``: how often
    all this does not hold, see :meth:`dpcore.accountants.IAccountant.add_failure_probability`.
    """

    alpha: np.ndarray
    beta: np.ndarray
    failure: float = 0.0

    def trade_off(self, alpha: np.ndarray) -> np.ndarray:
        """Return the least rates of false negatives beside these of false positives."""
        # A run that fails is another one with at most this chance, on either side.
        found = np.interp(np.minimum(alpha + self.failure, 1.0), self.alpha, self.beta)
        return np.maximum(found - self.failure, 0.0)

    @property
    def advantage(self) -> float:
        """The largest true positive rate less its false positive rate."""
        return float(np.max(1.0 - self.alpha - self.trade_off(self.alpha), initial=0.0))

    @property
    def mu(self) -> float:
        """The smallest μ whose Gaussian trade-off curve lies nowhere above, for rates from SMALLEST_RATE on."""
        alpha = np.concatenate([[SMALLEST_RATE], self.alpha])
        beta = self.trade_off(alpha)
        seen = (alpha >= SMALLEST_RATE) & (beta >= SMALLEST_RATE)
        if not seen[0]:
            return math.inf
        # Between corners a Gaussian curve, which is convex, lies below the line.
        return max(0.0, float(np.max(-scipy.special.ndtri(alpha[seen]) - scipy.special.ndtri(beta[seen]))))


def check_rate(name: str, rate: float | np.ndarray) -> np.ndarray:
    """Return a rate of errors, or an array of them; ValueError unless each lies in [0, 1]."""
    if np.ndim(rate) == 0:
        return np.array(check_number(name, rate, lambda r: 0.0 <= r <= 1.0, "it is a rate, so it must lie in [0, 1]"))
    rates = np.asarray(rate, dtype=np.float64)
    for value in rates.ravel():
        check_rate(name, float(value))
    return rates


@lru_cache(maxsize=16)
def risk_of(history: tuple[tuple[float, Rate, int], ...], failure: float = 0.0) -> Risk:
    """Return the risk of a history of Poisson-subsampled Gaussian steps and epochs of balls in bins."""
    steps = released_of([(s, q, t) for (s, q), t in totals(history).items()])
    if not steps:
        return Risk(np.array([0.0, 1.0]), np.array([1.0, 0.0]), failure)
    if any(s == 0.0 for s, _, _ in steps) or renyi_epsilon(steps, _FOCI[0])[0] > _LARGEST_EPSILON:
        return Risk(np.array([0.0, 1.0]), np.array([0.0, 0.0]), failure)
    epsilons, deltas = _privacy_curve(steps)
    return Risk(*_corners(np.exp(epsilons), deltas), failure)


def _privacy_curve(steps: History) -> tuple[np.ndarray, np.ndarray]:
    """Return rising epsilons from 0 on, and an upper bound on δ at each, for removal and for addition."""
    sides = [[_around(steps, focus, removal) for focus in _FOCI] for removal in (True, False)]
    parts = [curve.losses[curve.losses > 0.0] for side in sides for curve in side]
    thinned = [part[:: max(1, len(part) // _POINTS)] for part in parts]
    epsilons = np.unique(np.concatenate([[0.0], *thinned]))
    epsilons = epsilons[epsilons <= _LARGEST_EPSILON]
    deltas = [np.min([_delta(curve, epsilons) for curve in side], axis=0) for side in sides]
    return epsilons, np.minimum(np.maximum(*deltas), 1.0)


def _around(steps: History, focus: float, removal: bool) -> Curve:
    """Return the composed losses, most exact where δ is ``focus``."""
    each = losses_of(steps, removal)
    total = sum(step.count for step in each)
    mass = TAIL_SHARE * focus / total
    tilt = choose_tilt(each, focus, mass)
    finest = max(32 * tilt.deviation, *(step.width(mass) for step in each)) / LARGEST_WINDOW
    # What the spread to a grid adds to an epsilon falls with the square of the spacing.
    h = max(finest, min(tilt.step_deviation / 16, math.sqrt(_ERROR / (6 * total * tilt.rate))))
    return compose(each, tilt, h, mass, focus)


def _delta(curve: Curve, epsilons: np.ndarray) -> np.ndarray:
    """Return an upper bound on δ at each epsilon: wrapping only adds, rounding may have taken away."""
    rounding = curve.rounding * np.exp(np.minimum(600.0, curve.log_moment - curve.rate * epsilons))
    return curve.delta(epsilons) + curve.lost + rounding


def _corners(slopes: np.ndarray, deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of the largest of the lines 1 - δ - slope α, with their mirror images."""
    kept: list[int] = []
    for k in range(len(slopes)):
        # Lines that are nowhere the largest are above the chord of their neighbours' δ, a convex curve in the slope.
        while len(kept) > 1 and _is_above(slopes, deltas, kept[-2], kept[-1], k):
            kept.pop()
        if not kept or deltas[k] < deltas[kept[-1]]:
            kept.append(k)
    slope, delta = slopes[kept], deltas[kept]
    alpha = -np.diff(delta) / np.diff(slope)
    beta = 1.0 - delta[:-1] - slope[:-1] * alpha
    # Down to no false positives at all, where the last line ends; and the mirror image, false rates exchanged.
    alpha, beta = np.append(alpha, 0.0)[::-1], np.append(beta, 1.0 - delta[-1])[::-1]
    alpha, beta = np.concatenate([alpha, beta[::-1], [1.0]]), np.concatenate([beta, alpha[::-1], [0.0]])
    return np.maximum.accumulate(alpha), np.minimum.accumulate(beta)  # but for the last bits they rise and fall


def _is_above(slopes: np.ndarray, deltas: np.ndarray, first: int, middle: int, last: int) -> bool:
    chord = (deltas[last] - deltas[first]) * (slopes[middle] - slopes[first])
    return bool((deltas[middle] - deltas[first]) * (slopes[last] - slopes[first]) >= chord)

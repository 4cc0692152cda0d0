"""Is it Gaussian noise? Statistics with known distributions under "independent N(0, 1)", as pure functions.

Each returns an absolute standard score (or D sqrt(n)) and belongs to a limit that a right adapter exceeds with
probability below ALPHA, Bonferroni's bound over the number of scores taken. Standard library and numpy only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

ALPHA = 1e-6
"""Chance of one false alarm per check; a gate has some ten of them."""

SMALLEST_FOR_SPREAD = 8
"""Wilson and Hilferty's approximation of chi-square is good from about here; where it errs, below, it errs to the side
of admitting."""

SMALLEST_FOR_CORRELATION = 1000
"""A sum of n products of normals has excess kurtosis 6/n: at 5 standard deviations the normal tail is right to 16 %."""

KOLMOGOROV_SAMPLE = 100_000
DISTANT_STEPS = 7


@dataclass(frozen=True)
class Score:
    """The largest of several scores, its limit and what it was the score of."""

    value: float
    limit: float
    where: str

    @property
    def passed(self) -> bool:
        return bool(self.value <= self.limit)


def normal_limit(tests: int) -> float:
    """|z| that the largest of ``tests`` standard normal scores exceeds with probability at most ALPHA."""
    return NormalDist().inv_cdf(1.0 - ALPHA / (2 * max(1, tests)))


def largest(scores: Mapping[str, float]) -> Score:
    """NaN counts as infinitely large."""
    known = {name: math.inf if math.isnan(score) else abs(score) for name, score in scores.items()}
    where = max(known, key=lambda name: known[name])
    return Score(known[where], normal_limit(len(known)), where)


def mean_score(z: np.ndarray) -> float:
    """The mean of n values has standard deviation 1/sqrt(n)."""
    return float(z.mean() * math.sqrt(z.size))


def spread_score(z: np.ndarray) -> float:
    """Of the second moment around zero: sum z^2 is chi-square with n degrees of freedom, whose cube root is nearly
    normal (Wilson & Hilferty 1931)."""
    n = z.size
    variance = 2.0 / (9.0 * n)
    return float((np.cbrt(np.square(z).sum() / n) - (1.0 - variance)) / math.sqrt(variance))


def correlation_score(a: np.ndarray, b: np.ndarray) -> float:
    """Sum of products of n independent pairs: mean 0, variance n."""
    return float((a * b).sum() / math.sqrt(a.size))


def moments(z: np.ndarray, slices: Mapping[str, slice]) -> tuple[Score, Score]:
    """(means, spreads) over everything, for each parameter tensor and for each step of z [steps, parameters]."""
    groups = {"all": z} | {name: z[:, part] for name, part in slices.items()}
    groups |= {f"step {t}": row for t, row in enumerate(z)} if len(z) > 1 else {}
    means = {name: mean_score(group) for name, group in groups.items()}
    spreads = {name: spread_score(group) for name, group in groups.items() if group.size >= SMALLEST_FOR_SPREAD}
    return largest(means), largest(spreads)


def normality(z: np.ndarray) -> Score:
    """Kolmogorov and Smirnov's D sqrt(n) against N(0, 1) on a random subsample.

    P(D sqrt(n) > t) <= 2 exp(-2 t^2) (Massart 1990), for every n.
    """
    values = z.ravel()
    if values.size > KOLMOGOROV_SAMPLE:
        values = values[np.random.default_rng(0).choice(values.size, KOLMOGOROV_SAMPLE, replace=False)]
    limit = math.sqrt(-math.log(ALPHA / 2) / 2)
    if not np.isfinite(values).all():
        return Score(math.inf, limit, "a value that is not finite")
    n = values.size
    cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in np.sort(values)])
    steps = np.arange(n)
    distance = max(float(((steps + 1) / n - cdf).max()), float((cdf - steps / n).max()))
    return Score(distance * math.sqrt(n), limit, f"{n} values")


def independent_coordinates(z: np.ndarray, slices: Mapping[str, slice], shapes: Mapping[str, tuple[int, ...]]) -> Score:
    """Neighbours in memory, neighbouring rows of a matrix (one vector used for all rows?), and any two tensors
    element by element (one stream started anew for each tensor?)."""
    scores = {"neighbours": correlation_score(z[:, :-1], z[:, 1:])}
    for name, part in slices.items():
        row = math.prod(shapes[name][1:])
        if len(shapes[name]) > 1 and (part.stop - part.start - row) * len(z) >= SMALLEST_FOR_CORRELATION:
            values = z[:, part]
            scores[f"rows of {name}"] = correlation_score(values[:, :-row], values[:, row:])
    for (one, a), (other, b) in itertools.combinations(slices.items(), 2):
        common = min(a.stop - a.start, b.stop - b.start)
        if common * len(z) >= SMALLEST_FOR_CORRELATION:
            first, second = z[:, a.start : a.start + common], z[:, b.start : b.start + common]
            scores[f"{one} and {other}"] = correlation_score(first, second)
    return largest(scores)


def independent_steps(z: np.ndarray) -> Score:
    """Steps up to DISTANT_STEPS apart."""
    apart = range(1, min(len(z) - 1, DISTANT_STEPS) + 1)
    return largest({f"{k} apart": correlation_score(z[:-k], z[k:]) for k in apart})


def independent_runs(one: np.ndarray, other: np.ndarray) -> Score:
    """Two runs with different seeds, step by step and one step shifted."""
    return largest(
        {
            "same step": correlation_score(one, other),
            "one step later": correlation_score(one[:-1], other[1:]),
            "one step earlier": correlation_score(one[1:], other[:-1]),
        }
    )

"""Simulated measurements, by which the statistics of the harness are tried."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.analysis import stats
from harness.analysis.sequential import FIRST_LOOK, Rule

KINDS = ("normal", "tails", "outliers", "exponential", "levels", "correlated")
INDEPENDENT = KINDS[:-1]


def series(
    runs: int,
    trials: int,
    seed: int,
    sd: float = 0.015,
    kind: str = "normal",
    effect: float = 0.0,
    at: int | None = None,
) -> np.ndarray:
    """Generated values [trials, runs] around 1. ``kind``: ``normal``; ``tails`` (Student's t, 5 degrees of freedom);
    ``outliers`` (one run in 20 slower, by an exponential of mean 4 sd); ``exponential``; ``levels`` (normal with
    sd / 3, 30 % of the runs on a second level 8/3 sd higher); ``correlated`` (neighbours by 0.4). From run ``at`` on
    (default: the middle) all values are (1 + effect) times as large."""
    rng = np.random.default_rng(seed)
    e = rng.standard_normal((trials, runs))
    if kind == "tails":
        e = rng.standard_t(5, (trials, runs)) * math.sqrt(3 / 5)
    elif kind == "outliers":
        e += (rng.random((trials, runs)) < 0.05) * rng.exponential(4, (trials, runs))
    elif kind == "exponential":
        e = rng.exponential(1, (trials, runs))
    elif kind == "levels":
        e = e / 3 + 8 / 3 * (rng.random((trials, runs)) < 0.3)
    elif kind == "correlated":
        for t in range(1, runs):
            e[:, t] = 0.4 * e[:, t - 1] + math.sqrt(1 - 0.4**2) * e[:, t]
    elif kind != "normal":
        raise ValueError(f"No noise is called {kind!r}: {', '.join(KINDS)}.")
    factor = np.where(np.arange(runs) < (runs // 2 if at is None else at), 1.0, 1.0 + effect)
    values: np.ndarray = np.exp(sd * e) * factor
    return values


@dataclass(frozen=True)
class Noise:
    """The noise model of :mod:`harness.analysis.stats`. Standard deviations of log seconds.

    ``paired_sd``: of e[b] - e[a] inside a block. ``drift_sd``: of the step of the random walk d from block to block.
    """

    paired_sd: float = 0.015
    drift_sd: float = 0.03


def verdicts(
    rounds: int, effect: float, trials: int, seed: int, noise: Noise | None = None, margin: float = stats.MARGIN
) -> dict[str, float]:
    """Return how often each verdict is given if b truly takes (1 + effect) times as long as a. ``effect = 0`` is an A/A
    test.

    Returns the share of ``trials`` per verdict (``"none"`` under the minimum of rounds).
    """
    noise = noise or Noise()
    rng = np.random.default_rng(seed)
    shape = (trials, rounds)
    drift = np.cumsum(rng.normal(0.0, noise.drift_sd, shape), axis=1)
    own = noise.paired_sd / math.sqrt(2)
    seconds_a = np.exp(drift + rng.normal(0.0, own, shape))
    seconds_b = (1 + effect) * np.exp(drift + rng.normal(0.0, own, shape))
    counts = dict.fromkeys(("faster", "slower", "equivalent", "ambiguous", "none"), 0)
    for a, b in zip(seconds_a, seconds_b, strict=True):
        log_ratios = stats.paired_log_ratios(dict(enumerate(a)), dict(enumerate(b)))
        counts[stats.compare(log_ratios, margin).verdict or "none"] += 1
    return {verdict: count / trials for verdict, count in counts.items()}


@dataclass(frozen=True)
class Course:
    """Many simulated comparisons of one cell, [trials] each: ``stopped`` after so many blocks, and how it ended."""

    stopped: np.ndarray
    alert: np.ndarray
    different: np.ndarray
    equivalent: np.ndarray


def follow(paths: np.ndarray, rule: Rule) -> Course:
    """:func:`harness.analysis.sequential.judge` after every block, until it is clear, on each row of ``paths``, of
    [trials, rule.rounds]."""
    trials, rounds = paths.shape
    if rounds != rule.rounds:
        raise ValueError(f"Paths have {rounds} blocks, the rule {rule.rounds}.")
    n = np.arange(1, rounds + 1)
    mean = np.cumsum(paths, axis=1) / n
    spread = np.maximum(np.cumsum(paths**2, axis=1) - n * mean**2, 0.0)
    error = np.sqrt(spread / np.maximum(n - 1, 1) / n)[:, FIRST_LOOK - 1 :]
    mean = mean[:, FIRST_LOOK - 1 :]
    looks = range(FIRST_LOOK, rounds + 1)
    half = error * np.array([rule.critical(k) for k in looks])
    inner = error * np.array([rule.critical_of_equivalence(k) for k in looks])
    limit = math.log1p(rule.threshold)
    different = np.abs(mean) > half
    within = np.abs(mean) + inner < limit
    clear = within | (different & (np.abs(mean) > limit))
    clear[:, -1] = True
    at = (np.arange(trials), np.argmax(clear, axis=1))
    return Course(
        stopped=at[1] + FIRST_LOOK,
        alert=different[at] & (mean[at] > limit),
        different=different[at],
        equivalent=within[at] & ~different[at],
    )

"""Empirical lower bounds on epsilon: what an attacker can already tell apart, beside what the accountant promises.

Both audits know nothing of the mechanism but its outputs, and both bounds hold with the stated confidence: a correct
mechanism reads above its accountant's epsilon in at most 1 - confidence of all audits. A mechanism that reads above it
is broken; one that reads below it is not proven right.

* :func:`audit_step` (Jagielski et al. 2020; Nasr et al. 2021): many independent releases with and without one canary, a
  threshold on a score, Clopper-Pearson intervals for both error rates.
* :func:`audit_run` (Steinke, Nasr and Jagielski 2023): one run with many canaries, each included by a fair coin;
  guesses about the most telling ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

from dpcore.accountants.gdp import gaussian_epsilon

LARGEST_EPSILON = 200.0

Sample = Callable[[bool, int], np.ndarray]
"""(with the canary?, count) -> [count] scores of independent releases; a high score speaks for the canary."""

Run = Callable[[np.ndarray], np.ndarray]
"""(bool [m]: which canaries are in the data) -> [m] scores after one training run; high speaks for inclusion."""


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    ``epsilon_lower`` is a lower bound at ``delta``, with ``confidence``; ``epsilon`` is the accountant's, an upper
    bound if all is right. ``trials``: releases per world, or canaries. ``evidence``: what was counted, in words.
    """

    epsilon_lower: float
    epsilon: float
    delta: float
    confidence: float
    trials: int
    evidence: str

    @property
    def violated(self) -> bool:
        """True where the mechanism leaks more than the accountant says.

        False alarms occur with probability at most 1 - confidence.
        """
        return self.epsilon_lower > self.epsilon

    def __str__(self) -> str:
        verdict = "VIOLATED: more leaks than is accounted for" if self.violated else "consistent"
        return (
            f"epsilon at delta {self.delta:g}: audited >= {self.epsilon_lower:.4f} (confidence {self.confidence:.0%}, "
            f"{self.trials} trials, {self.evidence}), accountant {self.epsilon:.4f}: {verdict}"
        )


def audit_step(
    sample: Sample,
    *,
    epsilon: float,
    delta: float,
    trials: int,
    confidence: float = 0.95,
    gaussian: bool = False,
) -> Audit:
    """Return a lower bound of epsilon from scores of releases with and without a canary.

    One half of the scores chooses the threshold, the other half is judged. Without ``gaussian`` nothing is assumed: an
    (ε, δ)-private mechanism has 1 - δ - FN <= e^ε FP, so ε >= log((1 - δ - FN) / FP), and likewise with the two rates
    exchanged.

    Args:
        sample: ``sample(with the canary?, count)`` returns [count] scores of independent releases; high speaks for the
            canary.
        epsilon: The accountant's.
        delta: The δ of both epsilons, in [0, 1).
        trials: Scores with, and as many without the canary; at least 4, and thousands to say anything.
        confidence: Of the lower bound, in (0, 1).
        gaussian: Whether to test the stronger claim that the mechanism is μ-GDP, as a step without subsampling is (Nasr
            et al. 2023): μ >= -Φ⁻¹(FP) - Φ⁻¹(FN), turned into ε at ``delta``. It needs far fewer trials, and its number
            is a bound for mechanisms of that kind only.

    Raises:
        ValueError: there are fewer than 4 trials, or scores have the wrong shape or are not numbers.
    """
    _check(delta, confidence)
    if trials < 4:
        raise ValueError(f"trials is {trials}; an audit needs at least 4, and thousands to say anything.")
    scores = {included: _scores(sample(included, trials), trials) for included in (True, False)}
    half = trials // 2
    level = (1 - confidence) / 2

    def bound(false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        if not gaussian:
            return _indistinguishable(false_positive, false_negative, delta)
        mu = np.where(
            (false_positive < 1.0) & (false_negative < 1.0),
            -scipy.special.ndtri(false_positive) - scipy.special.ndtri(false_negative),
            0.0,
        )
        return np.maximum(mu, 0.0)

    # A larger bound at the same significance for every candidate; only the choice is made here, nothing is claimed.
    with_canary, without = np.sort(scores[True][:half]), np.sort(scores[False][:half])
    candidates = _candidates(with_canary, without)
    missed = np.searchsorted(with_canary, candidates, side="left")
    alarms = half - np.searchsorted(without, candidates, side="left")
    threshold = candidates[np.argmax(bound(_at_most(alarms, half, level), _at_most(missed, half, level)))]
    rest = trials - half
    missed_now = int((scores[True][half:] < threshold).sum())
    alarms_now = int((scores[False][half:] >= threshold).sum())
    value = float(
        bound(_at_most(np.array([alarms_now]), rest, level), _at_most(np.array([missed_now]), rest, level))[0]
    )
    if gaussian:
        value = gaussian_epsilon(delta, value) if value > 0.0 else 0.0
    evidence = f"{rest - missed_now} of {rest} found, {alarms_now} of {rest} false alarms"
    return Audit(
        value, epsilon, delta, confidence, trials, evidence + (", as a Gaussian mechanism" if gaussian else "")
    )


def audit_run(
    run: Run,
    *,
    canaries: int,
    epsilon: float,
    delta: float,
    guesses: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Audit:
    """Return a lower bound of epsilon from one training run in which each canary is included by a fair coin.

    The ``guesses`` / 2 highest scores are guessed to be included, as many lowest ones not, and nothing is said about
    the others.

    Args:
        run: ``run(included)``, bool [canaries], trains once and returns [canaries] scores; high speaks for inclusion.
        canaries: How many examples are included or not.
        epsilon: The accountant's.
        delta: The δ of both epsilons, in [0, 1).
        guesses: How many guesses are made; a tenth of the canaries by default. Fix it before the run.
        confidence: Of the lower bound, in (0, 1).
        seed: Of the coins; None draws them from the operating system.

    Raises:
        ValueError: the number of guesses is impossible, or scores have the wrong shape or are not numbers.
    """
    _check(delta, confidence)
    if guesses is None:
        guesses = max(2, canaries // 10)
    if not 1 <= guesses <= canaries:
        raise ValueError(f"guesses is {guesses} for {canaries} canaries; it must lie between 1 and their number.")
    included = np.random.default_rng(seed).random(canaries) < 0.5
    order = np.argsort(_scores(run(included.copy()), canaries), kind="stable")
    high = (guesses + 1) // 2
    correct = int(included[order[canaries - high :]].sum() + (~included[order[: guesses - high]]).sum())
    lower = run_epsilon(canaries, guesses, correct, delta, confidence)
    return Audit(lower, epsilon, delta, confidence, canaries, f"{correct} of {guesses} guesses correct")


def run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that ``correct`` of ``guesses`` refute, 0 where they refute none.

    Steinke et al. 2023, theorem 5.2: under (ε, δ)-privacy the number of correct guesses is at least v with probability
    at most f(v) + 2 m δ max_i (f(v - i) - f(v)) / i, where f is the upper tail of Binomial(guesses, e^ε / (1 + e^ε))
    and m the number of canaries.
    """
    _check(delta, confidence)

    def excess(epsilon: float) -> float:
        q = 1 / (1 + math.exp(-epsilon))
        tail = float(scipy.stats.binom.sf(correct - 1, guesses, q))
        steps = np.arange(1, correct + 1)
        below = np.cumsum(scipy.stats.binom.pmf(correct - steps, guesses, q)) / steps
        return tail + 2 * canaries * delta * float(below.max(initial=0.0)) - (1 - confidence)

    if excess(0.0) >= 0.0:
        return 0.0
    # The first term rises with epsilon and the second is a ripple on it: the first crossing is what is proven.
    grid = np.arange(0.0, LARGEST_EPSILON, 0.05)
    for low, high in itertools.pairwise(grid):
        if excess(float(high)) >= 0.0:
            return float(scipy.optimize.brentq(excess, low, high, xtol=1e-9)) - 1e-9
    return LARGEST_EPSILON


def _indistinguishable(false_positive: np.ndarray, false_negative: np.ndarray, delta: float) -> np.ndarray:
    """The largest epsilon that these error rates refute at ``delta``, by either of the two inequalities."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum(
            (1 - delta - false_negative) / false_positive, (1 - delta - false_positive) / false_negative
        )
        return np.log(np.maximum(ratios, 1.0))


def _at_most(count: np.ndarray, of: int, level: float) -> np.ndarray:
    """Clopper-Pearson: the rate is at most this, with probability 1 - ``level``, after ``count`` hits in ``of``."""
    count = np.minimum(count, of)
    return np.where(count == of, 1.0, scipy.stats.beta.ppf(1 - level, count + 1, np.maximum(of - count, 1)))


def _candidates(with_canary: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Thresholds at quantiles of both worlds' ascending scores, dense in the tails."""
    n = len(with_canary)
    ranks = np.unique(np.geomspace(1, n, 200).astype(int)) - 1
    return np.unique(np.concatenate([s[r] for s in (with_canary, without) for r in (ranks, n - 1 - ranks)]))


def _scores(scores: np.ndarray, count: int) -> np.ndarray:
    scores = np.asarray(scores, dtype=np.float64)
    if scores.shape != (count,):
        raise ValueError(f"The scores have shape {scores.shape}; {count} were asked for, so it must be ({count},).")
    if np.isnan(scores).any():
        raise ValueError("A score is not a number; a release that may be NaN tells its example apart by that alone.")
    return scores


def _check(delta: float, confidence: float) -> None:
    if not 0.0 <= delta < 1.0:
        raise ValueError(f"delta is {delta}; it must lie in [0, 1).")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must lie in (0, 1), for instance 0.95.")

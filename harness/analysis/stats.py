"""Statistics of a benchmark: pure functions on numbers, no files, no clock.

**The process is the unit of replication.** Epochs inside one process share its memory layout, its thread placement and
its compiled code; they are not independent samples of "how long an epoch takes". A process therefore contributes one
value, the median of its epochs, and n counts processes.

**Ratios are paired within blocks.** Write the seconds of contestant c in block k as

    log t[c, k] = m[c] + d[k] + e[c, k]

with the contestant's own level m, what the machine was like during the block d (heat, neighbours, drift: the same for
both contestants of the block), and independent noise e. The difference of two contestants inside a block,

    x[k] = log t[b, k] - log t[a, k] = (m[b] - m[a]) + (e[b, k] - e[a, k]),

is free of d however large the drift is. The x[k] are independent with a common mean log(ratio), so the mean of n of
them with Student's interval  mean +- t[n-1] * sd / sqrt(n)  covers log(ratio) with the stated probability if e is
normal, and nearly so otherwise. Exponentiated this is a ratio of (geometric) mean times and its interval. A bootstrap
of the median is not used: at n = 3 it calls 1/4 of equal pairs different, at n = 5 still 1/16.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special

CONFIDENCE = 0.95
MARGIN = 0.05
"""Relative difference that nobody cares about: +-5 %."""
INTERVAL_ROUNDS = 3
"""Fewer paired rounds or processes give no interval: Student's of two is thirteen standard errors wide."""
VERDICT_ROUNDS = 5
"""Fewer paired rounds give an interval, never a verdict."""

Verdict = Literal["faster", "slower", "equivalent", "ambiguous"]


def process_value(epoch_seconds: Sequence[float]) -> float:
    """Return the one value that a process contributes: the median of its epochs, in seconds.

    Raises ValueError for no epoch, or one that is not a positive finite number.
    """
    if not len(epoch_seconds) or not all(0.0 < value < math.inf for value in epoch_seconds):
        raise ValueError(f"Epoch seconds must be positive finite numbers, at least one; got {list(epoch_seconds)}.")
    return float(statistics.median(epoch_seconds))


@dataclass(frozen=True)
class MedianInterval:
    """Median of n values with [low, high]; ``coverage`` is the exact probability that the interval holds the median."""

    median: float
    low: float
    high: float
    n: int
    coverage: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> MedianInterval:
    """Return median with its distribution-free interval from order statistics.

    Each of n independent values of a continuous distribution lies below the true median with probability 1/2, so the
    number below it is binomial(n, 1/2), and [x(j), x(n+1-j)] (the j-th smallest and j-th largest) misses the median
    only if fewer than j lie on one side: coverage(j) = 1 - 2 P(Bin(n, 1/2) <= j - 1). The largest j with
    coverage(j) >= confidence is taken. For n < 6 not even j = 1 reaches 95 % (coverage 1 - 2^(1-n)): then the whole
    range is given, with its true coverage, and callers must call it a range. Under ``INTERVAL_ROUNDS`` values both ends
    are NaN: two values bound nothing (their range holds the median of every second pair).

    Raises ValueError for no value.
    """
    if len(values) == 0:
        raise ValueError("A median needs at least one value.")
    ordered = np.sort(np.asarray(values, dtype=float))
    n = ordered.size

    def coverage(j: int) -> float:
        return float(1.0 - 2.0 * special.bdtr(j - 1, n, 0.5))

    j = max((j for j in range(1, n // 2 + 1) if coverage(j) >= confidence), default=1)
    low, high = (ordered[j - 1], ordered[n - j]) if n >= INTERVAL_ROUNDS else (math.nan, math.nan)
    return MedianInterval(float(np.median(ordered)), float(low), float(high), n, max(0.0, coverage(j)))


def paired_log_ratios(a: Mapping[Hashable, float], b: Mapping[Hashable, float]) -> np.ndarray:
    """log(seconds of b / seconds of a) for every block that holds both, in the order of a. Float64 [n]."""
    return np.array([math.log(b[block] / a[block]) for block in a if block in b], dtype=float)


@dataclass(frozen=True)
class Comparison:
    """Contestant a against contestant b. ``ratio`` = seconds of b / seconds of a: above 1, a is the faster one.

    ``low`` and ``high`` bound the ratio with 95 % confidence (NaN under ``INTERVAL_ROUNDS`` pairs). ``verdict`` is
    about a; None under ``VERDICT_ROUNDS`` pairs. ``within_margin``: the equivalence test holds too, so a difference
    that was found is smaller than the margin. ``not_slower``: a is at most ``margin`` slower, with 95 % confidence;
    None where there is no verdict.
    """

    ratio: float
    low: float
    high: float
    n: int
    verdict: Verdict | None
    within_margin: bool
    not_slower: bool | None
    margin: float = MARGIN


def compare(log_ratios: Sequence[float] | np.ndarray, margin: float = MARGIN) -> Comparison:
    """Student's interval of the mean paired log-ratio, and what may be said about it.

    - ``faster`` / ``slower``: the 95 % interval lies above / below 0. If both are equal this happens in 5 % of cases.
    - ``equivalent``: two one-sided tests, each at 5 %, reject "log ratio <= -log(1+margin)" and "log ratio >=
      log(1+margin)"; that is the same as the 90 % interval lying inside +-log(1+margin). The union of the two nulls is
      tested at 5 % because both must be rejected (intersection-union). Merely finding no difference is never enough.
    - otherwise ``ambiguous``.

    A found difference is named even if it is also within the margin (``within_margin``): a true 2 % must be detectable.

    ``log_ratios``: [n] of log(seconds b / seconds a). Raises ValueError for none, or for a margin <= 0.
    """
    x = np.asarray(log_ratios, dtype=float)
    if x.size == 0:
        raise ValueError("A comparison needs at least one block that holds both contestants.")
    if margin <= 0:
        raise ValueError(f"The margin of equivalence must be positive, got {margin}.")
    mean = float(np.mean(x))
    if x.size < INTERVAL_ROUNDS:
        return Comparison(math.exp(mean), math.nan, math.nan, x.size, None, False, None, margin)
    low, high = t_interval(x, CONFIDENCE)
    inner_low, inner_high = t_interval(x, 1 - 2 * (1 - CONFIDENCE))
    limit = math.log1p(margin)
    within = -limit < inner_low and inner_high < limit
    verdict: Verdict | None = None
    if x.size >= VERDICT_ROUNDS:
        verdict = _verdict(low, high, within)
    # a / b = exp(-log ratio): its upper end is exp(-low).
    not_slower = bool(math.exp(-low) <= 1 + margin) if verdict else None
    return Comparison(math.exp(mean), math.exp(low), math.exp(high), x.size, verdict, within, not_slower, margin)


def _verdict(low: float, high: float, within: bool) -> Verdict:
    """``low``, ``high`` bound log(seconds of b / seconds of a)."""
    return "faster" if low > 0 else "slower" if high < 0 else "equivalent" if within else "ambiguous"


def against_fastest(log_ratios: Sequence[np.ndarray], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return interval of the log of (a contestant's time / that of the truly fastest of several others).

    ``log_ratios``: an array [n_j] for each of J others, of log(seconds of the contestant / seconds of that other) in
    the rounds that both share. With the true means delta[j] this is theta = max_j delta[j], which is not the mean of
    whichever other *looks* fastest: that one was partly lucky, and Student's interval against it covers 92 % with 12
    equal others and 3 rounds. Here, with alpha = 1 - confidence,

    - the upper end is the largest upper end of the one-sided intervals at alpha / 2: it is not below that of the truly
      fastest other, whoever that is, so it misses theta with probability alpha / 2 at most;
    - the lower end is the largest lower end of the one-sided intervals at alpha / (2 J): it exceeds theta only where
      one of J intervals misses its own delta[j] <= theta (Bonferroni), again with probability alpha / 2 at most.

    So with one other it is Student's interval, and with several it covers theta with at least ``confidence``, however
    the noise of the others differs. The price is at the lower end: with 12 others and 3 rounds it lies 15 standard
    errors away where Student's lies 4; more rounds are what helps. An other with fewer than ``INTERVAL_ROUNDS`` has no
    interval of its own and is left out; (NaN, NaN) where all are.
    """
    several = [x for x in log_ratios if x.size >= INTERVAL_ROUNDS]
    if not several:
        return math.nan, math.nan
    tail = (1.0 - confidence) / 2
    lower = max(t_interval(x, 1.0 - 2 * tail / len(several))[0] for x in several)
    upper = max(t_interval(x, 1.0 - 2 * tail)[1] for x in several)
    return lower, upper


@lru_cache(maxsize=4096)
def _quantile(freedom: int, probability: float) -> float:
    """Return a quantile of Student's distribution; a report asks for few of them, thousands of times."""
    return float(special.stdtrit(freedom, probability))


def t_interval(x: np.ndarray, confidence: float) -> tuple[float, float]:
    """Student's two-sided interval of the mean of x, [n] with n >= 2."""
    n = x.size
    half = _quantile(n - 1, 0.5 + confidence / 2) * float(np.std(x, ddof=1)) / math.sqrt(n)
    mean = float(np.mean(x))
    return mean - half, mean + half


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's correlation of x and y, [n] each: Pearson's of their ranks, equal values sharing the mean of
    theirs; NaN where all of one side are equal."""
    ranks = []
    for side in (np.asarray(x, dtype=float), np.asarray(y, dtype=float)):
        below = (side[None, :] < side[:, None]).sum(axis=1)
        ranks.append(below + ((side[None, :] == side[:, None]).sum(axis=1) - 1) / 2)
    if any(np.ptp(side) == 0 for side in ranks):
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])

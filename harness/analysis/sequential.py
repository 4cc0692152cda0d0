"""A paired comparison that looks after every block and keeps its error rate: pure functions on numbers.

**What is observed.** x[k] = log(seconds of head / seconds of base) in block k, one fresh process each, in random order
inside the block. If nothing changed, the two are exchangeable, so x[k] is symmetric about 0 whatever the machine does
to the block as a whole; the x[k] are taken as independent and normal with mean mu and unknown standard deviation. (For
symmetric variables with heavier tails Student's t is conservative: errors stay below what is stated, power falls.)

**Why looks need another limit.** Student's 95 % limit, applied after each of 16 looks, calls equal pairs different in
about 20 % of cases. Here the i-th look gets a limit c[n] on |t[n]| such that, over all looks together,

    P(|t[n]| > c[n] at some look n <= N | mu = 0) = alpha,

with alpha spent as alpha (n/N)^2 (Lan & DeMets' spending function, Kim & DeMets' power family): little on early looks,
whose t is wild, most near N. It is a group-sequential t-test with N fixed in advance. An anytime-valid confidence
sequence (a mixture over mu/sd) was the alternative: it needs no N, but pays for looks that are never made; at n = N =
20 and four cells it wants |t| > 4.1 where this wants 3.2, which costs some 60 % more blocks for the same power.

**The limits are computed, not simulated.** Let u = sum(x[1..n]) / (sqrt(n) |x[1..n]|), the cosine between the sample
and the vector of ones; t = u sqrt(n-1) / sqrt(1-u^2) grows with u. For normal x with mu = 0 the direction of x[1..n],
and with it u[1], .., u[n], is independent of its length, so with w = x[n+1] / |x[1..n]|

    u[n+1] = (sqrt(n) u[n] + w) / sqrt((n+1) (1+w^2)),        w sqrt(n) ~ Student's t with n degrees of freedom

is a Markov chain in one variable: no standard deviation enters. Given u, {|u[n+1]| > c} is a quadratic inequality in w,
so the masses of |u| that have not crossed yet are carried from look to look by exact distribution functions on a grid.

**Intervals.** Shifting x by mu, the same limits give intervals  mean +- c[n] sd / sqrt(n)  that hold mu at all looks at
once with probability 1 - alpha (Jennison & Turnbull's repeated confidence intervals), whatever rule ends the
comparison: a time limit, equivalence, a killed run.

**Many cells.** Each of m cells gets alpha / m (Bonferroni). So the chance that anything at all is called faster or
slower in a call in which nothing changed is at most alpha, and that of an alert, one of the two directions, at most
about alpha / 2. Holm's step-down would let a cell's limit depend on the others' stops and on the order of a resumed
run; it gains little where most cells are equal, so it is not used.

**What is an alert.** The whole interval lies above 0 *and* the estimate is above the threshold. The interval answers
whether there is a slowdown at all: that is what must be true of an alert. The threshold answers whether it is worth a
person's time. Asking that the whole interval be above the threshold would prove more ("by more than 5 %"), but needs
the effect to exceed the threshold by the interval's half width: a true 10 % at a paired deviation of 5 % takes about
twice the blocks, and people would answer by lowering the threshold. The price: a true slowdown between 0 and the
threshold can raise an alert, with an estimate that early stopping biases upwards. It is then a real slowdown, and the
interval that is shown reaches down to it. (``beyond`` says where the stronger claim holds too.)

**Equivalence** (two one-sided tests): the interval at 1 - 2 alpha of this cell alone lies inside +- threshold. To call
a cell equivalent whose change is at the threshold has a chance of at most alpha, over all looks; this is an error of
its own, never an alert, so it is not divided by m. Stopping for it only lowers the chance of alerts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special

from harness.analysis.stats import INTERVAL_ROUNDS, VERDICT_ROUNDS, Verdict

FIRST_LOOK = VERDICT_ROUNDS
SPENDING_POWER = 2.0
POWER = 0.8
QUANTILES = 400
GRID = 96
"""Cells of |u|. Doubling it moves no limit by more than 0.3 %."""


@lru_cache(maxsize=64)
def limits(alpha: float, first: int, last: int) -> tuple[float, ...]:
    """c[n] for n = first..last: |t[n]| crosses one of them with probability ``alpha`` if nothing changed.

    Raises ValueError for an ``alpha`` outside (0, 1) or ``first`` < 2.
    """
    if not 0.0 < alpha < 1.0 or not 2 <= first <= last:
        raise ValueError(f"Limits need 0 < alpha < 1 and 2 <= first <= last; got {alpha}, {first}, {last}.")
    spent = [alpha * (n / last) ** SPENDING_POWER for n in range(first, last + 1)]
    critical = float(special.stdtrit(first - 1, 1.0 - spent[0] / 2.0))
    found = [critical]
    edges = _edges(_cosine(critical, first))
    beyond = 2.0 * special.stdtr(first - 1, -_student(edges, first))
    for n, increment in zip(range(first, last), np.diff(spent), strict=True):
        at, mass = 0.5 * (edges[1:] + edges[:-1]), -np.diff(beyond)
        bound = _bound(at, mass, n, float(increment))
        found.append(float(_student(np.array([bound]), n + 1)[0]))
        edges = _edges(bound)
        beyond = _crossing(at[:, None], edges[None, :], n).T @ mass
    return tuple(found)


def _edges(bound: float) -> np.ndarray:
    """Return the edges of the cells of |u|, finest next to the bound, from where most crossings come."""
    return bound * (1.0 - np.linspace(1.0, 0.0, GRID + 1) ** 2)


def _cosine(t: float, n: int) -> float:
    return t / math.sqrt(t * t + n - 1)


def _student(u: np.ndarray, n: int) -> np.ndarray:
    """t of a cosine u, after n values."""
    return u * math.sqrt(n - 1) / np.sqrt(np.maximum(1.0 - u * u, 1e-300))


def _crossing(u: np.ndarray, bound: np.ndarray, n: int) -> np.ndarray:
    """P(|u[n+1]| > bound | u[n] = u): where (1-K) w^2 + 2 a w + a^2 - K > 0 for a = sqrt(n) u, K = bound^2 (n+1)."""
    a = math.sqrt(n) * u
    k = bound * bound * (n + 1)
    lead = np.where(np.abs(1.0 - k) < 1e-9, 1e-9, 1.0 - k)
    root = np.sqrt(np.maximum(k * (1.0 + a * a - k), 0.0))
    ends = np.sort(np.stack(np.broadcast_arrays((-a - root) / lead, (-a + root) / lead)), axis=0) * math.sqrt(n)
    # The smaller tail on either side, so that no difference of two numbers near 1 is taken.
    flipped = ends[0] > 0
    low, high = np.where(flipped, -ends[1], ends[0]), np.where(flipped, -ends[0], ends[1])
    inside = special.stdtr(n, high) - special.stdtr(n, low)
    outside = special.stdtr(n, ends[0]) + special.stdtr(n, -ends[1])
    return np.where(lead > 0, outside, inside)


def _bound(at: np.ndarray, mass: np.ndarray, n: int, increment: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if float(_crossing(at, np.full_like(at, middle), n) @ mass) > increment:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Rule:
    """``alpha``: chance of a false difference in the whole call. ``cells``: how many share it. ``threshold``: relative
    slowdown from which an alert is raised. ``rounds``: blocks after which a cell ends undecided; ``first``: before
    which nothing is said."""

    alpha: float = 0.05
    cells: int = 1
    threshold: float = 0.05
    rounds: int = 20
    first: int = FIRST_LOOK

    def critical(self, n: int) -> float:
        """Return the limit of |t| for a difference after n >= first blocks."""
        return limits(self.alpha / self.cells, self.first, self.rounds)[n - self.first]

    def critical_of_equivalence(self, n: int) -> float:
        return limits(2.0 * self.alpha, self.first, self.rounds)[n - self.first]


@dataclass(frozen=True)
class Finding:
    """Head over base after n blocks. ``low`` and ``high`` bound the ratio at all looks and for all cells of the call at
    once with probability 1 - alpha; they, ``verdict`` and ``smallest`` are None before the first look.

    ``alert``: slower, and the estimate above the threshold. ``beyond``: even the interval's low end is. ``is_clear``:
    no further block is needed. ``smallest``: relative slowdown that would have raised an alert with 80 % probability at
    these n and sd.
    """

    n: int
    ratio: float | None
    sd: float | None
    low: float | None = None
    high: float | None = None
    verdict: Verdict | None = None
    within: bool = False
    alert: bool = False
    beyond: bool = False
    is_clear: bool = False
    smallest: float | None = None


def judge(log_ratios: Sequence[float] | np.ndarray, rule: Rule) -> Finding:
    """Return what may be said after these blocks, [n] of log(head / base), n <= rule.rounds."""
    x = np.asarray(log_ratios, dtype=float)
    n = x.size
    if n == 0:
        return Finding(0, None, None)
    mean = float(np.mean(x))
    sd = float(np.std(x, ddof=1)) if n > 1 else None
    if n < rule.first or sd is None:
        return Finding(n, math.exp(mean), sd)
    error = sd / math.sqrt(n)
    half, inner = rule.critical(n) * error, rule.critical_of_equivalence(n) * error
    limit = math.log1p(rule.threshold)
    within = abs(mean) + inner < limit
    verdict: Verdict = (
        "slower" if mean > half else "faster" if mean < -half else "equivalent" if within else "ambiguous"
    )
    found = verdict in ("slower", "faster")
    return Finding(
        n=n,
        ratio=math.exp(mean),
        sd=sd,
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        verdict=verdict,
        within=within,
        alert=verdict == "slower" and mean > limit,
        beyond=mean - half > limit,
        is_clear=within or (found and abs(mean) > limit),
        smallest=smallest_effect(sd, n, rule),
    )


def smallest_effect(sd: float, n: int, rule: Rule) -> float:
    """Relative slowdown that a comparison with n blocks and this paired sd turns into an alert with probability 80 %.

    An alert takes both: t over its limit c and the mean over that of the threshold L. With sd s of the sample, which is
    independent of the mean, that is mean > max(L, c s / sqrt(n)); its probability is averaged over s (of which
    (n - 1) s^2 / sd^2 is a chi-square) at the middles of QUANTILES equal shares, and solved for the slowdown.
    """
    if sd == 0.0:
        return rule.threshold
    error = sd / math.sqrt(n)
    share = (np.arange(QUANTILES) + 0.5) / QUANTILES
    spread = np.sqrt(special.chdtri(n - 1, share) / (n - 1))
    bound = np.maximum(math.log1p(rule.threshold), rule.critical(n) * error * spread)
    low, high = 0.0, float(bound.max()) + 10.0 * error
    for _ in range(60):
        middle = 0.5 * (low + high)
        if float(np.mean(special.ndtr((middle - bound) / error))) < POWER:
            low = middle
        else:
            high = middle
    return math.expm1(high)


def lead(
    log_ratios: Sequence[np.ndarray], alpha: float, margin: float, rounds: int
) -> Literal["shown", "equal"] | None:
    """Return what is known of who was fastest so far: ``shown`` where he is faster than every rival, ``equal`` where
    each is slower or within ``margin``, None where more rounds are needed.

    Looked at after every round from the third on. That somebody is shown who is not the fastest has a chance of at most
    alpha / 2, whoever led meanwhile: with J rivals one of J tests at alpha / J against the truly fastest must err.
    That two are called equal whose times differ by the margin has one of at most alpha.

    Args:
        log_ratios: of each rival, [n] of log(its seconds / those of the fastest) in the rounds that both share.
        alpha: see above.
        margin: relative difference.
        rounds: most that there will be.
    """
    rule = Rule(alpha, max(1, len(log_ratios)), margin, rounds, INTERVAL_ROUNDS)
    found = [judge(x[:rounds], rule) for x in log_ratios]
    if not all(one.verdict == "slower" or one.within for one in found):
        return None
    return "shown" if all(one.verdict == "slower" for one in found) else "equal"

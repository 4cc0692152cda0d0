"""The tight accountant: the distribution of the privacy loss, discretised with a proof and composed by FFT.

One step on neighbours that differ by one example is the pair P = (1-q) N(0, σ²) + q N(1, σ²), Q = N(0, σ²) (an example
is removed) or the same pair swapped (added). With the privacy loss l = log dP/dQ under P,

    δ(ε) = E_P[(1 - e^{ε - l})_+],

and losses of independent steps add up. Three things keep the result a bound:

* Discretisation. The mass of each cell [kh, (k+1)h] of losses moves to the cell's two ends so that its mass under P and
  under Q stay as they are. That is a spread of e^{-l} with equal mean, and the integrand is convex in e^{-l}: δ can
  only grow, and only by O(h²) (the "connect the dots" construction of Doroshenko et al. 2022). The lower bound merges
  neighbouring cells into the grid point between them with equal means, and rounds what is left over down.
* Tilting. Instead of p(l) the FFT composes p(l) e^{λl} / M(λ) with λ chosen so that its mass lies around the answer.
  Rounding errors are then relative to δ, however small δ is, and the window need only cover some deviations.
* Tails. What leaves the window wraps around: into the upper bound, where it only adds, or is subtracted by Chernoff's
  bound from the lower one. Losses beyond the largest considered count as infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import fft
from scipy.special import logsumexp, ndtr

from dpcore.accountants.accountant import History, IAccountant
from dpcore.accountants.gdp import gaussian_epsilon
from dpcore.accountants.rdp import renyi_epsilon

LARGEST_WINDOW = 2**22
ERROR = 5e-4
"""Upper minus lower bound that refinement aims at."""

# Mass that may be treated as an infinite loss over the whole history, relative to delta.
TAIL_SHARE = 1e-7


@dataclass(frozen=True)
class Step:
    """``count`` steps of the subsampled Gaussian mechanism, for removal of an example or for its addition."""

    sigma: float
    q: float
    count: int
    removal: bool

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Privacy loss at the mechanism's output x."""
        ratio = np.logaddexp(math.log1p(-self.q), math.log(self.q) + (2 * x - 1) / (2 * self.sigma**2))
        return ratio if self.removal else -ratio

    def output(self, loss: np.ndarray) -> np.ndarray:
        """The x at which the loss is ``loss``: -inf (removal) below the smallest loss, +inf likewise for addition."""
        ratio = np.expm1(loss if self.removal else -loss) / self.q
        with np.errstate(invalid="ignore", divide="ignore"):
            x = self.sigma**2 * np.log1p(ratio) + 0.5
        return np.where(ratio > -1.0, x, -np.inf)

    def masses(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mass of outputs in [low, high] under P and under Q."""
        plain = _normal_mass(low / self.sigma, high / self.sigma)
        shifted = _normal_mass((low - 1) / self.sigma, (high - 1) / self.sigma)
        mixed = (1 - self.q) * plain + self.q * shifted
        return (mixed, plain) if self.removal else (plain, mixed)


def _normal_mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Φ(high) - Φ(low), from whichever tail keeps the relative precision."""
    flip = low > 0
    return np.where(flip, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


@dataclass(frozen=True)
class Tilt:
    """λ, the tilted loss's total mean and deviation, and the smallest deviation of a single step."""

    rate: float
    mean: float
    deviation: float
    step_deviation: float


def _quadrature(step: Step, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Losses and log weights under P on a fine grid of outputs: enough for choosing λ, window and grid."""
    x = np.linspace(-reach * step.sigma, 1 + reach * step.sigma, 4001)
    plain = -(x**2) / (2 * step.sigma**2)
    shifted = -((x - 1) ** 2) / (2 * step.sigma**2)
    log_p = np.logaddexp(math.log1p(-step.q) + plain, math.log(step.q) + shifted) if step.removal else plain
    return step.loss(x), log_p - logsumexp(log_p)


def _choose_tilt(steps: list[Step], delta: float, reach: float) -> Tilt:
    """λ minimises (K(λ) - log δ) / λ, the Chernoff bound on ε; K is the sum of the steps' log moments."""
    tables = [(*_quadrature(step, reach), step.count) for step in steps]

    def moments(rate: float) -> tuple[float, float, float, float]:
        log_moment = mean = variance = 0.0
        smallest = math.inf
        for loss, weight, count in tables:
            tilted = weight + rate * loss
            norm = float(logsumexp(tilted))
            p = np.exp(tilted - norm)
            centre = float(p @ loss)
            spread = float(p @ (loss - centre) ** 2)
            log_moment += count * norm
            mean += count * centre
            variance += count * spread
            smallest = min(smallest, math.sqrt(spread))
        return log_moment, mean, math.sqrt(variance), smallest

    unit = max(moments(0.0)[2], 1e-300)
    rates = np.geomspace(1e-3, 1e5, 161) / unit
    best = min(rates, key=lambda rate: (moments(rate)[0] - math.log(delta)) / rate)
    _, mean, deviation, smallest = moments(float(best))
    return Tilt(float(best), mean, deviation, smallest)


@dataclass(frozen=True)
class Grid:
    """Probabilities under P of the losses origin + start·h, origin + (start+1)·h, ..., and the mass of infinite
    losses.
    """

    origin: float
    start: int
    p: np.ndarray
    infinite: float


def _discretise(step: Step, h: float, reach: float, upper: bool) -> Grid:
    """One step's loss on a grid of spacing h: pessimistic (``upper``) or optimistic."""
    origin = 0.0 if upper else _balance_point(step, h)
    x = np.array([-reach * step.sigma, 1 + reach * step.sigma])
    ends = np.sort(step.loss(x))
    start, stop = math.floor((ends[0] - origin) / h) - 1, math.ceil((ends[1] - origin) / h) + 1
    # The optimistic merging pairs the cells on both sides of every second edge; the origin is to be one of those.
    start -= 1 - start % 2
    edges = origin + np.arange(start, stop + 1) * h
    at = step.output(edges)
    low, high = (at[:-1], at[1:]) if step.removal else (at[1:], at[:-1])
    p, q = step.masses(low, high)
    rest_below, _ = step.masses(np.array(-np.inf), at[0]) if step.removal else step.masses(at[0], np.array(np.inf))
    rest_above, _ = step.masses(at[-1], np.array(np.inf)) if step.removal else step.masses(np.array(-np.inf), at[-1])
    out = np.zeros(len(edges))
    # Mass to the upper end b and the rest to the lower end, such that P's and Q's masses are kept:
    # b e^{-(k+1)h} + (p - b) e^{-kh} = q.
    to_upper = np.clip((p - q * np.exp(edges[:-1])) / -math.expm1(-h), 0.0, p)
    if upper:
        out[1:] += to_upper
        out[:-1] += p - to_upper
        out[0] += rest_below
        return Grid(origin, start, out, float(rest_above))
    # Cells 2k-1 and 2k meet at the edge between them. Their e^{-l} lies above and below the edge's by ``lack`` and
    # ``excess`` per mass; equal amounts cancel, what is left over is rounded down, and so are infinite losses.
    if len(p) % 2:
        p, to_upper = np.append(p, 0.0), np.append(to_upper, 0.0)
        out = np.append(out, 0.0)
    p_left, p_right = p[0::2], p[1::2]
    lack = (p_left - to_upper[0::2]) * math.expm1(h)
    excess = to_upper[1::2] * -math.expm1(-h)
    with np.errstate(invalid="ignore", divide="ignore"):
        share_left = np.where(lack > 0, np.minimum(1.0, excess / lack), 1.0)
    out[1::2] += share_left * p_left + p_right
    out[0:-1:2] += (1 - share_left) * p_left
    out[-1] += rest_above
    return Grid(origin, start, out, 0.0)


def _balance_point(step: Step, h: float) -> float:
    """A loss l near the middle of the distribution with log P/Q of [l - h, l + h] equal to l itself.

    With a grid line there, the bulk of a step with few examples merges into it and nothing of it is rounded down.
    """
    loss = float(step.loss(np.zeros(())))
    for _ in range(50):
        ends = np.sort(step.output(np.array([loss - h, loss + h])))
        p, q = step.masses(ends[0], ends[1])
        loss = math.log(float(p) / float(q))
    return loss


def _compose(steps: list[Step], tilt: Tilt, h: float, reach: float, upper: bool, delta: float) -> float:
    """The epsilon of one direction, bounded from above or from below."""
    grids = [_discretise(step, h, reach, upper) for step in steps]
    origin = sum(step.count * grid.origin for step, grid in zip(steps, grids, strict=True))
    infinite = sum(step.count * grid.infinite for step, grid in zip(steps, grids, strict=True))
    logs = []
    for step, grid in zip(steps, grids, strict=True):
        with np.errstate(divide="ignore"):
            logs.append((np.log(grid.p), grid.origin + (grid.start + np.arange(len(grid.p))) * h, step.count))
    moments = [float(logsumexp(log_p + tilt.rate * losses)) for log_p, losses, _ in logs]
    log_moment = sum(count * moment for (_, _, count), moment in zip(logs, moments, strict=True))
    size = 2 ** math.ceil(math.log2(max(64.0, 32 * tilt.deviation / h)))
    while True:
        first = round((tilt.mean - origin) / h) - size // 2
        losses = origin + (first + np.arange(size)) * h
        above, wrapped = _outside(logs, tilt.rate, log_moment, losses[0], losses[-1])
        if (above <= TAIL_SHARE * delta and wrapped <= TAIL_SHARE) or size >= LARGEST_WINDOW:
            break
        size *= 2
    spectrum: np.ndarray = np.ones(size // 2 + 1, dtype=complex)
    for (log_p, at, count), moment in zip(logs, moments, strict=True):
        tilted = np.exp(log_p + tilt.rate * at - moment)
        spectrum *= fft.rfft(np.bincount(np.arange(len(tilted)) % size, weights=tilted, minlength=size)) ** count
    # Bin j holds losses congruent to origin + (shift + j) h; read them in the window around the tilted mean.
    shift = sum(step.count * grid.start for step, grid in zip(steps, grids, strict=True))
    composed = np.roll(np.maximum(fft.irfft(spectrum, size), 0.0), (shift - first) % size)
    scale = np.exp(np.minimum(log_moment - tilt.rate * np.maximum(losses, 0.0), 600.0))
    if upper:
        return _solve(composed * scale, losses, delta - infinite - above)
    # What wrapped around may have added at most its tilted mass times the scale at the answer.
    guess = _solve(composed * scale, losses, delta) - ERROR / 4
    error = wrapped * math.exp(min(600.0, log_moment - tilt.rate * guess))
    answer = _solve(composed * scale, losses, delta + error)
    return answer if answer >= guess else 0.0


def _outside(logs: list[Any], rate: float, log_moment: float, bottom: float, top: float) -> tuple[float, float]:
    """Chernoff bounds: mass under P above the window, and tilted mass outside of it."""

    def log_m(at: float) -> float:
        return float(sum(count * logsumexp(log_p + at * losses) for log_p, losses, count in logs))

    factors = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0)
    above = min(log_m(rate * f) - rate * f * top for f in factors)
    tilted_above = min(log_m(rate * f) - log_moment - rate * (f - 1) * top for f in factors)
    tilted_below = min(log_m(rate * (2 - f)) - log_moment + rate * (f - 1) * bottom for f in factors)
    return math.exp(min(0.0, above)), min(1.0, math.exp(min(0.0, tilted_above)) + math.exp(min(0.0, tilted_below)))


def _solve(p: np.ndarray, losses: np.ndarray, target: float) -> float:
    """The epsilon >= 0 with Σ_{l > ε} (1 - e^{ε - l}) p(l) = target, for masses p of ascending ``losses``."""
    if target <= 0.0:
        return math.inf
    p = np.where(losses > 0.0, p, 0.0)
    tail = np.cumsum(p[::-1])[::-1]
    tail_q = np.cumsum((p * np.exp(-np.maximum(losses, 0.0)))[::-1])[::-1]
    deltas = tail - np.exp(np.minimum(losses, 600.0)) * tail_q
    k = int(np.searchsorted(-deltas, -target))
    # Between grid points k-1 and k the losses from k on count; at the window's end nothing does.
    if k == len(losses) or tail[k] <= target:
        return max(0.0, float(losses[k - 1]))
    return max(0.0, math.log((tail[k] - target) / tail_q[k]))


def epsilon_upper(history: History, delta: float) -> float:
    """An upper bound, within 1e-3, on the epsilon of a history with positive noise multipliers and sample rates."""
    exact = _exact(history, delta)
    if exact is not None:
        return exact
    tight = max(_direction(history, delta, removal, False)[1] for removal in (True, False))
    # Both are bounds. The grid resolves losses from 1e-6 to 1 of the largest; beyond that range (q of 1e-9 with little
    # noise) the Rényi bound may be the smaller one.
    return min(tight, renyi_epsilon(history, delta)[0])


def epsilon_bounds(history: History, delta: float) -> tuple[float, float]:
    """(lower, upper) bounds, refined until they are within 1e-3 of each other or the grid is at its finest."""
    exact = _exact(history, delta)
    if exact is not None:
        return exact, exact
    bounds = [_direction(history, delta, removal, True) for removal in (True, False)]
    upper = min(max(high for _, high in bounds), renyi_epsilon(history, delta)[0])
    return min(upper, max(low for low, _ in bounds)), upper


def _exact(history: History, delta: float) -> float | None:
    """Without subsampling the composition is one Gaussian mechanism with μ² = Σ T / σ². And an example that is drawn at
    all with probability at most delta needs no epsilon."""
    if sum(t * q for _, q, t in history) <= delta:
        return 0.0
    if any(q < 1.0 for _, q, _ in history):
        return None
    return gaussian_epsilon(delta, math.sqrt(sum(t / s**2 for s, _, t in history)))


def _direction(history: History, delta: float, removal: bool, refine: bool) -> tuple[float, float]:
    """(lower, upper) for removing or for adding an example; the lower one is 0 unless ``refine``."""
    steps = [Step(s, min(q, 1.0 - 1e-16), t, removal) for s, q, t in _merged(history)]
    total = sum(step.count for step in steps)
    # Beyond this many deviations lies less than TAIL_SHARE of delta over all steps: Φ(-z) <= e^{-z²/2}.
    reach = math.sqrt(2 * math.log(total / (TAIL_SHARE * delta)))
    tilt = _choose_tilt(steps, delta, reach)
    widest = max(32 * tilt.deviation, _widest(steps, reach))
    finest = widest / LARGEST_WINDOW
    # Moving every step's loss by at most h moves their sum by at most their number times h.
    h = max(tilt.step_deviation / 16, ERROR / 4 / total, finest)
    high = _compose(steps, tilt, h, reach, True, delta)
    while h / 2 >= finest:
        h /= 2
        coarser, high = high, _compose(steps, tilt, h, reach, True, delta)
        # The error falls with h²: what is left is a third of the last improvement.
        if coarser - high <= ERROR / 2:
            break
    if not refine:
        return 0.0, high
    low = _compose(steps, tilt, h, reach, False, delta)
    while high - low > ERROR and h / 2 >= finest:
        h /= 2
        low = _compose(steps, tilt, h, reach, False, delta)
    return low, high


def _widest(steps: list[Step], reach: float) -> float:
    """Largest range of losses of a single step."""
    return max(float(np.ptp(step.loss(np.array([-reach * step.sigma, 1 + reach * step.sigma])))) for step in steps)


def _merged(history: History) -> History:
    """Equal settings together: the order of steps does not matter."""
    counts: dict[tuple[float, float], int] = {}
    for noise, rate, steps in history:
        counts[noise, rate] = counts.get((noise, rate), 0) + steps
    return [(noise, rate, steps) for (noise, rate), steps in counts.items()]


class PLDAccountant(IAccountant):
    """The default accountant. ``get_epsilon`` is an upper bound on the true epsilon, within 1e-3 of it."""

    def get_epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """(lower, upper) bounds on the true epsilon at ``delta``."""
        upper = self.get_epsilon(delta)
        if upper in (0.0, math.inf):
            return upper, upper
        lower, tight = epsilon_bounds([entry for entry in self.history if entry[1] > 0.0 and entry[2] > 0], delta)
        # Failures may raise epsilon, and need not.
        return lower, upper if self.failure_probability else tight

    def _epsilon(self, history: History, delta: float, **options: Any) -> float:
        return epsilon_upper(history, delta)

    @classmethod
    def mechanism(cls) -> str:
        return "prv"

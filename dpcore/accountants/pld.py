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
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from dpcore.accountants.accountant import History, IAccountant, totals
from dpcore.accountants.gdp import gaussian_epsilon
from dpcore.accountants.rdp import renyi_epsilon

LARGEST_WINDOW = 2**22
ERROR = 5e-4
"""Distance between the bounds that refinement aims at."""

MEANINGLESS = 500.0
"""An epsilon beyond which nothing is promised, e^ε leaves the floats, and the Rényi bound is tight enough."""

# Mass that may be treated as an infinite loss over the whole history, relative to delta.
TAIL_SHARE = 1e-7

# What rounding in an FFT of up to 2^22 points can move of a sum over many of its results, relative to their L2 norm:
# one result is off by some 3e-16, with random signs; this is ten times that.
FFT_ERROR = 3e-15

# Chernoff bounds are tried at the tilt's rate times each of these, and at as much below it.
FACTORS = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0)


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
        """Masses of outputs in [low, high] under N(0, σ²) and under N(1, σ²)."""
        return _normal_mass(low / self.sigma, high / self.sigma), _normal_mass(
            (low - 1) / self.sigma, (high - 1) / self.sigma
        )

    def probability(self, plain: np.ndarray, shifted: np.ndarray) -> np.ndarray:
        """Mass under P of outputs with these :meth:`masses`."""
        return (1 - self.q) * plain + self.q * shifted if self.removal else plain

    def surplus(self, loss: np.ndarray, plain: np.ndarray, shifted: np.ndarray) -> np.ndarray:
        """P - e^loss Q of outputs with these masses, written so that nothing cancels when q is tiny."""
        if self.removal:
            return self.q * (shifted - plain) - np.expm1(loss) * plain
        return self.q * np.exp(loss) * (plain - shifted) - np.expm1(loss) * plain

    def span(self, mass: float) -> np.ndarray:
        """[smallest, largest] output; at most ``mass`` of P lies below the one, and as much above the other."""
        reach = math.sqrt(-2 * math.log(mass))  # Φ(-z) <= e^{-z²/2}
        if not self.removal:
            return np.array([-reach, reach]) * self.sigma

        def log_above(x: float) -> float:
            return float(
                np.logaddexp(
                    math.log1p(-self.q) + scipy.special.log_ndtr(-x / self.sigma),
                    math.log(self.q) + scipy.special.log_ndtr((1 - x) / self.sigma),
                )
            )

        high = 1 + reach * self.sigma
        if log_above(0.0) > math.log(mass):
            high = float(scipy.optimize.brentq(lambda x: log_above(x) - math.log(mass), 0.0, high))
        return np.array([-reach * self.sigma, high])


def _normal_mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Φ(high) - Φ(low), from whichever tail keeps the relative precision."""
    flip = low > 0
    return np.where(
        flip, scipy.special.ndtr(-low) - scipy.special.ndtr(-high), scipy.special.ndtr(high) - scipy.special.ndtr(low)
    )


@dataclass(frozen=True)
class Tilt:
    """λ, the tilted loss's total mean and deviation, and the smallest deviation of a single step."""

    rate: float
    mean: float
    deviation: float
    step_deviation: float


def _quadrature(step: Step, mass: float) -> tuple[np.ndarray, np.ndarray]:
    """Losses and log weights under P on a fine grid of outputs: enough for choosing λ, window and grid."""
    low, high = step.span(mass)
    x = np.linspace(low, high, 4001)
    plain = -(x**2) / (2 * step.sigma**2)
    shifted = -((x - 1) ** 2) / (2 * step.sigma**2)
    log_p = np.logaddexp(math.log1p(-step.q) + plain, math.log(step.q) + shifted) if step.removal else plain
    return step.loss(x), log_p - scipy.special.logsumexp(log_p)


def _choose_tilt(steps: list[Step], delta: float, mass: float, least: bool = False) -> Tilt:
    """λ nearly minimises (K(λ) - log δ) / λ, the Chernoff bound on ε; K is the sum of the steps' log moments.

    ``least``: hardly any, for a δ that is no tail's, of which rounding far from the tilted mean would leave nothing.
    """
    tables = [(*_quadrature(step, mass), step.count) for step in steps]

    def moments(rate: float) -> tuple[float, float, float, float]:
        log_moment = mean = variance = 0.0
        smallest = math.inf
        for loss, weight, count in tables:
            tilted = weight + rate * loss
            norm = _log_sum(tilted)
            p = np.exp(tilted - norm)
            centre = float(p @ loss)
            spread = float(p @ (loss - centre) ** 2)
            log_moment += count * norm
            mean += count * centre
            variance += count * spread
            smallest = min(smallest, math.sqrt(spread))
        return log_moment, mean, math.sqrt(variance), smallest

    unit = max(moments(0.0)[2], 1e-300)
    # Twenty to a decade. The deviation of a loss whose large values are very rare says little of them: hence 1.
    first = min(1e-3 / unit, 1.0)
    rates = np.geomspace(first, 1e5 / unit, math.ceil(20 * math.log10(1e5 / unit / first)) + 1)
    if least:
        rates = rates[:1]
    chernoff = [(moments(rate)[0] - math.log(delta)) / rate for rate in rates]
    # Where the losses end at a largest one the bound falls for ever: the smallest λ that is about as good will do.
    enough = min(chernoff) + 0.01 * abs(min(chernoff)) + ERROR
    best = next(rate for rate, value in zip(rates, chernoff, strict=True) if value <= enough)
    _, mean, deviation, smallest = moments(float(best))
    return Tilt(float(best), mean, deviation, smallest)


@dataclass(frozen=True)
class Grid:
    """Masses of a privacy loss on a grid.

    The masses are those under P of the losses start·h, (start+1)·h, ...; then the mass that was moved up to the first
    of them from below; and the mass of infinite losses.
    """

    start: int
    p: np.ndarray
    lifted: float
    infinite: float


def _discretise(step: Step, h: float, mass: float) -> Grid:
    """One step's loss, spread to a grid of spacing h."""
    ends = np.sort(step.loss(step.span(mass)))
    start, stop = math.floor(ends[0] / h) - 1, math.ceil(ends[1] / h) + 1
    edges = np.arange(start, stop + 1) * h
    at = step.output(edges)
    low, high = (at[:-1], at[1:]) if step.removal else (at[1:], at[:-1])
    plain, shifted = step.masses(low, high)
    p = step.probability(plain, shifted)
    below, above = np.array(-np.inf), np.array(np.inf)
    if step.removal:
        lifted, infinite = step.masses(below, at[0]), step.masses(at[-1], above)
    else:
        lifted, infinite = step.masses(at[0], above), step.masses(below, at[-1])
    # Mass to the upper end b and the rest to the lower end, such that P's and Q's masses are kept:
    # b e^{-(k+1)h} + (p - b) e^{-kh} = q.
    to_upper = np.clip(step.surplus(edges[:-1], plain, shifted) / -math.expm1(-h), 0.0, p)
    out = np.zeros(len(edges))
    out[1:] += to_upper
    out[:-1] += p - to_upper
    out[0] += step.probability(*lifted)
    return Grid(start, out, float(step.probability(*lifted)), float(step.probability(*infinite)))


@dataclass(frozen=True)
class Curve:
    """δ'(ε) of the composed, spread losses, and what is not known of it.

    ``tail`` and ``tail_q``: masses under P and under Q of ``losses`` from each on. ``lost``: mass above the window and
    of infinite losses, missing from the curve. ``lifted``: mass that was moved up from below the grid. ``wrapped`` and
    ``rounding``: mass under the tilted measure that wrapping may have added and rounding may have moved.
    """

    losses: np.ndarray
    tail: np.ndarray
    tail_q: np.ndarray
    lost: float
    lifted: float
    wrapped: float
    rounding: float
    log_moment: float
    rate: float

    def delta(self, epsilon: np.ndarray) -> np.ndarray:
        """Σ_{l > ε} (1 - e^{ε - l}) p(l): exact between grid points too, where it is linear in e^ε."""
        k = np.minimum(np.searchsorted(self.losses, epsilon, side="right"), len(self.losses) - 1)
        return np.maximum(self.tail[k] - np.exp(np.minimum(epsilon, 600.0)) * self.tail_q[k], 0.0)

    def untilted(self, mass: float, epsilon: float) -> float:
        """Return the most that a ``mass`` under the tilted measure can add to ``delta`` beyond ``epsilon``."""
        return mass * math.exp(min(600.0, self.log_moment - self.rate * epsilon))

    def epsilon(self, target: float) -> float:
        """The largest epsilon >= 0 with ``delta`` = target (far below the tilted mean the curve is all rounding)."""
        if target <= 0.0:
            return math.inf
        first = int(np.searchsorted(self.losses, 0.0, side="right"))
        deltas = self.tail[first:] - np.exp(np.minimum(self.losses[first:], 600.0)) * self.tail_q[first:]
        larger = np.flatnonzero(deltas > target)
        k = first + (int(larger[-1]) + 1 if len(larger) else 0)
        # Between grid points k-1 and k the losses from k on count; at the window's end nothing does.
        if k >= len(self.losses) or self.tail[k] <= target or self.tail_q[k] <= 0.0:
            return max(0.0, float(self.losses[min(k, len(self.losses) - 1)]))
        return max(0.0, math.log((self.tail[k] - target) / self.tail_q[k]))


def _compose(steps: list[Step], tilt: Tilt, h: float, mass: float, delta: float) -> Curve:
    """The losses of all steps on one grid, added up."""
    grids = [_discretise(step, h, mass) for step in steps]
    logs = []
    for step, grid in zip(steps, grids, strict=True):
        with np.errstate(divide="ignore"):
            logs.append((np.log(grid.p), (grid.start + np.arange(len(grid.p))) * h, step.count))
    moments = [float(scipy.special.logsumexp(log_p + tilt.rate * losses)) for log_p, losses, _ in logs]
    log_moment = sum(count * moment for (_, _, count), moment in zip(logs, moments, strict=True))
    higher = _log_moments(logs, [tilt.rate * factor for factor in FACTORS])
    lower = _log_moments(logs, [tilt.rate * (2 - factor) for factor in FACTORS])
    size = 2 ** math.ceil(math.log2(max(64.0, 32 * tilt.deviation / h)))
    while True:
        first = round(tilt.mean / h) - size // 2
        above, wrapped = _outside(higher, lower, tilt.rate, log_moment, first * h, (first + size - 1) * h)
        if (above <= TAIL_SHARE * delta and wrapped <= TAIL_SHARE) or size >= LARGEST_WINDOW:
            break
        size *= 2
    losses = (first + np.arange(size)) * h
    # With r the transform of the distribution less its largest atom, the power is exp(T log(1 + r)): where nearly all
    # mass sits in one cell, r is small and so is its rounding error, which T multiplies.
    exponent: np.ndarray = np.zeros(size // 2 + 1, dtype=complex)
    shift, leaving = 0, 0.0
    for grid, (log_p, at, count), moment in zip(grids, logs, moments, strict=True):
        tilted = np.exp(log_p + tilt.rate * at - moment)
        centre = int(np.argmax(tilted))
        tilted[centre] = 0.0
        tilted[centre] = -tilted.sum()
        wheel = np.bincount((np.arange(len(tilted)) - centre) % size, weights=tilted, minlength=size)
        exponent += count * _log1p(scipy.fft.rfft(wheel))
        shift += count * (grid.start + centre)
        leaving += count * float(np.linalg.norm(wheel))
    spectrum = np.exp(np.maximum(exponent.real, -745.0) + 1j * exponent.imag)
    # Bin j holds the loss (shift + j) h, up to multiples of the window; read them in the window around the tilted mean.
    composed = np.roll(scipy.fft.irfft(spectrum, size), (shift - first) % size)
    rounding = FFT_ERROR * (1.0 + leaving) * float(np.linalg.norm(composed))
    p = np.where(losses > 0.0, composed, 0.0)
    p *= np.exp(np.minimum(log_moment - tilt.rate * np.maximum(losses, 0.0), 600.0))
    q = p * np.exp(-np.maximum(losses, 0.0))
    return Curve(
        losses,
        np.cumsum(p[::-1])[::-1],
        np.cumsum(q[::-1])[::-1],
        above + sum(step.count * grid.infinite for step, grid in zip(steps, grids, strict=True)),
        sum(step.count * grid.lifted for step, grid in zip(steps, grids, strict=True)),
        wrapped,
        rounding,
        log_moment,
        tilt.rate,
    )


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


def _log1p(z: np.ndarray) -> np.ndarray:
    """log(1 + z) with small relative error for small complex z (numpy's has an absolute one of 1e-16)."""
    with np.errstate(divide="ignore"):
        modulus = 0.5 * np.log1p(np.maximum(2 * z.real + z.real**2 + z.imag**2, -1.0))
    return np.maximum(modulus, -1e300) + 1j * np.arctan2(z.imag, 1.0 + z.real)


def _log_sum(logs: np.ndarray) -> float:
    """The log of a sum of exponentials, without scipy's slow care for sums near their largest term."""
    largest = float(logs.max())
    if not math.isfinite(largest):
        return largest
    return largest + math.log(float(np.exp(logs - largest).sum()))


def _log_moments(logs: list[Any], rates: list[float]) -> list[float]:
    """The log moment of the composed loss at each of the rates."""
    return [sum(count * _log_sum(log_p + rate * losses) for log_p, losses, count in logs) for rate in rates]


def _outside(
    higher: list[float], lower: list[float], rate: float, log_moment: float, bottom: float, top: float
) -> tuple[float, float]:
    """Chernoff bounds: mass under P above the window, and tilted mass outside of it.

    ``higher`` and ``lower``: the log moments at ``rate`` times the FACTORS, and times 2 less them.
    """
    above = min(log - rate * f * top for f, log in zip(FACTORS, higher, strict=True))
    tilted_above = min(log - log_moment - rate * (f - 1) * top for f, log in zip(FACTORS, higher, strict=True))
    tilted_below = min(log - log_moment + rate * (f - 1) * bottom for f, log in zip(FACTORS, lower, strict=True))
    return math.exp(min(0.0, above)), min(1.0, math.exp(min(0.0, tilted_above)) + math.exp(min(0.0, tilted_below)))


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
    return sum(t * -math.log1p(-min(q, 1.0 - 1e-16)) for _, q, t in history)


def _exact(history: History, delta: float) -> float | None:
    """Without subsampling the composition is one Gaussian mechanism with μ² = Σ T / σ².

    And an example that is drawn at all with probability at most delta needs no epsilon.
    """
    if sum(t * q for _, q, t in history) <= delta:
        return 0.0
    if any(q < 1.0 for _, q, _ in history):
        return None
    return gaussian_epsilon(delta, math.sqrt(sum(t / s**2 for s, _, t in history)))


def _direction(
    history: History, delta: float, removal: bool, both: bool, error: float, least: bool = False
) -> tuple[float, float]:
    """(lower, upper) for removing or for adding an example; the lower one is 0 unless ``both``."""
    steps = [Step(s, min(q, 1.0 - 1e-16), t, removal) for (s, q), t in totals(history).items()]
    total = sum(step.count for step in steps)
    mass = TAIL_SHARE * delta / total
    tilt = _choose_tilt(steps, delta, mass, least)
    finest = max(32 * tilt.deviation, *(float(np.ptp(step.loss(step.span(mass)))) for step in steps)) / LARGEST_WINDOW
    # Moving every step's loss by at most h moves their sum by at most their number times h.
    h = max(tilt.step_deviation / 16, error / 4 / total, finest)
    high = _upper(_compose(steps, tilt, h, mass, delta), delta)
    if high == math.inf and not least:
        found = _direction(history, delta, removal, both, error, least=True)
        if found[1] < math.inf:
            return found
    while h / 2 >= finest and not (least and high == math.inf):
        h /= 2
        coarser, high = high, min(high, _upper(_compose(steps, tilt, h, mass, delta), delta))
        # The error falls with h²: what is left is a third of the last improvement. None at all proves nothing: both
        # grids may still be too coarse for the bulk of a heavy-tailed loss.
        if 0.0 < coarser - high <= error / 2:
            break
    if not both or high == 0.0:
        return 0.0, high
    h = max(finest, min(h, math.sqrt(error / (6 * total * tilt.rate))))
    while True:
        curve = _compose(steps, tilt, h, mass, delta)
        low, high = _lower(curve, total, h, delta), min(high, _upper(curve, delta))
        if high - low <= error or h / 2 < finest:
            return low, high
        h /= 2


class PLDAccountant(IAccountant):
    """The default accountant. ``get_epsilon`` is an upper bound on the true epsilon, within 1e-3 of it."""

    def get_epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """(lower, upper) bounds on the true epsilon at ``delta``."""
        upper = self.get_epsilon(delta)
        if upper in (0.0, math.inf):
            return upper, upper
        released = [entry for entry in self.history if entry[1] > 0.0 and entry[2] > 0]
        lower, tight = epsilon_bounds(released, delta)
        # Failures may raise epsilon, and need not.
        return lower, max(lower, tight if not self.failure_probability else upper)

    def _epsilon(self, history: History, delta: float, **options: Any) -> float:
        """``eps_error``: distance to the truth that is aimed at, 5e-4 if larger or not given.

        ``delta_error``, known to Opacus, is not needed: nothing is taken from delta.
        """
        return epsilon_upper(history, delta, min(ERROR, options.get("eps_error") or ERROR))

    @classmethod
    def mechanism(cls) -> str:
        return "prv"

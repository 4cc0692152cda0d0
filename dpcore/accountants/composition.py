"""The sum of the privacy losses of all steps: their distribution, tilted towards an answer and composed by FFT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from dpcore.accountants.privacy_loss import Loss

LARGEST_WINDOW = 2**22
ERROR = 5e-4
"""Distance between the bounds that refinement aims at."""

# Mass that may be treated as an infinite loss over the whole history, relative to delta.
TAIL_SHARE = 1e-7

# What rounding in an FFT of up to 2^22 points can move of a sum over many of its results, relative to their L2 norm:
# one result is off by some 3e-16, with random signs; this is ten times that.
FFT_ERROR = 3e-15

# Chernoff bounds are tried at the tilt's rate times each of these, and at as much below it.
FACTORS = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Tilt:
    """λ, the tilted loss's total mean and deviation, and the smallest deviation of a single step."""

    rate: float
    mean: float
    deviation: float
    step_deviation: float


def choose_tilt(steps: Sequence[Loss], delta: float, mass: float, least: bool = False) -> Tilt:
    """λ nearly minimises (K(λ) - log δ) / λ, the Chernoff bound on ε; K is the sum of the steps' log moments.

    ``least``: hardly any, for a δ that is no tail's, of which rounding far from the tilted mean would leave nothing.
    """
    tables = [(*step.quadrature(mass), step.count) for step in steps]

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


def compose(steps: Sequence[Loss], tilt: Tilt, h: float, mass: float, delta: float) -> Curve:
    """The losses of all steps on one grid, added up."""
    grids = [step.grid(h, mass) for step in steps]
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

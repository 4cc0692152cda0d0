"""The privacy loss of an epoch of balls in bins: every unit is in one of T batches, uniformly and independently.

The pair is P, the mean over t of N(e_t, σ² I), and Q = N(0, σ² I) (Chua et al. 2024, arXiv 2412.16802). Its ratio of
likelihoods is under Q the mean S of T independent lognormals of mean 1, and δ(ε) is for removal E[(S - e^ε)_+], for
addition E[(1 - e^ε S)_+]. Both are means of convex functions of S, so that whatever spreads S and keeps its mean can
only raise them. Here the lognormal is spread to a grid, and after every addition so is the sum: the mass of each value
goes to its two neighbours on a new grid. All of it are sums of positive numbers, which lose no digits. What lies beyond
a grid's end counts as an infinite loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy

from dpcore.accountants.privacy_loss import Grid, normal_mass

# Mass that may be cut off a sum at either end, under Q and under P.
TAIL = 1e-24
# Of a grid, in widths of the sum's middle; of an epoch's many sums each adds as much to the error.
FINENESS = 0.05
# How much wider cells become per width beyond the middle, and how wide they are at most, relative to their value.
WIDENING, WIDEST = 0.5, 0.04
_PAIRS = 2**17
# Rounding has moved masses by 3e-16 for each term, measured, and values by less: both are charged thirty times that.
_ROUNDING = 1e-14


@dataclass(frozen=True, eq=False)
class Law:
    """A sum of ``terms`` lognormals under Q: ``mass`` at ``values``, rising from 0.

    ``lost_q`` and ``lost_p``: mass that was cut off, under Q and under P, whose density is the mean of the terms.
    """

    terms: int
    values: np.ndarray
    mass: np.ndarray
    lost_q: float
    lost_p: float


@dataclass(frozen=True)
class Epochs:
    """``count`` epochs of ``bins`` batches, for removal of a unit or for its addition."""

    sigma: float
    bins: int
    count: int
    removal: bool

    def _atoms(self, mass: float) -> tuple[np.ndarray, np.ndarray, float, float]:
        """Losses, rising, masses under P, mass that was lifted to the first of them, and that of infinite ones."""
        law = law_of(self.sigma, self.bins)
        with np.errstate(divide="ignore"):
            loss = np.log(law.values / self.bins)
        p = law.mass * law.values / self.bins if self.removal else law.mass
        lost = (law.lost_p if self.removal else law.lost_q) + mass
        if not self.removal:
            loss, p = -loss[::-1], p[::-1]
        kept = (p > 0.0) & np.isfinite(loss)
        lost += float(p[loss == math.inf].sum())
        rounding = _ROUNDING * self.bins
        loss, p = loss[kept] + rounding, p[kept] * (1.0 + rounding)
        first = int(np.searchsorted(np.cumsum(p), mass))
        last = len(p) - int(np.searchsorted(np.cumsum(p[::-1]), mass))
        lifted, lost = float(p[:first].sum()), lost + float(p[last:].sum())
        loss, p = loss[first:last], p[first:last].copy()
        p[0] += lifted
        return loss, p, lifted, lost

    def quadrature(self, mass: float) -> tuple[np.ndarray, np.ndarray]:
        """Losses and log weights under P: enough for choosing λ, window and grid."""
        loss, p, _, _ = self._atoms(mass)
        return loss, np.log(p) - math.log(p.sum())

    def width(self, mass: float) -> float:
        """Return the largest loss less the smallest; at most ``mass`` of P lies beyond either."""
        return float(np.ptp(self._atoms(mass)[0]))

    def grid(self, h: float, mass: float) -> Grid:
        """Return one epoch's loss, spread to a grid of spacing h."""
        loss, p, lifted, infinite = self._atoms(mass)
        start = math.floor(loss[0] / h) - 1
        at = np.floor(loss / h).astype(np.int64)
        upper = np.clip(p * np.expm1(at * h - loss) / math.expm1(-h), 0.0, p)
        size = int(at[-1]) - start + 2
        out = np.bincount(at - start, p - upper, size) + np.bincount(at - start + 1, upper, size)
        return Grid(start, out, lifted, infinite)

    def log_moment(self, alpha: float) -> float:
        """Return the log of the mean of e^((α - 1) loss) under P, without what was cut off."""
        law = law_of(self.sigma, self.bins)
        kept = (law.mass > 0.0) & (law.values > 0.0)
        power = alpha if self.removal else 1.0 - alpha
        logs = np.log(law.mass[kept]) + power * np.log(law.values[kept] / self.bins)
        return float(scipy.special.logsumexp(logs)) + _ROUNDING * self.bins * (alpha + 1.0)

    @property
    def lost(self) -> float:
        """Mass that was cut off, of all epochs."""
        law = law_of(self.sigma, self.bins)
        return self.count * (law.lost_p if self.removal else law.lost_q + float(law.mass[0]))


@lru_cache(maxsize=64)
def law_of(sigma: float, bins: int) -> Law:
    """Return the law of ``bins`` lognormals' sum, by doubling (up to three seconds)."""
    bits = f"{bins:b}"[1:]
    fineness = FINENESS / math.sqrt(max(6.0, 1.0 + len(bits) + bits.count("1")))
    one = law = _lognormal(sigma, fineness)
    for bit in bits:
        law = _sum(law, law, sigma, fineness)
        if bit == "1":
            law = _sum(law, one, sigma, fineness)
    return law


def _lognormal(sigma: float, fineness: float) -> Law:
    """Return the law of e^{x/σ - 1/(2σ²)}, x standard normal; cells of it keep their masses under P and under Q."""
    reach = -float(scipy.special.ndtri(TAIL))
    ratio = min(WIDEST, fineness / max(sigma, 1.0))
    cells = math.ceil((2 * reach + 1 / sigma) / sigma / ratio)
    x = np.linspace(-reach, reach + 1 / sigma, cells + 1)
    values = np.concatenate([[0.0], np.exp(x / sigma - 1 / (2 * sigma**2))])
    edges = np.concatenate([[-np.inf], x])
    q = normal_mass(edges[:-1], edges[1:])
    p = normal_mass(edges[:-1] - 1 / sigma, edges[1:] - 1 / sigma)
    upper = np.clip((p - values[:-1] * q) / np.diff(values), 0.0, q)
    mass = np.append(q - upper, 0.0) + np.insert(upper, 0, 0.0)
    lost_q, lost_p = scipy.special.ndtr([-x[-1], 1 / sigma - x[-1]])
    return Law(1, values, mass, float(lost_q), float(lost_p))


def _sum(one: Law, two: Law, sigma: float, fineness: float) -> Law:
    """Return the law of the sum of two independent ones."""
    terms, grid = one.terms + two.terms, _cells(one, two, sigma, fineness)
    mass = np.zeros(len(grid))
    lost_q = lost_y = 0.0
    rows = max(1, _PAIRS // len(two.values))
    for k in range(0, len(one.values), rows):
        # Of two equal laws every pair but those of the square on the diagonal stands for two.
        start = k if one is two else 0
        y = np.add.outer(one.values[k : k + rows], two.values[start:]).ravel()
        pairs = np.outer(one.mass[k : k + rows], two.mass[start:])
        if one is two:
            pairs[:, rows:] *= 2.0
        m = pairs.ravel()
        cell = np.searchsorted(grid, y, side="right") - 1
        if cell.max() >= len(grid) - 1:
            out = cell >= len(grid) - 1
            lost_q, lost_y = lost_q + float(m[out].sum()), lost_y + float(m[out] @ y[out])
            y, m, cell = y[~out], m[~out], cell[~out]
        low = grid[cell]
        upper = m * ((y - low) / (grid[cell + 1] - low))
        mass += np.bincount(cell, m - upper, len(grid)) + np.bincount(cell + 1, upper, len(grid))
    # The mean of all terms, where some of one are cut off, and where some of two are.
    lost_p = one.terms * (one.lost_p + two.lost_q) + two.terms * (two.lost_p + one.lost_q)
    return _trimmed(Law(terms, grid, mass, one.lost_q + two.lost_q + lost_q, (lost_p + lost_y) / terms))


def _trimmed(law: Law) -> Law:
    """Return the law without masses at its ends that are next to nothing: the upper are lost, the lower spread to 0."""
    above_q = np.cumsum(law.mass[::-1])[::-1]
    above_p = np.cumsum((law.mass * law.values)[::-1])[::-1] / law.terms
    stop = int(np.flatnonzero(np.maximum(above_q, above_p) > TAIL)[-1]) + 1
    first = max(1, int(np.flatnonzero(np.cumsum(law.mass) > TAIL)[0]))
    lost = [float(above[stop]) if stop < len(above) else 0.0 for above in (above_q, above_p)]
    values, mass = law.values[first:stop], law.mass[first:stop].copy()
    lifted = law.mass[:first] * law.values[:first] / values[0]
    mass[0] += lifted.sum()
    rest = (law.mass[:first] - lifted).sum()
    values, mass = np.insert(values, 0, 0.0), np.insert(mass, 0, rest)
    return Law(law.terms, values, mass, law.lost_q + lost[0], law.lost_p + lost[1])


def _cells(one: Law, two: Law, sigma: float, fineness: float) -> np.ndarray:
    """Return the grid for a sum: even around its middle, in proportion to the value far below and far above it."""
    (a, p), (b, q) = _grouped(one), _grouped(two)
    y, m = np.add.outer(a, b).ravel(), np.outer(p, q).ravel()
    order = np.argsort(y)
    y, m = y[order], m[order]
    below, above = np.cumsum(m), np.cumsum((m * y)[::-1])[::-1]
    low, middle, high = np.interp(np.array([0.16, 0.5, 0.84]) * below[-1], below, y)
    bottom = float(y[np.searchsorted(below, TAIL)]) or middle / 2
    # Sums of groups' means end before the largest of the sums.
    top = float(y[np.flatnonzero(above > TAIL * (one.terms + two.terms))[-1]]) * (1 + 2 * WIDEST)
    shrink = fineness * (middle - low) / middle
    down = middle * np.exp(-shrink * np.arange(math.ceil(math.log(middle / bottom) / shrink), -1, -1))
    cell, rise = fineness * (high - middle), min(fineness * min(1 / sigma, WIDENING), WIDEST)
    up = middle + cell / rise * np.expm1(rise * np.arange(1, math.log1p((top - middle) * rise / cell) / rise + 2))
    return np.concatenate([[0.0], down, up])


def _grouped(law: Law) -> tuple[np.ndarray, np.ndarray]:
    """Return means and masses of some hundred groups of a law's values."""
    starts = np.unique(np.linspace(0, len(law.values) - 1, 129).astype(int))
    mass, first = (np.add.reduceat(of, starts) for of in (law.mass, law.mass * law.values))
    return first[mass > 0] / mass[mass > 0], mass[mass > 0]

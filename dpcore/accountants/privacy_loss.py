"""The privacy loss of one step of the subsampled Gaussian mechanism, and its discretisation with a proof.

One step on neighbours that differ by one example is the pair P = (1-q) N(0, σ²) + q N(1, σ²), Q = N(0, σ²) (an example
is removed) or the same pair swapped (added). The privacy loss is l = log dP/dQ under P.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy


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
        return normal_mass(low / self.sigma, high / self.sigma), normal_mass(
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

    def quadrature(self, mass: float) -> tuple[np.ndarray, np.ndarray]:
        """Losses and log weights under P on a fine grid of outputs: enough for choosing λ, window and grid."""
        low, high = self.span(mass)
        x = np.linspace(low, high, 4001)
        plain = -(x**2) / (2 * self.sigma**2)
        shifted = -((x - 1) ** 2) / (2 * self.sigma**2)
        mixed = np.logaddexp(math.log1p(-self.q) + plain, math.log(self.q) + shifted)
        log_p = mixed if self.removal else plain
        return self.loss(x), log_p - scipy.special.logsumexp(log_p)

    def width(self, mass: float) -> float:
        """Return the largest loss less the smallest; at most ``mass`` of P lies beyond either."""
        return float(np.ptp(self.loss(self.span(mass))))

    def grid(self, h: float, mass: float) -> Grid:
        """Return one step's loss, spread to a grid of spacing h."""
        ends = np.sort(self.loss(self.span(mass)))
        start, stop = math.floor(ends[0] / h) - 1, math.ceil(ends[1] / h) + 1
        edges = np.arange(start, stop + 1) * h
        at = self.output(edges)
        low, high = (at[:-1], at[1:]) if self.removal else (at[1:], at[:-1])
        plain, shifted = self.masses(low, high)
        p = self.probability(plain, shifted)
        below, above = np.array(-np.inf), np.array(np.inf)
        if self.removal:
            lifted, infinite = self.masses(below, at[0]), self.masses(at[-1], above)
        else:
            lifted, infinite = self.masses(at[0], above), self.masses(below, at[-1])
        # Mass to the upper end b and the rest to the lower end, such that P's and Q's masses are kept:
        # b e^{-(k+1)h} + (p - b) e^{-kh} = q.
        to_upper = np.clip(self.surplus(edges[:-1], plain, shifted) / -math.expm1(-h), 0.0, p)
        out = np.zeros(len(edges))
        out[1:] += to_upper
        out[:-1] += p - to_upper
        out[0] += self.probability(*lifted)
        return Grid(start, out, float(self.probability(*lifted)), float(self.probability(*infinite)))


class Loss(Protocol):
    """The privacy loss of ``count`` equal releases, which :class:`Step` and balls in bins have."""

    @property
    def count(self) -> int:
        """How many there are."""

    def quadrature(self, mass: float) -> tuple[np.ndarray, np.ndarray]:
        """Losses and log weights under P: enough for choosing λ, window and grid."""

    def width(self, mass: float) -> float:
        """Return the largest loss less the smallest; at most ``mass`` of P lies beyond either."""

    def grid(self, h: float, mass: float) -> Grid:
        """Return one release's loss, spread to a grid of spacing h."""


def normal_mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Φ(high) - Φ(low), from whichever tail keeps the relative precision."""
    flip = low > 0
    return np.where(
        flip, scipy.special.ndtr(-low) - scipy.special.ndtr(-high), scipy.special.ndtr(high) - scipy.special.ndtr(low)
    )

"""Sum up what the steps so far have done to a row that no batch had: w <- (1 - lr decay) w - lr std N(0, 1)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_SHRINKAGE = 300.0
"""Minus the logarithm of what weight decay leaves of a row, beyond which the sums below would lose their digits."""


@dataclass(frozen=True)
class Step:
    """One step of SGD without momentum: the name of its noise, that one's deviation, learning rate and weight decay."""

    name: bytes
    std: float
    lr: float
    decay: float

    def update(self, rows: Tensor, grad: Tensor) -> None:
        """Do to ``rows`` what torch.optim.SGD does, operator by operator, so that the bits are the same."""
        if self.decay:
            grad = grad.add(rows, alpha=self.decay)
        rows.add_(grad, alpha=-self.lr)


class History:
    """The steps from number ``first`` on; of the last ``exact`` ones the noise can be drawn again.

    Sums over steps are kept from the first one on, so that those between any two are one subtraction: of the logarithms
    of (1 - lr decay), and of the variances, each as large as it would have to be at the first step.
    """

    def __init__(self, first: int, exact: int) -> None:
        self.first = self.steps = first
        self.exact = exact
        self.recent: deque[Step] = deque(maxlen=exact)
        self._kept = torch.zeros(1024, dtype=torch.float64)
        self._variances = torch.zeros(1024, dtype=torch.float64)

    def note(self, step: Step) -> None:
        """Add the step that was made."""
        at = self.steps - self.first
        if at + 2 > len(self._kept):
            self._kept, self._variances = (torch.cat([t, torch.zeros_like(t)]) for t in (self._kept, self._variances))
        kept = float(self._kept[at]) + math.log1p(-step.lr * step.decay)
        self._kept[at + 1] = kept
        self._variances[at + 1] = self._variances[at] + (step.lr * step.std) ** 2 * math.exp(-2.0 * kept)
        self.recent.append(step)
        self.steps += 1

    @property
    def is_full(self) -> bool:
        """Return whether all rows must be brought up to date before another step is noted."""
        return -float(self._kept[self.steps - self.first]) > LARGEST_SHRINKAGE

    @property
    def shrinks(self) -> bool:
        """Return whether there was weight decay."""
        return float(self._kept[self.steps - self.first]) != 0.0

    def is_recent(self, done: Tensor) -> Tensor:
        """Return which of the rows up to date at steps ``done`` the last ``exact`` steps bring up to date, bool."""
        return (done >= self.steps - self.exact) & (done < self.steps)

    def late(self, done: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return what the steps before the last ``exact`` ones make of rows up to date at steps ``done`` [n].

        Returns:
            The factor that is left of a row (None without weight decay), and the deviation of what was added, both
                float32 [n]; 1 and 0 for rows that the last steps bring up to date.
        """
        then = done.long() - self.first
        if len(done) <= self.steps - self.first:
            return self._late(then)
        kept, deviations = self._late(torch.arange(self.steps - self.first + 1))
        return None if kept is None else kept[then], deviations[then]

    def _late(self, then: Tensor) -> tuple[Tensor | None, Tensor]:
        now = self.steps - self.first
        kept = torch.exp(self._kept[now] - self._kept[then])
        variances = (self._variances[now] - self._variances[then]) * torch.exp(2.0 * self._kept[now])
        is_late = now - then > self.exact
        deviations = torch.where(is_late, variances, 0.0).sqrt().float()
        return torch.where(is_late, kept, 1.0).float() if self.shrinks else None, deviations

"""Sum up what the steps so far have done to a row that no batch had, and to its momentum where there is one.

The state of a number is its weight w, or w and its momentum m. A step draws z from N(0, 1) and makes of it

    m <- momentum m + decay w + std z,    w <- w - lr m,

which is linear: what the steps from one number on make of a state is a matrix, and a normal of a covariance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_STEPS = 2**15
"""After which all rows are brought up to date: each step changes the sums from all steps before it on."""


@dataclass(frozen=True)
class Step:
    """One step of SGD: the name of its noise, that one's deviation, learning rate, weight decay and momentum."""

    name: bytes
    std: float
    lr: float
    decay: float
    momentum: float = 0.0

    def update(self, state: Sequence[Tensor], grad: Tensor) -> None:
        """Do to weights, and momentum if there is any, what torch.optim.SGD does, so that the bits are the same.

        It writes over ``grad``.
        """
        weights, *momenta = state
        if self.decay:
            grad.add_(weights, alpha=self.decay)
        for momentum in momenta:
            grad = momentum.mul_(self.momentum).add_(grad)
        weights.add_(grad, alpha=-self.lr)

    def matrices(self, parts: int) -> tuple[Tensor, Tensor]:
        """Return by what a state of so many parts is multiplied, and what a draw of 1 adds to it."""
        old = torch.tensor([[self.decay, self.momentum]], dtype=torch.float64)
        made = torch.tensor([[-self.lr], [1.0]], dtype=torch.float64)
        kept = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
        return (kept + made * old)[:parts, :parts], self.std * made[:parts]


class History:
    """The steps from number ``first`` on; of the last ``exact`` ones the noise can be drawn again.

    ``parts``: of a state. Matrices and covariances [parts, parts, T] are kept for every step after which a row may be
    up to date, and each new step is applied to all of them: quotients would lose their digits, as momentum fades.
    """

    def __init__(self, first: int, exact: int, parts: int) -> None:
        self.first = self.steps = first
        self.exact = exact
        self.recent: deque[Step] = deque(maxlen=exact)
        self._one = torch.eye(parts, dtype=torch.float64)
        self._kept = torch.zeros(parts, parts, 64, dtype=torch.float64)
        self._kept[:, :, 0] = self._one
        self._added = torch.zeros_like(self._kept)
        self._keeps_all = True

    def note(self, step: Step) -> None:
        """Add the step that was made."""
        at = self.steps + 1 - self.first
        if at >= self._kept.shape[2]:
            self._kept, self._added = (torch.cat([t, torch.zeros_like(t)], 2) for t in (self._kept, self._added))
        kept, drawn = step.matrices(len(self._one))
        self._keeps_all &= bool(torch.equal(kept, self._one))
        self._kept = _times(kept, self._kept)
        self._added = _times(kept, _times(kept, self._added).transpose(0, 1)) + (drawn @ drawn.T).unsqueeze(2)
        self._kept[:, :, at], self._added[:, :, at] = self._one, 0.0
        self.recent.append(step)
        self.steps += 1

    @property
    def is_full(self) -> bool:
        """Return whether all rows must be brought up to date before another step is noted."""
        return self.steps - self.first >= MOST_STEPS

    def is_recent(self, done: Tensor) -> Tensor:
        """Return which of the rows up to date at steps ``done`` the last ``exact`` steps bring up to date, bool."""
        return (done >= self.steps - self.exact) & (done < self.steps)

    def late(self, done: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return what the steps before the last ``exact`` ones make of rows up to date at steps ``done`` [n].

        Returns:
            The matrices by which states are multiplied (None where all are 1), and the lower triangular ones by which
                normals are before they are added, both float32 [parts, parts, n]; 1 and 0 for rows that the last steps
                bring up to date.
        """
        then = done.long() - self.first
        if len(done) <= self.steps - self.first:
            return self._late(then)
        kept, roots = self._late(torch.arange(self.steps - self.first + 1))
        return None if kept is None else kept[:, :, then], roots[:, :, then]

    def _late(self, then: Tensor) -> tuple[Tensor | None, Tensor]:
        is_late = self.steps - self.first - then > self.exact
        roots = _roots(torch.where(is_late, self._added[:, :, then], 0.0)).float()
        if self._keeps_all:
            return None, roots
        return torch.where(is_late, self._kept[:, :, then], self._one.unsqueeze(2)).float(), roots


def mix(state: Sequence[Tensor], by: Tensor) -> None:
    """Multiply in place the state of each row by its matrix, [parts, parts, n]."""
    if len(state) == 1:
        state[0].mul_(by[0, 0].unsqueeze(1))
        return
    old = [part.clone() for part in state]
    for part, line in zip(state, by.unsqueeze(3), strict=True):
        torch.mul(old[0], line[0], out=part).addcmul_(old[1], line[1])


def _times(matrix: Tensor, of: Tensor) -> Tensor:
    """Return matrix [k, k] times each of the matrices [k, k, T]."""
    return (matrix @ of.reshape(len(of), -1)).view_as(of)


def _roots(variances: Tensor) -> Tensor:
    """Return the lower triangular L of each covariance L Lᵀ, [k, k, n] for k = 1 or 2."""
    roots = torch.zeros_like(variances)
    roots[0, 0] = variances[0, 0].sqrt()
    if len(roots) > 1:
        roots[1, 0] = torch.where(roots[0, 0] > 0.0, variances[1, 0] / roots[0, 0], 0.0)
        roots[1, 1] = (variances[1, 1] - roots[1, 0] ** 2).clamp(min=0.0).sqrt()
    return roots

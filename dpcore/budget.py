"""Privacy budgets: an epsilon that no step may exceed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpcore.errors import PrivacyError


class BudgetError(PrivacyError):
    """A step would exceed the privacy budget; nothing of it was released."""


@dataclass(frozen=True)
class Budget:
    """A bound of epsilon at delta. ``planned``: (noise multiplier, sample rate, steps) that are known to fit.

    Frozen, because what was planned for one epsilon says nothing about another: :meth:`PrivacyEngine.set_budget`.
    """

    epsilon: float
    delta: float
    planned: tuple[float, float, int] | None = None

    def covers(self, history: Sequence[tuple[float, float, int]]) -> bool:
        """Return whether a history is no more than was planned.

        It then has no more steps, each with as much noise and as few examples. (The plan has no step that may fail.)
        """
        if self.planned is None:
            return False
        noise, rate, steps = self.planned
        return sum(n for _, _, n in history) <= steps and all(s >= noise and q <= rate for s, q, _ in history)

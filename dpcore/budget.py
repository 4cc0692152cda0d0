"""Privacy budgets: an epsilon that no step may exceed."""

from __future__ import annotations

from dataclasses import dataclass, field

from dpcore.accountants.accountant import History
from dpcore.errors import PrivacyError


class BudgetError(PrivacyError):
    """A step would exceed the privacy budget; nothing of it was released."""


@dataclass(frozen=True)
class Budget:
    """A bound of epsilon at delta. ``fits``: (noise multiplier, sample rate, steps) that are known to fit, together.

    Frozen, because what fits one epsilon says nothing about another: :meth:`PrivacyEngine.set_budget`. ``ahead``: so
    many steps more than are asked about may be tried, so that epsilon need not be computed at every step.
    """

    epsilon: float
    delta: float
    fits: History = field(default_factory=list)
    ahead: int = 64

    def covers(self, history: History) -> bool:
        """Return whether a history is no more than what is known to fit.

        Each of its steps has a place there, of as little noise and as many examples. (None of those may fail.)
        """
        left = [steps for _, _, steps in self.fits]
        for noise, rate, wanted in history:
            for i, (least, most, _) in enumerate(self.fits):
                if noise >= least and rate <= most:
                    taken = min(wanted, left[i])
                    left[i], wanted = left[i] - taken, wanted - taken
            if wanted:
                return False
        return True

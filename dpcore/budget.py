"""Privacy budgets: an epsilon that no step may exceed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dpcore.accountants import IAccountant
from dpcore.accountants.accountant import History, Rate, charged_of, count
from dpcore.accountants.utils import rounded_up
from dpcore.arguments import check_number
from dpcore.errors import PrivacyError


class BudgetError(PrivacyError):
    """A step would exceed the privacy budget; nothing of it was released."""


@dataclass(frozen=True)
class Budget:
    """A bound of epsilon at delta. ``fits``: (noise multiplier, sample rate, steps) that are known to fit, together.

    Frozen, because what fits one epsilon says nothing about another: :meth:`PrivacyEngine.set_budget`. ``ahead``: so
    many steps more than are asked about may be tried, so that epsilon need not be computed at every step. ``failing``:
    the chance of a failure with which they fit, too.
    """

    epsilon: float
    delta: float
    fits: History = field(default_factory=list)
    ahead: int = 64
    failing: float = 0.0

    @classmethod
    def checked(
        cls, epsilon: float, delta: float | None, fits: Sequence[tuple[float, Rate, int]], failing: float = 0.0
    ) -> Budget:
        """Return the budget; ValueError unless epsilon > 0 and 0 < delta < 1."""
        need = f"the budget is epsilon {epsilon} at delta {delta}; need epsilon > 0 and 0 < delta < 1"
        check_number("epsilon", epsilon, lambda e: e > 0.0, need)
        check_number("delta", delta, lambda d: 0.0 < d < 1.0, need)
        assert delta is not None
        return cls(epsilon, delta, list(fits), failing=failing)

    def after(
        self, accountant: IAccountant, noise: float, rate: Rate, steps: int, failure: float = 0.0
    ) -> tuple[float | None, Budget]:
        """Say whether more steps fit behind those of ``accountant``.

        Args:
            accountant: What has counted all steps so far; it stays as it is.
            noise: The noise multiplier of the steps to come.
            rate: Their sample rate.
            steps: How many they are.
            failure: The chance that one of them fails.

        Returns:
            Epsilon after them where it exceeds the budget, None where it does not; and the budget, which may know more
                that fits.
        """
        after = copy.deepcopy(accountant)
        _count(after, noise, rate, steps, failure)
        if after.failure_probability <= self.failing and self.covers(after.history):
            return None, self
        ahead = self.ahead
        while True:
            more = copy.deepcopy(after)
            if ahead:
                _count(more, noise, rate, ahead, failure)
            spent, failing = more.get_epsilon(self.delta), more.failure_probability
            if spent <= self.epsilon:
                return None, replace(self, fits=list(more.history), ahead=2 * ahead, failing=failing)
            if not ahead:
                return spent, replace(self, ahead=0)
            ahead //= 2

    def refusal(self, spent: float) -> BudgetError:
        """Return the error for a step that would bring epsilon to ``spent``."""
        return BudgetError(
            f"This step would bring epsilon to {rounded_up(spent, 6)} at delta {self.delta:g}, beyond the budget of "
            f"{self.epsilon:g}; nothing of it was released. Stop here, or raise the budget with set_budget (the data "
            "then leaks more)."
        )

    def covers(self, history: History) -> bool:
        """Return whether a history is no more than what is known to fit.

        Each of its steps has a place there, of as little noise and as many examples.
        """
        left = [steps for _, _, steps in self.fits]
        for noise, rate, wanted in charged_of(history):
            for i, (least, most, _) in enumerate(self.fits):
                if noise >= least and _is_no_more(rate, most):
                    taken = min(wanted, left[i])
                    left[i], wanted = left[i] - taken, wanted - taken
            if wanted:
                return False
        return True


def _is_no_more(rate: Rate, most: Rate) -> bool:
    """Return whether batches drawn in one way tell no more than those drawn in another."""
    if isinstance(rate, tuple) or isinstance(most, tuple):
        return rate == most
    return rate <= most


def _count(accountant: IAccountant, noise: float, rate: Rate, steps: int, failure: float) -> None:
    count(accountant, noise, rate, steps)
    if failure:
        accountant.add_failure_probability(min(1.0, steps * failure))

"""The privacy losses of a history: Poisson steps and epochs of balls in bins."""

from __future__ import annotations

from dpcore.accountants.accountant import History, totals
from dpcore.accountants.allocation import Epochs
from dpcore.accountants.privacy_loss import Loss, Step


def losses_of(history: History, removal: bool) -> list[Loss]:
    """Return the losses of what a history has released, for removal of a unit or for its addition."""
    return [
        Epochs(sigma, rate[1], count, removal)
        if isinstance(rate, tuple)
        else Step(sigma, min(rate, 1.0 - 1e-16), count, removal)
        for (sigma, rate), count in totals(history).items()
    ]

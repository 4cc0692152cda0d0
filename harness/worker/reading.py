"""How the gradient that an optimizer got is read off the weights. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from harness.contract import Setting
from harness.optimizer import SGD, AdamW, Optimizer

LARGE_EPS = 2.0**30
"""Beside it a float32 root of a mean of squares below 32 vanishes."""


READING_RATE = 0.15
"""Rate of the steps whose gradients are read off where the task's own rate is Adam's: large beside rounding."""


def reading_rate(optimizer: Optimizer, learning_rate: float) -> float:
    """Return the rate at which gradients are read off the weights: plain descent's own one, else READING_RATE."""
    return learning_rate if isinstance(optimizer, SGD) else READING_RATE


def transparent(setting: Setting, learning_rate: float) -> Setting:
    """Return ``setting`` with an optimizer of the same kind that moves the weights by ``learning_rate`` times the
    gradient that it gets, so that this gradient can be read off the weights.

    Adam's ratio hides a wrong scale. Without memory (beta1 = beta2 = 0), and with an eps beside which the root
    vanishes, the same code divides by a constant: w <- w - (rate / eps) * g, in the precision of the weights.
    """
    if isinstance(setting.optimizer, SGD):
        return replace(setting, learning_rate=learning_rate)
    memoryless = AdamW(beta1=0.0, beta2=0.0, eps=LARGE_EPS, weight_decay=0.0)
    return replace(setting, optimizer=memoryless, learning_rate=learning_rate * LARGE_EPS)

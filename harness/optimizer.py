"""The optimizers of the tasks as data, and how the gradient that one of them got can be read off the weights.

Standard library only: this module is imported inside every framework's environment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.contract import Setting


@dataclass(frozen=True)
class SGD:
    """Plain gradient descent: w <- w - lr * g."""

    name = "sgd"


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), t = 1, 2, ... counted from ``build``.

    m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; w <- w - lr * weight_decay * w, then
    w <- w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).

    Attributes:
        beta1: how much of the mean of gradients a step keeps.
        beta2: how much of the mean of squares a step keeps.
        eps: added to the root.
        weight_decay: share of a weight that a step with rate 1 takes off; of every trained parameter alike.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    name = "adamw"


Optimizer = SGD | AdamW

LARGE_EPS = 2.0**30
"""Beside it a float32 root of a mean of squares below 32 vanishes."""


READING_RATE = 0.15
"""Of the steps whose gradients are read off, where the task's own rate is Adam's: large beside the weights' rounding."""


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

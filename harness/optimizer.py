"""The optimizers of the tasks as data.

Standard library only: this module is imported inside every framework's environment.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SGD:
    """Plain gradient descent: w <- w - lr * g."""

    name = "sgd"


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), t = 1, 2, ... counted from ``build``.

    m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; w <- w - lr_t * weight_decay * w, then
    w <- w - lr_t * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps), where lr_t = lr * min(1, t / warm_up).

    Attributes:
        beta1: how much of the mean of gradients a step keeps.
        beta2: how much of the mean of squares a step keeps.
        eps: added to the root.
        weight_decay: share of a weight that a step with rate 1 takes off; of every trained parameter alike.
        warm_up: steps over which the rate rises to the task's own, in equal parts; 0: it is constant.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    warm_up: int = 0

    name = "adamw"

    def share(self, step: int) -> float:
        """Return the share of the task's rate that the step has, counted from 1."""
        return min(1.0, step / self.warm_up) if self.warm_up else 1.0


Optimizer = SGD | AdamW

PLAIN = SGD()

"""Keras' own optimizers, whose constants are traced, so that others of the same task need no compilation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from harness.contract import Setting
from harness.optimizer import SGD, AdamW

NAMES = (SGD.name, AdamW.name)

Number = Any
"""A float or a traced scalar."""


class Rising(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that rises over the first ``warm_up`` steps in equal parts."""

    def __init__(self, rate: Number = 1.0, warm_up: Number = 1.0) -> None:
        self.rate, self.warm_up = rate, warm_up

    def __call__(self, step: Number) -> Number:
        """Return the rate of a step, by how many were made before it."""
        return self.rate * ops.minimum(1.0, (ops.cast(step, "float32") + 1) / self.warm_up)


class AdamWithBareEpsilon(keras.optimizers.AdamW):
    """Keras' AdamW with the paper's epsilon.

    Keras corrects the bias of the ratio, not that of the root alone, and so adds what the paper (Kingma and Ba 2015)
    calls epsilon hat: the paper's, times the root's correction.
    """

    def update_step(self, gradient: Number, variable: keras.Variable, learning_rate: Number) -> None:
        """Make Keras' step with the epsilon that belongs to it."""
        given = self.epsilon
        step = ops.cast(self.iterations + 1, variable.dtype)
        self.epsilon = given * ops.sqrt(1 - ops.power(self.beta_2, step))
        super().update_step(gradient, variable, learning_rate)
        self.epsilon = given


def optimizer(setting: Setting) -> keras.optimizers.Optimizer:
    """Return the setting's optimizer; its constants come by :func:`give`."""
    return AdamWithBareEpsilon(Rising()) if isinstance(setting.optimizer, AdamW) else keras.optimizers.SGD(Rising())


def give(chosen: keras.optimizers.Optimizer, constants: Sequence[Number]) -> None:
    """Put in what :func:`frameworks._shared.jax.optimizers.constants` returns."""
    rate, _, *more = constants
    if more:
        chosen.beta_1, chosen.beta_2, chosen.epsilon, chosen.weight_decay, warm_up = more
        chosen.learning_rate = Rising(rate, warm_up)
    else:
        chosen.learning_rate = Rising(rate)

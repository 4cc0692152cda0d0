"""Schedules of the noise multiplier; the accountant reads it off the optimiser at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpcore.schedulers.scheduler import Exponential, Scheduler, Stepwise


class _NoiseScheduler(Scheduler):
    """Subclasses may define :meth:`get_noise_multiplier` instead of ``factor``."""

    attribute = "noise_multiplier"

    @property
    def has_own_rule(self) -> bool:
        return type(self).get_noise_multiplier is not _NoiseScheduler.get_noise_multiplier

    def get_noise_multiplier(self) -> float:
        """The noise multiplier at ``last_epoch``."""
        return super().value()

    def value(self) -> float:
        value = self.get_noise_multiplier()
        if not value >= 0.0:
            raise ValueError(f"The noise multiplier at step {self.last_epoch} is {value}; it must be at least 0.")
        return value


class ExponentialNoise(_NoiseScheduler, Exponential):
    """Noise multiplier times gamma^k."""


class StepNoise(_NoiseScheduler, Stepwise):
    """Noise multiplier times gamma at every ``step_size`` steps."""


class LambdaNoise(_NoiseScheduler):
    """Noise multiplier times ``noise_lambda(k)``; of a run that goes on, the value it has then."""

    def __init__(self, optimizer: Any, *, noise_lambda: Callable[[int], float], last_epoch: int = -1) -> None:
        self.noise_lambda = noise_lambda
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.noise_lambda(epoch)

    def past_factor(self, epoch: int) -> float:
        return 1.0

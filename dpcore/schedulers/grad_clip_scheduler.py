"""Schedules of the clip norm (of each bound, in per-layer clipping); the noise follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpcore.schedulers.scheduler import Exponential, Scheduler, Stepwise


class _GradClipScheduler(Scheduler):
    """Subclasses may define :meth:`get_max_grad_norm` instead of ``factor``."""

    attribute = "max_grad_norm"

    @property
    def has_own_rule(self) -> bool:
        return type(self).get_max_grad_norm is not _GradClipScheduler.get_max_grad_norm

    def get_max_grad_norm(self) -> Any:
        """The clip norm at ``last_epoch``."""
        return super().value()

    def value(self) -> Any:
        return self.get_max_grad_norm()


class ExponentialGradClip(_GradClipScheduler, Exponential):
    """Clip norm times gamma^k."""


class StepGradClip(_GradClipScheduler, Stepwise):
    """Clip norm times gamma at every ``step_size`` steps."""


class LambdaGradClip(_GradClipScheduler):
    """Clip norm times ``scheduler_function(k)``; of a run that goes on, the value it has then."""

    def __init__(self, optimizer: Any, *, scheduler_function: Callable[[int], float], last_epoch: int = -1) -> None:
        self.scheduler_function = scheduler_function
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.scheduler_function(epoch)

    def past_factor(self, epoch: int) -> float:
        return 1.0

"""Schedules of the expected batch size.

The loader's sample rate and the update's divisor move together, and the accountant counts every step at the rate of its
round. Call ``step()`` between rounds of the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpcore.data_loader import DPDataLoader
from dpcore.errors import PrivacyError
from dpcore.schedulers.scheduler import Exponential, Scheduler, Stepwise


class _BatchSizeScheduler(Scheduler):
    """``optimizer``: from make_private with Poisson sampling. ValueError where the rate would leave (0, 1]."""

    attribute = "expected_batch_size"

    def __init__(self, optimizer: Any, *, last_epoch: int = -1, **options: Any) -> None:
        loader = getattr(getattr(optimizer, "run", None), "loader", None)
        if not isinstance(loader, DPDataLoader):
            raise ValueError(
                "A batch-size schedule needs the optimizer of make_private with poisson_sampling=True; it changes the "
                "sample rate of that loader."
            )
        self.data_loader = loader
        self._rate_per_example = loader.sample_rate / optimizer.expected_batch_size
        super().__init__(optimizer, last_epoch=last_epoch, **options)

    def apply(self) -> None:
        value = self.value()
        if value != self.optimizer.expected_batch_size and self.optimizer.has_batch:
            raise PrivacyError(
                f"expected_batch_size would be changed from {self.optimizer.expected_batch_size:g} to {value:g} "
                "between a batch's backward pass and its step: the batch was drawn at the rate of the former and "
                "would be counted at that of the latter. Step the schedule after optimizer.step(), or give the batch "
                "up by optimizer.zero_grad() first."
            )
        self.data_loader.set_sample_rate(value * self._rate_per_example)
        self.optimizer.expected_batch_size = value


class ExponentialBatchSize(_BatchSizeScheduler, Exponential):
    """Expected batch size times gamma^k."""


class StepBatchSize(_BatchSizeScheduler, Stepwise):
    """Expected batch size times gamma at every ``step_size`` steps."""


class LambdaBatchSize(_BatchSizeScheduler):
    """Expected batch size times ``batch_size_lambda(k)``; of a run that goes on, the value it has then."""

    def __init__(self, optimizer: Any, *, batch_size_lambda: Callable[[int], float], last_epoch: int = -1) -> None:
        self.batch_size_lambda = batch_size_lambda
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.batch_size_lambda(epoch)

    def past_factor(self, epoch: int) -> float:
        return 1.0

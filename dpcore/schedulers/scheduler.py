"""One schedule for two quantities: value at step k = initial value x factor(k)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpcore.optimizers.optimizer import DPOptimizer


class Scheduler:
    """Sets ``optimizer.<attribute>`` to its initial value times ``factor(k)`` after k calls of :meth:`step`.

    Schedules must not depend on the data. ``factor`` must stay positive.
    """

    attribute: str

    def __init__(self, optimizer: DPOptimizer, factor: Callable[[int], float]) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.initial: Any = getattr(optimizer, self.attribute)
        self.epoch = 0
        self._apply()

    def step(self) -> None:
        """Moves on by one, usually an epoch."""
        self.epoch += 1
        self._apply()

    def _apply(self) -> None:
        factor = self.factor(self.epoch)
        if not factor > 0.0:
            raise ValueError(f"The factor at step {self.epoch} is {factor}; it must be above 0.")
        value = [c * factor for c in self.initial] if isinstance(self.initial, list) else self.initial * factor
        setattr(self.optimizer, self.attribute, value)

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self.initial, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.initial, self.epoch = state["initial"], state["epoch"]
        self._apply()


class LambdaNoise(Scheduler):
    """Noise multiplier times ``noise_lambda(k)``."""

    attribute = "noise_multiplier"

    def __init__(self, optimizer: DPOptimizer, *, noise_lambda: Callable[[int], float]) -> None:
        super().__init__(optimizer, noise_lambda)


class ExponentialNoise(Scheduler):
    """Noise multiplier times gamma^k."""

    attribute = "noise_multiplier"

    def __init__(self, optimizer: DPOptimizer, *, gamma: float) -> None:
        super().__init__(optimizer, lambda k: gamma**k)


class StepNoise(Scheduler):
    """Noise multiplier times gamma at every ``step_size`` steps."""

    attribute = "noise_multiplier"

    def __init__(self, optimizer: DPOptimizer, *, step_size: int, gamma: float) -> None:
        super().__init__(optimizer, lambda k: gamma ** (k // step_size))


class LambdaGradClip(Scheduler):
    """Clip norm times ``scheduler_function(k)``."""

    attribute = "max_grad_norm"

    def __init__(self, optimizer: DPOptimizer, *, scheduler_function: Callable[[int], float]) -> None:
        super().__init__(optimizer, scheduler_function)


class ExponentialGradClip(Scheduler):
    """Clip norm times gamma^k."""

    attribute = "max_grad_norm"

    def __init__(self, optimizer: DPOptimizer, *, gamma: float) -> None:
        super().__init__(optimizer, lambda k: gamma**k)


class StepGradClip(Scheduler):
    """Clip norm times gamma at every ``step_size`` steps."""

    attribute = "max_grad_norm"

    def __init__(self, optimizer: DPOptimizer, *, step_size: int, gamma: float) -> None:
        super().__init__(optimizer, lambda k: gamma ** (k // step_size))

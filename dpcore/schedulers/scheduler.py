"""The base of all schedules: a value per epoch, set on the optimiser when the schedule is built and at every step."""

from __future__ import annotations

from typing import Any

from dpcore.optimizers.schedules import have_to_wait


class Scheduler:
    """Sets ``optimizer.<attribute>`` to :meth:`value` at epoch 0 and after each :meth:`step`.

    A step within a batch that is handed out in pieces does nothing: a loop may call it in every iteration.

    Schedules must not depend on the data. ``last_epoch``: -1 to start; the number of the last epoch to go on from an
    optimiser whose attribute is what it was then.
    """

    attribute: str

    def __init__(self, optimizer: Any, *, last_epoch: int = -1) -> None:
        if not hasattr(optimizer, self.attribute):
            raise ValueError(
                f"A {type(optimizer).__name__} has no {self.attribute}; schedules of privacy take the optimizer that "
                "make_private returned."
            )
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.initial = getattr(optimizer, self.attribute)
        if last_epoch >= 0:
            self.initial = scaled(self.initial, 1.0 / self.past_factor(last_epoch))
        self._move_on()

    def factor(self, epoch: int) -> float:
        """Return what multiplies the initial value at ``epoch``."""
        raise NotImplementedError

    def past_factor(self, epoch: int) -> float:
        """Return what has multiplied the value that the optimiser has at ``epoch``, when the schedule is built then."""
        return self.factor(epoch)

    def value(self) -> Any:
        """The value at ``last_epoch``. ValueError where it is not positive."""
        factor = self.factor(self.last_epoch)
        if not factor > 0.0:
            raise ValueError(f"The factor at step {self.last_epoch} is {factor}; it must be above 0.")
        return scaled(self.initial, factor)

    def step(self) -> None:
        """Move on by one, usually an epoch; not after a piece whose batch goes on (``optimizer.batch_goes_on``)."""
        if not have_to_wait(self.optimizer):
            self._move_on()

    def _move_on(self) -> None:
        self.last_epoch += 1
        self.apply()

    def apply(self) -> None:
        """Sets the value on the optimiser."""
        setattr(self.optimizer, self.attribute, self.value())

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self.initial, "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.initial, self.last_epoch = state_dict["initial"], state_dict["last_epoch"]
        self.apply()


def scaled(value: Any, factor: float) -> Any:
    """A number, or each of a list, times ``factor``."""
    return [v * factor for v in value] if isinstance(value, list) else value * factor


class Exponential(Scheduler):
    """Times gamma^k at epoch k."""

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.gamma**epoch


class Stepwise(Scheduler):
    """Times gamma at every ``step_size`` epochs."""

    def __init__(self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1) -> None:
        if step_size < 1:
            raise ValueError(f"step_size is {step_size}; it must be at least 1.")
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.gamma ** (epoch // self.step_size)

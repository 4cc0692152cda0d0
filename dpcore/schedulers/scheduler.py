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
        if last_epoch >= 0 and not self.has_own_rule:
            self.initial = scaled(self.initial, 1.0 / self.past_factor(last_epoch))
        self._move_on()

    @property
    def has_own_rule(self) -> bool:
        """Whether a user's subclass computes its values by itself, possibly each from the one before."""
        return False

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
        try:
            self.apply()
        except Exception:
            self.last_epoch -= 1
            raise

    def apply(self) -> None:
        """Sets the value on the optimiser."""
        setattr(self.optimizer, self.attribute, self.value())

    def state_dict(self) -> dict[str, Any]:
        """Return the initial value and the number of the epoch; of a subclass with a rule of its own, all that it has.

        (But for objects, such as the optimiser and functions, which no checkpoint holds.)
        """
        if not self.has_own_rule:
            return {"initial": self.initial, "last_epoch": self.last_epoch}
        return {name: value for name, value in vars(self).items() if _is_plain(value)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`, also of Opacus' schedule of the same kind, which holds no initial value.

        A rule of a subclass' own is not asked: if its value came from the one before, it would move on once more. The
        value in force is the optimiser's, which a checkpoint restores.
        """
        if self.has_own_rule:
            vars(self).update(state_dict)
            return
        self.initial = state_dict.get("initial", self.initial)
        self.last_epoch = state_dict["last_epoch"]
        self.apply()


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers and texts alone."""
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


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

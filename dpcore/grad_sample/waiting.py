"""Batches that wait for the optimiser's step: their backward passes, and empty ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import PrivacyError
from dpcore.grad_sample.backward_pass import Iteration
from dpcore.grad_sample.empty_batches import EmptyBatches
from dpcore.tape.uses import Use


class WaitingBatches:
    """The backward passes whose gradients no step has taken.

    ``names``: of the recorded parameters. ``kept``: whether gradients can be read until ``zero_grad()``, behind the
    step too.
    """

    listener: WeakMethod[Callable[[], None]] | None = None
    """Who is told of a pass before it; not of a copy's."""

    def __init__(self, names: dict[Parameter, str], kept: bool) -> None:
        self.passes: list[Iteration] = []
        self.empty = EmptyBatches()
        self._names = names
        self._kept = kept
        self._taken: list[Iteration] = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "listener"}

    def tell(self) -> None:
        """Tell that a pass is to come."""
        listener = None if self.listener is None else self.listener()
        if listener is not None:
            listener()

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the module was called with."""
        return [tensor for iteration in self.passes for tensor in iteration.inputs]

    def form(self, turns: Iterable[Iterable[Parameter]]) -> None:
        """Form gradients by example of the parameters in ``turns``, which are there in their turn alone."""
        for params in turns:
            for param in params:
                with torch.autocast(param.device.type, enabled=False):
                    for iteration in self.passes:
                        iteration.grad_sample(param)

    def take(self, give_up: Callable[[], None]) -> Iterator[tuple[list[Use], int]]:
        """Yield (uses, batch size) of every backward pass since the last call, and forget them.

        ``give_up``: forgets passes that failed.
        """
        iterations, self.passes = self.passes, []
        iterations += [Iteration([], 0) for _ in range(self.empty.without_backward(bool(iterations)))]
        self.empty.take()
        self._taken = iterations if self._kept else []
        give_up()
        for iteration in iterations:
            iteration.ordinary.clear()
            yield iteration.remaining(), iteration.batch_size

    def forget(self) -> None:
        """Drop what earlier passes left behind, empty batches too."""
        self.passes, self._taken = [], []
        self.empty.clear()

    def drop(self) -> None:
        """Drop gradients as ``zero_grad()`` does.

        An empty batch at hand stays a step, whether ``zero_grad()`` comes before or behind the module's call.
        """
        self.passes, self._taken = [], []
        self.empty.drop()

    def read(self, param: Parameter) -> Any:
        """Return [B, *param.shape]; a list of them where several batches have accumulated; None where there is none."""
        iterations = self.passes or self._taken
        if not iterations:
            return None
        values = [iteration.grad_sample(param) for iteration in iterations]
        return values[0] if len(values) == 1 else values

    def write(self, param: Parameter, value: Any) -> None:
        """Put ``value`` in the place of what was recorded: ``write_grad_sample`` of the recorder."""
        if value is None:
            self.drop()
            return
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        for tensor in values:
            if not isinstance(tensor, Tensor) or tensor.shape[1:] != param.shape:
                raise ValueError(
                    f"grad_sample of {self._names[param]} was set to a value that is not a tensor of shape "
                    f"[batch, {', '.join(map(str, param.shape))}]; give one gradient per example."
                )
        if not self.passes:
            self.passes = [Iteration([], len(tensor)) for tensor in values]
        if [len(tensor) for tensor in values] != [iteration.batch_size for iteration in self.passes]:
            raise PrivacyError(
                f"grad_sample of {self._names[param]} has {[len(t) for t in values]} examples, the batch has "
                f"{[i.batch_size for i in self.passes]}; rows of different examples would be clipped together."
            )
        for iteration, tensor in zip(self.passes, values, strict=True):
            iteration.give(param, tensor)

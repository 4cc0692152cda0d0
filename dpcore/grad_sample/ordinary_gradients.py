"""Tells what lies in ``p.grad``: the ordinary gradient of a batch, what a private step released, or neither."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.grad_sample.backward_pass import Iteration
from dpcore.microbatch.accumulator import weighted_sum
from dpcore.microbatch.planner import choose
from dpcore.tape.uses import in_units


class OrdinaryGradients:
    """Forms ordinary gradients, and knows those that were formed here or released by the optimiser.

    Any other in ``p.grad`` is an ordinary one, of an operation that no rule has seen.
    """

    def __init__(self, params: list[Parameter], mean_loss: bool) -> None:
        self._params = params
        self._mean_loss = mean_loss
        self._known: dict[Parameter, tuple[Tensor, int]] = {}
        """Gradients that were formed or released, and their versions."""
        self._formed: dict[Parameter, Tensor] = {}
        """Copies of the ordinary gradients in p.grad, which a loop may write to in place: clip_grad_norm_ does."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out gradients, which a file of the module would hold as they were before clipping."""
        return {**self.__dict__, "_known": {}, "_formed": {}}

    @torch.no_grad()
    def form(self, iteration: Iteration) -> None:
        """Add Σ_i g_i to ``p.grad``, divided by the batch's length for a mean loss.

        Where an earlier backward pass went through the same graph, add what this one adds.
        """
        for param, total in self._sums(iteration):
            if param.grad is not None and not self.owns(param):
                continue  # an ordinary gradient of the user's; the optimiser's step refuses it by name
            before = iteration.ordinary.get(param)
            iteration.ordinary[param] = total
            added = (total if before is None else total - before).to(param.dtype)
            self._formed[param] = added if param.grad is None else param.grad + added
            param.grad = self._formed[param].clone()
            self.own(param)

    def _sums(self, iteration: Iteration) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield every parameter and Σ_i g_i, divided by the batch's length for a mean loss.

        (A sum goes over all rows, of which g_i is the mean of an example's.)
        """
        size = iteration.batch_size
        weight = 1.0 / max(size, 1) if self._mean_loss else float(iteration.group)
        choices = {choice.param: choice for choice in choose(in_units(iteration.uses, iteration.group))}
        weights: dict[Any, Tensor] = {}
        for param in self._params:
            kind = torch.promote_types(param.dtype, torch.float32), param.device
            total = torch.zeros(param.shape, dtype=kind[0], device=kind[1])
            if param in choices:
                if kind not in weights:
                    weights[kind] = torch.full((size,), weight, dtype=kind[0], device=kind[1])
                weighted_sum(choices[param], weights[kind], total)
            yield param, total

    def own(self, param: Parameter) -> None:
        """Record that ``param.grad`` is ours; a later change will be noticed."""
        assert param.grad is not None
        self._known[param] = (param.grad, param.grad._version)

    def release(self, param: Parameter) -> None:
        """Record that ``param.grad`` is what a private step releases."""
        self._formed.pop(param, None)
        self.own(param)

    def is_released(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or a released gradient as it was released."""
        return param.grad is None or (param not in self._formed and self.owns(param))

    def owns(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or has the values that it had when :meth:`own` was called."""
        if param.grad is None or self._is_as_known(param):
            return True
        formed = self.as_formed(param)
        if formed is None or not torch.equal(param.grad, formed):
            return False
        self.own(param)  # clip_grad_norm_ that clips nothing multiplies by 1; who logs the norm calls it so
        return True

    def as_formed(self, param: Parameter) -> Tensor | None:
        """Return the ordinary gradient that was formed in ``p.grad``, as it was; None where another one is there."""
        return self._formed.get(param) if self.formed(param) else None

    def _is_as_known(self, param: Parameter) -> bool:
        grad, version = self._known.get(param, (None, 0))
        return grad is not None and param.grad is grad and grad._version == version

    def formed(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` was formed or released here, whatever has become of it since."""
        return param.grad is not None and self._known.get(param, (None, 0))[0] is param.grad

    def clear(self) -> None:
        """Forget all gradients."""
        self._known.clear()
        self._formed.clear()


class LoopsGradients(OrdinaryGradients):
    """Gradients of a loop that sets ``p.grad_sample`` itself: what it leaves in ``p.grad`` is its own affair."""

    def owns(self, param: Parameter) -> bool:
        """Return True: the step replaces what is there."""
        return True

    def is_released(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or a released gradient: the loop's own is neither."""
        return super().owns(param)

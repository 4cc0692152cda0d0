"""Tells what lies in ``p.grad``: the ordinary gradient of a batch, what a private step released, or neither."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.grad_sample.backward_pass import Iteration
from dpcore.grad_sample.waiting import WaitingBatches
from dpcore.microbatch.accumulator import weighted_sum
from dpcore.microbatch.planner import choose
from dpcore.tape.uses import in_units


class OrdinaryGradients:
    """Forms ordinary gradients, and knows those that were formed here or released by the optimiser.

    Any other in ``p.grad`` is an ordinary one, of an operation that no rule has seen.
    """

    def __init__(self, params: list[Parameter], mean_loss: bool, waiting: WaitingBatches) -> None:
        self._params = params
        self._mean_loss = mean_loss
        self._waiting = waiting
        self._known: dict[Parameter, tuple[Tensor, int]] = {}
        """Gradients that were formed or released, and their versions."""
        self._ordinary: set[Parameter] = set()
        """Parameters in whose p.grad is the ordinary gradient of a batch, formed here."""

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
            param.grad = added if param.grad is None else param.grad + added
            self._ordinary.add(param)
            self.own(param)

    @torch.no_grad()
    def _sums(self, iteration: Iteration) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield every parameter and Σ_i g_i, divided by the batch's length for a mean loss.

        (A sum goes over all rows, of which g_i is the mean of an example's.)
        """
        size = iteration.batch_size
        weight = 1.0 / max(size, 1) if self._mean_loss else float(iteration.group)
        choices = {choice.param: choice for choice in choose(in_units(iteration.uses, iteration.group))}
        for param in self._params:
            dtype = torch.promote_types(param.dtype, torch.float32)
            total = torch.zeros(param.shape, dtype=dtype, device=param.device)
            if param in choices:
                weighted_sum(choices[param], torch.full((size,), weight, dtype=dtype, device=param.device), total)
            yield param, total

    def own(self, param: Parameter) -> None:
        """Record that ``param.grad`` is ours; a later change will be noticed."""
        assert param.grad is not None
        self._known[param] = (param.grad, param.grad._version)

    def release(self, param: Parameter) -> None:
        """Record that ``param.grad`` is what a private step releases."""
        self._ordinary.discard(param)
        self.own(param)

    def is_released(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or a released gradient as it was released."""
        return param.grad is None or (param not in self._ordinary and self.owns(param))

    def owns(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or has the values that it had when :meth:`own` was called."""
        if param.grad is None or self._is_as_known(param):
            return True
        if self.formed(param) and param in self._ordinary:
            self._own_what_is_as_formed()
        return self._is_as_known(param)

    def _is_as_known(self, param: Parameter) -> bool:
        grad, version = self._known.get(param, (None, 0))
        return grad is not None and param.grad is grad and grad._version == version

    def _own_what_is_as_formed(self) -> None:
        """Own ordinary gradients that were written in place and have the values that were formed.

        clip_grad_norm_ that clips nothing multiplies by 1; who logs the norm calls it so.
        """
        formed: dict[Parameter, Tensor] = {}
        for iteration in self._waiting.passes:
            for param, total in self._sums(iteration):
                formed[param] = formed[param] + total.to(param.dtype) if param in formed else total.to(param.dtype)
        for param in self._ordinary & formed.keys():
            if self.formed(param) and torch.equal(param.grad, formed[param]):  # type: ignore[arg-type]
                self.own(param)

    def formed(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` was formed or released here, whatever has become of it since."""
        return param.grad is not None and self._known.get(param, (None, 0))[0] is param.grad

    def clear(self) -> None:
        """Forget all gradients."""
        self._known.clear()


class LoopsGradients(OrdinaryGradients):
    """Gradients of a loop that sets ``p.grad_sample`` itself: what it leaves in ``p.grad`` is its own affair."""

    def owns(self, param: Parameter) -> bool:
        """Return True: the step replaces what is there."""
        return True

    def is_released(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or a released gradient: the loop's own is neither."""
        return super().owns(param)

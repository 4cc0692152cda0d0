"""The module that users train: its forward passes are recorded, so that an ordinary ``loss.backward()`` leaves behind
what the clipped sum needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample import attention, convolution, embedding, normalization, recurrent  # noqa: F401  (the rules)
from dpcore.grad_sample.fallback import Fallback
from dpcore.grad_sample.layout import copies, find_fallbacks, probe_size
from dpcore.grad_sample.tape import Tape, Use
from dpcore.grad_sample.tree import flatten


class GradSampleModule(nn.Module):
    """Wraps ``module``; attributes, ``state_dict`` keys apart from the prefix ``_module.``, and outputs are its own.

    In training mode with gradients enabled, inputs must be batch first. Where one loss goes through several calls of
    the module, rows of the same number are one example. ``loss_reduction``: "mean" or "sum", what the
    user's loss does over the batch. ``p.grad`` stays None between ``backward()`` and the optimiser's step: the
    gradient of the batch is never formed without clipping.
    """

    def __init__(self, module: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        super().__init__()
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum'.")
        if not batch_first:
            raise UnsupportedError("dpcore needs the batch as first dimension; transpose inside the model.")
        self._module = module
        self.loss_reduction = loss_reduction
        self.batch_first = batch_first
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._names = {p: n for n, p in self.trained.items()}
        self._iterations: list[tuple[list[Use], int]] = []
        self._firing: list[Tape] = []
        self._fallbacks: dict[str, Fallback] = {}
        self._kinds: set[tuple[Any, ...]] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return self._module(*args, **kwargs)
        batch_size = _batch_size([*args, *kwargs.values()])
        self._prepare(args, kwargs, batch_size)
        scale = float(batch_size) if self.loss_reduction == "mean" else 1.0
        tape = Tape(self._names, batch_size, scale, self._fallbacks)
        tape.on_fire = self._fired
        with tape:
            output = self._module(*args, **kwargs)
        if batch_size == 0:
            # Nothing will flow back from an empty batch, yet it is a step.
            self._iterations.append(([], 0))
        return output

    def _fired(self, tape: Tape) -> None:
        """A backward pass has reached ``tape`` for the first time; all that it reaches are one gradient per example."""
        if not self._firing:
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
        self._firing.append(tape)

    def _close(self) -> None:
        """At the end of a backward pass."""
        tapes, self._firing = self._firing, []
        sizes = {tape.batch_size for tape in tapes}
        if len(sizes) > 1:
            raise PrivacyError(
                f"One loss went through batches of {sorted(sizes)} examples, so their gradients cannot be told "
                f"apart by "
                "example; call backward() for each of them."
            )
        if sizes != {0}:
            self._iterations.append(([use for tape in tapes for use in tape.uses], sizes.pop()))

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int) -> None:
        """Before the first batch of a kind: finds what has no rule."""
        kind = tuple(
            (leaf.shape[1:], leaf.dtype)
            for leaf in flatten((args, kwargs))[0]
            if isinstance(leaf, Tensor) and leaf.dim()
        )
        if not batch_size or kind in self._kinds:
            return

        def run(count: int) -> Any:
            few_args, few_kwargs = copies((args, kwargs), batch_size, count)
            return self._module(*few_args, **few_kwargs)

        self._fallbacks = find_fallbacks(
            self._module, self._names, run, probe_size((args, kwargs), batch_size), self._fallbacks
        )
        self._kinds.add(kind)

    def take(self) -> Iterator[tuple[list[Use], int]]:
        """(uses, batch size) of every backward pass since the last call, which are then forgotten."""
        iterations, self._iterations = self._iterations, []
        yield from iterations

    def forget(self) -> None:
        """Drops what earlier passes left behind."""
        self._iterations, self._firing = [], []

    def to_standard_module(self) -> nn.Module:
        """The wrapped module itself."""
        return self._module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(self._module, name)


def _batch_size(values: Sequence[Any]) -> int:
    """Length of the first tensor among the inputs."""
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            return len(value)
        if isinstance(value, (list, tuple, dict)):
            nested = list(value.values()) if isinstance(value, dict) else list(value)
            if any(isinstance(v, (Tensor, list, tuple, dict)) for v in nested):
                return _batch_size(nested)
    raise UnsupportedError("The module was called without a tensor, so the number of examples is unknown.")

"""Rules for layer, group, instance and RMS norms: y = x̂ · γ + β with x̂ normalised within the example.

The normalisation itself has no parameters and is torch's; per example dγ = Σ x̂ ⊙ G and dβ = Σ G over all positions
that share an entry of γ or β.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.errors import UnsupportedError
from dpcore.rules.linear import wide
from dpcore.tape.tape import IN_ROWS, Tape, batch_first
from dpcore.tape.uses import Saved, Use, handles


class AffineUse(Use):
    """x̂ [B, ...] times γ plus β, both of the shape of the dimensions ``kept`` of x̂ (consecutive, not the batch)."""

    def __init__(
        self, name: str, x: Tensor, weight: Parameter | None, bias: Parameter | None, kept: tuple[int, ...]
    ) -> None:
        self.name = name
        self.weight, self.bias = weight, bias
        self.params = tuple(p for p in (weight, bias) if p is not None)
        self.summed = tuple(d for d in range(1, x.dim()) if d not in kept)
        self.kept = kept
        self._x = Saved(x)

    def grad_sample(self, param: Parameter) -> Tensor:
        assert self.grad is not None
        g = wide(self.grad)
        if param is self.weight:
            g = g * wide(self._x.get(self.name).detach())
        return g.sum(self.summed) if self.summed else g

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return False

    def rows(self, index: Tensor, dtype: torch.dtype) -> AffineUse:
        x = self._x.get(self.name).detach().index_select(0, index).to(dtype)
        use = AffineUse(self.name, x, self.weight, self.bias, self.kept)
        use.grad = None if self.grad is None else self.grad.index_select(0, index).to(dtype)
        return use

    def stash_bytes(self) -> int:
        return self._x.tensor.nbytes + (0 if self.grad is None else self.grad.nbytes)


def _affine(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, kept: tuple[int, ...], time_first: bool = False
) -> Tensor:
    trained_weight: Parameter | None = weight if tape.trains(weight) else None
    trained_bias: Parameter | None = bias if tape.trains(bias) else None
    params = [p for p in (trained_weight, trained_bias) if p is not None]
    batch_dim = tape.require_batch(x, params, len(kept)) if time_first else 0
    tape.check_batch(x, params, batch_dim)
    trailing = x.dim() - 1 - kept[-1]
    output = x
    if weight is not None:
        output = output * tape.constant(weight).view(*weight.shape, *[1] * trailing)
    if bias is not None:
        output = output + tape.constant(bias).view(*bias.shape, *[1] * trailing)
    if batch_dim == IN_ROWS:
        kept = tuple(d + 1 for d in kept)
    x = batch_first(x, batch_dim, tape.batch_size)
    return tape.record(AffineUse(tape.name(params), x, trained_weight, trained_bias, kept), output, batch_dim)


_signature = functools.cache(inspect.signature)
"""Finding out takes as long as several operators."""


def bound_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, defaults included."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@handles(F.layer_norm, F.rms_norm, derives=True)
def _layer_norm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    call = bound_arguments(func, args, kwargs)
    weight, bias = call.pop("weight"), call.pop("bias", None)
    if not tape.trains(weight) and not tape.trains(bias):
        return func(*args, **kwargs)
    x = call["input"]
    normalised = func(**call)
    tape.rows.copy(x, normalised)
    kept = tuple(range(x.dim() - len(call["normalized_shape"]), x.dim()))
    return _affine(tape, normalised, weight, bias, kept, time_first=True)


@handles(F.group_norm, F.instance_norm)
def _channel_norm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    call = bound_arguments(func, args, kwargs)
    weight, bias = call.pop("weight"), call.pop("bias")
    if not tape.trains(weight) and not tape.trains(bias):
        return func(*args, **kwargs)
    return _affine(tape, func(**call), weight, bias, (1,))


@handles(F.batch_norm, derives=True)
def _batch_norm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    call = bound_arguments(func, args, kwargs)
    if not call["training"]:
        return func(*args, **kwargs)
    raise UnsupportedError(
        "A batch norm in training mode normalises an example by the others of its batch; use GroupNorm "
        "(ModuleValidator.fix does), or put the layer into evaluation mode and freeze it."
    )

"""Rules for layer, group, instance and RMS norms: y = x̂ · γ + β with x̂ normalised within the example.

The normalisation itself has no parameters and is torch's; per example dγ = Σ x̂ ⊙ G and dβ = Σ G over all positions
that share an entry of γ or β. These are small beside x̂ and G: layer and group norms form them in the backward pass, at
once, and keep neither (:class:`NormUse`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.errors import UnsupportedError
from dpcore.rules.linear import wide
from dpcore.tape.batch_dims import IN_ROWS
from dpcore.tape.tape import Tape, batch_first
from dpcore.tape.uses import FormedUse, Saved, Use, handles


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


class NormUse(FormedUse):
    """A layer or group norm's γ and β, whose per-sample gradients are formed when the output's gradient arrives."""

    def __init__(self, name: str, weight: Parameter | None, bias: Parameter | None) -> None:
        self.name = name
        self.weight, self.bias = weight, bias
        self.params = tuple(p for p in (weight, bias) if p is not None)
        self._formed: dict[Parameter, Tensor] = {}

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """[B, ...]: what was formed for the first parameter, None before."""
        return self._formed.get(self.params[0])

    def forget(self) -> None:
        """Forget what an earlier backward pass brought."""
        self._formed = {}

    def take(self, normalised: Callable[[], Tensor], g: Tensor, summed: tuple[int, ...], scale: float) -> None:
        """Add the gradients by example for output gradients ``g`` [B, ...], times ``scale``.

        ``normalised()`` gives x̂, of g's shape; ``summed``: the dimensions along which γ and β are shared.
        """
        g = wide(g)
        for param in self.params:
            part = g * normalised() if param is self.weight else g
            part = part.sum(summed) if summed else part
            part = part if scale == 1.0 else part * scale
            before = self._formed.get(param)
            self._formed[param] = part if before is None else before + part

    def grad_sample(self, param: Parameter) -> Tensor:
        return self._formed[param]

    def rows(self, index: Tensor, dtype: torch.dtype) -> NormUse:
        use = NormUse(self.name, self.weight, self.bias)
        use._formed = {p: formed.index_select(0, index).to(dtype) for p, formed in self._formed.items()}
        return use

    def stash_bytes(self) -> int:
        return sum(formed.nbytes for formed in self._formed.values())


@dataclass(frozen=True)
class _Norm:
    """A layer norm over the last dimensions, of ``shape``, or a group norm of ``groups``."""

    epsilon: float
    shape: tuple[int, ...] = ()
    groups: int = 0

    def _sizes(self, x: Tensor) -> tuple[int, int, int, int]:
        """Examples, channels, positions, groups."""
        return x.shape[0], x.shape[1], math.prod(x.shape[2:]), self.groups

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output and, for the backward pass, means and inverse deviations."""
        if self.shape:
            return torch.native_layer_norm(x, self.shape, weight, bias, self.epsilon)
        return torch.native_group_norm(x, weight, bias, *self._sizes(x), self.epsilon)

    def backward(
        self, g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return the gradient at ``x``."""
        mask = [True, False, False]
        aten = torch.ops.aten
        if self.shape:
            return aten.native_layer_norm_backward(g, x, self.shape, mean, inverse, weight, bias, mask)[0]
        sizes = self._sizes(x)
        return aten.native_group_norm_backward(g, x, mean, inverse, weight, *sizes, mask)[0]

    def normalised(self, x: Tensor) -> Tensor:
        """Return x̂ in float32 or better."""
        return self.forward(wide(x), None, None)[0]

    def laid_out(self, tensor: Tensor, x: Tensor) -> Tensor:
        """Return a tensor of x's shape with its numbers as torch's kernels want them."""
        if self.shape or x.device.type != "cpu" or x.dim() != 4 or x.is_contiguous():
            return tensor.contiguous()
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        return tensor.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


class _Normed(torch.autograd.Function):
    """A norm with constant γ and β; ``take(g, x)`` gets each gradient at its output together with its input.

    The input is kept by the graph alone and for as long: where an activation is computed again in the backward pass,
    or the graph is used twice, it is there. ``anchor`` makes a backward pass come here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, norm: _Norm, weight: Tensor | None, bias: Tensor | None, take: Any
    ) -> Tensor:
        output, mean, inverse = norm.forward(x, weight, bias)
        ctx.norm, ctx.take = norm, take
        ctx.save_for_backward(x, mean, inverse, weight, bias)
        return output

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        ctx.take(g, x)
        norm = ctx.norm
        at_x = norm.backward(norm.laid_out(g, x), x, *others) if ctx.needs_input_grad[0] else None
        return at_x, None, None, None, None, None


def _normed(
    tape: Tape,
    norm: _Norm,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kept: tuple[int, ...],
    time_first: bool = False,
) -> Tensor:
    """The norm of ``x`` with ``weight`` and ``bias`` over the dimensions ``kept``, recorded."""
    trained_weight: Parameter | None = weight if tape.trains(weight) else None
    trained_bias: Parameter | None = bias if tape.trains(bias) else None
    use = NormUse("", trained_weight, trained_bias)
    use.name = tape.layer(use.params)
    batch_dim = tape.batch.required(x, use.params, len(kept)) if time_first else 0
    tape.batch.check(x, use.params, batch_dim)
    if torch.is_autocast_enabled(x.device.type):
        x = wide(x)
        weight, bias = (None if t is None else wide(tape.constant(t)) for t in (weight, bias))
    x = norm.laid_out(x, x)
    if batch_dim == IN_ROWS:
        kept = tuple(d + 1 for d in kept)
    size = tape.batch_size

    def take(g: Tensor, x: Tensor, scale: float) -> None:
        summed = tuple(d for d in range(1, x.dim() + (batch_dim == IN_ROWS)) if d not in kept)
        x, g = batch_first(x.detach(), batch_dim, size), batch_first(g, batch_dim, size)
        use.take(lambda: norm.normalised(x), g, summed, scale)

    place = tape.place(use, take)
    return _Normed.apply(x, tape.edges.anchor, norm, tape.constant(weight), tape.constant(bias), place)


def _is_constant(tape: Tape, *tensors: Tensor | None) -> bool:
    """Return whether no gradient flows to these but those that are recorded."""
    return all(t is None or tape.trains(t) or not t.requires_grad for t in tensors)


def _affine(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, kept: tuple[int, ...], time_first: bool = False
) -> Tensor:
    trained_weight: Parameter | None = weight if tape.trains(weight) else None
    trained_bias: Parameter | None = bias if tape.trains(bias) else None
    params = [p for p in (trained_weight, trained_bias) if p is not None]
    batch_dim = tape.batch.required(x, params, len(kept)) if time_first else 0
    tape.batch.check(x, params, batch_dim)
    trailing = x.dim() - 1 - kept[-1]
    output = x
    if weight is not None:
        output = output * tape.constant(weight).view(*weight.shape, *[1] * trailing)
    if bias is not None:
        output = output + tape.constant(bias).view(*bias.shape, *[1] * trailing)
    if batch_dim == IN_ROWS:
        kept = tuple(d + 1 for d in kept)
    x = batch_first(x, batch_dim, tape.batch_size)
    return tape.record(AffineUse(tape.layer(params), x, trained_weight, trained_bias, kept), output, batch_dim)


@functools.cache
def _parameters(func: Callable[..., Any]) -> dict[str, Any]:
    """A function's parameters and their defaults; finding out takes as long as several operators."""
    return {name: parameter.default for name, parameter in inspect.signature(func).parameters.items()}


def bound_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, defaults included; ``func`` takes no variable number of arguments.

    As ``inspect.Signature.bind`` does, which takes as long as an operator itself, and says what is wrong with a call.
    """
    bound = dict(_parameters(func))
    names = tuple(bound)
    given = names[: len(args)]
    wrong = len(args) > len(names) or any(name in given or name not in bound for name in kwargs)
    bound.update(zip(given, args, strict=False))
    bound.update(kwargs)
    if wrong or any(value is inspect.Parameter.empty for value in bound.values()):
        inspect.signature(func).bind(*args, **kwargs)  # raises, as the call itself would
    return bound


@handles(F.layer_norm, F.rms_norm, derives=True)
def _layer_norm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    call = bound_arguments(func, args, kwargs)
    weight, bias = call.pop("weight"), call.pop("bias", None)
    if not tape.trains(weight) and not tape.trains(bias):
        return func(*args, **kwargs)
    x = call["input"]
    if func is F.layer_norm and _is_constant(tape, weight, bias):
        shape = tuple(call["normalized_shape"])
        kept = tuple(range(x.dim() - len(shape), x.dim()))
        return _normed(tape, _Norm(call["eps"], shape=shape), x, weight, bias, kept, time_first=True)
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
    if func is F.group_norm and _is_constant(tape, weight, bias) and call["input"].dim() > 1:
        norm = _Norm(call["eps"], groups=call["num_groups"])
        return _normed(tape, norm, call["input"], weight, bias, (1,))
    return _affine(tape, func(**call), weight, bias, (1,))


def _is_of_a_parameter(tensor: Tensor) -> bool:
    """Return whether this is a parameter, or a view of all of one: a frozen weight that is standardised, for instance.

    It holds no example: batches differ in length. A trained one does not come here.
    """
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, Parameter) and base.numel() == tensor.numel()


@handles(F.batch_norm, derives=True)
def _batch_norm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    call = bound_arguments(func, args, kwargs)
    if not call["training"] or _is_of_a_parameter(call["input"]):
        return func(*args, **kwargs)
    raise UnsupportedError(
        "A batch norm in training mode normalises an example by the others of its batch; use GroupNorm "
        "(ModuleValidator.fix does), or put the layer into evaluation mode and freeze it."
    )

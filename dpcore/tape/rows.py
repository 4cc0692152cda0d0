"""Find where examples lie in tensors whose first dimension is not the batch: [B * k, ...], k rows for every example.

Models reshape [B, T, d] to [B * T, d] for one matrix product, and pictures to windows. Neither shapes nor values tell
such rows from others (those that a router has chosen, say), so every step from the batch to there is followed: only
functions that are known to keep the rows of an example together, and in order, hand the knowledge on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _named(*names: str) -> set[Callable[..., Any]]:
    spaces = (torch, Tensor, F)
    return {getattr(space, name) for space in spaces for name in names if hasattr(space, name)}


RESHAPES = _named("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as")
_ELEMENTWISE = _named(
    *("add", "sub", "mul", "div", "neg", "exp", "pow", "sqrt", "rsqrt", "square", "abs", "clamp", "where", "rsub"),
    *("multiply", "divide", "true_divide", "subtract"),
    *("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "mish", "elu", "leaky_relu", "hardswish", "dropout"),
    *("contiguous", "clone", "to", "type_as", "float", "double", "half", "bfloat16", "masked_fill", "detach"),
    *("add_", "mul_", "multiply_", "sub_", "div_", "masked_fill_", "type"),
    *(f"__{kind}{name}__" for name in ("add", "sub", "mul", "truediv") for kind in ("", "r", "i")),
    *("__neg__", "__pow__"),
) | {F.linear, F.layer_norm, F.rms_norm}
"""Functions of which every row of the result comes from the same row of each argument with as many dimensions."""
_ALONG = _named("softmax", "log_softmax", "mean", "sum", "chunk", "split", "cat", "amax")
"""Such functions unless they work along the dimension of the rows, which they get as ``dim`` or ``dims``."""
_PERMUTES = _named("permute", "transpose", "swapaxes", "mT") | {Tensor.mT.__get__}  # type: ignore[attr-defined]
_PRODUCTS = _named("matmul", "bmm", "__matmul__")


class Rows:
    """The tensors of one pass whose dimension ``dim`` holds ``count`` rows for each of the examples."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def of(self, tensor: Any) -> tuple[int, int] | None:
        """(dimension, rows for each example), or None where the batch is a dimension of its own or is not known."""
        found = self.known.get(id(tensor))
        return found[1:] if found is not None and found[0]() is tensor else None

    def put(self, tensor: Tensor, dim: int, count: int) -> None:
        """Notes that ``tensor`` has ``count`` rows for each example in its dimension ``dim``."""
        key, known = id(tensor), self.known
        known[key] = weakref.ref(tensor, lambda _: known.pop(key, None)), dim, count

    def copy(self, tensor: Tensor, result: Tensor) -> None:
        """Notes of ``result`` what is known of ``tensor``, from whose rows its own come one by one."""
        place = self.of(tensor)
        if place is not None and tensor.dim() == result.dim():
            self.put(result, *place)

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes what is known of the results of a call."""
        if func in RESHAPES:
            self._follow_reshape(args[0] if args else kwargs.get("input"), result)
            return
        for tensor in _tensors((args, kwargs)):
            place = self.of(tensor)
            if place is not None:
                for out in _tensors(result):
                    dim = _place(_Step(func, args, kwargs, tensor, place[0], out))
                    if dim is not None and out.shape[dim : dim + 1] == tensor.shape[place[0] : place[0] + 1]:
                        self.put(out, dim, place[1])
                return

    def _follow_reshape(self, tensor: Any, result: Any) -> None:
        """A reshape keeps the order of the numbers, so that an example's stay together where rows come first."""
        if not isinstance(result, Tensor) or not isinstance(tensor, Tensor) or not result.dim() or not tensor.dim():
            return
        place, size = self.of(tensor), self._batch_size
        if place is None and (not size or len(tensor) != size):
            return
        if (place is None or place[0] == 0) and size and len(result) % size == 0 and len(result) > size:
            self.put(result, 0, len(result) // size)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


@dataclass(frozen=True)
class _Step:
    """A call of ``func`` that makes ``out`` of ``tensor``, whose dimension ``dim`` holds the rows."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensor: Tensor
    dim: int
    out: Tensor


def _place(step: _Step) -> int | None:
    """The dimension of the result that has the rows; None where that is not known."""
    found = next((place for functions, place in _PLACES if step.func in functions), None)
    return None if found is None else found(step)


def _same(step: _Step) -> int | None:
    return step.dim if step.out.dim() == step.tensor.dim() else None


def _permuted(step: _Step) -> int | None:
    order = _order(step.func, step.args, step.kwargs, step.tensor.dim())
    return None if order is None else order.index(step.dim)


def _left_factor(step: _Step) -> int | None:
    """Rows of the first operand: those of one matrix, or a dimension along which there are many."""
    dims = step.tensor.dim()
    rows = step.dim < dims - (1 if dims == 2 else 2)
    return _same(step) if rows and step.args[0] is step.tensor else None


def _of_attention(step: _Step) -> int | None:
    return _same(step) if step.dim < step.tensor.dim() - 2 else None


def _beside(step: _Step) -> int | None:
    """A function along other dimensions, which may be gone."""
    dims, args, kwargs = step.tensor.dim(), step.args, step.kwargs
    along = kwargs.get("dim", kwargs.get("dims", args[-1] if len(args) > 1 else None))
    over = (along,) if isinstance(along, int) else along if isinstance(along, list | tuple) else ()
    if not over or not all(isinstance(d, int) for d in over) or any(d % dims == step.dim for d in over):
        return None
    gone = any(d % dims < step.dim for d in over) and step.out.dim() != dims
    return None if gone else step.dim


def _unbound(step: _Step) -> int | None:
    along = step.kwargs.get("dim", step.args[1] if len(step.args) > 1 else 0) % step.tensor.dim()
    return None if along == step.dim else step.dim - (along < step.dim)


def _indexed(step: _Step) -> int | None:
    """After ``[number]``, ``[:, slice]`` and the like."""
    index, dim = step.args[1], step.dim
    if isinstance(index, int):
        return dim - 1 if dim else None
    parts = index if isinstance(index, tuple) else (index,)
    plain = len(parts) > dim and all(isinstance(part, slice) for part in parts)
    return _same(step) if plain and all(part == slice(None) for part in parts[: dim + 1]) else None


_PLACES: tuple[tuple[set[Any], Callable[[_Step], int | None]], ...] = (
    (_ELEMENTWISE, _same),
    (_PERMUTES, _permuted),
    (_PRODUCTS, _left_factor),
    ({F.scaled_dot_product_attention}, _of_attention),
    (_ALONG, _beside),
    ({torch.unbind, Tensor.unbind}, _unbound),
    ({Tensor.__getitem__}, _indexed),
)


def _order(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dims: int) -> list[int] | None:
    """Return which dimension of the input each dimension of a permuted tensor was."""
    given = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    if kwargs or not all(isinstance(d, int) for d in given):
        return None
    if "permute" in func.__name__:
        return [d % dims for d in given]
    order = list(range(dims))
    one, other = (d % dims for d in given) if len(given) == 2 else (dims - 2, dims - 1)
    order[one], order[other] = other, one
    return order

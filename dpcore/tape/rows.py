"""Where examples lie in tensors whose first dimension is not the batch: [B * k, ...], k rows for every example.

Models reshape [B, T, d] to [B * T, d] for one matrix product, and pictures to windows. Neither shapes nor values tell
such rows from others (those that a router has chosen, say), so every step from the batch to there is followed: only
functions that are known to keep the rows of an example together, and in order, hand the knowledge on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _named(*names: str) -> set[Callable[..., Any]]:
    spaces = (torch, Tensor, F)
    return {getattr(space, name) for space in spaces for name in names if hasattr(space, name)}


_RESHAPES = _named("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as")
_ELEMENTWISE = (
    _named(
        *("add", "sub", "mul", "div", "neg", "exp", "pow", "sqrt", "rsqrt", "square", "abs", "clamp", "where", "rsub"),
        *("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "mish", "elu", "leaky_relu", "hardswish", "dropout"),
        *("contiguous", "clone", "to", "type_as", "float", "double", "half", "bfloat16", "masked_fill", "detach"),
        *("add_", "mul_", "sub_", "div_", "masked_fill_", "type"),
        *(f"__{kind}{name}__" for name in ("add", "sub", "mul", "truediv") for kind in ("", "r", "i")),
        *("__neg__", "__pow__"),
    )
    | {F.linear, F.layer_norm, F.rms_norm}
)
"""Functions of which every row of the result comes from the same row of each argument with as many dimensions."""
_ALONG = _named("softmax", "log_softmax", "mean", "sum", "chunk", "split", "cat", "roll", "norm", "amax")
"""Such functions unless they work along the dimension of the rows, which they get as ``dim`` or ``dims``."""
_PERMUTES = _named("permute", "transpose", "swapaxes", "mT") | {Tensor.mT.__get__}  # type: ignore[attr-defined]
_PRODUCTS = _named("matmul", "bmm", "__matmul__")


class Rows:
    """The tensors of one pass whose dimension ``dim`` holds ``count`` rows for each of the examples."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def of(self, tensor: Any) -> tuple[int, int] | None:
        """(dimension, rows for each example), or None where the batch is a dimension of its own or is not known."""
        found = self._known.get(id(tensor))
        return found[1:] if found is not None and found[0]() is tensor else None

    def put(self, tensor: Tensor, dim: int, count: int) -> None:
        """Notes that ``tensor`` has ``count`` rows for each example in its dimension ``dim``."""
        key, known = id(tensor), self._known
        known[key] = weakref.ref(tensor, lambda _: known.pop(key, None)), dim, count

    def copy(self, tensor: Tensor, result: Tensor) -> None:
        """Notes of ``result`` what is known of ``tensor``, from whose rows its own come one by one."""
        place = self.of(tensor)
        if place is not None and tensor.dim() == result.dim():
            self.put(result, *place)

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes what is known of the results of a call."""
        reshapes = func in _RESHAPES
        if not reshapes and not self._known:
            return
        if reshapes:
            self._follow_reshape(args[0] if args else kwargs.get("input"), result)
            return
        for tensor in _tensors((args, kwargs)):
            place = self.of(tensor)
            if place is not None:
                for out in _tensors(result):
                    dim = _place(func, args, kwargs, tensor, place[0], out)
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


def _place(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor, dim: int, out: Tensor
) -> int | None:
    """The dimension of ``out`` that has the rows of ``tensor``'s dimension ``dim``; None where that is not known."""
    dims = tensor.dim()
    if func in _ELEMENTWISE:
        return dim if out.dim() == dims else None
    if func in _PERMUTES:
        order = _order(func, args, kwargs, dims)
        return order.index(dim) if order is not None else None
    if func in _PRODUCTS:
        return dim if args[0] is tensor and out.dim() == dims and dim < dims - (1 if dims == 2 else 2) else None
    if func is F.scaled_dot_product_attention:
        return dim if out.dim() == dims and dim < dims - 2 else None
    if func in _ALONG:
        along = kwargs.get("dim", kwargs.get("dims", args[-1] if len(args) > 1 else None))
        over = (along,) if isinstance(along, int) else along if isinstance(along, list | tuple) else None
        if over is None or not all(isinstance(d, int) for d in over) or any(d % dims == dim for d in over):
            return None
        return dim if out.dim() == dims else None if any(d % dims < dim for d in over) else dim
    if func in (torch.unbind, Tensor.unbind) and out.dim() == dims - 1:
        along = (kwargs.get("dim", args[1] if len(args) > 1 else 0)) % dims
        return None if along == dim else dim - (along < dim)
    if func is Tensor.__getitem__:
        return _indexed(args[1], dims, dim, out)
    return None


def _order(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dims: int) -> list[int] | None:
    """Which dimension of the input each dimension of a permuted tensor was."""
    given = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    if kwargs or not all(isinstance(d, int) for d in given):
        return None
    if "permute" in func.__name__:
        return [d % dims for d in given]
    order = list(range(dims))
    one, other = (d % dims for d in given) if len(given) == 2 else (dims - 2, dims - 1)
    order[one], order[other] = other, one
    return order


def _indexed(index: Any, dims: int, dim: int, out: Tensor) -> int | None:
    """After ``[number, ...]``, ``[:, ..., slice]`` and the like."""
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(parts[0], int) and len(parts) == 1:
        return dim - 1 if dim else None
    whole = all(part == slice(None) for part in parts[: dim + 1] if not isinstance(part, Tensor))
    plain = all(isinstance(part, slice) for part in parts)
    return dim if plain and whole and len(parts) > dim and out.dim() == dims else None

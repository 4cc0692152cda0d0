"""A batch cut into pieces, each with some of its examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, NoReturn

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dpcore.errors import UnsupportedError
from dpcore.tree import has_tensor, length_or_none


def cut(batch: Any, rows: slice, length: int | None = None) -> Any:
    """Take some of a batch's examples.

    Arrays, and lists with one entry per example (of names, say), are cut as tensors are; a list of tensors is
    structure. In every piece as a whole are a tensor or an array without dimensions, single numbers and strings, and
    a list of strings whose length is not the batch's (the names of classes, say).

    Args:
        batch: Tensors and anything beside them, in any structure.
        rows: Which examples.
        length: How many examples the batch has; None: as many as its first tensor has rows.

    Returns:
        The pieces in the same structure.

    Raises:
        UnsupportedError: the first dimension of a tensor or an array, or the length of a list of numbers, is not the
            batch's length, so that its rows are not examples; or an object holds values in a way that is not known.
    """
    return _cut(batch, rows, length_or_none(batch) if length is None else length, "")


def _cut(value: Any, rows: slice, length: int | None, where: str) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return _rows_of(value, rows, length, where)
    if isinstance(value, PackedSequence):
        raise UnsupportedError(
            "The batch holds a PackedSequence, whose rows are not examples, so that it cannot be cut into pieces; let "
            "collate_fn return padded sequences and their lengths, and pack them in the model."
        )
    if isinstance(value, Mapping):
        return {key: _cut(part, rows, length, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        named = hasattr(value, "_fields")
        if not named and _is_one_per_example(value, length):
            return type(value)(value[rows])
        if not named and value and all(isinstance(part, Number) for part in value):
            _refuse(f"holds {len(value)} numbers", length, where)
        parts = [_cut(part, rows, length, f"{where}[{i}]") for i, part in enumerate(value)]
        return type(value)(*parts) if named else type(value)(parts)
    if _holds_values(value):
        raise UnsupportedError(
            f"batch{where} is of type {type(value).__name__}, of which dpcore does not know what belongs to which "
            "example, so that it cannot be cut into pieces; let collate_fn return tensors, arrays, or lists with one "
            "entry per example, in dicts, lists or named tuples."
        )
    return value


def _holds_values(value: Any) -> bool:
    """Return whether an object that is no tensor, array, list or dict may hold something of every example."""
    if isinstance(value, (str, bytes, Number, np.generic, type)):
        return False
    if hasattr(value, "__getitem__") or hasattr(value, "__array__"):
        return True
    return any(isinstance(part, np.ndarray) or has_tensor(part) for part in getattr(value, "__dict__", {}).values())


def _rows_of(value: Any, rows: slice, length: int | None, where: str) -> Any:
    """The examples' rows of a tensor or an array; refused where its rows are not examples.

    It might belong to no example (class weights) or to all in another order (flat ids beside offsets): in the first
    case every piece needs the whole of it, in the second its own part, and nothing tells which it is.
    """
    if not value.ndim:
        return value
    if len(value) == length:
        return value[rows]
    _refuse(f"has the shape {tuple(value.shape)}", length, where)


def _refuse(what: str, length: int | None, where: str) -> NoReturn:
    raise UnsupportedError(
        f"batch{where} {what}, and the batch {length} examples, so its rows are not "
        "examples and it cannot be cut into pieces. What belongs to no example, such as class weights, goes into the "
        "model or the loss instead of the batch; what has several rows for an example, or none, such as flat ids, is "
        "padded to [B, ...]."
    )


def _is_one_per_example(values: Sequence[Any], length: int | None) -> bool:
    """Return whether entry i belongs to example i.

    It does not where an entry holds a tensor, nor where every entry has one value per example itself: torch makes such
    lists of examples with several names each.
    """
    if not values or not _counts(values, length) or has_tensor(values):
        return False
    return not all(_counts(value, length) for value in values)


def _counts(value: Any, length: int | None) -> bool:
    """Return whether ``value`` is an array or a list (or a dict of such) of ``length`` entries."""
    if isinstance(value, Mapping):
        return bool(value) and all(_counts(part, length) for part in value.values())
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == length
    return isinstance(value, (list, tuple)) and len(value) == length

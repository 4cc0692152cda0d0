"""A batch cut into pieces, each with some of its examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dpcore.errors import UnsupportedError
from dpcore.tree import has_tensor, length_or_none


def cut(batch: Any, rows: slice, length: int | None = None) -> Any:
    """Take some of a batch's examples.

    A list with one entry per example (of names, say) is cut as tensors are; a list of tensors is structure. A tensor
    without dimensions, and whatever holds no value per example and is no tensor, is in every piece as a whole.

    Args:
        batch: Tensors and anything beside them, in any structure.
        rows: Which examples.
        length: How many examples the batch has; None: as many as its first tensor has rows.

    Returns:
        The pieces in the same structure.

    Raises:
        UnsupportedError: a tensor's first dimension is not the batch's length, so that its rows are not examples.
    """
    return _cut(batch, rows, length_or_none(batch) if length is None else length, "")


def _cut(value: Any, rows: slice, length: int | None, where: str) -> Any:
    if isinstance(value, Tensor):
        return _rows_of(value, rows, length, where)
    if isinstance(value, np.ndarray) and _counts(value, length):
        return value[rows]
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
        parts = [_cut(part, rows, length, f"{where}[{i}]") for i, part in enumerate(value)]
        return type(value)(*parts) if named else type(value)(parts)
    return value


def _rows_of(value: Tensor, rows: slice, length: int | None, where: str) -> Tensor:
    """The examples' rows of a tensor; refused where its rows are not examples.

    It might belong to no example (class weights) or to all in another order (flat ids beside offsets): in the first
    case every piece needs the whole of it, in the second its own part, and nothing tells which it is.
    """
    if not value.dim():
        return value
    if len(value) == length:
        return value[rows]
    raise UnsupportedError(
        f"batch{where} has the shape {tuple(value.shape)}, and the batch {length} examples, so its rows are not "
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

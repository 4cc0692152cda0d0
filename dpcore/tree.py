"""Nested tuples, lists and dicts of tensors as flat lists, with torch's own pytree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dpcore.errors import UnsupportedError


def flatten(value: Any) -> tuple[list[Any], Any]:
    """(leaves, structure)."""
    return pytree.tree_flatten(value)


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """The value of :func:`flatten` with other leaves."""
    return pytree.tree_unflatten(leaves, structure)


def batch_length(value: Any) -> int:
    """Number of examples: the length of the first tensor in a batch of any structure.

    UnsupportedError where there is none.
    """
    length = length_or_none(value)
    if length is None:
        raise UnsupportedError(
            f"A batch of type {type(value).__name__} holds no tensor with a batch dimension, so its number of examples "
            "is unknown."
        )
    return length


def length_or_none(value: Any) -> int | None:
    """:func:`batch_length`, or None where no tensor tells it."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, Tensor):
        return len(value) if value.dim() else None
    parts: Sequence[Any] = ()
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    return next((length for part in parts if (length := length_or_none(part)) is not None), None)


def has_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor, or a dict or sequence that holds one."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(has_tensor(part) for part in value.values())
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and any(map(has_tensor, value))

"""Nested tuples, lists and dicts of tensors as flat lists, with torch's own pytree."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree


def flatten(value: Any) -> tuple[list[Any], Any]:
    """(leaves, structure)."""
    return pytree.tree_flatten(value)


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """The value of :func:`flatten` with other leaves."""
    return pytree.tree_unflatten(leaves, structure)

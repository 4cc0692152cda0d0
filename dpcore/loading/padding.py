"""Batches of one length: rows that a mask leaves out fill them up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpcore.tree import batch_length, flatten, has_rows, unflatten


def padded(batch: Any, rows: int) -> tuple[Any, Tensor]:
    """Fill a batch up to a fixed length, for an :class:`dpcore.Engine`: what the mask leaves out adds exactly zero.

    Args:
        batch: Tensors, and lists with one entry per row, in any structure; what has no rows stays as it is.
        rows: How many rows the result has; with units of K rows a multiple of K.

    Returns:
        The batch, in which copies of the first row (zeros where there is none) follow the others; and the mask, bool
            [rows], True for the batch's own.

    Raises:
        ValueError: the batch is longer; let the loader bound it by max_batch_size.
        UnsupportedError: the batch holds no tensor.
    """
    length = batch_length(batch)
    if length > rows:
        raise ValueError(
            f"The batch has {length} rows, and is to be filled up to {rows}; give DPDataLoader a max_batch_size, or a "
            "larger number of rows."
        )
    leaves, structure = flatten(batch, length)
    filled = [_filled(leaf, length, rows) if has_rows(leaf, length) else leaf for leaf in leaves]
    return unflatten(structure, filled), torch.arange(rows) < length


def _filled(leaf: Any, length: int, rows: int) -> Any:
    if not isinstance(leaf, Tensor):
        return [*leaf, *leaf[:1] * (rows - length)]
    more = leaf[:1] if length else leaf.new_zeros(1, *leaf.shape[1:])
    return torch.cat([leaf, more.expand(rows - length, *leaf.shape[1:])])

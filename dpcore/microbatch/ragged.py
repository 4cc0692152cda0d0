"""Inputs of a model whose first dimension is not the batch: a PackedSequence, and the flat ids and offsets of bags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dpcore.errors import UnsupportedError
from dpcore.tree import batch_length, flatten, has_rows, is_list_of, unflatten


def _leaves(value: Any, length: int = 0) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(value, is_leaf=lambda v: isinstance(v, PackedSequence) or is_list_of(v, length))


def _arguments(value: Any) -> list[Any] | None:
    """The leaves of what most models get: tensors alone, by place or by name; None of anything else."""
    if type(value) is not tuple or len(value) != 2 or type(value[0]) is not tuple or type(value[1]) is not dict:
        return None
    leaves = [*value[0], *value[1].values()]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            return None
    return leaves


def is_ragged(model: nn.Module, value: Any) -> bool:
    """Return whether the arguments of a model hold examples that are not rows of a tensor."""
    leaves, _ = _leaves(value)
    return any(isinstance(leaf, PackedSequence) for leaf in leaves) or _bags(model, leaves) is not None


def batch_size(model: nn.Module, value: Any) -> int:
    """Number of examples in the arguments of a model. UnsupportedError where nothing tells."""
    leaves = _arguments(value) or _leaves(value)[0]
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
            raise UnsupportedError(
                f"An input of the model has the layout {leaf.layout}, whose rows cannot be told apart; pass a dense "
                "tensor (with lengths or a mask where examples differ in length) and convert it within the model."
            )
    bags = _bags(model, leaves)
    return len(leaves[bags[1]]) - bags[2] if bags else batch_length(value)


def copies(model: nn.Module, value: Any, batch_size: int, count: int, padded: bool | None = None) -> Any:
    """``count`` copies of one example of a batch: the first row of every tensor, and the first entry of every list,
    that has one per example; the longest packed sequence, a bag that is not empty. Zeros where the batch is empty.

    ``padded``: whether masks (integers or booleans [B, T] that are 0 or 1) are to hide the last position or none.
    Models take another way where nothing is padded.
    """
    leaves, structure = _leaves(value, batch_size)
    bags = _bags(model, leaves)
    copied: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, PackedSequence):
            copied.append(_packed_copies(leaf, count))
        elif bags and isinstance(leaf, Tensor) and leaf.dim() == 1 and len(leaf) == len(leaves[bags[0]]):
            copied.append(leaf[: _first_length(leaves, bags)].repeat(count))
        else:
            inner, around = flatten(leaf, batch_size)
            copied.append(unflatten(around, [_copies(v, batch_size, count, padded) for v in inner]))
    if bags:
        offsets = leaves[bags[1]]
        step = len(copied[bags[0]]) // count
        copied[bags[1]] = step * torch.arange(count + bags[2], dtype=offsets.dtype, device=offsets.device)
    return pytree.tree_unflatten(copied, structure)


def _copies(leaf: Any, batch_size: int, count: int, padded: bool | None) -> Any:
    if not has_rows(leaf, batch_size):
        return leaf
    if not isinstance(leaf, Tensor):
        return leaf[:1] * count
    one = leaf[:1] if batch_size else leaf.new_zeros(1, *leaf.shape[1:])
    if padded is not None and is_mask(leaf):
        one = torch.ones_like(one)
        one[:, -1] = int(not padded)
    return one.expand(count, *leaf.shape[1:]).contiguous()


def is_mask(leaf: Any) -> bool:
    """Return whether this is a mask of positions: [B, T], T > 1, of zeros and ones."""
    whole = isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.shape[1] > 1 and not leaf.is_floating_point()
    return whole and not leaf.is_complex() and bool(((leaf == 0) | (leaf == 1)).all())


def _bags(model: nn.Module, leaves: list[Any]) -> tuple[int, int, int] | None:
    """Places of the ids and the offsets, and how many offsets too many there are, where a model with an
    ``nn.EmbeddingBag`` gets two flat lists of integers first of which the second can be the first one's offsets.
    """
    tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][:2]
    if len(tensors) < 2:
        return None
    layer = next((m for m in model.modules() if isinstance(m, nn.EmbeddingBag)), None)
    if layer is None:
        return None
    ids, offsets = (leaves[k] for k in tensors)
    integers = all(t.dim() == 1 and not t.is_floating_point() and not t.is_complex() for t in (ids, offsets))
    if (
        not integers
        or not len(offsets)
        or offsets[0] != 0
        or offsets[-1] > len(ids)
        or bool((offsets.diff() < 0).any())
    ):
        return None
    return tensors[0], tensors[1], int(layer.include_last_offset)


def _first_length(leaves: list[Any], bags: tuple[int, int, int]) -> int:
    """Length of the first bag that is not empty, or one."""
    ends = torch.cat([leaves[bags[1]], leaves[bags[1]].new_tensor([len(leaves[bags[0]])])])
    return next((n for n in ends.diff().tolist() if n), 1)


def _packed_copies(packed: PackedSequence, count: int) -> PackedSequence:
    """Return ``count`` copies of the longest sequence."""
    sizes = packed.batch_sizes
    rows = packed.data[(sizes.cumsum(0) - sizes).to(packed.data.device)]
    order = None if packed.sorted_indices is None else torch.arange(count, device=packed.sorted_indices.device)
    return PackedSequence(rows.repeat_interleave(count, 0), torch.full_like(sizes, count), order, order)

"""A batch in any structure, by its rows: which tensors have one per example, and the batch with other rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpcore.tree import flatten, has_rows, take, unflatten


def without_graph(batch: Any) -> Any:
    """A copy of the batch without the graph that its tensors come from; a model may change its inputs in place."""
    leaves, structure = flatten(batch)
    return unflatten(
        structure, [v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in leaves]
    )


def enlarged(values: Tensor) -> Tensor:
    """Floating-point values as outliers; others as they are."""
    return 8.0 * values + 3.0 if values.is_floating_point() else values


def shaken(batch: Any) -> Any:
    """The batch with floating-point values that differ from its own as rounding would."""
    leaves, structure = flatten(batch)
    numbers = torch.Generator().manual_seed(0)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            signs = torch.randint(-1, 2, leaf.shape, generator=numbers).to(leaf.device, leaf.dtype)
            new = torch.addcmul(leaf.detach(), leaf.detach(), signs, value=8 * torch.finfo(leaf.dtype).eps)
            leaves[k] = new.requires_grad_(leaf.requires_grad)
    return unflatten(structure, leaves)


def replace_rows(
    batch: Any, batch_size: int, rows: Tensor, others: Tensor, value: Callable[[Tensor], Tensor] = lambda taken: taken
) -> Any:
    """The batch with the rows or entries ``others`` [k] in the place of ``rows`` [k], as ``value`` changes tensors."""
    leaves, structure = flatten(batch, batch_size)
    changed, places = [], dict(zip(rows.tolist(), others.tolist(), strict=True))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and has_rows(leaf, batch_size):
            new = leaf.detach().clone()
            new[rows.to(new.device)] = value(take(leaf.detach(), others))
            leaf = new.requires_grad_(leaf.requires_grad)
        elif has_rows(leaf, batch_size):
            leaf = [leaf[places.get(i, i)] for i in range(batch_size)]
        changed.append(leaf)
    return unflatten(structure, changed)


def selected(batch: Any, batch_size: int, rows: Tensor) -> Any:
    """The examples ``rows`` [k] of a batch; what has no row per example stays as it is."""
    leaves, structure = flatten(batch, batch_size)
    return unflatten(structure, [take(leaf, rows) if has_rows(leaf, batch_size) else leaf for leaf in leaves])


def half_of_rows(count: int, generator: random.Random) -> tuple[Tensor, int]:
    """(a random run of half of ``count`` rows, the row beside it whose values they can take).

    A run, so that a batch that is sorted by length stays so; often at an end, whose example may be one that all see.
    """
    half = count // 2
    start = generator.choice((0, generator.randrange(count - half + 1), count - half))
    beside = generator.choice([row for row in (start - 1, start + half) if 0 <= row < count])
    return torch.arange(start, start + half), beside


def ways_of_rows(shape: torch.Size, count: int) -> list[tuple[int, Tensor]]:
    """Return (dimension, [its length] examples) for each way in which a tensor may have the rows of ``count`` of them.

    Where its second dimension is as long, the first may yet hold several rows of each, one after the other or in turn.
    """
    each = torch.arange(count)
    ways = [(dim, each) for dim in (0, 1) if shape[dim : dim + 1] == (count,)]
    return [*ways, *flat_rows(shape[0], count)] if ways and shape[0] != count else ways


def dim_of_rows(shape: torch.Size, count: int, way: int | None) -> int | None:
    """Return the dimension in which a tensor has one row of each of ``count`` examples; None where it has none.

    ``way``: which one of :func:`ways_of_rows` it is, where there are several; None: it is not known.
    """
    ways = ways_of_rows(shape, count)
    if not ways or (len(ways) > 1 and way is None):
        return None
    dim, owners = ways[min(way or 0, len(ways) - 1)]
    return dim if len(owners) == count else None


def flat_rows(length: int, count: int) -> list[tuple[int, Tensor]]:
    """Return the same for a first dimension that may hold several rows of each."""
    each = torch.arange(count)
    several = length // count
    if length % count or not several:
        return []
    return [(0, each.repeat_interleave(several)), (0, each.repeat(several))]

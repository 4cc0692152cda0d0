"""Batches on which a model is looked at before it is trained on one of their kind, by :mod:`dpcore.microbatch.layout`.

Copies of one example, so many as no other dimension is long; where the model fails on these (flat tokens beside their
lengths, edges of a graph), the batch as it is. Another look, for a part that no look has come to, takes all examples.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpcore.microbatch import ragged
from dpcore.tree import flatten, has_rows, take, unflatten

FEWEST = 7
"""Copies of an example, or fewer of one of a smaller batch: its examples may be large."""
FEWEST_OF_FEW = 3


@dataclass(frozen=True)
class Look:
    """A way to look at a model: ``run(count)`` calls it on so many examples, ``counts`` are those to try.

    ``counts`` is empty where any would tell nothing: its only one is the length of another dimension, too.
    """

    run: Callable[[int], Any]
    counts: tuple[int, ...]


def looks(
    model: nn.Module, call: Callable[[Any], Any], batch: Any, batch_size: int, again: bool = False, group: int = 1
) -> tuple[list[Look], list[Callable[[int], Any]]]:
    """Return ways to look at a model, of which the first that it does not fail on counts, and variants of the first.

    Args:
        model: The model.
        call: Calls it on a batch like ``batch``.
        batch: Its arguments.
        batch_size: How many examples it has.
        again: Whether it was looked at on copies of one example already.
        group: Rows of a unit, of which all looks have whole ones.
    """
    taken = _lengths(batch, batch_size, model)
    as_it_is = Look(lambda _: call(_cloned(batch)), () if batch_size in taken else (batch_size,))
    if again and not ragged.is_ragged(model, batch):
        fewest = -(-max(batch_size, FEWEST_OF_FEW) // group) * group
        free = (n for n in itertools.count(fewest, group) if n not in taken)
        every = Look(lambda n: call(_repeated(batch, batch_size, n)), (next(free), next(free)))
        return [every, as_it_is], []

    def run(count: int, padded: bool | None = None) -> Any:
        return call(ragged.copies(model, batch, batch_size, count, padded))

    masked = any(map(ragged.is_mask, flatten(batch)[0]))
    variants: list[Callable[[int], Any]] = [functools.partial(run, padded=p) for p in ((True, False) if masked else ())]
    found = []
    # Few copies are more often as many as another dimension of the model's is long: then more of them.
    for fewest in (FEWEST,) if batch_size >= FEWEST else (FEWEST_OF_FEW, FEWEST):
        primes = (n for n in itertools.count(fewest, 2) if all(n % k for k in range(3, n, 2)))
        free = (n * group for n in primes if n * group not in taken and n * group != batch_size)
        found.append(Look(run, (next(free), next(free))))
    return [*found, as_it_is], variants


def _lengths(batch: Any, batch_size: int, model: nn.Module) -> set[int]:
    """Lengths of the dimensions of inputs (but their examples), parameters and buffers, which the batch's may not be.

    They are hardly those of another dimension of the model's: should they be, the real batch is refused with an error.
    """
    inputs = [leaf for leaf in flatten(batch, batch_size)[0] if isinstance(leaf, Tensor)]
    taken = {n for leaf in inputs for n in leaf.shape[has_rows(leaf, batch_size) :]}
    # (No dimension of an input is as long as a kernel because of it.)
    taken |= getattr(model, "lengths_of_ranks", set())
    return taken.union(*(tensor.shape[:2] for tensor in (*model.parameters(), *model.buffers())))


def _repeated(batch: Any, batch_size: int, count: int) -> Any:
    """``count`` examples: all of the batch, and the first ones again."""
    rows = torch.arange(count) % batch_size
    leaves, structure = flatten(batch, batch_size)
    return unflatten(structure, [take(leaf, rows) if has_rows(leaf, batch_size) else leaf for leaf in leaves])


def _cloned(batch: Any) -> Any:
    """The batch; the model may change what it gets in place."""
    leaves, structure = flatten(batch)
    return unflatten(structure, [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])

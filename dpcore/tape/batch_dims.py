"""Finds which dimension of a tensor is the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import NoRuleError
from dpcore.tape.rows import Rows
from dpcore.tape.sources import Sources

IN_ROWS = 2
"""In the place of a dimension: the first one holds several rows for each example, [B * k, ...]."""


class BatchDims:
    """Finds the batch of ``size`` examples in tensors that meet parameters.

    ``find``: ``find((parameter, kind of tensor), batch dims, tensor, features)`` returns the dimension, or -1.
    """

    def __init__(self, size: int, rows: Rows, sources: Sources, find: FindBatch) -> None:
        self.size = size
        self.rows = rows
        self.sources = sources
        self.find = find

    def of(self, x: Tensor, params: Sequence[Parameter], features: int = 1, use: str = "input") -> int:
        """Return which dimension of an input is the batch: 0, 1, IN_ROWS or -1 (none).

        It is 1 where the layer of ``params`` works on time-first sequences [T, B, ...] with ``features`` dimensions at
        the end. ``use`` tells apart different kinds of tensors that meet the same parameter.
        """
        return self.find((self.sources.root(params[0]), use), self, x, features)

    def required(self, x: Tensor, params: Sequence[Parameter], features: int = 1) -> int:
        """Return :meth:`of`; NoRuleError where there is no batch."""
        dim = self.of(x, params, features)
        self.check(x, params, max(dim, 0))
        return dim

    def in_rows(self, x: Tensor) -> bool:
        """Return whether the first dimension of a tensor is known to hold several rows for each example."""
        place = self.rows.of(x)
        return place is not None and place[0] == 0

    def check(self, x: Tensor, params: Sequence[Parameter], dim: int = 0) -> None:
        """NoRuleError unless dimension ``dim`` of an input is the batch."""
        if dim != IN_ROWS and (x.dim() <= dim or x.shape[dim] != self.size):
            raise self.none_in(x, params, dim)

    def none_in(self, x: Tensor, params: Sequence[Parameter], dim: int) -> NoRuleError:
        """Return the error about an input without a batch in dimension ``dim``."""
        layer = self.sources.layer(params)
        if not x.dim():
            return NoRuleError(
                f"The model computes a single number from {layer}, a penalty on its weights, say. It has "
                "no gradient by example, so it cannot be clipped; put a penalty on squares into the optimizer's "
                "weight_decay, and compute another one for every example, from param.expand(len(x), *param.shape).",
                params,
            )
        return NoRuleError(
            f"{layer} got an input of shape {tuple(x.shape)} whose dimension {dim} is not the batch of "
            f"{self.size} examples, so gradients cannot be told apart by example; keep the batch first.",
            params,
        )


FindBatch = Callable[[tuple[Parameter, str], BatchDims, Tensor, int], int]

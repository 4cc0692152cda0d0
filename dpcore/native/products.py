"""The gradients of many weights for one example after the other, in one call of a kernel each.

Where every example's gradients are formed, squared, and added before the next one's, the calls of operators for each
weight and example would take as long as the work itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpcore.errors import UnsupportedError
from dpcore.native.library import function, kernels


@dataclass(frozen=True, slots=True)
class Product:
    """The gradients of one weight: Σ_t left_t right_tᵀ [n, m] by example, in the order of the weight's memory.

    ``left`` [B, T, n] and ``right`` [B, T, m] are float32 on a CPU.
    """

    left: Tensor
    right: Tensor

    @property
    def numel(self) -> int:
        """Return how many numbers one example's gradient has."""
        return self.left.shape[2] * self.right.shape[2]


class Products:
    """Gradients of several weights for the same examples, each with where its sum is: ``sums`` [n * m], float32, dense.

    Args:
        products: The gradients.
        sums: Where :meth:`add` adds to.

    Raises:
        ValueError: a sum has another size than its gradients.
        UnsupportedError: kernels have been switched off since they were asked for.
    """

    def __init__(self, products: Sequence[Product], sums: Sequence[Tensor]) -> None:
        found = kernels()
        if found is None:
            raise UnsupportedError("Kernels were switched off while a step used them; do so between steps.")
        self._library = found.library
        self._sums = list(sums)
        self._has_added = False
        sizes = [product.numel for product in products]
        # One example's gradients after the other's are written to the same memory, which stays in the cache.
        self._written = products[0].left.new_empty(sum(sizes))
        self._squares = products[0].left.new_empty(len(sizes), dtype=torch.float64)
        self._examples = min(len(product.left) for product in products)
        table = array("q")
        self._read: list[tuple[Tensor, int]] = []
        for product, out, into in zip(products, self._written.split(sizes), sums, strict=True):
            left, right = (t if t.stride(-1) == 1 else t.contiguous() for t in (product.left, product.right))
            if left.shape[:2] != right.shape[:2] or into.shape != (product.numel,) or not into.is_contiguous():
                raise ValueError(
                    f"Gradients of shapes {tuple(left.shape)} and {tuple(right.shape)} cannot be added to a sum of "
                    f"shape {tuple(into.shape)}; they must be those of the same examples, and the sum as large."
                )
            of_both = left.shape[2], right.shape[2], *left.stride()[:2], *right.stride()[:2]
            table.extend((left.data_ptr(), right.data_ptr(), left.shape[1], *of_both, out.data_ptr(), into.data_ptr()))
            self._read += [(left, left._version), (right, right._version)]
        self._table = table

    def form(self, example: int) -> Tensor:
        """Form the gradients of one example, and return their squared norms [weights], until the next call.

        Up to ``SQUARES_AT_ONCE`` of :mod:`dpcore.numerics.rounding` squares are added up in float32, those in float64.

        Raises:
            IndexError: there is no such example.
            UnsupportedError: a layer's input, or the gradient at its output, was changed since.
        """
        if not 0 <= example < self._examples:
            raise IndexError(f"There is no example {example} of {self._examples}.")
        self._check_unchanged()
        call = function(self._library, "dpcore_form_products", 2, 3)
        table = self._table.buffer_info()[0]
        call(table, self._squares.data_ptr(), len(self._sums), example, torch.get_num_threads())
        return self._squares

    def add(self, factors: Sequence[float]) -> None:
        """Add what was formed last to the sums, each at its factor [weights]; at a factor of 0, nothing."""
        call = function(self._library, "dpcore_add_products", 2, 2)
        numbers = array("f", factors)
        if len(numbers) != len(self._sums):
            raise ValueError(f"There are {len(numbers)} factors for {len(self._sums)} weights; give one each.")
        call(self._table.buffer_info()[0], numbers.buffer_info()[0], len(self._sums), torch.get_num_threads())
        self._note_added()

    def clip(self, norms_sq: Tensor, factors: Tensor, bound: float, scale: float) -> int:
        """Form and add the gradients of one example after the other at flat clipping's factors, in one call.

        Args:
            norms_sq: [B] squared norms of all other gradients, dense, to which those of these are added.
            factors: [B], dense, where min(1, ``bound`` / norm) is written.
            bound: C, lowered by what rounding may hide.
            scale: What is added is multiplied by it, too.

        Returns:
            How many examples were added: all up to the first one whose norm is no number below infinity.

        Raises:
            ValueError: there is not one norm and one factor for each example.
            UnsupportedError: a layer's input, or the gradient at its output, was changed since.
        """
        for numbers in (norms_sq, factors):
            if numbers.shape != (self._examples,) or numbers.dtype != torch.float32 or not numbers.is_contiguous():
                raise ValueError(f"There are {tuple(numbers.shape)} norms or factors for {self._examples} examples.")
        self._check_unchanged()
        call = function(self._library, "dpcore_clip_products", 5, 3, 2)
        added = array("f", bytes(4 * len(self._sums)))
        squares, *rest = (t.data_ptr() for t in (self._squares, norms_sq, factors))
        sizes = len(self._sums), self._examples, torch.get_num_threads()
        done = call(self._table.buffer_info()[0], squares, added.buffer_info()[0], *rest, *sizes, bound, scale)
        self._note_added()
        return done

    def _check_unchanged(self) -> None:
        if any(tensor._version != version for tensor, version in self._read):
            raise UnsupportedError(
                "A layer's input, or the gradient at its output, was changed in place while gradients were formed of "
                "it; a clipping rule must leave them as they are."
            )

    def _note_added(self) -> None:
        if not self._has_added:  # later calls come before anyone else sees the sums
            self._has_added = True
            for into in self._sums:
                torch.autograd.graph.increment_version(into)

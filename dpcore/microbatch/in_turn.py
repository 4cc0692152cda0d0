"""Gradients that are formed for one example at a time: formed, squared, and added at a factor before the next one's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.microbatch.planner import Choice
from dpcore.native.products import Products
from dpcore.numerics.rounding import SquaredNorm, squares, written_error
from dpcore.rules.linear import wide


@dataclass(frozen=True)
class Sums:
    """Where gradients are added to: every parameter's part of the sums, ``segments`` [n], in the order of its memory.

    ``orders``: that order of its dimensions. ``groups``: the number of the bound that it counts for. ``dtype``: that of
    the sums.
    """

    segments: Mapping[Parameter, Tensor]
    orders: Mapping[Parameter, list[int]]
    groups: Mapping[Parameter, int]
    dtype: torch.dtype


class InTurn:
    """The gradients of some parameters for one example after the other.

    Kernels form what they can in one call, and write it to the same memory for every example, so that it stays in the
    cache.
    """

    error: float
    """The largest relative error of squared norms that kernels take; that of others comes with them."""

    def __init__(self, choices: Sequence[Choice], sums: Sums) -> None:
        self._sums = sums
        found = {c.param: c.product or c.uses[0].product(c.param) for c in choices if len(c.uses) == 1}
        products = {param: product for param, product in found.items() if product is not None}
        if sums.dtype != torch.float32:
            products = {}
        self._products = Products(list(products.values()), [sums.segments[p] for p in products]) if products else None
        self._groups = [sums.groups[param] for param in products]
        self.error = max((written_error(product.numel) for product in products.values()), default=0.0)
        self._alone = [choice for choice in choices if choice.param not in products]
        self._buffers: Sequence[Tensor] = ()
        self._formed: list[tuple[Parameter, Tensor]] = []

    def clip(self, norms_sq: Tensor, factors: Tensor, bound: float, scale: float) -> int:
        """Do :meth:`form` and :meth:`add` for one example after the other, by flat clipping of the whole gradient.

        Returns how many examples were added, as :meth:`dpcore.native.products.Products.clip` does: none where not all
        of the gradients are the kernels' to form.
        """
        if self._products is None or self._alone:
            return 0
        return self._products.clip(norms_sq, factors, bound, scale)

    def form(self, i: int, norms_sq: Tensor) -> list[tuple[SquaredNorm, int]]:
        """Form the gradients of example i.

        Args:
            i: Which example.
            norms_sq: [groups, 1], to which the squared norms that kernels take are added.

        Returns:
            Other squared norms [1], each with the number of its group.
        """
        if self._products is not None:
            found = self._products.form(i)
            if len(norms_sq) == 1:
                norms_sq += found.sum()
            else:
                for k, group in enumerate(self._groups):
                    norms_sq[group] += found[k]
        if self._alone and not self._buffers:
            sizes = [choice.param.numel() for choice in self._alone]
            like = self._sums.segments[self._alone[0].param]
            self._buffers = like.new_empty(sum(sizes)).split(sizes)
        others = []
        self._formed.clear()
        for choice, buffer in zip(self._alone, self._buffers, strict=True):
            flat, norm = self._example(choice, i, buffer)
            self._formed.append((choice.param, flat))
            others.append((norm, self._sums.groups[choice.param]))
        return others

    def _example(self, choice: Choice, i: int, buffer: Tensor) -> tuple[Tensor, SquaredNorm]:
        """The gradient [n] of example i in memory's order, which may lie in ``buffer``, and its squared norm [1]."""
        if len(choice.uses) == 1:
            found = choice.uses[0].write_example(choice.param, i, buffer)
            if found is not None:
                return buffer, found
        gradient = example_gradient(choice, i, self._sums.dtype)
        flat = gradient.permute(self._sums.orders[choice.param]).reshape(-1)
        return flat, squares(flat.unsqueeze(0))

    def add(self, factors: Sequence[float]) -> None:
        """Add what was formed last to the sums, at the factors of the groups."""
        of = [factors[group] if factors[group] > 0 else 0.0 for group in self._groups]
        if self._products is not None and any(of):
            self._products.add(of)
        for param, flat in self._formed:
            factor = factors[self._sums.groups[param]]
            if factor > 0:
                self._sums.segments[param].add_(flat, alpha=factor)


def example_gradient(choice: Choice, i: int, dtype: torch.dtype) -> Tensor:
    """[*param.shape]: the gradient of example i over all uses of a parameter."""
    first, *more = sorted(choice.uses, key=lambda use: use.sparse)
    if not first.takes_turns(choice.param):
        assert first.grad is not None
        one = torch.tensor([i], device=first.grad.device)
        parts = [wide(use.rows(one, dtype).grad_sample(choice.param)[0]) for use in choice.uses]
        return sum(parts[1:], parts[0])
    total = first.example(choice.param, i)
    for use in more:
        use.add_example(choice.param, i, total)
    return total

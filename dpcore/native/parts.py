"""Norms, and clipped sums, of many parameters' gradients in one call of a kernel each.

Of a small model's step the calls of operators, and the Python around them, take longer than the numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpcore.errors import UnsupportedError
from dpcore.native.library import function, kernels
from dpcore.numerics.rounding import BLOCK

ROWS, SUMS, OUTER, BAGS = 0, 1, 2, 3
FIELDS = 12
"""Numbers of a part in the kernels' table."""


@dataclass(slots=True)
class Part:
    """The gradients of one parameter for B examples, before they are summed: what two kernels need of them.

    ``kind`` ROWS: they are ``g`` [B, n], in the order of the parameter's memory. SUMS: they are the sums over the
    positions of ``g`` [B, T, n]. OUTER: they are the products g xᵀ [n, m] of ``g`` [B, n] and ``x`` [B, m]. BAGS: they
    are ``g`` [B, n] in each row of a table that the ids ``x`` [B, T] name, as often as they do.
    """

    kind: int
    g: Tensor
    x: Tensor | None = None

    @classmethod
    def rows(cls, g: Tensor) -> Part:
        """Return those that are ``g`` [B, n]."""
        return cls(ROWS, g if g.stride(-1) == 1 else _dense_last(g))

    @classmethod
    def sums(cls, g: Tensor) -> Part:
        """Return the sums over the positions of ``g`` [B, T, n]."""
        return cls(SUMS, _dense_last(g))

    @classmethod
    def outer(cls, g: Tensor, x: Tensor) -> Part:
        """Return the products of ``g`` [B, n] and ``x`` [B, m]."""
        return cls(OUTER, g if g.stride(-1) == 1 else _dense_last(g), x if x.stride(-1) == 1 else _dense_last(x))

    @classmethod
    def bags(cls, g: Tensor, ids: Tensor) -> Part:
        """Return those that are ``g`` [B, n] in the rows ``ids`` [B, T], int64."""
        return cls(BAGS, _dense_last(g), _dense_last(ids))

    @property
    def roundings(self) -> int:
        """Return a bound on those between a squared norm, taken in float64, and the square of what is added.

        An example's gradient is multiplied by its factor and, k times in turn for an id that occurs k times, added:
        each may round upwards, and the square doubles them.
        """
        return BLOCK + 4 if self.kind != BAGS or self.x is None else 2 * (self.x.shape[1] + 3) + 4


class Parts:
    """Parts of the gradients of the same B examples, each with where its sum is: ``targets``, float32 on a CPU.

    A target is [n] for ROWS and SUMS, [n, m] for OUTER, one of whose dimensions is dense, and [V, n] for BAGS, whose
    rows are.

    Raises:
        ValueError: a part has not ``batch_size`` examples, or its target another size than its gradients.
        UnsupportedError: kernels have been switched off since they were asked for.
    """

    def __init__(self, parts: Sequence[Part], targets: Sequence[Tensor], batch_size: int) -> None:
        self._batch_size = batch_size
        found = kernels()
        if found is None:
            raise UnsupportedError("Kernels were switched off while a step used them; do so between steps.")
        self._library = found.library
        table = array("q")
        read: list[Tensor] = []
        self._held: list[Tensor] = []
        for part, out in zip(parts, targets, strict=True):
            g, x, pitch, sums = part.g, part.x, 0, 0
            _check_sizes(part, out, batch_size)
            if x is not None:
                if out.stride(1) != 1 and part.kind == OUTER:
                    g, x, out = x, g, out.t()
                if out.stride(1) != 1:
                    raise ValueError(f"A sum of strides {out.stride()} has no dense dimension.")
                read.append(x)
                pitch = out.stride(0)
            read.append(g)
            positions = stride = 0
            if part.kind == SUMS:
                positions, stride = g.shape[1], g.stride(1)
                made = g.new_empty((batch_size, g.shape[2]))
                self._held.append(made)
                sums = made.data_ptr()
            of_g = g.data_ptr(), g.stride(0), g.shape[-1]
            of_x = (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.shape[1])
            if part.kind == BAGS:
                positions, of_x = of_x[2], (*of_x[:2], len(out))
            table.extend((part.kind, *of_g, positions, stride, sums, *of_x, out.data_ptr(), pitch))
        self._table, self._count = table, len(parts)
        self._read = [(tensor, tensor._version) for tensor in read]
        self._targets = list(targets)

    def add_norms(self, norms_sq: Tensor) -> bool:
        """norms_sq [B] += the squared norms over all parts, in float64 but for this sum and the sums over positions.

        Returns whether all of ``norms_sq`` are then numbers below infinity.
        """
        below = self._call("dpcore_add_norms_of_parts", norms_sq)
        torch.autograd.graph.increment_version(norms_sq)
        return bool(below)

    def add_sums(self, factors: Tensor) -> None:
        """Add every part's Σ_b factors[b] gradient_b to its target, of which :meth:`add_norms` was asked before.

        An example whose factor is 0 is left out, whatever it holds.

        Raises:
            UnsupportedError: what was measured has been changed since.
            ValueError: there is not one factor per example.
        """
        if factors.shape != (self._batch_size,):
            raise ValueError(
                f"The clipping rule returned factors of shape {tuple(factors.shape)} for {self._batch_size} examples; "
                "it must return one per example."
            )
        for tensor, version in self._read:
            if tensor._version != version:
                raise UnsupportedError(
                    "A layer's input, or the gradient at its output, was changed in place between the norms of the "
                    "gradients and their clipped sum; a clipping rule must leave them as they are."
                )
        wrong = self._call("dpcore_add_parts", factors.to(torch.float32).resolve_neg().contiguous())
        # Views count the changes of what they are views of.
        for target in {id(t if t._base is None else t._base): t for t in self._targets}.values():
            torch.autograd.graph.increment_version(target)
        if wrong:  # by numpy, say, whose changes no tensor counts
            raise UnsupportedError(
                f"{wrong} ids of an embedding bag are no rows of its table any more: they were changed between the "
                "forward pass and the clipped sum; hand out a batch's ids as a copy."
            )

    def _call(self, name: str, numbers: Tensor) -> int:
        addresses = self._table.buffer_info()[0], numbers.data_ptr()
        return function(self._library, name, 2, 3)(*addresses, self._count, self._batch_size, torch.get_num_threads())


def clip_factors(norms: Tensor, bound: float, scale: float) -> tuple[Tensor, Tensor, bool]:
    """Compute what :func:`dpcore.clipping.clip_factors` does in one call, with the same bits.

    Args:
        norms: [1, B], float32 on a CPU.
        bound: C, lowered by what rounding may hide.
        scale: What is added is multiplied by it, too.

    Returns:
        Factors [1, B], those times ``scale``, and whether all norms are numbers below infinity.
    """
    found = kernels()
    if found is None or norms.dtype != torch.float32 or not norms.is_contiguous():
        raise ValueError(f"There is no kernel for norms of {norms.dtype} with strides {norms.stride()}.")
    made = norms.new_empty((2, *norms.shape))
    factors, scaled = made.unbind(0)
    size, first = norms.numel(), made.data_ptr()
    call = function(found.library, "dpcore_clip_factors", 3, 1, 2)
    below = call(norms.data_ptr(), first, first + 4 * size, size, bound, scale)
    return factors, scaled, bool(below)


def _check_sizes(part: Part, out: Tensor, batch_size: int) -> None:
    """Kernels read and write by these numbers alone."""
    g, x = part.g.shape, None if part.x is None else part.x.shape
    if x is None:
        fits = g[0] == batch_size and out.numel() == g[-1]
    elif part.kind == BAGS:
        fits = g[0] == x[0] == batch_size and out.dim() == 2 and out.shape[1] == g[-1]
    else:
        fits = g[0] == x[0] == batch_size and out.shape == (g[-1], x[-1])
    if not fits:
        examples = "" if part.x is None else f" and {tuple(part.x.shape)}"
        raise ValueError(
            f"Gradients of shape {tuple(part.g.shape)}{examples} cannot be added to a sum of shape "
            f"{tuple(out.shape)} for {batch_size} examples; they must be one per example, and of the sum's size."
        )


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()

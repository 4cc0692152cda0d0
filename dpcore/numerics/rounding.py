"""Bounds of rounding errors, and the reductions that they hold for.

Let u be the unit roundoff: half the distance from 1 to the next number, 2^-24 in float32 and 2^-53 in float64. A sum of
n products, each of them rounded or fused, has an error of at most γ_n Σ |terms| with γ_n = n u / (1 - n u), in
whatever order the terms are added (Higham 2002, section 3.1). No bound here assumes an order, because neither torch nor
a BLAS promises one. It is assumed that a product of matrices is a sum of products (no Winograd, no Strassen), and that
float32 loses digits gradually below 1e-38 (so without ``torch.set_flush_denormal``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Numbers whose squares are added up at once in a norm: a bound of 64 roundings at every size. Blocks of 128 take a
quarter less time, blocks of 32 half as much again."""
SHORTEST_BLOCK = 16
"""Shorter blocks take as long as a sum in float64."""

GRAM_BLOCK = 512
"""Products of vectors are summed over this many elements at once, so that the bound hardly grows with their length.
Products of blocks of 256 took up to 13 % longer, those of 512 as long as whole ones."""

SQUARES_AT_ONCE = 24
"""Squares of what a kernel writes that it adds up in float32 at most (ACCUMULATORS in vectors.h), before it goes on in
float64."""

# A product below 1e-38 loses up to 7e-46 in float32. Times a square up to this (over the number of such products), what
# was lost stays far below the square of any bound C that is allowed; times a larger one it would not, so that such an
# example is left to float64.
TRUSTED_SQUARE = 1e21


# A squared norm whose terms cancel is off by some units of precision times the sum of its absolute terms. Whatever that
# sum is, the clip factor is taken from an upper bound of the norm. While the sum is within this factor of the squared
# norm, the two are close enough; beyond, the example's gradient is formed in float64.
TOLERATED_CANCELLATION = 8.0

# Up to this factor the gradient is formed in the precision of the sums, and its own norm taken: a language model's
# positions have nearly independent gradients, so that the factor is about their number, and forming one in float64
# takes as long as half a dozen ordinary examples. A formed gradient is off by a few units of precision times the root
# of the factor.
TOLERATED_WHEN_FORMED = 1024.0


class SquaredNorm(NamedTuple):
    """``value`` [B], the squared norms of per-sample gradients G_i, and what rounding can have hidden in them.

    What the rule's ``add_clipped_sum`` adds for example i at a factor f has a squared norm of at most
    f² (value_i + error * scale_i), up to the few roundings that every rule has (:data:`dpcore.clipping.OWN_UNITS`).
    ``scale`` [B] bounds the sum of the absolute terms of a norm whose terms may cancel; None: it is the value.
    ``tolerated``: while ``scale`` is within this factor of the squared norm, that bound is close to it.
    """

    value: Tensor
    error: float
    scale: Tensor | None = None
    tolerated: float = TOLERATED_CANCELLATION


@functools.cache
def unit(dtype: torch.dtype) -> float:
    """The unit roundoff u of a floating-point type."""
    return torch.finfo(dtype).eps / 2


@functools.cache
def gamma(roundings: int, dtype: torch.dtype) -> float:
    """γ_n = n u / (1 - n u) for n = ``roundings`` one after the other; infinite where n u is not below 1."""
    nu = roundings * unit(dtype)
    return nu / (1.0 - nu) if nu < 1.0 else math.inf


def trusted(norm_sq: Tensor, largest_square: Tensor, terms: int = 1) -> Tensor:
    """``norm_sq``, a product of squares none of which is above ``largest_square``; inf where another, a sum of
    ``terms`` products, may be lost.
    """
    return torch.where(largest_square < TRUSTED_SQUARE / max(terms, 1), norm_sq, torch.inf)


def written_error(length: int) -> float:
    """Return the largest relative error of the squared norm that a kernel takes of ``length`` numbers it writes."""
    first = gamma(SQUARES_AT_ONCE, torch.float32)
    return first + (1.0 + first) * gamma(length, torch.float64)


def squares(rows: Tensor) -> SquaredNorm:
    """Squared norms of rows [B, n].

    A norm by one float32 sum was 2.6e-3 too small at 38 million numbers. Here blocks of at most
    :data:`BLOCK` numbers are added up, then the blocks: up to so many again as they are, and more of them in float64.
    Each step has the bound of any order, and no pass over the memory is added. Where no divisor of the length serves
    as a block, all is float64's: torch documents that ``dtype`` is what the numbers are cast to first.
    """
    length, dtype = rows.shape[1], rows.dtype
    block = _block(length)
    if block == length:
        # The root and its square are two roundings more, and each counts twice.
        return SquaredNorm(torch.linalg.vector_norm(rows, dim=1).square_(), gamma(length + 4, dtype))
    if not block:
        value = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
        return SquaredNorm(value, gamma(length + 4, torch.float64))
    count = length // block
    blocks = torch.linalg.vector_norm(rows.reshape(len(rows), count, block), dim=2).square_()
    if count <= BLOCK:
        return SquaredNorm(blocks.sum(1), gamma(block + 4 + count, dtype))
    first = gamma(block + 4, dtype)
    return SquaredNorm(blocks.sum(1, dtype=torch.float64), first + (1.0 + first) * gamma(count, torch.float64))


def side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Rows [B, n_k] of several tensors as [B, Σ n_k + zeros], of a length that has blocks for :func:`squares`."""
    length = sum(part.shape[1] for part in rows)
    return torch.cat([*rows, rows[0].new_zeros(len(rows[0]), -length % BLOCK)], 1)


@functools.cache
def _block(length: int) -> int:
    """The length itself up to :data:`BLOCK`, otherwise its largest divisor up to there; 0: too short a block."""
    divisor = next((d for d in range(min(length, BLOCK), 0, -1) if length % d == 0), 0)
    return divisor if divisor >= SHORTEST_BLOCK or divisor == length else 0


def gram(rows: Tensor, others: Tensor | None = None) -> Tensor:
    """Products [B, T, S] of the rows [B, T, n] of each example with ``others`` [B, S, n], or with each other.

    By blocks of :data:`GRAM_BLOCK` elements: the error of an entry is at most γ |x_t||x_s| at :func:`gram_roundings`
    (n).
    """
    blocks = rows.split(GRAM_BLOCK, -1)
    columns = [block.transpose(1, 2) for block in (blocks if others is None else others.split(GRAM_BLOCK, -1))]
    total = torch.bmm(blocks[0], columns[0])
    for block, of_others in zip(blocks[1:], columns[1:], strict=True):
        total.baddbmm_(block, of_others)
    return total


@functools.cache
def gram_roundings(length: int) -> int:
    """Return how many roundings one product of vectors passes through in :func:`gram`."""
    return min(length, GRAM_BLOCK) + max(0, -(-length // GRAM_BLOCK) - 1)

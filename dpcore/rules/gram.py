"""Norms by Gram matrices: |GᵀX|² = Σ_ts (XXᵀ)_ts (GGᵀ)_ts over the positions t, s, without forming GᵀX.

The matrices [B, T, T] are formed whole while they are small, and else by stripes of their lower triangles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpcore.numerics.rounding import SquaredNorm, gamma, gram, trusted

CACHED_BYTES = 4 * 2**20
"""Bytes of a matrix of all examples that are taken at once, on a CPU. It is written by a product, multiplied by another
one, and read to be summed in float64, for which torch makes a copy of twice the size: together they should stay in the
cache. By 4 MiB and not 16 at once, norms of 256 examples of 128 positions took 0.75 of the time of whole matrices (one
core of a busy machine, width 512, least of 6 in turns), and no more at other sizes; by 1 MiB they took up to 1.1."""
MOST_BYTES = 64 * 2**20
"""The same on other devices, where starts of operators count and no cache holds a matrix. None has been measured."""
STRIPE = 128
"""Positions of a stripe at most: 512 are 4 stripes, and 5/8 of the products. Norms of 256, 512 and 1,024 positions took
0.84, 0.72 and 0.66 of the time of whole matrices; by stripes of 64, whose products are slower, 0.91, 0.82 and 0.75."""


def gram_norm_sq(parts: Sequence[Tensor], roundings: int) -> SquaredNorm:
    """|GᵀX|² of each example, from the rows of X and G: whatever B and T are, no matrix exceeds the limit of bytes.

    (Unless a single position's products do, of more than a million positions.)

    A stripe holds the products of some positions with themselves and with all before them; the latter stand for their
    mirror images too, so that several stripes take little more than half of the products. Doubling is exact, and an
    entry has the error of its mirror image. All that is added up is added up in float64, by no more roundings for a
    term than in one sum over T² of them. So the bound is that of whole matrices, :func:`matrices_norm_sq`.

    Args:
        parts: Rows [B, T, n_k]: those of X and G; or of several that X's rows are the products of, and of G.
        roundings: How many an entry of all parts' Gram matrices together has been through, with those of the product of
            X's parts.

    Returns:
        [B] norms, and as ``scale`` S = (Σ_t |x_t||g_t|)².
    """
    norm_sq, rows = products_of_grams(parts)
    return norm_of(norm_sq, rows, roundings)


def products_of_grams(parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Σ_ts Π_k (P_k P_kᵀ)_ts in float64, [B], and the squares of each part's rows, [B, T], of parts [B, T, n_k]."""
    batch, steps, _ = parts[0].shape
    if batch <= examples_at_once(steps**2, parts[0]):
        return _of_examples(parts, steps)
    # Of a very long sequence, so few positions that their products with all of them are within the limit.
    stripe = max(1, min(STRIPE, examples_at_once(steps, parts[0])))
    stripe = -(-steps // -(-steps // stripe))
    at_once = max(1, examples_at_once(stripe * steps, parts[0]))
    found = [_of_examples(some, stripe) for some in zip(*(part.split(at_once) for part in parts), strict=True)]
    norms, rows = zip(*found, strict=True)
    return torch.cat(norms), [torch.cat(of_part) for of_part in zip(*rows, strict=True)]


def examples_at_once(numbers: int, like: Tensor) -> int:
    """Return of how many examples, with so many numbers each in the type of ``like``, the limit holds a matrix."""
    most = CACHED_BYTES if like.device.type == "cpu" else MOST_BYTES
    return most // max(1, numbers * like.element_size())


def _of_examples(parts: Sequence[Tensor], stripe: int) -> tuple[Tensor, list[Tensor]]:
    """Return what :func:`products_of_grams` does, by stripes of so many positions."""
    steps = parts[0].shape[1]
    norm_sq: Tensor | None = None
    rows: list[list[Tensor]] = [[] for _ in parts]
    for start in range(0, max(steps, 1), max(stripe, 1)):
        stop = min(start + stripe, steps)
        product: Tensor | None = None
        for part, of_part in zip(parts, rows, strict=True):
            matrix = gram(part[:, start:stop], part[:, :stop])
            of_part.append(matrix[:, :, start:].diagonal(dim1=-2, dim2=-1).clone())
            product = matrix if product is None else product.mul_(matrix)
        assert product is not None
        added = product[:, :, start:].sum((-2, -1), dtype=torch.float64)
        if start:
            added += 2.0 * product[:, :, :start].sum((-2, -1), dtype=torch.float64)
        norm_sq = added if norm_sq is None else norm_sq + added
    assert norm_sq is not None
    return norm_sq, [of_part[0] if len(of_part) == 1 else torch.cat(of_part, 1) for of_part in rows]


def matrices_norm_sq(gram_x: Tensor, gram_g: Tensor, roundings: int) -> SquaredNorm:
    """|GᵀX|² = Σ_ts (XXᵀ)_ts (GGᵀ)_ts for Gram matrices [B, T, T], whose terms may cancel; ``scale``:
    S = (Σ_t |x_t||g_t|)². ``roundings``: the sum of those that an entry of either matrix has been through.

    An entry of XXᵀ is off by at most γ |x_t||x_s|, one of GGᵀ likewise. The absolute terms of the sum add up to S at
    most, so that the sum is off by at most γ_n S, n = ``roundings`` + 1 (the sum itself is float64's). The product
    (F G)ᵀ X that is released at factors F is a sum over T positions, off by at most γ_{T + 1} f √S; its square then
    exceeds f² |GᵀX|² by at most f² γ_{2T + 2} S. Together: n + 2T + 3, and S is itself computed (once more γ).
    """
    norm_sq = (gram_x * gram_g).sum((-2, -1), dtype=torch.float64)
    return norm_of(norm_sq, [matrix.diagonal(dim1=-2, dim2=-1) for matrix in (gram_x, gram_g)], roundings)


def norm_of(norm_sq: Tensor, rows: Sequence[Tensor], roundings: int) -> SquaredNorm:
    """Return ``norm_sq`` [B], the sum over two Gram matrices, with its bounds.

    ``rows``: their diagonals, [B, T]; the last one is G's, and X's is the product of the others.
    """
    squares_x, squares_g = rows[0], rows[-1]
    for squares in rows[1:-1]:
        squares_x = squares_x * squares
    scale = (squares_x * squares_g).clamp(min=0).sqrt().sum(-1).square()
    largest = torch.maximum(squares_x, squares_g).sum(-1)
    return bounded(norm_sq, scale, largest, squares_x.shape[-1], roundings, roundings, squares_x.dtype)


def bounded(
    norm_sq: Tensor, scale: Tensor, largest: Tensor, steps: int, roundings: int, terms: int, dtype: torch.dtype
) -> SquaredNorm:
    """Return ``norm_sq`` with the bounds of :func:`matrices_norm_sq`.

    ``steps``: vectors; ``largest``: no square above; ``terms``: products in a pair of entries.
    """
    norm_sq = trusted(norm_sq, largest, terms * steps**2)
    computed = 1.0 + gamma(roundings + 2 * steps + 8, dtype)
    return SquaredNorm(norm_sq, gamma(roundings + 2 * steps + 4, dtype) * computed, scale)

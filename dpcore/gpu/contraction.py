"""Gᵀ X per example in tiles: what a linear map over time contributes to norms and clipped sums.

Memory beside the sums: a number for each example and tile. Every kernel adds up in float32, whatever its operands are;
float32 operands are never rounded to TF32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpcore.gpu import interpreted
from dpcore.gpu.tuned import Sizes, chosen
from dpcore.numerics.rounding import TRUSTED_SQUARE, SquaredNorm, gamma

PROGRAMS = 512
"""Programs that keep a large GPU busy; small matrices split the examples into groups to have so many."""
TOLERATED_EXCESS = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-7}
"""Share of a squared norm that rounding may hide. An example is clipped below C by up to half of it; beyond, it goes
through float64. In half precision that is what one rounding of an operand does."""


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    left,
    right,
    start,
    depth,
    left_depth,
    right_depth,
    left_row,
    right_row,
    rows,
    columns,
    in_rows,
    in_columns,
    total,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add Σ_k left[k, rows] right[k, columns] to ``total`` over DEPTH values of k from ``start`` on, in float32."""
    # 64 bits: time-major gradients of a large vocabulary have strides beyond 2^31.
    k = (start + tl.arange(0, DEPTH)).to(tl.int64)
    rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    inside = (k < depth)[:, None]
    a = tl.load(left + k[:, None] * left_depth + rows[None, :] * left_row, mask=inside & in_rows[None, :], other=0.0)
    b = tl.load(
        right + k[:, None] * right_depth + columns[None, :] * right_row, mask=inside & in_columns[None, :], other=0.0
    )
    if WIDEN:  # the interpreter has no products of bfloat16; in float32 they are the same
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(tl.trans(a), b, total, input_precision="ieee")


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    g,
    x,
    steps,
    g_t,
    x_t,
    g_d,
    x_p,
    rows,
    columns,
    in_rows,
    in_columns,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A tile of GᵀX in float32, and the sum of its squares in float64: of each row TILE squares are float32's."""
    found = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, steps, DEPTH):
        found = _part(g, x, start, steps, g_t, x_t, g_d, x_p, rows, columns, in_rows, in_columns, found, DEPTH, WIDEN)
    by_row = tl.sum(found * found, axis=1)
    return found, tl.sum(by_row.to(tl.float64), axis=0)


@triton.jit
def share_within(square, limit):  # type: ignore[no-untyped-def]
    """Return the factor, 1 at most, that takes a tile whose sum of squares is ``square`` down to ``limit``.

    Neither an infinite tile nor one that is no number comes through, nor any finite one whose limit is no number: a
    factor of 0 must stay one. The constant is above what the root and its
    conversion round up.
    """
    is_finite = square < float("inf")
    less = tl.sqrt(limit / tl.where(is_finite & (square > 0.0), square, 1.0)) * 0.999999
    return tl.where(square <= limit, 1.0, tl.where(is_finite & (limit >= 0.0), less, 0.0)).to(tl.float32)


@triton.jit
def _tile_squares(  # type: ignore[no-untyped-def]
    g,
    x,
    out,
    steps,
    d,
    p,
    g_b,
    g_t,
    g_d,
    x_b,
    x_t,
    x_p,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[b, tile] = the sum of squares of one tile of G_bᵀ X_b, in float64."""
    b, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    _, square = _gradient(
        g + b * g_b, x + b * x_b, steps, g_t, x_t, g_d, x_p, rows, columns, rows < d, columns < p, TILE, DEPTH, WIDEN
    )
    tl.store(out + (b * tl.num_programs(1) + i) * tl.num_programs(2) + j, square)


@triton.jit
def _tile_sums(  # type: ignore[no-untyped-def]
    g,
    x,
    factors,
    limits,
    out,
    examples,
    group,
    steps,
    d,
    p,
    g_b,
    g_t,
    g_d,
    x_b,
    x_t,
    x_p,
    out_s,
    out_d,
    out_p,
    LIMITED: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[s] = Σ_b factors[b] G_bᵀ X_b over the examples of group s, one tile of it; ADD: added to what is there.

    LIMITED: a tile whose sum of squares is above limits[b, tile] is made smaller until it is not.
    """
    i, j, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for b in range(s * group, tl.minimum((s + 1) * group, examples)):
        factor = tl.load(factors + b)
        found, square = _gradient(
            g + b * g_b,
            x + b * x_b,
            steps,
            g_t,
            x_t,
            g_d,
            x_p,
            rows,
            columns,
            rows < d,
            columns < p,
            TILE,
            DEPTH,
            WIDEN,
        )
        if LIMITED:
            limit = tl.load(limits + (b * tl.num_programs(0) + i) * tl.num_programs(1) + j)
            factor *= share_within(square, limit)
        # A factor of 0 leaves an example out: zero times infinity would be no number.
        total += tl.where(factor == 0.0, 0.0, found * factor)
    inside = (rows < d)[:, None] & (columns < p)[None, :]
    place = out + s * out_s + rows[:, None].to(tl.int64) * out_d + columns[None, :].to(tl.int64) * out_p
    if ADD:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


@triton.jit
def _gram(  # type: ignore[no-untyped-def]
    of,
    depth,
    of_depth,
    of_row,
    rows,
    columns,
    in_rows,
    in_columns,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A block of a Gram matrix: float64 sums of float32 sums of DEPTH products, rounded to float32."""
    total = tl.zeros((TILE, TILE), dtype=tl.float64)
    for start in range(0, depth, DEPTH):
        part = tl.zeros((TILE, TILE), dtype=tl.float32)
        part = _part(
            of,
            of,
            start,
            depth,
            of_depth,
            of_depth,
            of_row,
            of_row,
            rows,
            columns,
            in_rows,
            in_columns,
            part,
            DEPTH,
            WIDEN,
        )
        total += part.to(tl.float64)
    return total.to(tl.float32)


@triton.jit
def _gram_blocks(  # type: ignore[no-untyped-def]
    g,
    x,
    products,
    lengths,
    steps,
    d,
    p,
    g_b,
    g_t,
    g_d,
    x_b,
    x_t,
    x_p,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """products[b, block] = Σ_ts (XXᵀ)_ts (GGᵀ)_ts over one block at or above the diagonal, twice if it is above.

    On the diagonal also lengths[b, 0 to 2, block]: Σ_t |x_t||g_t|, Σ_t |x_t|² and Σ_t |g_t|².
    """
    b, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    blocks = tl.num_programs(1)
    block = (b * blocks + i) * blocks + j
    if i <= j:
        rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        of_x = _gram(x + b * x_b, p, x_p, x_t, rows, columns, rows < steps, columns < steps, TILE, DEPTH, WIDEN)
        of_g = _gram(g + b * g_b, d, g_d, g_t, rows, columns, rows < steps, columns < steps, TILE, DEPTH, WIDEN)
        found = tl.sum(tl.sum(of_x.to(tl.float64) * of_g.to(tl.float64), axis=1), axis=0)
        tl.store(products + block, tl.where(i == j, found, 2.0 * found))
        if i == j:
            diagonal = rows[:, None] == columns[None, :]
            xx = tl.sum(tl.where(diagonal, of_x, 0.0), axis=1).to(tl.float64)
            gg = tl.sum(tl.where(diagonal, of_g, 0.0), axis=1).to(tl.float64)
            place = lengths + 3 * b * blocks + i
            tl.store(place, tl.sum(tl.sqrt(xx * gg), axis=0))
            tl.store(place + blocks, tl.sum(xx, axis=0))
            tl.store(place + 2 * blocks, tl.sum(gg, axis=0))
    else:
        tl.store(products + block, tl.zeros((), dtype=tl.float64))


@triton.jit
def _gram_totals(  # type: ignore[no-untyped-def]
    products, lengths, values, scales, blocks, largest, of_gram, of_sum, WIDTH: tl.constexpr
):
    """values[b], inf where a square is above ``largest``, and scales[b]: what :func:`gram_norm_sq` says."""
    b = tl.program_id(0).to(tl.int64)
    width = tl.arange(0, WIDTH)
    value = tl.zeros((WIDTH,), dtype=tl.float64)
    root = tl.zeros((WIDTH,), dtype=tl.float64)
    xx = tl.zeros((WIDTH,), dtype=tl.float64)
    gg = tl.zeros((WIDTH,), dtype=tl.float64)
    for start in range(0, blocks * blocks, WIDTH):
        at = start + width
        value += tl.load(products + b * blocks * blocks + at, mask=at < blocks * blocks, other=0.0)
    for start in range(0, blocks, WIDTH):
        at = start + width
        place = lengths + 3 * b * blocks + at
        root += tl.load(place, mask=at < blocks, other=0.0)
        xx += tl.load(place + blocks, mask=at < blocks, other=0.0)
        gg += tl.load(place + 2 * blocks, mask=at < blocks, other=0.0)
    norm_sq, longest = tl.sum(value, axis=0), tl.maximum(tl.sum(xx, axis=0), tl.sum(gg, axis=0))
    length = tl.sum(root, axis=0) * (1.0 + of_gram)
    scale = length * length
    upper = tl.maximum(norm_sq, 0.0) + of_gram * scale
    excess = of_gram * scale + 2.0 * of_sum * tl.sqrt(upper * scale) + of_sum * of_sum * scale
    # ``not (a < b)`` also holds for what is no number.
    tl.store(values + b, tl.where(longest < largest, norm_sq, float("inf")))
    tl.store(scales + b, excess / of_gram)


def tiled_norm_sq(g: Tensor, x: Tensor, sizes: Sizes | None = None) -> tuple[SquaredNorm, Tensor]:
    """Return |G_iᵀ X_i|² [B] by the squares of its tiles, none of which is stored, and those squares [B, tiles].

    :func:`add_clipped_sum` forms each tile anew and lets none be larger than it was here. So there is no cancellation
    to bound, at any T: the norm is that of what is released, up to the rounding of the squares of a tile's row.
    """
    examples, steps, d = g.shape
    p = x.shape[2]
    sizes = sizes or chosen("tiles", g.dtype)
    tiles = triton.cdiv(d, sizes.tile), triton.cdiv(p, sizes.tile)
    squares = torch.empty((examples, tiles[0] * tiles[1]), dtype=torch.float64, device=g.device)
    if squares.numel():
        _tile_squares[(examples, *tiles)](g, x, squares, steps, d, p, *g.stride(), *x.stride(), **_constants(sizes))
    return SquaredNorm(squares.sum(1), gamma(2 * sizes.tile + 8, torch.float32)), squares


def gram_norm_sq(g: Tensor, x: Tensor, sizes: Sizes | None = None) -> SquaredNorm:
    """Return |G_iᵀ X_i|² [B] = Σ_ts (XXᵀ)_ts (GGᵀ)_ts by blocks of both matrices, none of which is stored.

    Let S = (Σ_t |x_t||g_t|)². An entry of XXᵀ is off by at most γ_m |x_t||x_s|, m = depth + 1, one of GGᵀ likewise, and
    the absolute terms of their sum add up to S at most: the norm is off by at most γ_n S, n = 2m + 1 (the rest is
    float64's). What is released is a sum over T positions, off by at most γ_T √S, so that the square of its norm is at
    most u + 2 γ_T √(u S) + γ_T² S with u = |GᵀX|² ≤ value + γ_n S. The error is γ_n, and ``scale`` as many times S as
    makes error * scale all that the square may be above the value.
    """
    examples, steps, d = g.shape
    p = x.shape[2]
    sizes = sizes or chosen("gram", g.dtype)
    blocks = triton.cdiv(steps, sizes.tile)
    error = _gram_error(g.dtype, sizes)
    of_sum = 1.001 * gamma(_roundings(steps + 1, g.dtype), torch.float32)
    products = torch.empty((examples, blocks * blocks), dtype=torch.float64, device=g.device)
    lengths = torch.empty((examples, 3, blocks), dtype=torch.float64, device=g.device)
    values, scales = torch.empty((2, examples), dtype=torch.float64, device=g.device)
    if examples:
        _gram_blocks[(examples, blocks, blocks)](
            g, x, products, lengths, steps, d, p, *g.stride(), *x.stride(), **_constants(sizes)
        )
        largest = TRUSTED_SQUARE / max((p + d) * steps**2, 1)
        _gram_totals[(examples,)](products, lengths, values, scales, blocks, largest, error, of_sum, WIDTH=256)
    return SquaredNorm(values, 1.001 * error, scales, TOLERATED_EXCESS[g.dtype] / error)


def prefers_gram(steps: int, d: int, p: int, dtype: torch.dtype) -> bool:
    """Return whether Gram matrices take fewer operations than tiles, and are trusted for ordinary sequences.

    Where positions have nothing to do with each other S is T times the squared norm. An example beyond the tolerance
    goes through float64 by itself, so that Gram matrices are taken only where S may be twice that.
    """
    error = _gram_error(dtype, chosen("gram", dtype))
    return steps * (d + p) < 2 * d * p and 2 * steps * error < TOLERATED_EXCESS[dtype]


def add_clipped_sum(
    g: Tensor, x: Tensor, factors: Tensor, out: Tensor, limits: Tensor | None = None, sizes: Sizes | None = None
) -> None:
    """Out [d, p] += Σ_i factors_i G_iᵀ X_i.

    ``limits`` [B, tiles]: the squares that :func:`tiled_norm_sq` found. A tile that comes out larger, as it may if the
    compiler adds up in another order here than there, is scaled down to what was found: no example contributes more
    than was measured, whatever rounding does.
    """
    examples, steps, d = g.shape
    p = x.shape[2]
    sizes = sizes or chosen("tiles", g.dtype)
    tiles = triton.cdiv(d, sizes.tile), triton.cdiv(p, sizes.tile)
    if limits is not None and limits.shape != (examples, tiles[0] * tiles[1]):
        raise ValueError(f"The limits {tuple(limits.shape)} are of other tiles than {examples} x {tiles}.")
    if not examples or not steps or not out.numel():
        return
    groups, group = example_groups(examples, tiles[0] * tiles[1])
    adds = groups == 1 and out.dtype == torch.float32
    sums = out.unsqueeze(0) if adds else torch.empty((groups, d, p), dtype=torch.float32, device=g.device)
    factors = factors.to(torch.float32).contiguous()
    _tile_sums[(*tiles, groups)](
        g,
        x,
        factors,
        factors if limits is None else limits,
        sums,
        examples,
        group,
        steps,
        d,
        p,
        *g.stride(),
        *x.stride(),
        *sums.stride(),
        LIMITED=limits is not None,
        ADD=adds,
        **_constants(sizes),
    )
    if not adds:
        out += sums.sum(0)


def example_groups(examples: int, tiles: int) -> tuple[int, int]:
    """Return into how many groups the examples of a sum of so many tiles are split, and how many each has at most."""
    together = triton.cdiv(examples, min(examples, max(1, PROGRAMS // tiles)))
    return triton.cdiv(examples, together), together


def _constants(sizes: Sizes) -> dict[str, Any]:
    of_program = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return {"TILE": sizes.tile, "DEPTH": sizes.depth, "WIDEN": interpreted(), **of_program}


def _roundings(count: int, dtype: torch.dtype) -> int:
    """Return ``count``, doubled for half precision: tensor cores cut off where float32 rounds."""
    return count if dtype == torch.float32 else 2 * count


def _gram_error(dtype: torch.dtype, sizes: Sizes) -> float:
    """γ_n of :func:`gram_norm_sq`; a little more, because the kernel gets it as a float32 number."""
    return 1.001 * gamma(2 * _roundings(sizes.depth, dtype) + 8, torch.float32)

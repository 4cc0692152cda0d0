"""Gᵀ X per example in tiles: what a linear map over time contributes to norms and clipped sums.

Memory is O(B) beside the sums. Every kernel adds up in float32, whatever its operands are; float32 operands are never
rounded to TF32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpcore.gpu import interpreted
from dpcore.numerics.rounding import SquaredNorm, gamma, trusted

TILE = 64
"""Rows and columns of a tile of GᵀX, and of a block of a Gram matrix."""
DEPTH = 32
"""Positions of a tile, or features of a Gram matrix, that are loaded at once."""
PROGRAMS = 512
"""Programs that keep a large GPU busy; small matrices split the examples into groups to have so many."""


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    left,
    right,
    depth,
    left_depth,
    right_depth,
    left_row,
    right_row,
    rows,
    columns,
    in_rows,
    in_columns,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Σ_k left[k, rows] right[k, columns] as a tile [TILE, TILE] in float32."""
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = (k < depth)[:, None]
        a = tl.load(
            left + k[:, None] * left_depth + rows[None, :] * left_row, mask=inside & in_rows[None, :], other=0.0
        )
        b = tl.load(
            right + k[:, None] * right_depth + columns[None, :] * right_row,
            mask=inside & in_columns[None, :],
            other=0.0,
        )
        if WIDEN:  # the interpreter has no products of bfloat16; in float32 they are the same
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    return total


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
    found = _product(
        g + b * g_b, x + b * x_b, steps, g_t, x_t, g_d, x_p, rows, columns, rows < d, columns < p, TILE, DEPTH, WIDEN
    )
    by_row = tl.sum(found * found, axis=1)
    tile = (b * tl.num_programs(1) + i) * tl.num_programs(2) + j
    tl.store(out + tile, tl.sum(by_row.to(tl.float64), axis=0))


@triton.jit
def _tile_sums(  # type: ignore[no-untyped-def]
    g,
    x,
    factors,
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
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[s] = Σ_b factors[b] G_bᵀ X_b over the examples of group s, one tile of it."""
    i, j, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for b in range(s * group, tl.minimum((s + 1) * group, examples)):
        factor = tl.load(factors + b)
        found = _product(
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
        # A factor of 0 leaves an example out: zero times infinity would be no number.
        total += tl.where(factor == 0.0, 0.0, found * factor)
    inside = (rows < d)[:, None] & (columns < p)[None, :]
    tl.store(out + s * d * p + rows[:, None].to(tl.int64) * p + columns[None, :], total, mask=inside)


@triton.jit
def _gram_blocks(  # type: ignore[no-untyped-def]
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
    """out[b, block] = Σ_ts (XXᵀ)_ts (GGᵀ)_ts over one block at or above the diagonal, twice if it is above."""
    b, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if i <= j:
        rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        of_x = _product(
            x + b * x_b,
            x + b * x_b,
            p,
            x_p,
            x_p,
            x_t,
            x_t,
            rows,
            columns,
            rows < steps,
            columns < steps,
            TILE,
            DEPTH,
            WIDEN,
        )
        of_g = _product(
            g + b * g_b,
            g + b * g_b,
            d,
            g_d,
            g_d,
            g_t,
            g_t,
            rows,
            columns,
            rows < steps,
            columns < steps,
            TILE,
            DEPTH,
            WIDEN,
        )
        found = tl.sum(tl.sum(of_x.to(tl.float64) * of_g.to(tl.float64), axis=1), axis=0)
        block = (b * tl.num_programs(1) + i) * tl.num_programs(2) + j
        tl.store(out + block, tl.where(i == j, found, 2.0 * found))


def tiled_norm_sq(g: Tensor, x: Tensor) -> SquaredNorm:
    """Return |G_iᵀ X_i|² [B] by the squares of its tiles, none of which is stored.

    What is released is formed anew, possibly in another order, and either product is off by at most γ_T Σ_t |g_t||x_t|
    per entry: its square exceeds what was measured by at most 4 γ_T + 4 γ_T² ≤ γ_{4T + 8} times S = (Σ_t |x_t||g_t|)².
    """
    examples, steps, d = g.shape
    p = x.shape[2]
    tiles = triton.cdiv(d, TILE), triton.cdiv(p, TILE)
    out = torch.empty((examples, tiles[0] * tiles[1]), dtype=torch.float64, device=g.device)
    if out.numel():
        _tile_squares[(examples, *tiles)](g, x, out, steps, d, p, *g.stride(), *x.stride(), **_sizes())
    # Of one row of a tile TILE squares were added in float32; the rest is float64's.
    error = gamma(TILE + 2, torch.float32) + gamma(_roundings(4 * steps + 8, g), torch.float32)
    return SquaredNorm(out.sum(1), error, _scale(g, x))


def gram_norm_sq(g: Tensor, x: Tensor) -> SquaredNorm:
    """Return |G_iᵀ X_i|² [B] = Σ_ts (XXᵀ)_ts (GGᵀ)_ts by blocks of both matrices, none of which is stored.

    The error is that of :func:`dpcore.rules.linear.gram_norm_sq`, with entries that are sums of p and of d products.
    """
    examples, steps, d = g.shape
    p = x.shape[2]
    blocks = triton.cdiv(steps, TILE)
    out = torch.zeros((examples, blocks * blocks), dtype=torch.float64, device=g.device)
    if out.numel():
        _gram_blocks[(examples, blocks, blocks)](g, x, out, steps, d, p, *g.stride(), *x.stride(), **_sizes())
    error = gamma(_roundings(p + d + 2 * steps + 8, g), torch.float32)
    scale = _scale(g, x)
    largest = torch.maximum(*(t.float().square().sum((1, 2)) for t in (g, x)))
    return SquaredNorm(trusted(out.sum(1), largest, (p + d) * steps**2), error, scale)


def add_clipped_sum(g: Tensor, x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Out [d, p] += Σ_i factors_i G_iᵀ X_i."""
    examples, steps, d = g.shape
    p = x.shape[2]
    tiles = triton.cdiv(d, TILE), triton.cdiv(p, TILE)
    if not examples or not steps:
        return
    groups = min(examples, max(1, PROGRAMS // (tiles[0] * tiles[1])))
    group = triton.cdiv(examples, groups)
    groups = triton.cdiv(examples, group)
    sums = torch.empty((groups, d, p), dtype=torch.float32, device=g.device)
    strides = (*g.stride(), *x.stride())
    _tile_sums[(*tiles, groups)](g, x, factors.contiguous(), sums, examples, group, steps, d, p, *strides, **_sizes())
    out += sums.sum(0)


def _sizes() -> dict[str, Any]:
    return {"TILE": TILE, "DEPTH": DEPTH, "WIDEN": interpreted()}


def _roundings(count: int, operands: Tensor) -> int:
    """Return ``count``, doubled for half precision: tensor cores cut off where float32 rounds."""
    return count if operands.dtype == torch.float32 else 2 * count


def _scale(g: Tensor, x: Tensor) -> Tensor:
    """S = (Σ_t |x_t||g_t|)² [B], a little too large rather than too small."""
    of_g, of_x = (torch.linalg.vector_norm(t, dim=2, dtype=torch.float32) for t in (g, x))
    roundings = g.shape[2] + x.shape[2] + g.shape[1] + 8
    return (of_g * of_x).sum(1).square() * (1.0 + gamma(2 * roundings, torch.float32))

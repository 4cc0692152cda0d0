"""Rows of an embedding's table per example: sums S_v of the output gradients over equal ids, in tiles.

Norm and sum form the same tiles, as in :mod:`dpcore.gpu.contraction`: a product of a matrix of zeros and ones, which
positions have equal ids, with the gradients. Nothing of the size of the gradients is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpcore.gpu import interpreted
from dpcore.gpu.contraction import share_within
from dpcore.gpu.tuned import Sizes, chosen
from dpcore.numerics.rounding import SquaredNorm, gamma


@triton.jit
def _sums_by_id(  # type: ignore[no-untyped-def]
    ids,
    g,
    steps,
    d,
    padding,
    g_t,
    g_d,
    rows,
    columns,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The ids of positions ``rows``, which of them are the first with their id, and their S_v; its squares' sum."""
    own = tl.load(ids + rows, mask=rows < steps, other=-1)
    earlier = tl.zeros((TILE,), dtype=tl.int32)
    found = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, steps, DEPTH):
        s = start + tl.arange(0, DEPTH)
        others = tl.load(ids + s, mask=s < steps, other=-2)
        same = own[:, None] == others[None, :]
        earlier += tl.sum((same & (s[None, :] < rows[:, None])).to(tl.int32), axis=1)
        counts = (s < steps) & (others != padding)
        at = s[:, None].to(tl.int64) * g_t + columns[None, :].to(tl.int64) * g_d
        b = tl.load(g + at, mask=counts[:, None] & (columns < d)[None, :], other=0.0)
        if WIDEN:  # the interpreter has no products of bfloat16; in float32 they are the same
            b = b.to(tl.float32)
        found = tl.dot(same.to(b.dtype), b, found, input_precision="ieee")
    is_first = (rows < steps) & (own != padding) & (earlier == 0)
    found = tl.where(is_first[:, None], found, 0.0)
    by_row = tl.sum(found * found, axis=1)
    return own, is_first, found, tl.sum(by_row.to(tl.float64), axis=0)


@triton.jit
def _row_squares(  # type: ignore[no-untyped-def]
    ids, g, out, steps, d, padding, g_b, g_t, g_d, TILE: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr
):
    """out[b, tile] = the sum of squares of one tile of the S_v of example b."""
    b, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    _, _, _, square = _sums_by_id(
        ids + b * steps, g + b * g_b, steps, d, padding, g_t, g_d, rows, columns, TILE, DEPTH, WIDEN
    )
    tl.store(out + (b * tl.num_programs(1) + i) * tl.num_programs(2) + j, square)


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    ids,
    g,
    factors,
    limits,
    out,
    steps,
    d,
    padding,
    g_b,
    g_t,
    g_d,
    out_v,
    out_d,
    LIMITED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[v] += factors[b] S_v for one tile of example b, scaled down where it is larger than limits[b, tile]."""
    b, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    own, is_first, found, square = _sums_by_id(
        ids + b * steps, g + b * g_b, steps, d, padding, g_t, g_d, rows, columns, TILE, DEPTH, WIDEN
    )
    factor = tl.load(factors + b)
    if LIMITED:
        limit = tl.load(limits + (b * tl.num_programs(1) + i) * tl.num_programs(2) + j)
        factor *= share_within(square, limit)
    place = out + own[:, None].to(tl.int64) * out_v + columns[None, :].to(tl.int64) * out_d
    # A factor of 0 leaves an example out: zero times infinity would be no number.
    found = tl.where(factor == 0.0, 0.0, found * factor)
    tl.atomic_add(place, found, mask=is_first[:, None] & (columns < d)[None, :])


def norm_sq(ids: Tensor, g: Tensor, padding_idx: int | None) -> tuple[SquaredNorm, Tensor]:
    """Return Σ_v |S_v|² [B] for ids [B, T] and output gradients [B, T, d], and the squares of the tiles.

    What is added is what was squared here, see :func:`dpcore.gpu.contraction.tiled_norm_sq`.
    """
    sizes = chosen("tiles", g.dtype)
    squares = torch.empty((len(g), _tiles(g, sizes)[0] * _tiles(g, sizes)[1]), dtype=torch.float64, device=g.device)
    if squares.numel():
        _row_squares[(len(g), *_tiles(g, sizes))](
            ids.contiguous(),
            g,
            squares,
            g.shape[1],
            g.shape[2],
            _padding(padding_idx),
            *g.stride(),
            **_constants(sizes),
        )
    return SquaredNorm(squares.sum(1), gamma(2 * sizes.tile + 8, torch.float32)), squares


def add_clipped_sum(
    ids: Tensor, g: Tensor, padding_idx: int | None, factors: Tensor, out: Tensor, limits: Tensor | None
) -> None:
    """Out [V, d] += factors_b S_v for all examples b; each S_v is added up in float32 before its factor is applied."""
    sizes = chosen("tiles", g.dtype)
    tiles = _tiles(g, sizes)
    if limits is not None and limits.shape != (len(g), tiles[0] * tiles[1]):
        raise ValueError(f"The limits {tuple(limits.shape)} are of other tiles than {len(g)} x {tiles}.")
    if not g.numel():
        return
    factors = factors.to(torch.float32).contiguous()
    _row_sums[(len(g), *tiles)](
        ids.contiguous(),
        g,
        factors,
        factors if limits is None else limits,
        out,
        g.shape[1],
        g.shape[2],
        _padding(padding_idx),
        *g.stride(),
        *out.stride(),
        LIMITED=limits is not None,
        **_constants(sizes),
    )


def _tiles(g: Tensor, sizes: Sizes) -> tuple[int, int]:
    return triton.cdiv(g.shape[1], sizes.tile), triton.cdiv(g.shape[2], sizes.tile)


def _padding(padding_idx: int | None) -> int:
    """Return the id that does not count; -3 is none, and is not what masked positions have."""
    return -3 if padding_idx is None else padding_idx


def _constants(sizes: Sizes) -> dict[str, Any]:
    of_program = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return {"TILE": sizes.tile, "DEPTH": sizes.depth, "WIDEN": interpreted(), **of_program}

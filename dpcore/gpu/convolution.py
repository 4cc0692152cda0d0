"""Weight gradients of convolutions per example, in tiles of products of output gradients and unfolded inputs.

Per example and group dW = Gᵀ U, with output gradients G [T, d / groups] and windows U [T, c / groups * kernel]: row t
is what output position t saw. U is never written: a kernel computes where its entries lie in the input, and a place in
the padding is none. Otherwise as :mod:`dpcore.gpu.contraction`: tiles are squared and dropped, then formed again and
added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpcore.gpu import interpreted
from dpcore.gpu.contraction import example_groups, share_within
from dpcore.gpu.tuned import Sizes, chosen
from dpcore.gpu.windows import Windows
from dpcore.numerics.rounding import SquaredNorm, gamma


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    g,
    x,
    positions,
    channels,
    size_0,
    size_1,
    size_2,
    out_1,
    out_2,
    g_d,
    g_t,
    x_c,
    x_n,
    rows,
    columns,
    in_rows,
    in_columns,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A tile of GᵀU in float32, and the sum of its squares in float64: of each row TILE squares are float32's."""
    if CHANNELS_LAST:
        channel, offset = columns % channels, columns // channels
    else:
        channel = columns // (KERNEL[0] * KERNEL[1] * KERNEL[2])
        offset = columns % (KERNEL[0] * KERNEL[1] * KERNEL[2])
    # The place that output position t sees through column j is a sum: what t gives and what j gives.
    by_0 = offset // (KERNEL[1] * KERNEL[2]) * DILATION[0] - PADDING[0]
    by_1 = offset // KERNEL[2] % KERNEL[1] * DILATION[1] - PADDING[1]
    by_2 = offset % KERNEL[2] * DILATION[2] - PADDING[2]
    # 64 bits: a large batch of large pictures has strides beyond 2^31.
    of_column = ((by_0.to(tl.int64) * size_1 + by_1) * size_2 + by_2) * x_n + channel.to(tl.int64) * x_c
    of_row = rows.to(tl.int64) * g_d
    found = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, positions, DEPTH):
        t = start + tl.arange(0, DEPTH)
        at_0, at_1, at_2 = t // (out_1 * out_2) * STRIDE[0], t // out_2 % out_1 * STRIDE[1], t % out_2 * STRIDE[2]
        inside = (t < positions)[:, None]
        a = tl.load(g + t[:, None].to(tl.int64) * g_t + of_row[None, :], mask=inside & in_rows[None, :], other=0.0)
        seen = inside & in_columns[None, :]
        # Without padding no window leaves the input.
        if PADDING[0] > 0:
            place = at_0[:, None] + by_0[None, :]
            seen = seen & (place >= 0) & (place < size_0)
        if PADDING[1] > 0:
            place = at_1[:, None] + by_1[None, :]
            seen = seen & (place >= 0) & (place < size_1)
        if PADDING[2] > 0:
            place = at_2[:, None] + by_2[None, :]
            seen = seen & (place >= 0) & (place < size_2)
        of_position = ((at_0.to(tl.int64) * size_1 + at_1) * size_2 + at_2) * x_n
        b = tl.load(x + of_position[:, None] + of_column[None, :], mask=seen, other=0.0)
        if WIDEN:  # the interpreter has no products of bfloat16; in float32 they are the same
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        found = tl.dot(tl.trans(a), b, found, input_precision="ieee")
    by_row = tl.sum(found * found, axis=1)
    return found, tl.sum(by_row.to(tl.float64), axis=0)


@triton.jit
def _window_squares(  # type: ignore[no-untyped-def]
    g,
    x,
    out,
    d,
    p,
    g_b,
    x_b,
    positions,
    channels,
    size_0,
    size_1,
    size_2,
    out_1,
    out_2,
    g_d,
    g_t,
    x_c,
    x_n,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[b, tile] = the sum of squares of one tile of G_bᵀ U_b, d rows and p columns in each group, in float64."""
    b, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    in_group = tl.cdiv(d, TILE)
    group = (i // in_group).to(tl.int64)
    rows, columns = i % in_group * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    _, square = _gradient(
        g + b * g_b + group * d * g_d,
        x + b * x_b + group * channels * x_c,
        positions,
        channels,
        size_0,
        size_1,
        size_2,
        out_1,
        out_2,
        g_d,
        g_t,
        x_c,
        x_n,
        rows,
        columns,
        rows < d,
        columns < p,
        KERNEL,
        STRIDE,
        PADDING,
        DILATION,
        CHANNELS_LAST,
        TILE,
        DEPTH,
        WIDEN,
    )
    tl.store(out + (b * tl.num_programs(1) + i) * tl.num_programs(2) + j, square)


@triton.jit
def _window_sums(  # type: ignore[no-untyped-def]
    g,
    x,
    factors,
    limits,
    out,
    examples,
    together,
    all_rows,
    d,
    p,
    g_b,
    x_b,
    positions,
    channels,
    size_0,
    size_1,
    size_2,
    out_1,
    out_2,
    g_d,
    g_t,
    x_c,
    x_n,
    LIMITED: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[s] [all_rows, p] = Σ_b factors[b] G_bᵀ U_b over ``together`` examples from s * together on, one tile of it.

    LIMITED: a tile whose sum of squares is above limits[b, tile] is made smaller until it is not.
    """
    i, j, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    in_group = tl.cdiv(d, TILE)
    group = (i // in_group).to(tl.int64)
    rows, columns = i % in_group * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for b in range(s * together, tl.minimum((s + 1) * together, examples)):
        factor = tl.load(factors + b)
        found, square = _gradient(
            g + b * g_b + group * d * g_d,
            x + b * x_b + group * channels * x_c,
            positions,
            channels,
            size_0,
            size_1,
            size_2,
            out_1,
            out_2,
            g_d,
            g_t,
            x_c,
            x_n,
            rows,
            columns,
            rows < d,
            columns < p,
            KERNEL,
            STRIDE,
            PADDING,
            DILATION,
            CHANNELS_LAST,
            TILE,
            DEPTH,
            WIDEN,
        )
        if LIMITED:
            limit = tl.load(limits + (b * tl.num_programs(0) + i) * tl.num_programs(1) + j)
            factor *= share_within(square, limit)
        # A factor of 0 leaves an example out: zero times infinity would be no number.
        total += tl.where(factor == 0.0, 0.0, found * factor)
    row = s * all_rows + group * d + rows.to(tl.int64)
    inside = (rows < d)[:, None] & (columns < p)[None, :]
    tl.store(out + row[:, None] * p + columns[None, :].to(tl.int64), total, mask=inside)


def norm_sq(g: Tensor, x: Tensor, windows: Windows, sizes: Sizes | None = None) -> tuple[SquaredNorm, Tensor]:
    """Return |dW_i|² [B] for output gradients g [B, d, *out] and inputs x [B, c, *size], and its tiles' [B, tiles].

    What is added is what was squared here, see :func:`dpcore.gpu.contraction.tiled_norm_sq`.
    """
    sizes = sizes or chosen("windows", g.dtype)
    of = _Operands.of(g, x, windows)
    tiles = of.tiles(sizes)
    squares = torch.empty((len(g), tiles[0] * tiles[1]), dtype=torch.float64, device=g.device)
    if squares.numel():
        _window_squares[(len(g), *tiles)](of.g, of.x, squares, *of.numbers, **_constants(windows, sizes))
    return SquaredNorm(squares.sum(1), gamma(2 * sizes.tile + 8, torch.float32)), squares


def add_clipped_sum(
    g: Tensor,
    x: Tensor,
    windows: Windows,
    factors: Tensor,
    out: Tensor,
    limits: Tensor | None = None,
    sizes: Sizes | None = None,
) -> None:
    """Out [d, c / groups, *kernel] += Σ_i factors_i dW_i, each of whose tiles is within ``limits`` [B, tiles].

    These are the squares that :func:`norm_sq` found.
    """
    sizes = sizes or chosen("windows", g.dtype)
    of = _Operands.of(g, x, windows)
    tiles = of.tiles(sizes)
    if limits is not None and limits.shape != (len(g), tiles[0] * tiles[1]):
        raise ValueError(f"The limits {tuple(limits.shape)} are of other tiles than {len(g)} x {tiles}.")
    if not len(g):
        return
    groups, together = example_groups(len(g), tiles[0] * tiles[1])
    sums = torch.empty((groups, len(out), of.columns), dtype=torch.float32, device=g.device)
    factors = factors.to(torch.float32).contiguous()
    _window_sums[(*tiles, groups)](
        of.g,
        of.x,
        factors,
        factors if limits is None else limits,
        sums,
        len(g),
        together,
        len(out),
        *of.numbers,
        LIMITED=limits is not None,
        **_constants(windows, sizes),
    )
    total = sums.sum(0)
    if windows.channels_last:
        out += total.view(len(out), *windows.kernel, -1).movedim(-1, 1)
    else:
        out += total.view(out.shape)


@dataclass(frozen=True)
class _Operands:
    """g [B, d, T] and x [B, c, pixels], and what both kernels are told of them, in the order of their arguments.

    ``rows`` and ``columns``: of the gradient of one of ``groups``.
    """

    g: Tensor
    x: Tensor
    groups: int
    rows: int
    columns: int
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, g: Tensor, x: Tensor, windows: Windows) -> _Operands:
        # A copy only where positions do not follow each other at one distance, row after row.
        flat_g, flat_x = g.flatten(2), x.flatten(2)
        rows, channels = g.shape[1] // windows.groups, x.shape[1] // windows.groups
        columns = channels * math.prod(windows.kernel)
        g_b, g_d, g_t = flat_g.stride()
        x_b, x_c, x_n = flat_x.stride()
        size, (_, *out) = _three(x.shape[2:], 1), _three(g.shape[2:], 1)
        numbers = (rows, columns, g_b, x_b, flat_g.shape[2], channels, *size, *out, g_d, g_t, x_c, x_n)
        return cls(flat_g, flat_x, windows.groups, rows, columns, numbers)

    def tiles(self, sizes: Sizes) -> tuple[int, int]:
        return self.groups * triton.cdiv(self.rows, sizes.tile), triton.cdiv(self.columns, sizes.tile)


def _three(numbers: tuple[int, ...], fill: int) -> tuple[int, ...]:
    """Return the numbers of three dimensions, the first ones filled up."""
    return (fill,) * (3 - len(numbers)) + tuple(numbers)


def _constants(windows: Windows, sizes: Sizes) -> dict[str, Any]:
    return {
        "KERNEL": _three(windows.kernel, 1),
        "STRIDE": _three(windows.stride, 1),
        "PADDING": _three(windows.padding, 0),
        "DILATION": _three(windows.dilation, 1),
        "CHANNELS_LAST": windows.channels_last,
        "TILE": sizes.tile,
        "DEPTH": sizes.depth,
        "WIDEN": interpreted(),
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
    }

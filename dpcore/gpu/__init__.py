"""Kernels for CUDA in Triton: norms and clipped sums, tile by tile, and noise.

They take linear maps over time, convolutions and lookups, and write no per-sample gradient and no buffer of noise to
memory. Off unless ``DPCORE_TRITON=1``, but for noise, which is off with 0: their values are proven by Triton's
interpreter on a CPU, their speed on a GPU has not been measured. Half-precision operands stay as they are: a product of
two bfloat16 numbers is exact in float32, in which it is added up, and in which the clip factor is applied.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from dpcore.gpu.windows import Windows
from dpcore.numerics.rounding import SquaredNorm

FEWEST_ROWS = 16
"""Of a convolution's groups: with fewer output channels a tile is nearly empty."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Return whether Triton computes on the CPU, operator by operator (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def available() -> bool:
    """Return whether the user asked for the kernels and Triton is installed."""
    return os.environ.get("DPCORE_TRITON") == "1" and importlib.util.find_spec("triton") is not None


def serves(g: Tensor, x: Tensor) -> bool:
    """Return whether the kernels take these output gradients [B, T, d] and inputs [B, T, p] of one type."""
    return x.dim() == g.dim() == 3 and g.dtype == x.dtype and _serves(g, x)


def serves_lookup(g: Tensor, ids: Tensor) -> bool:
    """Return whether the kernels take these output gradients [B, T, d] of a lookup of ids [B, T]."""
    return ids.dim() == 2 and g.dim() == 3 and _serves(g, ids)


def serves_convolution(g: Tensor, x: Tensor, windows: Windows) -> bool:
    """Return whether the kernels take output gradients [B, d, *out] and inputs [B, c, *size], of one type."""
    return (
        g.dim() == x.dim() == 2 + len(windows.kernel) <= 5
        and g.dtype == x.dtype
        and (windows.groups == 1 or g.shape[1] // windows.groups >= FEWEST_ROWS)
        and _serves(g, x)
    )


def serves_noise(target: Tensor) -> bool:
    """Return whether the kernel of noise takes this tensor."""
    of_its_kind = target.dtype == torch.float32 and target.is_contiguous()
    return of_its_kind and _takes(target) and (available() or _draws_unasked(target.device))


@functools.cache
def _draws_unasked(device: torch.device) -> bool:
    """Return whether the kernel of noise serves a device though nobody asked: torch's operators take dozens of passes.

    It does not where it differs from float64 there, or cannot be compiled.
    """
    unasked = device.type == "cuda" and "DPCORE_TRITON" not in os.environ
    if not unasked or importlib.util.find_spec("triton") is None:
        return False
    try:
        from dpcore.gpu import noise

        noise.check(device)
    except Exception:  # of the driver, of Triton's compiler or of the C compiler that it calls
        return False
    return True


def _serves(first: Tensor, *others: Tensor) -> bool:
    """Return whether all are on the current CUDA device (or the interpreter runs) and hold values of their own."""
    return available() and _takes(first, *others)


def _takes(first: Tensor, *others: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and not torch._C._functorch.maybe_current_level()
        and first.dtype in _DTYPES
        and (interpreted() or (first.is_cuda and first.device.index == torch.cuda.current_device()))
        and all(
            type(t) is Tensor and t.device == first.device and not t.is_neg() and not t._is_zerotensor()
            for t in (first, *others)
        )
    )


def contraction_norm_sq(g: Tensor, x: Tensor) -> tuple[SquaredNorm, Tensor | None]:
    """Return |G_iᵀ X_i|² [B] for output gradients G [B, T, d] and inputs X [B, T, p], and limits for the clipped sum.

    By whichever takes fewer operations: forming each tile of GᵀX and squaring it, or (no limits) the upper triangles of
    the Gram matrices XXᵀ and GGᵀ, block by block, where their terms can be trusted.
    """
    from dpcore.gpu import contraction

    _, steps, d = g.shape
    if contraction.prefers_gram(steps, d, x.shape[2], g.dtype):
        return contraction.gram_norm_sq(g, x), None
    return contraction.tiled_norm_sq(g, x)


def contraction_clipped_sum(g: Tensor, x: Tensor, factors: Tensor, out: Tensor, limits: Tensor | None = None) -> None:
    """Out [d, p] += Σ_i factors_i G_iᵀ X_i, each G_iᵀ X_i added up in float32 before its factor is applied.

    ``limits``: those that came with the norms. No example contributes more than they allow.
    """
    from dpcore.gpu import contraction

    contraction.add_clipped_sum(g, x, factors, out, limits)


def lookup_norm_sq(ids: Tensor, g: Tensor, padding_idx: int | None) -> tuple[SquaredNorm, Tensor]:
    """Return the squared norms [B] of a table's gradients for ids [B, T], and limits for the clipped sum."""
    from dpcore.gpu import lookup

    return lookup.norm_sq(ids, g, padding_idx)


def lookup_clipped_sum(
    ids: Tensor, g: Tensor, padding_idx: int | None, factors: Tensor, out: Tensor, limits: Tensor | None = None
) -> None:
    """Out [V, d] += the clipped sum of a table's gradients; no example contributes more than ``limits`` allow."""
    from dpcore.gpu import lookup

    lookup.add_clipped_sum(ids, g, padding_idx, factors, out, limits)


def convolution_norm_sq(g: Tensor, x: Tensor, windows: Windows) -> tuple[SquaredNorm, Tensor]:
    """Return |dW_i|² [B] for output gradients g [B, d, *out] and inputs x [B, c, *size], and limits for the sum."""
    from dpcore.gpu import convolution

    return convolution.norm_sq(g, x, windows)


def convolution_clipped_sum(
    g: Tensor, x: Tensor, windows: Windows, factors: Tensor, out: Tensor, limits: Tensor | None = None
) -> None:
    """Out [d, c / groups, *kernel] += Σ_i factors_i dW_i; no example contributes more than ``limits`` allow."""
    from dpcore.gpu import convolution

    convolution.add_clipped_sum(g, x, windows, factors, out, limits)


def draw_normals(target: Tensor, std: float, name: bytes, start: int, add: bool) -> None:
    """Write std * (the numbers from ``start`` on of the stream ``name``) to ``target``, or ``add`` them to it.

    One pass, no buffer. PrivacyError where the kernel does not compute that stream on this device.
    """
    from dpcore.gpu import noise

    noise.draw(target, std, name, start, add)

"""Kernels for CUDA in Triton: norms and clipped sums of linear maps over time, without per-sample gradients in memory.

Off unless ``DPCORE_TRITON=1``: their values are proven by Triton's interpreter on a CPU, their speed on a GPU has not
been measured. Half-precision operands stay as they are: a product of two bfloat16 numbers is exact in float32, in which
it is added up, and in which the clip factor is applied. Long sequences mostly go to float64, one example at a time:
docs/bench-gpu.md says why.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from dpcore.numerics.rounding import SquaredNorm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Return whether Triton computes on the CPU, operator by operator (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def available() -> bool:
    """Return whether the user asked for the kernels and Triton is installed."""
    return os.environ.get("DPCORE_TRITON") == "1" and importlib.util.find_spec("triton") is not None


def serves(g: Tensor, x: Tensor) -> bool:
    """Return whether the kernels take these output gradients [B, T, d] and inputs [B, T, p].

    They must be of one type, on one CUDA device (anywhere under the interpreter), with values of their own, outside of
    tracing.
    """
    return (
        available()
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.maybe_current_level()
        and g.dim() == x.dim() == 3
        and g.dtype == x.dtype
        and g.dtype in _DTYPES
        and g.device == x.device
        and (g.is_cuda or interpreted())
        and all(type(t) is Tensor and not t.is_neg() and not t._is_zerotensor() for t in (g, x))
    )


def contraction_norm_sq(g: Tensor, x: Tensor) -> SquaredNorm:
    """Return |G_iᵀ X_i|² [B] for output gradients G [B, T, d] and inputs X [B, T, p].

    By whichever takes fewer operations: forming each tile of GᵀX and squaring it, or the upper triangles of the Gram
    matrices XXᵀ and GGᵀ, block by block.
    """
    from dpcore.gpu import contraction

    steps, d, p = g.shape[1], g.shape[2], x.shape[2]
    by_gram = steps * (d + p) < 2 * d * p
    return contraction.gram_norm_sq(g, x) if by_gram else contraction.tiled_norm_sq(g, x)


def contraction_clipped_sum(g: Tensor, x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Out [d, p] += Σ_i factors_i G_iᵀ X_i, each G_iᵀ X_i added up in float32 before its factor is applied."""
    from dpcore.gpu import contraction

    contraction.add_clipped_sum(g, x, factors, out)

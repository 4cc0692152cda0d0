"""Clip factors: how much of each example's gradient is released."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The computed norm and the scaled gradient each carry a relative rounding error of a few units of precision.
# Shrinking the bound by 32 units (4e-6 in float32, far below any effect on training) keeps every contribution's true
# norm below C.
MARGIN_UNITS = 32.0


def bound_with_margin(max_grad_norm: float, dtype: torch.dtype) -> float:
    """C (1 - 32 eps): what is divided by a norm that was computed in ``dtype``."""
    return max_grad_norm * (1.0 - MARGIN_UNITS * torch.finfo(dtype).eps)


def clip_factors(norms: Tensor, max_grad_norm: float) -> Tensor:
    """Flat clipping: min(1, C(1 - 32 eps) / norm), [B] for norms [B]; a norm that is not finite gives 0.

    A non-finite example must contribute nothing: a scaled infinity would show its presence in every parameter.
    """
    factors = (bound_with_margin(max_grad_norm, norms.dtype) / norms).clamp_(max=1.0)
    return torch.where(norms.isfinite(), factors, 0.0)


def automatic_factors(norms: Tensor, max_grad_norm: float, stability: float = 0.01) -> Tensor:
    """Automatic clipping (Bu et al. 2023): C(1 - 32 eps) / (norm + stability), [B]; every contribution stays below C.

    Removes the clip threshold as a hyperparameter: C only rescales the learning rate.
    """
    factors = bound_with_margin(max_grad_norm, norms.dtype) / (norms + stability)
    return torch.where(norms.isfinite(), factors, 0.0)


def check_max_grad_norm(max_grad_norm: Any) -> float:
    """The clip norm as a float; ValueError unless it is finite and positive."""
    try:
        value = float(max_grad_norm)
    except (TypeError, ValueError):
        value = float("nan")
    if isinstance(max_grad_norm, str) or not 0.0 < value < float("inf"):
        raise ValueError(
            f"max_grad_norm is {max_grad_norm!r}; it must be a number, finite and above 0, for instance 1.0."
        )
    return value

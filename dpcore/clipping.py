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
    return torch.where(norms < torch.inf, factors, 0.0)


def automatic_factors(norms: Tensor, max_grad_norm: float, stability: float = 0.01) -> Tensor:
    """Automatic clipping (Bu et al. 2023): C(1 - 32 eps) / (norm + stability), [B]; every contribution stays below C.

    Removes the clip threshold as a hyperparameter: C only rescales the learning rate.
    """
    factors = bound_with_margin(max_grad_norm, norms.dtype) / (norms + stability)
    return torch.where(norms.isfinite(), factors, 0.0)


SMALLEST_MAX_GRAD_NORM = 1e-8
"""What float32 loses of a squared norm, because squares below 1e-38 lose their digits, is up to 1e-27 where an example
is not left to float64: 3e-14 of the norm. Beside a smaller bound that would be more than the margin."""


def check_max_grad_norm(max_grad_norm: Any) -> float:
    """The clip norm as a float; ValueError unless it is finite and at least :data:`SMALLEST_MAX_GRAD_NORM`."""
    try:
        value = float(max_grad_norm)
    except (TypeError, ValueError):
        value = float("nan")
    if isinstance(max_grad_norm, str) or not 0.0 < value < float("inf"):
        raise ValueError(
            f"max_grad_norm is {max_grad_norm!r}; it must be a number, finite and above 0, for instance 1.0."
        )
    if value < SMALLEST_MAX_GRAD_NORM:
        raise ValueError(
            f"max_grad_norm is {max_grad_norm!r}; it must be at least {SMALLEST_MAX_GRAD_NORM}, below which rounding "
            "would let an example release more. Multiply the loss and the bound by the same number."
        )
    return value

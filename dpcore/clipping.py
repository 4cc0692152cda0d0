"""Clip factors: how much of each example's gradient is released."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpcore.numerics.rounding import unit

OWN_UNITS = 16.0
"""Safety margin on the bound, in unit roundoffs, for what is rounded once, whatever an example's size: the root of
the squared norm, the bound and the divisor as float32 numbers, the quotient and its product with the divisor (6), and
up to three products between a factor and what is added to the sum. Twelve would do."""


def bound_with_margin(max_grad_norm: float, error: float, dtype: torch.dtype) -> float:
    """The bound to divide norms by, such that no example contributes more than C = ``max_grad_norm``.

    Args:
        max_grad_norm: C.
        error: by how much of itself a squared norm may be too small.
        dtype: what factors are computed in.

    Returns:
        C (1 - error / 2 - 16 u), below C / sqrt(1 + error) and with room for :data:`OWN_UNITS`; 0 where the error is so
        large that nothing can be promised, so that nothing is released.
    """
    return max_grad_norm * max(0.0, 1.0 - error / 2.0 - OWN_UNITS * unit(dtype))


def clip_factors(norms: Tensor, max_grad_norm: float) -> Tensor:
    """Flat clipping: min(1, C / norm), [B] for norms [B]; a norm that is not finite gives 0.

    A non-finite example must contribute nothing: a scaled infinity would show its presence in every parameter. The C
    that an engine passes is already lowered by what rounding may hide (:func:`bound_with_margin`).
    """
    factors = norms.reciprocal().mul_(max_grad_norm).clamp_(max=1.0)
    return factors.masked_fill_((norms < torch.inf).logical_not_(), 0.0)


def automatic_factors(norms: Tensor, max_grad_norm: float, stability: float = 0.01) -> Tensor:
    """Automatic clipping (Bu et al. 2023): C / (norm + stability), [B]; every contribution stays below C.

    Removes the clip threshold as a hyperparameter: C only rescales the learning rate.
    """
    factors = max_grad_norm / (norms + stability)
    return torch.where(norms.isfinite(), factors, 0.0)


SMALLEST_MAX_GRAD_NORM = 1e-8
"""Below this C the loss of a squared norm in float32 could exceed the margin. That loss, where numbers below 1e-38
lose their digits, is up to 1e-24 where an example
is not left to float64: 1e-8 of the square of this bound, far inside the margin. Beside a smaller one it is not."""


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

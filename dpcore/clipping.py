"""Clip factors: how much of each example's gradient is released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpcore.errors import PrivacyError
from dpcore.numerics.rounding import unit

Factors = Callable[[Tensor, float], Tensor]
"""A clipping rule: from norms [B] and C to factors [B]."""

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


PROVEN = (clip_factors, automatic_factors)
"""Rules whose factors are known to keep every contribution within C; those of others are looked at."""
RULE_TOLERANCE = 1e-6
"""By how much of C a rule's own arithmetic may let a contribution exceed it; what does is cut to C."""
MIXING_TOLERANCE = 1e-5
"""By how much of itself a factor may differ where fewer examples are beside its own: torch's kernels round otherwise
at other lengths."""
HIDDEN_NORM = 1e-12
"""What a norm that is taken in float32 may lack, because squares below 1e-38 lose their digits. It counts only at
factors far above 1, which no proven rule has."""


def is_proven(rule: Factors) -> bool:
    """Return whether a clipping rule needs no look at its factors."""
    return any(rule is known for known in PROVEN)


def factors_of_own_rule(
    rule: Factors, norms: Tensor, lowered: float | Tensor, max_grad_norm: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the factors of a user's rule, and which of them must not be used, without reading a value.

    The rule works on copies, so that it changes nothing that is looked at afterwards, and is called once more for
    each half of the examples: a factor that depends on other examples would be another. (By one half alone, what
    depends on the largest norm, or the first one, would show only where that lies in the other half.)

    Args:
        rule: The clipping rule.
        norms: [B], upper bounds of the true norms.
        lowered: What the rule is told for C: less by what rounding may hide.
        max_grad_norm: C.

    Returns:
        Factors [B], 0 where a norm is not finite, at which no example contributes more than ``lowered``; and bool [B],
        true where the rule's own factor is no number, below 0, lets the example contribute more than C, or depends on
        the other examples.

    Raises:
        ValueError: the rule does not return one real number for each norm.
    """

    def asked(of: Tensor) -> Tensor:
        factors = rule(of.clone(), lowered.clone() if isinstance(lowered, Tensor) else lowered)  # type: ignore[arg-type]
        if not isinstance(factors, Tensor) or factors.shape != of.shape or factors.is_complex():
            got = f"{factors.dtype} {list(factors.shape)}" if isinstance(factors, Tensor) else type(factors).__name__
            raise ValueError(
                f"The clipping rule {_name(rule)} returned {got} for norms {list(of.shape)}; it must return a tensor "
                "of real numbers, one factor for each norm, for instance (max_grad_norm / norms).clamp(max=1)."
            )
        return factors.to(of.dtype)

    factors = asked(norms)
    finite = norms < torch.inf
    # Infinity is not within the limit, and infinity times a norm of zero is no number.
    fine = (factors >= 0.0).logical_and_(factors * norms <= max_grad_norm * (1.0 + RULE_TOLERANCE))
    if (half := len(norms) // 2) > 0:
        few = torch.cat([asked(norms[:half]), asked(norms[half:])])
        fine &= (few - factors).abs() <= MIXING_TOLERANCE * factors
    most = lowered / (norms + HIDDEN_NORM)
    return torch.where(finite, torch.minimum(factors, most), 0.0), finite & ~fine


def refuse_factor(rule: Factors, norms: Tensor, i: int, lowered: float, max_grad_norm: float) -> NoReturn:
    """Refuse a rule for what it gives example ``i`` of ``norms``; see :func:`factors_of_own_rule`.

    Raises:
        PrivacyError: always.
    """
    norm, factor = float(norms[i]), float(rule(norms.clone(), lowered)[i])
    who = f"The clipping rule {_name(rule)} returned the factor {factor:.6g} for an example whose gradient has the norm"
    remedy = "Return for instance (max_grad_norm / norms).clamp(max=1). Nothing of the batch was released."
    if 0.0 <= factor < float("inf") and factor * norm <= max_grad_norm * (1.0 + RULE_TOLERANCE):
        raise PrivacyError(
            f"{who} {norm:.6g}, and another one when it was asked again with fewer examples beside it: a factor must "
            "depend on its own example's norm and on max_grad_norm alone, not on the other examples, nor on what the "
            "rule has counted or remembered, or one example moves the contributions of all. To change the clipping "
            f"over time set optimizer.max_grad_norm between steps. {remedy}"
        )
    raise PrivacyError(
        f"{who} {norm:.6g}; a factor must be a number from 0 to max_grad_norm / norm, here {max_grad_norm:.6g} / "
        f"{norm:.6g}, or the noise does not hide the example. {remedy}"
    )


def _name(rule: Factors) -> str:
    return getattr(rule, "__name__", type(rule).__name__)


SMALLEST_MAX_GRAD_NORM = 1e-8
"""Below this C the loss of a squared norm in float32 could exceed the margin. That loss, where numbers below 1e-38
lose their digits, is up to 1e-24 where an example
is not left to float64: 1e-8 of the square of this bound, far inside the margin. Beside a smaller one it is not."""


LARGEST_SHARE = 1e-8
"""Of the largest number that the sums can hold, what a bound may be: a hundred million examples may be added up."""
NOISE_SHARE = 1 / 32
"""Of the largest number that a parameter can hold, what the noise's standard deviation may be: normals are below 18."""


def check_max_grad_norm(max_grad_norm: Any, dtype: torch.dtype = torch.float64) -> float:
    """Return the clip norm as a float.

    Args:
        max_grad_norm: C, as the user passed it.
        dtype: What the sums are added up in.

    Raises:
        ValueError: it is not finite, below :data:`SMALLEST_MAX_GRAD_NORM`, or so large that sums would be infinite.
    """
    try:
        value = float(max_grad_norm)
    except (TypeError, ValueError, OverflowError):
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
    largest = torch.finfo(dtype).max * LARGEST_SHARE
    if value > largest:
        raise ValueError(
            f"max_grad_norm is {max_grad_norm!r}; it must be at most {largest:.1g}, because sums are added up in "
            f"{dtype}, which holds numbers up to {torch.finfo(dtype).max:.1g}. To clip nothing, pass 1e30."
        )
    return value


def largest_max_grad_norm(noise_multiplier: float, sums: torch.dtype, parameters: torch.dtype) -> float:
    """Return the largest C that :func:`check_max_grad_norm` and :func:`check_noise` let pass, but for rounding.

    Args:
        noise_multiplier: σ.
        sums: What the sums are added up in.
        parameters: What the narrowest parameter is kept in.
    """
    bound = torch.finfo(sums).max * LARGEST_SHARE
    if noise_multiplier > 0.0:
        bound = min(bound, torch.finfo(parameters).max * NOISE_SHARE / noise_multiplier)
    return bound * (1.0 - 1e-9)


def check_noise(noise_multiplier: float, sensitivity: float, std: float, dtype: torch.dtype) -> None:
    """Refuse noise that a parameter cannot hold: its gradient would be infinite, and the weights not numbers.

    Args:
        noise_multiplier: σ.
        sensitivity: C, or the L2 norm of several bounds.
        std: The standard deviation of the noise that is released.
        dtype: The parameters', the narrowest of them.

    Raises:
        ValueError: ``std`` is no number or too large.
    """
    largest = torch.finfo(dtype).max
    if not std <= largest * NOISE_SHARE:
        raise ValueError(
            f"noise_multiplier is {noise_multiplier:.6g} and max_grad_norm {sensitivity:.6g}, so that the noise has "
            f"the standard deviation {std:.6g}; it must be at most {largest * NOISE_SHARE:.2g}, because the parameters "
            f"are {dtype}, which holds numbers up to {largest:.2g}. Lower one of the two, or widen the parameters."
        )

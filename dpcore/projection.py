"""Approximate norms by random projections (Bu et al. 2021): an option for comparison, never the default.

A directional derivative of all B losses along one random direction r costs one forward-mode pass and yields <g_i, r>
for every example. With k standard normal directions, Σ_j <g_i, r_j>² is |g_i|² times a chi-squared variable of k
degrees, so

    bound_i = sqrt(Σ_j <g_i, r_j>² / quantile)

with the chi-squared quantile of the failure probability η lies below |g_i| with probability η exactly. Clipping by the
bound instead of the norm keeps an example's contribution within C but for that probability.

Why that is sound. The directions are drawn afresh in every step and independently of the data and of all that was
released, so the two neighbouring runs may be compared under the same ones; all shared examples then contribute the
same, and only the one example that differs can break the bound, when it is drawn (probability q) and its own estimate
is too small (probability η). All steps together: F = Σ q η, charged by ``IAccountant.add_failure_probability``, which
costs e^ε F of delta. An estimate that is unbiased instead of upper-biased would fail for every second example, and is
not offered. Everything is computed in float64, and 1e-6 of C is kept for its rounding.

Beside the exact engine it has nothing to offer: k forward-mode passes instead of one backward pass, and a bound that is
too large by sqrt(k / quantile), so that gradients are clipped harder than needed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import scipy
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from dpcore.clipping import bound_with_margin, check_max_grad_norm, clip_factors
from dpcore.engine.engine import ClippedSum
from dpcore.errors import PrivacyError
from dpcore.validators import ModuleValidator

ROUNDING = 2e-6
"""Share of a squared norm that float64 is taken to hide: derivatives that go forward and back through any model have
no bound of their own. An assumption, with room for errors of a millionth."""


@dataclass(frozen=True)
class JohnsonLindenstrauss:
    """``dimensions`` random directions, and the chance that a norm's bound is too small.

    ``failure_probability`` is that chance per example and step.
    """

    dimensions: int
    failure_probability: float

    def __post_init__(self) -> None:
        if self.dimensions < 1:
            raise ValueError(f"dimensions is {self.dimensions}; it must be at least 1.")
        if not 0.0 < self.failure_probability < 1.0:
            raise ValueError(
                f"failure_probability is {self.failure_probability}; it must lie in (0, 1), and far below delta: "
                "its sum over all steps is added to delta. For none at all use the exact engine."
            )

    @property
    def quantile(self) -> float:
        """The chi-squared value that is undercut with ``failure_probability``."""
        return float(scipy.stats.chi2.ppf(self.failure_probability, self.dimensions))

    @property
    def inflation(self) -> float:
        """Return the factor by which the bound typically exceeds the norm: sqrt(dimensions / quantile)."""
        return math.sqrt(self.dimensions / self.quantile)


def projected_clipped_sum(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    max_grad_norm: float,
    approximate_norms: JohnsonLindenstrauss,
) -> ClippedSum:
    """Compute Σ_i min(1, C / bound_i) g_i in float64, with bounds of the norms by random projections.

    ``sensitivity`` of the result holds but for ``approximate_norms.failure_probability``: call
    ``accountant.add_failure_probability(sample_rate * failure_probability)`` once a step.

    Args:
        model: The module; its parameters with ``requires_grad`` have gradients.
        loss_fn: ``loss_fn(model(x), y)`` returns one loss per example, [B].
        x: Inputs [B, ...].
        y: Targets.
        max_grad_norm: C.
        approximate_norms: How many directions, and how often a bound may be too small.

    Returns:
        The sums; ``norms`` are the bounds.

    Raises:
        UnsupportedError: a layer mixes examples. A layer without a forward-mode derivative raises torch's own error.
        PrivacyError: the loss is no [B], or another example's loss changes with the first example.
    """
    ModuleValidator.validate(model, strict=True)
    check_max_grad_norm(max_grad_norm)
    values = {name: p.detach().double() for name, p in model.named_parameters()}
    buffers = {name: b.double() if b.is_floating_point() else b for name, b in model.named_buffers()}
    trained = {name: values.pop(name) for name, p in model.named_parameters() if p.requires_grad}
    x = x.double() if x.is_floating_point() else x
    batch_size = len(x)
    if not batch_size:
        empty = torch.zeros(0, dtype=torch.float64, device=x.device)
        return ClippedSum({n: torch.zeros_like(p) for n, p in trained.items()}, empty, empty, empty, max_grad_norm)

    # Dropout must be the same in every pass, or the derivatives would be of different functions.
    dropout_seed = secrets.randbits(62)

    def losses_at(parameters: dict[str, Tensor], x: Tensor, y: Tensor = y) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(dropout_seed)
            losses = loss_fn(functional_call(model, {**values, **buffers, **parameters}, (x,)), y)
        if losses.shape != (batch_size,):
            raise PrivacyError(
                f"The loss has shape {tuple(losses.shape)} for {batch_size} examples; it must be one loss per example, "
                'so use reduction="none".'
            )
        return losses

    with torch.no_grad():
        _check_apart(lambda x, y: losses_at(trained, x, y), x, y)
    # Known to nobody who chose the data: from the operating system, not from torch's public seed.
    generator = torch.Generator(x.device).manual_seed(secrets.randbits(63))
    squares = torch.zeros(batch_size, dtype=torch.float64, device=x.device)
    for _ in range(approximate_norms.dimensions):
        direction = {
            name: torch.randn(p.shape, dtype=p.dtype, device=p.device, generator=generator)
            for name, p in trained.items()
        }
        squares += jvp(lambda parameters: losses_at(parameters, x), (trained,), (direction,))[1].detach().square()
    bounds = (squares / approximate_norms.quantile).sqrt()
    factors = clip_factors(bounds, bound_with_margin(max_grad_norm, ROUNDING, torch.float64))
    leaves = {name: p.requires_grad_() for name, p in trained.items()}
    # A factor of 0 would still let a NaN through, so a refused example's input is replaced.
    refused = (factors == 0).view(-1, *[1] * (x.dim() - 1))
    losses = losses_at(leaves, torch.where(refused, torch.zeros_like(x), x))
    grads = torch.autograd.grad(losses @ factors, list(leaves.values()), allow_unused=True)
    if not all(bool(g.isfinite().all()) for g in grads if g is not None):
        raise PrivacyError(
            "An example's gradient is not finite whatever its input (its target?), and would show in every weight; "
            "remove it, or use the exact engine."
        )
    sums = {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(leaves.items(), grads, strict=True)}
    return ClippedSum(sums, bounds, factors, torch.where(factors > 0, losses.detach(), torch.nan), max_grad_norm)


def _check_apart(losses: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    """PrivacyError where the others' losses change when the second example takes the first one's place.

    One experiment where the exact engine makes several: it is for those who compare methods.
    """
    if len(x) < 2:
        return
    places = torch.arange(len(x), device=x.device)
    places[0] = 1
    before, after = losses(x, y)[1:], losses(x[places], y[places.to(y.device)])[1:]
    if not torch.allclose(before, after, rtol=1e-9, atol=1e-12, equal_nan=True):
        raise PrivacyError(
            "The first example changes the losses of others (a mean over the batch, say), so clipping its gradient "
            "does not bound its influence. Use layers and a loss that treat examples apart."
        )

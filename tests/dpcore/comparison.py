"""Comparing an engine's clipped sum with the float64 truth."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpcore import ClippedSum, reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def odd_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """[B] from outputs [B, ...] and y [B]: neither quadratic nor zero at zero, so that a zero row has a gradient."""
    flat = outputs.flatten(1)
    weights = torch.linspace(-1.0, 1.3, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return ((flat + 0.3).sin() * weights).sum(1) + (flat * 0.7).exp().mean(1) * (1.0 + y)


def relative_error(sums: Any, truth: Any) -> float:
    """L2 error of named tensors over all of them together, relative to the truth."""
    assert set(sums) == set(truth)
    error = sum(float((sums[n].double() - truth[n].double()).square().sum()) for n in truth)
    size = sum(float(truth[n].double().square().sum()) for n in truth)
    return (error / size) ** 0.5 if size else error**0.5


def check(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    clip: Callable[..., ClippedSum],
    loss_fn: Callable[[Any, Tensor], Tensor] = odd_loss,
) -> None:
    """The clipped sums of ``clip(model, loss_fn, x, y, C)`` for C clipping all, some and none of the examples."""
    norms = reference.clipped_sum(copy.deepcopy(model), loss_fn, x, y, 1.0).norms
    dtype = next(model.parameters()).dtype
    for bound in {float(norms.min()) * 0.5, float(norms.median()), float(norms.max()) * 2.0}:
        truth = reference.clipped_sum(copy.deepcopy(model), loss_fn, x, y, bound)
        result = clip(model, loss_fn, x, y, bound)
        assert relative_error(result.sums, truth.clipped) < TOLERANCE[dtype]
        torch.testing.assert_close(result.norms.double(), norms, rtol=TOLERANCE[dtype], atol=0)
        assert result.sensitivity == bound

"""Tell whether a loss was summed over the batch or averaged, from its gradient where that shows it."""

from __future__ import annotations

import torch
from torch import Tensor

SEEN = 1e-2
"""Gradients below this say nothing: those of a summed and of an averaged loss would be hard to tell apart."""
TOLERANCE = 1e-3
MOST = 1e4
"""Batches that a loop accumulates."""


@torch.no_grad()
def reduction_of(outputs: Tensor, gradient: Tensor) -> str | None:
    """Return "sum" or "mean" where the loss is a cross-entropy of logits, and None of any other loss.

    A summed cross-entropy has the gradient p - y, with p the softmax (or the sigmoid) of the outputs and y of zeros and
    ones; an averaged one has that divided by the number of losses. No other loss is mistaken for one of the two.

    Args:
        outputs: [B, classes] or [B], what the loss was given.
        gradient: The loss's gradient at ``outputs``.
    """
    if outputs.dim() not in (1, 2) or len(outputs) < 2 or not outputs.is_floating_point():
        return None
    logits, gradient = outputs.double(), gradient.double()
    for probabilities in (logits.sigmoid(), logits.softmax(1) if logits.dim() == 2 else None):
        if probabilities is None:
            continue
        losses = _losses(gradient)
        for reduction, count in (("sum", 1), ("mean", losses)):
            targets = probabilities - count * gradient
            certain = (count * gradient).abs() > SEEN
            near = torch.minimum(targets.abs(), (targets - 1).abs()) < TOLERANCE
            if bool(near.all()) and bool(certain.any()):
                return reduction
    return None


@torch.no_grad()
def divided_by(outputs: Tensor, gradient: Tensor, reduction: str) -> int:
    """Return by how much a reduced cross-entropy of logits was divided once more; 1 for any other loss.

    Where no target is, a gradient is a probability over the divisors.

    Args:
        outputs: [B, classes] or [B], what the loss was given.
        gradient: The loss's gradient at ``outputs``.
        reduction: The reduction before that division, "sum" or "mean".
    """
    if outputs.dim() not in (1, 2) or not outputs.is_floating_point():
        return 1
    logits, gradient = outputs.double(), gradient.double()
    beside = gradient > 0.0
    for probabilities in (logits.sigmoid(), logits.softmax(-1)):
        divisor = float(probabilities[beside].sum() / gradient[beside].sum())
        divisor /= _losses(gradient) if reduction == "mean" else 1
        if 1.5 < divisor < MOST and reduction_of(logits, gradient * round(divisor)) == reduction:
            return round(divisor)
    return 1


def _losses(gradient: Tensor) -> int:
    """How many losses were added up: one for each example of a softmax, one for each number otherwise."""
    return len(gradient) if gradient.dim() == 2 and _rows_cancel(gradient) else gradient.numel()


def _rows_cancel(gradient: Tensor) -> bool:
    """Return whether every row adds up to nothing, as the gradient of a softmax does."""
    return bool((gradient.sum(1).abs() <= 1e-4 * gradient.abs().sum(1)).all())

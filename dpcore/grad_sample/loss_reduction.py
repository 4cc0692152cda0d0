"""Tell whether a loss was summed over the batch or averaged, from its gradient where that shows it."""

from __future__ import annotations

import torch
from torch import Tensor

SEEN = 1e-2
"""Gradients below this say nothing: those of a summed and of an averaged loss would be hard to tell apart."""
TOLERANCE = 1e-3


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
        losses = len(outputs) if probabilities.shape[1:] != () and _rows_cancel(gradient) else gradient.numel()
        for reduction, count in (("sum", 1), ("mean", losses)):
            targets = probabilities - count * gradient
            certain = (count * gradient).abs() > SEEN
            near = torch.minimum(targets.abs(), (targets - 1).abs()) < TOLERANCE
            if bool(near.all()) and bool(certain.any()):
                return reduction
    return None


def _rows_cancel(gradient: Tensor) -> bool:
    """Return whether every row adds up to nothing, as the gradient of a softmax does."""
    return bool((gradient.sum(1).abs() <= 1e-4 * gradient.abs().sum(1)).all())

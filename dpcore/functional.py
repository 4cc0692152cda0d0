"""The functional core: the clipped sum of per-example gradients, without optimiser, loader or accountant."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dpcore.engine.batch_sums import ClippedSum, LossFn
from dpcore.engine.engine import Engine


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    max_grad_norm: float,
    *,
    mask: Tensor | None = None,
    physical_batch_size: int | None = None,
) -> ClippedSum:
    """Compute Σ_i min(1, C/|g_i|) g_i over a batch, by one forward and one backward pass per physical micro-batch.

    The model's parameters and their ``grad`` are not touched. For many batches build a :class:`dpcore.Engine` once.

    Args:
        model: The module; its parameters with ``requires_grad`` have gradients.
        loss_fn: ``loss_fn(model(x), y)`` returns one loss per example, [B].
        x: Inputs: a tensor [B, ...], a tuple (positional) or a dict (keyword arguments) of them.
        y: Targets, likewise.
        max_grad_norm: C, the L2 bound to which each example's gradient is clipped.
        mask: Bool [B]; examples whose entry is False contribute nothing.
        physical_batch_size: Examples per forward pass; None chooses by sizes and memory.

    Returns:
        The sums with norms, factors, losses and their ``sensitivity``.

    Raises:
        UnsupportedError: a gradient cannot be told apart by example.
        PrivacyError: model or loss mix examples, or the loss is no [B].
    """
    engine = Engine(model, loss_fn, max_grad_norm=max_grad_norm, physical_batch_size=physical_batch_size)
    return engine.clipped_sum(x, y, mask)

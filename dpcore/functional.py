"""The functional core: the clipped sum of per-example gradients, without optimiser, loader or accountant."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dpcore.engine.engine import ClippedSum, Engine, LossFn


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
    """Σ_i min(1, C/|g_i|) g_i over the batch, by one forward and one backward pass per physical micro-batch.

    x: a tensor [B, ...], or a tuple (positional) or dict (keyword) of them; ``loss_fn(model(x), y)`` -> [B]. The result
    knows its ``sensitivity``. The model's parameters and their ``grad`` are not touched. For many batches build an
    :class:`dpcore.Engine` once.
    """
    engine = Engine(model, loss_fn, max_grad_norm=max_grad_norm, physical_batch_size=physical_batch_size)
    return engine.clipped_sum(x, y, mask)

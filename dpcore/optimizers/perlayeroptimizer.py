"""Clipping parameter by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from dpcore.optimizers.optimizer import DPOptimizer


class DPPerLayerOptimizer(DPOptimizer):
    """:class:`DPOptimizer` with one bound per trained parameter, in the optimiser's order; noise σ·√(Σ C²)."""

    def __init__(self, optimizer: Optimizer, *, max_grad_norm: Sequence[float], **options: Any) -> None:
        if not isinstance(max_grad_norm, Sequence):
            raise ValueError(
                f"max_grad_norm is {max_grad_norm}; per-layer clipping takes a list, one bound per trained parameter."
            )
        super().__init__(optimizer, max_grad_norm=list(max_grad_norm), **options)

    @property
    def max_grad_norms(self) -> list[float]:
        """The bounds, in the module's order."""
        return list(self.accumulator.bounds)

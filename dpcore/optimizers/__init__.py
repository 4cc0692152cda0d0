"""Optimisers that clip, add noise and step."""

from __future__ import annotations

from dpcore.optimizers.adaclipoptimizer import AdaClipDPOptimizer
from dpcore.optimizers.optimizer import DPOptimizer
from dpcore.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from dpcore.optimizers.perlayeroptimizer import DPPerLayerOptimizer

__all__ = [
    "AdaClipDPOptimizer",
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "get_optimizer_class",
]


def get_optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str | None = None) -> type[DPOptimizer]:
    """The optimiser for a way of clipping; the same in all modes, and for one process or several."""
    if clipping == "per_layer":
        return DPPerLayerOptimizer
    if clipping == "adaptive":
        return AdaClipDPOptimizer
    if clipping in ("flat", "automatic"):
        return DPOptimizerFastGradientClipping if grad_sample_mode == "ghost" else DPOptimizer
    raise ValueError(f"There is no clipping {clipping!r}; there are flat, per_layer, adaptive and automatic.")

"""Optimisers that clip, add noise and step."""

from dpcore.optimizers.optimizer import DPOptimizer

__all__ = ["DPOptimizer"]

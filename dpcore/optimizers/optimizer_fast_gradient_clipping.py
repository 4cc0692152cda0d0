"""A class under Opacus' path."""

from dpcore.optimizers.compat import DPOptimizerFastGradientClipping

__all__ = ["DPOptimizerFastGradientClipping"]

"""A class under Opacus' path."""

from dpcore.grad_sample.compat import GradSampleModuleExpandedWeights

__all__ = ["GradSampleModuleExpandedWeights"]

"""Classes under Opacus' path."""

from dpcore.grad_sample.grad_sample_module import AbstractGradSampleModule
from dpcore.grad_sample.hooks import AbstractGradSampleHooks

__all__ = ["AbstractGradSampleHooks", "AbstractGradSampleModule"]

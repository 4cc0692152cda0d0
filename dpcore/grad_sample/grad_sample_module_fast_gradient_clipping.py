"""Classes under Opacus' path."""

from dpcore.grad_sample.compat import GradSampleHooksFastGradientClipping, GradSampleModuleFastGradientClipping

__all__ = ["GradSampleHooksFastGradientClipping", "GradSampleModuleFastGradientClipping"]

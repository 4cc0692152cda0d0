"""Classes under Opacus' path."""

from dpcore.grad_sample.grad_sample_module import GradSampleModuleNoOp
from dpcore.grad_sample.hooks import GradSampleHooksNoOp

__all__ = ["GradSampleHooksNoOp", "GradSampleModuleNoOp"]

"""The engine: one backward pass, and per-layer rules that turn what it leaves behind into clipped sums."""

from dpcore.grad_sample.grad_sample_module import (
    AbstractGradSampleModule,
    GradSampleModule,
    GradSampleModuleExpandedWeights,
    GradSampleModuleFastGradientClipping,
    GradSampleModuleNoOp,
)
from dpcore.grad_sample.hooks import (
    AbstractGradSampleHooks,
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleHooksNoOp,
)
from dpcore.grad_sample.samplers import register_grad_sampler, register_norm_sampler
from dpcore.grad_sample.utils import get_gsm_class, prepare_module, wrap_model

__all__ = [
    "AbstractGradSampleHooks",
    "AbstractGradSampleModule",
    "GradSampleHooks",
    "GradSampleHooksFastGradientClipping",
    "GradSampleHooksNoOp",
    "GradSampleModule",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleFastGradientClipping",
    "GradSampleModuleNoOp",
    "get_gsm_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]

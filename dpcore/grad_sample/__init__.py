"""Opacus' surface: wrappers and hooks that record a module's gradients by example."""

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
from dpcore.grad_sample.utils import get_gsm_class, prepare_module, wrap_model
from dpcore.rules.custom import register_grad_sampler, register_norm_sampler

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

"""Which class records the gradients in which mode."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpcore.errors import UnsupportedError
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
from dpcore.rules.custom import register_grad_sampler, register_norm_sampler

__all__ = [
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]

DEFAULT_MODE = "bookkeeping"
"""The mode of one backward pass and nothing else: no ordinary gradients, per-sample gradients only where read."""

_WRAPPERS: dict[str, type[AbstractGradSampleModule]] = {
    DEFAULT_MODE: GradSampleModule,
    "hooks": GradSampleModule,
    "functorch": GradSampleModule,
    "ew": GradSampleModuleExpandedWeights,
    "ghost": GradSampleModuleFastGradientClipping,
    "no_op": GradSampleModuleNoOp,
}
_HOOKS: dict[str, type[AbstractGradSampleHooks]] = {
    DEFAULT_MODE: GradSampleHooks,
    "hooks": GradSampleHooks,
    "functorch": GradSampleHooks,
    "ew": GradSampleHooks,
    "ghost": GradSampleHooksFastGradientClipping,
    "no_op": GradSampleHooksNoOp,
}


def get_gsm_class(grad_sample_mode: str) -> type[AbstractGradSampleModule]:
    """The wrapper's class; UnsupportedError for a mode that there is none of."""
    return _WRAPPERS[_check(grad_sample_mode)]


def get_hooks_class(grad_sample_mode: str) -> type[AbstractGradSampleHooks]:
    """The class that records without a wrapper; UnsupportedError for a mode that there is none of."""
    return _HOOKS[_check(grad_sample_mode)]


def prepare_module(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, **kwargs: Any
) -> AbstractGradSampleHooks:
    """``model`` recorded in that mode: in a wrapper, or where it is."""
    if grad_sample_mode == DEFAULT_MODE:
        kwargs["ordinary_grad"] = False
    kind: Any = get_gsm_class(grad_sample_mode) if wrap_model else get_hooks_class(grad_sample_mode)
    return kind(model, **kwargs)


def wrap_model(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, **kwargs: Any
) -> AbstractGradSampleHooks:
    """:func:`prepare_module` under its older name."""
    return prepare_module(model, grad_sample_mode, wrap_model, **kwargs)


def _check(grad_sample_mode: str) -> str:
    if grad_sample_mode not in _WRAPPERS:
        raise UnsupportedError(f"There is no grad_sample_mode {grad_sample_mode!r}; there are {', '.join(_WRAPPERS)}.")
    return grad_sample_mode

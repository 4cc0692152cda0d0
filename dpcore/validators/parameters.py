"""Trained parameters whose gradients cannot be recorded: they do not exist yet, are hidden, or have hooks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from dpcore.errors import UnsupportedError


def check_recordable(module: nn.Module) -> None:
    """UnsupportedError where a part of the module is lazy or scripted, or a trained parameter has a hook."""
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise UnsupportedError(
                f"Parameter {name} belongs to a lazy layer and has no shape yet; run the module once on a batch of "
                "public (or made-up) data first, and then build the optimizer."
            )
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(p.requires_grad for p in part.parameters()):
            raise UnsupportedError(
                f"{name or 'The module'} is scripted or traced by torch.jit, which hides the layers inside it from the "
                "recording of gradients by example; pass the module that it was made of."
            )
    check_hooks({name: p for name, p in module.named_parameters() if p.requires_grad})


def check_hooks(parameters: Mapping[str, Parameter]) -> None:
    """UnsupportedError where a hook is registered on one of these parameters: it would never be called."""
    for name, param in parameters.items():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                f"Parameter {name} has a gradient hook (register_hook or register_post_accumulate_grad_hook), which "
                "would never be called: autograd does not form the gradients of private parameters. Remove the hook; "
                "to mask or scale the private gradient, change p.grad in optimizer.register_step_pre_hook."
            )

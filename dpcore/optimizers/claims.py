"""Which optimizer takes the gradients of which module: each module's are taken once."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from dpcore.errors import PrivacyError
from dpcore.grad_sample.backward_pass import owner_of
from dpcore.grad_sample.hooks import AbstractGradSampleHooks

_PRIVATE: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""The private optimizers that live, the oldest first: hooks of torch's, which are the whole process's, look here."""


def private_optimizers() -> list[Any]:
    """Return all private optimizers that live."""
    return list(_PRIVATE)


def claim(optimizer: Any) -> None:
    """Note that a private optimizer takes its module's gradients; a second one would find none."""
    if any(other.module is optimizer.module for other in private_optimizers()):
        raise PrivacyError(
            "The module is private already and belongs to another DPOptimizer, which takes its gradients; a second "
            "one would release noise alone. Use that optimizer, or start from module.to_standard_module()."
        )
    _PRIVATE[optimizer] = None


def recorder_of(optimizer: Optimizer) -> AbstractGradSampleHooks:
    """Return the object that records the trained parameters of ``optimizer``."""
    owners = []
    for param in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        owner = owner_of(param)
        if not isinstance(owner, AbstractGradSampleHooks):
            raise PrivacyError(
                f"A trained parameter of shape {tuple(param.shape)} is not recorded by any GradSampleModule: it would "
                "be updated without clipping and noise. Wrap the module in GradSampleModule first and keep the "
                "wrapper; or call dpcore.grad_sample.GradSampleHooks(module), which records the module as it is and "
                "needs not be kept; or use PrivacyEngine.make_private."
            )
        if owner not in owners:
            owners.append(owner)
    if len(owners) != 1:
        raise PrivacyError(
            f"The optimizer's parameters belong to {len(owners)} GradSampleModules; an example must be clipped over "
            "all of its gradient at once. Wrap one module around them all."
        )
    return owners[0]

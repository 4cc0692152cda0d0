"""Which optimizer takes the gradients of which module: each module's are taken once, and by no other optimizer.

A loop may have several optimizers, of which one was made private. Where the ordinary gradient stays in ``p.grad`` (the
mode "hooks"), or came about by a pass that was not recorded, the others would apply it without clipping and noise.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpcore.errors import PrivacyError
from dpcore.grad_sample.backward_pass import owner_of
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.optimizers.checks import check_no_ordinary_gradient

_PRIVATE: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""The private optimizers that live, the oldest first: hooks of torch's, which are the whole process's, look here."""

_CLAIMED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Recorders that had a private optimizer, whether it lives or not."""


def private_optimizers() -> list[Any]:
    """Return all private optimizers that live."""
    return list(_PRIVATE)


def claim(optimizer: Any) -> None:
    """Note that a private optimizer takes its module's gradients, and hears of passes; a second one would find none."""
    if any(other.module is optimizer.module for other in private_optimizers()):
        raise PrivacyError(
            "The module is private already and belongs to another DPOptimizer, which takes its gradients; a second "
            "one would release noise alone. Use that optimizer, or start from module.to_standard_module()."
        )
    optimizer.module.tell_passes(optimizer._keep_start)
    _PRIVATE[optimizer] = None
    _CLAIMED.add(optimizer.module)


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


@functools.cache
def refuse_foreign_steps() -> None:
    """Look at every step of torch's optimizers from now on; see docs/patches.md."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _check(optimizer))


def _check(optimizer: Any) -> None:
    """PrivacyError where a gradient that ``optimizer`` would apply is a private module's and was not released."""
    is_inner = False
    for private in private_optimizers():
        if private.original_optimizer is optimizer:
            is_inner = True
            continue  # which has a guard of its own
        if any(value is private for value in vars(optimizer).values()):
            # A wrapper of the user's (Lookahead, say) asks it to step, but may apply what it finds before or instead.
            check_no_ordinary_gradient(private)
            for param in private.accumulator.names:
                if not private.module.ordinary_gradients.is_released(param):
                    param.grad = None
        # One of the user's own class may hold the private one, and ask it to step.
        torchs = type(optimizer).__module__.startswith("torch.optim.")
        idle = torchs and private.module.calls and not private.logical_batch.is_stepping
        for group in optimizer.param_groups:
            for param in group["params"]:
                if private.logical_batch.is_stepping and param in private.accumulator.names:
                    continue  # released, and possibly changed since by the user's own optimizer, which holds this one
                if private.module.records(param) and not private.module.ordinary_gradients.is_released(param):
                    _refuse(optimizer, param)
                idle = idle and param.grad is None and private.module.records(param)
        if idle:
            raise PrivacyError(
                f"{type(optimizer).__name__}.step() would do nothing: its parameters are a private module's, whose "
                "gradients only the optimizer that make_private returned can apply. Call that one's step(), and give "
                "it all parameters of the module, in groups with settings of their own."
            )
    if not is_inner:
        _check_owners(optimizer)


def _check_owners(optimizer: Any) -> None:
    """PrivacyError where the private optimizer of what ``optimizer`` would change lives no more."""
    live = [private.module for private in private_optimizers()]
    torchs = type(optimizer).__module__.startswith("torch.optim.")
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        owner: Any = owner_of(param)
        if owner is None or owner not in _CLAIMED or any(owner is module for module in live):
            continue
        idle = torchs and owner.calls and param.grad is None
        if idle or not owner.ordinary_gradients.is_released(param):
            raise PrivacyError(
                f"{type(optimizer).__name__}.step() is asked to train parameters of a private module, whose own "
                "optimizer, which make_private returned, is gone (its name was given to this one, say): nothing "
                "would be clipped, or nothing trained. Keep that one and call its step(); to choose another kind of "
                "optimizer, give it to make_private."
            )


def _refuse(optimizer: Any, param: Any) -> NoReturn:
    raise PrivacyError(
        f"{type(optimizer).__name__}.step() would apply an ordinary gradient, without clipping and noise, to a "
        f"parameter of shape {tuple(param.shape)} of a private module: this optimizer is not the one that "
        "make_private returned. Give all parameters of the module to one optimizer, in groups with settings of "
        "their own, and make that one private. (To go on without privacy, train module.to_standard_module().)"
    )


def guard_inner(optimizer: Any) -> None:
    """Let the optimizer inside of a private one refuse to step on its own: its gradients would not be private."""
    register = getattr(optimizer.original_optimizer, "register_step_pre_hook", None)
    if register is None:
        return
    outer = weakref.ref(optimizer)

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        private = outer()
        if private is None or private.logical_batch.is_stepping:
            return
        if private._is_ready and all(map(private.module.ordinary_gradients.is_released, private.accumulator.names)):
            return  # by a subclass's step(), behind pre_step()
        if any(owner_of(p) is private.module for p in private.accumulator.names):
            raise PrivacyError(
                "step() was called on the optimizer inside the private one: it would apply gradients without "
                "clipping and noise, and the accountant would not know. Call step() on the optimizer that "
                "make_private returned; for training without privacy, call to_standard_module() first."
            )

    def conclude(optimizer: Any, args: Any, kwargs: Any) -> None:
        private = outer()
        if private is not None and not private.logical_batch.is_stepping:
            private._conclude()

    register(refuse)
    optimizer.original_optimizer.register_step_post_hook(conclude)

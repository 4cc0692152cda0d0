"""Refuse updates of a private module by optimizers that are not private.

A loop may have several optimizers, of which one was made private. Where the ordinary gradient stays in ``p.grad`` (the
mode "hooks"), or came about by a pass that was not recorded, the others would apply it without clipping and noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpcore.errors import PrivacyError

Privates = Callable[[], Iterable[Any]]
"""The private optimizers that there are."""


@functools.cache
def refuse_foreign_steps(privates: Privates) -> None:
    """Look at every step of torch's optimizers from now on; see docs/patches.md."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _check(optimizer, privates()))


def _check(optimizer: Any, privates: Iterable[Any]) -> None:
    """PrivacyError where a gradient that ``optimizer`` would apply is a private module's and was not released."""
    for private in privates:
        if private.original_optimizer is optimizer:
            continue  # which has a guard of its own
        if any(value is private for value in vars(optimizer).values()):
            # A wrapper of the user's (Lookahead, say) asks it to step, but may apply what it finds before or instead.
            private.withhold_ordinary_gradients()
        # One of the user's own class may hold the private one, and ask it to step.
        torchs = type(optimizer).__module__.startswith("torch.optim.")
        idle = torchs and private.module.has_recorded and not private.logical_batch.is_stepping
        for group in optimizer.param_groups:
            for param in group["params"]:
                if private.logical_batch.is_stepping and param in private.accumulator.names:
                    continue  # released, and possibly changed since by the user's own optimizer, which holds this one
                if private.module.records(param) and not private.module.is_released(param):
                    _refuse(optimizer, param)
                idle = idle and param.grad is None and private.module.records(param)
        if idle:
            raise PrivacyError(
                f"{type(optimizer).__name__}.step() would do nothing: its parameters are a private module's, whose "
                "gradients only the optimizer that make_private returned can apply. Call that one's step(), and give "
                "it all parameters of the module, in groups with settings of their own."
            )


def _refuse(optimizer: Any, param: Any) -> NoReturn:
    raise PrivacyError(
        f"{type(optimizer).__name__}.step() would apply an ordinary gradient, without clipping and noise, to a "
        f"parameter of shape {tuple(param.shape)} of a private module: this optimizer is not the one that "
        "make_private returned. Give all parameters of the module to one optimizer, in groups with settings of "
        "their own, and make that one private. (To go on without privacy, train module.to_standard_module().)"
    )

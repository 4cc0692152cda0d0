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
from dpcore.optimizers.wrapper import OptimizerWrapper

Privates = Callable[[], Iterable[Any]]
"""The private optimizers that there are."""


@functools.cache
def refuse_foreign_steps(privates: Privates) -> None:
    """Look at every step of torch's optimizers from now on; see docs/patches.md."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _check(optimizer, privates()))


def _check(optimizer: Any, privates: Iterable[Any]) -> None:
    """PrivacyError where a gradient that ``optimizer`` would apply is a private module's and was not released."""
    for private in privates:
        if private.original_optimizer is optimizer or _is_around(optimizer):
            return  # which has a guard of its own
        if private.logical_batch.is_stepping:
            continue  # by the user's own optimizer, which may hold others
        for group in optimizer.param_groups:
            for param in group["params"]:
                if private.module.records(param) and not private.module.is_released(param):
                    _refuse(optimizer, param)


def _refuse(optimizer: Any, param: Any) -> NoReturn:
    raise PrivacyError(
        f"{type(optimizer).__name__}.step() would apply an ordinary gradient, without clipping and noise, to a "
        f"parameter of shape {tuple(param.shape)} of a private module: this optimizer is not the one that "
        "make_private returned. Give all parameters of the module to one optimizer, in groups with settings of "
        "their own, and make that one private. (To go on without privacy, train module.to_standard_module().)"
    )


def _is_around(optimizer: Any) -> bool:
    """Return whether an optimizer of the user's holds a private one, which it will ask to step."""
    return any(isinstance(value, OptimizerWrapper) for value in (optimizer, *vars(optimizer).values()))

"""Schedules that a loop calls in every iteration wait while the pieces of a batch go on.

A loop that knows nothing of pieces calls ``scheduler.step()`` after every ``optimizer.step()``. A schedule that moved
at every piece would run ahead, and tell how many pieces there were, which depends on the private length of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpcore.errors import UnsupportedError
from dpcore.optimizers.claims import private_optimizers
from dpcore.optimizers.logical_batch import LogicalBatch
from dpcore.optimizers.wrapper import OptimizerWrapper


def follow(optimizer: Optimizer, batch: LogicalBatch) -> None:
    """Let schedules of ``optimizer``, and of all optimisers inside of it, wait for ``batch``.

    Args:
        optimizer: The private optimiser. Schedules may have been built on the original one before it was made private.
        batch: Says when they have to wait.
    """
    waiting: list[Any] = [optimizer]
    followed: set[int] = set()
    while waiting:
        found = waiting.pop()
        if not isinstance(found, Optimizer) or id(found) in followed:  # torch builds schedules on nothing else
            continue
        followed.add(id(found))
        batch.followed.add(found)
        if isinstance(found, OptimizerWrapper):
            waiting.append(found.inner)
        else:
            # A wrapper of the user's (Lookahead, say) holds the one that updates the same parameters.
            held = _parameters(found)
            waiting.extend(v for v in vars(found).values() if isinstance(v, Optimizer) and held & _parameters(v))


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def have_to_wait(optimizer: Any) -> bool:
    """Return whether schedules of ``optimizer`` stay where they are, because the batch at hand is not complete."""
    batch = _batch_of(optimizer)
    return batch is not None and batch.schedules_wait


@functools.cache
def watch_torch() -> None:
    """Make torch's schedules wait, from the first call on and in the whole process; see docs/patches.md.

    Many of them have a ``step`` of their own, as users' subclasses may, and an optimiser does not know its schedules;
    so ``step`` is looked at where it is looked up.
    """
    look_up = LRScheduler.__getattribute__

    def attribute(self: LRScheduler, name: str) -> Any:
        found = look_up(self, name)
        if name != "step":
            return found
        facts = look_up(self, "__dict__")
        return found if _batch_of(facts.get("optimizer")) is None else _waiting(self, facts, found)

    LRScheduler.__getattribute__ = attribute  # type: ignore[method-assign, assignment]


def _waiting(scheduler: LRScheduler, facts: dict[str, Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` of a schedule that does nothing while a batch goes on."""

    @functools.wraps(step)
    def wait_or_step(*args: Any, **kwargs: Any) -> Any:
        if _begins(facts) or not have_to_wait(facts["optimizer"]):
            return step(*args, **kwargs)
        if any(value is not None for value in (*args, *kwargs.values())):
            raise UnsupportedError(
                f"{type(scheduler).__name__}.step() was given a value within a batch that is handed out in pieces: a "
                "metric would be that of a piece, and a position would count pieces, whose number depends on the "
                "private length of the batch. Step it once per batch, with the batch's own value: if not "
                "optimizer.batch_goes_on: scheduler.step(value)."
            )
        return None

    return wait_or_step


def _begins(facts: dict[str, Any]) -> bool:
    """Return whether this is a schedule's first step, its constructor's, which sets the value to begin with.

    Not whether it has a last rate: a user's class whose ``step`` is all its own may never note one.
    """
    if hasattr(LRScheduler, "_is_initial"):
        return bool(facts.get("_is_initial"))
    # Older versions of torch: a step of a class's own (warm restarts') may leave the count at zero.
    return facts.get("_step_count") == 0 and "_last_lr" not in facts


def _batch_of(optimizer: Any) -> LogicalBatch | None:
    """Return the batch for which schedules of ``optimizer`` wait; None where it is not private, or not any more."""
    while isinstance(optimizer, Optimizer):
        for private in reversed(private_optimizers()):
            if optimizer in private.logical_batch.followed:
                return private.logical_batch  # type: ignore[no-any-return]
        optimizer = vars(optimizer).get("optimizer")  # of a wrapper that came later (accelerate's)
    return None

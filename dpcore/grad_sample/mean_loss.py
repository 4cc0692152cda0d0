"""Backward passes of losses of recorded passes: what they look at, and what they start with.

The loss of a user's own loop may mix examples, which :mod:`dpcore.example_isolation.loss` looks for. And the rounding
of a mean loss in half precision must not depend on the batch's length.

A mean loss divides every example's gradient by the batch's length, and half precision rounds what comes out: one
example more, and the gradients of all others are rounded otherwise, by up to 2^-8 of each in bfloat16. Of 2,048 equal
examples one that was left out moved the sum by 1.9 times its own gradient. So ``loss.backward()`` starts with the
length instead of 1 where that is right: the division is undone in float32 before anything is rounded, and the recorded
gradients are not multiplied any more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpcore.example_isolation.loss import WAITING, judge
from dpcore.tape.tape import PASS_OF, STARTED_WITH, Tape
from dpcore.tape.uses import HANDLERS

_installing = threading.Lock()
_rounded: set[bool] = set()
"""Not empty once a pass of this process was one that :func:`may_start_with_length`: before that no loss is walked."""


def may_start_with_length(tape: Tape) -> None:
    """Note that a loss of the pass may start its backward pass with the batch's length."""
    tape.may_start_with_length = True
    _rounded.add(True)


def lengths_behind(loss: Tensor) -> set[int] | None:
    """Return the lengths of the batches of the passes that ``loss`` is computed from.

    None where a pass may not start with its length, and where the loss depends on anything else that gets a gradient:
    a parameter of the loss, inputs, a tensor that the module takes from elsewhere. Its gradient would be too large.
    """
    lengths: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():  # of a reentrant checkpoint, behind which parameters do not show
            return None
        behind = [following for following, _ in node.next_functions if following is not None]
        waiting += behind
        if not behind:
            leaf = getattr(node, "variable", None)
            tape = PASS_OF[leaf]() if leaf in PASS_OF else None
            if tape is None or not tape.may_start_with_length:
                return None
            lengths.add(tape.batch_size)
    return lengths


def _backward(original: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """``torch.autograd.backward`` that looks at a loss first, and starts a mean loss with the length of its batch."""
    loss = tensors
    if WAITING:
        judge(loss, grad_tensors)
    if (
        not _rounded
        or not isinstance(loss, Tensor)
        or loss.grad_fn is None
        or loss.numel() != 1
        or loss.dtype not in (torch.float32, torch.float64)
        or grad_tensors is not None
        or len(args) > 2  # behind retain_graph and create_graph
        or kwargs.get("inputs") is not None
        or kwargs.get("grad_variables") is not None
    ):
        original(tensors, grad_tensors, *args, **kwargs)
        return
    lengths = lengths_behind(loss) or {0}
    length = float(lengths.pop())
    if lengths or not length:  # a loss over batches of several lengths is refused behind it
        original(tensors, grad_tensors, *args, **kwargs)
        return
    tasks: list[int] = []

    def note(gradient: Tensor) -> None:
        tasks.append(torch._C._current_graph_task_id())
        STARTED_WITH[tasks[-1]] = length

    hook = loss.register_hook(note)
    try:
        original(tensors, torch.full_like(loss, length), *args, **kwargs)
    finally:
        hook.remove()
        for task in tasks:
            STARTED_WITH.pop(task, None)


def install() -> None:
    """Put :func:`_backward` in the place of ``torch.autograd.backward``, once; it hands on what is no such loss."""
    with _installing:
        current = torch.autograd.backward
        if getattr(current, "of_mean_losses", False):
            return
        replaced = functools.wraps(current)(functools.partial(_backward, current))
        replaced.of_mean_losses = True  # type: ignore[attr-defined]
        HANDLERS[replaced] = HANDLERS[current]  # what a pass refuses is refused under this name, too
        torch.autograd.backward = replaced  # type: ignore[assignment]

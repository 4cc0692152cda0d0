"""Backward passes of our own through a tape: they fill in the gradients of its uses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import NoRuleError
from dpcore.tape.edges import no_gradients_left
from dpcore.tape.tape import Tape


def backward(tape: Tape, losses: Tensor, weights: Tensor) -> None:
    """Fills in every use's gradient from per-example ``losses`` [B], weighted by ``weights`` [B].

    The trained parameters themselves are asked for too: one that turns up was used in a way no rule has seen.
    """
    if not losses.requires_grad:
        tape.edges.clear()
        return
    with no_gradients_left(tape.parameters):
        grads, raw = tape.edges.gradients(losses, weights, [*tape.parameters], guarded=True)
    for param in raw:
        refuse_raw(tape, param)
    tape.edges.hand_on(grads)


def pull(
    tape: Tape, outputs: Sequence[Tensor], weights: Sequence[Tensor], keep: bool, guarded: bool = False
) -> dict[Parameter, Tensor]:
    """Fills in every use's gradient from any ``outputs`` with ``weights`` of their shapes; ``keep``: the graph.

    ``guarded``: whether a gradient that reaches a guard is an error.

    Returns the gradients that came to parameters themselves, by operations that no rule has seen.
    """
    if not outputs or not tape.attached:
        return {}
    tape.edges.clear()  # what an earlier call left need not wait for its successor
    tape.forget()
    params = [param for param in tape.parameters if param.requires_grad]
    keep = keep or bool(tape.sources.stands)  # which go through what was computed from parameters once more
    with no_gradients_left(tape.parameters):
        grads, raw = tape.edges.gradients(outputs, weights, params, guarded=guarded, keep=keep)
    tape.edges.hand_on(grads)
    return raw


def refuse_raw(tape: Tape, param: Parameter) -> None:
    """NoRuleError about a parameter that received an ordinary gradient."""
    raise NoRuleError(
        f"Parameter {tape.parameters[param]} is used by an operation that dpcore has no rule for; wrap that "
        f"operation "
        "in a module of its own, or freeze the parameter with requires_grad_(False).",
        (param,),
    )

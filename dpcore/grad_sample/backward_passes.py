"""The backward passes that reach recorded calls of a module, and the batches that they make of them."""

from __future__ import annotations

import functools
import math

import torch

from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.example_isolation.loss import LossCheck
from dpcore.grad_sample.backward_pass import Iteration
from dpcore.grad_sample.ordinary_gradients import OrdinaryGradients
from dpcore.grad_sample.waiting import WaitingBatches
from dpcore.tape.tape import Tape, started_with


class BackwardPasses:
    """Makes a waiting batch of all recorded calls that a backward pass reaches.

    ``ordinary``: forms ordinary gradients, None where nobody asked for them. ``group``: rows of an example.
    """

    def __init__(
        self,
        loss_reduction: str,
        losses: LossCheck,
        waiting: WaitingBatches,
        ordinary: OrdinaryGradients | None,
        group: int,
    ) -> None:
        self.accumulation_allowed = True
        """Whether a second backward pass may come before the step."""
        self.loss_divided_by = 1
        """Divisor of the first loss beside its mean."""
        self._loss_reduction = loss_reduction
        self._losses = losses
        self._waiting = waiting
        self._ordinary = ordinary
        self._group = group
        self._reached: dict[int, list[Tape]] = {}
        """Tapes, by the backward pass under way that has reached them. A pass that failed stays here."""
        self._reduction_seen = False
        """Whether a loss was looked at."""
        self._rounding_told = False
        """Whether a warning said that a mean loss is rounded after its division."""

    def reach(self, tape: Tape) -> None:
        """Note that a backward pass has reached ``tape``; all that it reaches are one gradient per example."""
        task = torch._C._current_graph_task_id()
        if any(tape in tapes for other, tapes in self._reached.items() if other != task):
            raise PrivacyError(
                "A backward pass went through a graph in which another one had failed or is still under way (a hook "
                "that calls torch.autograd.grad, say): the gradients of both would be added up. Run the forward pass "
                "again, and take no gradients within a backward pass."
            )
        if self._losses.divided is not None and not self._reduction_seen:
            self._see_reduction(*self._losses.divided)
        if task not in self._reached:
            self._reached[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end, task))
        self._reached[task].append(tape)
        divided = self._loss_reduction == "mean" and started_with() == 1.0 < tape.batch_size
        if divided and tape.rounds and not self._rounding_told:
            self._rounding_told = True
            warn_caller(
                "The loss is divided by the batch's length before its gradient is rounded to half precision, so one "
                "example more or less changes the rounding of all others (docs/privacy.md). Compute it in float32 "
                "and from the module's outputs alone, and call its backward(); or sum the loss and pass "
                'loss_reduction="sum".'
            )

    def check_latest(self, tape: Tape, calls: int) -> None:
        """Refuse to run a checkpointed function of ``tape`` again after one of ``calls`` calls with another batch.

        What the module has kept of that batch in its attributes would go into the gradients of this one's examples,
        and no clipping bounds that. Calls that one backward pass reaches are one gradient per example.
        """
        task = torch._C._current_graph_task_id()
        reached = {t.number for t in self._reached.get(task, ())}
        if not reached.issuperset(range(tape.number + 1, calls + 1)):
            raise UnsupportedError(
                "A backward pass would run a function under torch.utils.checkpoint again after another batch went "
                "through the private module, of which the module may have kept something; call backward() before the "
                "next forward pass, or leave checkpointing out."
            )

    def give_up(self) -> None:
        """Forget backward passes that failed."""
        for tapes in self._reached.values():
            _spend(tapes)
        self._reached = {}

    def _end(self, task: int) -> None:
        """Make a batch of what the backward pass ``task`` has reached."""
        tapes = self._reached.pop(task)
        new = [tape for tape in tapes if tape.iteration is None]
        sizes = {tape.batch_size for tape in tapes}
        if len(sizes) > 1:
            _spend(tapes)
            raise PrivacyError(
                f"One loss went through batches of {sorted(sizes)} examples, so their gradients cannot be told "
                "apart by example: rows of the same number are one example. Give every call as many rows (as many "
                "made-up examples as real ones, torch.randn(len(x), ...), say), and one loss to all of them."
            )
        size = sizes.pop() // self._group
        iteration = Iteration([use for tape in new for use in tape.uses], size, group=self._group)
        iteration.inputs = [tensor for tape in new for tensor in tape.inputs]
        for tape in new:
            tape.iteration = iteration
        waiting = self._waiting.passes
        if new and size:
            waiting.append(iteration)
            if not self.accumulation_allowed and sum(1 for i in waiting if i.batch_size) > 1:
                raise ValueError(
                    "A second backward pass came before optimizer.step(), and accumulation is forbidden; step after "
                    "every batch, use BatchMemoryManager for large ones, or call allow_grad_accumulation()."
                )
        if self._ordinary is not None:
            again = [i for i in waiting if i is not iteration and any(t.iteration is i for t in tapes)]
            for reached in [iteration, *again] if new else again:
                self._ordinary.form(reached)

    def _see_reduction(self, divisor: float, examples: int) -> None:
        """Warn once where the first loss shows that it is reduced otherwise than ``loss_reduction`` says."""
        self._reduction_seen = True
        mine = self._loss_reduction
        reduction = {1.0: "sum", float(examples): "mean"}.get(round(divisor, 3))
        if reduction is None:
            divisor /= examples if mine == "mean" else 1
            self.loss_divided_by = round(divisor) if math.isclose(divisor, round(divisor), rel_tol=1e-5) else 1
        elif reduction != mine:
            wrong = "large" if reduction == "sum" else "small"
            warn_caller(
                f"The loss is the {reduction} over the batch, and loss_reduction is {mine!r}: every "
                f"gradient is too {wrong} by the batch's length before it is clipped. Pass "
                f"loss_reduction={reduction!r}, or reduce the loss by its {mine}.",
            )


def _spend(tapes: list[Tape]) -> None:
    """Mark tapes as used, so that nothing that was recorded on them is used again."""
    for tape in tapes:
        tape.iteration = Iteration([], 0)

"""The experiments on a loss of the user's own loop, which is computed outside of the recorded pass.

A loss that divides by what its batch holds (the labels that are not ignored, the weights of the classes that are there)
or compares examples lets one example move the gradients of all others, and no clipping bounds that. For the batches on
which the model is checked, ``loss.backward()`` first looks at the graph between the loss and the module's outputs:

1. *Labels.* F.cross_entropy tells what it was averaged over.
2. *Bends.* Nothing may be sorted, selected or bent (``abs``, ``clamp``) that comes from several examples.
3. *Second derivatives.* The gradient at one half of the outputs' rows may not change with the rows of the other half:
   where the loss is smooth, the product of its second derivative with a random direction at these rows is zero in all
   others.
4. *Shares.* From batch to batch: examples' weights may not have one sum where the single ones differ.
5. *Divisors.* From batch to batch: a mean's count, a tensor or a whole number must be the same, go with the batch's
   length, or be a multiple of it.
6. *Pairs.* From batch to batch: no function's values may be a square of the batch's length, unless only the diagonal
   counts.
"""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpcore.errors import PrivacyError, warn_caller
from dpcore.example_isolation.loss_graph import LossGraph, Output, Weights, kind_of

LOSSES, ALWAYS = 3, 24
"""Losses of a kind of batch, and of all kinds, that are looked at whatever passes are checked: one pass of two in a
step is half of what a loss comes from."""
TRIES = 16
"""Passes without a loss after which none is waited for."""
MOST_SEEN = 8
"""Losses that the next one is compared with."""
_AVERAGING = ("NllLossBackward0", "NllLoss2DBackward0")
WAITING: weakref.WeakSet[LossCheck] = weakref.WeakSet()
"""Checks that wait for a loss, of all private modules: torch.autograd.backward is one for all of them."""

REMEDY = (
    "One example would then move the gradients of all others, by more than max_grad_norm. Write the loss as one number "
    "per example and take their mean"
)
BY_TOKENS = (
    'losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"); mask = labels != -100; loss = '
    "(losses.sum(1) / mask.sum(1).clamp(min=1)).mean()"
)
OR_SWITCH_OFF = (
    "(Or pass check_isolation=False if you can prove that each example's gradient depends on that example alone.)"
)


@dataclass(eq=False)
class _Pass:
    """A recorded pass whose loss is waited for."""

    kind: Any
    check: weakref.ref[LossCheck]
    seen: bool = False


@dataclass(frozen=True)
class _Seen:
    """Holds what a loss was divided by, how much each example weighed, and which functions saw them in pairs."""

    examples: int
    divisors: list[float]
    weights: list[Weights | None]
    pairs: set[int]
    divided: float
    """Divisor of each example's loss, or NaN where that is not clear."""


class LossCheck:
    """The experiments on the losses of one module's outputs; ``reduction``: what is said of them, "mean" or "sum".

    ``group``: rows of a unit, which may meet.
    """

    def __init__(self, reduction: str = "mean", group: int = 1) -> None:
        self._reduction = reduction
        self._group = group
        self._has_looked = False
        """Whether a loss was seen since the last pass."""
        self._looked_at: Counter[Any] = Counter()
        self._lengths: dict[Any, set[int]] = {}
        self._unseen: Counter[Any] = Counter()
        """Passes since then, by their kind."""
        self._seen: dict[tuple[str, ...], list[_Seen]] = {}
        """Losses that were seen, by the names of their functions."""
        self.divided: tuple[float, int] | None = None
        """The divisor of each example's loss in the newest loss, if that is clear, and the number of examples."""
        self._random = random.Random()
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_random": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _random=random.Random())

    def expect(self, kind: Any, due: bool, outputs: Iterable[Any], examples: int) -> None:
        """Look at the loss that comes from these outputs of a pass of a ``kind`` of batch, where that is ``due``.

        The first losses of a kind are due in any case, and the first of a second length, and every pass is that comes
        before the loss of a due one.
        """
        if examples < 2:
            return
        self._unseen[kind] += 1
        lengths = self._lengths.get(kind, set())  # pieces of a batch have one, but for the last
        is_second = len(lengths) < 2 and examples not in lengths
        few = (self._looked_at[kind] < LOSSES or is_second) and self._unseen[kind] <= TRIES
        due = due or (few and self._looked_at.total() < ALWAYS)
        if self._has_looked or self._unseen[kind] > TRIES:
            WAITING.discard(self)
        self._has_looked = False
        if due:
            WAITING.add(self)
        if self in WAITING:
            found = _Pass(kind, weakref.ref(self))
            for output in outputs:
                if isinstance(output, Tensor) and output.grad_fn is not None and output.is_floating_point():
                    Output.mark(output, examples, found)

    def judge(self, loss: Tensor) -> None:
        """Raise PrivacyError where ``loss`` comes from the expected outputs and mixes their examples."""
        graph = LossGraph(loss, lambda of: of.check() is self, self._group)
        passes = {output.of_pass for output in graph.outputs}
        for kind in {of.kind for of in passes if not of.seen}:
            self._looked_at[kind] += 1
            self._lengths.setdefault(kind, set()).add(graph.examples)
            self._unseen[kind] = 0
        for of in passes:
            of.seen = self._has_looked = True
        if len(graph.sizes) == 1:  # losses over batches of several lengths are refused behind it
            try:
                with graph.looked_at():
                    self._look(graph)
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, PrivacyError):
                    raise
                # A compiled loss, one whose graph is gone, or one without a second derivative.
            self._tell_what_hides(graph)

    def _tell_what_hides(self, graph: LossGraph) -> None:
        """Warn once of a function whose derivatives do not show what it does with several examples."""
        if self._has_warned or (name := graph.opaque()) is None:
            return
        self._has_warned = True
        warn_caller(
            f"Nothing tells whether the loss compares the examples of a batch: {name} (a compiled loss, or a function "
            "of your own) hides what it does with them. Train a few batches with the same loss in plain operations "
            "first, uncompiled, or let your function return one number per example.",
        )

    def _look(self, graph: LossGraph) -> None:
        _check_cross_entropy(graph.nodes)
        divisors = [_divisor(node, graph.examples) for node in graph.nodes]
        weights = graph.weights()  # first of all, for hooks on the outputs take what they see for the gradient
        clear = len(graph.divisors) == 1 and math.isfinite(graph.divisors[0])
        self.divided = (graph.divisors[0], graph.examples) if clear else None
        if (bend := graph.bend()) is not None:
            raise PrivacyError(
                f"The loss selects by value over the examples of a batch, or bends what comes of several of them "
                f"({bend.lower()}): what becomes of one depends on the others. {REMEDY}; what selects or bends goes to "
                f"each of them, as in ((losses - b).abs() + b).mean(). {OR_SWITCH_OFF}"
            )
        self._compare(
            graph, _Seen(graph.examples, divisors, weights, graph.pairs, graph.divisors[0] if clear else math.nan)
        )
        if graph.compares(self._random):
            raise PrivacyError(
                "The loss compares the examples of a batch: the gradient at one example's output depends on the "
                f"outputs of others, as in contrastive losses or where a loss is normalised over the batch. {REMEDY}. "
                f"{OR_SWITCH_OFF}"
            )

    def _compare(self, graph: LossGraph, now: _Seen) -> None:
        """PrivacyError where a loss divides by what its batch holds, as earlier ones by the same functions show."""
        before = self._seen.setdefault(tuple(node.name() for node in graph.nodes), [])
        for at, mine in enumerate(now.weights):
            others = [theirs for seen in before if (theirs := seen.weights[at]) is not None]
            if mine is not None and mine.are_shares(others, self._group) and graph.has_rows(at, mine):
                raise PrivacyError(
                    "The loss is divided by what its batch holds, or has the batch's mean taken off: the weights of "
                    "the examples, or their squares, add up to the same in every batch, though each is another. "
                    f"{REMEDY}: {BY_TOKENS}, for instance. "
                    f"{OR_SWITCH_OFF}"
                )
        before[:] = [*before, now][-MOST_SEEN:]
        lengths = [seen.examples for seen in before]
        # A width of another kind may be as long as one batch, but hardly as all of them.
        if len(set(lengths)) > 1 and set.intersection(*(seen.pairs for seen in before)):
            raise PrivacyError(
                "The loss goes through a square of all pairs of the batch's examples: outputs are compared with other "
                "examples' labels or keys, or a [B, 1] meets a [B] (output.squeeze(1) then). "
                f"{REMEDY}. {OR_SWITCH_OFF}"
            )
        self._compare_reductions(before)
        for at, values in enumerate(zip(*(seen.divisors for seen in before), strict=True)):
            shares = [value / n for value, n in zip(values, lengths, strict=True)]
            if math.isnan(sum(values)) or _all_alike(values) or _all_alike(shares) or all(map(_is_whole, shares)):
                continue
            if not graph.gathers(at):
                continue
            raise PrivacyError(
                f"The loss is divided by a number that changes from batch to batch, and not with their lengths "
                f"({', '.join(f'{v:.6g}' for v in values)} for batches of {', '.join(map(str, lengths))} examples). "
                f"{REMEDY}: {BY_TOKENS}, for instance. (If it is public, as a schedule is, let it be a Python float: "
                f"loss / float(number).) {OR_SWITCH_OFF}"
            )

    def _compare_reductions(self, seen: list[_Seen]) -> None:
        """PrivacyError where losses over several lengths show a sum that is said to be a mean, or the other way."""
        lengths, divisors = [one.examples for one in seen], [one.divided for one in seen]
        shares = [divisor / length for divisor, length in zip(divisors, lengths, strict=True)]
        other, alike = ("sum", divisors) if self._reduction == "mean" else ("mean", shares)
        if len(seen) > 2 and len(set(lengths)) > 1 and math.isfinite(sum(alike)) and _all_alike(alike):
            raise PrivacyError(
                f"The loss is a {other} over the batch (perhaps times a number), and loss_reduction is "
                f"{self._reduction!r}: before it is clipped, each gradient is scaled by the batch's length, which one "
                "example changes for all others, so that it moves the sum by up to twice max_grad_norm. Pass "
                f"loss_reduction={other!r}, or reduce the loss by its {self._reduction}; step() divides by "
                f"expected_batch_size. {OR_SWITCH_OFF}"
            )


def judge(losses: Any, gradients: Any = None) -> None:
    """Let every check that waits for a loss look at what backward() is called on."""
    found = [losses] if isinstance(losses, Tensor) else list(losses)
    given = [gradients] if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    with torch.enable_grad():
        terms = [
            loss if grad is None else _weighted(loss, grad.detach())
            for loss, grad in itertools.zip_longest(found, given)
            if isinstance(loss, Tensor) and loss.grad_fn is not None and (loss.numel() == 1 or grad is not None)
        ]
        for check in list(WAITING) if terms else ():
            check.judge(sum(terms[1:], terms[0]))


def _weighted(loss: Tensor, grad: Tensor) -> Tensor:
    """Return the number whose gradient backward() computes where it is given one: of equal weights a plain sum."""
    weights = grad.flatten()
    if len(weights) and bool((weights == weights[0]).all()):
        return loss.sum() * float(weights[0])
    return torch.dot(loss.flatten(), weights)


def _check_cross_entropy(nodes: list[Any]) -> None:
    """PrivacyError where a cross-entropy is averaged over labels of which some count for nothing or for less."""
    for node in nodes:
        if node.name() in _AVERAGING and node._saved_reduction == 1:
            weight, labels = node._saved_weight, node._saved_target.numel()
            if weight is not None and not _all_alike(weight.tolist()):
                raise PrivacyError(
                    f"The loss is a mean with weights of classes, which is divided by the weights of the classes that "
                    f'the batch holds. {REMEDY}: F.cross_entropy(..., weight=weight, reduction="none"). {OR_SWITCH_OFF}'
                )
            total = float(node._saved_total_weight) / (1.0 if weight is None else float(weight[0]))
        elif node.name() == "DivBackward0" and (labels_of := _labels_of_kernel(node)) is not None:
            total, labels = float(node._saved_other), len(labels_of[0])
            if total != float((labels_of[0] != labels_of[1]).sum()):
                continue
        else:
            continue
        if round(total) < labels:
            raise PrivacyError(
                f"The loss is a mean over the {round(total)} of {labels} labels that are not ignored, a number that "
                f"depends on what the batch holds. {REMEDY}, each over its own labels: {BY_TOKENS}. {OR_SWITCH_OFF}"
            )


def _labels_of_kernel(node: Any) -> tuple[Tensor, int] | None:
    """(labels, ignored label) of dpcore's own cross-entropy, of whose sum ``node`` is a share."""
    behind = node.next_functions[0][0]
    behind = behind.next_functions[0][0] if behind is not None and behind.name() == "SumBackward0" else None
    if behind is None or behind.name() != "_CrossEntropyBackward":
        return None
    return behind.saved_tensors[1], behind.ignored


def _divisor(node: Any, examples: int) -> float:
    """Return what a node divides by, if that is no setting: the count of a mean, a whole number, a tensor; or NaN."""
    name = kind_of(node)
    if node.name() in _AVERAGING:
        return float(node._saved_total_weight) if node._saved_reduction == 1 else math.nan
    if name == "Mean" or getattr(node, "_saved_reduction", 0) == 1:
        behind, nr = next(of for of in node.next_functions if of[0] is not None)
        whole, left = behind._input_metadata[nr].shape, node._input_metadata[0].shape
        by_row = examples in left[:2] or 0 not in getattr(node, "_saved_dim", (0,))
        return math.nan if by_row else math.prod(whole) / max(math.prod(left), 1)
    other = node._saved_other if name == "Div" and node.name() == "DivBackward0" else None
    if not isinstance(other, Tensor) or other.dim() or other.requires_grad:
        return math.nan
    # Of Python's numbers torch makes tensors that do not decide the type of a result.
    if other.dtype == torch.float64 and torch.result_type(torch.ones(()), other) != torch.float64:
        return math.nan
    return float(other)


def _is_whole(number: float) -> bool:
    return math.isfinite(number) and abs(number - round(number)) <= min(1e-6 * abs(number), 0.02)


def _all_alike(values: Iterable[float]) -> bool:
    numbers = list(values)
    return max(numbers, default=0.0) - min(numbers, default=0.0) <= 1e-6 * max(map(abs, numbers), default=0.0)

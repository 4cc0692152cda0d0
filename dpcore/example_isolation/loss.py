"""The experiments on a loss of the user's own loop, which is computed outside of the recorded pass.

A loss that divides by what its batch holds (the labels that are not ignored, the weights of the classes that are there)
or compares examples lets one example move the gradients of all others, and no clipping bounds that. On the batches on
which the model is checked, ``loss.backward()`` first looks at the graph between the loss and the module's outputs:

1. *Divisors.* F.cross_entropy tells what it was averaged over. Any other divisor must be the same for every batch, or
   go with the batch's length.
2. *Selections.* Nothing may be sorted or selected over the examples by value.
3. *Second derivatives.* The gradient at one half of the outputs' rows may not change with the rows of the other half:
   where the loss is smooth, the product of its second derivative with a random direction at these rows is zero in all
   others.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpcore.errors import PrivacyError
from dpcore.example_isolation.rows import half_of_rows

MOST_NODES = 5000
"""Functions between a loss and the outputs that are looked at."""
MOST_NUMBERS = 2**22
"""Numbers in the outputs beyond which no second derivative is taken: it needs several times their memory."""
PASSES = 2
"""Recorded passes that one loss may come from, and whose graphs are held until it is seen."""
_AVERAGING = ("NllLossBackward0", "NllLoss2DBackward0")
SELECTING = ("Topk", "Sort", "Kthvalue", "Median", "Nanmedian", "Mode", "Max", "Min", "Cummax", "Cummin")
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


@dataclass(frozen=True)
class _Output:
    """An output of a recorded pass that has its examples in dimension ``dim``."""

    edge: GradientEdge
    dim: int
    examples: int
    numbers: int


class LossCheck:
    """The experiments on the losses of one module's outputs."""

    def __init__(self) -> None:
        self._outputs: list[list[_Output]] = []
        self._kind: Any = None
        self._divisors: dict[Any, list[tuple[int, list[float]]]] = {}
        """What losses were divided by, with the number of examples, by kind of batch."""
        self._random = random.Random()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_outputs": [], "_random": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _random=random.Random())

    def expect(self, kind: Any, outputs: Iterable[Any], examples: int) -> None:
        """Look at the loss that comes from these outputs of a pass of a ``kind`` of batch."""
        found = []
        for output in outputs:
            if not isinstance(output, Tensor) or output.grad_fn is None or not output.is_floating_point():
                continue
            dims = [d for d in (0, 1) if output.shape[d : d + 1] == (examples,)]
            if dims:
                found.append(_Output(get_gradient_edge(output), dims[0], examples, output.numel()))
        self._outputs, self._kind = [*self._outputs, found][-PASSES:], kind
        WAITING.add(self)

    def give_up(self) -> None:
        """Wait no longer, and hold no graph."""
        self._outputs = []
        WAITING.discard(self)

    def judge(self, loss: Tensor) -> None:
        """Raise PrivacyError where ``loss`` comes from the expected outputs and mixes their examples."""
        expected = {output.edge.node: output for outputs in self._outputs for output in outputs}
        nodes, reached = _between(loss, expected)
        if not reached:
            return
        self.give_up()
        examples = max(output.examples for output in reached)
        if examples < 2:
            return
        _check_cross_entropy(nodes)
        _check_selections(nodes, examples)
        self._check_divisors(nodes, examples)
        if all(output.examples == examples for output in reached):
            self._check_mixing(loss, reached, examples)

    def _check_divisors(self, nodes: list[Any], examples: int) -> None:
        """PrivacyError where a divisor is neither always the same nor goes with the batch's length."""
        seen = self._divisors.setdefault(self._kind, [])
        seen.append((examples, [d for node in nodes for d in _divisors(node)]))
        if len({len(divisors) for _, divisors in seen}) != 1:
            return
        for values in zip(*(divisors for _, divisors in seen), strict=True):
            shares = [value / n for value, (n, _) in zip(values, seen, strict=True)]
            if not (_all_alike(values) or _all_alike(shares)):
                raise PrivacyError(
                    f"The loss is divided by what its batch holds ({', '.join(f'{v:.6g}' for v in values)} for batches "
                    f"of {', '.join(str(n) for n, _ in seen)} examples). {REMEDY}: {BY_TOKENS}, for instance. "
                    f"{OR_SWITCH_OFF}"
                )

    def _check_mixing(self, loss: Tensor, outputs: list[_Output], examples: int) -> None:
        """PrivacyError where the gradient at some rows of the outputs changes with other rows."""
        if sum(output.numbers for output in outputs) > MOST_NUMBERS:
            return
        rows, _ = half_of_rows(examples, self._random)
        others = torch.ones(examples, dtype=torch.bool)
        others[rows] = False
        edges = [output.edge for output in outputs]
        generator = torch.Generator().manual_seed(examples)
        try:
            first = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
            terms = []
            for output, grad in zip(outputs, first, strict=True):
                if grad is not None and grad.requires_grad:
                    mine = grad.index_select(output.dim, rows.to(grad.device))
                    at_random = torch.rand(mine.shape, generator=generator).to(mine.device, mine.dtype)
                    terms.append((mine * at_random).sum())
            if not terms:
                return
            second = torch.autograd.grad(sum(terms[1:], terms[0]), edges, retain_graph=True, allow_unused=True)
        except (RuntimeError, NotImplementedError):  # a loss without a second derivative, or a compiled one
            return
        for output, grad in zip(outputs, second, strict=True):
            if grad is None:
                continue
            theirs = grad.index_select(output.dim, others.nonzero().flatten().to(grad.device))
            if bool((theirs.isfinite() & (theirs != 0.0)).any()):
                raise PrivacyError(
                    "The loss compares the examples of a batch: the gradient at one example's output depends on the "
                    f"outputs of others, as in contrastive losses or where a loss is normalised over the batch. "
                    f"{REMEDY}. {OR_SWITCH_OFF}"
                )


def judge(loss: Any) -> None:
    """Let every check that waits for a loss look at this one."""
    if isinstance(loss, Tensor) and loss.grad_fn is not None and loss.numel() == 1:
        for check in list(WAITING):
            check.judge(loss)


def _between(loss: Tensor, expected: dict[Any, _Output]) -> tuple[list[Any], list[_Output]]:
    """The graph's nodes between a loss and outputs, and the outputs that it comes from."""
    nodes: list[Any] = []
    reached: list[_Output] = []
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in expected:
            reached.append(expected[node])
        else:
            nodes.append(node)
            waiting += [following for following, _ in node.next_functions]
    return nodes, reached


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


def _check_selections(nodes: list[Any], examples: int) -> None:
    """PrivacyError where values are selected or sorted over the examples."""
    for node in nodes:
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name not in SELECTING:
            continue
        shape = getattr(node, "_saved_self_sym_sizes", None)
        shape = tuple(node._saved_self.shape) if shape is None else tuple(shape)
        dim = _signed(getattr(node, "_saved_dim", 0))  # none of max(), min() and median(), which go over all numbers
        if shape[:1] == (examples,) and dim in (0, -len(shape)):
            raise PrivacyError(
                f"The loss selects by value over the examples of a batch ({name.lower()}): which examples count "
                f"depends on the others. {REMEDY}. {OR_SWITCH_OFF}"
            )


def _signed(number: int) -> int:
    """A saved integer, which Python sees without its sign."""
    return number - 2**64 if number >= 2**63 else number


def _divisors(node: Any) -> Iterator[float]:
    """What a node divides a whole loss by: not by a Python float, which is a setting."""
    if node.name() == "MeanBackward0":
        yield float(node._saved_self_sym_numel)
    elif node.name() in _AVERAGING and node._saved_reduction == 1:
        yield float(node._saved_total_weight)
    elif node.name() == "DivBackward0":
        other = node._saved_other
        if isinstance(other, Tensor) and not other.dim() and other.dtype != torch.float64 and not other.requires_grad:
            yield float(other)


def _all_alike(values: Iterable[float]) -> bool:
    numbers = list(values)
    return max(numbers, default=0.0) - min(numbers, default=0.0) <= 1e-6 * max(map(abs, numbers), default=0.0)

"""The graph between a loss and the outputs of private passes, and the experiments on it: whose rows it reaches."""

from __future__ import annotations

import math
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpcore.example_isolation.rows import flat_rows, half_of_rows, ways_of_rows
from dpcore.tape.tape import LOOKS

MOST_NODES = 5000
"""Functions between a loss and the outputs that are looked at."""
MOST_NUMBERS = 2**22
"""Numbers in the outputs beyond which no second derivative is taken: it needs several times their memory."""
MOST_BENDS = 32
"""Functions that select or bend whose reach is looked at: those that are next to the loss."""
SELECTING = {
    *("Topk", "Sort", "Kthvalue", "Median", "Nanmedian", "Mode", "Max", "Min", "Cummax", "Cummin", "Amax", "Amin"),
}
"""Functions that select by value, along a dimension or of all numbers."""
BENDING = {
    *("Abs", "Clamp", "ClampMin", "ClampMax", "Relu", "LeakyRelu", "Prelu", "Threshold", "Hardtanh", "Elu", "Where"),
    *("Maximum", "Minimum", "Fmax", "Fmin", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink", "MaskedFill"),
    *("SmoothL1Loss", "HuberLoss", "LinalgVectorNorm", "Norm"),
}
"""Functions of single numbers whose second derivative is zero nearly everywhere, though they are not linear."""


_OUTPUTS = "dpcore: outputs of a private pass"


@dataclass(frozen=True, eq=False)
class Output:
    """An output of a recorded pass of ``examples``: ``owners``, ways to tell those of its rows in a dimension.

    Its place in the graph knows it, so that nothing here holds the graph.
    """

    tensor: weakref.ref[Tensor]
    number: int
    shape: torch.Size
    examples: int
    owners: list[tuple[int, Tensor]]
    of_pass: Any

    @classmethod
    def mark(cls, output: Tensor, examples: int, of_pass: Any) -> None:
        """Let the graph from a loss to ``output`` end there."""
        ways = ways_of_rows(output.shape, examples)
        ways = ways[:1] if ways and not ways[0][0] else ways  # the first one, though another is as long
        node: Any = output.grad_fn
        found = cls(weakref.ref(output), output.output_nr, output.shape, examples, ways, of_pass)
        node.metadata.setdefault(_OUTPUTS, []).append(found)


@dataclass(frozen=True)
class Weights:
    """How much each of the examples weighs where a loss goes through a function, whose values have such ``rows``."""

    of: Tensor
    rows: tuple[int, Tensor]

    @classmethod
    def at(cls, grad: Tensor, examples: int, flat: set[int]) -> Weights | None:
        """Return them for the gradient at a function's values; None where these have no rows, or all weigh the same.

        ``flat``: lengths of a first dimension that holds several rows of each.
        """
        wide = grad.detach().to(torch.promote_types(grad.dtype, torch.float32))
        ways = ways_of_rows(wide.shape, examples)
        if not ways and wide.dim() and len(wide) in flat:
            ways = flat_rows(len(wide), examples)
        found = []
        for dim, owners in ways:
            rows = wide.movedim(dim, 0).reshape(len(owners), -1).sum(1).double().cpu()
            found.append(rows.new_zeros(examples).index_add_(0, owners, rows))
            sizes = found[-1].abs()
            if float(found[-1].max() - found[-1].min()) <= 1e-4 * float(sizes.max()):
                return None
            if float(sizes.sum()) <= 1e-3 * float(torch.linalg.vector_norm(wide, 1)):  # they cancel
                return None
        return cls(found[0], ways[0]) if found else None

    @property
    def sums(self) -> Iterator[float]:
        """Yield what normalised weights have in common: their sum, or that of their squares, for a mean or a sum.

        Weights that had their own mean taken off add up to nothing but roundings.
        """
        count, size = len(self.of), float(torch.linalg.vector_norm(self.of))
        share = (total := float(self.of.sum())) / float(self.of.abs().sum())
        yield total if abs(share) > 1e-3 else 0.0 if abs(share) < 1e-5 else math.nan
        yield from (
            size * of for of in (1.0, count**0.5, count**-0.5, count * (count - 1) ** -0.5, (count - 1) ** -0.5)
        )

    def are_shares(self, others: list[Weights], group: int) -> bool:
        """Return whether these and those of ``others`` batches have one sum, though the single ones are others.

        Of weights that are whole numbers two sums are often equal, but hardly one by chance. In units of a ``group`` of
        rows one row may outweigh another.
        """
        if not all(map(self._differ, others)):
            return False
        for values in zip(self.sums, *(other.sums for other in others), strict=True):
            enough = len(values) > (1 if abs(abs(values[0]) - 1.0) < 1e-5 else 2) and (values[0] or group == 1)
            if enough and all(abs(value - values[0]) <= 1e-5 * abs(values[0]) for value in values):
                return True
        return False

    def _differ(self, other: Weights) -> bool:
        """Return whether most of the single ones are others."""
        mine, theirs = (w.of[w.of != 0.0].abs().log() * 1e4 for w in (self, other))
        # A mean's weights are as much smaller as its batch is longer.
        for length in (0.0, 1e4 * math.log(len(other.of) / len(self.of))):
            near = [torch.isin((mine - length).round() + k, theirs.round()) for k in (-1, 0, 1)]
            if 2 * int(torch.stack(near).any(0).sum()) >= len(mine):
                return False
        return True


class LossGraph:
    """The functions between ``loss`` and the outputs of private passes that it comes from.

    ``outputs``: those of which ``is_mine(output.of_pass)`` is true; behind all others nothing is looked at. ``group``:
    rows of a unit, which may meet; what is called an example here is a row, and :attr:`_ways` tell units apart.
    """

    def __init__(self, loss: Tensor, is_mine: Callable[[Any], bool], group: int = 1) -> None:
        self._loss = get_gradient_edge(loss)
        self.nodes: list[Any] = []
        found: list[tuple[GradientEdge, Output]] = []
        seen: set[Any] = set()
        waiting: deque[Any] = deque([loss.grad_fn])
        while waiting and len(self.nodes) < MOST_NODES:
            node = waiting.popleft()
            if node is None or node in seen:
                continue
            seen.add(node)
            if outputs := node.metadata.get(_OUTPUTS):
                found += [(GradientEdge(node, output.number), output) for output in outputs]
            else:
                self.nodes.append(node)
                waiting += [following for following, _ in node.next_functions]
        self._all = [output for _, output in found]
        mine = [(edge, output) for edge, output in found if is_mine(output.of_pass)]
        self.outputs = [output for _, output in mine]
        self.sizes = {output.examples for output in self.outputs}
        self.examples = max(self.sizes, default=0)
        self._outer = [edge for edge, _ in mine]
        self._edges = [edge for edge, output in mine if output.owners]
        self._reached = {*self.nodes, *(edge.node for edge in self._edges)}
        self.divisors: list[float] = []
        """Divisors of an example's loss, at the places where examples' losses are added up."""
        self.pairs: set[int] = set()
        """The nodes that make a square of all pairs of examples, of which not the diagonal alone counts."""
        self._by_row = [output for output in self.outputs if output.owners]
        several = range(max((len(output.owners) for output in self._by_row), default=0))
        ways = [[of.owners[min(way, len(of.owners) - 1)] for of in self._by_row] for way in several]
        self._ways = [[(dim, owners // group) for dim, owners in way] for way in ways]
        self._group = group

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Leave the gradients that outputs retain as they are."""
        tensors = [tensor for of in self._all if (tensor := of.tensor()) is not None and tensor.retains_grad]
        retained = [tensor.grad for tensor in tensors]
        try:
            yield
        finally:
            for tensor, grad in zip(tensors, retained, strict=True):
                tensor.grad = grad

    def weights(self) -> list[Weights | None]:
        """Return the weights of the examples at each of the nodes, by one backward pass."""
        found: list[Weights | None] = [None] * len(self.nodes)
        # All words, and all that have a next one.
        lengths = {(output.shape[:2].numel(), self.examples) for output in self._by_row if len(output.shape) > 1}
        flat = {n - less for n, of in lengths for less in (0, of)}

        def note(at: int, grads: tuple[Tensor | None, ...]) -> None:
            if len(grads) == 1 and grads[0] is not None:
                found[at] = Weights.at(grads[0], self.examples, flat)
                if _counts_pairs(grads[0], self.examples) and not self._keeps_squares(at):
                    self.pairs.add(at)
                reduction = reduction_of(self.nodes[at]) if grads[0].numel() == 1 else None
                if reduction is not None and self._adds_examples(at):
                    self.divisors.append(float(1.0 / grads[0].abs()) * (self.examples if reduction == "mean" else 1))

        with ExitStack() as hooks:
            for at, node in enumerate(self.nodes):
                handle = node.register_prehook(lambda grads, at=at: note(at, grads))
                hooks.callback(handle.remove)
            self._grad(self._loss, self._outer)
        return found

    def _adds_examples(self, at: int) -> bool:
        """Return whether a node gets enough numbers to add up one of each example, and not losses of whole batches."""
        behind = self._behind(self.nodes[at])
        return any(math.prod(e.node._input_metadata[e.output_nr].shape) >= self.examples for e in behind)  # type: ignore[attr-defined]

    def _keeps_squares(self, at: int) -> bool:
        """Return whether a square at a node is one of what it gets, in another shape perhaps: nothing met another."""
        numbers = math.prod(self.nodes[at]._input_metadata[0].shape)
        shapes = [edge.node._input_metadata[edge.output_nr].shape for edge in self._behind(self.nodes[at])]  # type: ignore[attr-defined]
        return any(shape.count(self.examples) > 1 or math.prod(shape) == numbers for shape in map(tuple, shapes))

    def _grad(
        self, of: GradientEdge, edges: list[GradientEdge], start: Tensor | None = None, create_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        """The gradients at ``edges``, by a backward pass that begins at ``of`` and may come to no recorded place."""
        tasks: set[int] = set()

        def note(grads: Any) -> None:
            tasks.add(torch._C._current_graph_task_id())
            LOOKS.update(tasks)

        hook = of.node.register_prehook(note)
        try:
            seed, options = None if start is None else [start], {"create_graph": create_graph, "allow_unused": True}
            return torch.autograd.grad([of], edges, seed, retain_graph=True, **options)
        finally:
            hook.remove()
            LOOKS.difference_update(tasks)

    def bend(self) -> str | None:
        """Return the name of a function that selects among several examples' numbers or bends what comes of several."""
        bends = [node for node in self.nodes if kind_of(node) in SELECTING | BENDING]
        for node in bends[:MOST_BENDS] if self._ways else ():
            selects = kind_of(node) in SELECTING
            for edge in self._behind(node):
                shape = edge.node._input_metadata[edge.output_nr].shape  # type: ignore[attr-defined]
                where = _fibre(shape, getattr(node, "_saved_dim", None)) if selects else tuple(n // 2 for n in shape)
                alone = not selects and edge in self._edges  # numbers of an output, each by itself
                if math.prod(shape) and not alone and self._reach(edge, where) > 1:
                    return kind_of(node)
        return None

    def opaque(self) -> str | None:
        """Return the name of a function of Python's (a fused or compiled loss) one number of which is of several."""
        for node in self.nodes if self._ways else ():
            at: Any = node
            if not isinstance(node, BackwardCFunction) or at._forward_cls.__module__.startswith("dpcore."):
                continue
            try:
                several = self._reach(GradientEdge(at, 0), tuple(n // 2 for n in at._input_metadata[0].shape)) > 1
            except RuntimeError:  # a compiled one that may run backward only once
                several = True
            if several:
                return str(at.name())
        return None

    def gathers(self, at: int) -> bool:
        """Return whether what comes to a node is of several examples."""
        return not self._ways or any(self._reach(edge, ...) > 1 for edge in self._behind(self.nodes[at]))

    def has_rows(self, at: int, weights: Weights) -> bool:
        """Return whether a node's values have the rows that ``weights`` take them to have."""
        dim, owners = weights.rows
        theirs = (owners == int(weights.of.abs().argmax())).nonzero().flatten()
        return not self._ways or self._reach(GradientEdge(self.nodes[at], 0), (*[slice(None)] * dim, theirs)) == 1

    def _behind(self, node: Any) -> list[GradientEdge]:
        return [GradientEdge(of, nr) for of, nr in node.next_functions if of in self._reached]

    def _reach(self, edge: GradientEdge, where: Any) -> int:
        """How many units the numbers at an index of a place come from, told apart so that they are fewest."""
        meta = edge.node._input_metadata[edge.output_nr]  # type: ignore[attr-defined]
        start = torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)
        start[where] = 1.0
        grads = self._grad(edge, self._edges, start)
        return min(len(set(self._with_gradient(grads, way))) for way in self._ways)

    def _with_gradient(self, grads: tuple[Tensor | None, ...], way: list[tuple[int, Tensor]]) -> Iterator[int]:
        """The units of the rows that have a gradient."""
        for (dim, owners), grad in zip(way, grads, strict=True):
            if grad is not None:
                yield from owners[(grad.movedim(dim, 0).reshape(len(owners), -1) != 0.0).any(1).cpu()].tolist()

    def compares(self, generator: random.Random) -> bool:
        """Return whether the gradient at some rows of the outputs changes with other rows, by a second derivative."""
        if not self._ways or sum(output.shape.numel() for output in self._by_row) > MOST_NUMBERS:
            return False
        if (units := self.examples // self._group) < 2:
            return False
        rows, _ = half_of_rows(units, generator)
        mine = torch.zeros(units, dtype=torch.bool)
        mine[rows] = True
        first = self._grad(self._loss, self._edges, create_graph=True)
        return all(self._changes(first, mine, way) for way in self._ways)

    def _changes(self, first: tuple[Tensor | None, ...], mine: Tensor, way: list[tuple[int, Tensor]]) -> bool:
        """Return whether the gradient of ``mine`` [B] units changes with the others, told apart in one way."""
        numbers, terms = torch.Generator().manual_seed(self.examples), []
        for (dim, of), grad in zip(way, first, strict=True):
            if grad is not None and grad.requires_grad:
                part = grad.index_select(dim, mine[of].nonzero().flatten().to(grad.device))
                terms.append((part * torch.rand(part.shape, generator=numbers).to(part.device, part.dtype)).sum())
        if not terms:
            return False
        second = torch.autograd.grad(sum(terms[1:], terms[0]), self._edges, retain_graph=True, allow_unused=True)
        finite = tuple(None if grad is None else grad.nan_to_num(0.0, 0.0, 0.0) for grad in second)
        return not bool(mine[list(self._with_gradient(finite, way))].all())


def kind_of(node: Any) -> str:
    """Return a function's name without its ending."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def reduction_of(node: Any) -> str | None:
    """Return "mean" or "sum" where a function reduces all numbers that it gets to one."""
    number = {"Mean": 1, "Sum": 2}.get(kind_of(node), getattr(node, "_saved_reduction", 0))
    return {1: "mean", 2: "sum"}.get(number)


def _counts_pairs(grad: Tensor, examples: int) -> bool:
    """Return whether a gradient has two dimensions of as many numbers as ``examples``, and is not diagonal in them."""
    dims = [dim for dim, length in enumerate(grad.shape) if length == examples]
    if len(dims) != 2:
        return False
    counts = (grad.detach() != 0.0).movedim(dims, (0, 1)).flatten(2).any(2) if grad.dim() > 2 else grad != 0.0
    return bool(counts.fill_diagonal_(False).any())


def _fibre(shape: Any, dim: Any) -> Any:
    """The index of all numbers along ``dim``, at one place of the others; of all without a dimension."""
    dims = (dim,) if isinstance(dim, int) else dim
    if not dims or not shape:
        return ...
    along = {(d - 2**64 if d >= 2**63 else d) % len(shape) for d in dims}
    return tuple(slice(None) if d in along else n // 2 for d, n in enumerate(shape))

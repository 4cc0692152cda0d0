"""A module's call as a part of autograd's graph that is cut off from the rest.

The parameters enter as leaves of the part's own, and so do the inputs. One node in the graph outside stands for the
whole part: a gradient at an output is what reaches it from outside, and not what passes through another output. What
leaves the part in any other way (an attribute, a list, a hook's closure) is still tied to the part's own leaves, and a
gradient that reaches these from outside is refused: it would be missing in the parameters or in the layers before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import NoRuleError


@dataclass
class _Gate:
    """What stands at a part's leaves: no gradient may reach them unless the part itself asks for it."""

    name: str
    params: tuple[Parameter, ...]
    open: bool = False

    def __call__(self, grad: Tensor) -> None:
        if not self.open:
            raise NoRuleError(
                f"A tensor from inside of {self.name}, which has no rule, reaches the loss in another way than as its "
                "return value (as an attribute, in a list, or by a hook), where its gradient cannot be told apart by "
                "example; return that tensor from forward() beside the output.",
                self.params,
            )


class Part:
    """Of a call of a module: ``leaves`` are its flattened arguments; ``inputs`` those of them that need a gradient,
    ``ends`` what stands for them inside, ``stand_ins`` what stands for the parameters of ``trained`` by name.
    ``kept``: whether its graph is still needed behind the backward pass."""

    def __init__(self, name: str, trained: dict[str, Parameter], leaves: Sequence[Any]) -> None:
        self.name = name
        self.params = tuple(trained.values())
        self.kept = False
        self.gate = _Gate(name, self.params)
        self.first_node = torch.autograd._get_sequence_nr()
        self.stand_ins = {n: p.detach().requires_grad_() for n, p in trained.items()}
        self.inputs: list[Tensor] = []
        self.ends: list[Tensor] = []
        inside: dict[int, Tensor] = {}
        self.leaves: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in inside:
                inside[id(leaf)] = leaf.detach().requires_grad_()
                self.inputs.append(leaf)
                self.ends.append(inside[id(leaf)])
            self.leaves.append(inside.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf)
        for end in self.guarded:
            end.register_hook(self.gate)
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self.leaves]
        self.outputs: list[Tensor] = []

    @property
    def guarded(self) -> list[Tensor]:
        """The leaves that no gradient from outside may reach."""
        return [*self.stand_ins.values(), *self.ends]

    def changed_inputs(self) -> list[Any]:
        """The arguments that were changed in place since."""
        return [
            leaf
            for leaf, version in zip(self.leaves, self._versions, strict=True)
            if isinstance(leaf, Tensor) and leaf._version != version
        ]

    def release(self, results: Sequence[Any], anchor: Tensor, probing: bool) -> tuple[list[Any], dict[int, int]]:
        """The results as the graph outside sees them: those that need a gradient come from one node of their own. And
        the position among the results where each of these comes first -> its number among the node's outputs.

        NoRuleError where they depend on something differentiable that is neither an argument nor one of the module's
        parameters, and (``probing``) where they are views of one another or of an argument.
        """
        back = {id(end): outer for end, outer in zip(self.ends, self.inputs, strict=True)}
        numbers: dict[int, int] = {}
        first: dict[int, int] = {}
        memory = {end.untyped_storage()._cdata for end in self.ends}
        for k, result in enumerate(results):
            if not _differentiable(result) or id(result) in back or id(result) in numbers:
                continue
            first[k] = numbers[id(result)] = len(self.outputs)
            storage = result.untyped_storage()._cdata
            shared = storage in memory
            if shared and probing and any(_overlap(result, other) for other in (*self.ends, *self.outputs)):
                raise NoRuleError(
                    f"{self.name} has no rule, and returns a view of its input or of another output, where a change in "
                    "place of one would go unnoticed in the other; return a clone().",
                    self.params,
                )
            self.outputs.append(result.clone() if shared else result)
            memory.add(storage)
        self._check_origin()
        outside = _Whole.apply(self, anchor, *self.inputs) if self.outputs else ()
        released = [
            outside[numbers[id(result)]] if id(result) in numbers else back.get(id(result), result)
            for result in results
        ]
        return released, first

    def _check_origin(self) -> None:
        """NoRuleError where a path from the outputs leaves the part otherwise than by its leaves."""
        known = {id(end) for end in self.guarded}
        seen = {output.grad_fn for output in self.outputs}
        waiting: list[Any] = list(seen)
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            is_leaf = node.name() == "torch::autograd::AccumulateGrad"
            if id(node.variable) not in known if is_leaf else node._sequence_nr() < self.first_node:
                raise NoRuleError(
                    f"{self.name} has no rule, and uses tensors with a gradient that are neither its arguments nor its "
                    "parameters; pass them to its forward().",
                    self.params,
                )
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)

    def gradients(
        self, wanted: Sequence[Tensor], outputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Gradients at ``wanted``, leaves of the part, of Σ ⟨grads[k], outputs[k]⟩; None where there is no path."""
        self.gate.open = True
        try:
            return list(torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True))
        finally:
            self.gate.open = False


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have an element in common."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    places = torch.arange(a.untyped_storage().nbytes() // a.element_size())
    one, other = (places.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    return bool(torch.isin(one, other).any())


def _differentiable(result: Any) -> bool:
    return isinstance(result, Tensor) and result.requires_grad and result.is_floating_point()


class _Whole(torch.autograd.Function):
    """The node that stands for a part."""

    @staticmethod
    def forward(ctx: Any, part: Part, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor)
        ctx.part = part
        return tuple(output.detach() for output in part.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  (raises torch's own error in a second pass through a graph that was not kept)
        part = ctx.part
        given = {k: grad for k, grad in enumerate(grads) if grad is not None}
        needed = [k for k, need in enumerate(ctx.needs_input_grad[2:]) if need]
        result: list[Tensor | None] = [None] * len(part.inputs)
        if given and needed:
            if not (part.kept or torch._C._autograd._get_current_graph_task_keep_graph()):
                # Not at once: a gradient that comes in another way is still to reach the part's leaves.
                torch.autograd.Variable._execution_engine.queue_callback(part.outputs.clear)
            outputs = [part.outputs[k] for k in given]
            found = part.gradients([part.ends[k] for k in needed], outputs, list(given.values()))
            for k, gradient in zip(needed, found, strict=True):
                result[k] = gradient
        return None, None, *result

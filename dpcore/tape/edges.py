"""Places of autograd's graph: how a tensor gets one, and which of them a backward pass of our own asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from dpcore.errors import UnsupportedError

Target = Callable[[Tensor | None], None]
"""Receives the gradient at a place, None where none came."""
EDGES_OWN = "ownership_token" in GradientEdge._fields


class _Attach(torch.autograd.Function):
    """Gives a tensor that needs no gradient a place in the graph, without a copy.

    A leaf with requires_grad would do, but refuses in-place activations behind it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class Edges:
    """The places whose gradients are asked for, and the leaves that no gradient may reach."""

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        """A leaf in front of what needs no gradient."""
        self.guards: list[Tensor] = []
        """Leaves that no gradient may reach: hooks at them raise an error. A backward pass of the tape's own asks for
        them, because it goes where it is sent and nowhere else."""
        self.forbidden: list[tuple[GradientEdge, Target]] = []
        """Places that no gradient may reach, and what refuses it."""
        self._edges: list[GradientEdge] = []
        self._targets: list[Target] = []
        self._owners: list[Any] = []
        """Nodes that own places of the graph, where torch's edges do not."""

    def placed(self, output: Tensor) -> Tensor:
        """Return ``output`` with a place in the graph of its own."""
        output = no_view(output)
        return output if output.requires_grad else _Attach.apply(output, self.anchor)  # type: ignore[no-any-return]

    def ask(self, output: Tensor, target: Target) -> None:
        """From now on :meth:`gradients` hands ``target`` the gradient at ``output``."""
        self._edges.append(self._edge(output))
        self._targets.append(target)

    def forbid(self, output: Tensor, refuse: Target) -> None:
        """Note that no gradient may come to ``output``: ``refuse`` raises an error."""
        self.forbidden.append((self._edge(output), refuse))

    def _edge(self, output: Tensor) -> GradientEdge:
        """Return what get_gradient_edge does; of a node of torch's own it is the two fields alone.

        A node of Python's is owned by the graph behind it, which the model may drop; torch then crashes where it is
        asked for the gradient there. Newer torch has a token in the edge that owns the node; 2.6 has none.
        """
        node = output.grad_fn
        if node is not None and not isinstance(node, torch._C._FunctionBase):
            return GradientEdge(node, output.output_nr)
        if node is not None and not EDGES_OWN:
            with torch.enable_grad():
                self._owners.append(output.view_as(output).grad_fn)
        return get_gradient_edge(output)

    def give_way(self, tensor: Tensor) -> None:
        """Let a hook that is about to be registered on ``tensor`` come before what is recorded there.

        Where torch returns the gradient at a place in the graph, and goes on behind it, it is the one before all hooks.
        """
        for k, edge in enumerate(self._edges):
            if edge.node is tensor.grad_fn and edge.output_nr == tensor.output_nr:
                target = self._targets[k]
                come_last(tensor, target)
                # What torch returns is left, but for None: nothing has come.
                self._targets[k] = functools.partial(_unless_there, target)

    def clear(self) -> None:
        """Tell all targets that no gradient has come."""
        for target in self._targets:
            target(None)

    def gradients(
        self, outputs: Any, weights: Any, params: Sequence[Parameter], *, guarded: bool, keep: bool | None = None
    ) -> tuple[Sequence[Tensor | None], dict[Parameter, Tensor]]:
        """Return the gradients at the places, for :meth:`hand_on`, and those that came to ``params`` themselves.

        Args:
            outputs: Where the backward pass begins, with ``weights``.
            weights: See ``outputs``.
            params: Parameters: what comes to one of them was made by an operation that no rule has seen.
            guarded: Whether a gradient that reaches a guard is an error.
            keep: Whether the graph is kept.
        """
        wanted: list[Any] = [*self._edges, *params, *(self.guards if guarded else ()), self.anchor]
        grads = torch.autograd.grad(outputs, wanted, weights, retain_graph=keep, allow_unused=True)
        raw = zip(params, grads[len(self._edges) :], strict=False)
        return grads, {param: grad for param, grad in raw if grad is not None}

    def hand_on(self, grads: Sequence[Tensor | None]) -> None:
        """Give every target its gradient."""
        for target, grad in zip(self._targets, grads, strict=False):
            target(grad)


def no_view(output: Tensor) -> Tensor:
    """Return ``output`` with a place in the graph of its own, where it needs a gradient.

    An operation in place gives a view another place, and the gradient no longer comes to the first one: a layer whose
    output is changed in place would lose it.
    """
    if not output._is_view():
        return output
    # Of what has no gradient the memory may be a parameter's or the data's.
    return torch.ops.aten._unsafe_view(output, output.shape) if output.requires_grad else output.clone()


def come_last(output: Tensor, hook: Target) -> None:
    """Call ``hook`` with the gradient at ``output`` as its layer gets it.

    A hook on the tensor would come before those that the user registers on it later, in the forward pass or in the
    loop, and would not see what they make of the gradient.
    """
    node, place = output.grad_fn, output.output_nr
    if node is None:
        output.register_hook(hook)
    else:
        node.register_prehook(lambda grads: hook(grads[place]))


class no_gradients_left:
    """Within, UnsupportedError is raised where a backward pass has given a parameter an ordinary gradient."""

    def __init__(self, parameters: dict[Parameter, str]) -> None:
        self._parameters = parameters
        self._before = [(param.grad, 0 if param.grad is None else param.grad._version) for param in parameters]

    def __enter__(self) -> None:
        pass

    def __exit__(self, failed: object, *exception: object) -> None:
        if failed is not None:
            return
        for (param, name), (grad, version) in zip(self._parameters.items(), self._before, strict=True):
            if param.grad is not grad or (grad is not None and grad._version != version):
                raise UnsupportedError(
                    f"Parameter {name} gets a gradient by a backward pass within the backward pass (by a function "
                    "whose backward() calls torch.autograd.backward, as reversible layers do), where it cannot be told "
                    "apart by example; use torch.utils.checkpoint in its place."
                )


def _unless_there(target: Target, grad: Tensor | None) -> None:
    if grad is None:
        target(None)

"""Uses in functions under torch.utils.checkpoint, whose inputs are dropped until the backward pass."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.native.products import Product
from dpcore.numerics.rounding import SquaredNorm
from dpcore.tape.uses import Saved, Use, WrappedUse


class _Keep(torch.autograd.Function):
    """A node of the graph that keeps a tensor as all others do: by whatever rules are in force for saved tensors."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class Arrival(torch.autograd.Function):
    """Hands the gradient at a tensor on when the backward pass comes there. No copy is made.

    Autograd, asked for that gradient, would keep it to the end of the pass.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, arrive: Any) -> Tensor:
        ctx.arrive = arrive
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.arrive(grad)
        return grad if ctx.needs_input_grad[0] else None, None, None


class DroppedUse(WrappedUse):
    """A use in a checkpointed function: without its inputs until the gradient at its output arrives.

    From then on it keeps them and the gradient, or per-sample gradients in their place where those are smaller.
    """

    def __init__(self, use: Use) -> None:
        super().__init__(use)
        self.sequential = use.sequential
        self._formed: dict[Parameter, Tensor] = {}

    def forget(self) -> None:
        """Forget what an earlier backward pass brought."""
        self.use.grad, self._formed = None, {}

    def drop(self, anchor: Tensor, dropped: list[tuple[Tensor, int]]) -> list[tuple[Saved, Any]]:
        """Let the inputs go, and return outputs of the graph's nodes from which :meth:`arrive` gets them back.

        A node leads to the checkpoint's arguments and their graph. It may be held behind the use's output in that
        graph, but not by the use: the tape holds that, and hooks in the graph hold the tape. Its output is held with
        it, for torch up to 2.9 at least frees what a node saved when nothing refers to that.
        """
        nodes = []
        for saved in inputs_of(self.use):
            dropped.append((saved.tensor, saved.version))
            nodes.append((saved, _Keep.apply(saved.tensor, anchor)))
            saved.drop()
        return nodes

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """That of the use; where it is gone, what was made of it."""
        return next(iter(self._formed.values())) if self._formed else self.use.grad

    @torch.no_grad()
    def arrive(self, grad: Tensor, nodes: list[tuple[Saved, Any]]) -> None:
        """Receive the gradient at the output, batch first; those of several backward passes add up."""
        use = self.use
        if use.grad is not None:
            use.grad = use.grad + grad
            return
        use.grad = grad
        for saved, node in nodes:
            if saved.missing:
                (tensor,) = node.grad_fn.saved_tensors
                saved.bring_back(tensor)
        formed = len(grad) * sum(p.numel() for p in self.params) * 4
        # A rule without a clipped sum of its own forms them all in any case.
        if self._formed or formed < use.stash_bytes() or type(use).add_clipped_sum is Use.add_clipped_sum:
            with torch.autocast(grad.device.type, enabled=False):
                for param in self.params:
                    new = use.grad_sample(param)
                    self._formed[param] = self._formed[param] + new if param in self._formed else new
            use.grad = None
            for saved in inputs_of(use):
                saved.drop()

    def grad_sample(self, param: Parameter) -> Tensor:
        return self._formed[param] if self._formed else self.use.grad_sample(param)

    def takes_turns(self, param: Parameter) -> bool:
        return not self._formed and self.use.takes_turns(param)

    def write_example(self, param: Parameter, i: int, out: Tensor) -> SquaredNorm | None:
        return None if self._formed else self.use.write_example(param, i, out)

    def product(self, param: Parameter) -> Product | None:
        return None if self._formed else self.use.product(param)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return not self._formed and self.use.ghost_is_cheaper(param)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Use:
        if not self._formed:
            return self.use.rows(index, dtype)
        part = copy.copy(self)
        part._formed = {p: formed.index_select(0, index).to(dtype) for p, formed in self._formed.items()}
        return part

    def of_units(self, group: int) -> Use:
        return super().of_units(group) if self._formed else self.use.of_units(group)

    def stash_bytes(self) -> int:
        return sum(f.nbytes for f in self._formed.values()) + (0 if self.use.grad is None else self.use.stash_bytes())


def inputs_of(use: Use) -> list[Saved]:
    """Return the floating-point inputs that a use keeps."""
    found: list[Saved] = []
    for value in vars(use).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        found += [part for part in parts if isinstance(part, Saved) and part.tensor.is_floating_point()]
    return found

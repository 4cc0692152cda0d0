"""Uses in functions under torch.utils.checkpoint, whose inputs are dropped until the backward pass, and then again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.native.products import Product
from dpcore.numerics.precision import full_precision
from dpcore.numerics.rounding import SquaredNorm, squares
from dpcore.tape.fingerprint import Fingerprint, saved_in
from dpcore.tape.segment import Segment, other_way
from dpcore.tape.uses import Saved, Use

SMALL = 8
"""Per-sample gradients of a parameter are kept where they take this many times fewer bytes than the use they are of."""


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


class DroppedUse(Use):
    """A use in a checkpointed function: without its inputs until the gradient at its output arrives.

    Then it keeps what is the smallest: inputs and gradient, per-sample gradients, or norms alone. In the last case
    ``segment`` brings the others back for the clipped sum.
    """

    def __init__(self, use: Use, segment: Segment | None) -> None:
        self.use = use
        self.segment = segment
        self.params = use.params
        self.sequential, self.sparse = use.sequential, use.sparse
        self._first = use
        self.forget()

    def forget(self) -> None:
        """Forget what an earlier backward pass brought."""
        self.use, self.use.grad = self._first, None
        self._arrived = False
        self._formed: dict[Parameter, Tensor] = {}
        self._norms: dict[Parameter, SquaredNorm] = {}
        self._fingerprint: Fingerprint | None = None
        self._bytes = 0
        self._other = False
        """Whether what was let go came back with other bits."""
        self._expected: Mapping[Parameter, tuple[Tensor, Tensor]] = {}
        self._added: set[Parameter] = set()
        """Parameters of which the clipped sum was added when what was let go came back."""
        self._asks = False
        """Whether several gradients came, so that its norms are only known when it has come back."""

    def drop(self, anchor: Tensor, dropped: list[tuple[Tensor, int]]) -> list[tuple[Saved, Any]]:
        """Let the inputs go, and return outputs of the graph's nodes from which :meth:`arrive` gets them back.

        A node leads to the checkpoint's arguments and their graph. It may be held behind the use's output in that
        graph, but not by the use: the tape holds that, and hooks in the graph hold the tape. Its output is held with
        it, for torch up to 2.9 at least frees what a node saved when nothing refers to that.
        """
        nodes = []
        for saved in _inputs(self.use):
            dropped.append((saved.tensor, saved.version))
            nodes.append((saved, _Keep.apply(saved.tensor, anchor)))
            saved.drop()
        return nodes

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """That of the use; where it is gone, what was made of it."""
        if self._formed:
            return next(iter(self._formed.values()))
        if self._norms:
            return next(iter(self._norms.values())).value
        self._bring_back_if_asked()
        return self.use.grad

    @property
    def is_let_go(self) -> bool:  # type: ignore[override]
        """Whether inputs and gradient are gone."""
        return (bool(self._norms) or self._asks) and self.use is self._first

    # ---- within the backward pass

    @torch.no_grad()
    def arrive(self, grad: Tensor, nodes: list[tuple[Saved, Any]]) -> None:
        """Receive the gradient at the output, batch first; those of several backward passes add up."""
        if self._norms or self._asks:
            self.forget()
            self._arrived = self._asks = True
            return
        again, self._arrived = self._arrived, True
        before = self.use.grad
        self.use.grad = grad
        for saved, node in nodes:
            if saved.missing:
                (tensor,) = node.grad_fn.saved_tensors
                saved.bring_back(tensor)
        if again and before is not None:
            self.use.grad = before + grad
            return
        size, formed = self.use.stash_bytes(), len(grad) * sum(p.numel() for p in self.params) * 4
        with torch.autocast(grad.device.type, enabled=False):
            if self._formed or formed * SMALL <= size or type(self.use).add_clipped_sum is Use.add_clipped_sum:
                self._form(again)  # the last: a rule that knows no other way
            elif self.segment is not None and self.segment.lets_go(self.params, min(size, formed)):
                self._measure(size)
            elif formed < size:
                self._form(again)
            else:
                return
        self._release()

    def _form(self, again: bool) -> None:
        """Form per-sample gradients, and add them to those of an earlier backward pass."""
        for param in self.params:
            formed = self.use.grad_sample(param)
            self._formed[param] = self._formed[param] + formed if again else formed

    def _measure(self, size: int) -> None:
        """Take the norms of large gradients, and form the small ones."""
        assert self.use.grad is not None
        self._bytes = size
        self._fingerprint = Fingerprint.of(self.use)
        examples = len(self.use.grad)
        for param in self.params:
            if examples * param.numel() * 4 * SMALL <= size:
                self._formed[param] = self.use.grad_sample(param)
            else:
                self._norms[param] = _norm(self.use, param)

    def _release(self) -> None:
        """Let inputs and gradient go."""
        use, self.use = self.use, self._first
        use.grad = None
        for saved in _inputs(use):
            saved.drop()

    # ---- after it

    def bring_back(self) -> None:
        if self.is_let_go and not self._added:
            assert self.segment is not None
            self.segment.run()

    def expect(self, sums: Mapping[Parameter, tuple[Tensor, Tensor]]) -> None:
        self._expected, self._added = sums, set()

    def end(self) -> None:
        self.expect({})
        if self.segment is not None:
            self.segment.end_of_use()

    def _bring_back_if_asked(self) -> None:
        if self._asks:
            self.bring_back()

    @torch.no_grad()
    def refill(self, use: Use) -> None:
        """Take what a third run has recorded: a use with its inputs and gradient.

        Raises:
            PrivacyError: it is a use of something else.
        """
        same = type(use) is type(self._first) and len(use.params) == len(self.params)
        if not same or use.grad is None or any(p is not q for p, q in zip(use.params, self.params, strict=True)):
            raise other_way()
        for saved in saved_in(self._first):
            if not saved.missing:
                saved.get("a checkpointed layer")  # not changed since
        self.use = use
        with torch.autocast(use.grad.device.type, enabled=False):
            if self._fingerprint is not None:
                found = Fingerprint.of(use)
                if not self._fingerprint.near(found, use):
                    raise other_way()
                self._other = not self._fingerprint.same_bits(found)
            if self._norms and self._expected.keys() >= self._norms.keys():
                # Now, so that at no moment all of a segment's inputs and gradients are there.
                with full_precision():
                    for param in self._norms:
                        self._add(param, *self._expected[param])
                self._added = set(self._norms)
                self._release()

    def _most(self, param: Parameter) -> Tensor | None:
        """[B] by what to multiply gradients that came back, so that none is larger than was counted; None: by 1.

        It is 1 for every example whose gradient is the same, whatever came back of others. What was counted as infinite
        clips nothing: such an example's norm is taken anew.
        """
        if not self._other:
            return None
        counted, found = _upper(self._norms[param]), _upper(_norm(self.use, param))
        most = (counted / found).sqrt().clamp(max=1.0).nan_to_num(0.0)
        return torch.where(counted.isfinite(), most, 1.0)

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        if param in self._norms:
            return self._norms[param]
        self.bring_back()
        return self.use.norm_sq(param)

    def grad_sample(self, param: Parameter) -> Tensor:
        if param in self._formed:
            return self._formed[param]
        self.bring_back()
        return self.use.grad_sample(param)

    def takes_turns(self, param: Parameter) -> bool:
        return param not in self._formed and self.use.takes_turns(param)

    def example(self, param: Parameter, i: int) -> Tensor:
        self.bring_back()
        return self.use.example(param, i)

    def write_example(self, param: Parameter, i: int, out: Tensor) -> SquaredNorm | None:
        if param in self._formed:
            return None
        self.bring_back()
        return self.use.write_example(param, i, out)

    def product(self, param: Parameter) -> Product | None:
        if param in self._formed:
            return None
        self.bring_back()
        return self.use.product(param)

    def add_example(self, param: Parameter, i: int, out: Tensor) -> None:
        self.bring_back()
        self.use.add_example(param, i, out)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        if param in self._added:
            return
        self.bring_back()
        self._add(param, factors, out)

    def _add(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        most = self._most(param) if param in self._norms else None
        self.use.add_clipped_sum(param, factors if most is None else factors * most.to(factors.dtype), out)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return param in self._norms or (param not in self._formed and self.use.ghost_is_cheaper(param))

    def rows(self, index: Tensor, dtype: torch.dtype) -> Use:
        if self._formed and not self._norms:
            part = copy.copy(self)
            part._formed = {p: formed.index_select(0, index).to(dtype) for p, formed in self._formed.items()}
            return part
        self.bring_back()
        back = self.use.rows(index, dtype)
        if self._norms and self._other and back.grad is not None:
            # The norms that were counted may be those by which these examples are clipped.
            most = (
                torch.stack([m for p in self._norms if (m := self._most(p)) is not None]).amin(0).index_select(0, index)
            )
            back.grad = back.grad * most.to(back.grad.dtype).view(-1, *[1] * (back.grad.dim() - 1))
        return back

    def stash_bytes(self) -> int:
        formed = sum(formed.nbytes for formed in self._formed.values())
        return formed + (self._bytes if self.use.grad is None else self.use.stash_bytes())


def _inputs(use: Use) -> list[Saved]:
    """Return the floating-point inputs that a use keeps."""
    return [saved for saved in saved_in(use) if saved.tensor.is_floating_point()]


def _upper(norm: SquaredNorm) -> Tensor:
    """[B] the largest squared norms that a rounded one may stand for."""
    return norm.value * (1.0 + norm.error) if norm.scale is None else norm.value + norm.error * norm.scale


def _norm(use: Use, param: Parameter) -> SquaredNorm:
    """Squared norms of per-sample gradients, which are formed one by one where all would take much memory."""
    with full_precision():
        if use.ghost_is_cheaper(param):
            return use.norm_sq(param)
        if not use.takes_turns(param):
            grads = use.grad_sample(param)
            return squares(grads.reshape(len(grads), -1))
        assert use.grad is not None
        found = [squares(use.example(param, i).reshape(1, -1)) for i in range(len(use.grad))]
    return SquaredNorm(torch.cat([norm.value for norm in found]), max(norm.error for norm in found))

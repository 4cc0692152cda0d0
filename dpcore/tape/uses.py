"""Uses of parameters: what a rule keeps of one, and the table of rules by torch function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import UnsupportedError
from dpcore.native.parts import Part
from dpcore.native.products import Product
from dpcore.numerics.rounding import SquaredNorm, squares
from dpcore.privacy_unit import rows_of

Handler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``handler(tape, function, args, kwargs)``: what the call of a torch function returns while a tape is active."""
HANDLERS: dict[Callable[..., Any], Handler] = {}


DERIVING: set[Callable[..., Any]] = set()
"""Functions with a rule that is not asked where no argument has a batch: the result comes from parameters alone."""
REWRITES: dict[Callable[..., Any], Handler] = {}
"""``rewrite(tape, function, args, kwargs)``: the same by a function that has a rule, or None."""


def handles(*functions: Callable[..., Any], derives: bool = False) -> Callable[[Handler], Handler]:
    """Decorator: the handler for calls of these torch functions while a tape is active.

    ``derives``: not for calls without a batch.
    """

    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        if derives:
            DERIVING.update(functions)
        return handler

    return register


def rewrites(*functions: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Decorator: another spelling for calls of these torch functions with a parameter and a batch."""

    def register(handler: Handler) -> Handler:
        REWRITES.update(dict.fromkeys(functions, handler))
        return handler

    return register


class Recorder(Protocol):
    """The part of a tape that :mod:`dpcore.tape.deferred_lookups` needs."""

    scale: float | None
    probing: bool
    averaged: dict[Parameter, bool]
    dropped: list[tuple[Tensor, int]] | None

    def attach(self, output: Tensor, target: Callable[[Tensor | None], None]) -> Tensor:
        """Remember the place of ``output`` in the graph, where ``target`` gets the gradient; return what to use."""
        ...


class Use:
    """One recorded call of a layer: its inputs and, after backward, its output's gradient. Every rule subclasses this.

    After the backward pass ``grad`` is the gradient at the output, None where the loss does not depend on it. All
    tensors are batch first. ``params`` are the trained parameters that this application contributes to.
    """

    name = ""
    params: tuple[Parameter, ...] = ()
    grad: Tensor | None = None
    sequential: bool = False
    """True where its forward pass is a loop of many small operations, which wants many examples at a time."""

    sparse: bool = False
    """True where most of an example's gradient is zero, so that :meth:`add_example` costs next to nothing."""

    def kind(self) -> tuple[Any, ...] | None:
        """Return all that decides how its norms are best taken, but for the machine: uses that share it are treated
        alike, however many examples they have. None: every use is looked at.
        """
        return None

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        """Squared norms [B] of the per-sample gradients without forming them, with a bound of what rounding hides."""
        raise NotImplementedError

    def grad_sample(self, param: Parameter) -> Tensor:
        """[B, *param.shape] per-sample gradients."""
        raise NotImplementedError

    def for_kernels(self, param: Parameter, formed: bool) -> Part | None:
        """Return what kernels need of a parameter's gradients to take norms and sums of many parameters at once.

        Asked only where kernels serve. ``formed``: where per-sample gradients are to be formed. None:
        :meth:`grad_sample`, or :meth:`norm_sq` and :meth:`add_clipped_sum`, do that.
        """
        return None

    def takes_turns(self, param: Parameter) -> bool:
        """Return whether :meth:`example` forms one example's gradient as fast as :meth:`grad_sample` forms its part of
        all of them.
        """
        return False

    def example(self, param: Parameter, i: int) -> Tensor:
        """[*param.shape], in float32 or better: the gradient of example i, in memory of its own."""
        raise NotImplementedError

    def write_example(self, param: Parameter, i: int, out: Tensor) -> SquaredNorm | None:
        """Write the gradient of example i to ``out`` [n], in the order of the parameter's memory, in float32.

        Returns its squared norm [1]; None, and ``out`` as it was, where that is no faster than :meth:`example`.
        """
        return None

    def product(self, param: Parameter) -> Product | None:
        """Return the product at all positions that every example's gradient is, where kernels form it; or None."""
        return None

    def add_example(self, param: Parameter, i: int, out: Tensor) -> None:
        """Out += gradient of example i."""
        out += self.example(param, i)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        """Out += sum_i factors[i] * gradient of example i; ``out`` has the parameter's shape."""
        raise NotImplementedError

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        """Return whether the ghost norm and a second contraction cost less than keeping per-sample gradients."""
        return False

    def rows(self, index: Tensor, dtype: torch.dtype) -> Use:
        """The same application restricted to the examples ``index`` [k], in ``dtype``."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Saved):
                rows = value.get(self.name).detach().index_select(0, index)
                setattr(part, name, Saved(rows.to(dtype) if rows.is_floating_point() else rows))
        part.grad = None if self.grad is None else self.grad.index_select(0, index).to(dtype)
        return part

    def of_units(self, group: int) -> Use:
        """The same application to units of ``group`` rows that follow each other, whose gradients add up."""
        return UnitUse(self, group)

    def stash_bytes(self) -> int:
        """Bytes of inputs and output gradients that this application holds for the batch."""
        inputs = sum(value.tensor.nbytes for value in vars(self).values() if isinstance(value, Saved))
        return inputs + (0 if self.grad is None else self.grad.nbytes)


class WrappedUse(Use):
    """Another ``use``, but for what a subclass says otherwise."""

    def __init__(self, use: Use) -> None:
        self.use = use
        self.params, self.sparse = use.params, use.sparse

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        return self.use.norm_sq(param)

    def grad_sample(self, param: Parameter) -> Tensor:
        return self.use.grad_sample(param)

    def takes_turns(self, param: Parameter) -> bool:
        return self.use.takes_turns(param)

    def example(self, param: Parameter, i: int) -> Tensor:
        return self.use.example(param, i)

    def add_example(self, param: Parameter, i: int, out: Tensor) -> None:
        self.use.add_example(param, i, out)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        self.use.add_clipped_sum(param, factors, out)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return self.use.ghost_is_cheaper(param)

    def stash_bytes(self) -> int:
        return self.use.stash_bytes()


def in_units(uses: Iterable[Use], group: int) -> list[Use]:
    """Uses by rows as those of units of ``group`` rows, after the backward pass; without those that it did not reach.

    Here rows become units, for every rule: what comes before knows rows alone, and what comes behind units.
    """
    return list(uses) if group == 1 else [use.of_units(group) for use in uses if use.grad is not None]


class UnitUse(WrappedUse):
    """A ``use`` by rows as one by units of ``group`` rows, of any rule: the rows' gradients are formed and added up."""

    def __init__(self, use: Use, group: int) -> None:
        super().__init__(use)
        self.group = group
        self.sequential = use.sequential
        assert use.grad is not None
        self.grad = use.grad.unflatten(0, (-1, group))

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        return squares(self.grad_sample(param).flatten(1))

    def grad_sample(self, param: Parameter) -> Tensor:
        return self.use.grad_sample(param).unflatten(0, (-1, self.group)).sum(1)

    def takes_turns(self, param: Parameter) -> bool:
        # Also where rows' gradients would not be formed: those of all rows may be more than memory holds.
        return self.use.takes_turns(param) or self.use.ghost_is_cheaper(param)

    def example(self, param: Parameter, i: int) -> Tensor:
        dtype, rows = (
            torch.promote_types(param.dtype, torch.float32),
            rows_of(torch.tensor([i], device=param.device), self.group),
        )
        one, out = self.use.rows(rows, dtype), torch.zeros_like(param, dtype=dtype, requires_grad=False)
        if self._adds_up:
            one.add_clipped_sum(param, out.new_ones(self.group), out)
            return out
        return out.add_(one.grad_sample(param).sum(0))

    def add_example(self, param: Parameter, i: int, out: Tensor) -> None:
        out += self.example(param, i)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        if self._adds_up:
            self.use.add_clipped_sum(param, factors.repeat_interleave(self.group), out)
        else:
            out += torch.tensordot(factors, self.grad_sample(param).to(factors.dtype), dims=1)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return False

    def rows(self, index: Tensor, dtype: torch.dtype) -> UnitUse:
        return UnitUse(self.use.rows(rows_of(index, self.group), dtype), self.group)

    @property
    def _adds_up(self) -> bool:
        """Return whether the rule adds up gradients of rows without forming each."""
        return type(self.use).add_clipped_sum is not Use.add_clipped_sum


class FormedUse(Use):
    """A use that forms per-sample gradients within the backward pass, and adds up those of several."""

    def forget(self) -> None:
        """Forget what an earlier backward pass brought."""
        raise NotImplementedError


@dataclass
class Saved:
    """An input kept by a rule, and its version: an in-place change after the use would falsify the gradient.

    The tensor is kept without its place in the graph (detached tensors share the version). The graph's nodes hold the
    hooks that hold the uses; a use that held a node would close a circle through autograd, where Python's collector
    does not see it, and every step's activations would stay for ever.
    """

    tensor: Tensor
    version: int = field(init=False)
    missing: bool = False
    """True while it is dropped: ``tensor`` then has no values."""

    def __post_init__(self) -> None:
        self.tensor = self.tensor.detach()
        self.version = self.tensor._version

    def get(self, name: str) -> Tensor:
        """Return the input of the layer ``name``."""
        if self.missing:
            raise UnsupportedError(
                f"The input of {name} was dropped under torch.utils.checkpoint and did not come back, so its gradient "
                "cannot be computed; call it without checkpoint()."
            )
        if self.tensor._version != self.version:
            raise UnsupportedError(
                f"The input of {name} was changed in place after {name} had used it, so its gradient can no longer be "
                "computed; make that operation out-of-place (for instance ReLU(inplace=False))."
            )
        return self.tensor

    def drop(self) -> None:
        """Let the values go; the shape stays."""
        self.tensor, self.missing = self.tensor.new_empty(()).expand(self.tensor.shape), True

    def bring_back(self, tensor: Tensor) -> None:
        """Take ``tensor``, which has the values that were dropped."""
        self.tensor, self.missing = tensor, False
        self.version = tensor._version

"""Tensors computed from trained parameters and constants alone, before any example comes in.

A transposed weight, one plus a scale, a standardised kernel, a table of biases read at fixed places, positions that
went through a layer. Such a tensor keeps its graph back to the parameters. Where it meets a batch, a rule sees a
stand-in for it, as if it were a parameter; what the rule finds for each example is then pulled back to the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import NoRuleError, NotLearnt, UnsupportedError
from dpcore.numerics.rounding import SquaredNorm
from dpcore.tape.uses import Use
from dpcore.tree import flatten

_REORDERING = {
    getattr(space, name)
    for space in (torch, Tensor)
    for name in (
        *("t", "transpose", "permute", "reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze"),
        *("movedim", "swapaxes", "adjoint", "contiguous", "view_as", "reshape_as"),
    )
    if hasattr(space, name)
} | {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
"""Functions whose result holds every number of their input once: a gradient keeps its norm on the way back."""

_HALF = (torch.bfloat16, torch.float16)
_CLOSED = ("CopySlices", "CppFunction")
"""Nodes that keep another one inside (that of a write to a part of a tensor), or are of an extension in C++."""


class Derivation:
    """A tensor that comes from the parameters ``roots``, and the ``stand`` that rules see in its place.

    ``reorder``: puts the numbers of a tensor like the root into the order that they have here, where that is all that
    was done; else None. ``added``: makes the use where it is added to a batch, if there is a better one than that of
    any tensor.
    """

    def __init__(
        self,
        tensor: Tensor,
        roots: tuple[Parameter, ...],
        reorder: Callable[[Tensor], Tensor] | None,
        added: Callable[[], Use] | None,
    ) -> None:
        self.tensor = tensor
        self.roots = roots
        self.reorder = reorder
        self.added = added

    @property
    def keeps_norm(self) -> bool:
        """Return whether a gradient keeps its norm on the way back: only the order of its numbers changes."""
        return self.reorder is not None

    @classmethod
    def of(
        cls,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensor: Tensor,
        sources: Sequence[Parameter | Derivation],
        added: Callable[[], Use] | None = None,
    ) -> Derivation:
        """``tensor``, which ``func`` has made of ``sources``."""
        roots = [root for source in sources for root in (source.roots if isinstance(source, Derivation) else (source,))]
        reorder = None
        if len(sources) == 1 and func in _REORDERING and args:
            source = sources[0]
            origin = source.tensor if isinstance(source, Derivation) else source
            before = source.reorder if isinstance(source, Derivation) else _as_it_is
            if args[0] is origin and before is not None:
                reorder = functools.partial(_reordered, before, func, args[1:], dict(kwargs))
        return cls(tensor, tuple(dict.fromkeys(roots)), reorder, added)

    def stand(self, name: str) -> Parameter:
        """A leaf with the tensor's values, which no gradient may reach: rules take it out of the graph."""
        stand = Parameter(self.tensor.detach())
        roots = self.roots

        def refuse(grad: Tensor) -> None:
            raise NoRuleError(
                f"What is computed from {name} meets the examples in an operation that dpcore has no rule for; wrap "
                "that operation in a module of its own, or freeze the parameter with requires_grad_(False).",
                roots,
            )

        stand.register_hook(refuse)
        return stand

    def read(self, storages: Mapping[int, Parameter]) -> set[Parameter]:
        """Return whose numbers the way back to the roots reads, where it does not show that all the roots'."""
        waiting, seen = [self.tensor.grad_fn], set()
        found: set[Parameter] = set()
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction) or type(node).__name__ in _CLOSED:
                found.update(self.roots)  # what it keeps need not be among its saved tensors
            for name in dir(node):
                if name.startswith("_saved_"):
                    saved = _saved(node, name)
                    found.update(self.roots if saved is None else [storages[s] for s in saved if s in storages])
            waiting += [before for before, _ in node.next_functions]
        return found

    def pull(self, root: Parameter, grad: Tensor) -> Tensor:
        """The gradient at ``root`` for one at the tensor."""
        return self._pull(root, grad, False).to(grad.dtype)

    def pull_samples(self, root: Parameter, grads: Tensor) -> Tensor:
        """[B, *root.shape] for gradients [B, *shape] at the tensor."""
        if not len(grads):
            return grads.new_zeros((0, *root.shape))
        try:
            found = self._pull(root, grads, True)
        except UnsupportedError:
            raise
        except RuntimeError:  # an operation that torch cannot take for many gradients at once
            found = torch.stack([self._pull(root, grad, False) for grad in grads])
        return found.to(grads.dtype)

    def _pull(self, root: Parameter, grad: Tensor, many: bool) -> Tensor:
        if self.reorder is not None and self.tensor.dtype in _HALF and not many:
            # Through the graph a sum would be rounded to half precision, and an example's share in it could grow.
            with torch.enable_grad():
                like_root = torch.empty_like(root, dtype=grad.dtype).requires_grad_()
                (exact,) = torch.autograd.grad(self.reorder(like_root), like_root, grad)
            return exact
        try:
            (found,) = torch.autograd.grad(
                self.tensor,
                root,
                grad.to(self.tensor.dtype),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=many,
            )
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise UnsupportedError(
                "A parameter, or what is computed from it alone, was changed in place between the forward pass and the "
                "optimizer's step, so gradients by example can no longer be computed; change it after the step."
            ) from error
        return grad.new_zeros((*grad.shape[:1], *root.shape) if many else root.shape) if found is None else found


class NotKept(RuntimeError):
    """A graph that keeps no tensors was asked for the one with this ``storage``."""

    def __init__(self, storage: int) -> None:
        super().__init__("A pass asks for a tensor that its graph has not kept.")
        self.storage = storage


def storage_of(tensor: Tensor) -> int:
    """Return what tells one storage from others while it lives; 0 for a tensor without one (a sparse one)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def _saved(node: Any, name: str) -> list[int] | None:
    """Return the storages of the tensors that a node of a graph has saved under that name; None: nobody sees them."""
    try:
        values = flatten(getattr(node, name))[0]
    except NotKept as error:  # of several, the first
        return None if isinstance(getattr(node, f"_raw{name}"), tuple | list) else [error.storage]
    except RuntimeError:  # changed in place since, say
        return None
    return [storage_of(value) for value in values if isinstance(value, Tensor)]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _reordered(
    before: Callable[[Tensor], Tensor],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Tensor,
) -> Tensor:
    """Return ``func`` of what ``before`` makes of a tensor."""
    result: Tensor = func(before(of), *args, **kwargs)
    return result


class ThroughUse(Use):
    """A use of stand-ins as one of the parameters that they come from."""

    def __init__(self, use: Use, stands: dict[Parameter, Derivation]) -> None:
        self.use = use
        self.stands = {p: stands[p] for p in use.params if p in stands}
        own = [p for p in use.params if p not in stands]
        roots = [root for derivation in self.stands.values() for root in derivation.roots]
        self.params = tuple(dict.fromkeys([*own, *roots]))
        self.sequential, self.sparse = use.sequential, use.sparse

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """That of the use."""
        return self.use.grad

    def _of(self, root: Parameter) -> list[tuple[Parameter, Derivation | None]]:
        """Return what leads to ``root`` in this use: itself (None), and its stand-ins."""
        found = [(p, d) for p, d in self.stands.items() if any(r is root for r in d.roots)]
        return [*([(root, None)] if any(p is root for p in self.use.params) else []), *found]

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        ((inner, _),) = self._of(param)
        return self.use.norm_sq(inner)

    def grad_sample(self, param: Parameter) -> Tensor:
        parts = []
        for inner, derivation in self._of(param):
            grads = self.use.grad_sample(inner)
            parts.append(grads if derivation is None else derivation.pull_samples(param, grads))
        return sum(parts[1:], parts[0])

    def takes_turns(self, param: Parameter) -> bool:
        return all((d is None or d.keeps_norm) and self.use.takes_turns(p) for p, d in self._of(param))

    def example(self, param: Parameter, i: int) -> Tensor:
        total: Tensor | None = None
        for inner, derivation in self._of(param):
            found = self.use.example(inner, i)
            found = found if derivation is None else derivation.pull(param, found)
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        for inner, derivation in self._of(param):
            if derivation is None:
                self.use.add_clipped_sum(inner, factors, out)
                continue
            # In memory as the stand-in is: turned round, it then lies as the parameter does.
            total = torch.zeros_like(inner, dtype=out.dtype, requires_grad=False)
            self.use.add_clipped_sum(inner, factors, total)
            out += derivation.pull(param, total)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        of = self._of(param)
        alone = len(of) == 1 and (of[0][1] is None or of[0][1].keeps_norm)
        return alone and self.use.ghost_is_cheaper(of[0][0])

    def rows(self, index: Tensor, dtype: torch.dtype) -> ThroughUse:
        return ThroughUse(self.use.rows(index, dtype), self.stands)

    def of_units(self, group: int) -> ThroughUse:
        return ThroughUse(self.use.of_units(group), self.stands)

    def stash_bytes(self) -> int:
        return self.use.stash_bytes()


class Uses(list[Use]):
    """The uses of a pass; those of stand-ins become uses of the parameters behind them. ``unmet``: names of parameters
    that no look at the model has met.
    """

    def __init__(self, stands: dict[Parameter, Derivation]) -> None:
        super().__init__()
        self._stands = stands
        self._others: list[Parameter] = []
        """Parameters at work without a use."""
        self.unmet: Mapping[Parameter, str] = {}

    def append(self, use: Use) -> None:
        through = bool(self._stands) and any(p in self._stands for p in use.params)
        use = ThroughUse(use, self._stands) if through else use
        if self.unmet:
            self.meet(use.params)
        super().append(use)

    def meet(self, params: Sequence[Parameter]) -> None:
        """Note parameters at work; NotLearnt where a look at the model has to come first."""
        for param in params:
            if param in self.unmet:
                raise NotLearnt(f"Parameter {self.unmet[param]}", (param,))
            self._others.append(param)

    @property
    def met(self) -> set[Parameter]:
        """Return the parameters that were at work."""
        return {*self._others, *(param for use in self for param in use.params)}

"""Keeps what a tape watches: the trained parameters, and what a model computes from them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import UnsupportedError
from dpcore.tape.derived import Derivation
from dpcore.tape.uses import Use
from dpcore.tree import flatten, unflatten


class Sources:
    """The trained ``parameters``, and what came from them alone, with the stand-ins that rules see in its place.

    ``guards``: gets the stand-ins, which no gradient may reach.
    """

    def __init__(self, parameters: dict[Parameter, str], guards: list[Tensor]) -> None:
        self.stands: dict[Parameter, Derivation] = {}
        """Stand-ins for what is computed from parameters alone."""
        self._names = parameters
        self._trained = set(map(id, parameters))
        self._guards = guards
        self.derived: dict[int, Derivation] = {}
        """Those computed from parameters alone, by identity."""
        self._stand_of: dict[int, Parameter] = {}

    def copy_of(self, other: Sources) -> None:
        """Begin with all that ``other`` knows."""
        self.stands = other.stands
        self.derived, self._stand_of = dict(other.derived), dict(other._stand_of)

    def among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Parameter | Derivation]:
        """The trained parameters among the arguments, and what comes from trained parameters alone."""
        if not self.derived and not self.stands:  # by far the most calls have none: the fewest steps
            trained = self._trained
            for value in (*args, *kwargs.values()) if kwargs else args:
                if id(value) in trained or isinstance(value, list | tuple):
                    break
            else:
                return []
        found: list[Parameter | Derivation] = []
        for value in tensors_among(args, kwargs):
            derivation = self.derived.get(id(value))
            if derivation is not None:
                found.append(derivation)
            elif self.trains(value):
                found.append(value)
        return found

    def beside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The other tensors among the arguments."""
        tensors = tensors_among(args, kwargs)
        if not self.derived and not self.stands:
            return [value for value in tensors if id(value) not in self._trained]
        return [value for value in tensors if value not in self]

    def is_derived(self, value: Any) -> bool:
        """Return whether this comes from trained parameters alone."""
        return id(value) in self.derived

    def __contains__(self, value: Any) -> bool:
        """Return whether this is a trained parameter, or comes from trained parameters alone."""
        return self.trains(value) or self.is_derived(value)

    def trains(self, tensor: Any) -> TypeGuard[Parameter]:
        """Return whether this is one of the trained parameters, or stands for what comes from them alone."""
        return id(tensor) in self._trained or (
            bool(self.stands) and isinstance(tensor, Parameter) and tensor in self.stands
        )

    def root(self, param: Parameter) -> Parameter:
        """The parameter itself, or the first one that a stand-in comes from."""
        derivation = self.stands.get(param) if self.stands else None
        return param if derivation is None else derivation.roots[0]

    def name(self, param: Parameter) -> str:
        """The name of the parameter itself, or of the first one that a stand-in comes from."""
        return self._names[self.root(param)]

    def layer(self, params: Sequence[Parameter]) -> str:
        """The layer's name in messages: the first parameter's, without its last part."""
        name = self.name(params[0]) if self.stands else self._names[params[0]]
        return name.rpartition(".")[0] or name

    def note_derived(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        sources: Sequence[Parameter | Derivation],
        added: Callable[[], Use] | None,
    ) -> None:
        """Remember that ``func`` has computed ``result`` of ``sources`` alone."""
        for tensor in tensors_among((result,), {}):
            if tensor.requires_grad and not self.trains(tensor) and tensor.grad_fn is not None:
                self.derived[id(tensor)] = Derivation.of(func, args, kwargs, tensor, sources, added)
                self._stand_of.pop(id(tensor), None)

    def with_stands(self, value: Any) -> Any:
        """Arguments with stand-ins in the place of what comes from parameters alone."""
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self.with_stands(part) for part in value)
        derivation = self.derived.get(id(value))
        if derivation is None:
            return value
        stand = self._stand_of.get(id(value))
        if stand is None:
            stand = self._stand_of[id(value)] = derivation.stand(self._names[derivation.roots[0]])
            self.stands[stand] = derivation
            self._guards.append(stand)
        return stand


@contextmanager
def handed_on(sources: Sources, units: Iterable[nn.Module]) -> Iterator[None]:
    """Within, ``fully_shard`` hands ``units`` what comes from parameters alone as it is, and sees constants.

    It would hand on another tensor, and send a gradient of zeros back by it.
    """
    hidden: list[dict[int, tuple[Tensor, Tensor]]] = []

    def hide(unit: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        hidden.append({k: (leaf.detach(), leaf) for k, leaf in enumerate(leaves) if leaf in sources})
        return _replaced(leaves, spec, {k: constant for k, (constant, _) in hidden[-1].items()})

    def put_back(unit: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        back = {}
        for k, (constant, leaf) in hidden.pop().items():
            seen = leaves[k]
            if seen is not constant and (seen.dtype == leaf.dtype or seen.shape != leaf.shape):
                raise UnsupportedError(
                    f"A hook changes what a {type(unit).__name__}, a unit of fully_shard, gets, and that comes "
                    "from parameters alone; change it within the layer's forward()."
                )
            back[k] = leaf if seen is constant else leaf.to(seen.dtype)
        return _replaced(leaves, spec, back)

    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(unit.register_forward_pre_hook(hide, prepend=True, with_kwargs=True))
            stack.enter_context(unit.register_forward_pre_hook(put_back, with_kwargs=True))
        yield


def _replaced(leaves: list[Any], spec: Any, by: dict[int, Tensor]) -> Any:
    """Return what a hook does of ``leaves`` with others in some places: None where there are none."""
    return unflatten(spec, [by.get(k, leaf) for k, leaf in enumerate(leaves)]) if by else None


def roots_of(sources: Sequence[Parameter | Derivation]) -> list[Parameter]:
    """The trained parameters behind ``sources``."""
    return [root for source in sources for root in (source.roots if isinstance(source, Derivation) else (source,))]


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among arguments, also those in a list or tuple."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [part for part in value if isinstance(part, Tensor)]
    return found

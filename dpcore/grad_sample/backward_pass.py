"""The gradients of one batch between its backward pass and the optimiser's step, where users read and write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from dpcore.errors import PrivacyError
from dpcore.rules.linear import wide
from dpcore.tape.uses import Use, WrappedUse, in_units


class GradSampleOwner(Protocol):
    """An object that records the gradients of a parameter and answers for its ``grad_sample``."""

    def read_grad_sample(self, param: Parameter) -> Any:
        """Return the per-sample gradients of ``param``, None where there are none."""
        ...

    def write_grad_sample(self, param: Parameter, value: Any) -> None:
        """Put ``value`` in the place of what was recorded."""
        ...


class _Given(Use):
    """A per-sample gradient that exists already: read, changed or provided by the user."""

    def __init__(self, param: Parameter, tensor: Tensor) -> None:
        self.params = (param,)
        self.grad = tensor

    def grad_sample(self, param: Parameter) -> Tensor:
        assert self.grad is not None
        return wide(self.grad.detach())


class _Rest(WrappedUse):
    """The part of a use that contributes to parameters other than those in ``given``."""

    def __init__(self, use: Use, given: Mapping[Parameter, Any]) -> None:
        super().__init__(use)
        self.given = given
        self.grad = use.grad
        self.params = tuple(p for p in use.params if p not in given)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Use:
        return _Rest(self.use.rows(index, dtype), self.given)


@dataclass
class Iteration:
    """``uses``, by rows, of a backward pass over ``batch_size`` examples of ``group`` rows each.

    ``given``: per-sample gradients [B, *param.shape] that were read (and may have been changed in place since) or
    provided; they take the place of the recorded ones.
    """

    uses: list[Use]
    batch_size: int
    given: dict[Parameter, Tensor] = field(default_factory=dict)
    _formed: dict[Parameter, tuple[int, tuple[Tensor | None, ...]]] = field(default_factory=dict)
    """Version of those that were only read, and the output gradients that they were formed of."""
    ordinary: dict[Parameter, Tensor] = field(default_factory=dict)
    """The part of ``p.grad`` that it has added so far."""
    inputs: list[Tensor] = field(default_factory=list)
    """The tensors that the module was called with."""
    group: int = 1

    def grad_sample(self, param: Parameter) -> Tensor:
        """[B, *param.shape], formed when first read; zeros where the loss does not depend on the parameter."""
        self._refresh(param)
        if param not in self.given:
            with torch.no_grad():
                uses = in_units(self._uses_of(param) if param.numel() else [], self.group)
                parts = [use.grad_sample(param) for use in uses if use.grad is not None]
                dtype = torch.promote_types(param.dtype, torch.float32)
                total = torch.zeros((self.batch_size, *param.shape), dtype=dtype, device=param.device)
                for part in parts:
                    total += part
            self.given[param] = total
            self._formed[param] = total._version, tuple(use.grad for use in self._uses_of(param))
        return self.given[param]

    def give(self, param: Parameter, tensor: Tensor) -> None:
        """The user's own per-sample gradient [B, *param.shape], whatever is recorded."""
        self.given[param] = tensor
        self._formed.pop(param, None)

    def _uses_of(self, param: Parameter) -> list[Use]:
        return [use for use in self.uses if any(p is param for p in use.params)]

    def _refresh(self, param: Parameter) -> None:
        """Forgets what was read before another backward pass went through the same graph.

        PrivacyError where it was changed since: neither the change nor the new gradient may be lost.
        """
        version, grads = self._formed.get(param, (0, ()))
        if param not in self._formed or all(
            use.grad is grad for use, grad in zip(self._uses_of(param), grads, strict=True)
        ):
            return
        if self.given[param]._version != version:
            raise PrivacyError(
                f"grad_sample of a parameter of shape {tuple(param.shape)} was changed, and then another backward pass "
                "went through the same graph; change it after the last one."
            )
        del self.given[param], self._formed[param]

    def remaining(self) -> list[Use]:
        """The uses that yield the clipped sum: recorded ones, and in their place what was read or given."""
        for param in list(self._formed):
            self._refresh(param)
        uses = in_units(self.uses, self.group)
        if not self.given:
            return uses
        rest = [use if self.given.keys().isdisjoint(use.params) else _Rest(use, self.given) for use in uses]
        return [*(use for use in rest if use.params), *(_Given(p, t) for p, t in self.given.items())]


_OWNERS: Any = WeakTensorKeyDictionary()
"""Parameter -> weak reference to the object that records its gradients."""


def owner_of(param: Tensor) -> GradSampleOwner | None:
    """The object that records the gradients of ``param``, while it lives."""
    reference: ReferenceType[Any] | None = _OWNERS.get(param)
    return None if reference is None else reference()


def set_owner(param: Parameter, owner: GradSampleOwner | None) -> None:
    """Makes ``param.grad_sample`` read from ``owner``; None ends that."""
    if owner is None:
        _OWNERS.pop(param, None)
    else:
        if not isinstance(vars(Parameter).get("grad_sample"), _GradSample):
            Parameter.grad_sample = _GradSample()  # type: ignore[attr-defined]
        _OWNERS[param] = ref(owner)


class _GradSample:
    """``p.grad_sample`` of recorded parameters.

    A property of the class torch.nn.Parameter, because per-sample gradients are only formed for those who read them,
    and a subclass would cost torch's optimisers their fast paths. Every other parameter keeps an ordinary attribute of
    that name, or none.
    """

    def __get__(self, param: Parameter | None, kind: Any = None) -> Any:
        if param is None:
            return self
        owner = owner_of(param)
        if owner is not None:
            return owner.read_grad_sample(param)
        try:
            return vars(param)["grad_sample"]
        except KeyError:
            raise AttributeError("This parameter has no grad_sample; no GradSampleModule records it.") from None

    def __set__(self, param: Parameter, value: Any) -> None:
        owner = owner_of(param)
        if owner is None:
            vars(param)["grad_sample"] = value
        else:
            owner.write_grad_sample(param, value)

    def __delete__(self, param: Parameter) -> None:
        if owner_of(param) is None:
            vars(param).pop("grad_sample")
        else:
            self.__set__(param, None)

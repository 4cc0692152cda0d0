"""The ways into a module whose calls are recorded: its forward, and other methods that run its layers.

A flow is trained by its ``log_prob``, a policy by its ``evaluate_actions``, an autoencoder by its ``elbo``; and who
keeps a wrapper may call the module inside of it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from dpcore.rules.vmap import is_replayed
from dpcore.tree import has_tensor

_NOT_A_PASS = {"backward", "step", "zero_grad", "no_grad", "inference_mode", "eval", "log", "optimizers"}
"""Names in the code of methods that do more than to compute outputs: a look at them would train the module."""

_LIBRARIES = ("torch.", "dpcore.", "lightning.", "pytorch_lightning.", "transformers.modeling_utils")
"""Whose classes' own methods are no passes."""

Enter = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``enter(name of the method, call, args, kwargs)``: records ``call(*args, **kwargs)`` where that is due."""


class Entrance:
    """In the place of a module's method ``name``.

    A copy of the module, by copy.deepcopy or pickle, is an ordinary module that records nothing: it has its class's
    method, or a copy of what had been set in its place.
    """

    def __init__(self, module: nn.Module, name: str, enter: Callable[[], Enter | None]) -> None:
        self.module = module
        self.name = name
        self._enter = enter
        set_before = vars(module).get(name)
        self.users: Any = set_before.users if isinstance(set_before, Entrance) else set_before
        functools.update_wrapper(self, self._original, updated=())

    @property
    def __self__(self) -> nn.Module:
        """The module, as of a method."""
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of the module, as a method's: accelerate wraps it, and makes a method of it again."""
        return lambda module, *args, **kwargs: self(*args, **kwargs)

    @property
    def _original(self) -> Any:
        users = self.users
        return types.MethodType(getattr(type(self.module), self.name), self.module) if users is None else users

    def bare(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own method, or the tape's where the module is recorded as a whole."""
        current = vars(self.module).get(self.name)
        return (self._original if current is self or current is None else current)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        enter = None if is_replayed() else self._enter()
        if enter is None or (self.name != "forward" and not has_tensor((args, kwargs))):
            return self._original(*args, **kwargs)
        outer = vars(self.module).get(self.name)
        if outer is self or outer is None:
            return enter(self.name, self.bare, args, kwargs)
        # What was set in its place since (accelerate's autocast, say) has called this one, and is not called again.
        self.put()
        try:
            return enter(self.name, self.bare, args, kwargs)
        finally:
            vars(self.module)[self.name] = outer

    def put(self) -> None:
        """Begin."""
        vars(self.module)[self.name] = self

    def remove(self) -> None:
        """End."""
        if vars(self.module).get(self.name) is self:
            del vars(self.module)[self.name]
            if self.users is not None:
                vars(self.module)[self.name] = self.users

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _of_copy, (self.module, self.name, self.users)


def _of_copy(module: nn.Module, name: str, users: Any) -> Any:
    return types.MethodType(getattr(type(module), name), module) if users is None else users


def methods_that_run_layers(module: nn.Module) -> list[str]:
    """Names of the public methods, beside forward, that use layers or parameters of a module, or such a method."""
    codes: dict[str, set[str]] = {}
    for kind in type(module).__mro__:
        if kind is nn.Module or kind.__module__.startswith(_LIBRARIES):
            break
        for name, function in vars(kind).items():
            own = isinstance(function, types.FunctionType) and not name.startswith("_") and not hasattr(nn.Module, name)
            if own and not name.endswith("_step") and function.__code__.co_name != "decorate_context":
                codes.setdefault(name, set(_names(inspect.unwrap(function).__code__)))
    found: set[str] = set()
    parts = {*module._modules, *module._parameters, "forward"}
    while new := {n for n, names in codes.items() if n not in found and names & (parts | found)}:
        found |= new
    spoilt = {n for n, names in codes.items() if names & _NOT_A_PASS}
    while more := {n for n in found - spoilt if codes[n] & spoilt}:
        spoilt |= more
    return sorted(found - spoilt)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)

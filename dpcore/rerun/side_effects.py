"""Side effects of a forward pass: attributes of modules that it sets, and what the user's forward hooks write to.

Runs that the user did not ask for (a probe, an experiment, an example alone) put all of it back: a hook that collects
activations in a list is to find those of the user's own passes there, and no others.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpcore.tree import flatten

_CONTAINERS = (list, dict, set, deque)
_SETTINGS = (bool, int, float, str, type(None))
_OTHERS = (Tensor, nn.Module, types.ModuleType)
_REGISTERED = (
    *("_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
_NOTHING: dict[Any, Any] = {}


class SideEffects:
    """Attributes, lists, dicts, sets and hooks of a module's parts, and what their forward hooks can reach in a step or
    two, as they are now. (Buffers' values are none of its business.)
    """

    def __init__(self, module: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        for part in module.modules():
            self._keep_attributes(vars(part))
            self._keep_registered(vars(part))
            for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
                self._keep(hook, 4)

    def restore(self) -> None:
        """Puts everything back."""
        for undo in self._undo:
            undo()

    def _keep_registered(self, attributes: dict[str, Any]) -> None:
        """Models register hooks and buffers at their first call, and note in an attribute that they have done so."""
        before = [(of, dict(of) if of else _NOTHING) for of in map(attributes.__getitem__, _REGISTERED)]

        def undo() -> None:
            for of, known in before:
                if of.keys() != known.keys():
                    # (True tells of what kind a hook is, and nothing where there is no such hook.)
                    new = {n: v for n, v in of.items() if n not in known and (v is True or _is_hook_of_torch(v))}
                    gone = {n for n, v in known.items() if n not in of and _is_hook_of_torch(v)}
                    of.clear()
                    of.update({n: v for n, v in known.items() if n not in gone} | new)

        self._undo.append(undo)

    def _keep_attributes(self, attributes: dict[str, Any], objects: bool = True) -> None:
        before = dict(attributes)

        def undo() -> None:
            if len(attributes) != len(before) or any(attributes.get(n, before) is not v for n, v in before.items()):
                attributes.clear()
                attributes.update(before)

        self._undo.append(undo)
        for name, value in before.items():
            if not name.startswith("_") or isinstance(value, list | set | deque):
                self._keep_contents(value)
            if objects and id(value) not in self._seen and _is_plain(value):  # a cache, a configuration
                self._seen.add(id(value))
                self._keep_attributes(vars(value), objects=False)

    def _keep_contents(self, container: Any) -> None:
        if not isinstance(container, _CONTAINERS) or id(container) in self._seen:
            return
        self._seen.add(id(container))
        before: Any = container.copy()

        def undo() -> None:
            now, then = _parts(container), _parts(before)
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(before)

        self._undo.append(undo)

    def _keep(self, value: Any, depth: int) -> None:
        """Keep what a hook, or an object that it uses, may write to."""
        if not depth or isinstance(value, Tensor | nn.Module | type | types.ModuleType) or id(value) in self._seen:
            return
        if _of_torch(value):
            return
        if isinstance(value, _CONTAINERS):
            self._keep_contents(value)
            return
        self._seen.add(id(value))
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._keep(part, depth - 1)
        elif isinstance(value, types.MethodType):
            self._keep(value.__func__, depth - 1)
            self._keep(value.__self__, depth - 1)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._keep_cell(cell, depth)
            for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self._keep(default, depth - 1)
            self._keep_globals(value, depth)
        elif hasattr(value, "__dict__"):
            self._keep_attributes(vars(value))
            self._keep(vars(type(value)).get("__call__"), depth - 1)

    def _keep_cell(self, cell: types.CellType, depth: int) -> None:
        try:
            before = cell.cell_contents
        except ValueError:  # empty
            return

        def undo() -> None:
            cell.cell_contents = before

        self._undo.append(undo)
        self._keep(before, depth - 1)

    def _keep_globals(self, function: types.FunctionType, depth: int) -> None:
        names = {name for name in _names(function.__code__) if name in function.__globals__}
        before = {name: function.__globals__[name] for name in names}
        self._undo.append(functools.partial(function.__globals__.update, before))
        for value in before.values():
            self._keep(value, depth - 1)


def _of_torch(value: Any) -> bool:
    """Return whether a hook is torch's or ours: what it keeps (gathered parameters) must go with what it does."""
    owner = value if isinstance(value, types.FunctionType | types.MethodType) else type(value)
    return str(owner.__module__).startswith(("torch.", "dpcore."))


def _is_plain(value: Any) -> bool:
    """Return whether this is an object of the user's own that holds attributes."""
    whole = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, _OTHERS)
    return whole and not _of_torch(value)


def _is_hook_of_torch(value: Any) -> bool:
    return _of_torch(value) and not isinstance(value, nn.Module | Tensor)


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _parts(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """The tensors in a value: in tuples, lists, dicts, and objects of other classes (distributions, say)."""
    for leaf in flatten(value)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, nn.Module | type | types.ModuleType | types.FunctionType):
            if isinstance(leaf, _CONTAINERS):
                yield from tensors_in(_parts(leaf), depth - 1)
            elif hasattr(leaf, "__dict__"):
                yield from tensors_in(list(vars(leaf).values()), depth - 1)


def left_behind(module: nn.Module) -> Iterator[Tensor]:
    """Tensors in attributes of a module's parts that have a place in a graph: an auxiliary loss, say."""
    for part in module.modules():
        attributes = [v for n, v in vars(part).items() if not ((n[0] == "_" and isinstance(v, dict)) or _is_setting(v))]
        if attributes:  # an ordinary layer has none
            yield from (tensor for tensor in tensors_in(attributes) if tensor.grad_fn is not None)


def _is_setting(value: Any) -> bool:
    """Return whether this is a setting, as layers have many: a number, a name, or a tuple, list or set of them."""
    if isinstance(value, tuple | list | set):
        return all(isinstance(part, _SETTINGS) for part in value)
    return isinstance(value, _SETTINGS)


@contextmanager
def without_side_effects(module: nn.Module) -> Iterator[None]:
    """Whatever runs within leaves no trace in attributes and containers."""
    effects = SideEffects(module)
    try:
        yield
    finally:
        with torch.no_grad():
            effects.restore()

"""Decorators that register validators and fixers for classes of the user's own, with Opacus' interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from dpcore.validators.module_validator import ModuleValidator

F = TypeVar("F", bound=Callable[..., Any])


def register_module_validator(
    target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]],
    validator_class: type[ModuleValidator] = ModuleValidator,
) -> Callable[[F], F]:
    """Register the decorated function as validator of a class of modules, or of several.

    As in::

        @register_module_validator(MyLayer)
        def validate(module: nn.Module) -> list[UnsupportedError]: ...

    ``make_private`` refuses a module in which it finds something. What dpcore itself refuses stays refused: a validator
    adds to its checks and replaces none of them.

    Args:
        target_class_or_classes: The class or classes.
        validator_class: The class that keeps the function in ``VALIDATORS``.

    Returns:
        The decorator; it returns the function as it is.

    Raises:
        TypeError: one of them is not a class of modules.
    """
    return _registering(target_class_or_classes, validator_class.VALIDATORS)


def register_module_fixer(
    target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]],
    validator_class: type[ModuleValidator] = ModuleValidator,
) -> Callable[[F], F]:
    """Register the decorated function as fixer of a class of modules, or of several.

    As in::

        @register_module_fixer(MyLayer)
        def fix(module: nn.Module, **kwargs) -> nn.Module: ...

    What it returns takes the module's place, also where dpcore has a replacement of its own (for a batch norm, say);
    ``ModuleValidator.fix`` moves it to the module's device, and hands its own keyword arguments on.

    Args:
        target_class_or_classes: The class or classes.
        validator_class: The class that keeps the function in ``FIXERS``.

    Returns:
        The decorator; it returns the function as it is.

    Raises:
        TypeError: one of them is not a class of modules.
    """
    return _registering(target_class_or_classes, validator_class.FIXERS)


def _registering(given: Any, table: dict[type[nn.Module], Any]) -> Callable[[F], F]:
    """Return the decorator; TypeError where a class is none: what is registered for it would never be called."""
    targets = given if isinstance(given, Sequence) else [given]
    for target in targets:
        if not (isinstance(target, type) and issubclass(target, nn.Module)):
            raise TypeError(f"{target!r} is no class of modules, so that no module would ever be of it.")

    def decorator(f: F) -> F:
        table.update(dict.fromkeys(targets, f))
        return f

    return decorator

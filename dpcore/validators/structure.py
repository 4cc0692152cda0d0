"""The layers and trained parameters of a module that was made private, which must stay what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import Parameter

from dpcore.errors import PrivacyError
from dpcore.validators.parameters import check_hooks


class Structure:
    """The parts of ``module`` as they are now, of which ``trained`` parameters are recorded."""

    def __init__(self, module: nn.Module, trained: Mapping[str, Parameter]) -> None:
        self._module = module
        self._trained = trained
        self._parts = _parts(module)

    def check(self) -> None:
        """Raise PrivacyError where the module is no longer the one that was made private."""
        check_hooks(self._trained)
        parts = _parts(self._module)
        if len(parts) == len(self._parts) and all(a is b for a, b in zip(parts, self._parts, strict=True)):
            return
        now, known = dict(self._module.named_parameters()), set(self._trained.values())
        for name, param in now.items():
            if param.requires_grad and param not in known:
                how = "replaced" if name in self._trained else "added or unfrozen"
                raise PrivacyError(
                    f"Parameter {name} was {how} after make_private: its gradient would be neither clipped nor noised. "
                    "Make the module private again, from to_standard_module() and a new optimizer."
                )
        for name, param in self._trained.items():
            if name not in now:
                raise PrivacyError(
                    f"Parameter {name} was removed after make_private: the optimizer would go on releasing noise for "
                    "it. Make the module private again."
                )
            if not param.requires_grad:
                raise PrivacyError(
                    f"Parameter {name} was frozen after the engine was built; build a new engine for the new set."
                )
        raise PrivacyError(
            "A layer was added, removed or swapped after make_private; whether the new one keeps examples apart was "
            "never checked. Make the module private again, from to_standard_module()."
        )


def _parts(module: nn.Module) -> tuple[Any, ...]:
    """All submodules and all parameters, each followed by whether it is trained; to be compared by identity."""
    return (*module.modules(), *(part for param in module.parameters() for part in (param, param.requires_grad)))

"""The layers and trained parameters of a module that was made private, which must stay what they are."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import Parameter

from dpcore.errors import PrivacyError
from dpcore.validators.parameters import check_hooks


class Structure:
    """The parts of ``module`` as they are now, of which ``trained`` parameters are recorded.

    ``shards``: what stands in the module in the place of a parameter while that is not gathered.
    """

    def __init__(self, module: nn.Module, trained: Mapping[str, Parameter], shards: Mapping[Parameter, Any]) -> None:
        self._module = module
        self._trained = trained
        self._shards = shards
        self._parts = _parts(module, shards)

    def check(self) -> None:
        """Raise PrivacyError where the module is no longer the one that was made private."""
        check_hooks(self._trained)
        parts = _parts(self._module, self._shards)
        if len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts)):
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


def _parts(module: nn.Module, shards: Mapping[Parameter, Any]) -> list[Any]:
    """All submodules and all parameters, each followed by whether it is trained; to be compared by identity.

    As ``modules()`` and ``parameters()`` find them, whose generators take longer than a small layer.
    """
    found: list[Any] = []
    seen, waiting = set(), [module]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found.append(part)
        for param in part._parameters.values():
            if param is not None:
                found += (shards.get(param, param), param.requires_grad)
        for child in part._modules.values():
            if child is not None:
                waiting.append(child)
    return found

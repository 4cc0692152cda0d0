"""Modules that mix examples, found by class, and their replacements."""

from __future__ import annotations

import copy
import math

from torch import nn

from dpcore.errors import UnsupportedError
from dpcore.validators.errors import IllegalModuleConfigurationError, ShouldReplaceModuleError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
FIX = "from dpcore.validators import ModuleValidator; model = ModuleValidator.fix(model)"
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The batch norms inside of ``module``, by name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, _BATCH_NORMS)}


def mixes_examples(norm: nn.Module) -> bool:
    """Return whether a batch norm, as it is now, normalises by the batch and not by numbers that it has."""
    return norm.training or norm.running_mean is None


def batch_norm_error(where: str, norm: nn.Module) -> ShouldReplaceModuleError:
    """Return the error about the batch norm ``norm``; ``where``: the beginning of its sentence."""
    return ShouldReplaceModuleError(
        f"{where} is a {type(norm).__name__}, which normalises an example by the others of its batch. Put GroupNorm in "
        f"its place before the optimizer is built: {FIX}. One with the statistics of public data may stay where it is "
        "put into evaluation mode by its eval() after every train() of the module."
    )


class ModuleValidator:
    """``validate`` lists the reasons against a module, ``fix`` removes them where that is possible.

    A batch norm that was put into evaluation mode, in a module in training mode, only applies numbers that it has, and
    is accepted; the private module refuses to run once it is back in training mode.
    """

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[UnsupportedError]:
        """One error per offending submodule, naming it, the reason and the remedy; raised at once where ``strict``."""
        errors: list[UnsupportedError] = []
        for name, child in module.named_modules():
            where = f"Module {name!r}" if name else "The module"
            if isinstance(child, _BATCH_NORMS):
                if not module.training or mixes_examples(child):
                    errors.append(batch_norm_error(where, child))
            elif isinstance(child, _INSTANCE_NORMS) and child.track_running_stats:
                errors.append(
                    IllegalModuleConfigurationError(
                        f"{where} is an {type(child).__name__} that keeps running statistics of the examples without "
                        f"noise. Set track_running_stats=False, as this does: {FIX}."
                    )
                )
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return whether :meth:`validate` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module) -> nn.Module:
        """A copy with BatchNorm replaced by GroupNorm of gcd(32, channels) groups and running statistics off."""
        fixed = copy.deepcopy(module)
        for name, child in list(fixed.named_modules()):
            if isinstance(child, _INSTANCE_NORMS) and child.track_running_stats:
                child.track_running_stats = False
                child.running_mean = child.running_var = child.num_batches_tracked = None
            if isinstance(child, _BATCH_NORMS):
                channels = child.num_features
                norm = nn.GroupNorm(math.gcd(32, channels), channels, eps=child.eps, affine=child.affine)
                if not name:
                    return norm
                parent, _, leaf = name.rpartition(".")
                setattr(fixed.get_submodule(parent), leaf, norm)
        return fixed

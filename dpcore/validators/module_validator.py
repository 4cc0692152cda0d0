"""Modules that mix examples, found by class, and their replacements."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpcore.errors import UnsupportedError
from dpcore.validators.errors import IllegalModuleConfigurationError, ShouldReplaceModuleError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
FIX = "from dpcore.validators import ModuleValidator; model = ModuleValidator.fix(model)"
Validator = Callable[..., Sequence[UnsupportedError]]
Fixer = Callable[..., nn.Module]
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
        "put into evaluation mode by its eval() after every train() of the module, the first before it is made private."
    )


class ModuleValidator:
    """``validate`` lists the reasons against a module, ``fix`` removes them where that is possible.

    A batch norm that was put into evaluation mode, in a module in training mode, only applies numbers that it has, and
    is accepted; the private module refuses to run once it is back in training mode.

    ``VALIDATORS`` and ``FIXERS`` hold functions for classes of your own, by class:
    :func:`~dpcore.validators.register_module_validator`, :func:`~dpcore.validators.register_module_fixer`. They are
    called for modules of that very class, not of one derived from it.
    """

    VALIDATORS: ClassVar[dict[type[nn.Module], Validator]] = {}
    FIXERS: ClassVar[dict[type[nn.Module], Fixer]] = {}

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedError]:
        """List what is wrong with a module.

        Args:
            module: The module.
            strict: Raise the first reason instead of listing them all.

        Returns:
            One error per offending submodule, with its name, the reason and the remedy, and beside them what
            registered validators return.

        Raises:
            UnsupportedError: the first reason, where ``strict``.
            TypeError: a registered validator returned something other than a list of errors.
        """
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
            if type(child) in cls.VALIDATORS:
                errors.extend(_found(cls.VALIDATORS[type(child)], child, where))
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return whether :meth:`validate` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Copy a module with replacements for what :meth:`validate` finds.

        BatchNorm becomes GroupNorm of gcd(32, channels) groups (that of vectors of at least two channels each), and
        running statistics are off; registered fixers come first, and what they return is not looked into.

        Args:
            module: Left as it is.
            **kwargs: ``num_groups``: of the GroupNorms; ``replace_bn_with_in=True``: InstanceNorm without parameters
                in place of GroupNorm. These and all others are handed to the registered fixers, too.

        Returns:
            The copy.

        Raises:
            TypeError: a registered fixer returned something other than a module.
            UnsupportedError: a layer is lazy, or a batch norm has no InstanceNorm of its kind.
            ValueError: both options are given, or ``num_groups`` does not divide a batch norm's channels.
        """
        if kwargs.get("replace_bn_with_in") and kwargs.get("num_groups") is not None:
            raise ValueError(
                f"num_groups is {kwargs['num_groups']} and replace_bn_with_in is True; an InstanceNorm has no groups, "
                "so give one of the two."
            )
        return cls._fixed(_copy(module), kwargs, {})

    @classmethod
    def _fixed(cls, module: nn.Module, options: dict[str, Any], known: dict[nn.Module, nn.Module]) -> nn.Module:
        """What stands in the place of ``module``; ``known``: the same for modules that were met already."""
        if module in known:
            return known[module]
        fixer = cls.FIXERS.get(type(module))
        if fixer is not None:
            fixed = fixer(module, **options)
            if not isinstance(fixed, nn.Module):
                raise TypeError(
                    f"The fixer registered for {type(module).__name__} returned {type(fixed).__name__}; it must return "
                    "the module that takes its place."
                )
            known[module] = _placed_as(fixed, module)
            return known[module]
        if isinstance(module, _BATCH_NORMS):
            known[module] = _placed_as(_instead_of(module, options), module)
            return known[module]
        if isinstance(module, _INSTANCE_NORMS) and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
        known[module] = module
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = cls._fixed(child, options, known)
        return module


def _instead_of(norm: Any, options: dict[str, Any]) -> nn.Module:
    """Return the norm that keeps examples apart in place of a batch norm, by the options of ``fix``."""
    channels, eps = norm.num_features, norm.eps
    if options.get("replace_bn_with_in"):
        for batch_norm, instance_norm in zip(_BATCH_NORMS, _INSTANCE_NORMS, strict=False):
            if isinstance(norm, batch_norm):
                return instance_norm(channels, eps=eps)
        raise UnsupportedError(
            f"There is no InstanceNorm for {type(norm).__name__}, which takes inputs of any dimensions; leave "
            "replace_bn_with_in out, and a GroupNorm takes its place."
        )
    groups = options.get("num_groups")
    if groups is None:
        groups = math.gcd(32, channels)
        if groups == channels > 1 and isinstance(norm, nn.BatchNorm1d):
            groups //= 2  # on [B, C] a number that is normalised by itself is 0, whatever it was
    if not isinstance(groups, int) or groups < 1 or channels % groups:
        raise ValueError(
            f"num_groups is {groups!r}, and a {type(norm).__name__} has {channels} channels; it must be a whole number "
            "that divides them. Leave it out, and each layer gets gcd(32, channels) groups."
        )
    return nn.GroupNorm(groups, channels, eps=eps, affine=norm.affine)


def _copy(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module, also of one that has kept what it computed from its parameters.

    (As torch.nn.utils.weight_norm and prune do, until the next forward pass. torch does not copy a tensor with a
    graph.)

    Raises:
        UnsupportedError: a layer is lazy, so that there is nothing to copy yet.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UnsupportedError(
                f"{name} belongs to a lazy layer and has no shape yet; run the module once on a batch of public (or "
                "made-up) data first."
            )
    computed = [v for part in module.modules() for v in vars(part).values() if isinstance(v, Tensor) and v.grad_fn]
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in computed})


def _found(validator: Validator, module: nn.Module, where: str) -> list[UnsupportedError]:
    """What a registered validator returns. One that forgets to return would pass for one that finds nothing."""
    errors = validator(module)
    if not isinstance(errors, list | tuple) or not all(isinstance(error, Exception) for error in errors):
        raise TypeError(
            f"{where}: the validator registered for {type(module).__name__} returned {errors!r}; it must return a list "
            "of errors (dpcore.validators.errors), empty where the module is fine."
        )
    return list(errors)


def _placed_as(replacement: nn.Module, module: nn.Module) -> nn.Module:
    """The replacement on the device and in the mode of what it replaces; norms in its precision, too."""
    param = next(module.parameters(), None)
    replacement.train(module.training)
    if param is None:
        return replacement
    return replacement.to(param.device, param.dtype if isinstance(module, _BATCH_NORMS) else None)

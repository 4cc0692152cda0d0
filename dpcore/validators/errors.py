"""The validators' errors under the names that training scripts catch, related as Opacus' are.

Opacus' base of them is UnsupportedError itself here: scripts that catch it catch all that dpcore refuses.
"""

from __future__ import annotations

from dpcore.errors import UnsupportedError

UnsupportedModuleError = UnsupportedError


class UnsupportableModuleError(UnsupportedModuleError):
    """A module that can never be trained privately."""


class NotYetSupportedModuleError(UnsupportedModuleError):
    """A module that could be trained privately, but cannot yet."""


class ShouldReplaceModuleError(UnsupportedModuleError):
    """A module for which there is a replacement, that of ``ModuleValidator.fix``."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """A module that could be trained privately if it were set up in another way."""


__all__ = [
    "IllegalModuleConfigurationError",
    "NotYetSupportedModuleError",
    "ShouldReplaceModuleError",
    "UnsupportableModuleError",
    "UnsupportedError",
    "UnsupportedModuleError",
]

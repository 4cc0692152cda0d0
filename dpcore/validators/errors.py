"""The validators' errors under the names that training scripts catch; one class, because the message says it all."""

from __future__ import annotations

from dpcore.errors import UnsupportedError

UnsupportedModuleError = UnsupportedError
UnsupportableModuleError = UnsupportedError
NotYetSupportedModuleError = UnsupportedError
ShouldReplaceModuleError = UnsupportedError
IllegalModuleConfigurationError = UnsupportedError

__all__ = [
    "IllegalModuleConfigurationError",
    "NotYetSupportedModuleError",
    "ShouldReplaceModuleError",
    "UnsupportableModuleError",
    "UnsupportedError",
    "UnsupportedModuleError",
]

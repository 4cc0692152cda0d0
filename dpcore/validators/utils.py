"""Decorators under Opacus' path."""

from dpcore.validators.registry import register_module_fixer, register_module_validator

__all__ = ["register_module_fixer", "register_module_validator"]

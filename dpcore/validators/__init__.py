"""Validation: which modules can be trained with differential privacy, and why not."""

from dpcore.validators.module_validator import ModuleValidator
from dpcore.validators.probe import check_isolation
from dpcore.validators.registry import register_module_fixer, register_module_validator

__all__ = ["ModuleValidator", "check_isolation", "register_module_fixer", "register_module_validator"]

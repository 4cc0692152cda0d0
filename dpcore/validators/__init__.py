"""Validation: which modules can be trained with differential privacy, and why not."""

from dpcore.validators.module_validator import ModuleValidator
from dpcore.validators.probe import check_isolation

__all__ = ["ModuleValidator", "check_isolation"]

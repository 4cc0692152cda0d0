"""Which modules can be trained with differential privacy, and why not."""

from dpcore.validators.module_validator import ModuleValidator

__all__ = ["ModuleValidator"]

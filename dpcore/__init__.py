"""dpcore: exact DP-SGD for PyTorch at nearly the price of ordinary training."""

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.functional import clipped_sum
from dpcore.grad_sample.engine import ClippedSum, Engine
from dpcore.noise import GaussianNoise

__all__ = ["ClippedSum", "Engine", "GaussianNoise", "PrivacyError", "UnsupportedError", "clipped_sum"]

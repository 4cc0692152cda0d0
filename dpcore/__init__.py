"""dpcore: exact DP-SGD for PyTorch at nearly the price of ordinary training."""

from dpcore.budget import BudgetError
from dpcore.correlated import CorrelatedNoise
from dpcore.data_loader import DPDataLoader
from dpcore.engine.batch_sums import ClippedSum
from dpcore.engine.engine import Engine
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.functional import clipped_sum
from dpcore.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from dpcore.loading.padding import padded
from dpcore.loading.streams import bins_of_stream
from dpcore.loading.units import users, views
from dpcore.noise import GaussianNoise
from dpcore.privacy_engine import PrivacyEngine
from dpcore.privacy_report import report

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ClippedSum",
    "CorrelatedNoise",
    "DPDataLoader",
    "Engine",
    "GaussianNoise",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "PrivacyEngine",
    "PrivacyError",
    "UnsupportedError",
    "bins_of_stream",
    "clipped_sum",
    "padded",
    "report",
    "users",
    "views",
]

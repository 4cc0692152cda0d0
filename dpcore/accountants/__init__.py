"""Privacy accountants for the Poisson-subsampled Gaussian mechanism and for epochs of balls in bins.

Neighbours are by adding or removing one example.
"""

from dpcore.accountants.accountant import IAccountant
from dpcore.accountants.gdp import GaussianAccountant
from dpcore.accountants.pld import PLDAccountant
from dpcore.accountants.rdp import RDPAccountant
from dpcore.accountants.registry import create_accountant, register_accountant
from dpcore.accountants.utils import get_noise_multiplier

PRVAccountant = PLDAccountant

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PLDAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "get_noise_multiplier",
    "register_accountant",
]

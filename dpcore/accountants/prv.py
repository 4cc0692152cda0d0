"""A class under Opacus' path."""

from dpcore.accountants.pld import PLDAccountant

PRVAccountant = PLDAccountant

__all__ = ["PRVAccountant"]

"""Accountants by name."""

from __future__ import annotations

from dpcore.accountants.accountant import IAccountant
from dpcore.accountants.gdp import GaussianAccountant
from dpcore.accountants.pld import PLDAccountant
from dpcore.accountants.rdp import RDPAccountant
from dpcore.arguments import did_you_mean

_ACCOUNTANTS: dict[str, type[IAccountant]] = {
    "prv": PLDAccountant,
    "pld": PLDAccountant,
    "rdp": RDPAccountant,
    "gdp": GaussianAccountant,
}


def register_accountant(mechanism: str, accountant: type[IAccountant], force: bool = False) -> None:
    """Makes ``accountant`` available as ``mechanism``. ValueError where the name is taken, unless ``force``."""
    if mechanism in _ACCOUNTANTS and not force:
        raise ValueError(f"There is an accountant {mechanism!r} already; choose another name, or pass force=True.")
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str) -> IAccountant:
    """A new accountant by name: prv or pld (tight, the default), rdp (looser), gdp (an approximation, no bound)."""
    if mechanism not in _ACCOUNTANTS:
        raise ValueError(
            f"There is no accountant {mechanism!r}; there are {', '.join(sorted(_ACCOUNTANTS))}."
            + did_you_mean(mechanism, _ACCOUNTANTS)
        )
    return _ACCOUNTANTS[mechanism]()

"""The privacy unit of several rows: every ``group`` rows of a batch that follow each other.

Each row is a view of the unit, or one of a user's examples. A unit's gradient is that of the mean of its rows' losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpcore.arguments import check_number
from dpcore.errors import UnsupportedError


def check_group(value: Any) -> int:
    """Return the number of rows of a unit; ValueError unless it is a whole number of at least 1."""
    return int(check_number("group", value, lambda k: k >= 1 and k % 1 == 0, "it must be a whole number, at least 1"))


def units_in(rows: int, group: int) -> int:
    """Return how many units of ``group`` rows there are; UnsupportedError where the last one is not whole."""
    if rows % group:
        raise UnsupportedError(
            f"The batch has {rows} rows, and with group={group} every {group} rows that follow each other are one "
            f"unit, which {rows} is no multiple of; give every unit {group} rows, as dpcore.views and dpcore.users do."
        )
    return rows // group


def rows_of(units: Tensor, group: int) -> Tensor:
    """Return the numbers of the rows of ``units`` [k]: [k * group]."""
    return (units.unsqueeze(1) * group + torch.arange(group, device=units.device)).flatten()


def shares_of(rows: Tensor, group: int) -> Tensor:
    """Return the share [R] of each row in its unit's gradient: one over how many of the unit's rows are True."""
    by_unit = rows.unflatten(0, (-1, group))
    return (by_unit / by_unit.sum(1, keepdim=True).clamp(min=1)).flatten()


def of_units(rows: Tensor, group: int) -> Tensor:
    """Return whether any row of a unit is True: [R / group]."""
    return rows.unflatten(0, (-1, group)).any(1)

"""What is measured of a pass's gradients and outputs by row, and what of a change is more than rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

ROUNDING, HALF_ROUNDING = 1e-3, 0.05
"""Relative change of a squared norm that is taken for rounding: another example's length may choose another kernel."""
CANCELLATION = 1e-5
FLOOR, HALF_FLOOR = 1e-9, 1e-4
"""Shares of the squared norm over all parameters: less is rounding, too."""
OUTPUT_FLOOR = 1e-10
"""Squared change of one number of an output that is taken for rounding, where the output may be zero but for it."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one parameter's gradients, for k rows.

    They are the [k] squared norms of the rows' gradients, the scale of their rounding errors, and the product of a
    weighted sum of these gradients with a fixed random direction, which also sees a change that keeps all norms.
    """

    norms_sq: Tensor
    scale: Tensor
    projection: float
    numbers: int = 0
    """In a row of an output; 0 for parameters."""


Measurements = dict[Parameter | int, Measured]
"""Measurements by parameter, and of the outputs' own values by their number: a layer that is run again by example has
gradients that are the example's own even where its outputs were not."""


def what_moved(before: Measurements, after: Measurements, rounding: float) -> Parameter | int | None:
    """Return the parameter or output with the largest change, None where all is rounding or could not be measured."""
    worst, found = 1.0, None
    total: Tensor | float = _total(before)
    # What a gradient that is zero but for rounding (of a key's bias, say) has of the whole.
    half = rounding >= HALF_ROUNDING / 4
    floor = total * (HALF_FLOOR if half else FLOOR)
    for param in before.keys() | after.keys() if before and after else ():
        # An output may be zero but for rounding, of numbers that are not seen.
        least = before[param].numbers * OUTPUT_FLOOR * (1e5 if half else 1.0) if isinstance(param, int) else floor
        most = _change(before.get(param), after.get(param), rounding, least)
        if most > worst:
            worst, found = most, param
    return found


def _total(measured: Measurements) -> Tensor | float:
    """[k] squared norms over all parameters together; 0 where they have not the same rows."""
    each = [m.norms_sq.double().nan_to_num(0.0, 0.0) for key, m in measured.items() if not isinstance(key, int)]
    return torch.stack(each).sum(0).clamp(min=0.0) if len({n.shape for n in each}) == 1 else 0.0


def _change(before: Measured | None, after: Measured | None, rounding: float, floor: Tensor | float) -> float:
    """Return how many times larger than rounding the change between two measurements is."""
    if before is None or after is None:
        present = after if before is None else before
        assert present is not None
        return float("inf") if bool((present.norms_sq > 0).any()) else 0.0
    if before.norms_sq.shape != after.norms_sq.shape:
        return 0.0
    finite = before.norms_sq.isfinite() & after.norms_sq.isfinite()
    old, new = before.norms_sq[finite].double(), after.norms_sq[finite].double()
    if not len(old) or not bool(finite.all()):
        return 0.0
    largest = torch.maximum(old, new).clamp(min=0.0)  # what cancels may be below zero
    scale = torch.maximum(before.scale[finite].double(), after.scale[finite].double()).clamp(min=0.0)
    allowed = rounding * largest + CANCELLATION * scale + 1e-9 * largest.sum() + floor + 1e-300
    by_norm = float(((new - old).abs() / allowed).max())
    size = float((allowed / rounding).sum()) ** 0.5
    by_projection = abs(after.projection - before.projection) / (rounding * size)
    return max(by_norm, by_projection)

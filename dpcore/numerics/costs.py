"""Costs that the planner weighs, where they were measured on the processor (:mod:`dpcore.numerics.measure`)."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "DPCORE_CPU_COSTS"


@dataclass(frozen=True)
class Costs:
    """Costs that the planner weighs, in the time that one number of a kept gradient takes: written, squared and added.

    ``flops_per_kept_float``: FLOPs of a product of matrices that take as long. ``fewest_in_turn``: so many numbers take
    as long as starting the operators of one more example.

    Raises ValueError for what is no positive number.
    """

    flops_per_kept_float: float
    fewest_in_turn: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
                raise ValueError(f"the planner's {name} is {value!r}; it must be a positive number")


def of_processor() -> Costs | None:
    """Return what was measured on the processor; None where ``DPCORE_CPU_COSTS`` names no file."""
    path = os.environ.get(VARIABLE)
    return _read(path) if path else None


@functools.cache
def _read(path: str) -> Costs:
    try:
        return Costs(**json.loads(Path(path).read_text())["planner"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no entry {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{VARIABLE} names {path}, which holds no costs ({reason}); make them with python -m "
            "dpcore.numerics.measure --out FILE."
        ) from None

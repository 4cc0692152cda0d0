"""Measurements of the GPU at hand, as data: sizes of the kernels' tiles, and the planner's costs.

``python -m dpcore.gpu.tune`` writes such a file, and ``DPCORE_GPU_TUNING`` names it. Without it the kernels have the
sizes below, which nobody has measured, and the planner has what it weighs on a CPU.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dpcore.numerics.costs import Costs, of_processor

VARIABLE = "DPCORE_GPU_TUNING"
KINDS = ("tiles", "gram", "windows")
"""Kernels with sizes of their own: tiles of linear maps and lookups, Gram matrices, tiles of convolutions."""


WIDTHS = {torch.float32: "float32", torch.bfloat16: "half", torch.float16: "half"}
"""Types of operands; those of one name share their sizes."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one kernel.

    ``tile``: rows and columns of a tile of GᵀX, or of a block of a Gram matrix. ``depth``: positions, or features, that
    are loaded at once. ``warps`` and ``stages``: of each program.

    Raises ValueError for sizes that no kernel can have.
    """

    tile: int = 64
    depth: int = 32
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least, most = {"tile": (16, 256), "depth": (16, 256), "warps": (1, 16), "stages": (1, 8)}[name]
            whole = isinstance(value, int) and least <= value <= most
            if not whole or (name != "stages" and value & (value - 1)):
                power = "" if name == "stages" else "a power of two, "
                raise ValueError(f"a kernel's {name} is {value!r}; it must be {power}from {least} to {most}")


@dataclass(frozen=True)
class _Tuned:
    """``sizes`` by kind and :data:`WIDTHS`."""

    sizes: dict[str, dict[str, Sizes]]
    costs: Costs

    def __post_init__(self) -> None:
        # A few examples of a half-precision batch go through once more in float32, within the limits of their tiles.
        for kind, of in self.sizes.items():
            if unknown := set(of) - set(WIDTHS.values()):
                raise ValueError(f"{kind} has sizes for {sorted(unknown)}; they must be for float32 or half")
            if len({one.tile for one in of.values()}) > 1:
                raise ValueError(f"the tiles of {kind} differ between types; they must be the same")


def chosen(kind: str, dtype: torch.dtype) -> Sizes:
    """Return the sizes for a kernel of ``kind``, one of :data:`KINDS`, and operands of ``dtype``."""
    path = os.environ.get(VARIABLE)
    of = _read(path).sizes[kind] if path else {}
    return of.get(WIDTHS[dtype]) or Sizes(tile=next((one.tile for one in of.values()), Sizes.tile))


def costs(device: torch.device) -> Costs | None:
    """Return what was measured for the planner on a device like this one; None where nothing was."""
    if device.type == "cpu":
        return of_processor()
    path = os.environ.get(VARIABLE)
    return _read(path).costs if path and device.type == "cuda" else None


@functools.cache
def _read(path: str) -> _Tuned:
    """Return a file's content. Raises ValueError where it is none, or was made without a GPU."""
    remedy = "make one on a GPU with python -m dpcore.gpu.tune."
    try:
        read: Any = json.loads(Path(path).read_text())
        sizes = {kind: {width: Sizes(**of) for width, of in read[kind].items()} for kind in KINDS}
        found, simulated = _Tuned(sizes, Costs(**read["planner"])), read["simulated"]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"it has no entry {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{VARIABLE} names {path}, which holds nothing that was measured ({reason}); {remedy}"
        ) from None
    if simulated:
        raise ValueError(f"{VARIABLE} names {path}, whose times are the interpreter's; {remedy}")
    return found

"""Sizes of the kernels' tiles, which ``python -m dpcore.gpu.tune`` measures and writes as data.

``DPCORE_TRITON_SIZES`` names such a file. Without it the kernels have the sizes below, which nobody has measured.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

VARIABLE = "DPCORE_TRITON_SIZES"
KINDS = ("tiles", "gram")


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
                raise ValueError(f"A kernel's {name} is {value!r}; it must be {power}from {least} to {most}.")


def chosen(kind: str, dtype: torch.dtype) -> Sizes:
    """Return the sizes for ``kind`` ("tiles" or "gram") and operands of ``dtype``."""
    path = os.environ.get(VARIABLE)
    return Sizes() if not path else _of_file(path).get((kind, str(dtype).removeprefix("torch.")), Sizes())


@functools.cache
def _of_file(path: str) -> dict[tuple[str, str], Sizes]:
    """Return the sizes of a file by kind and type. Raises ValueError where it is none, or was made without a GPU."""
    try:
        read: Any = json.loads(Path(path).read_text())
        simulated, tables = read["simulated"], {kind: read[kind] for kind in KINDS}
        found = {(kind, dtype): Sizes(**of) for kind, table in tables.items() for dtype, of in table.items()}
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{VARIABLE} names {path}, which is no file of sizes ({error!r}); make one with python -m dpcore.gpu.tune."
        ) from None
    if simulated:
        raise ValueError(f"{VARIABLE} names {path}, whose times are the interpreter's; make one on a GPU.")
    return found

"""A grid as text for engines that dpbench does not drive itself: a unit is one command, so each needs a few lines."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from harness.errors import BadInput
from harness.grid.folder import GridFolder

TEXTS = {path.stem: path for path in sorted((Path(__file__).parent / "texts").iterdir())}
"""Texts with ``@NAMES@`` in them, by the engine that takes them."""


def text(grid: GridFolder, kind: str, image: str) -> str:
    """Return what the engine takes.

    Args:
        grid: The grid's folder.
        kind: One of TEXTS.
        image: Container image with dpbench, for Kubernetes.

    Raises:
        BadInput: there is no such kind.
    """
    if kind not in TEXTS:
        raise BadInput(f"--as is {kind!r}: choose one of {', '.join(TEXTS)}.")
    count = len(grid.plan.units)
    made = TEXTS[kind].read_text(encoding="utf-8")
    words = {"COUNT": count, "LAST": count - 1, "IMAGE": image}
    words |= {"GRID": shlex.quote(str(grid.path)), "PYTHON": shlex.quote(sys.executable)}
    for name, word in words.items():
        made = made.replace(f"@{name}@", str(word))
    return made

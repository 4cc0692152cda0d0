"""Say what is wrong with an update, where that is clear: a factor and its meaning, or tensors that are left out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

ALIKE = 1e-3
"""Relative difference up to which two numbers are taken for one."""


def of(
    found: np.ndarray, expected: np.ndarray, slices: Mapping[str, slice], rows: int, batch_size: int, bound: float
) -> str:
    """Return a sentence about a wrong update [parameters], or nothing.

    Args:
        found: the displacement.
        expected: what it ought to be.
        slices: where each tensor lies.
        rows: of the batch.
        batch_size: by which the sum is divided.
        bound: C.
    """
    square = float(expected @ expected)
    factor = float(found @ expected) / square if square else 1.0
    if abs(factor - 1.0) > ALIKE and np.linalg.norm(found - factor * expected) <= ALIKE * np.linalg.norm(found):
        return f"{factor:.4g} times as long as it ought to be{_meaning(factor, rows, batch_size, bound)}"
    least = ALIKE**2 * square
    gone = [n for n, part in slices.items() if not found[part].any() and np.square(expected[part]).sum() > least]
    return f"nothing moves {', '.join(gone[:3])}{' and others' if len(gone) > 3 else ''}" if gone else ""


def _meaning(factor: float, rows: int, batch_size: int, bound: float) -> str:
    known = {
        f"{batch_size} / {rows}: the divisor is the batch's own length": batch_size / max(1, rows),
        f"{batch_size}: it is the sum, and not divided by B": float(batch_size),
        f"1 / {batch_size}: it is divided by B twice": 1.0 / batch_size,
        "1 / C: C is missing": 1.0 / bound,
        "C: C is in it twice": bound,
    }
    for text, value in known.items():
        if abs(factor / value - 1.0) < ALIKE:
            return f", {text}"
    return ""

"""Noise that is correlated over steps, made white again: of F⁻¹ Z, by the factor F that its adapter states, Z.

Standard library and numpy only.
"""

from __future__ import annotations

import numpy as np

COLUMNS = 4096
"""Coordinates that are multiplied at once."""


def factor(stated: np.ndarray | None, steps: int) -> np.ndarray | None:
    """Return the first column of F, float64 [steps], as an adapter has stated it; None where noise is independent.

    Raises:
        ValueError: it is no such column. It has to begin with 1: then a step adds fresh noise of the whole deviation
            to what earlier noise leaves of it, and an F that is made larger cannot hide noise that is too small.
    """
    if stated is None:
        return None
    column = np.asarray(stated, dtype=np.float64)
    if column.shape != (steps,) or not np.isfinite(column).all() or column[0] != 1.0:
        first = column.flat[0] if column.size else "nothing"
        raise ValueError(
            f"noise_factor({steps}) has shape {column.shape} and begins with {first}; it must be the first column of "
            f"F, {steps} finite numbers of which the first is 1, or None for independent noise"
        )
    return column


def white(noise: np.ndarray, column: np.ndarray | None) -> np.ndarray:
    """Return F times the noise [steps, parameters], float32, with a lower triangular Toeplitz F of this column."""
    if column is None:
        return noise
    steps = len(noise)
    places = np.subtract.outer(np.arange(steps), np.arange(steps))
    matrix = np.where(places < 0, 0.0, column[np.maximum(places, 0)]).astype(np.float32)
    found = np.empty(noise.shape, dtype=np.float32)
    for start in range(0, noise.shape[1], COLUMNS):
        found[:, start : start + COLUMNS] = matrix @ noise[:, start : start + COLUMNS].astype(np.float32)
    return found

"""Bands of least noise: the first column c of a lower triangular Toeplitz matrix C, for a run of n steps.

A step's noise is in the weights j steps later by a_j, what the optimizer makes of a single gradient: 1, and with
momentum β 1 + β + ... + β^j. Noise C⁻¹z is in them by g = a / c, a quotient of power series, and its mean variance over
the steps is the sum of (1 - j/n) g_j². At equal epsilon z grows with ‖c‖ (:mod:`dpcore.correlated`). So the logarithm
of the sum times ‖c‖² is made small. For c_i the gradient of the sum is -2 Σ_j (1 - j/n) g_j (g / c)_(j-i).

Epsilon does not depend on how good the bands are: it is computed from the bands that are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy

_DIGITS = 6
"""Bands are rounded to so many: what other processors round is not seen in them, and the noise grows by 1e-11."""
_TOO_MUCH = 1e3
"""More than the logarithm of any number."""


def least_noise(start: Sequence[float], steps: int, momentum: float = 0.0) -> tuple[float, ...]:
    """Return bands with the least noise for ``start``'s, of which each is less than the one before and above 0.

    Those of ``start`` where none are found that are such and better.

    Args:
        start: Bands of this kind, the first of which is 1.
        steps: Of the whole run, no fewer than there are bands.
        momentum: Of SGD, whose learning rate stays as it is.
    """
    first, response = np.array(start), response_of(steps, momentum)
    found = scipy.optimize.minimize(
        log_noise, first, response, jac=True, method="L-BFGS-B",
        options={"maxiter": 300, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 20},
    ).x  # fmt: skip
    # No condition keeps them falling, as none was needed in a thousand runs; what does not fall is not taken.
    found /= found[0]
    for bands in (found.round(_DIGITS), found):
        if (np.diff(bands, append=0.0) < 0.0).all() and log_noise(bands, response)[0] < log_noise(first, response)[0]:
            return tuple(bands.tolist())
    return tuple(start)


def response_of(steps: int, momentum: float) -> np.ndarray:
    """Return how far a gradient of 1 moves the weights in each step from its own on, over the learning rate."""
    return scipy.signal.lfilter([1.0], [1.0, -momentum], np.ones(steps))


def log_noise(bands: np.ndarray, response: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the logarithm of the weights' mean variance times the bands' squared norm, and its gradient by the bands.

    Where the noise grows beyond all numbers, ``_TOO_MUCH`` and zeros.
    """
    steps = len(response)
    with np.errstate(all="ignore"):
        noise = scipy.signal.lfilter([1.0], bands, response)
        weighted = noise * (1.0 - np.arange(steps) / steps)
        variance, square = float(weighted @ noise), float(bands @ bands)
        behind = scipy.signal.lfilter([1.0], bands, noise)
        slope = np.array([weighted[i:] @ behind[: steps - i] for i in range(len(bands))])
        gradient = 2.0 * (bands / square - slope / variance)
    if not np.isfinite(gradient).all():
        return _TOO_MUCH, np.zeros(len(bands))
    return float(np.log(variance) + np.log(square)), gradient

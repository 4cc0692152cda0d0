"""The privacy of a run by two independent accountants. Imports dp-accounting when called: outside the clock, and never
in a worker."""

from __future__ import annotations

import importlib.util
import logging
import math
from functools import lru_cache

from harness.errors import BadInput
from harness.store.record import Cell, Epsilon
from harness.tasks import TASKS
from harness.worker.result import Result


@lru_cache
def available() -> bool:
    """Return whether this Python has the two accountants: one that was found may not."""
    return importlib.util.find_spec("dp_accounting") is not None


@lru_cache(maxsize=1024)
def epsilons(sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> tuple[float, float]:
    """Return (Rényi, privacy-loss-distribution) ε of ``steps`` Poisson-sampled Gaussian mechanisms, neighbours by
    adding or removing one example. Both are upper bounds; the second is tight to about 1e-3. Infinite without noise."""
    if not 0 < sample_rate <= 1:
        raise BadInput(f"The sample rate is {sample_rate}; it must lie in (0, 1]: batch size over size of the data.")
    if not 0 < delta < 1:
        raise BadInput(f"Delta is {delta}; it must lie in (0, 1), usually well below one over the size of the data.")
    if not noise_multiplier >= 0:
        raise BadInput(f"The noise multiplier is {noise_multiplier}; it must be 0 (no privacy) or more.")
    if steps == 0:
        return 0.0, 0.0
    if noise_multiplier == 0:
        return math.inf, math.inf
    import dp_accounting
    from dp_accounting import pld, rdp

    # Rényi orders below 1.6 that do not converge are left out of the minimum, which can only raise ε: no news.
    logging.getLogger("absl").setLevel(logging.ERROR)
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier)), steps
    )
    found = []
    for accountant in (rdp.RdpAccountant(), pld.PLDAccountant()):
        accountant.compose(event)
        found.append(float(accountant.get_epsilon(delta)))
    return found[0], found[1]


@lru_cache(maxsize=1024)
def epsilon_as_of_2017(sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """Return the Rényi ε by the conversion of Mironov (2017), min over orders α of R(α) + log(1/δ)/(α - 1).

    An upper bound too, larger than the one of :func:`epsilons`; libraries of before 2020 report it. Arguments as there,
    with some noise and at least one step.
    """
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant()
    accountant.compose(
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier)), steps
        )
    )
    found = (r - math.log(delta) / (order - 1) for order, r in zip(accountant.orders, accountant.rdp, strict=True))
    return float(min(found))


def of_epochs(cell: Cell, result: Result, sampling: str, sigma: float, delta: float) -> Epsilon | None:
    """Return ε of the whole epochs that the figure stands for. None where batches are no Poisson samples."""
    steps = result.epsilon_steps
    if not cell.private or sampling != "poisson" or steps is None or not available():
        return None
    rdp, pld = epsilons(cell.batch_size / TASKS[cell.task].train_size, sigma, steps, delta)
    own = result.epsilon_own
    return Epsilon(delta=delta, steps=steps, rdp=_finite(rdp), pld=_finite(pld), own=_finite(own))


def _finite(value: float | None) -> float | None:
    """Return the number; None for infinity (no noise, no privacy), which JSON cannot carry."""
    return value if value is not None and math.isfinite(value) else None

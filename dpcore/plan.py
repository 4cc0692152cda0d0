"""Compute what a budget buys: the noise for it, over sizes of batches and lengths of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dpcore.accountants import get_noise_multiplier
from dpcore.accountants.utils import count_steps
from dpcore.log_chart import COLOURS, Axis, Curve, chart


@dataclass(frozen=True)
class Choice:
    """A size of batches and a length, with the noise multiplier that keeps the budget.

    ``noise``: the deviation of a number of the update by noise, in units of ``max_grad_norm``: σ / batch.
    """

    batch: float
    epochs: float
    steps: int
    sigma: float

    @property
    def noise(self) -> float:
        return self.sigma / self.batch


def choices(
    n: int,
    epsilon: float,
    delta: float,
    batches: Sequence[float],
    epochs: Sequence[float],
    sampling: str = "poisson",
) -> Iterator[Choice]:
    """Yield the noise for a budget, by batch and length, as it is found (a second or so each).

    Args:
        n: How many examples there are.
        epsilon: ε of the whole training.
        delta: δ at which it is read.
        batches: Expected sizes, each at most ``n``.
        epochs: Rounds of ceil(n / batch) steps.
        sampling: "poisson", "bins" or "shuffle".

    Raises:
        ValueError: a number is out of its range.
    """
    for batch in batches:
        for length in epochs:
            steps = count_steps(batch / n, length)
            sigma = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=batch / n,
                epochs=length,
                sigma_tolerance=1e-4,
                sampling=sampling,
            )
            yield Choice(batch, length, steps, sigma)


def plan_figure(found: Sequence[Choice], title: str) -> str:
    """Return the SVG: noise of an update over the size of batches, a line for each length."""
    lengths = sorted({choice.epochs for choice in found})
    curves = []
    for k, length in enumerate(lengths):
        own = sorted((choice.batch, choice.noise) for choice in found if choice.epochs == length)
        x, y = np.array(own).T
        curves.append(Curve(f"{length:g} epochs", x, y, COLOURS[k % len(COLOURS)]))
    x_axis = Axis.around("expected batch size", np.array([choice.batch for choice in found]))
    y_axis = Axis.around("noise of an update / max_grad_norm", np.array([choice.noise for choice in found]))
    return chart(title, "Noise in each number of an update: sigma / batch", x_axis, y_axis, curves)

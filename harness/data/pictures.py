"""Coloured noise with a faint pattern of its class: uint8 [n, 3, side, side]. Always synthetic at 224 pixels; at 32 the
twin of CIFAR-10.

The pictures of 224 pixels have a thousand labels, of which as many occur as there are pictures to train on: what a step
costs does not hang on it, and accuracies mean nothing.
"""

from __future__ import annotations

import numpy as np

from harness.data.source import MADE_HERE, Expected, Source
from harness.tasks import TASKS

CHUNK = 4096
PLACES = 4
"""Patches of a pattern, in each direction."""
_TASK = TASKS["vit-b16"]


def images(
    rng: np.random.Generator, traces: np.random.Generator, labels: np.ndarray, shape: tuple[int, ...], classes: int
) -> np.ndarray:
    """Return pictures of ``shape`` [channels, side, side]: noise around 120 on top of a pattern of patches per class.

    Args:
        rng: of the noise.
        traces: of the patterns.
        labels: of each picture, below ``classes``.
        shape: of one picture.
        classes: how many patterns there are.
    """
    channels, side, _ = shape
    patch = side // PLACES
    own = traces.integers(-3, 4, (classes, channels, PLACES, PLACES)).astype(np.int16)
    found = np.empty((len(labels), *shape), dtype=np.uint8)
    for start in range(0, len(labels), CHUNK):
        part = labels[start : start + CHUNK]
        noise = rng.integers(24, 217, (len(part), *shape), dtype=np.int16)
        found[start : start + CHUNK] = noise + own[part].repeat(patch, axis=2).repeat(patch, axis=3)
    return found


def _counts(size: int) -> tuple[int, ...]:
    """Return how many of each class there are: one of each of the first."""
    return (1,) * size + (0,) * (_TASK.classes - size)


SOURCE = Source(
    name=_TASK.dataset,
    title="Pictures of 224 pixels",
    origin="made by dpbench: random numbers",
    licence=MADE_HERE,
    routes=(),
    expected=Expected(
        train_shape=(_TASK.train_size, *_TASK.input_shape),
        test_shape=(_TASK.test_size, *_TASK.input_shape),
        dtype="uint8",
        train_counts=_counts(_TASK.train_size),
        test_counts=_counts(_TASK.test_size),
    ),
)

"""Batches as index lists, drawn by the harness so that every framework trains on the same ones. numpy only."""

from __future__ import annotations

import math

import numpy as np

PADDED_SIZE_SIGMAS = (-0.5, 0.3, 1.2, 2.4)
"""A static-shape framework compiles one step for each B + k*sqrt(B(1-q)), and for one more size that nothing exceeds.
With normal batch sizes these four k give the least mean padding that four can, 0.58 standard deviations (five: 0.47);
0.8 % of the batches are larger and take the last size."""

SMALLEST_ROOM = 16
"""Above B, so that even at B = 1, where the size is nearly Poisson(1), no batch is ever too large (P < 1e-14)."""


def poisson_batches(dataset_size: int, sample_rate: float, steps: int, seed: int) -> list[np.ndarray]:
    """``steps`` independent Poisson samples: each of ``dataset_size`` rows is in each batch with probability
    ``sample_rate``, independently. Exact: the size is Binomial(n, q), and given its size a batch is a uniform subset.

    Returns int64 arrays of varying length, possibly empty.
    """
    rng = np.random.default_rng([seed, 0x5A3B])
    sizes = rng.binomial(dataset_size, sample_rate, size=steps)
    return [rng.choice(dataset_size, size=int(k), replace=False).astype(np.int64) for k in sizes]


def balanced(batches: list[np.ndarray]) -> list[np.ndarray]:
    """The same batches in an order in which every even number of first ones has almost the average size.

    For timing a part of an epoch: the sizes of a few Poisson batches are off by several per cent, and a slow framework,
    which is timed for few steps, would be charged for it. The k-th smallest is followed by the k-th largest, and the
    pairs keep the random order of their smaller halves, so that sizes still vary from step to step.
    """
    by_size = sorted(range(len(batches)), key=lambda i: len(batches[i]))
    half = len(batches) // 2
    pairs = sorted((by_size[k], by_size[-1 - k]) for k in range(half))
    middle = [by_size[half]] if len(batches) % 2 else []
    return [batches[i] for i in (*(i for pair in pairs for i in pair), *middle)]


def consecutive_batches(dataset_size: int, batch_size: int) -> list[np.ndarray]:
    """Slices in the order of the data, the last partial one kept (the paper's suite)."""
    return [
        np.arange(start, min(start + batch_size, dataset_size), dtype=np.int64)
        for start in range(0, dataset_size, batch_size)
    ]


def padded_sizes(batch_size: int, dataset_size: int) -> tuple[int, ...]:
    """The short list of compiled batch sizes for an expected batch size, ascending."""
    deviation = math.sqrt(batch_size * (1.0 - batch_size / dataset_size))
    sizes = {max(1, math.ceil(batch_size + k * deviation)) for k in PADDED_SIZE_SIGMAS}
    sizes.add(math.ceil(batch_size + max(8.0 * deviation, SMALLEST_ROOM)))
    return tuple(sorted({min(dataset_size, size) for size in sizes}))


def pad(indices: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(indices, mask) of the smallest size that holds ``indices``; padding rows point to row 0 and are masked out."""
    size = next((s for s in sizes if s >= len(indices)), None)
    if size is None:
        raise ValueError(
            f"A batch of {len(indices)} examples is larger than every compiled size {sizes}; "
            "add a larger size to the list rather than cut the batch."
        )
    padded = np.zeros(size, dtype=np.int64)
    padded[: len(indices)] = indices
    mask = np.zeros(size, dtype=bool)
    mask[: len(indices)] = True
    return padded, mask


def steps_per_epoch(dataset_size: int, batch_size: int) -> int:
    """ceil(N / B)."""
    return -(-dataset_size // batch_size)

"""Batches, drawn and padded."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.worker import sampling


def test_poisson_batches_have_the_right_distribution() -> None:
    n, rate, steps = 2000, 0.03, 4000
    batches = sampling.poisson_batches(n, rate, steps, seed=5)
    sizes = np.array([len(b) for b in batches])
    mean, variance = n * rate, n * rate * (1 - rate)
    assert abs(sizes.mean() - mean) < 5 * math.sqrt(variance / steps)
    assert abs(sizes.var() / variance - 1) < 5 * math.sqrt(2 / steps)
    counts = np.bincount(np.concatenate(batches), minlength=n)
    deviations = (counts - steps * rate) / math.sqrt(steps * rate * (1 - rate))
    assert abs(deviations).max() < 5.5
    assert all(len(np.unique(b)) == len(b) for b in batches)
    together = np.mean([np.isin([0, 1], b).all() for b in batches])
    assert together < 5 * rate**2 + 0.002


def test_poisson_batches_may_be_empty() -> None:
    assert any(len(b) == 0 for b in sampling.poisson_batches(100, 0.01, 50, seed=0))


def test_the_same_seed_gives_the_same_lists() -> None:
    a, b = (sampling.poisson_batches(500, 0.1, 5, seed=9) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_consecutive_batches_keep_the_partial_one() -> None:
    batches = sampling.consecutive_batches(10, 4)
    assert [b.tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("batch_size", [1, 16, 64, 512, 2048, 60_000])
def test_padded_sizes_hold_every_batch_with_little_waste(batch_size: int) -> None:
    n = 60_000
    sizes = sampling.padded_sizes(batch_size, n)
    assert len(sizes) <= 6 and sizes[-1] <= n
    assert max(sizes) <= n
    batches = sampling.poisson_batches(n, batch_size / n, 300, seed=1)
    padded = [sampling.pad(b, sizes) for b in batches]
    for indices, (rows, mask) in zip(batches, padded, strict=True):
        assert np.array_equal(rows[mask], indices) and len(rows) in sizes and not rows[~mask].any()
    if batch_size >= 64:
        waste = 1 - sum(map(len, batches)) / sum(len(rows) for rows, _ in padded)
        assert waste < 0.09


@pytest.mark.parametrize("count", [7, 8, 118, 938])
def test_balanced_batches_are_the_same_ones_and_few_of_them_have_the_average_size(count: int) -> None:
    lists = sampling.poisson_batches(60_000, 64 / 60_000, count, seed=3)
    ordered = sampling.balanced(lists)
    assert sorted(map(tuple, ordered)) == sorted(map(tuple, lists))
    sizes = np.array([len(b) for b in ordered])
    mean = sizes.mean()
    for k in range(4, count, 2):
        assert abs(sizes[:k].mean() / mean - 1) < 0.05
    if count > 100:
        assert sizes[: 2 * (count // 4)].std() > 0.5 * sizes.std(), "sizes must still vary"
        errors = [
            abs(np.mean([len(b) for b in f(sampling.poisson_batches(60_000, 64 / 60_000, 938, seed=s))[:4]]) / 64 - 1)
            for f in (sampling.balanced, list)
            for s in range(20)
        ]
        assert np.mean(errors[:20]) < 0.5 * np.mean(errors[20:])


def test_padding_never_cuts_a_batch() -> None:
    with pytest.raises(ValueError, match="larger than every compiled size"):
        sampling.pad(np.arange(9), (4, 8))

"""Measure a step of lazy tables beside one dense draw of noise: ``python -m proofs.lazy_tables`` (some 6 GB).

Processor time of one thread, median and range of blocks in which tables of a million and ten million rows, and the
dense draw for each, take turns. Ids follow Zipf's law, as words and goods do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from dpcore.lazy_tables import LazyEngine
from dpcore.noise import GaussianNoise

ROWS, WIDTH, BATCH, BLOCKS, STEPS = (1_000_000, 10_000_000), 64, 2048, 9, 10


def _engine(rows: int) -> LazyEngine:
    model = nn.Sequential(nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.1, "expected_batch_size": BATCH}
    losses = nn.BCEWithLogitsLoss(reduction="none")
    return LazyEngine(model, losses, tables=["0"], optimizer=optimizer, **given)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    engines = {rows: _engine(rows) for rows in ROWS}
    drawn = {rows: torch.empty(rows * WIDTH) for rows in ROWS}
    found: dict[tuple[str, int], list[float]] = {}

    def steps(rows: int, count: int) -> None:
        for _ in range(count):
            ids = torch.from_numpy(np.minimum(rng.zipf(1.2, BATCH), rows) - 1)
            engines[rows].step(ids, torch.ones(BATCH))

    for rows in ROWS:
        steps(rows, 30)
    for block in range(BLOCKS):
        noise = GaussianNoise(block)
        for rows in ROWS:
            found.setdefault(("step", rows), []).append(_seconds(partial(steps, rows, STEPS)) / STEPS)
            found.setdefault(("dense draw", rows), []).append(_seconds(partial(noise.fill_, drawn[rows], 1.0, 0)))
    for rows in ROWS:
        found["flush", rows] = [_seconds(engines[rows].flush)]
        steps(rows, 2)
        found["flush after 2 steps", rows] = [_seconds(engines[rows].flush)]
    for (what, rows), times in found.items():
        median, low, high = (1e3 * of(times) for of in (statistics.median, min, max))
        print(f"{what:19} {rows:>10,} x {WIDTH}: {median:7.1f} ms [{low:.1f}, {high:.1f}], n {len(times)}")


if __name__ == "__main__":
    main()

"""Requests for a page and whether they led to a click: int32 [n, 45], labels int32 [n]. Always synthetic.

No public set of this kind may be passed on, so there is no genuine one. A request has 13 counts and 8 fields of 4 ids:
the counts are log-normal, ids have Zipf's frequencies (the r-th most frequent of a field ~ 1/r), as those of the public
sets roughly have, and the places of frequent ids in a table are random. What a click depends on is a sum of one number
per id and of the logarithms of three counts, so that training moves; accuracies mean nothing.
"""

from __future__ import annotations

import numpy as np

from harness.data.source import Arrays, Expected, Source
from harness.tasks import CLICK_COUNTS as COUNTS
from harness.tasks import CLICK_IDS as IDS
from harness.tasks import CLICK_ROWS as ROWS

COUNT_MEAN, COUNT_DEVIATION = 1.0, 1.5
"""Of the counts' logarithms."""
USEFUL_COUNTS = 3


def arrays(expected: Expected, seed: int) -> Arrays:
    """Return the arrays of the shapes that ``expected`` says; the same bytes on every call."""
    world = np.random.default_rng([seed, 0])
    order = [world.permutation(rows) for rows in ROWS]
    worth = [world.standard_normal(rows) for rows in ROWS]
    found: Arrays = {}
    for split, counts in (("train", expected.train_counts), ("test", expected.test_counts)):
        rng = np.random.default_rng([seed, 1, split == "test"])
        size = sum(counts)
        x = np.empty((size, COUNTS + len(ROWS) * IDS), dtype=np.int32)
        x[:, :COUNTS] = np.exp(rng.normal(COUNT_MEAN, COUNT_DEVIATION, (size, COUNTS)))
        score = np.log1p(x[:, :USEFUL_COUNTS]).sum(axis=1) + rng.standard_normal(size)
        for field, rows in enumerate(ROWS):
            cumulative = np.cumsum(1.0 / np.arange(1, rows + 1))
            ranks = np.searchsorted(cumulative, rng.random((size, IDS)) * cumulative[-1])
            ids = order[field][np.minimum(ranks, rows - 1)]
            x[:, COUNTS + field * IDS : COUNTS + (field + 1) * IDS] = ids
            score += worth[field][ids].mean(axis=1)
        y = np.zeros(size, dtype=np.int32)
        y[np.argsort(score, kind="stable")[counts[0] :]] = 1
        found[f"{split}_x"], found[f"{split}_y"] = x, y
    return found


SOURCE = Source(
    name="clicks",
    title="Requests and clicks",
    origin="made by dpbench: random numbers with Zipf's frequencies",
    licence="none needed: made by dpbench",
    routes=(),
    expected=Expected(
        train_shape=(40_000, COUNTS + len(ROWS) * IDS),
        test_shape=(10_000, COUNTS + len(ROWS) * IDS),
        dtype="int32",
        train_counts=(30_000, 10_000),
        test_counts=(7_500, 2_500),
    ),
)

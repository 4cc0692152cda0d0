"""Requests for a page and whether they led to a click: int32 [n, counts + fields * ids], labels int32 [n]. Always
synthetic.

No public set of this kind may be passed on, so there is no genuine one. A request has counts and, for each field, ids:
the counts are log-normal, ids have Zipf's frequencies (the r-th most frequent of a field ~ 1/r), as those of the public
sets roughly have, and the places of frequent ids in a table are random. What a click depends on is a sum of one number
per id and of the logarithms of three counts, so that training moves; accuracies mean nothing. How many counts, fields
and ids there are, the task's first layer says.
"""

from __future__ import annotations

import numpy as np

from harness.data.source import MADE_HERE, Arrays, Expected, Source
from harness.tasks import TASKS, Bags, Task

COUNT_MEAN, COUNT_DEVIATION = 1.0, 1.5
"""Of the counts' logarithms."""
USEFUL_COUNTS = 3


def _bags(task: Task) -> Bags:
    first = task.layers[0]
    assert isinstance(first, Bags)
    return first


BAGS = {task.dataset: _bags(task) for task in (TASKS["recsys"], TASKS["recsys-1m"], TASKS["recsys-large"])}
"""The layer that reads each set."""


def arrays(source: Source, seed: int) -> Arrays:
    """Return the arrays of the shapes that the source expects; the same bytes on every call."""
    bags = BAGS[source.name]
    world = np.random.default_rng([seed, 0])
    # Four bytes an id: of the large tables there are 52 million.
    order = [world.permutation(np.arange(rows, dtype=np.int32)) for rows in bags.rows]
    worth = [world.standard_normal(rows) for rows in bags.rows]
    shares = {rows: np.cumsum(1.0 / np.arange(1, rows + 1)) for rows in set(bags.rows)}
    found: Arrays = {}
    for split, counts in (("train", source.expected.train_counts), ("test", source.expected.test_counts)):
        rng = np.random.default_rng([seed, 1, split == "test"])
        size = sum(counts)
        x = np.empty((size, bags.counts + len(bags.rows) * bags.ids), dtype=np.int32)
        x[:, : bags.counts] = np.exp(rng.normal(COUNT_MEAN, COUNT_DEVIATION, (size, bags.counts)))
        score = np.log1p(x[:, :USEFUL_COUNTS]).sum(axis=1) + rng.standard_normal(size)
        for field, rows in enumerate(bags.rows):
            ranks = np.searchsorted(shares[rows], rng.random((size, bags.ids)) * shares[rows][-1])
            ids = order[field][np.minimum(ranks, rows - 1)]
            start = bags.counts + field * bags.ids
            x[:, start : start + bags.ids] = ids
            score += worth[field][ids].mean(axis=1)
        y = np.zeros(size, dtype=np.int32)
        y[np.argsort(score, kind="stable")[counts[0] :]] = 1
        found[f"{split}_x"], found[f"{split}_y"] = x, y
    return found


def _source(task: Task, title: str) -> Source:
    """Return the set that the task reads, a quarter of it clicks."""
    sizes = task.train_size, task.test_size
    train, test = ((size - size // 4, size // 4) for size in sizes)
    return Source(
        name=task.dataset,
        title=title,
        origin="made by dpbench: random numbers with Zipf's frequencies",
        licence=MADE_HERE,
        routes=(),
        expected=Expected(
            train_shape=(sizes[0], *task.input_shape),
            test_shape=(sizes[1], *task.input_shape),
            dtype="int32",
            train_counts=train,
            test_counts=test,
        ),
    )


SOURCES = (
    _source(TASKS["recsys"], "Requests and clicks"),
    _source(TASKS["recsys-1m"], "Requests and clicks, 8 tables of 1,000,000 rows together"),
    _source(TASKS["recsys-large"], "Requests and clicks, 26 tables of 2,000,000"),
)

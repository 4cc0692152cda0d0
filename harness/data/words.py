"""Texts of made-up words for the full tasks: int32 [n, tokens], whole texts without padding. Always synthetic.

Word ids have the frequencies of words in reviews, the most frequent first. A language model's labels are the words that
come next. Where texts are to be told apart, each class has favourites, so that training moves; accuracies mean nothing.
How many words there are, and how long a text is, the task says.
"""

from __future__ import annotations

import numpy as np

from harness.data.source import MADE_HERE, Arrays, Expected, Source
from harness.tasks import TASKS, TOKEN_LOSS, Embedding, Task

# Fitted to the genuine training reviews: p(rank) = c / (rank + ZIPF_SHIFT) ** ZIPF_EXPONENT stays within a factor of
# 1.5 of the measured frequency at ranks 1, 2, 101, 1001, 5001 and 10000. Rows that an update touches: 64 reviews hold
# 2,340 different ids, genuine ones 2,360.
ZIPF_EXPONENT = 1.2
ZIPF_SHIFT = 3.6
LEANING = 0.1
"""Deviation of the logarithm of how much more often a class has a word."""

READERS = {TASKS[name].dataset: TASKS[name] for name in ("gpt2-124m", "llama-1b", "llama-1b-lora", "encoder-355m")}
"""A task that reads each set."""


def arrays(source: Source, seed: int) -> Arrays:
    """Return the arrays of the shapes that the source expects; the same bytes on every call."""
    vocabulary = _vocabulary(READERS[source.name])
    weights = (np.arange(1, vocabulary + 1) + ZIPF_SHIFT) ** -ZIPF_EXPONENT
    leaning = np.exp(LEANING * np.random.default_rng([seed, 0]).standard_normal(vocabulary))
    found: Arrays = {}
    expected = source.expected
    for split, (size, tokens), counts in (
        ("train", expected.train_shape, expected.train_counts),
        ("test", expected.test_shape, expected.test_counts),
    ):
        rng = np.random.default_rng([seed, 1, split == "test"])
        if expected.label_shape:
            text = drawn(rng, weights, (size, tokens + 1))
            found[f"{split}_x"], found[f"{split}_y"] = text[:, :-1], text[:, 1:]
            continue
        labels = rng.permutation(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        x = np.empty((size, tokens), dtype=np.int32)
        for label, tilt in enumerate((leaning, 1 / leaning)):
            rows = np.flatnonzero(labels == label)
            x[rows] = drawn(rng, weights * tilt, (len(rows), tokens))
        found[f"{split}_x"], found[f"{split}_y"] = x, labels
    return found


def drawn(rng: np.random.Generator, weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return int32 ids, each as often as its weight says."""
    cumulative = np.cumsum(weights)
    ids = np.searchsorted(cumulative, rng.random(shape) * cumulative[-1])
    return np.minimum(ids, len(weights) - 1).astype(np.int32)


def _vocabulary(task: Task) -> int:
    first = task.layers[0]
    assert isinstance(first, Embedding)
    return first.num_embeddings


def _source(name: str, task: Task) -> Source:
    is_model = task.loss == TOKEN_LOSS
    train, test = ((), ()) if is_model else ((size // 2,) * 2 for size in (task.train_size, task.test_size))
    return Source(
        name=name,
        title=f"Texts of {task.input_shape[0]} words out of {_vocabulary(task):,}",
        origin="made by dpbench: random words with the frequencies of genuine ones",
        licence=MADE_HERE,
        routes=(),
        expected=Expected(
            train_shape=(task.train_size, *task.input_shape),
            test_shape=(task.test_size, *task.input_shape),
            dtype="int32",
            train_counts=train,
            test_counts=test,
            label_shape=task.label_shape,
        ),
    )


SOURCES = tuple(_source(name, task) for name, task in READERS.items())

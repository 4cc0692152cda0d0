"""The examples that the gate's cases are made of."""

from __future__ import annotations

import numpy as np

from harness.tasks import (
    NOT_OWN,
    TOKEN_LOSS,
    Bags,
    Embedding,
    Task,
)

POOL_SIZE = 128
COPIES = 8
"""The last rows of the pool repeat rows 1 ... COPIES; the OUTLIERS rows before them are outliers."""
OUTLIERS = 2
OUTLIER_SCALE = 1000.0
OUTLIER_EMBEDDING_SCALE = 30.0
"""Of one embedding row only: larger would drown the update in the float32 rounding of that row."""
OUTLIER_COUNT = 1_000_000
BLANK = slice(100, 108)
"""Rows of a pool of token sequences without a token of their own, whose loss and gradient are zero. They are ordinary
rows, and neither among the core nor in the large batch."""
PROMPT_EVERY = 5
"""One of so many token sequences begins with a prompt, whose tokens are not its own: a third of it."""
SHORTEST = 6
FIRST_WORD = 4
"""Id of the first ordinary word: before it come padding, start, unknown words and one that is free."""
SEED = 1


def pool(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of POOL_SIZE examples with the task's shapes and types: ordinary rows, outliers, copies."""
    rng = np.random.default_rng([SEED, 0x9A7E])
    if task.loss == TOKEN_LOSS:
        return _paragraphs(task, rng)
    y = rng.permutation(np.arange(POOL_SIZE) % task.classes).astype(np.int32)
    bags = _bags_of(task)
    if bags is not None:
        x = _clicks(task, bags, rng)
    else:
        make = _tokens if task.input_dtype == "int32" else _images if len(task.input_shape) == 3 else _table
        x = make(task, rng)
    outliers = np.arange(POOL_SIZE - COPIES - OUTLIERS, POOL_SIZE - COPIES)
    if bags is not None:
        x[outliers, : bags.counts] = OUTLIER_COUNT
        x[outliers, bags.counts :] = np.repeat(np.array(bags.rows) - 1, bags.ids)
    elif task.input_dtype == "int32":
        x[outliers] = _outlier_token(task)
    else:
        x[outliers] = OUTLIER_SCALE * x[outliers[0]]
    # The same example under different labels: at least one of them is badly misclassified.
    y[outliers] = np.arange(OUTLIERS) % task.classes
    x[-COPIES:], y[-COPIES:] = x[1 : 1 + COPIES], y[1 : 1 + COPIES]
    return x, y


def _images(task: Task, rng: np.random.Generator) -> np.ndarray:
    """Blobs of light on a black ground, in [0, 1]."""
    channels, height, width = task.input_shape
    rows, columns = np.mgrid[0:height, 0:width]
    images = np.zeros((POOL_SIZE, *task.input_shape))
    for image in images:
        for _ in range(int(rng.integers(2, 6))):
            row, column, radius = rng.uniform(0, height), rng.uniform(0, width), rng.uniform(2, height / 4)
            blob = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * radius**2))
            image += rng.uniform(0.3, 1.0, (channels, 1, 1)) * blob
    return np.clip(images, 0.0, 1.0).astype(np.float32)


def _table(task: Task, rng: np.random.Generator) -> np.ndarray:
    """Rows of zeros, ones and fractions, like a table after one-hot encoding and scaling."""
    shape = (POOL_SIZE, *task.input_shape)
    return np.where(rng.random(shape) < 0.2, rng.choice([1.0, 0.5, 0.123], shape), 0.0).astype(np.float32)


def _words(vocabulary: int, rng: np.random.Generator) -> np.ndarray:
    """Return the ids of words, the frequent ones first. Among them are those that stand for a start and for an unknown
    word, which a library may take for padding."""
    words = FIRST_WORD + rng.choice(
        vocabulary - FIRST_WORD - 1, size=min(300, vocabulary - FIRST_WORD - 1), replace=False
    )
    return np.insert(words, (1, 2, 3), range(1, FIRST_WORD))


def _tokens(task: Task, rng: np.random.Generator) -> np.ndarray:
    """Texts of different lengths, padded in front with 0, word frequencies falling as 1/rank."""
    words = _words(_vocabulary(task), rng)
    frequency = 1.0 / np.arange(1, len(words) + 1)
    x = np.zeros((POOL_SIZE, *task.input_shape), dtype=np.int32)
    for row in x:
        length = int(rng.integers(16, len(row) + 1))
        row[-length:] = rng.choice(words, size=length, p=frequency / frequency.sum())
    return x


def _bags_of(task: Task) -> Bags | None:
    """The bags that the inputs go into, of a recommender."""
    return next((layer for layer in task.layers if isinstance(layer, Bags)), None)


def _clicks(task: Task, bags: Bags, rng: np.random.Generator) -> np.ndarray:
    """Counts of very different size, and ids whose frequencies fall as 1/rank, so that bags repeat some. The last id of
    a field is the outliers'."""
    x = np.zeros((POOL_SIZE, *task.input_shape), dtype=np.int32)
    x[:, : bags.counts] = np.floor(np.exp(rng.normal(1.0, 1.5, (POOL_SIZE, bags.counts)))).astype(np.int32)
    for field, rows in enumerate(bags.rows):
        frequency = 1.0 / np.arange(1, rows)
        start = bags.counts + field * bags.ids
        chosen = rng.choice(rows - 1, size=(POOL_SIZE, bags.ids), p=frequency / frequency.sum())
        x[:, start : start + bags.ids] = rng.permutation(rows - 1)[chosen]
    return x


def _paragraphs(task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(x, y): texts of very different lengths, padded behind, and the next word at every position; some begin with a
    prompt, some have no token of their own. The outliers say one rare word, then always the same other one."""
    length = task.input_shape[0]
    words = _words(task.classes, rng)
    frequency = 1.0 / np.arange(1, len(words) + 1)
    x = np.zeros((POOL_SIZE, length), dtype=np.int32)
    y = np.full((POOL_SIZE, length), NOT_OWN, dtype=np.int32)
    for i in range(POOL_SIZE):
        size = int(rng.integers(min(SHORTEST, length), length + 1))
        text = rng.choice(words, size=size + 1, p=frequency / frequency.sum())
        x[i, :size] = text[:-1]
        start = size // 3 if i % PROMPT_EVERY == 0 else 0
        y[i, start:size] = text[1 + start :]
    for k, row in enumerate(range(POOL_SIZE - COPIES - OUTLIERS, POOL_SIZE - COPIES)):
        x[row], y[row] = task.classes - 1, words[k]
    y[BLANK] = NOT_OWN
    x[-COPIES:], y[-COPIES:] = x[1 : 1 + COPIES], y[1 : 1 + COPIES]
    return x, y


def _vocabulary(task: Task) -> int:
    return next(layer.num_embeddings for layer in task.layers if isinstance(layer, Embedding))


def _outlier_token(task: Task) -> int:
    """A word that no ordinary row uses."""
    return _vocabulary(task) - 1

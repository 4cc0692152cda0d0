"""The cache, where the harness keeps what can be made again: data, environments, references, verdicts."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.data.store import cache_folder, usual_cache
from harness.errors import BadInput


def root() -> Path:
    """Return the cache (``data.store.cache_folder``), made if missing. Raises :class:`BadInput` where it cannot be."""
    path = cache_folder()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"The cache folder {path} cannot be made ({error.strerror}); set DPBENCH_CACHE to another."
        ) from None
    return path


def own() -> Path:
    """Return the part of the cache that this user writes: all of a cache of their own, else a folder of theirs in it,
    or, where they may not make one there, their usual cache. What is sealed for one user tells another nothing."""
    there = root()
    if there.stat().st_uid == os.getuid():
        return there
    for path in (there / f"of-{os.getuid()}", usual_cache()):
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK):
                return path
    return there


def folder(name: str) -> Path:
    """Return a folder of this user's part of the cache, made if missing. Raises :class:`BadInput` where it cannot be
    made or written."""
    path = own() / name
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be made ({error.strerror}); set DPBENCH_CACHE to a folder you may write."
        ) from None
    if not os.access(path, os.W_OK):
        raise BadInput(f"The cache folder {path} cannot be written; set DPBENCH_CACHE to another.")
    return path


def write_atomically(path: Path, content: bytes, option: str | None = None, durable: bool = True) -> None:
    """The whole content or nothing, and on the disk before the name appears. A link is followed.

    ``option``: how the user names another place, where no option does. ``durable``: False for what can be made again,
    and need not survive a stop of the machine: waiting for the disk takes milliseconds a file. Raises
    :class:`BadInput` on a full disk, for a folder that cannot be written, and for a path that is there and is no
    regular file.
    """
    path = check_replaceable(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        other = option or f"choose another folder ({_option(path)})"
        raise BadInput(
            f"{path} could not be written ({error.strerror}); free some space or {other}, then run the same command "
            "again: it goes on where it stopped."
        ) from None


def check_replaceable(path: Path) -> Path:
    """Return the file that writing to ``path`` replaces, behind links. Raises :class:`BadInput` where it is no regular
    file: a rename onto a device or a pipe would put a file in its place."""
    try:
        there = path.resolve()
        is_file = stat.S_ISREG(there.lstat().st_mode)
    except FileNotFoundError:
        return there
    except (OSError, RuntimeError) as error:
        raise BadInput(f"{path} cannot be written ({error}); name another file.") from None
    if not is_file:
        raise BadInput(f"{path} is there and is no regular file, so it is not replaced; name another file.")
    return there


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """Hold ``path`` as a lock file. Waits, or, given ``busy``, raises :class:`BadInput` with that sentence. The lock
    ends with the process, however it ends."""
    try:
        file = open(path, "a+")  # noqa: SIM115 (the `with` below closes it; only opening may fail as bad input)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written ({error.strerror}); choose another folder ({_option(path)})."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except OSError:
            raise BadInput(str(busy)) from None
        yield


def _option(path: Path) -> str:
    """Return how the user chooses another place for ``path``."""
    return "DPBENCH_CACHE" if path.is_relative_to(cache_folder().resolve()) else "--out"

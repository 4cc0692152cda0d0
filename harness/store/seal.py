"""Checks that files are still what this harness wrote or saw: seals of what it keeps in the cache, and watched files.

A seal is a keyed hash (HMAC-SHA-256) of a name and a content; its key lies in the cache, readable by this user alone,
and is never mounted into a container. A worker in a virtual environment runs as the same user: that it does not write
what it did not make is checked, that it does not look for the key is not (docs/protocol.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from harness.errors import BadInput
from harness.store import cache

KEY = "key"
KEY_BYTES = 32
Stamp = tuple[int, ...]


def of(name: str, content: bytes) -> str:
    """Return the seal of a content under a name: that of one verdict fits no other."""
    return hmac.new(_key(), name.encode() + b"\0" + hashlib.sha256(content).digest(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    path = cache.own() / KEY
    with cache.locked(path.with_suffix(".lock")):
        try:
            known = bytes.fromhex(path.read_text())
        except FileNotFoundError:
            known = b""
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{path} cannot be read ({error}); remove it, and with it the folders gate, references and "
                "layer-references beside it, which it has sealed: they are made anew."
            ) from None
        if len(known) == KEY_BYTES:
            return known
        made = os.urandom(KEY_BYTES)
        cache.write_atomically(path, made.hex().encode())
        path.chmod(0o600)
        return made


def put(path: Path) -> None:
    """Seal a file of the cache that this harness has just had made."""
    cache.write_atomically(_beside(path), of(path.name, path.read_bytes()).encode())
    _sealed[path] = stamp(path)


def holds(path: Path, log: Callable[[str], None]) -> bool:
    """Return whether the file is there with its seal, as it was sealed. Without a seal it may be the half of something;
    one that is not what was sealed is told of. Both are to be made anew."""
    if not path.exists() or not _beside(path).exists():
        return False
    now = stamp(path)
    if _sealed.get(path) != now:
        if not hmac.compare_digest(_beside(path).read_bytes(), of(path.name, path.read_bytes()).encode()):
            log(f"{path} is damaged, or another hand has written it; it is made anew.")
            return False
        _sealed[path] = now
    return True


_sealed: dict[Path, Stamp] = {}
"""Files whose seal this process has checked, as they were then: a reference of many MiB is not hashed for each cell."""


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.seal")


def stamp(path: Path) -> Stamp:
    """Return what the file system says of a file. Its last number, the time of the last change of any kind, is set by
    the kernel alone."""
    facts = path.stat()
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


class Watched:
    """Files that must stay as they are while a run is at work. A file is hashed again only where its stamp is new."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, str]] = {}

    def add(self, paths: Iterable[Path]) -> None:
        """Watch the files, from what they are now; those that are watched already stay as they were."""
        for path in paths:
            if path not in self._known:
                self._known[path] = stamp(path), _digest(path)

    def check(self) -> None:
        """Raise :class:`BadInput`, naming it, for a file that is gone or has another content."""
        for path, (seen, digest) in self._known.items():
            try:
                now = stamp(path)
                if now == seen:
                    continue
                same = _digest(path) == digest
            except OSError:
                same = False
            if not same:
                raise BadInput(
                    f"{path} changed during the run, and what is measured depends on it; put it back, or start anew "
                    "with --fresh."
                )
            self._known[path] = now, digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

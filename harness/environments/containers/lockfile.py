"""Locks and the wheelhouse: which files an image is made of, and where they lie before it is built.

A lock (``requirements.lock`` in a framework's folder) is a pip requirements file with every package pinned and every
accepted file's SHA-256: a pin may list several, since registries carry different builds under one version (torch's for
CPUs, the public one). The wheelhouse is a folder of the cache that holds the files themselves; with it an image is
built without a network.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

from harness.environments import venv
from harness.environments.venv import EnvironmentFault, Log
from harness.plan.registry import Framework, pins
from harness.store import cache

HEADER = "# Written by `dpbench image lock`: every file that the image may be made of. Not to be edited by hand.\n"


@dataclass(frozen=True)
class Pin:
    """One package of a lock. ``hashes``: SHA-256 of each file that may be installed, sorted."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        return " \\\n".join([f"{self.name}=={self.version}", *(f"    --hash=sha256:{h}" for h in self.hashes)])


@dataclass(frozen=True)
class Lock:
    """``pins`` sorted by name."""

    pins: tuple[Pin, ...]

    @property
    def text(self) -> str:
        return HEADER + "".join(f"{pin}\n" for pin in self.pins)

    @property
    def sha256(self) -> str:
        """Return the hash of what the lock says, whatever its comments."""
        return hashlib.sha256("\n".join(map(str, self.pins)).encode()).hexdigest()


def path_of(framework: Framework, device: str = "cpu") -> Path:
    """Return where the framework's lock lies; a lock for CUDA is a file of its own, for the same pins mean other
    files."""
    return framework.folder / ("requirements.lock" if device == "cpu" else f"requirements-{device}.lock")


def parse(text: str) -> Lock:
    """Raise ValueError for a line that is no pinned and hashed requirement."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in (line.strip() for line in joined.splitlines()):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)", line)
        if match is None:
            raise ValueError(line[:80])
        hashes = re.findall(r"sha256:([0-9a-f]{64})", match[3])
        found.append(Pin(canonicalize_name(match[1]), match[2], tuple(sorted(set(hashes)))))
    return Lock(tuple(sorted(found, key=lambda pin: pin.name)))


def load(framework: Framework, device: str = "cpu") -> Lock:
    """Return the framework's lock. Raises :class:`EnvironmentFault` where it is missing, broken or older than the
    pins."""
    _refuse_git(framework)
    path = path_of(framework, device)
    again = f"run `dpbench image lock {framework.name}{'' if device == 'cpu' else ' --device ' + device}`."
    if not path.exists():
        raise EnvironmentFault(f"{framework.name} has no {path.name}, and images are built from nothing else; {again}")
    try:
        lock = parse(path.read_text())
    except ValueError as error:
        raise EnvironmentFault(f"{path} has a line without a pin and a hash ({error}); {again}") from None
    locked = {pin.name: pin.version for pin in lock.pins}
    for line in _pinned(framework):
        name, _, version = line.partition("==")
        if locked.get(canonicalize_name(name)) != version:
            there = locked.get(canonicalize_name(name), "nothing")
            raise EnvironmentFault(f"{path.name} of {framework.name} says {there} where the pin is {line}; {again}")
    return lock


def _pinned(framework: Framework) -> list[str]:
    return pins(framework.requirements) + pins(framework.requirements_without_dependencies)


def _refuse_git(framework: Framework) -> None:
    names = ", ".join(line.partition(" @ ")[0] for line in _pinned(framework) if " @ git+" in line)
    if names:
        raise EnvironmentFault(
            f"not installable offline: {names} comes from a git commit and from no package registry; an image holds "
            "only files that are locked by their hash."
        )


def folder() -> Path:
    """Return the folder of the locks."""
    return cache.folder("wheelhouse")


def write_lock(framework: Framework, log: Log, device: str = "cpu") -> Lock:
    """Resolve the framework's pins as its environment does, keeps the files in the wheelhouse and writes the lock.

    Hashes that the lock already lists for the same version stay: they are other builds, from other registries. Raises
    :class:`EnvironmentFault` where something cannot be had.
    """
    _refuse_git(framework)
    with tempfile.TemporaryDirectory(dir=folder(), prefix=".resolve-") as temporary:
        log(f"Lock of {framework.name}: downloading what its pins mean on this machine ({device})")
        _pip(framework, temporary, ["-r", str(framework.requirements)])
        if pins(framework.requirements_without_dependencies):
            _pip(framework, temporary, ["--no-deps", "-r", str(framework.requirements_without_dependencies)])
        found = {}
        for file in sorted(Path(temporary).iterdir()):
            name, version = name_and_version(file.name)
            found[name] = Pin(name, version, (sha256(file),))
            shutil.move(file, folder() / file.name)
    path = path_of(framework, device)
    before = {pin.name: pin for pin in parse(path.read_text()).pins} if path.exists() else {}
    for name, pin in found.items():
        if name in before and before[name].version == pin.version:
            found[name] = Pin(name, pin.version, tuple(sorted({*before[name].hashes, *pin.hashes})))
    lock = Lock(tuple(found[name] for name in sorted(found)))
    cache.write_atomically(path, lock.text.encode())
    return lock


def collect(framework: Framework, lock: Lock, log: Log) -> list[Path]:
    """Return a file for each pin, from the wheelhouse, downloaded where it is missing; each with a hash that the lock
    lists.

    Raises :class:`EnvironmentFault` where one is nowhere to be had.
    """
    missing = [pin for pin in lock.pins if _in_wheelhouse(pin) is None]
    if missing:
        log(f"Wheelhouse: downloading {len(missing)} of {len(lock.pins)} files for {framework.name}")
        with tempfile.TemporaryDirectory(dir=folder(), prefix=".download-") as temporary:
            wanted = Path(temporary, "wanted.txt")
            wanted.write_text(Lock(tuple(missing)).text)
            files = Path(temporary, "files")
            _pip(framework, str(files), ["--no-deps", "--require-hashes", "-r", str(wanted)])
            for file in files.iterdir():
                shutil.move(file, folder() / file.name)
    chosen = [_in_wheelhouse(pin) for pin in lock.pins]
    return [path for path in chosen if path is not None]


def _in_wheelhouse(pin: Pin) -> Path | None:
    for path in sorted(folder().iterdir()):
        with suppress(ValueError):  # some other file
            if name_and_version(path.name) == (pin.name, pin.version) and sha256(path) in pin.hashes:
                return path
    return None


def name_and_version(file_name: str) -> tuple[str, str]:
    """Return name and version of a wheel or a source archive, without the version's local part (``2.13.0+cpu`` is a
    build of 2.13.0). Raises ValueError for another file."""
    if file_name.endswith(".whl"):
        name, version, *_ = parse_wheel_filename(file_name)
    else:
        name, version = parse_sdist_filename(file_name)
    return name, version.public


_hashes: dict[tuple[str, int, int], str] = {}


def sha256(path: Path) -> str:
    """Remembered within the process by size and time of change: one torch wheel serves nine frameworks."""
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns)
    if key not in _hashes:
        with path.open("rb") as file:
            _hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _hashes[key]


def _pip(framework: Framework, target: str, arguments: Iterable[str]) -> None:
    """``pip download`` with the framework's Python, from whatever registry the user has configured."""
    python = venv.interpreter(framework.python)
    pip = [python] if _has_pip(python) else [sys.executable]
    command = [*pip, "-m", "pip", "download", "--disable-pip-version-check", "-q", "-d", target, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or [done.stderr[-300:]]
        raise EnvironmentFault(
            f"{framework.name}: its files could not be downloaded ({' '.join(errors)[-400:]}); where there is no "
            f"registry, copy the wheelhouse ({folder()}) of a machine that has one."
        )


def _has_pip(python: str) -> bool:
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0

"""One virtual environment per set of pinned requirements, named by the hash of its lock.

Frameworks with the same pins share one. The marker file is written last: without it an environment is half-built and is
made anew.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import cache, isolation
from harness.registry import Framework

MARKER = "dpbench.json"
Say = Callable[[str], None]


class EnvironmentFault(Exception):
    """An environment that could not be built; the message is the reason of the ``unsupported`` records."""


@dataclass(frozen=True)
class Environment:
    folder: Path
    lock_hash: str
    frameworks: tuple[str, ...]
    seconds: float

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def size_bytes(self) -> int:
        return sum(p.lstat().st_size for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink())


def parent() -> Path:
    return cache.folder("envs")


def existing() -> list[Environment]:
    """All finished environments."""
    return [_read(marker.parent) for marker in sorted(parent().glob(f"*/{MARKER}"))]


def _read(folder: Path) -> Environment:
    data = json.loads((folder / MARKER).read_text())
    return Environment(folder, data["lock_hash"], tuple(data["frameworks"]), data["seconds"])


def ensure(framework: Framework, say: Say) -> Environment:
    """The framework's environment, built where it is missing. Raises :class:`EnvironmentFault`."""
    folder = parent() / framework.lock_hash
    with cache.locked(parent() / f"{framework.lock_hash}.lock"):
        if (folder / MARKER).exists():
            return _read(folder)
        if folder.exists():
            say(f"Environment of {framework.name}: a half-built one is removed")
            shutil.rmtree(folder)
        return _build(framework, folder, say)


def _build(framework: Framework, folder: Path, say: Say) -> Environment:
    start = time.monotonic()
    say(f"Environment of {framework.name}: installing {framework.requirements.name} into {folder}")
    log = parent() / f"{framework.lock_hash}.log"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    commands = [
        [interpreter(framework.python), "-m", "venv", str(folder)],
        [*pip, "-r", str(framework.requirements)],
    ]
    with log.open("w") as output:
        for command in commands:
            done = subprocess.run(
                isolation.mortal(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                tail = " ".join(log.read_text(errors="replace").strip().splitlines()[-2:])
                raise EnvironmentFault(
                    f"not installable here: `{' '.join(command[1:4])} …` ended with {done.returncode} ({tail[-300:]}); "
                    f"the whole log is {log}."
                )
    seconds = time.monotonic() - start
    data = {"lock_hash": framework.lock_hash, "frameworks": [framework.name], "seconds": round(seconds, 1)}
    cache.write_atomically(folder / MARKER, json.dumps(data).encode())
    say(f"Environment of {framework.name}: ready after {seconds:.0f} s")
    return _read(folder)


def interpreter(version: str) -> str:
    """A Python of that version: this one, or ``pythonX.Y`` of the PATH. Raises :class:`EnvironmentFault`."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return getattr(sys, "_base_executable", sys.executable)
    found = shutil.which(f"python{version}")
    if found is None:
        raise EnvironmentFault(f"needs Python {version}, which is not on the PATH; install it and run again.")
    return found


def remove(environment: Environment) -> None:
    """Removes the marker first, so that a killed removal leaves nothing that looks whole."""
    (environment.folder / MARKER).unlink()
    shutil.rmtree(environment.folder)

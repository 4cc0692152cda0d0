"""One virtual environment per set of pinned requirements, named by the hash of its lock.

Frameworks with the same pins share one. The marker file is written last: without it an environment is half-built and is
made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from harness.environments import executor, installer, variables
from harness.environments.backend import AnyContestant, Argument, LocalBackend, Log, as_words
from harness.environments.executor import WORKER, Executor, Venv
from harness.environments.orphans import dying_with_parent
from harness.environments.unavailable import Unavailable
from harness.plan.registry import Framework, frameworks, pins
from harness.store import cache

MARKER = "dpbench.json"
GIT_PIN = re.compile(r"(?P<package>\S+) @ git\+(?P<address>\S+?)@[0-9a-f]{40}")


class EnvironmentFault(executor.ToolFault):
    """An environment that could not be built; the message is the reason of the ``unsupported`` records."""


@dataclass(frozen=True)
class Environment:
    """A finished virtual environment. ``frameworks``: all that share it; ``seconds``: what making it took."""

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


class VenvBackend(LocalBackend):
    """A virtual environment for each framework's pins."""

    def executor(self, contestant: AnyContestant, log: Log, module: str = WORKER) -> Executor | Unavailable:
        framework = contestant.framework
        try:
            python = ensure(framework, log).python
        except EnvironmentFault as fault:
            log(f"{framework.name}: {fault}")
            return Unavailable(str(fault))
        return Venv(python, contestant.variant.environment, module, framework.root, content(python.parent.parent))

    def run_tool(self, module: str, arguments: Sequence[Argument], log: Log) -> str:
        """Run the tool in the environment of plain PyTorch."""
        return executor.run_tool(ensure(frameworks()["pytorch"], log).python, module, as_words(arguments))


def parent() -> Path:
    """Return the folder in which environments are made: the cache's, where this user may write it."""
    shared = cache.root() / "envs"
    with suppress(OSError):
        shared.mkdir(exist_ok=True)
    return shared if os.access(shared, os.W_OK) else cache.own() / "envs"


def _places() -> list[Path]:
    """Return where environments lie: those that somebody else has made in this cache need only be read."""
    return list(dict.fromkeys((cache.root() / "envs", parent())))


def existing() -> list[Environment]:
    """Return all finished environments."""
    return [_read(marker.parent) for place in _places() for marker in sorted(place.glob(f"*/{MARKER}"))]


def _read(folder: Path) -> Environment:
    data = json.loads((folder / MARKER).read_text())
    return Environment(folder, data["lock_hash"], tuple(data["frameworks"]), data["seconds"])


_faults: dict[Path, EnvironmentFault] = {}
"""Environments that this process could not build: every task and variant asks again, and an installation is not tried
anew."""


def ensure(framework: Framework, log: Log) -> Environment:
    """Return the framework's environment, built where it is missing. Raises :class:`EnvironmentFault`."""
    lock = framework.lock_hash
    folder = parent() / lock
    if folder in _faults:
        raise _faults[folder]
    for place in _places():
        if flaw(place / lock, framework) is None:
            return _read(place / lock)
    if folder.parent != cache.root() / "envs":
        cache.folder("envs")
    with cache.locked(parent() / f"{lock}.lock"):
        why = flaw(folder, framework)
        if why is None:  # another process has made it meanwhile
            return _read(folder)
        if folder.exists():
            log(f"Environment of {framework.name}: {why}; it is made anew")
            shutil.rmtree(folder)
        try:
            return _build(framework, folder, log)
        except EnvironmentFault as fault:
            _faults[folder] = fault
            raise


def flaw(folder: Path, framework: Framework) -> str | None:
    """Return why the environment in a folder cannot be used, or None."""
    if not (folder / MARKER).exists():
        return "it is half-built"
    if not (folder / "bin" / "python").exists():
        return f"its Python ({os.path.realpath(folder / 'bin' / 'python')}) is gone"
    lacking = _lacking(folder, framework)
    return f"it lacks {', '.join(lacking)}" if lacking else None


def _lacking(folder: Path, framework: Framework) -> list[str]:
    """Return the pins that nothing in the environment meets."""
    names = (path.name.removesuffix(".dist-info").rpartition("-") for path in _packages(folder).glob("*.dist-info"))
    there = {canonicalize_name(name): version for name, _, version in names}
    wanted: list[str] = []
    for file in (framework.requirements, framework.requirements_without_dependencies):
        for pin in pins(file):
            with suppress(InvalidRequirement):  # an option, or a path
                need = Requirement(pin.partition(" #")[0].strip())
                version = there.get(canonicalize_name(need.name))
                is_met = version is not None and need.specifier.contains(version, prereleases=True)
                if not is_met and (need.marker is None or need.marker.evaluate({"python_version": framework.python})):
                    wanted.append(pin)
    return wanted


def _packages(folder: Path) -> Path:
    """Return the folder of an environment that holds its packages."""
    return next(iter(sorted(folder.glob("lib/python*/site-packages"))), folder / "none")


UNTOLD = re.compile(r"pip[-/].*|\.\./.*|.*\.pyc,.*|[^/]*\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json),.*")
"""Of an installation's records, what says how it was made and not what it is."""


def content(folder: Path) -> str:
    """Return a hash of all that is installed in an environment, wherever it came from: of the hashes that pip has
    recorded of every file, and of the Python; empty where there are none.

    Args:
        folder: the environment's.
    """
    records = sorted(_packages(folder).glob("*.dist-info/RECORD"))
    return _hash_of(folder, *((path, path.stat().st_mtime_ns) for path in records)) if records else ""


@lru_cache(maxsize=100)
def _hash_of(folder: Path, *records: tuple[Path, int]) -> str:
    digest = hashlib.sha256()
    with suppress(OSError):
        settings = (folder / "pyvenv.cfg").read_text().splitlines()
        digest.update("".join(line for line in settings if line.startswith("version")).encode())
    for path, _ in records:
        for line in sorted(line for line in path.read_text().splitlines() if not UNTOLD.fullmatch(line)):
            digest.update(line.encode())
            if line.endswith(",,"):  # pip has recorded no hash of it
                with suppress(OSError):
                    digest.update((path.parent.parent / line.removesuffix(",,")).read_bytes())
    return digest.hexdigest()[:12]


def _build(framework: Framework, folder: Path, log: Log) -> Environment:
    start = time.monotonic()
    log(f"Environment of {framework.name}: installing {framework.requirements.name} into {folder}")
    log_file = parent() / f"{framework.lock_hash}.log"
    needed = [["-r", str(framework.requirements)]]
    if pins(framework.requirements_without_dependencies):
        needed.append(["--no-deps", "-r", str(framework.requirements_without_dependencies)])
    try:
        given = variables.of_installer({})
        _check_git(framework, given)
        with log_file.open("w") as output:
            python = interpreter(framework.python)
            for step in (
                lambda: installer.make(folder, python, output, given),
                # Bytecode is made by the first process of the gate, for what a contestant uses.
                *(lambda n=n: installer.install(folder, n, output, given, compiled=False) for n in needed),
            ):
                if code := step():
                    raise EnvironmentFault(_why(code, log_file))
        if lacking := _lacking(folder, framework):
            raise EnvironmentFault(
                f"not installable here: its installer ended well, and {', '.join(lacking)} is not in {folder}; the "
                f"whole log is {log_file}."
            )
    except EnvironmentFault:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    seconds = time.monotonic() - start
    data = {"lock_hash": framework.lock_hash, "frameworks": [framework.name], "seconds": round(seconds, 1)}
    cache.write_atomically(folder / MARKER, json.dumps(data).encode())
    log(f"Environment of {framework.name}: ready after {seconds:.0f} s")
    return _read(folder)


def _check_git(framework: Framework, environment: Mapping[str, str]) -> None:
    """Ask every repository that the framework pins a commit of for its branches: seconds, where pip would come to it
    after gigabytes of other packages. Raises :class:`EnvironmentFault` where git does not reach one."""
    files = (framework.requirements, framework.requirements_without_dependencies)
    found = [match for file in files for line in pins(file) if (match := GIT_PIN.fullmatch(line))]
    if found and shutil.which("git") is None:
        raise EnvironmentFault("not installable here: git is not on the PATH; install it and run again.")
    for pin in found:
        command = dying_with_parent(["git", "ls-remote", "--quiet", pin["address"]])
        if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment).returncode:
            raise EnvironmentFault(
                f"not installable offline: {pin['package']} comes from a git commit and from no package registry, and "
                f"git could not reach it from here; tell git where a copy lies: git config --global "
                f"url.file:///FOLDER/NAME.git.insteadOf {pin['address']}."
            )


def _why(code: int, log_file: Path) -> str:
    """Return one sentence: what could not be installed, and where the log is."""
    text = log_file.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-2:]
    errors = [re.sub(r" *\(from versions:[^)]*\)", "", line) for line in errors]  # a list of every release
    return (
        f"not installable here: `pip install` ended with {code} ({' '.join(errors)[-300:]}); "
        f"the whole log is {log_file}."
    )


def interpreter(version: str) -> str:
    """Return a Python of that version: this one, or ``pythonX.Y`` of the PATH. Raises :class:`EnvironmentFault`."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return getattr(sys, "_base_executable", sys.executable)
    found = shutil.which(f"python{version}")
    if found is None:
        raise EnvironmentFault(f"needs Python {version}, which is not on the PATH; install it and run again.")
    return found


def remove(environment: Environment) -> None:
    """Remove the marker first, so that a killed removal leaves nothing that looks whole."""
    (environment.folder / MARKER).unlink()
    shutil.rmtree(environment.folder)

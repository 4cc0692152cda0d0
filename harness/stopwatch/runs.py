"""Runs of measured steps: one JSON file each, in a folder per machine, so that machines are never mixed."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.stopwatch.measure import Process
from harness.store import cache
from harness.worker import machine

SCHEMA = 1
FOLDER = ".dpbench"
LATEST = "latest"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CANARY_CHANGED = 0.25
"""The machine changed its speed if the speed probe's seconds change by more than this; the same share as in a
benchmark's run."""


@dataclass(frozen=True)
class StepRun:
    """``steps``: processes of each step, by the test's node id. ``canary``: seconds of a fixed product and copy before
    and after the run, which say how fast the machine was."""

    name: str
    started: str
    machine: dict[str, Any]
    canary: tuple[float, float] | None
    commit: str | None
    versions: dict[str, str]
    steps: dict[str, tuple[Process, ...]]

    @property
    def restless(self) -> bool:
        """The machine changed its speed during the run."""
        return self.canary is not None and max(self.canary) / min(self.canary) > 1 + CANARY_CHANGED

    def to_json(self) -> str:
        steps = {name: {"processes": [p.as_json() for p in found]} for name, found in self.steps.items()}
        return json.dumps({"schema": SCHEMA, **self.__dict__, "steps": steps}, indent=1)


def parse(text: str, origin: Path) -> StepRun:
    """Raise :class:`BadInput`, naming ``origin``, where it is no such run."""
    remedy = "save it again, or compare with another run."
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise BadInput(f"{origin} has schema {data['schema']!r}, this dpbench reads {SCHEMA}; {remedy}")
        return StepRun(
            name=data["name"],
            started=data["started"],
            machine=data["machine"],
            canary=tuple(data["canary"]) if data["canary"] else None,
            commit=data["commit"],
            versions=data["versions"],
            steps={
                name: tuple(Process.from_json(process) for process in step["processes"])
                for name, step in data["steps"].items()
            },
        )
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{origin} is no run of steps ({type(error).__name__}: {error}); {remedy}") from None


def check_name(name: str, option: str) -> None:
    """Raise :class:`BadInput` where a run cannot have that name."""
    if not NAME.fullmatch(name) or name == LATEST:
        raise BadInput(
            f"{option} is {name!r}: give a name of up to 64 letters, digits, '.', '_' or '-' other than '{LATEST}'."
        )


def folder(root: Path) -> Path:
    """Return the folder of this machine's runs."""
    return root / FOLDER / str(machine.describe()["id"])


def find(root: Path, name: str, option: str) -> StepRun:
    """Return the newest run of this machine with that name (``latest``: with any). Raises :class:`BadInput` where there
    is none, saying what there is."""
    here = folder(root)
    paths = sorted(here.glob("*.json"))
    names = [_name(path) for path in paths]
    for path, found in zip(reversed(paths), reversed(names), strict=True):
        if name in (LATEST, found):
            return parse(path.read_text(), path)
    others = sorted(
        path.parent.name
        for path in (root / FOLDER).glob("*/*.json")
        if name in (LATEST, _name(path)) and path not in paths
    )
    known = f"this machine ({here.name}) has {', '.join(sorted(set(names)))}" if names else "this machine has none"
    elsewhere = f" (machine {others[0]} has one, and machines are never mixed)" if others else ""
    raise BadInput(f"{option} is {name!r}, but {known}{elsewhere}; save one by --dpbench-save NAME first.")


def _name(path: Path) -> str:
    """Return the run's name: the file's begins with the time, in which there is no underscore."""
    return path.stem.split("_", 1)[-1]


def save(root: Path, run: StepRun) -> Path:
    """Write the run whole or not at all, under a name that is newer than all; returns the path."""
    here = folder(root)
    try:
        here.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{here} cannot be made ({error.strerror}); free some space or repair its rights.") from None
    path = here / f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}_{run.name}.json"
    with cache.locked(here / ".lock"):
        for part in here.glob(".*.part"):  # of a run that was killed while it saved
            part.unlink()
        cache.write_atomically(path, run.to_json().encode())
    return path


def describe(root: Path) -> dict[str, Any]:
    """Return what besides the steps a run should say: the machine, the commit of the user's checkout, versions."""
    return {"machine": dict(machine.describe()), "commit": _commit(root), "versions": _versions()}


def canary_seconds() -> float | None:
    """Return the seconds of the speed probe, in a process of its own with one thread: this one may have other ideas of
    threads. None where it could not be run."""
    done = subprocess.run(
        [sys.executable, "-c", "from harness.worker import speed_probe; print(speed_probe.seconds())"],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    try:
        return float(done.stdout)
    except ValueError:
        return None


def _commit(root: Path) -> str | None:
    """Return the commit, with ``-dirty`` where tracked files differ from it."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    """Return the versions of Python and of every installed distribution: whose change is the reason is not known
    beforehand."""
    installed = {d.name: d.version for d in metadata.distributions() if d.name}
    return {"python": platform.python_version(), **dict(sorted(installed.items()))}

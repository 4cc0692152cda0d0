"""The store: a run folder with a plan, a lock and one atomic JSON record per process."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import cache, record
from harness.errors import BadInput
from harness.record import Record

PLAN = "plan.json"


class RunFolder:
    """``records/`` holds what was measured; ``scratch/`` holds weights that may be lost at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = path / "records"
        self.scratch = path / "scratch"
        self.id = path.name

    @contextmanager
    def open(self, description: dict[str, Any], fresh: bool) -> Iterator[None]:
        """Makes or continues the run, alone. Raises :class:`BadInput` where another run is at work in the folder, the
        folder cannot be written, or it holds a run with other options or other code."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(
                f"The folder {self.path} cannot be made ({error.strerror}); choose another with --out."
            ) from None
        busy = f"Another run is at work in {self.path}; wait for it, or choose another folder with --out."
        with cache.locked(self.path / ".lock", busy):
            if fresh:
                self._set_aside()
            self._check_plan(description)
            for folder in (self.records, self.scratch):
                try:
                    folder.mkdir(exist_ok=True)
                except OSError as error:
                    raise BadInput(
                        f"{folder} cannot be made ({error.strerror}); free some space, or choose another with --out."
                    ) from None
            for part in (*self.records.glob(".*.part"), *self.scratch.glob("*.part")):
                part.unlink()
            yield

    def _check_plan(self, description: dict[str, Any]) -> None:
        path = self.path / PLAN
        wanted = json.loads(json.dumps(description))
        if not path.exists():
            # A name alone would let two runs of one preset be paired with each other.
            self.id = f"{self.path.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.urandom(2).hex()}"
            cache.write_atomically(path, json.dumps({"id": self.id, **wanted}, indent=1).encode())
            return
        try:
            old = json.loads(path.read_text())
            self.id = old.pop("id")
        except (json.JSONDecodeError, KeyError):
            raise BadInput(f"{path} is corrupt; start anew with --fresh (the old records are kept aside).") from None
        if old != wanted:
            what = ", ".join(_differences(old, wanted))
            raise BadInput(
                f"{self.path} holds a run that differs in {what}; start anew with --fresh (the old records are kept "
                "aside), or choose another folder with --out."
            )

    def _set_aside(self) -> None:
        # The plan goes last: a kill in between leaves a folder that the next --fresh still clears.
        names = [name for name in ("records", "report", PLAN) if (self.path / name).exists()]
        if not names:
            return
        aside = self.path / "earlier" / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        aside.mkdir(parents=True)
        for name in names:
            (self.path / name).rename(aside / name)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def read(self, name: str) -> Record | None:
        """The record of that name, or None. Raises :class:`BadInput` where it is corrupt."""
        path = self.records / name
        return record.read(path)[0] if path.exists() else None

    def write(self, name: str, value: Record) -> None:
        cache.write_atomically(self.records / name, value.to_json().encode())


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of what differs."""
    names: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(f"{prefix}{key} ({a!r} then, {b!r} now)")
    return names


def pack(folder: Path, target: Path) -> int:
    """Writes all records of a run into one ``.jsonl``, a record a line, sorted by name; returns how many. Raises
    :class:`BadInput` where there are none, or the run is still at work.
    """
    paths = sorted((folder / "records").glob("*.json"))
    if not paths:
        raise BadInput(f"{folder} has no records to pack; name the folder of a finished run.")
    busy = f"A run is at work in {folder}, so its records are not all there yet; wait for it."
    with cache.locked(folder / ".lock", busy):
        lines = [portable(record.read(path)[0]) for path in paths]
    cache.write_atomically(target, ("\n".join(lines) + "\n").encode())
    return len(lines)


def portable(value: Record) -> str:
    """The record as a line for others: the home folder, which a reason may name with a log, is written as ``~``."""
    home = json.dumps(str(Path.home()), ensure_ascii=False)[1:-1]
    return re.sub(r"(?<![\w./~-])" + re.escape(home) + "/", "~/", value.to_json())

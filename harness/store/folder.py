"""The store: a run folder with a plan, a lock and one atomic JSON record per process."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.data.store import home
from harness.errors import BadInput
from harness.store import cache, record, surroundings
from harness.store.record import Record

PLAN = "plan.json"
GRID = "grid.json"
"""The plan of many runs, whose folders lie below."""
SITE = "dpbench-dashboard.json"
"""A folder that holds it is a dashboard, which may be replaced as a whole."""
MOST_ATTEMPTS = 3
"""A process that was under way each time when its run was killed gets no more: it may be what kills the run."""


class RunFolder:
    """``records/`` holds what was measured; ``scratch/`` holds weights that may be lost at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = path / "records"
        self.scratch = path / "scratch"
        self.id = path.name

    @contextmanager
    def open(self, description: dict[str, Any], fresh: bool) -> Iterator[None]:
        """Make or continue the run, alone. Raises :class:`BadInput` where another run is at work in the folder, the
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
                    for part in folder.glob(".*.part" if folder == self.records else "*.part"):
                        part.unlink()
                except OSError as error:
                    raise BadInput(
                        f"{folder} cannot be made or written ({error.strerror}); free some space, make it writable, or "
                        "choose another with --out."
                    ) from None
            self.check_writable()
            yield

    def check_writable(self) -> None:
        """Raise :class:`BadInput` where records or weights could not be left here."""
        for folder in (self.records, self.scratch):
            probe = folder / f".probe.{os.getpid()}.part"
            try:
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise BadInput(
                    f"{folder} cannot be written ({error.strerror}); make it writable, or choose another folder with "
                    "--out, then run the same command again: it goes on where it stopped."
                ) from None

    def _check_plan(self, description: dict[str, Any]) -> None:
        path = self.path / PLAN
        wanted = json.loads(json.dumps(description))
        if not path.exists():
            if next(self.records.glob("*.json"), None) is not None:
                raise BadInput(
                    f"{self.path} holds records, but no {PLAN} that says with which options and code they were made; "
                    "put it back, or start anew with --fresh (the old records are kept aside)."
                )
            # A name alone would let two runs of one preset be paired with each other.
            self.id = f"{self.path.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.urandom(2).hex()}"
            cache.write_atomically(path, json.dumps({"id": self.id, **wanted}, indent=1).encode())
            return
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            self.id = str(old.pop("id"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise BadInput(f"{path} is corrupt; start anew with --fresh (the old records are kept aside).") from None
        if _contains(wanted, old):
            if old != wanted:
                cache.write_atomically(path, json.dumps({"id": self.id, **wanted}, indent=1).encode())
            return
        what = ", ".join(surroundings.differences(old, wanted))
        raise BadInput(
            f"{self.path} holds a run that differs in {what}; start anew with --fresh (the old records are kept "
            "aside), or choose another folder with --out, and report both: `dpbench report A B --out C`."
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
        """Return the record of that name, or None. Raises :class:`BadInput` where it is corrupt, or is another
        cell's."""
        try:
            (value,) = record.read(self.records / name)
        except FileNotFoundError:
            return None
        if value.file_name != name:
            raise BadInput(misnamed(self.records / name, value))
        return value

    def write(self, name: str, value: Record) -> None:
        cache.write_atomically(self.records / name, value.to_json().encode())

    def attempts(self, name: str) -> int:
        """Return how often a run was killed while the process that makes the record ``name`` was under way."""
        try:
            return int((self.scratch / f"{name}.attempts").read_text())
        except (OSError, ValueError):
            return 0

    @contextmanager
    def attempt(self, name: str) -> Iterator[int]:
        """Around the process that makes the record ``name``: how often a run was killed before while this process was
        under way. A killed one leaves its count behind; a run that ends in any other way does not."""
        path = self.scratch / f"{name}.attempts"
        before = self.attempts(name)
        cache.write_atomically(path, str(before + 1).encode())
        try:
            yield before
        finally:
            with suppress(OSError):
                path.unlink()


def _contains(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Say whether a plan is the old one, with more perhaps. Cells of a comparison share a chance of error: no more."""
    if "contestants" not in old:
        return new == old
    grows, rest = zip(*map(_parted, (new, old)), strict=True)
    return rest[0] == rest[1] and _more(*grows)


def _parted(plan: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a run that stands may get more of, and the rest of its plan."""
    options = dict(plan.get("options") or {})
    options.pop("frameworks", None)  # whom it means stands under ``contestants``; their order is nobody's business
    rounds, tasks = options.pop("rounds", 0), options.pop("tasks", None) or ()
    of_tasks = dict.fromkeys(tasks, rounds)
    grows = {"definitions": plan.get("tasks"), "sizes": options.pop("batch_sizes", None), "rounds": of_tasks or rounds}
    return grows, {**plan, "options": options, "tasks": None}


def _more(new: Any, old: Any) -> bool:
    """Say whether a number, a list or a mapping of them is at least the old one."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and _more(new[name], value) for name, value in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and all(value in new for value in old)
    return new == old or (isinstance(old, int) and isinstance(new, int) and new > old)


def misnamed(path: Path, value: Record) -> str:
    """Say that a record lies under a name that is not its own."""
    return (
        f"{path} holds the record of another process (its name would be {value.file_name}); move it out of the folder "
        "and run again to measure the cell of that name anew."
    )


def pack(folder: Path | Sequence[Path], target: Path) -> int:
    """Write all records of a run, or of several, into one ``.jsonl`` (compressed where the target ends in ``.gz``), a
    record a line, sorted by name; returns how many. Raises
    :class:`BadInput` where there are none, one is bad, a run is still at work, or the target cannot be written.
    """
    lines: list[tuple[str, str]] = []
    for one in [folder] if isinstance(folder, Path) else folder:
        paths = sorted((one / "records").glob("*.json"))
        if not paths and (one / GRID).exists():
            raise BadInput(f"{one} is a grid, which is packed by `dpbench grid merge {one}`.")
        if one.is_file():
            raise BadInput(f"{one} is a file; what is packed is a run's folder. A pack is copied as it is.")
        if not paths:
            raise BadInput(f"{one} has no records to pack; name the folder of a finished run.")
        busy = f"A run is at work in {one}, so its records are not all there yet; wait for it."
        with cache.locked(one / ".lock", busy):
            for path in paths:
                (value,) = record.read(path)
                if (one / PLAN).exists() and value.file_name != path.name:
                    raise BadInput(misnamed(path, value))
                lines.append((path.name, portable(value)))
    return write_pack(lines, target)


def write_pack(lines: list[tuple[str, str]], target: Path) -> int:
    """Write (name, line of a record) into one file as :func:`pack` does, which changes ``lines``; returns how many."""
    lines.sort()
    # Without the time of packing, so that the same records make the same file. Line by line: a grid's may be 500 MB.
    packer = zlib.compressobj(9, wbits=31) if target.suffix == ".gz" else None
    parts = (f"{line}\n".encode() for _, line in lines)
    content = b"".join((*map(packer.compress, parts), packer.flush()) if packer else parts)
    cache.write_atomically(target, content, "name another file")
    return len(lines)


def portable(value: Record) -> str:
    """Return the record as a line for others: the home folder, which a reason may name with a log, is written as
    ``~``."""
    there, text = home(), value.to_json()
    name = json.dumps(str(there), ensure_ascii=False)[1:-1] + "/"
    if there is None or name not in text:  # which is found a hundred times faster than the pattern
        return text
    return re.sub(r"(?<![\w./~-])" + re.escape(name), "~/", text)

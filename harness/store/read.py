"""All records below one folder or several, read while a run may be writing there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.errors import BadInput, did_you_mean
from harness.store import record
from harness.store.folder import PLAN, SITE, misnamed
from harness.store.record import Gate, Record

SUMMARY = "summary.json"
"""The summary that ``run gpu`` leaves beside its records."""


Tell = Callable[[str], None]


def load(*places: Path, left_out: Tell | None = None) -> list[Record]:
    """Return all records of the ``places``, each a ``.json``, ``.jsonl`` or ``.jsonl.gz`` file, or a folder with such
    files somewhere below it, in order of their paths.

    Of a run's folder (one that holds a ``plan.json``) only its ``records/`` count: what ``--fresh`` has set aside does
    not. A dashboard and a comparison, which may lie among the runs, hold no records and are passed over. Hidden files
    are left out: a record is hidden until it is complete (written under a hidden name, then renamed).
    If a file vanishes between listing and reading, the folder is read once more. A record that is there both as a file
    of its own and in a packed ``.jsonl``, or in several places, counts once.

    Raises :class:`BadInput` for a place that does not exist, one without a record, and a record that is corrupt, newer,
    or under another process's name; of these, where ``left_out`` is given, it is told why, and the rest is loaded.
    """
    return list(_distinct(value for place in places for value in _of(place, left_out)))


def every(place: Path) -> list[Record]:
    """Return what :func:`load` does, a record that is there twice as two."""
    return _of(place, None)


def _distinct(values: Iterable[Record]) -> Iterator[Record]:
    """Yield each record once. Only those of one process can be equal, so that hardly one is compared as a text."""
    known: dict[tuple[object, ...], list[Record]] = {}
    for value in values:
        process = value.key, value.started, value.wall_seconds, value.purpose, value.block.run, value.block.round
        twins = known.setdefault(process, [])
        if twins and value.to_json() in [twin.to_json() for twin in twins]:
            continue
        twins.append(value)
        yield value


PARTS = ("cell", "data", "epsilon", "energy", "source")


def _sharing(value: Record, known: dict[Any, Any]) -> Record:
    """Let a record share parts with the others that have equal ones, all of them frozen: of a large grid it is most.
    Verdicts are shared as they are parsed."""
    parts = {name: part for name in PARTS if (part := getattr(value, name)) is not None}
    shared = {name: known.setdefault((name, part.model_dump_json()), part) for name, part in parts.items()}
    shared |= {
        name: known.setdefault((name, repr(part)), part)
        for name, part in (("versions", value.versions), ("machine", value.machine))
    }
    return value.model_copy(update=shared)


def chosen(
    records: Sequence[Record], frameworks: Sequence[str] | None = None, tasks: Sequence[str] | None = None
) -> list[Record]:
    """Return the records of these frameworks (or contestants), tasks and layers; None: of all.

    Raises:
        BadInput: a name that no record has.
    """

    def names(record: Record) -> tuple[set[str], set[str]]:
        cell = record.cell
        return {cell.framework, cell.contestant}, {cell.layer or cell.task}

    for place, (option, wanted) in enumerate((("--frameworks", frameworks), ("--tasks", tasks))):
        known = {name for record in records for name in names(record)[place]}
        for name in wanted or ():
            if name not in known:
                near = did_you_mean(name, known)
                raise BadInput(f"{option} names {name!r}{near}; these records hold {', '.join(sorted(known))}.")
        records = [record for record in records if wanted is None or not names(record)[place].isdisjoint(wanted)]
    return list(records)


REMEDY = "make some with `dpbench run e2e`, or name a committed run, such as `cited`."


def _of(place: Path, left_out: Tell | None) -> list[Record]:
    if not place.exists():
        raise BadInput(f"There is no folder {place}; give one that holds records, or {REMEDY}")
    for _ in range(3):
        try:
            found, faults = _read(place)
            break
        except FileNotFoundError:
            continue
    else:
        raise BadInput(f"Files keep vanishing from {place} while they are read; wait for the run to finish.")
    for fault in faults:
        if left_out is None or not found:
            raise BadInput(fault)
        left_out(fault)
    if not found:
        raise BadInput(f"There are no records in {place}; {REMEDY}")
    return found


def _read(place: Path) -> tuple[list[Record], list[str]]:
    """Return (records, what is wrong with the others)."""
    found: list[Record] = []
    faults: list[str] = []
    known: dict[Any, Any] = {}
    gates: dict[str, Gate] = {}
    for path in sorted(_files(place)):
        in_run = path.parent.name == "records" and (path.parent.parent / PLAN).exists()
        of_others, its_faults = len(found), []
        try:
            for text, origin in record.texts(path):
                try:
                    value = record.parse(text, origin, gates)
                except BadInput as fault:
                    its_faults.append(str(fault))
                    continue
                if in_run and path.suffix == ".json" and value.file_name != path.name:
                    its_faults.append(misnamed(path, value))
                    continue
                found.append(_sharing(value, known))
        except BadInput as fault:  # the file is not whole, so that nothing of it counts
            del found[of_others:]
            its_faults = [str(fault)]
        faults += its_faults
    return found, faults


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    seen = set()
    for folder, folders, names in os.walk(place, followlinks=True):
        if (here := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(here)
        in_run = PLAN in names
        if SITE in names or (in_run and _is_comparison(Path(folder, PLAN))):
            folders.clear()
            continue
        folders[:] = [name for name in folders if (name == "records" if in_run else not name.startswith("."))]
        for name in [] if in_run else names:
            if name.endswith((".json", *record.PACKED)) and not name.startswith(".") and name != SUMMARY:
                yield Path(folder, name)


def _is_comparison(plan: Path) -> bool:
    """Return whether a plan is that of ``dpbench compare``, whose pairs of processes are no records."""
    try:
        return "sides" in json.loads(plan.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False

"""All records below one folder or several, read while a run may be writing there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from harness import record
from harness.errors import BadInput
from harness.record import Record
from harness.store import PLAN

SUMMARY = "summary.json"
"""What ``run gpu`` leaves beside its records."""


def load(*places: Path) -> list[Record]:
    """All records of the ``places``, each a ``.json`` or ``.jsonl`` file, or a folder with such files somewhere below
    it, in order of their paths.

    Of a run's folder (one that holds a ``plan.json``) only its ``records/`` count: what ``--fresh`` has set aside does
    not. Hidden files are left out: a record is hidden until it is complete (written under a hidden name, then renamed).
    If a file vanishes between listing and reading, the folder is read once more. A record that is there both as a file
    of its own and in a packed ``.jsonl``, or in several places, counts once.

    Raises :class:`BadInput` for a place that does not exist, one without a record, and a corrupt or newer record.
    """
    return list({r.to_json(): r for place in places for r in _of(place)}.values())


def _of(place: Path) -> list[Record]:
    if not place.exists():
        raise BadInput(f"There is no folder {place}; give one that holds records, or make some with `dpbench run e2e`.")
    for _ in range(3):
        try:
            found = [r for path in sorted(_files(place)) for r in record.read(path)]
            break
        except FileNotFoundError:
            continue
        except UnicodeDecodeError as error:
            raise BadInput(f"A file below {place} is not a record ({error}); move it out of the folder.") from None
        except OSError as error:
            raise BadInput(f"{error.filename} cannot be read ({error.strerror}); make it readable.") from None
    else:
        raise BadInput(f"Files keep vanishing from {place} while they are read; wait for the run to finish.")
    if not found:
        raise BadInput(f"There are no records in {place}; make some with `dpbench run e2e`.")
    return found


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    for folder, folders, names in os.walk(place):
        in_run = PLAN in names
        folders[:] = [name for name in folders if (name == "records" if in_run else not name.startswith("."))]
        for name in [] if in_run else names:
            if name.endswith((".json", ".jsonl")) and not name.startswith(".") and name != SUMMARY:
                yield Path(folder, name)

"""``results/index.toml``: one entry for each committed run, with its status and one line why."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import BadInput, did_you_mean
from harness.paths import ROOT

FOLDER = ROOT / "results"
FILE = FOLDER / "index.toml"
CITED = "cited"
HOLD = (CITED, "kept")
DATE = re.compile(r"-\d{4}-\d\d-\d\d$")

Status = Literal["cited", "kept", "superseded", "scouting", "withdrawn"]


class Entry(BaseModel):
    """A committed run.

    Attributes:
        name: The name that commands take, for instance ``grid-lstm-2-2026-11-22``.
        file: Path below ``results/``: packed records, another file, or a folder.
        what: What was measured, in one line.
        machine: Processor and the machine's identity in records.
        threads: Threads of the measured process; None where threads do not matter.
        date: Day on which the run began (UTC).
        commit: Commit of the code that ran; None where it was not recorded.
        heap: Who kept freed memory, where a picture says so; dpcore always does.
        status: ``cited``: its figures hold, and a page of README, results/README or docs names it. ``kept``: they hold.
            ``superseded``: newer code or a better run replaced it. ``scouting``: rough magnitudes, not measurements.
            ``withdrawn``: do not use it.
        note: Why it has this status, and what a reader has to know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    file: str
    what: str = Field(min_length=1)
    machine: str
    threads: int | None = None
    date: date
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{8}$")
    heap: Literal["all keep their heap, PyTorch too", "PyTorch's heap as installed"] | None = None
    status: Status
    note: str = ""

    @model_validator(mode="after")
    def _with_a_reason(self) -> Entry:
        if self.status not in HOLD and not self.note:
            raise ValueError(f"{self.name} is {self.status}: its `note` must say why")
        return self

    @property
    def holds_records(self) -> bool:
        """Whether ``dpbench report`` can read the file."""
        return self.file.endswith(".jsonl.gz")


class Index(BaseModel):
    """All committed runs, in the order of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: tuple[Entry, ...]

    @model_validator(mode="after")
    def _without_doubles(self) -> Index:
        for values in ([e.name for e in self.run], [e.file for e in self.run]):
            if double := {v for v in values if values.count(v) > 1}:
                raise ValueError(f"two entries share {', '.join(sorted(double))}")
        return self

    def find(self, name: str) -> list[Entry]:
        """Return the entries meant by a name: ``cited``, or one entry by its name, without the date, or by a part.

        Raises:
            BadInput: No entry or several match, or the entry holds no records.
        """
        if name == CITED:
            return [e for e in self.run if e.status == CITED and e.holds_records]
        found = (
            [e for e in self.run if e.name == name]
            or [e for e in self.run if re.sub(DATE, "", e.name) == name]
            or [e for e in self.run if name in e.name]
        )
        if len(found) > 1:
            raise BadInput(f"{name!r} means several runs; choose one of {', '.join(e.name for e in found)}.")
        if not found:
            undated = (re.sub(DATE, "", e.name) for e in self.run)
            near = did_you_mean(name, [CITED, *(e.name for e in self.run), *undated])
            raise BadInput(
                f"There is no file or folder {name} here, and results/index.toml, which lists the committed runs, has "
                f"none of that name{near}; `cited` means all that pages rest on."
            )
        if not found[0].holds_records:
            raise BadInput(f"{found[0].name} holds no records that can be reported; open results/{found[0].file}.")
        return found


@cache
def load(path: Path = FILE) -> Index:
    """Read the index.

    Raises:
        BadInput: It is not there, or is not an index.
    """
    try:
        return Index.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); named runs need a checkout of dpbench.") from None
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise BadInput(f"{path} is not an index of runs ({error}); restore it from git.") from None


def places(given: Sequence[Path], index: Path = FILE) -> list[Path]:
    """Replace names of committed runs by their files. A path that exists stays what it is.

    Args:
        given: Paths of folders and files, names of entries, or ``cited``.
        index: The index that knows the names.

    Raises:
        BadInput: What was given is neither a path nor the name of a run.
    """
    found: list[Path] = []
    for place in given:
        if place.exists() or len(place.parts) != 1 or (not index.exists() and str(place) != CITED):
            found.append(place)
        else:
            found += [index.parent / entry.file for entry in load(index).find(str(place))]
    return found

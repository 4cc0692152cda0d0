"""The plan of a grid: options of ``run e2e`` and the units that they fall into. Pure data and pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.plan import e2e
from harness.plan.e2e import Options
from harness.run.e2e import depends_on
from harness.store import folder as store

SCHEMA = 1
FILE = store.GRID
PYTHON = "{python}"
"""Stands in a plan's command for the Python that is at work on the node."""
USUAL = (PYTHON, "-P", "-m", "harness")  # -P: whatever lies in the working folder


@dataclass(frozen=True)
class Unit:
    """All that must be compared: a task and a batch size with all rounds and contestants, measured on one machine.

    Attributes:
        name: Its block, and a hash of what the measurement depends on beside the machine (:func:`name_of`).
        processes: How many it takes.
        seconds: About how long they take; None where nobody knows.
    """

    name: str
    task: str
    batch_size: int
    processes: int
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """Says what is measured. ``words``: options of ``run e2e`` for all units; ``command``: starts dpbench on a node."""

    words: tuple[str, ...]
    units: tuple[Unit, ...]
    command: tuple[str, ...] = USUAL

    def words_of(self, unit: Unit) -> list[str]:
        """Return the options of ``run e2e`` that measure the unit, apart from its folder."""
        return [*self.words, *block(unit.task, unit.batch_size)]

    def find(self, name: str) -> Unit:
        """Return the unit of this name or number.

        Raises:
            BadInput: there is none.
        """
        for number, unit in enumerate(self.units):
            if name in (unit.name, str(number)):
                return unit
        last = len(self.units) - 1
        raise BadInput(f"There is no unit {name!r} in this grid; give a number from 0 to {last}, or a name it lists.")

    def to_json(self) -> str:
        """Return the plan as the text of its file."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)


def block(task: str, batch_size: int) -> list[str]:
    """Return the options of ``run e2e`` that leave one block of a plan."""
    return ["--tasks", task, "--batch-sizes", str(batch_size)]


def make(words: Sequence[str], options_of: Callable[[Sequence[str]], Options], command: Sequence[str]) -> Plan:
    """Return the plan of these options.

    Args:
        words: Options of ``run e2e``.
        options_of: Reads them.
        command: What starts dpbench on a node.

    Raises:
        BadInput: they cannot be measured.
    """
    units = []
    whole = options_of(words)
    for task, sizes in whole.batch_sizes.items():
        for size in sizes:
            options = options_of([*words, *block(task, size)])
            chosen = options.contestants()
            hashes = {one.name: (one.framework.adapter_hash, one.framework.lock_hash) for one in chosen}
            jobs = e2e.jobs(options, chosen)
            name = name_of(depends_on(options, hashes))
            units.append(Unit(name, task, size, len(jobs), e2e.expected_seconds(options, jobs)))
    return Plan(tuple(words), tuple(units), tuple(command) or USUAL)


def name_of(description: Mapping[str, Any]) -> str:
    """Return the name of the unit whose run folder has this plan, whatever machine it was made on."""
    options = description["options"]
    content = {key: description[key] for key in ("options", "contestants", "tasks", "harness")}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (task,), ((size,),) = options["tasks"], options["batch_sizes"].values()
    return f"{task}.b{size}.{digest[:12]}"


def parse(text: str, path: Path) -> Plan:
    """Return the plan in the text of a file.

    Raises:
        BadInput: it holds none.
    """
    try:
        data = json.loads(text)
        if data.pop("schema") == SCHEMA:
            units = tuple(Unit(**unit) for unit in data["units"])
            return Plan(tuple(data["words"]), units, tuple(data["command"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise BadInput(f"{path} is no plan of a grid that this dpbench reads; make one by `dpbench grid plan`.")

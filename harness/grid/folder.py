"""The folder of a grid. What is done, under way or lost is read from its files, never asked of an engine.

``grid.json`` is the plan. ``attempts/UNIT.TOKEN/`` is a run folder that is being made, or that its machine has left
behind. ``units/UNIT/`` is the first complete one, moved there by one rename, so that later ones cannot take its place;
those lie in ``twins/``, for delivery is at least once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from harness.errors import BadInput
from harness.grid import plan
from harness.grid.plan import Plan, Unit
from harness.store import cache, record, surroundings
from harness.store import folder as store
from harness.store.record import Gate, Record

END, BEAT, LOG = "unit.json", "beat", "log.txt"
BEAT_SECONDS = 15.0
SILENT_SECONDS = 6 * BEAT_SECONDS
"""An attempt without a sign of life for so long is lost; on a shared disk one may come late."""
COMPLETE = (0, 1, 3)
"""Exit codes of a run whose folder is whole: a finding or a failed cell is a result, too."""


@dataclass(frozen=True)
class End:
    """Says how an attempt ended. ``fault``: why it is not complete; ``digest``: of its records; ``place``: engine, job
    and node, which tell where to look and are not part of a pack."""

    unit: str
    exit: int
    seconds: float
    digest: str = ""
    fault: str | None = None
    place: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """A grid at one moment: the ends of units that are done, attempts under way, lost and failed by unit."""

    done: dict[str, End]
    running: Counter[str]
    lost: Counter[str]
    failed: dict[str, list[End]]

    @property
    def under_way(self) -> int:
        """Return how many units are measured now, as the files say."""
        return len(self.running.keys() - self.done.keys())


class GridFolder:
    """A grid's folder, which all of its machines see, or the driver alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempts, self.units, self.twins = path / "attempts", path / "units", path / "twins"
        self.ends: dict[str, End] = {}

    @cached_property
    def plan(self) -> Plan:
        """The plan. Raises :class:`BadInput` where there is none."""
        path = self.path / plan.FILE
        try:
            return plan.parse(path.read_text(encoding="utf-8"), path)
        except OSError as error:
            told = f"{path} cannot be read ({error.strerror}); make a grid there by `dpbench grid plan {self.path}`."
            raise BadInput(told) from None

    def begin(self, made: Plan) -> None:
        """Write the plan. Raises :class:`BadInput` where the folder holds another one."""
        path = self.path / plan.FILE
        if path.exists() and path.read_text(encoding="utf-8") != made.to_json():
            raise BadInput(f"{self.path} holds a grid with another plan or of other code; choose another folder.")
        self.path.mkdir(parents=True, exist_ok=True)
        cache.write_atomically(path, made.to_json().encode())

    def end_of(self, unit: Unit) -> End | None:
        """Return how a unit that is done ended, which never changes; None for one that is not."""
        if unit.name not in self.ends and (end := read_end(self.units / unit.name)) is not None:
            self.ends[unit.name] = end
        return self.ends.get(unit.name)

    def settle(self, attempt: Path) -> None:
        """Move a complete attempt to its place; where another one is there already, aside. A failed one stays."""
        end = read_end(attempt)
        if end is None or end.fault is not None:
            return
        shutil.rmtree(attempt / "scratch", ignore_errors=True)
        for target in (self.units / end.unit, self.twins / attempt.name):
            target.parent.mkdir(exist_ok=True)
            try:
                attempt.rename(target)
                return
            except OSError:
                # A folder that is not empty keeps its place. What is gone, another process has settled meanwhile.
                if attempt.exists() and not target.exists():
                    raise

    def settle_all(self) -> None:
        """Settle what machines have left complete and could not move any more, in a fixed order."""
        for attempt in sorted(self.attempts.glob("*.*")):
            self.settle(attempt)

    def state(self) -> State:
        """Return what the files say now."""
        done = {unit.name: end for unit in self.plan.units if (end := self.end_of(unit)) is not None}
        running: Counter[str] = Counter()
        lost: Counter[str] = Counter()
        failed: dict[str, list[End]] = {}
        now = self._now()
        for attempt in sorted(self.attempts.glob("*.*")):
            name = attempt.name.rpartition(".")[0]
            try:
                silent = now - (attempt / BEAT).stat().st_mtime
            except OSError:  # moved meanwhile
                continue
            if (end := read_end(attempt)) is not None:
                failed.setdefault(name, []).append(end)
            elif silent > SILENT_SECONDS:
                lost[name] += 1
            else:
                running[name] += 1
        return State(done, running, lost, failed)

    def _now(self) -> float:
        """Return the time by the clock of the disk, which the signs of life are dated by, too."""
        probe = self.path / f".{BEAT}"
        probe.touch()
        return probe.stat().st_mtime

    def judge(self, unit: Unit, gates: dict[str, Gate]) -> str | list[Record]:
        """Return a unit's records, or why it does not count: it is not done, not what was planned, changed since, or of
        two machines. ``gates``: verdicts of the units before, which this one may share."""
        folder = self.units / unit.name
        end = read_end(folder)
        if end is None:
            return "not done"
        if end.digest != digest(folder):
            return f"its records are not those that were measured; remove {folder} and run the grid again"
        if (fault := not_as_planned(folder, unit)) is not None:
            return fault
        records = [value for path in sorted((folder / "records").glob("*.json")) for value in record.read(path, gates)]
        places = {surroundings.of(one).key for one in records}
        runs = {one.block.run for one in records}
        if len(places) > 1 or len(runs) > 1:
            return f"its records are of {len(places)} machines and {len(runs)} runs; remove {folder}"
        return records

    def merge(self, target: Path) -> tuple[int, dict[str, str]]:
        """Pack the records of all units that count into one file.

        Returns:
            How many records there are, and why the other units do not count, by name.

        Raises:
            BadInput: no unit counts, or the file cannot be written.
        """
        self.settle_all()
        faults: dict[str, str] = {}
        lines: list[tuple[str, str]] = []
        gates: dict[str, Gate] = {}
        for unit in self.plan.units:
            if isinstance(found := self.judge(unit, gates), str):
                faults[unit.name] = found
            else:  # as text: all records of a large grid do not fit into memory as objects
                lines += [(one.file_name, store.portable(one)) for one in found]
        if not lines:
            raise BadInput(f"No unit of {self.path} is done; start them by `dpbench grid run {self.path}`.")
        return store.write_pack(lines, target), faults


def read_end(attempt: Path) -> End | None:
    """Return how an attempt ended; None where it has not."""
    try:
        return End(**json.loads((attempt / END).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_end(attempt: Path, end: End) -> None:
    """Write how an attempt ended, after everything else."""
    cache.write_atomically(attempt / END, json.dumps(asdict(end)).encode())


def not_as_planned(folder: Path, unit: Unit) -> str | None:
    """Return in which way a run folder is not the unit's; None where it is."""
    try:
        there = plan.name_of(json.loads((folder / store.PLAN).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return "it has no plan that can be read"
    if there == unit.name:
        return None
    return f"this machine's code or pins are not those of the plan ({there} there): install the same dpbench on all"


def digest(folder: Path) -> str:
    """Return a hash of a run folder's records; empty where it has none."""
    paths = sorted((folder / "records").glob("*.json"))
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if paths else ""

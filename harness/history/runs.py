"""The history: one small file per run and machine, added once and never rewritten.

``results/history/<machine>/<UTC of the run>-<commit>-<hash>.json``. The hash is that of the content: two branches that
added different runs never touch the same file, and two that added the same run added the same bytes, so that git merges
both without asking. ``<machine>`` is made of all that the report's sections tell machines apart by, the number of
threads among them: machines cannot be mixed.

A file holds what a series over time needs of every cell (state and reason, the seconds of every process, bytes, marks,
gate, code), and the run's commit, speed probe and versions; the records themselves stay where they were.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harness.analysis import naming
from harness.analysis.change_points import LEAST_RUNS
from harness.errors import BadInput
from harness.store import cache, surroundings
from harness.store.record import Cell, Record, Time

SCHEMA = 1
FOLDER = Path("results/history")
KINDS = ("e2e", "layer")
"""Cells that have a series. The memory frontier's are searches, not values."""

State = Literal["ok", "rejected", "oom", "timeout", "crashed", "unsupported", "ungated"]
GateState = Literal["passed", "failed", "none"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CellResult(_Model):
    """One cell of one run. ``subject``: the task or the layer. ``seconds``: one value per process that was timed (of an
    epoch, or of a pass over a layer), ``disturbed`` which of them other programs or the machine disturbed. ``memory``:
    bytes by metric, the median over processes. ``code``: hashes of the adapter's source and of the environment's lock.
    ``failures``: how many processes failed beside those that count, by state."""

    name: str
    kind: Literal["e2e", "layer"]
    subject: str
    framework: str
    variant: str
    passes: str | None = None
    private: bool
    batch_size: int
    protocol: str
    device: str
    isolation: str
    synthetic: bool = False
    state: State
    reason: str = ""
    failures: str = ""
    seconds: list[float] = Field(default_factory=list)
    disturbed: list[bool] = Field(default_factory=list)
    extrapolated: bool = False
    memory: dict[str, int] = Field(default_factory=dict)
    gate: GateState = "none"
    code: str = ""

    @model_validator(mode="after")
    def _numbers_that_can_be(self) -> CellResult:
        if len(self.disturbed) != len(self.seconds):
            raise ValueError("every value of seconds has one of disturbed")
        if not all(0 < s < math.inf for s in self.seconds) or any(count < 0 for count in self.memory.values()):
            raise ValueError("seconds are positive and finite, bytes not negative")
        return self

    @property
    def n(self) -> int:
        return len(self.seconds)

    @property
    def contestant(self) -> str:
        return f"{self.framework}-{self.variant}"

    @property
    def series(self) -> str:
        """Name of the series that this belongs to: times on genuine and on synthetic data are two."""
        return self.name + ("/synthetic" if self.synthetic else "")

    @property
    def vetoed(self) -> bool:
        """No process was left alone: shown, but in no statistics."""
        return self.n > 0 and all(self.disturbed)

    @property
    def value(self) -> float | None:
        """Median seconds of the processes that were left alone, or, where there is none, of all."""
        calm = [s for s, d in zip(self.seconds, self.disturbed, strict=True) if not d]
        return median(calm or self.seconds) if self.seconds else None


class Run(_Model):
    """One file. ``time``: when the run's first process started (UTC). ``commit``, ``dirty``: of the harness and what it
    measures. ``canary_seconds``: median over the run's undisturbed processes; None where none was measured.
    ``versions``: framework -> package -> version. ``simulated``: made by a program, not measured."""

    schema_: int = Field(SCHEMA, alias="schema")
    run: str
    time: Time
    commit: str | None
    dirty: bool | None
    machine: dict[str, Any]
    canary_seconds: float | None
    versions: dict[str, dict[str, str]] = Field(default_factory=dict)
    simulated: bool = False
    cells: list[CellResult]

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, ignored_types=(cached_property,))

    @field_validator("machine")
    @classmethod
    def _with_a_name(cls, machine: dict[str, Any]) -> dict[str, Any]:
        try:
            naming.machine_label(machine)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"no name can be made of these facts: {error}") from None
        return machine

    @field_validator("canary_seconds")
    @classmethod
    def _positive(cls, seconds: float | None) -> float | None:
        if seconds is not None and not 0 < seconds < math.inf:
            raise ValueError("the speed probe takes a positive time")
        return seconds

    @cached_property
    def moment(self) -> datetime:
        """``time``, with its offset."""
        return datetime.fromisoformat(self.time)

    @cached_property
    def machine_label(self) -> str:
        return naming.machine_label(self.machine)

    @cached_property
    def machine_key(self) -> str:
        return naming.slug(self.machine_label)

    @cached_property
    def by_series(self) -> dict[str, CellResult]:
        return {cell.series: cell for cell in self.cells}

    @property
    def short_commit(self) -> str:
        return (self.commit or "nocommit")[:7] + ("+" if self.dirty else "")

    def to_json(self) -> str:
        """Return the run as JSON; the same run makes the same bytes."""
        return json.dumps(self.model_dump(by_alias=True), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @cached_property
    def id(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    @property
    def file_name(self) -> str:
        stamp = re.sub(r"[-:]|\+00:00$|\.\d+", "", self.time).rstrip("Z") + "Z"
        return f"{stamp}-{(self.commit or 'nocommit')[:7]}-{self.id}.json"


def condense(records: Sequence[Record], machine: str | None = None) -> list[Run]:
    """Return a :class:`Run` per run and machine of the records. ``machine`` stands in place of the machine's own
    identity, for runners that are made anew each time but are alike.

    Runs without a cell (of memory alone, for instance) are left out.

    Raises :class:`BadInput` where no run is left, or ``machine`` is no plain word.
    """
    if machine is not None and not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", machine):
        raise BadInput(f"--machine is {machine!r}: use up to 40 lower-case letters, digits and hyphens.")
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.cell.kind in KINDS:
            facts = _machine(record, machine)
            groups.setdefault((record.block.run, naming.slug(naming.machine_label(facts))), []).append(record)
    made = [_run(group, machine) for group in groups.values()]
    if not any(run.cells for run in made):
        raise BadInput("There are no timed cells of tasks or layers here, which are what a history is made of.")
    return [run for run in made if run.cells]


def _machine(record: Record, name: str | None) -> dict[str, Any]:
    facts = surroundings.facts(record.machine)
    return {**facts, "id": name} if name else facts


def _run(records: Sequence[Record], machine: str | None) -> Run:
    newest = max(records, key=lambda r: r.when)
    probes = [
        seconds
        for r in records
        if r.load and not r.load.disturbed
        for seconds in (r.load.canary_before, r.load.canary_after)
        if seconds
    ]
    return Run(
        run=newest.block.run,
        time=min(r.started for r in records),
        commit=newest.source.commit,
        dirty=any(bool(r.source.dirty) for r in records) if newest.source.dirty is not None else None,
        machine=_machine(newest, machine),
        canary_seconds=_rounded(median(probes)) if probes else None,
        versions=_versions(records),
        cells=sorted([*_of_tasks(records), *_of_layers(records)], key=lambda c: c.series),
    )


def _versions(records: Iterable[Record]) -> dict[str, dict[str, str]]:
    """Return the set of versions that most processes of a framework had."""
    seen: dict[str, Counter[str]] = {}
    for r in records:
        if r.versions:
            seen.setdefault(r.cell.framework, Counter())[json.dumps(r.versions, sort_keys=True)] += 1
    return {framework: json.loads(sets.most_common(1)[0][0]) for framework, sets in sorted(seen.items())}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _gate(records: Iterable[Record]) -> GateState:
    verdicts = [r.gate.passed for r in records if r.gate is not None]
    return "none" if not verdicts else "passed" if all(verdicts) else "failed"


def _memory(records: Iterable[Record]) -> dict[str, int]:
    values: dict[str, list[int]] = {}
    for r in records:
        if r.purpose == "memory" and r.state == "ok":
            for memory_metric, count in r.memory.items():
                values.setdefault(memory_metric, []).append(count)
    return {memory_metric: int(median(counts)) for memory_metric, counts in sorted(values.items())}


def _of_tasks(records: Sequence[Record]) -> list[CellResult]:
    """Return the cells of tasks as the report's main table has them: a contestant stopped before its clock has its
    state at every batch size."""
    from harness.analysis import tidy

    kept = [r for r in records if r.cell.kind == "e2e"]
    if not kept:
        return []
    raw = tidy.tidy(kept)
    found = []
    for row in tidy.cells(raw).to_dict("records"):
        mine = raw[~raw.superseded & (raw.contestant == row["contestant"]) & (raw.task == row["task"])]
        for column in ("device", "protocol", "isolation", "synthetic"):
            mine = mine[mine[column] == row[column]]
        here = mine[mine.batch_size == row["batch_size"]]
        timed = here[(here.purpose == "time") & (here.state == "ok") & here.seconds.notna()]
        processes = [kept[i] for i in (mine.index if here.empty else here.index)]
        cell = processes[0].cell.model_copy(update={"batch_size": int(row["batch_size"])})
        found.append(
            _result(
                cell,
                row,
                processes,
                timed.seconds,
                timed.disturbed,
                gate=_gate(kept[i] for i in mine.index),
                synthetic=bool(row["synthetic"]),
                extrapolated=bool(row["extrapolated"]),
            )
        )
    return found


def _of_layers(records: Sequence[Record]) -> list[CellResult]:
    from harness.analysis import layer_frames

    kept = [r for r in records if r.cell.kind == "layer" and r.layer is not None]
    if not kept:
        return []
    raw = layer_frames.tidy(kept)
    by_name: dict[str, list[Record]] = {}
    for r in kept:
        by_name.setdefault(r.cell.name, []).append(r)
    found = []
    for row in layer_frames.cells(raw).to_dict("records"):
        here = raw[raw.cell == row["cell"]]
        timed = here[(here.purpose == "time") & here.median_ms.notna()]
        processes = by_name[row["cell"]]
        failed = Counter(r.state for r in processes if r.state != "ok")
        row["failures"] = ", ".join(f"{count} {state}" for state, count in sorted(failed.items()))
        seconds, cell = timed.median_ms / 1e3, processes[0].cell
        found.append(_result(cell, row, processes, seconds, timed.disturbed, gate=_gate(processes)))
    return found


def _result(
    cell: Cell,
    row: Mapping[Any, Any],
    processes: Sequence[Record],
    seconds: Iterable[float],
    disturbed: Iterable[bool],
    **fields: Any,
) -> CellResult:
    """Return a cell as a row of the report has it: a rejection of any process is one of the cell, which has no figures
    then, as one of any other state but ``ok``."""
    state, reason = row["state"], row["reason"] if row["state"] != "ok" or row["failures"] else ""
    wrong = next((r for r in processes if r.state == "rejected"), None)
    if wrong is not None:
        state, reason = "rejected", " ".join((wrong.reason or row["reason"]).split())
    if state == "ok":
        fields["seconds"], fields["disturbed"] = [_rounded(s) for s in seconds], [bool(d) for d in disturbed]
        fields["memory"] = _memory(processes)
    return CellResult(
        name=cell.name,
        kind="layer" if cell.kind == "layer" else "e2e",
        subject=cell.layer or cell.task,
        framework=cell.framework,
        variant=cell.variant,
        passes=cell.passes,
        private=cell.private,
        batch_size=cell.batch_size,
        protocol=cell.protocol,
        device=cell.device,
        isolation=cell.surroundings,
        state=state,
        reason=reason,
        failures=row["failures"],
        code=surroundings.of(max(processes, key=lambda r: r.when)).code,
        **fields,
    )


@dataclass(frozen=True)
class Added:
    """``path`` of a run's file; ``new`` is False where it had been added before."""

    run: Run
    path: Path
    new: bool


def add(runs: Sequence[Run], folder: Path) -> list[Added]:
    """Write a file per run, each whole or not at all. A run that is there already is left as it is.

    Raises :class:`BadInput`, before anything is written, where a run is there with other content.
    """
    planned = []
    for run in runs:
        path = folder / run.machine_key / run.file_name
        for other in sorted(path.parent.glob("*.json")) if not path.exists() else ():
            if _holds(other, run.run):
                raise BadInput(
                    f"Run {run.run} is in the history already, with other content, as {other}; a history is never "
                    "rewritten: if it was added before it had finished, delete that file and add it again."
                )
        planned.append(Added(run, path, not path.exists()))
    for each in planned:
        if each.new:
            try:
                each.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(
                    f"The folder {each.path.parent} cannot be made ({error.strerror}); choose another with --folder."
                ) from None
            cache.write_atomically(each.path, each.run.to_json().encode())
    return planned


def _holds(path: Path, run: str) -> bool:
    try:
        return read(path).run == run
    except BadInput:
        return False


@dataclass(frozen=True)
class History:
    """All runs that could be read, oldest first, and a sentence for every file that could not."""

    runs: tuple[Run, ...]
    faults: tuple[str, ...] = ()

    @cached_property
    def machines(self) -> dict[str, tuple[Run, ...]]:
        """Machine key -> its runs. First those that ran within 30 days of the newest run, the busiest first."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.machine_key, []).append(run)

        def rank(key: str) -> tuple[bool, int, str]:
            idle = self.runs[-1].moment - found[key][-1].moment
            return idle > timedelta(days=30), -len(found[key]), key

        return {key: tuple(found[key]) for key in sorted(found, key=rank)}

    @cached_property
    def most_runs(self) -> int:
        """The runs of the cell that was timed most often on one machine."""
        timed = Counter(
            (run.machine_key, c.series) for run in self.runs for c in run.cells if c.seconds and not c.vetoed
        )
        return max(timed.values(), default=0)

    @property
    def can_judge(self) -> bool:
        """Whether a slowdown of any cell could be told from noise; that fewer runs show none says nothing."""
        return self.most_runs >= LEAST_RUNS

    @property
    def simulated(self) -> bool:
        return any(run.simulated for run in self.runs)


def of(runs: Iterable[Run], faults: Sequence[str] = ()) -> History:
    """Return the runs in order of time. Where two files hold one run of one machine the first by its id counts."""
    kept: dict[tuple[str, str], Run] = {}
    said = list(faults)
    for run in sorted(runs, key=lambda r: (r.moment, r.id)):
        first = kept.setdefault((run.machine_key, run.run), run)
        if first is not run:
            said.append(f"Run {run.run} is there twice ({first.file_name}, {run.file_name}); the first counts.")
    return History(tuple(kept.values()), tuple(said))


def load(folder: Path) -> History:
    """Return all files below ``folder``. One that is corrupt, or of a newer schema, becomes a sentence; the others
    load.

    Raises :class:`BadInput` where there is no such folder.
    """
    if not folder.is_dir():
        raise BadInput(f"There is no history in {folder}; make one with `dpbench history add RUN`.")
    runs, faults = [], []
    for path in sorted(folder.glob("*/*.json")):
        if path.name.startswith("."):
            continue
        try:
            run = read(path)
        except BadInput as error:
            faults.append(str(error))
            continue
        if run.machine_key != path.parent.name:
            faults.append(f"{path} holds a run of {run.machine_key}, not of its folder's machine; it is left out.")
            continue
        runs.append(run)
    return of(runs, faults)


def read(path: Path) -> Run:
    """Return one file. Raises :class:`BadInput`, naming it, where it is corrupt or newer."""
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(
            f"{path} cannot be read as a run of the history ({error}); restore it from git or delete it."
        ) from None
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if not isinstance(schema, int):
        raise BadInput(f"{path} is no run of the history: it has no `schema`; move it out of the folder.")
    if schema > SCHEMA:
        raise BadInput(f"{path} has history schema {schema}, this dpbench reads up to {SCHEMA}; update dpbench.")
    if schema < SCHEMA:
        raise BadInput(f"{path} has history schema {schema}, which never was; move it out of the folder.")
    try:
        return Run.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(
            f"{path} is a corrupt run of the history (at {where}: {first['msg']}); restore it from git or delete it."
        ) from None

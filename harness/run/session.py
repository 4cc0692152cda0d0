"""The loop that runs share: jobs in their order, a process for each, a record of each, made or found."""

from __future__ import annotations

import hashlib
import itertools
import math
import shutil
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from harness.environments.backend import Backend, Log
from harness.environments.executor import LOG_TAIL, Executor, Venv
from harness.environments.turns import Seat, Turns
from harness.environments.unavailable import Unavailable
from harness.environments.unpinned import OutOfTime
from harness.errors import BadInput
from harness.paths import ROOT
from harness.plan.e2e import Job, Options
from harness.plan.layer_registry import LayerContestant
from harness.plan.layers import LayerJob, LayerOptions
from harness.plan.registry import Contestant
from harness.run.job_text import key_of, outcome_of, title_of
from harness.run.progress import Progress
from harness.store import seal, sequence
from harness.store.folder import MOST_ATTEMPTS, RunFolder
from harness.store.record import Block, Cell, Load, Record, Source
from harness.worker import machine
from harness.worker.clock import DISTURBED_SHARE
from harness.worker.layer_request import LayerRequest
from harness.worker.request import Request
from harness.worker.result import Result

CLOCK_REPEATS = 8
"""Tries after the first before clocks that disagree reject a time. With four times as much work as processors, two
tries at a stretch of 0.2 ms both disagreed in about 4 of 36 cells; an adapter that deceives does so each time."""
READ_REPEATS = 2
"""Likewise before a slow reading of the weights does. Few: an adapter that knows its own time could read slowly until
it likes it."""
DISTURBED_SPEED = 0.25
"""A change of the speed probe's seconds from before to after a process by more than this means that the machine itself
changed its speed; on a quiet machine it stays within a few per cent."""
SWAMPED_SHARE = 0.5
MOST_BLOCKS = 1_000_000
FINAL_STATES = {"rejected", "oom", "timeout", "unsupported"}
"""States of a cell that another round cannot change: it is recorded again, not run again."""


@dataclass
class Summary:
    """Counts of a run: its records by state, and those that were measured before it. ``expected``: how many of the
    rejected ones belong to a contestant that declares its fault; ``missing``: how many have no time because something
    could not be installed here."""

    total: int
    resumed: int
    states: dict[str, int]
    folder: Path
    expected: int = 0
    missing: int = 0


AnOptions = TypeVar("AnOptions", Options, LayerOptions)
AContestant = TypeVar("AContestant", Contestant, LayerContestant)
AJob = TypeVar("AJob", Job, LayerJob)
ARequest = TypeVar("ARequest", Request, LayerRequest)


class Session(ABC, Generic[AnOptions, AContestant, AJob, ARequest]):
    """One run folder's work. ``command`` reproduces it and goes into every record. ``backend``: where it is done."""

    options: AnOptions
    contestants: list[AContestant]
    jobs: Sequence[AJob]

    def __init__(
        self, options: AnOptions, contestants: list[AContestant], folder: RunFolder, command: str, backend: Backend
    ) -> None:
        self.options = options
        self.contestants = contestants
        self.folder = folder
        self.command = command
        self.backend = backend
        each = backend.resources(options.device, options.threads, options.memory_limit_bytes, options.timeout_seconds)
        self.threads, self.limits = each.threads, each.limits
        self.executors: dict[str, Executor | Unavailable] = {}
        self.ended: dict[str, Record] = {}
        self.measured = self.resumed = self.missing = 0
        self.states: dict[str, str] = {}
        self.expected: set[str] = set()
        self.watched = watched_code()
        self.moment = ""
        self.anew: set[str] = set()
        self.by_name: dict[str, AContestant] = {c.name: c for c in contestants}
        self.hashes = {c.name: self._hashes_of(c) for c in contestants}

    # ---- what a kind of run has to say

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Return what all records of the folder have in common: options, code, machine. A resumed run must have the
        same."""

    @abstractmethod
    def _begin(self, progress: Progress) -> None:
        """Make what the jobs need, before the first of them."""

    @abstractmethod
    def _hashes_of(self, contestant: AContestant) -> tuple[str, str]:
        """Return the hashes of the code and of the environment."""

    def _hashes_behind(self, job: AJob) -> tuple[str, str]:
        """Return the hashes of all code that the job's figures depend on, and of the environment."""
        return self.hashes[job.contestant.name]

    @abstractmethod
    def refusal(self, job: AJob) -> Result | None:
        """Return a result without a process: it cannot run, or an earlier process of this cell showed so."""

    @abstractmethod
    def request(self, job: AJob) -> ARequest:
        """Return what the worker is asked for."""

    @abstractmethod
    def finished(self, job: AJob, request: ARequest, result: Result, started: Moment, load: Load, log: Log) -> Record:
        """Return the record of a process, after what is compared once it has ended."""

    @abstractmethod
    def unmeasured(self, job: AJob, result: Result, started: Moment) -> Record:
        """Return the record of a job without a process, or with one that broke."""

    def _facts(self, job: AJob, result: Result, started: Moment, load: Load | None) -> dict[str, Any]:
        """Return what the records of all kinds of runs say of a process."""
        commit, dirty = machine.commit()
        code_hash, lock_hash = self._hashes_behind(job)
        executor = self.executors.get(job.contestant.name)
        content = executor.content if isinstance(executor, Venv) else ""
        where = self.backend.describe_process(job.contestant.framework, result)
        return {
            "purpose": job.purpose,
            "state": result.state,
            "reason": result.reason,
            "cell": job.cell,
            "key": self._key(job),
            "memory": result.memory,
            "ranks": [vars(rank) for rank in result.ranks],
            "versions": result.versions,
            "image": where.image,
            "container": where.container,
            "machine": {**where.machine, **self.place()},
            "block": Block(run=self.folder.id, round=job.round, order=job.order, moment=self.moment),
            "source": Source(commit=commit, dirty=dirty, adapter_hash=code_hash, lock_hash=lock_hash, content=content),
            "load": load,
            "started": started.text,
            "wall_seconds": started.seconds,
            "command": self.command,
            "log_tail": "" if result.state == "ok" else result.log_tail,
            "interrupted": result.interrupted,
            "sequence": sequence.take(),
        }

    def place(self) -> dict[str, Any]:
        """Return what tells this place, as it is used, from others."""
        return self.backend.place(self.options.device, self.threads)

    def is_due(self, job: AJob) -> bool:
        """Return whether a process is still to be measured, or again."""
        record = self.folder.read(self.record_name(job))
        return job.name in self.anew or record is None or not self._stands(job, record)

    def _begun(self, block: Sequence[AJob]) -> Sequence[AJob]:
        """Begin a block. What lies hours apart is no pair: where a process is still to be timed, all of them are."""
        self.moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        timed = [job for job in block if job.purpose == "time"]
        if any(self.is_due(job) and self.refusal(job) is None for job in timed):
            self.anew |= {job.name for job in timed}
        return block

    def _stands(self, job: AJob, record: Record) -> bool:
        """Return whether a record that is there already counts."""
        return not record.interrupted

    def _remember(self, job: AJob, record: Record) -> None:
        """Keep what later jobs of the cell need to know."""
        if record.state in FINAL_STATES:
            self.ended.setdefault(job.cell.name, record)

    def _is_expected(self, job: AJob, record: Record) -> bool:
        """Return whether it is the rejection that the contestant declares."""
        return False

    def check_unchanged(self, name: str) -> None:
        """Raise :class:`BadInput` where the contestant's code is no longer what the gate has seen (rule V9), or the
        harness' own code or the data are not what they were when the run began."""
        self.watched.check()
        if self.hashes[name] != self._hashes_of(self.by_name[name]):
            raise changed(name)

    # ---- the loop

    def execute(self, progress: Progress, fresh: bool = False) -> Summary:
        """Measure everything, or what is left of it. Ctrl-C or a kill loses at most the process under way."""
        try:
            if (fault := machine.why_no_commit()) is not None:
                progress.log(fault)
            self.backend.prepare(self.contestants, progress.log)
            with self.folder.open(self.description(), fresh):
                self._begin(progress)
                return self._measure_all(progress)
        finally:
            self.backend.close()

    def summary(self) -> Summary:
        """Return what :meth:`recorded` has counted."""
        counts = self.resumed, dict(Counter(self.states.values())), self.folder.path, len(self.expected), self.missing
        return Summary(len(self.states), *counts)

    def _measure_all(self, progress: Progress) -> Summary:
        progress.begin([key_of(job) for job in self.jobs])
        rounds = 1 + max((job.round for job in self.jobs), default=0)
        for job in self._in_order(progress):
            planned = f"/{rounds}" if job.round < rounds else ""
            progress.doing(f"{title_of(job)}, {job.purpose}, round {job.round + 1}{planned}")
            record, is_old = self.recorded(job, progress)
            progress.done(outcome_of(record), counts=not is_old, seconds=self._seconds_of(record))
        return self.summary()

    def _seconds_of(self, record: Record) -> float | None:
        """Return what the record took, where that is not the time since the one before it."""
        return None

    def _in_order(self, progress: Progress) -> Iterator[AJob]:
        """Yield the jobs as they are measured; the former one is on record when the next one is asked for."""
        for _, block in itertools.groupby(self.jobs, key=lambda job: (job.cell.layer, job.cell.batch_size, job.round)):
            yield from self._begun(list(block))

    def recorded(self, job: AJob, progress: Progress) -> tuple[Record, bool]:
        """Return the record of a job, and whether it was there already; measured and written where it was not."""
        name = self.record_name(job)
        record = self.folder.read(name)
        is_old = record is not None and job.name not in self.anew and self._stands(job, record)
        if record is None or not is_old:
            record = self._measured(job, progress)
            self.folder.write(name, record)
        self.note(job, record)
        self.resumed += is_old
        self.measured += not is_old
        self.missing += isinstance(self.executors.get(job.contestant.name), Unavailable)
        return record, is_old

    def note(self, job: AJob, record: Record) -> None:
        """Count a record in the place of the job's earlier one, and keep what later jobs need to know."""
        self._remember(job, record)
        self.states[job.name] = record.state
        if self._is_expected(job, record):
            self.expected.add(job.name)

    def _key(self, job: AJob) -> str:
        return key_of_cell(job.cell, self._hashes_behind(job))

    def record_name(self, job: AJob) -> str:
        return f"{job.name}.{self._key(job)[:8]}.json"

    def _measured(self, job: AJob, progress: Progress) -> Record:
        """Return a new record of the job, whatever the contestant does: what it makes of this process is a ``crashed``
        record, and never the end of a run that others are in."""
        started = Moment()
        with self.folder.attempt(job.name) as killed:
            try:
                if killed < MOST_ATTEMPTS:
                    return self._measure(job, progress)
                result = killer(killed)
            except ENDS_THE_RUN:
                raise
            except Exception as error:
                result = unforeseen(error)
            return self.unmeasured(job, result, started)

    def _measure(self, job: AJob, progress: Progress) -> Record:
        """Return one process, or the record of why there is none."""
        started = Moment()
        refusal = self.refusal(job)
        if refusal is not None:
            return self.unmeasured(job, refusal, started)
        executor = self.executors[job.contestant.name]
        assert not isinstance(executor, Unavailable)
        request = self.request(job)
        self.check_unchanged(job.contestant.name)
        result, load = undisturbed(
            lambda: executor.run(request, self.limits, progress.event),
            self.options.repeats,
            job.purpose == "time",
            job.cell.name,
            progress,
            # What has no clock is not disturbed, and may have others beside it.
            self.backend.speed_probe if job.purpose == "time" else lambda: None,
        )
        check_disk(result, self.folder, job.cell.name)
        return self.finished(job, request, result, started, load, progress.log)


def key_of_cell(cell: Cell, hashes: tuple[str, str]) -> str:
    """Return the key of a record. Same key: same measurement of the same code in the same environment."""
    parts = [*cell.model_dump(exclude_none=True).values(), *hashes]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def undisturbed(
    process: Callable[[], Result],
    repeats: int,
    is_timed: bool,
    name: str,
    progress: Progress,
    clock: Callable[[], float | None],
) -> tuple[Result, Load]:
    """Return (result, load) of one ``process``; a timed one that others disturbed is run again, up to ``repeats``
    times. One whose clock disagrees with the harness's is run again at least CLOCK_REPEATS times, one that was slow to
    hand out its weights READ_REPEATS times: a busy machine can keep either of them waiting, but not every time.
    ``clock``: the speed probe's seconds, None where it would not show the speed of the worker's machine."""
    repeat = 0
    while True:
        before = clock()
        result = process()
        after = clock()
        share = result.foreign_share
        changed = math.exp(abs(math.log(after / before))) - 1.0 if before and after else 0.0
        clocks = result.clock_fault
        deferred = result.deferred and result.state == "rejected"
        disturbed = share > DISTURBED_SHARE or changed > DISTURBED_SPEED or clocks is not None or deferred
        if not disturbed or not is_timed or result.state not in {"ok", "rejected"}:
            break
        most = max(repeats, owed_repeats(result))
        progress.log(
            f"{name}: disturbed (others took {share:.0%}, speed probe changed by {changed:.0%}"
            + (f", {clocks}" if clocks else "")
            + (f", {result.reason}" if deferred else "")
            + ")"
            + (", repeated" if repeat < most else "")
        )
        if repeat >= most:
            break
        repeat += 1
    held = result.throttled
    disturbed = disturbed or held > DISTURBED_SHARE  # and would be the next time, too
    canaries = {"canary_before": before, "canary_after": after}
    load = Load(foreign_share=share, disturbed=disturbed, repeats=repeat, throttled=held, **canaries)
    return by_the_clock(result), load


def owed_repeats(result: Result) -> int:
    """Return how often a process is tried again before what its clock or its readings show counts against it."""
    if result.clock_fault is not None:
        return CLOCK_REPEATS
    return READ_REPEATS if result.deferred and result.state == "rejected" else 0


def by_the_clock(result: Result) -> Result:
    """Return the result; a rejection where the clocks do not agree."""
    if result.clock_fault is None or result.state != "ok":
        return result
    if result.harness_stopped:
        reason = f"the harness was stopped while its clock ran: {result.clock_fault}."
        return replace(result, state="crashed", reason=reason, interrupted=True)
    return replace(result, state="rejected", reason=f"the clocks do not agree: {result.clock_fault}.")


def in_turns(
    processes: Mapping[str, Callable[[Seat], Result]],
    seed: str,
    name: str,
    log: Log,
    places: Sequence[Sequence[int]],
    equal: bool = False,
) -> dict[str, tuple[Result, Load]]:
    """Return (result, load) of ``processes`` that take turns (:mod:`harness.environments.turns`). One that is owed
    another try, because a machine that is busy can keep its clock waiting, is made again; where they must be
    ``equal``, all of them are. Those that memory has no room for take their turns after the others.

    Other load is no reason for that: it falls on all of them alike, and on one thread what they waited for a processor
    is not counted. Else it is said of a process that it was disturbed where others had more of its processors than it.
    """
    found: dict[str, tuple[Result, Load]] = {}
    left, repeat, tables = dict(processes), 0, 0
    while left:
        # Blocks of one table have the numbers of no other one: only within a block is a ratio paired.
        results = Turns(f"{seed} {tables}", equal, tables * MOST_BLOCKS, places).together(left)
        tables += 1
        owed = {who for who, result in results.items() if owed_repeats(result) > repeat}
        for who, result in results.items():
            if who in owed:
                log(f"{name}: {who} was disturbed ({result.clock_fault or result.reason}), repeated")
            share = result.foreign_share
            is_swamped = share > SWAMPED_SHARE and not _is_without_waiting(result)
            held = result.throttled
            load = Load(
                foreign_share=share, disturbed=is_swamped or held > DISTURBED_SHARE, repeats=repeat, throttled=held
            )
            found[who] = by_the_clock(result), load
        late = left.keys() - results.keys()
        if late:
            log(f"{name}: memory is short; {', '.join(sorted(late))} take turns after the others")
        left = {who: process for who, process in left.items() if who in owed or who in late or (equal and owed)}
        repeat += bool(owed)
    return found


def _is_without_waiting(result: Result) -> bool:
    """Return whether the seconds that count are fewer than the clock's, because waiting is not among them."""
    turns = result.timed.turns if result.timed is not None else []
    return sum(work for *_, work in turns) < sum(wall for _, _, wall, _ in turns)


def changed(contestant: str) -> BadInput:
    """Return the error of a contestant whose code or pins changed during the run."""
    return BadInput(f"The code or the pins of {contestant} changed during the run; start anew with --fresh.")


class Moment:
    """Now: ``text`` by the wall clock, and the ``seconds`` since then by one that is never set."""

    def __init__(self) -> None:
        self.text = datetime.now(UTC).isoformat(timespec="seconds")
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start


ENDS_THE_RUN = (BadInput, OutOfTime)
"""Errors that the user has to mend, or asked for; anything else that goes wrong around a process is that process's
failure."""


def unforeseen(error: Exception) -> Result:
    """Return the result of a process whose answer the harness stumbled over."""
    tail = "".join(traceback.format_exception(error))[-LOG_TAIL:]
    return Result("crashed", f"what the process left could not be used ({short(error)}).", log_tail=tail)


def killer(times: int) -> Result:
    """Return the result of a process during which the run itself was killed again and again."""
    return Result(
        "crashed",
        f"the run was killed {times} times while this process was at work, which may be its doing; it is not started "
        "again in this run (--fresh forgets that).",
    )


def short(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}"[:300]


FULL_BELOW_BYTES = 64 * 2**20
"""With less free space than this, a worker that says the disk is full is believed: no weights are larger."""


def check_disk(result: Result, folder: RunFolder, name: str) -> None:
    """Raise :class:`BadInput` where a process failed because this machine's disk is full or the run's folder cannot be
    written any more; a contestant that only says so does not end the run."""
    if result.state == "ok":
        return
    folder.check_writable()
    if "No space left on device" not in str(result.reason):
        return
    places = (folder.path, Path(tempfile.gettempdir()))
    if min(shutil.disk_usage(place).free for place in places) < FULL_BELOW_BYTES:
        raise BadInput(
            f"The disk is full (No space left on device, in the worker of {name}); free some space and "
            "run the same command again: it goes on where it stopped."
        )


def watched_code() -> seal.Watched:
    """Return the harness' own code and settings, in this tree: they measure whatever tree the contestants come from."""
    watched = seal.Watched()
    watched.add(path for path in (ROOT / "harness").rglob("*") if path.suffix in {".py", ".toml"})
    return watched

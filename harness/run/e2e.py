"""Runs a plan: prepares data and environments, judges by the gate, measures block by block, stores records."""

from __future__ import annotations

import hashlib
import math
import shlex
import shutil
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis import accounting
from harness.contract import NO_OWN_LOOP
from harness.data import store
from harness.environments.backend import Argument, Backend, Input, last_json
from harness.environments.executor import LOG_TAIL, Executor, Limits, ToolFault
from harness.environments.unavailable import Unavailable
from harness.environments.unpinned import OutOfTime
from harness.environments.venv import EnvironmentFault
from harness.errors import BadInput
from harness.gate import admission
from harness.gate.admission import Verdict
from harness.paths import ROOT
from harness.plan import e2e as plan
from harness.plan import protocol as protocols
from harness.plan.e2e import Job, Options
from harness.plan.registry import Contestant
from harness.run import peaks
from harness.run.progress import Progress
from harness.store import seal, sequence
from harness.store.folder import MOST_ATTEMPTS, RunFolder
from harness.store.record import (
    Accuracy,
    Block,
    Cell,
    Compared,
    Data,
    Epsilon,
    Gate,
    Load,
    Record,
    Seeds,
    Source,
    Timed,
)
from harness.tasks import TASKS, initial_parameters
from harness.worker import machine
from harness.worker.e2e import REPLAYED_STEPS, setting_of, timed_batches
from harness.worker.gate import cases as gate_cases
from harness.worker.request import Request
from harness.worker.result import Result, State

DISTURBED_SHARE = 0.05
CLOCK_REPEATS = 8
"""Tries after the first before clocks that disagree reject a time. With four times as much work as processors, two
tries at a stretch of 0.2 ms both disagreed in about 4 of 36 cells; an adapter that deceives does so each time."""
DISTURBED_SPEED = 0.25
"""A change of the speed probe's seconds from before to after a process by more than this means that the machine itself
changed its speed; on a quiet machine it stays within a few per cent."""
REPLAY_TOLERANCE = 1e-4
"""Relative distance of the timed from the replayed weights, over the distance travelled: kernels that sum in another
order from run to run differ by a few float32 roundings, a skipped step or another noise by about 1."""

REPLAY_STEPS = 10.0
REPLAY_GROWTH = 100.0
"""Roundings grow from step to step: the tolerance grows by itself every REPLAY_STEPS steps, to REPLAY_GROWTH times as
much. One step left out of n is 1/sqrt(n) of the way or more."""
LONGEST_STEP = 1.01
"""What float32 adds to a step that is as long as its rows and its noise can make it."""
STEP_REFERENCE = "frameworks._tools.step_reference"
EVALUATE = "frameworks._tools.evaluate"

FINAL_STATES = {"rejected", "oom", "timeout", "unsupported"}
"""States of a cell that another round cannot change: it is recorded again, not run again."""


@dataclass
class Summary:
    """How many records of each state the run holds, and how many of them were measured before it. ``expected``: how
    many of the rejected ones belong to a contestant that declares its fault."""

    total: int
    resumed: int
    states: dict[str, int]
    folder: Path
    expected: int = 0


class Run:
    """One run folder's work. ``command`` reproduces it and goes into every record. ``backend``: where it is done."""

    def __init__(
        self,
        options: Options,
        contestants: list[Contestant],
        folder: RunFolder,
        command: str,
        backend: Backend,
    ) -> None:
        self.options = options
        self.backend = backend
        self.contestants = contestants
        self.folder = folder
        self.command = command
        self.protocol = protocols.load(options.protocol)
        each = backend.resources(options.device, options.threads, options.memory_limit_bytes, options.timeout_seconds)
        self.threads, self.limits = each.threads, each.limits
        self.executors: dict[str, Executor | Unavailable] = {}
        self.data: dict[str, Data] = {}
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        self.ended: dict[str, Record] = {}
        self.unreplayed: dict[str, Record] = {}
        self.peaks: dict[str, float] | None = None
        self.watched = watched_code()
        self.hashes = {c.name: self._hashes_of(c) for c in contestants}
        self.folder_hashes = {c.name: c.framework.folder_hash for c in contestants}

    def execute(self, progress: Progress, fresh: bool = False) -> Summary:
        """Everything, or what is left of it. Ctrl-C or a kill at any moment loses at most the process under way."""
        try:
            self.backend.prepare(self.contestants, progress.say)
            return self._execute(progress, fresh)
        finally:
            self.backend.close()

    def _execute(self, progress: Progress, fresh: bool) -> Summary:
        jobs = plan.jobs(self.options, self.contestants)
        with self.folder.open(self.description(), fresh):
            self.peaks = self.measured_peaks()
            self.prepare(progress.say)
            self._judge_all(progress)
            states: dict[str, int] = {}
            resumed = expected = 0
            progress.begin(len(jobs))
            for job in jobs:
                progress.doing(f"round {job.round + 1}/{self.options.rounds} · {job.cell.name} · {job.purpose}")
                record, is_old = self.recorded(job, progress)
                resumed += is_old
                states[record.state] = states.get(record.state, 0) + 1
                expected += record.state == "rejected" and bool(job.contestant.variant.why_rejected(job.cell.task))
                progress.done(record.state)
            return Summary(len(jobs), resumed, states, self.folder.path, expected)

    def recorded(self, job: Job, progress: Progress) -> tuple[Record, bool]:
        """The record of a job that :meth:`judged` has been asked about, and whether it was there already; measured and
        written where it was not."""
        name = self._record_name(job)
        record = self.folder.read(name)
        is_old = record is not None and not record.interrupted and not self._is_refusal_of_the_past(job, record)
        if record is None or not is_old or self._lacks_its_replay(job, record):
            is_old = False
            record = self._measured(job, progress)
            self.folder.write(name, record)
        self._remember(job, record)
        return record, is_old

    def _lacks_its_replay(self, job: Job, record: Record) -> bool:
        """Whether the weights that a memory process left for comparison are lost, and its cell is not timed yet."""
        if job.purpose != "memory" or job.round > 0 or record.state != "ok" or not self.options.time:
            return False
        timed = replace(job, purpose="time")
        return not self._snapshot(job, "memory").exists() and self.folder.read(self._record_name(timed)) is None

    def _measured(self, job: Job, progress: Progress) -> Record:
        """A new record of the job, whatever the contestant does: what it makes of this process is a ``crashed`` record,
        and never the end of a run that others are in."""
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
            return self._record(job, result, started, self._gate_of(job))

    def _gate_of(self, job: Job) -> Gate:
        """What the record of a measurement says of its gate, whose checks stand in a record of their own."""
        verdict = self.verdicts[job.contestant.name, job.cell.task]
        return Gate(passed=verdict.passed, key=verdict.gate.key, checks=[])

    def measured_peaks(self) -> dict[str, float] | None:
        """Of this machine's processors; None where contestants run on a GPU or on another machine."""
        is_here = self.options.device == "cpu" and self.backend.remote_host is None
        return peaks.measure(self.threads) if is_here else None

    def description(self) -> dict[str, Any]:
        """What all records of the folder have in common: options, code, machine. A resumed run must have the same."""
        return {
            **self.backend.describe(),
            "options": asdict(self.options),
            "contestants": {name: {"adapter": adapter, "lock": lock} for name, (adapter, lock) in self.hashes.items()},
            "harness": admission.sources_hash(admission.GATE_SOURCES),
            "machine": machine.describe()["id"],
            "threads": self.threads,
        }

    def _key(self, job: Job) -> str:
        """Same key: same measurement of the same code in the same environment."""
        parts = [*job.cell.model_dump(exclude_none=True).values(), *self.hashes[job.contestant.name]]
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]

    def _record_name(self, job: Job) -> str:
        return f"{job.name}.{self._key(job)[:8]}.json"

    def _is_refusal_of_the_past(self, job: Job, record: Record) -> bool:
        """A record without a measurement, because its gate could not run or failed, though by now the gate passes."""
        verdict = self.verdicts[job.contestant.name, job.cell.task]
        return record.gate is not None and not record.gate.passed and verdict.passed

    def prepare(self, say: Callable[[str], None]) -> None:
        """Data sets and environments. An environment that cannot be built makes its cells ``unsupported``."""
        for name in sorted({TASKS[task].dataset for task in self.options.tasks}):
            self.data[name] = ensure_data(name, self.options.synthetic, say)
            self.watched.add(store.files(name, self.options.synthetic))
        for contestant in self.contestants:
            self.executors[contestant.name] = self._executor(contestant, say)

    def _executor(self, contestant: Contestant, say: Callable[[str], None]) -> Executor | Unavailable:
        return self.backend.executor(contestant, say)

    def _judge_all(self, progress: Progress) -> None:
        pairs = [(c, task) for task in self.options.tasks for c in self.contestants]
        progress.begin(len(pairs), "gate")
        for contestant, task in pairs:
            progress.doing(f"gate · {task} · {contestant.name}")
            progress.done(self.judged(contestant, task, progress.say).state)

    def judged(self, contestant: Contestant, task: str, say: Callable[[str], None], fresh: bool = False) -> Record:
        """The record of the gate's verdict, which is written and remembered. ``fresh``: forget an earlier verdict."""
        verdict = self._judge(contestant, task, say, fresh)
        self.verdicts[contestant.name, task] = verdict
        name = f"{task}.{contestant.name}.gate.{verdict.gate.key[:8]}.json"
        record = self._gate_record(contestant, task)
        before = self.folder.read(name)
        if before is not None and before.state == record.state:
            return before
        self.folder.write(name, record)
        return record

    def _judge(self, contestant: Contestant, task: str, say: Callable[[str], None], fresh: bool) -> Verdict:
        executor = self.executors[contestant.name]
        identity = "" if isinstance(executor, Unavailable) else executor.identity
        key = admission.key_of(contestant, task, self.options.device, self.threads, identity)
        nothing = Gate(passed=False, key=key, checks=[])
        if isinstance(executor, Unavailable):
            return Verdict("unsupported", executor.reason, nothing, {})
        if reason := contestant.variant.why_unsupported(task):
            return Verdict("unsupported", reason, nothing, {})
        bounds = Limits(self.limits.memory_bytes, min(admission.TIMEOUT_SECONDS, self.limits.timeout_seconds))
        with self.folder.attempt(f"{task}.{contestant.name}.gate") as killed:
            try:
                if killed < MOST_ATTEMPTS:
                    self._check_unchanged(contestant)
                    device, run_tool = self.options.device, self.backend.run_tool
                    return admission.judge(
                        contestant, task, executor, bounds, device, self.threads, say, run_tool, fresh
                    )
                result = killer(killed)
            except ENDS_THE_RUN:
                raise
            except Exception as error:
                result = unforeseen(error)
            return Verdict(result.state, result.reason, nothing, {}, result.log_tail)

    def _cell(self, contestant: Contestant, task: str, batch_size: int) -> Cell:
        return plan.cell_of(self.options, contestant, task, batch_size)

    def _gate_record(self, contestant: Contestant, task: str) -> Record:
        verdict = self.verdicts[contestant.name, task]
        cell = self._cell(contestant, task, gate_cases.BATCH)
        job = Job(contestant, cell, 0, 0, "gate")
        state: State = "rejected" if verdict.state == "ok" and not verdict.gate.passed else verdict.state
        reason = verdict.reason or admission.failures(verdict.gate) or None
        return self._record(job, _result_of(verdict, state, reason), Moment(), verdict.gate)

    def _measure(self, job: Job, progress: Progress) -> Record:
        """One process, or the record of why there is none."""
        started = Moment()
        gate = self._gate_of(job)
        refusal = self._refusal(job, self.verdicts[job.contestant.name, job.cell.task])
        if refusal is not None:
            return self._record(job, refusal, started, gate)
        executor = self.executors[job.contestant.name]
        assert not isinstance(executor, Unavailable)
        request = self._request(job)
        self._check_unchanged(job.contestant)
        result, load = undisturbed(
            lambda: executor.run(request, self.limits, progress.event),
            self.options.repeats,
            job.purpose == "time",
            job.cell.name,
            progress,
            self.backend.speed_probe,
        )
        check_disk(result, self.folder, job.cell.name)
        if job.purpose == "time" and result.state == "ok":
            result = self._compare_with_replay(job, request, result)
        if request.checked is not None and result.state == "ok":
            result = self._compare_with_reference(job, request, result, progress.say)
        accuracy = self._evaluate(job, request, result, progress.say)
        return self._record(job, result, started, gate, load, accuracy)

    def _refusal(self, job: Job, verdict: Verdict) -> Result | None:
        """A result without a process: the gate failed, or an earlier process of this cell showed that it cannot run."""
        if verdict.state != "ok":
            return _result_of(verdict, verdict.state, verdict.reason)
        if not verdict.gate.passed:
            known = job.contestant.variant.why_rejected(job.cell.task)
            reason = f"by the gate: {admission.failures(verdict.gate)}" + (f"; known finding: {known}" if known else "")
            return Result("rejected", reason, machine=verdict.machine)
        if self.protocol.sampling == "own" and job.contestant.variant.own_sampling is None:
            return Result("unsupported", f"{job.contestant.name} {NO_OWN_LOOP}")
        unreplayed = self.unreplayed.get(job.cell.name)
        if unreplayed is not None and job.purpose == "time":
            reason = (
                f"its memory process, which is its untimed replay, ended as {unreplayed.state}: {unreplayed.reason}"
            )
            tail, by_others = unreplayed.log_tail, unreplayed.interrupted
            return Result(unreplayed.state, reason, log_tail=tail, interrupted=by_others)
        earlier = self.ended.get(job.cell.name)
        if earlier is not None:
            return Result(earlier.state, f"as in round {earlier.block.round + 1}: {earlier.reason}")
        return None

    def _remember(self, job: Job, record: Record) -> None:
        if record.state != "ok" and job.purpose == "memory":
            self.unreplayed.setdefault(job.cell.name, record)
        if record.state in FINAL_STATES and job.purpose == "time":
            self.ended.setdefault(job.cell.name, record)

    def _request(self, job: Job) -> Request:
        options, cell = self.options, job.cell
        task = TASKS[cell.task]
        seeds = self._seeds(job)
        epochs = options.epochs or self.protocol.default_epochs
        whole = options.subset is None and options.budget_seconds is None
        is_first_time = job.purpose == "time" and job.round == 0
        return Request(
            mode="time" if job.purpose == "time" else "memory",
            folder=str(job.contestant.framework.folder),
            variant=cell.variant,
            private=cell.private,
            static_shapes=job.contestant.variant.static_shapes,
            task=cell.task,
            batch_size=cell.batch_size,
            dataset_size=task.train_size,
            sampling=self.protocol.sampling,
            order_seed=int.from_bytes(hashlib.sha256(f"{self.folder.id} {seeds.initial} order".encode()).digest()[:4]),
            warm_up=self.protocol.warm_up,
            noise_multiplier=self._sigma,
            max_grad_norm=self.protocol.max_grad_norm,
            learning_rate=task.learning_rate,
            delta=self.protocol.delta,
            device=options.device,
            threads=self.threads,
            precision=self.protocol.precision,
            initial_seed=seeds.initial,
            batch_seed=seeds.batches,
            noise_seed=seeds.noise,
            data=task.dataset,
            synthetic=options.synthetic,
            epochs=epochs if job.purpose == "time" else 1,
            steps=plan.steps_of(options, cell.task, cell.batch_size),
            budget_seconds=options.budget_seconds,
            snapshot=str(self._snapshot(job, job.purpose)) if is_first_time or job.purpose == "memory" else None,
            checked=str(self._scratch(job, "checked")) if is_first_time and self.protocol.sampling != "own" else None,
            weights=str(self._scratch(job, "weights")) if whole and job.purpose == "time" else None,
        )

    def _hashes_of(self, contestant: Contestant) -> tuple[str, str]:
        """Of the code and of the environment."""
        return contestant.framework.adapter_hash, self.backend.environment_id(contestant.framework)

    @property
    def _sigma(self) -> float:
        return self.protocol.noise_multiplier if self.options.sigma is None else self.options.sigma

    def _seeds(self, job: Job) -> Seeds:
        """The same for all contestants of a block; every round has its own."""
        base = self.options.seed * 1000 + job.round
        # What a worker knows from the start tells it nothing of the batches, which it gets when everything is built.
        drawn = hashlib.sha256(f"{self.folder.id} {base}".encode()).digest()
        return Seeds(initial=base, batches=int.from_bytes(drawn[:4]) >> 1, noise=base + 1)

    def _scratch(self, job: Job, what: str) -> Path:
        return self.folder.scratch / f"{job.cell.task}.{job.contestant.name}.b{job.cell.batch_size}.{what}.npz"

    def _snapshot(self, job: Job, purpose: str) -> Path:
        return self._scratch(job, f"after-first-steps.{purpose}")

    def _compare_with_replay(self, job: Job, request: Request, result: Result) -> Result:
        """Gate, part 5, on the measured cell itself: the weights after the first timed steps against the replay.

        The limit leaves room for one float32 rounding of every weight that moved in every step. A library's own loop
        that cannot be seeded, and says so, keeps its error in the record and its time.
        """
        if request.snapshot is None or not self.options.memory:
            return result
        replayed = self._snapshot(job, "memory")
        if not Path(request.snapshot).exists() or not replayed.exists():
            whose = "timed process" if replayed.exists() else "memory process, its untimed replay,"
            reason = f"the {whose} left no weights: run the same command with --fresh."
            return replace(result, state="crashed", reason=reason)
        try:
            initial = initial_parameters(TASKS[job.cell.task], request.initial_seed)
            error, rounding = _relative_distance(Path(request.snapshot), replayed, initial)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as why:
            reason = f"timed = replayed: the weights after the first timed steps cannot be read ({_short(why)})."
            return replace(result, state="rejected", reason=reason)
        is_own = self.protocol.sampling == "own"
        assert result.timed is not None
        limit = REPLAY_TOLERANCE + rounding * (result.timed["steps_timed"] if is_own else REPLAYED_STEPS)
        result = replace(result, timed={**result.timed, "replay_error": _finite(error)})
        if error <= limit or (is_own and not job.contestant.variant.own_replays):
            return result
        reason = (
            "timed = replayed: the weights after the first timed steps differ from an untimed replay by "
            f"{error:.3g} (limit {limit:.3g}) of the way travelled."
        )
        return replace(result, state="rejected", reason=reason)

    def _compare_with_reference(self, job: Job, request: Request, result: Result, say: Callable[[str], None]) -> Result:
        """Gate, part 5, to its end: the timed weights at a moment that nobody could know, and at the end, are those of
        a replay, and steps of that replay, drawn at random, are the float64 reference's on the same rows."""
        assert request.checked is not None
        path = Path(request.checked)
        if not path.exists():
            return replace(result, state="crashed", reason="the timed process left no replay to compare.")
        with np.load(path) as found:
            steps, halt = (int(value) for value in found["steps"])
            numbers = [int(value) for value in found["numbers"]]
            rows = [found[f"{i}/rows"] for i in range(len(numbers))]
            jump, jumped = (float(value) for value in found["jump"])
        timed = result.timed
        assert timed is not None
        each = timed["steps_timed"]
        if steps != each * timed["epochs"] or not 0 < halt <= steps or not {halt - 1, steps - 1} <= set(numbers):
            reason = f"the replay is of {steps} steps, halted at {halt}: not the timed ones."
            return replace(result, state="rejected", reason=reason)
        batches = timed_batches(request, setting_of(request), each, timed["epochs"], halt)
        for number, found_rows in zip(numbers, rows, strict=True):
            indices, mask = batches[number] if 0 <= number < steps else (np.zeros(0), None)
            if not np.array_equal(found_rows, indices if mask is None else indices[mask]):
                reason = f"the replay's step {number} is not of the rows that it was given."
                return replace(result, state="rejected", reason=reason)
        try:
            measured = self.step_reference(request, path, say)
        except (EnvironmentFault, ToolFault) as fault:
            reason = f"the float64 reference of a step could not be made: {fault}"
            return replace(result, state="crashed", reason=reason)
        initial = initial_parameters(TASKS[job.cell.task], request.initial_seed)
        error, limit = _replay_error(path, initial, halt, "")
        end_error, end_limit = _replay_error(path, initial, steps, "_end")
        compared = Compared(
            step=numbers[0],
            steps=halt,
            rows=len(rows[0]),
            replay_error=error,
            replay_limit=limit,
            all_steps=steps,
            end_error=end_error,
            end_limit=end_limit,
            compared_steps=len(numbers),
            longest_step=jump,
            longest_step_number=int(jumped),
            **measured,
        ).model_dump()
        faults = faults_of(compared)
        result = replace(result, timed={**timed, "compared": compared})
        return replace(result, state="rejected", reason="; ".join(faults)) if faults else result

    def step_reference(self, request: Request, checked: Path, say: Callable[[str], None]) -> dict[str, Any]:
        """What :mod:`frameworks._tools.step_reference` says of the step.

        Raises :class:`EnvironmentFault` or :class:`ToolFault` where it cannot be asked.
        """
        rate = request.learning_rate / request.batch_size
        data = store.folder(request.data, request.synthetic)
        arguments: list[Argument] = ["--task", request.task, "--rate", repr(rate), "--checked", Input(checked)]
        arguments += ["--x", Input(data, "train_x.npy"), "--y", Input(data, "train_y.npy")]
        if request.private:
            arguments += ["--bound", repr(request.max_grad_norm)]
            arguments += ["--deviation", repr(request.noise_multiplier * request.max_grad_norm)]
        return last_json(self.backend.run_tool(STEP_REFERENCE, arguments, say))

    def _check_unchanged(self, contestant: Contestant) -> None:
        """Raises :class:`BadInput` where the code is no longer what the gate has seen (rule V9), or the harness' own
        code or the data are not what they were when the run began."""
        self.watched.check()
        hashes, folder = self.hashes[contestant.name], self.folder_hashes[contestant.name]
        if hashes != self._hashes_of(contestant) or folder != contestant.framework.folder_hash:
            raise BadInput(
                f"The code or the pins of {contestant.name} changed during the run; start anew with --fresh."
            )

    def _evaluate(self, job: Job, request: Request, result: Result, say: Callable[[str], None]) -> Accuracy | None:
        """Test accuracy after whole epochs, by one evaluator for all. Its failure does not void the times."""
        steps = result.epsilon_steps
        if request.weights is None or result.state != "ok" or steps is None or not Path(request.weights).exists():
            return None
        test = store.folder(request.data, request.synthetic)
        arguments: list[Argument] = ["--task", request.task, "--parameters", Input(Path(request.weights))]
        arguments += ["--x", Input(test, "test_x.npy"), "--y", Input(test, "test_y.npy")]
        try:
            measured = last_json(self.backend.run_tool(EVALUATE, arguments, say))
        except (EnvironmentFault, ToolFault) as fault:
            say(f"{job.cell.name}: no accuracy ({fault})")
            return None
        return Accuracy(test=measured["accuracy"], after_steps=steps)

    def _record(
        self,
        job: Job,
        result: Result,
        started: Moment,
        gate: Gate | None = None,
        load: Load | None = None,
        accuracy: Accuracy | None = None,
    ) -> Record:
        commit, dirty = machine.commit()
        timed = Timed.model_validate(result.timed) if result.timed is not None else None
        if timed is not None and self.protocol.sampling == "own":
            timed = timed.model_copy(update={"own_sampling": job.contestant.variant.own_sampling})
        where = self.backend.describe_process(job.contestant.framework, result)
        adapter_hash, lock_hash = self.hashes[job.contestant.name]
        return Record(
            purpose=job.purpose,
            state=result.state,
            reason=result.reason,
            cell=job.cell,
            key=self._key(job),
            data=self.data.get(TASKS[job.cell.task].dataset),
            epoch_seconds=result.epoch_seconds,
            compile_seconds=result.compile_seconds,
            timed=timed,
            memory=result.memory,
            gate=gate,
            epsilon=self._epsilon(job, result),
            accuracy=accuracy,
            versions=result.versions,
            image=where.image,
            container=where.container,
            machine={**where.machine, "threads": self.threads, "peaks": self.peaks},
            seeds=self._seeds(job),
            block=Block(run=self.folder.id, round=job.round, order=job.order),
            source=Source(commit=commit, dirty=dirty, adapter_hash=adapter_hash, lock_hash=lock_hash),
            load=load,
            started=started.text,
            wall_seconds=started.seconds,
            command=self.command,
            log_tail="" if result.state == "ok" else result.log_tail,
            interrupted=result.interrupted,
            sequence=sequence.take(),
        )

    def _epsilon(self, job: Job, result: Result) -> Epsilon | None:
        """Of the whole epochs that the figure stands for. None where batches are no Poisson samples."""
        cell, sampling = job.cell, self.protocol.sampling
        if sampling == "own":
            sampling = job.contestant.variant.own_sampling or "none"
        if not cell.private or sampling != "poisson" or result.epsilon_steps is None:
            return None
        if not accounting.available():
            return None
        rate = cell.batch_size / TASKS[cell.task].train_size
        rdp, pld = accounting.epsilons(rate, self._sigma, result.epsilon_steps, self.protocol.delta)
        return Epsilon(
            delta=self.protocol.delta,
            steps=result.epsilon_steps,
            rdp=_finite(rdp),
            pld=_finite(pld),
            own=_finite(result.epsilon_own),
        )


def undisturbed(
    process: Callable[[], Result],
    repeats: int,
    is_timed: bool,
    name: str,
    progress: Progress,
    clock: Callable[[], float | None],
) -> tuple[Result, Load]:
    """(result, load) of one ``process``; a timed one that others disturbed is run again, up to ``repeats`` times.
    One whose clock disagrees with the harness's is run again at least CLOCK_REPEATS times: a busy machine can keep
    either clock waiting, but not every time.
    ``clock``: the speed probe's seconds, None where it would not show the speed of the worker's machine."""
    repeat = 0
    while True:
        before = clock()
        result = process()
        after = clock()
        share = result.foreign_share
        changed = math.exp(abs(math.log(after / before))) - 1.0 if before and after else 0.0
        clocks = result.clock_fault
        disturbed = share > DISTURBED_SHARE or changed > DISTURBED_SPEED or clocks is not None
        if not disturbed or not is_timed or result.state not in {"ok", "rejected"}:
            break
        most = max(repeats, CLOCK_REPEATS) if clocks is not None else repeats
        progress.say(
            f"{name}: disturbed (others took {share:.0%}, speed probe changed by {changed:.0%}"
            + (f", {clocks})" if clocks else ")")
            + (", repeated" if repeat < most else "")
        )
        if repeat >= most:
            break
        repeat += 1
    if clocks is not None and result.state == "ok" and result.harness_stopped:
        reason = f"the harness was stopped while its clock ran: {clocks}."
        result = replace(result, state="crashed", reason=reason, interrupted=True)
    elif clocks is not None and result.state == "ok":
        result = replace(result, state="rejected", reason=f"the clocks do not agree: {clocks}.")
    load = Load(foreign_share=share, disturbed=disturbed, repeats=repeat, canary_before=before, canary_after=after)
    return result, load


class Moment:
    """Now: ``text`` by the wall clock, and the ``seconds`` since then by one that is never set."""

    def __init__(self) -> None:
        self.text = datetime.now(UTC).isoformat(timespec="seconds")
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start


ENDS_THE_RUN = (BadInput, OutOfTime)
"""What the user has to mend, or asked for; anything else that goes wrong around a process is that process's failure."""


def _result_of(verdict: Verdict, state: State, reason: str | None) -> Result:
    return Result(state, reason, versions=verdict.versions, log_tail=verdict.log_tail, machine=verdict.machine)


def unforeseen(error: Exception) -> Result:
    """The result of a process whose answer the harness stumbled over."""
    tail = "".join(traceback.format_exception(error))[-LOG_TAIL:]
    return Result("crashed", f"what the process left could not be used ({_short(error)}).", log_tail=tail)


def killer(times: int) -> Result:
    """The result of a process during which the run itself was killed again and again."""
    return Result(
        "crashed",
        f"the run was killed {times} times while this process was at work, which may be its doing; it is not started "
        "again in this run (--fresh forgets that).",
    )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


FULL_BELOW_BYTES = 64 * 2**20
"""Less free space than this, and a worker's word that the disk is full is believed: no weights are larger."""


def check_disk(result: Result, folder: RunFolder, name: str) -> None:
    """Raises :class:`BadInput` where a process failed because this machine's disk is full or the run's folder cannot be
    written any more; a contestant that only says so ends nobody's run."""
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
    """The harness' own code and settings, in this tree: they measure whatever tree the contestants come from."""
    watched = seal.Watched()
    watched.add(path for path in (ROOT / "harness").rglob("*") if path.suffix in {".py", ".toml"})
    return watched


def ensure_data(name: str, synthetic: bool, say: Callable[[str], None]) -> Data:
    """The data set in the cache, fetched where it is missing. A synthetic twin only where the user asked for it.

    Raises :class:`BadInput` where the arrays are not those that were written there.
    """
    meta = store.describe(name, synthetic)
    if meta is not None:
        store.verify(name, synthetic)
    else:
        from harness.data import fetch

        say(f"Data: {'making the synthetic twin of' if synthetic else 'fetching'} {name}")
        meta = fetch.make_synthetic(name) if synthetic else fetch.fetch(name)
    return Data(
        name=name,
        synthetic=meta["synthetic"],
        origin=meta["origin"],
        sha256=meta["sha256"],
        train_size=meta["arrays"]["train_x"]["shape"][0],
    )


def _finite(value: float | None) -> float | None:
    """None for infinity (no noise, no privacy), which JSON cannot carry."""
    return value if value is not None and math.isfinite(value) else None


def faults_of(compared: dict[str, Any]) -> list[str]:
    """Sentences on what of :class:`Compared` is beyond its limit; NaN is."""
    found = []
    if not compared["replay_error"] <= compared["replay_limit"]:
        found.append(
            f"timed = replayed: the weights after {compared['steps']} timed steps differ from an untimed replay by "
            f"{compared['replay_error']:.3g} (limit {compared['replay_limit']:.3g}) of the way travelled"
        )
    if compared["end_error"] is not None and not compared["end_error"] <= compared["end_limit"]:
        found.append(
            f"timed = replayed: the weights after all {compared['all_steps']} timed steps differ from an untimed "
            f"replay by {compared['end_error']:.3g} (limit {compared['end_limit']:.3g}) of the way travelled"
        )
    if compared["longest_step"] is not None and not compared["longest_step"] <= LONGEST_STEP:
        found.append(
            f"measured step: step {compared['longest_step_number']} of the replay moved the weights "
            f"{compared['longest_step']:.3g} times as far as its rows and its noise can"
        )
    if not compared["update_error"] <= compared["update_limit"]:
        found.append(
            f"measured step: the update of step {compared['step']} ({compared['rows']} rows) is off by "
            f"{compared['update_error']:.3g} (limit {compared['update_limit']:.3g})"
        )
    for name, score in compared["noise_scores"].items():
        if not score <= compared["noise_limit"]:
            found.append(
                f"measured step: the noise of step {compared['step']}, {name}: {score:.3g} standard deviations "
                f"(limit {compared['noise_limit']:.3g})"
            )
    return found


def _replay_error(path: Path, initial: dict[str, np.ndarray], steps: int, where: str) -> tuple[float, float]:
    """(error, limit) of the timed weights after so many steps against the replay's."""
    error, rounding = _relative_distance(path, path, initial, (f"timed{where}/", f"replayed{where}/"))
    return error, REPLAY_TOLERANCE * min(1.0 + steps / REPLAY_STEPS, REPLAY_GROWTH) + rounding * steps


def _relative_distance(
    a: Path, b: Path, start: dict[str, np.ndarray], prefixes: tuple[str, str] = ("", "")
) -> tuple[float, float]:
    """(|a - b|, |one float32 rounding of every weight that moved|), both over |a - start|. NaN passes no limit; where
    nothing moved the distances are absolute."""
    apart, travelled, rounding = 0.0, 0.0, 0.0
    with np.load(a) as left, np.load(b) as right:
        for name, origin in start.items():
            here = left[prefixes[0] + name].astype(np.float64)
            apart += float(np.sum((here - right[prefixes[1] + name]) ** 2))
            travelled += float(np.sum((here - origin) ** 2))
            rounding += float(np.sum(np.spacing(np.abs(origin[here != origin])).astype(np.float64) ** 2))
    scale = math.sqrt(travelled) or 1.0
    return math.sqrt(apart) / scale, math.sqrt(rounding) / scale


def command_line() -> str:
    return "dpbench " + shlex.join(sys.argv[1:])

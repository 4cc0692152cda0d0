"""Runs a plan: prepares data and environments, judges by the gate, measures block by block, stores records."""

from __future__ import annotations

import hashlib
import itertools
import math
import shlex
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis import accounting
from harness.contract import NO_OWN_LOOP
from harness.data import store
from harness.data.pretrained import starting_parameters
from harness.environments import energy
from harness.environments.backend import Argument, Backend, Input, Log, last_json
from harness.environments.executor import Executor, Limits, ToolFault, Venv
from harness.environments.turns import TURN_SECONDS
from harness.environments.unavailable import Unavailable
from harness.environments.venv import EnvironmentFault
from harness.gate import admission
from harness.gate.admission import Verdict
from harness.plan import e2e as plan
from harness.plan import protocol as protocols
from harness.plan.e2e import Job, Options
from harness.plan.registry import Contestant
from harness.run import block, peaks
from harness.run.job_text import key_of, outcome_of, title_of
from harness.run.pace import Pace
from harness.run.progress import Progress
from harness.run.remaining import about
from harness.run.session import ENDS_THE_RUN, Moment, Session, changed, killer, short, unforeseen
from harness.store.folder import MOST_ATTEMPTS, RunFolder
from harness.store.record import (
    Accuracy,
    Cell,
    Compared,
    Data,
    Energy,
    Epsilon,
    Gate,
    Load,
    Probe,
    Record,
    Seeds,
    Timed,
)
from harness.tasks import TASKS, definition_hash, known_task
from harness.worker.batches import REPLAYED_STEPS, setting_of, timed_batches
from harness.worker.deferred import hash_of
from harness.worker.gate import cases as gate_cases
from harness.worker.reading import reading_rate
from harness.worker.request import Request
from harness.worker.result import Result, State

REPLAY_TOLERANCE = 1e-4
"""Relative distance of the timed from the replayed weights, over the distance travelled: kernels that sum in another
order from run to run differ by a few float32 roundings, a skipped step or another noise by about 1."""

REPLAY_STEPS = 10.0
REPLAY_GROWTH = 100.0
"""Roundings grow from step to step: the tolerance grows by itself every REPLAY_STEPS steps, to REPLAY_GROWTH times as
much. One step left out of n is 1/sqrt(n) of the way or more."""
LONGEST_STEP = 1.01
"""Slack for what float32 adds to a step that is as long as its rows and its noise can make it."""
STEP_REFERENCE = "frameworks._tools.step_reference"
EVALUATE = "frameworks._tools.evaluate"


class Run(Session[Options, Contestant, Job, Request]):
    """Whole epochs of tasks: data, gates, times, the memory."""

    def __init__(
        self,
        options: Options,
        contestants: list[Contestant],
        folder: RunFolder,
        command: str,
        backend: Backend,
        pace: Pace | None = None,
    ) -> None:
        super().__init__(options, contestants, folder, command, backend)
        self.pace = Pace() if pace is None else pace
        self.jobs = plan.jobs(options, contestants)
        self.protocol = protocols.load(options.protocol)
        self.data: dict[str, Data] = {}
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        self.unreplayed: dict[str, Record] = {}
        self.peaks: dict[str, float] | None = None
        self.idle = energy.Idle()
        self.folder_hashes = {c.name: c.framework.folder_hash for c in contestants}
        self.block: list[Job] = []
        self.taken: dict[str, Record] = {}

    def _begin(self, progress: Progress) -> None:
        self.idle = self.measured_idle()
        self.peaks = self.measured_peaks()
        self.prepare(progress.log)

    def _in_order(self, progress: Progress) -> Iterator[Job]:
        """Round by round, of which the first block is made whatever time it takes; where the pace allows, rounds beyond
        the plan follow for what is not known well enough."""
        began = time.monotonic()
        yielded: list[Job] = []
        rounds = max(self._planned_rounds, plan.MOST_ROUNDS if self.pace.minutes else 0)
        for number in range(rounds):
            before = self.measured
            jobs = [job for job in self.jobs if job.round == number]
            if number >= self._planned_rounds:
                jobs = plan.further_round(
                    self.options, self.contestants, number, self.pace.open_blocks(self.folder.path)
                )
                progress.extend([key_of(job) for job in jobs])
                if not jobs:
                    progress.log("Every interval is narrow enough: no further rounds.")
                    return
            # A block is never left half done: only what is beside each other in it can be compared.
            for _, jobs_of_block in itertools.groupby(jobs, key=lambda job: (job.cell.task, job.cell.batch_size)):
                self.block = list(jobs_of_block)
                judging = Moment()
                self._judge_all(progress, self.block[0].cell.task)
                self._begun(self.block)
                began += judging.seconds  # of the time that a pace allows, gates take nothing
                if self.measured and self.pace.is_over(time.monotonic() - began):
                    cells = {job.cell for job in self.jobs} - {job.cell for job in yielded}
                    self.missing += len(cells)
                    without = f"{len(cells)} cells have no time yet; " if cells else ""
                    progress.log(f"Time is up: {without}what was measured is reported; the same command goes on.")
                    return
                yielded += self.block
                yield from self.block
            if self.measured > before:
                self.pace.after_round(number + 1, self._planned_rounds)
        if self.pace.minutes:
            progress.log(f"{rounds} rounds are done, which is the most, and some interval is still wide.")

    @property
    def _planned_rounds(self) -> int:
        return 1 + max((job.round for job in self.jobs), default=0)

    @property
    def takes_turns(self) -> bool:
        """Whether the timed processes of a block are alive together: on this machine's processors, for some seconds
        each. Containers, GPUs and whole epochs are measured by one process after the other."""
        is_short = self.options.budget_seconds is not None and self.protocol.warm_up and self.protocol.sampling != "own"
        here = [e for e in self.executors.values() if not isinstance(e, Unavailable)]
        return is_short and self.options.device == "cpu" and all(type(e) is Venv for e in here)

    def _measured(self, job: Job, progress: Progress) -> Record:
        """A timed process is measured together with those of its block that are still to be."""
        has_process = self.folder.attempts(job.name) < MOST_ATTEMPTS and self.refusal(job) is None
        if job.purpose == "time" and self.takes_turns and job.name not in self.taken and has_process:
            together = [one for one in self.block if self._is_due(one) and not self.folder.attempts(one.name)]
            # Where the run was killed meanwhile, each is measured alone, so that who did it shows.
            self.taken = block.records(self, together if job in together else [job], progress)
            progress.doing(f"{title_of(job)}, {job.purpose}, round {job.round + 1}")
        record = self.taken.get(job.name)
        return super()._measured(job, progress) if record is None else record

    def _seconds_of(self, record: Record) -> float | None:
        return record.wall_seconds if record.timed is not None and record.timed.turns else None

    def _stands(self, job: Job, record: Record) -> bool:
        is_settled = super()._stands(job, record) and not self._is_refusal_of_the_past(job, record)
        return is_settled and not self._lacks_its_replay(job, record)

    def _is_expected(self, job: Job, record: Record) -> bool:
        return record.state == "rejected" and bool(job.contestant.variant.why_rejected(job.cell.task))

    def _lacks_its_replay(self, job: Job, record: Record) -> bool:
        """Return whether the weights that a memory process left for comparison are lost, and its cell is still to be
        timed."""
        if job.purpose != "memory" or job.round > 0 or record.state != "ok" or not self.options.time:
            return False
        timed = replace(job, purpose="time")
        return not self._snapshot(job, "memory").exists() and self._is_due(timed)

    def _gate_of(self, job: Job) -> Gate:
        """Return what the record of a measurement says of its gate, whose checks stand in a record of their own."""
        verdict = self.verdicts[job.contestant.name, job.cell.task]
        return Gate(passed=verdict.passed, key=verdict.gate.key, checks=[], judged_as=verdict.gate.judged_as)

    def measured_peaks(self) -> dict[str, float] | None:
        """Measure the peak rates of this machine's processors; None where contestants run on a GPU or on another
        machine."""
        return peaks.measure(self.threads) if self.options.device == "cpu" else None

    def measured_idle(self) -> energy.Idle:
        """Measure what the idle machine takes, before anything of the run is at work; nothing where workers run
        elsewhere, or nothing is timed."""
        return energy.idle(energy.counters(self.options.device)) if self.options.time else energy.Idle()

    def _energy(self, result: Result) -> Energy | None:
        if result.energy is None:
            return None
        said = Energy(**result.energy, idle_watts=dict(self.idle.watts), step_seconds=dict(self.idle.step_seconds))
        if self.idle.reason is None:
            return said
        return said.model_copy(update={"unavailable": dict.fromkeys(said.joules, self.idle.reason) | said.unavailable})

    def description(self) -> dict[str, Any]:
        """Return what all records of the folder have in common: options, code, machine. A resumed run must have the
        same."""
        return {
            **self.backend.describe(),
            "options": asdict(self.options),
            "contestants": {name: {"adapter": adapter, "lock": lock} for name, (adapter, lock) in self.hashes.items()},
            "tasks": {name: definition_hash(known_task(name)) for name in sorted({job.cell.task for job in self.jobs})},
            "harness": admission.sources_hash(admission.GATE_SOURCES),
            "place": self.place(),
        }

    def _is_refusal_of_the_past(self, job: Job, record: Record) -> bool:
        """Return a record without a measurement, because its gate could not run or failed, though by now the gate
        passes."""
        verdict = self.verdicts[job.contestant.name, job.cell.task]
        return record.gate is not None and not record.gate.passed and verdict.passed

    def prepare(self, log: Log) -> None:
        """Data sets and environments. An environment that cannot be built makes its cells ``unsupported``."""
        for name in sorted({TASKS[task].dataset for task in self.options.tasks}):
            self.data[name] = ensure_data(name, self.options.synthetic, log)
            self.watched.add(store.files(name, self.options.synthetic))
        for contestant in self.contestants:
            self.executors[contestant.name] = self._executor(contestant, log)

    def _executor(self, contestant: Contestant, log: Log) -> Executor | Unavailable:
        return self.backend.executor(contestant, log)

    def _judge_all(self, progress: Progress, task: str) -> None:
        """Judge all contestants on a task, before its first block: so the first rows come soon."""
        for contestant in self.contestants:
            if (contestant.name, task) in self.verdicts:
                continue
            started = Moment()
            what = f"gate · {task} · {contestant.name}"
            progress.doing(what)
            record = self.judged(contestant, task, progress.log)
            outcome = "passed" if record.state == "ok" else outcome_of(record)
            how = "remembered" if self.verdicts[contestant.name, task].cached else about(started.seconds)
            progress.log(f"{what}: {outcome} ({how})")

    def judged(self, contestant: Contestant, task: str, log: Log, fresh: bool = False) -> Record:
        """Return the record of the gate's verdict, which is written and remembered. ``fresh``: forget an earlier
        verdict."""
        verdict = self._judge(contestant, task, log, fresh)
        self.verdicts[contestant.name, task] = verdict
        name = f"{task}.{contestant.name}.gate.{verdict.gate.key[:8]}.json"
        record = self._gate_record(contestant, task)
        before = self.folder.read(name)
        if before is not None and before.state == record.state:
            return before
        self.folder.write(name, record)
        return record

    def _judge(self, contestant: Contestant, task: str, log: Log, fresh: bool) -> Verdict:
        executor = self.executors[contestant.name]
        identity = "" if isinstance(executor, Unavailable) else executor.identity
        small = self.options.small_gate
        key = admission.key_of(contestant, task, self.options.device, self.threads, identity, small)
        nothing = Gate(passed=False, key=key, checks=[])
        if isinstance(executor, Unavailable):
            return Verdict("unsupported", executor.reason, nothing, {})
        if reason := contestant.variant.why_unsupported(task):
            return Verdict("unsupported", reason, nothing, {})
        bounds = Limits(self.limits.memory_bytes, min(admission.TIMEOUT_SECONDS, self.limits.timeout_seconds))
        with self.folder.attempt(f"{task}.{contestant.name}.gate") as killed:
            try:
                if killed < MOST_ATTEMPTS:
                    self.check_unchanged(contestant.name)
                    device, run_tool = self.options.device, self.backend.run_tool
                    return admission.judge(
                        contestant, task, executor, bounds, device, self.threads, log, run_tool, fresh, small
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

    def finished(self, job: Job, request: Request, result: Result, started: Moment, load: Load, log: Log) -> Record:
        if job.purpose == "time" and result.state == "ok":
            result = self._compare_with_replay(job, request, result)
        if request.checked is not None and result.state == "ok":
            result = self._compare_with_reference(job, request, result, log)
        accuracy = self._evaluate(job, request, result, log)
        return self._record(job, result, started, self._gate_of(job), load, accuracy)

    def unmeasured(self, job: Job, result: Result, started: Moment) -> Record:
        return self._record(job, result, started, self._gate_of(job))

    def refusal(self, job: Job) -> Result | None:
        """Return a result without a process: the gate failed, or an earlier process of this cell showed that it cannot
        run."""
        verdict = self.verdicts[job.contestant.name, job.cell.task]
        if verdict.state != "ok":
            return _result_of(verdict, verdict.state, verdict.reason)
        if not verdict.gate.passed:
            known = job.contestant.variant.why_rejected(job.cell.task)
            reason = f"by the gate: {admission.failures(verdict.gate)}" + (f"; known finding: {known}" if known else "")
            return Result("rejected", reason)
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
        if job.purpose == "time":
            super()._remember(job, record)

    def request(self, job: Job) -> Request:
        options, cell = self.options, job.cell
        seeds = self._seeds(job)
        epochs = options.epochs or self.protocol.default_epochs
        whole = options.subset is None and options.budget_seconds is None
        is_first_time = job.purpose == "time" and job.round == 0
        return plan.request_of(
            job.contestant,
            cell,
            self.protocol,
            mode="time" if job.purpose == "time" else "memory",
            order_seed=int.from_bytes(hashlib.sha256(f"{self.folder.id} {seeds.initial} order".encode()).digest()[:4]),
            noise_multiplier=self._sigma,
            threads=self.threads,
            initial_seed=seeds.initial,
            batch_seed=seeds.batches,
            noise_seed=seeds.noise,
            synthetic=options.synthetic,
            epochs=epochs if job.purpose == "time" else 1,
            steps=plan.steps_of(options, cell.task, cell.batch_size),
            budget_seconds=options.budget_seconds,
            turn_seconds=TURN_SECONDS if self.takes_turns else None,
            snapshot=str(self._snapshot(job, job.purpose)) if is_first_time or job.purpose == "memory" else None,
            checked=str(self._scratch(job, "checked")) if is_first_time and self.protocol.sampling != "own" else None,
            weights=str(self._scratch(job, "weights")) if whole and job.purpose == "time" else None,
        )

    def _hashes_of(self, contestant: Contestant) -> tuple[str, str]:
        """Return the hashes of the code and of the environment."""
        return contestant.framework.adapter_hash, self.backend.environment_id(contestant.framework)

    def _hashes_behind(self, job: Job) -> tuple[str, str]:
        """Return the hashes of all code that the job's figures depend on, the task's definition included, and of the
        environment."""
        adapter, lock = super()._hashes_behind(job)
        text = adapter + definition_hash(known_task(job.cell.task))
        return hashlib.sha256(text.encode()).hexdigest()[:12], lock

    @property
    def _sigma(self) -> float:
        return self.protocol.noise_multiplier if self.options.sigma is None else self.options.sigma

    def _seeds(self, job: Job) -> Seeds:
        """Return the seed: the same for all contestants of a block; every round has its own."""
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
            initial = starting_parameters(TASKS[job.cell.task], request.initial_seed, request.synthetic)
            error, rounding = _relative_distance(Path(request.snapshot), replayed, initial)
            changed = _changed(result, Path(request.snapshot), initial, {"": 0})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as why:
            reason = f"timed = replayed: the weights after the first timed steps cannot be read ({short(why)})."
            return replace(result, state="rejected", reason=reason)
        if changed:
            return replace(result, state="rejected", reason=changed)
        is_own = self.protocol.sampling == "own"
        assert result.timed is not None
        limit = REPLAY_TOLERANCE + rounding * (result.timed.steps_timed if is_own else REPLAYED_STEPS)
        result = replace(result, timed=replace(result.timed, replay_error=_finite(error)))
        if error <= limit or (is_own and not job.contestant.variant.own_replays):
            return result
        reason = (
            "timed = replayed: the weights after the first timed steps differ from an untimed replay by "
            f"{error:.3g} (limit {limit:.3g}) of the way travelled."
        )
        return replace(result, state="rejected", reason=reason)

    def _compare_with_reference(self, job: Job, request: Request, result: Result, log: Log) -> Result:
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
        each = timed.steps_timed
        if steps != each * timed.epochs or not 0 < halt <= steps or not {halt - 1, steps - 1} <= set(numbers):
            reason = f"the replay is of {steps} steps, halted at {halt}: not the timed ones."
            return replace(result, state="rejected", reason=reason)
        batches = timed_batches(request, setting_of(request), each, timed.epochs, timed.starts)
        for number, found_rows in zip(numbers, rows, strict=True):
            indices, mask = batches[number] if 0 <= number < steps else (np.zeros(0), None)
            if not np.array_equal(found_rows, indices if mask is None else indices[mask]):
                reason = f"the replay's step {number} is not of the rows that it was given."
                return replace(result, state="rejected", reason=reason)
        try:
            measured = self.step_reference(request, path, log)
        except (EnvironmentFault, ToolFault) as fault:
            reason = f"the float64 reference of a step could not be made: {fault}"
            return replace(result, state="crashed", reason=reason)
        initial = starting_parameters(TASKS[job.cell.task], request.initial_seed, request.synthetic)
        if changed := _changed(result, path, initial, {"timed/": None, "timed_end/": -1}):
            return replace(result, state="rejected", reason=changed)
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
        result = replace(result, timed=replace(timed, compared=compared))
        return replace(result, state="rejected", reason="; ".join(faults)) if faults else result

    def step_reference(self, request: Request, checked: Path, log: Log) -> dict[str, Any]:
        """Return what :mod:`frameworks._tools.step_reference` says of the step.

        Raises :class:`EnvironmentFault` or :class:`ToolFault` where it cannot be asked.
        """
        rate = reading_rate(TASKS[request.task].optimizer, request.learning_rate) / request.batch_size
        data = store.folder(request.data, request.synthetic)
        arguments: list[Argument] = ["--task", request.task, "--rate", repr(rate), "--checked", Input(checked)]
        arguments += ["--x", Input(data, "train_x.npy"), "--y", Input(data, "train_y.npy")]
        if request.private:
            arguments += ["--bound", repr(request.max_grad_norm)]
            arguments += ["--deviation", repr(request.noise_multiplier * request.max_grad_norm)]
        return last_json(self.backend.run_tool(STEP_REFERENCE, arguments, log))

    def check_unchanged(self, name: str) -> None:
        super().check_unchanged(name)
        if self.folder_hashes[name] != self.by_name[name].framework.folder_hash:
            raise changed(name)

    def _evaluate(self, job: Job, request: Request, result: Result, log: Log) -> Accuracy | None:
        """Test accuracy after whole epochs, by one evaluator for all. Its failure does not void the times."""
        steps = result.epsilon_steps
        if request.weights is None or result.state != "ok" or steps is None or not Path(request.weights).exists():
            return None
        test = store.folder(request.data, request.synthetic)
        arguments: list[Argument] = ["--task", request.task, "--parameters", Input(Path(request.weights))]
        arguments += ["--x", Input(test, "test_x.npy"), "--y", Input(test, "test_y.npy")]
        try:
            measured = last_json(self.backend.run_tool(EVALUATE, arguments, log))
        except (EnvironmentFault, ToolFault) as fault:
            log(f"{job.cell.name}: no accuracy ({fault})")
            return None
        return Accuracy(test=measured["accuracy"], after_steps=steps)

    def _probe(self, job: Job, result: Result) -> Probe | None:
        """Return what the process says of the memory frontier."""
        return None

    def _record(
        self,
        job: Job,
        result: Result,
        started: Moment,
        gate: Gate | None = None,
        load: Load | None = None,
        accuracy: Accuracy | None = None,
    ) -> Record:
        timed = Timed(**vars(result.timed)) if result.timed is not None else None
        if timed is not None and self.protocol.sampling == "own":
            timed = replace(timed, own_sampling=job.contestant.variant.own_sampling)
        facts = self._facts(job, result, started, load)
        facts["machine"]["peaks"] = self.peaks
        return Record(
            **facts,
            precision=TASKS[job.cell.task].precision,
            data=self.data.get(TASKS[job.cell.task].dataset),
            epoch_seconds=result.epoch_seconds,
            compile_seconds=result.compile_seconds,
            timed=timed,
            gate=gate,
            epsilon=self._epsilon(job, result),
            accuracy=accuracy,
            probe=self._probe(job, result),
            seeds=self._seeds(job),
            energy=self._energy(result),
        )

    def _epsilon(self, job: Job, result: Result) -> Epsilon | None:
        """Return ε of the whole epochs that the figure stands for. None where batches are no Poisson samples."""
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


def _result_of(verdict: Verdict, state: State, reason: str | None) -> Result:
    return Result(state, reason, versions=verdict.versions, log_tail=verdict.log_tail)


def ensure_data(name: str, synthetic: bool, log: Log) -> Data:
    """Return the data set in the cache, fetched where it is missing. A synthetic twin only where the user asked for it.

    Raises :class:`BadInput` where the arrays are not those that were written there.
    """
    meta = store.describe(name, synthetic)
    if meta is not None:
        store.verify(name, synthetic)
    else:
        from harness.data import fetch

        log(f"Data: {'making the synthetic twin of' if synthetic else 'fetching'} {name}")
        meta = fetch.make_synthetic(name) if synthetic else fetch.fetch(name)
    return Data(
        name=name,
        synthetic=meta["synthetic"],
        origin=meta["origin"],
        sha256=meta["sha256"],
        train_size=meta["arrays"]["train_x"]["shape"][0],
    )


def _finite(value: float | None) -> float | None:
    """Return the number; None for infinity (no noise, no privacy), which JSON cannot carry."""
    return value if value is not None and math.isfinite(value) else None


def faults_of(compared: dict[str, Any]) -> list[str]:
    """Return sentences on what of :class:`Compared` is beyond its limit; NaN is."""
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


def _changed(result: Result, path: Path, names: Iterable[str], parts: Mapping[str, int | None]) -> str | None:
    """Return a sentence where weights in a file are not those that the worker committed itself to when it had read
    them. ``parts``: prefix -> which of the stretches, None for any."""
    if result.committed is None:
        return None
    with np.load(path) as found:
        for prefix, place in parts.items():
            known = result.committed if place is None else result.committed[place:][:1]
            if hash_of({name: found[prefix + name] for name in names}) not in known:
                return "timed = replayed: the weights are not those that were read when the clock had stopped."
    return None


def _replay_error(path: Path, initial: dict[str, np.ndarray], steps: int, where: str) -> tuple[float, float]:
    """Return (error, limit) of the timed weights after so many steps against the replay's."""
    error, rounding = _relative_distance(path, path, initial, (f"timed{where}/", f"replayed{where}/"))
    return error, REPLAY_TOLERANCE * min(1.0 + steps / REPLAY_STEPS, REPLAY_GROWTH) + rounding * steps


def _relative_distance(
    a: Path, b: Path, start: dict[str, np.ndarray], prefixes: tuple[str, str] = ("", "")
) -> tuple[float, float]:
    """Return (|a - b|, |one float32 rounding of every weight that moved|), both over |a - start|. NaN passes no limit;
    where nothing moved the distances are absolute."""
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
    """Return the command that this process was started with."""
    return "dpbench " + shlex.join(sys.argv[1:])

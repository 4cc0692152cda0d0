"""Runs a plan: prepares data and environments, judges by the gate, measures block by block, stores records."""

from __future__ import annotations

import hashlib
import itertools
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.analysis import accounting
from harness.contract import NO_OWN_LOOP
from harness.data import store
from harness.environments import energy
from harness.environments.backend import Argument, Backend, Input, Log, last_json
from harness.environments.executor import ToolFault
from harness.environments.turns import TURN_SECONDS
from harness.errors import BadInput
from harness.gate import admission
from harness.plan import e2e as plan
from harness.plan import protocol as protocols
from harness.plan.e2e import Job, Options
from harness.plan.registry import Contestant
from harness.run import block, held, peaks, replays
from harness.run.gates import Gates
from harness.run.job_text import key_of, outcome_of, title_of
from harness.run.pace import Pace
from harness.run.progress import Progress
from harness.run.remaining import about
from harness.run.session import Moment, Session, changed
from harness.store.folder import MOST_ATTEMPTS, RunFolder
from harness.store.record import Accuracy, Cell, Data, Gate, Load, Probe, Record, Seeds, Timed
from harness.tasks import TASKS, definition_hash, known_task
from harness.worker.gate import cases as gate_cases
from harness.worker.request import Request
from harness.worker.result import Result

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
        self.gates = Gates(options, backend, self.limits, self.threads, folder, self.executors, self.check_unchanged)
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
        """Round by round, of which the first block is made whatever time it takes, and the replays of all that were
        timed; where the pace allows, rounds beyond the plan follow for what is not known well enough."""
        began = time.monotonic()
        yielded: list[Job] = []
        is_over = False
        rounds = max(self._planned_rounds, plan.MOST_ROUNDS if self.pace.minutes else 0)
        for number in range(rounds):
            before = self.measured
            jobs = [job for job in self.jobs if job.round == number]
            if number >= self._planned_rounds:
                open_blocks = [at for at, (_, told) in self.pace.known(self.folder.path, rounds).items() if not told]
                jobs = plan.further_round(self.options, self.contestants, number, open_blocks)
                progress.extend([key_of(job) for job in jobs])
                if not jobs:
                    break
            # A block is never left half done: only what is beside each other in it can be compared.
            of_blocks = itertools.groupby(jobs, key=lambda job: (job.cell.task, job.cell.batch_size))
            for place, self.block in enumerate([list(of_block) for _, of_block in of_blocks], 1):
                is_over = is_over or (self.measured > 0 and self.pace.is_over(time.monotonic() - began))
                if is_over:
                    self.block = [job for job in self.block if replays.waiting(self, job)]
                if not self.block:
                    continue
                judging = Moment()
                self._judge_all(progress, self.block[0].cell.task)
                self._begun(self.block)
                began += judging.seconds  # of the time that a pace allows, gates take nothing
                yielded += self.block
                for job in self.block:
                    yield job
                    replays.settle(self, job, progress.log)
                is_first = number == 0 and place <= len(self.options.tasks)  # every task at its smallest size
                if is_first and self.measured > before and len(yielded) < len(self.jobs):
                    self.pace.so_far(self.block[0].cell.task)
            if is_over:
                left = len({job.cell for job in self.jobs} - {job.cell for job in yielded})
                self.missing += left
                without = f"{left} cells have no time yet; " if left else ""
                progress.log(f"Time is up: {without}what was measured is reported; the same command goes on.")
                self.pace.tell(self.folder.path, rounds, "time is up", progress.log)
                return
            if self.measured > before and number + 1 < self._planned_rounds:
                self.pace.so_far(None)
        if self.pace.minutes:
            self.pace.tell(self.folder.path, rounds, "as many as there may be", progress.log)

    @property
    def _planned_rounds(self) -> int:
        return 1 + max((job.round for job in self.jobs), default=0)

    @property
    def takes_turns(self) -> bool:
        """Whether the timed processes of a block are alive together: on this machine's processors, for some seconds
        each. Containers, GPUs, whole epochs and processes that train together are measured one after the other."""
        is_short = self.options.budget_seconds is not None and self.protocol.warm_up and self.protocol.sampling != "own"
        return is_short and self.gates.runs_here and all(c.world_size == 1 for c in self.contestants)

    def _measured(self, job: Job, progress: Progress) -> Record:
        """A process is measured together with those of its block that are still to be: a timed one in turns, others
        side by side."""
        has_process = self.folder.attempts(job.name) < MOST_ATTEMPTS and self.refusal(job) is None
        slots = self.gates.slots(job.cell.task)
        is_with_others = self.takes_turns if job.purpose == "time" else job.purpose == "memory" and slots > 1
        if job.name not in self.taken and has_process and is_with_others:
            alike = [one for one in self.block if one.purpose == job.purpose and self.is_due(one)]
            together = [one for one in alike if not self.folder.attempts(one.name)]
            # Where the run was killed meanwhile, each is measured alone, so that who did it shows.
            together = together if job in together else [job]
            if job.purpose == "time":
                self.taken = block.records(self, together, slots, progress)
            else:
                self.taken = block.by_name(super()._measured, together, slots, progress)
            progress.doing(f"{title_of(job)}, {job.purpose}, round {job.round + 1}")
        record = self.taken.get(job.name)
        return super()._measured(job, progress) if record is None else record

    def _seconds_of(self, record: Record) -> float | None:
        is_beside = record.purpose == "memory"
        seconds = record.wall_seconds / (self.gates.slots(record.cell.task) if is_beside else 1)
        return seconds if is_beside or (record.timed is not None and record.timed.turns) else None

    def _stands(self, job: Job, record: Record) -> bool:
        is_settled = super()._stands(job, record) and not self.gates.is_of_the_past(job, record)
        return (is_settled or held.is_held(record)) and not replays.is_lost(self, job, record)

    def _is_expected(self, job: Job, record: Record) -> bool:
        return record.state == "rejected" and bool(job.contestant.variant.why_rejected(job.cell.task))

    def measured_peaks(self) -> dict[str, float] | None:
        """Measure the peak rates of this machine's processors; None where contestants run on a GPU or on another
        machine."""
        return peaks.measure(self.threads) if self.options.device == "cpu" else None

    def measured_idle(self) -> energy.Idle:
        """Measure what the idle machine takes, before anything of the run is at work, where something is timed."""
        return energy.idle(energy.counters(self.options.device)) if self.options.time else energy.Idle()

    def description(self) -> dict[str, Any]:
        return {**self.backend.describe(), **depends_on(self.options, self.hashes), "place": self.place()}

    def prepare(self, log: Log) -> None:
        """Make the environments. One that cannot be built makes its cells ``unsupported``."""
        for contestant in self.contestants:
            self.executors[contestant.name] = self.backend.executor(contestant, log)

    def ensure_data(self, task: str, log: Log) -> None:
        """Fetch the task's data set where it is missing: no row waits for another task's."""
        name = TASKS[task].dataset
        if name not in self.data:
            self.data[name] = ensure_data(name, self.options.synthetic, log)
            self.watched.add(store.files(name, self.options.synthetic))

    def _judge_all(self, progress: Progress, task: str) -> None:
        """Judge all contestants on a task, before its first block: so the first rows come soon."""
        unjudged = [c for c in self.contestants if (c.name, task) not in self.gates.verdicts]
        if not unjudged:
            return
        progress.doing(f"gates of {task}")
        self.ensure_data(task, progress.log)

        def judge(contestant: Contestant, fresh: bool) -> None:
            started = Moment()
            record = self.judged(contestant, task, progress.log, fresh)
            outcome = "passed" if record.state == "ok" else outcome_of(record)
            how = "remembered" if self.gates.verdicts[contestant.name, task].cached else about(started.seconds)
            progress.log(f"gate · {task} · {contestant.name}: {outcome} ({how})")

        self.gates.judge_together(unjudged, task, judge, [lambda: fetch_ahead(self.options, progress.log)])

    def judged(self, contestant: Contestant, task: str, log: Log, fresh: bool = False) -> Record:
        """Return the record of the gate's verdict, which is written and remembered. ``fresh``: forget an earlier
        verdict."""
        self.ensure_data(task, log)
        started = Moment()
        verdict = self.gates.judge(contestant, task, log, fresh)
        name = f"{task}.{contestant.name}.gate.{verdict.gate.key[:8]}.json"
        job = Job(contestant, self._cell(contestant, task, gate_cases.BATCH), 0, 0, "gate")
        record = self._record(job, verdict.result(), started, verdict.gate)
        before = self.folder.read(name)
        if before is not None and before.state == record.state:
            return before
        self.folder.write(name, record)
        return record

    def _cell(self, contestant: Contestant, task: str, batch_size: int) -> Cell:
        return plan.cell_of(self.options, contestant, task, batch_size)

    def finished(self, job: Job, request: Request, result: Result, started: Moment, load: Load, log: Log) -> Record:
        is_compared = job.purpose == "time" and request.snapshot is not None and self.options.memory
        replayed = replays.replayed(self, job) if is_compared else None
        if is_compared and result.state == "ok":
            result = replays.after_first_steps(result, request, replayed, job.contestant.variant.own_replays)
        if request.checked is not None and result.state == "ok":
            result = replays.at_steps_drawn(result, request, lambda: replays.step_reference(self.backend, request, log))
        accuracy = _accuracy(self.backend, request, result, job.cell.name, log)
        record = self._record(job, result, started, self.gates.said_of(job), load, accuracy)
        return held.hold(record) if is_compared and replayed is None and record.state == "ok" else record

    def unmeasured(self, job: Job, result: Result, started: Moment) -> Record:
        return self._record(job, result, started, self.gates.said_of(job))

    def refusal(self, job: Job) -> Result | None:
        """Return a result without a process: the gate failed, or an earlier process of this cell showed that it cannot
        run."""
        if (refused := self.gates.refusal(job)) is not None:
            return refused
        if self.protocol.sampling == "own" and job.contestant.variant.own_sampling is None:
            return Result("unsupported", f"{job.contestant.name} {NO_OWN_LOOP}")
        earlier = self.ended.get(job.cell.name)
        if earlier is not None:
            return Result(earlier.state, f"as in round {earlier.block.round + 1}: {earlier.reason}")
        lost = self.unreplayed.get(job.cell.name)
        if lost is not None and job.purpose == "time":
            reason = f"its memory process, which is its untimed replay, ended as {lost.state}: {lost.reason}"
            return Result(lost.state, reason, log_tail=lost.log_tail, interrupted=lost.interrupted)
        return replays.unchecked(self, job)

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
        first = f"after-first-steps.{job.purpose}"
        is_first_time = job.purpose == "time" and job.round == 0
        return plan.request_of(
            job.contestant,
            cell,
            self.protocol,
            mode="time" if job.purpose == "time" else "memory",
            order_seed=int.from_bytes(hashlib.sha256(f"{self.folder.id} {seeds.initial} order".encode()).digest()[:4]),
            noise_multiplier=self._sigma,
            threads=self.threads * job.contestant.world_size,
            world_size=job.contestant.world_size,
            initial_seed=seeds.initial,
            batch_seed=seeds.batches,
            noise_seed=seeds.noise,
            synthetic=options.synthetic,
            epochs=epochs if job.purpose == "time" else 1,
            steps=plan.steps_of(options, cell.task, cell.batch_size),
            budget_seconds=options.budget_seconds,
            turn_seconds=TURN_SECONDS if self.takes_turns else None,
            snapshot=str(self._scratch(job, first)) if is_first_time or job.purpose == "memory" else None,
            checked=str(self._scratch(job, "checked")) if is_first_time and self.protocol.sampling != "own" else None,
            weights=str(self._scratch(job, "weights")) if whole and job.purpose == "time" else None,
        )

    def _hashes_of(self, contestant: Contestant) -> tuple[str, str]:
        return contestant.framework.adapter_hash, self.backend.environment_id(contestant.framework)

    def _hashes_behind(self, job: Job) -> tuple[str, str]:
        adapter, lock = super()._hashes_behind(job)
        return hashlib.sha256((adapter + definition_hash(known_task(job.cell.task))).encode()).hexdigest()[:12], lock

    @property
    def _sigma(self) -> float:
        return self.protocol.noise_multiplier if self.options.sigma is None else self.options.sigma

    def _seeds(self, job: Job) -> Seeds:
        return seeds_of(self.folder.id, self.options.seed, job.round)

    def _scratch(self, job: Job, what: str) -> Path:
        return self.folder.scratch / f"{job.cell.task}.{job.contestant.name}.b{job.cell.batch_size}.{what}.npz"

    def check_unchanged(self, name: str) -> None:
        super().check_unchanged(name)
        if self.folder_hashes[name] != self.by_name[name].framework.folder_hash:
            raise changed(name)

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
        sampling, own_sampling = self.protocol.sampling, job.contestant.variant.own_sampling
        if sampling == "own":
            sampling = own_sampling or "none"
            timed = replace(timed, own_sampling=own_sampling) if timed is not None else None
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
            epsilon=accounting.of_epochs(job.cell, result, sampling, self._sigma, self.protocol.delta),
            accuracy=accuracy,
            probe=self._probe(job, result),
            seeds=self._seeds(job),
            energy=energy.energy_of(result, self.idle),
        )


def seeds_of(run: str, seed: int, number: int) -> Seeds:
    """Return the seeds of a round: the same for all contestants of a block.

    Args:
        run: Id of the run folder.
        seed: The run's option.
        number: The round.
    """
    base = seed * 1000 + number
    # What a worker knows from the start tells it nothing of the batches, which it gets when everything is built.
    drawn = hashlib.sha256(f"{run} {base}".encode()).digest()
    return Seeds(initial=base, batches=int.from_bytes(drawn[:4]) >> 1, noise=base + 1)


def depends_on(options: Options, hashes: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Return what a run depends on wherever it is made.

    Args:
        options: Its options.
        hashes: By contestant: of its code, and of its environment.
    """
    return {
        "options": asdict(options),
        "contestants": {name: {"adapter": adapter, "lock": lock} for name, (adapter, lock) in hashes.items()},
        "tasks": {name: definition_hash(known_task(name)) for name in sorted(options.tasks)},
        "harness": admission.sources_hash(admission.GATE_SOURCES),
    }


def _accuracy(backend: Backend, request: Request, result: Result, name: str, log: Log) -> Accuracy | None:
    """Return the test accuracy after whole epochs, by one evaluator for all. Its failure does not void the times."""
    steps = result.epsilon_steps
    if request.weights is None or result.state != "ok" or steps is None or not Path(request.weights).exists():
        return None
    test = store.folder(request.data, request.synthetic)
    arguments: list[Argument] = ["--task", request.task, "--parameters", Input(Path(request.weights))]
    arguments += ["--x", Input(test, "test_x.npy"), "--y", Input(test, "test_y.npy")]
    try:
        measured = last_json(backend.run_tool(EVALUATE, arguments, log))
    except ToolFault as fault:
        log(f"{name}: no accuracy ({fault})")
        return None
    return Accuracy(test=measured["accuracy"], after_steps=steps)


def fetch_ahead(options: Options, log: Log) -> None:
    """Fetch the next data set that a run lacks. What fails is told when its task has come."""
    names = [TASKS[task].dataset for task in options.tasks]
    with suppress(BadInput):
        missing = [name for name in names if store.describe(name, options.synthetic) is None]
        for name in missing[:1]:
            ensure_data(name, options.synthetic, log)


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


def command_line() -> str:
    """Return the command that this process was started with, without the folder, which is nobody else's business."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        words[at : at + 2] = []
    return "dpbench " + shlex.join(words)

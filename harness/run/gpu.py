"""The short run on a GPU: correctness first, then end to end and layers by importance, until the time is over.

What is not timed (references, gates, memory) may run side by side, as it is mostly start-up; what is timed runs alone.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from harness.analysis import accounting
from harness.data import store as data_store
from harness.environments import unpinned
from harness.environments.executor import ToolFault
from harness.environments.unpinned import Deadline, OutOfTime, UnpinnedBackend, UnpinnedEnvironment
from harness.errors import BadInput
from harness.gate import admission
from harness.plan import e2e as plan
from harness.plan import gpu as gpu_plan
from harness.plan import registry
from harness.plan.e2e import Job
from harness.plan.gpu import AnyJob, Choice, Tier
from harness.plan.layer_registry import LayerContestant
from harness.plan.layers import LayerJob
from harness.plan.registry import Contestant
from harness.run.e2e import Run
from harness.run.frontier import FrontierRun, Search, ending, options_of
from harness.run.gpu_summary import NOT_BEGUN, NOT_ENDED, Key, Outcome, key_of, summary, text
from harness.run.gpu_summary import Place as Where
from harness.run.job_text import outcome_of, title_of
from harness.run.layers import LayerRun
from harness.run.progress import Progress
from harness.run.side_by_side import side_by_side
from harness.store import cache, record
from harness.store.folder import RunFolder, portable
from harness.store.read import SUMMARY
from harness.store.record import Record
from harness.tasks import TASKS
from harness.worker import machine

RECORDS, TEXT = "records.jsonl", "summary.txt"
RESERVE_SECONDS = 3.0
"""Seconds of the time asked for that are kept for ending the run."""
CORES_PER_PROCESS = 3
MOST_SIDE_BY_SIDE = 6
THE_REFERENCE = "the float64 reference"
NO_ACCOUNTANT = (
    "This Python has no dp-accounting: no ε was computed, and the gate compared no contestant's own with it."
)


class GpuRun:
    """``out`` gets three files, rewritten after every record; ``work`` holds what a resumed run goes on from.

    Raises :class:`BadInput` where nothing could be measured.
    """

    def __init__(
        self, choice: Choice, python: Path, seconds: float, out: Path, work: Path | None = None, command: str = ""
    ) -> None:
        if not seconds > RESERVE_SECONDS:
            raise BadInput(f"--seconds is {seconds:g}: it must be above {RESERVE_SECONDS:g}.")
        self.choice, self.seconds, self.out, self.command = choice, seconds, out, command
        self.work = work or out / ".run"
        self.deadline = Deadline(seconds - RESERVE_SECONDS)
        if choice.device == "cuda" and not machine.gpus():
            raise BadInput(
                "run gpu needs a CUDA device, and nvidia-smi sees none on this machine; give --device cpu to make the "
                "same run on the processors."
            )
        chosen = [] if choice.tasks == () else gpu_plan.contestants(choice)
        layered = [] if choice.layers == () else gpu_plan.layer_contestants(choice)
        self.environment = _look(python, chosen, layered)
        self.backend = UnpinnedBackend(self.environment, self.deadline, gpu_plan.LONGEST_SECONDS)
        self.lacking = {n: m for n, m in self.environment.missing.items() if m and n != THE_REFERENCE}
        here = [c for c in chosen if c.framework.name not in self.lacking]
        layers_here = [c for c in layered if c.framework.name not in self.lacking]
        if not here and not layers_here:
            lacks = "; ".join(f"{name} needs {', '.join(what)}" for name, what in self.lacking.items())
            raise BadInput(f"{python} can import none of the chosen frameworks ({lacks}); give another by --python.")
        if lacks_torch := self.environment.missing[THE_REFERENCE]:
            raise BadInput(
                f"{python} lacks {', '.join(lacks_torch)}, with which the float64 reference of every gate is computed; "
                "give another by --python."
            )
        self.devices = self._devices() if choice.device == "cuda" else []
        self.e2e: Run | None = None
        self.layers: LayerRun | None = None
        self.frontier: FrontierRun | None = None
        options, jobs = None, list[Job]()
        self.synthetic = False
        if here:
            names = {TASKS[task].dataset for task in gpu_plan.options(choice, synthetic=True).tasks}
            self.synthetic = any(data_store.describe(name) is None for name in names - {*data_store.MADE})
            options = gpu_plan.options(choice, self.synthetic)
            jobs = plan.jobs(options, here)
            self.e2e = Run(options, here, RunFolder(self.work / "e2e"), command, self.backend)
            self.frontier = self._frontier(here, command)
        if layers_here:
            folder = RunFolder(self.work / "layers")
            self.layers = LayerRun(gpu_plan.layer_options(choice), layers_here, folder, command, self.backend)
        self.tiers = gpu_plan.tiers(choice, options, jobs, self.layers.jobs if self.layers else [])
        self.searches = {
            (task, c.name): NOT_BEGUN
            for task in (self.frontier.options.tasks if self.frontier else ())
            for c in (self.frontier.contestants if self.frontier else ())
        }
        self.records: dict[Key, Record] = {}
        self.lines: dict[Key, str] = {}
        self.referenced = set[str]()
        self.lock = threading.Lock()
        cores = len(os.sched_getaffinity(0))
        is_cuda = choice.device == "cuda"
        self.slots = max(1, min(MOST_SIDE_BY_SIDE, cores // CORES_PER_PROCESS)) if is_cuda else 1

    def _frontier(self, here: list[Contestant], command: str) -> FrontierRun | None:
        """Return the searches for the largest physical batch; None where no task is chosen."""
        choice, tasks = self.choice, gpu_plan.frontier_tasks(self.choice)
        contestants = gpu_plan.frontier_contestants(choice, here)
        if not tasks or not contestants:
            return None
        options = options_of(
            tasks,
            frameworks=tuple(c.name for c in contestants),
            budget_seconds=gpu_plan.SECONDS_PER_CELL,
            device=choice.device,
            threads=choice.threads,
            seed=choice.seed,
            timeout_seconds=gpu_plan.LONGEST_SECONDS,
            synthetic=self.synthetic,
            isolation=record.UNPINNED,
        )
        search = Search(
            gpu_plan.FRONTIER_FIRST,
            resolution=gpu_plan.FRONTIER_RESOLUTION,
            longest_step_seconds=gpu_plan.FRONTIER_STEP_SECONDS,
        )
        budget = None if choice.device == "cuda" else gpu_plan.FRONTIER_BYTES_ON_CPU
        folder = RunFolder(self.work / "frontier")
        made = FrontierRun(options, search, budget, contestants, folder, command, self.backend)
        assert self.e2e is not None
        made.gates.verdicts = self.e2e.gates.verdicts  # judged when their tasks' times were due
        return made

    def _devices(self) -> list[dict[str, object]]:
        """Return what the frameworks say of the device. Raises :class:`BadInput` where none sees one."""
        names = [name for name in ("torch", "jax") if name in self.environment.versions]
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(self.environment.device, names))
        if not any("device" in facts for facts in said):
            whys = "; ".join(f"{facts['framework']}: {facts.get('why_not') or 'built without CUDA'}" for facts in said)
            raise BadInput(
                f"No framework of {self.environment.python} sees a CUDA device ({whys}); give another by --python, or "
                "--device cpu."
            )
        return said

    # ---- the run

    def execute(self, progress: Progress, fresh: bool = False) -> Outcome:
        """Measure what the time suffices for, or what is left of it. A kill at any moment loses at most the processes
        under way."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{error.filename} cannot be made ({error.strerror}); choose another by --out.") from None
        with ExitStack() as stack:
            for part in (self.e2e, self.layers, self.frontier):
                if part is not None:
                    stack.enter_context(part.folder.open(part.description(), fresh))
                    for path in sorted(part.folder.records.glob("*.json")):
                        self._keep(record.read(path)[0])
            progress.begin(sum(len(tier.untimed) + len(tier.timed) for tier in self.tiers))
            try:
                self._prepare(progress)
                for tier in self.tiers:
                    self._measure(tier, progress)
                self._search(progress)
            except OutOfTime:
                progress.log("The time is over.")
            finally:
                self._write()
            return self.outcome()

    def _prepare(self, progress: Progress) -> None:
        """References, data, places: side by side, before any clock runs. First of all what the idle machine takes."""
        if self.e2e is not None:
            self.e2e.idle = self.e2e.measured_idle()
        work: list[Callable[[], object]] = []
        if self.layers is not None:
            layers = self.layers
            work.append(lambda: layers.prepare(progress.log))
        if self.e2e is not None:
            e2e = self.e2e
            work += self._references([t for t in reversed(e2e.options.tasks) if t not in gpu_plan.TODAY], progress)
            work.append(lambda: e2e.prepare(progress.log))
            work += [lambda task=task: e2e.ensure_data(task, progress.log) for task in e2e.options.tasks]  # type: ignore[misc]
        if self.frontier is not None:
            frontier = self.frontier
            work.append(lambda: frontier.prepare(progress.log))
        self._side_by_side(work, len(os.sched_getaffinity(0)))
        if self.e2e is not None:
            self.e2e.peaks = self.e2e.measured_peaks()

    def _references(self, tasks: Sequence[str], progress: Progress) -> list[Callable[[], object]]:
        """Return the work of those that no earlier call has returned."""
        new = [task for task in dict.fromkeys(tasks) if task not in self.referenced]
        self.referenced.update(new)
        return [lambda task=task: self._reference(task, progress) for task in new]  # type: ignore[misc]

    def _reference(self, task: str, progress: Progress) -> None:
        with suppress(ToolFault):  # the gate tries again, and says why not
            admission.reference(task, progress.log, self.backend.run_tool)

    def _measure(self, tier: Tier, progress: Progress) -> None:
        pairs = {
            (job.contestant.name, job.cell.task): job for job in (*tier.untimed, *tier.timed) if isinstance(job, Job)
        }
        # The references of the tasks of today take long: what is more important does not wait for them.
        self._side_by_side(self._references([task for _, task in pairs], progress), len(os.sched_getaffinity(0)))
        unjudged = [job for pair, job in pairs.items() if self.e2e is not None and pair not in self.e2e.gates.verdicts]
        self._side_by_side([lambda job=job: self._judge(job, progress) for job in unjudged], self.slots)  # type: ignore[misc]
        for job in unjudged if self.slots > 1 else []:
            # Its neighbours may be the reason: alone, it gets another chance.
            assert self.e2e is not None
            if self.e2e.gates.may_blame_neighbours(job.contestant, job.cell.task):
                self._judge(job, progress, fresh=True)
        self._side_by_side([lambda job=job: self._record(job, progress) for job in tier.untimed], self.slots)  # type: ignore[misc]
        for timed in tier.timed:
            self._record(timed, progress)

    def _judge(self, job: Job, progress: Progress, fresh: bool = False) -> None:
        assert self.e2e is not None
        self.deadline.check()
        progress.log(f"gate · {job.cell.task} · {job.contestant.name}")
        self._keep(self.e2e.judged(job.contestant, job.cell.task, progress.log, fresh))
        self._write()

    def _record(self, job: AnyJob, progress: Progress) -> None:
        """The job's record, made or found. Raises :class:`OutOfTime` where there is none and the time is over."""
        made: Record
        if isinstance(job, LayerJob):
            assert self.layers is not None
            made, is_old = self.layers.recorded(job, progress)
        else:
            assert self.e2e is not None
            made, is_old = self.e2e.recorded(job, progress)
        self._keep(made)
        with self.lock:
            progress.doing(f"{title_of(job)}, {job.purpose}")
            progress.done(outcome_of(made), counts=False)
        if not is_old:
            self._write()

    def _search(self, progress: Progress) -> None:
        """The memory frontier, contestant by contestant, each process alone."""
        if self.frontier is None:
            return
        frontier = self.frontier

        def probed(contestant: Contestant, task: str, size: int) -> Record:
            made, is_old = frontier.recorded(frontier.probe_of(contestant, task, size), progress)
            self._keep(made)
            progress.doing(f"{task} · {contestant.name} · largest batch · {size}")
            if not is_old:
                self._write()
            return made

        for task, name in self.searches:
            self.searches[task, name] = NOT_ENDED
            found = frontier.find(task, functools.partial(probed, frontier.by_name[name], task))
            self.searches[task, name] = ending(*found)

    def _side_by_side(self, work: Sequence[Callable[[], object]], slots: int) -> None:
        """All of it; the first error is raised once what is under way has ended."""
        self.backend.side_by_side = slots > 1
        try:
            side_by_side(work, slots, (OutOfTime,), self.deadline.end)
        finally:
            self.backend.side_by_side = False

    # ---- what it leaves

    def _keep(self, made: Record) -> None:
        with self.lock:
            self.records[key_of(made)] = made
            self.lines[key_of(made)] = portable(made)

    def outcome(self) -> Outcome:
        jobs = [job for tier in self.tiers for job in (*tier.untimed, *tier.timed)]
        gates = dict.fromkeys((j.cell.task, j.contestant.name) for j in jobs if isinstance(j, Job))
        pins = dict[str, str]()
        for framework in {job.contestant.framework.name: job.contestant.framework for job in jobs}.values():
            lines = [
                *registry.pins(framework.requirements),
                *registry.pins(framework.requirements_without_dependencies),
            ]
            pins |= {name: version for name, _, version in (line.partition("==") for line in lines) if version}
        threads = self.choice.threads or len(os.sched_getaffinity(0))
        where = Where(
            device=self.choice.device,
            python=str(self.environment.python),
            versions=self.environment.versions,
            pins=pins,
            lacking=self.lacking,
            devices=self.devices,
            machine={**machine.describe(), "threads": threads},
            synthetic=self.synthetic,
        )
        notes = [] if accounting.available() else [NO_ACCOUNTANT]
        if self.slots > 1:
            notes.append(f"Gates and memory ran up to {self.slots} at once; every timed process ran alone.")
        return Outcome(
            place=where,
            command=self.command,
            seconds_asked=self.seconds,
            seconds_used=self.deadline.used,
            planned=[(job.cell, (job.cell.name, job.purpose, job.round)) for job in jobs],
            gates=list(gates),
            records=dict(self.records),
            declared=frozenset(
                (j.cell.task, j.contestant.name)
                for j in jobs
                if isinstance(j, Job) and j.contestant.variant.why_rejected(j.cell.task)
            ),
            notes=notes,
            searches=dict(self.searches),
        )

    def _write(self) -> None:
        with self.lock:
            outcome = self.outcome()
            lines = [self.lines[key] for key in sorted(self.lines)]
            cache.write_atomically(self.out / RECORDS, "".join(f"{line}\n" for line in lines).encode())
            cache.write_atomically(self.out / SUMMARY, (json.dumps(summary(outcome), indent=1) + "\n").encode())
            cache.write_atomically(self.out / TEXT, text(outcome).encode())


def _look(python: Path, chosen: Sequence[Contestant], layered: Sequence[LayerContestant]) -> UnpinnedEnvironment:
    """Return what ``python`` has of what the contestants and the references import."""
    files: dict[str, tuple[Path, ...]] = {THE_REFERENCE: unpinned.REFERENCES}
    every: list[Contestant | LayerContestant] = [*chosen, *layered]
    for c in every:
        files[c.framework.name] = (*files.get(c.framework.name, ()), gpu_plan.first_file(c))
    return unpinned.look(python, files)

"""The memory frontier: the largest physical batch that fits a budget, by doubling and bisection, and the throughput
there. Every probe is one process and one record, so that a search goes on where it stopped."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.environments.backend import Backend, Log
from harness.environments.executor import AnyRequest, Event, Executor, Limits
from harness.environments.unavailable import Unavailable
from harness.errors import BadInput
from harness.plan import e2e as plan
from harness.plan.e2e import Job, Options
from harness.plan.registry import Contestant
from harness.run.e2e import Run
from harness.run.progress import Progress
from harness.run.session import Summary
from harness.store.folder import RunFolder
from harness.store.record import Cell, Probe, Record
from harness.tasks import TASKS
from harness.worker import machine, memory
from harness.worker.request import Request
from harness.worker.result import Probe as Probed
from harness.worker.result import Result

PROTOCOL = "frontier"
WORKER = "harness.worker.frontier"


@dataclass(frozen=True)
class Search:
    """``first`` size; ``ceiling``, the largest one; ``resolution``: the bisection ends when the gap between what fits
    and what does not is at most this share of the former; ``longest_step_seconds``: no size is tried at which a step
    should take longer."""

    first: int = 64
    ceiling: int | None = None
    resolution: float = 0.05
    longest_step_seconds: float = 20.0


@dataclass(frozen=True)
class Fit:
    """Outcome of a probe of one size: whether it fits, and seconds per step where it does."""

    fits: bool
    step_seconds: float = 0.0


def largest_fit(seen: Mapping[int, Fit]) -> int:
    """Return the largest size that fits below every one that does not; 0 where there is none."""
    return max((size for size, fit in seen.items() if fit.fits and size < _smallest_misfit(seen)), default=0)


def _smallest_misfit(seen: Mapping[int, Fit]) -> float:
    return min((size for size, fit in seen.items() if not fit.fits), default=float("inf"))


def next_size(seen: Mapping[int, Fit], search: Search, ceiling: int) -> int | None:
    """Return the size to probe next, or None where the search has ended. A pure function of what was seen: that is what
    makes a search resume.

    Doubling from ``search.first`` (halving while nothing fits), then bisection.
    """
    fit, misfit = largest_fit(seen), _smallest_misfit(seen)
    if not seen:
        return min(search.first, ceiling)
    if misfit == float("inf"):
        larger = min(2 * fit, ceiling)
        # Seconds grow at least in proportion, so this is a lower bound of what the step would take.
        too_slow = seen[fit].step_seconds * larger / fit > search.longest_step_seconds
        return None if fit >= ceiling or too_slow else larger
    gap = int(misfit) - fit
    if fit == 0:
        return int(misfit) // 2 or None
    return None if gap <= max(1.0, search.resolution * fit) else fit + gap // 2


_ENDINGS = {"oom": "", "ok": " at least; no larger size was tried"}


def ending(sizes: Mapping[int, Fit], state: str) -> str:
    """Return what a search found, in words; ``state`` of its last probe."""
    size = largest_fit(sizes)
    return (f"batch {size}" if size else "nothing fits") + _ENDINGS.get(state, f", then {state}")


class Budgeted:
    """An executor whose processes may grow by ``budget_bytes`` above their start-up, and are out of memory beyond."""

    def __init__(self, executor: Executor, budget_bytes: int) -> None:
        self.executor = executor
        self.name, self.identity = executor.name, executor.identity
        self.budget_bytes = budget_bytes

    def run(self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None]) -> Result:
        """Return the result, judged by the budget. The process's limit is coarser (the kernel does not charge pages
        that libraries share), so the peak that the worker measured has the last word."""
        result = self.executor.run(request, replace(limits, growth_bytes=self.budget_bytes), on_event)
        growth = result.memory.get(memory.GROWTH_WITH_COMPILE, 0)
        if result.state == "ok" and growth > self.budget_bytes:
            reason = f"peak growth {_mib(growth)} is above the budget of {_mib(self.budget_bytes)} above start-up."
            return replace(result, state="oom", reason=reason)
        return result


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


class FrontierRun(Run):
    """One run folder's searches. ``budget_bytes`` above start-up, for the CPU only: on CUDA it is the device's memory.

    ``options.rounds`` further processes at every frontier, which must fit as well, give the throughput;
    ``options.budget_seconds`` is how long each process times steps.
    """

    def __init__(
        self,
        options: Options,
        search: Search,
        budget_bytes: int | None,
        contestants: list[Contestant],
        folder: RunFolder,
        command: str,
        backend: Backend,
    ) -> None:
        super().__init__(options, contestants, folder, command, backend)
        check(search, budget_bytes, options.device)
        self.search = search
        self.budget_bytes = budget_bytes
        self.stage: dict[str, str] = {}

    def _begin(self, progress: Progress) -> None:
        self.prepare(progress.log)
        progress.begin(len(self.contestants) * len(self.options.tasks), "gate")
        for task in self.options.tasks:
            self._judge_all(progress, task)

    def _measure_all(self, progress: Progress) -> Summary:
        """Make all searches and measure their throughput, or what is left of them."""
        for task in self.options.tasks:
            self._explore(task, progress)
        return self.summary()

    def _explore(self, task: str, progress: Progress) -> None:
        rng = random.Random(f"dpbench frontier {self.options.seed} {task}")
        order = list(self.contestants)
        rng.shuffle(order)
        progress.begin(len(order), f"frontier {task}")
        seen: dict[str, dict[int, Fit]] = {}

        def probe(contestant: Contestant, size: int, number: int, place: int) -> Record:
            job = self.probe_of(contestant, task, size, number, place)
            progress.doing(f"{task} · {contestant.name} · batch {size}")
            return self.recorded(job, progress)[0]

        for place, contestant in enumerate(order):
            sizes, state = self.find(task, lambda size, c=contestant, p=place: probe(c, size, 0, p))  # type: ignore[misc]
            if largest_fit(sizes) and state in {"ok", "oom"}:
                seen[contestant.name] = sizes
            progress.log(f"{task} · {contestant.name}: {ending(sizes, state)}")
            progress.done(state)
        rounds = [(number, c) for number in range(1, self.options.rounds + 1) for c in _shuffled(order, rng)]
        # What fitted once need not fit again: a frontier is a size that fits in every round. Where one does not, all
        # rounds begin anew at a size that is smaller by the search's resolution.
        measured: set[tuple[str, int, int]] = set()
        while missing := [
            (number, c, size)
            for number, c in rounds
            if (size := largest_fit(seen.get(c.name, {}))) and (c.name, size, number) not in measured
        ]:
            progress.begin(len(missing), f"throughput {task}")
            for place, (number, contestant, size) in enumerate(missing):
                mine, state = seen[contestant.name], "left out"
                if size == largest_fit(mine):
                    measured.add((contestant.name, size, number))
                    state = probe(contestant, size, number, place % len(seen)).state
                if state == "oom":
                    smaller = size - max(1, int(self.search.resolution * size))
                    mine |= {size: Fit(False)} | ({smaller: Fit(True)} if smaller > 0 else {})
                    progress.log(
                        f"{task} · {contestant.name}: batch {size} did not fit again; next is {largest_fit(mine)}"
                    )
                progress.done(state)

    def probe_of(self, contestant: Contestant, task: str, size: int, number: int = 0, place: int = 0) -> Job:
        """Return the probe of one batch size."""
        return Job(contestant, self._cell(contestant, task, size), number, place, "probe")

    def find(self, task: str, probe: Callable[[int], Record]) -> tuple[dict[int, Fit], str]:
        """Return (what the sizes that were tried said; how the search ended: the state of its last probe)."""
        ceiling = min(self.search.ceiling or TASKS[task].train_size, TASKS[task].train_size)
        seen: dict[int, Fit] = {}
        state = "ok"
        while (size := next_size(seen, self.search, ceiling)) is not None:
            record = probe(size)
            state = record.state
            if state not in {"ok", "oom"}:
                break
            seen[size] = fit_of(record)
        return seen, state

    def _cell(self, contestant: Contestant, task: str, size: int) -> Cell:
        return plan.cell_of(self.options, contestant, task, size).model_copy(update={"kind": "frontier"})

    def description(self) -> dict[str, Any]:
        return {**super().description(), "search": asdict(self.search), "budget_bytes": self.budget_bytes}

    def prepare(self, log: Log) -> None:
        for contestant in self.contestants:
            executor = self.backend.executor(contestant, log, WORKER)
            if not isinstance(executor, Unavailable) and self.budget_bytes is not None:
                executor = Budgeted(executor, self.budget_bytes)
            self.executors[contestant.name] = executor

    def request(self, job: Job) -> Request:
        return replace(super().request(job), mode="probe", epochs=1, steps=None, snapshot=None, weights=None)

    def _probe(self, job: Job, result: Result) -> Probe | None:
        if job.purpose != "probe":
            return None
        return Probe(
            stage="throughput" if job.round else "search",
            budget_bytes=self.budget_bytes,
            device_bytes=device_bytes() if self.options.device == "cuda" else None,
            **vars(result.probe or Probed()),
        )


def fit_of(record: Record) -> Fit:
    """Return what a probe's record, ``ok`` or ``oom``, says of its size."""
    seconds = record.probe.step_seconds if record.probe else []
    return Fit(record.state == "ok", min(seconds, default=0.0))


def _shuffled(contestants: Sequence[Contestant], rng: random.Random) -> list[Contestant]:
    order = list(contestants)
    rng.shuffle(order)
    return order


def device_bytes() -> int | None:
    """Return all memory of the first GPU, as the driver's tool says; None where it says nothing."""
    for line in machine.gpus():
        _, size, *_ = line.split(",")
        return int(size.split()[0]) * 2**20
    return None


def check(search: Search, budget_bytes: int | None, device: str) -> None:
    """Raise :class:`BadInput` with the value, the rule and the remedy."""
    if device == "cpu" and (budget_bytes is None or budget_bytes < 1):
        raise BadInput("The memory budget must be above 0: say --budget 1.5 for 1.5 GiB above start-up.")
    if device == "cuda" and budget_bytes is not None:
        raise BadInput("On CUDA the budget is the device's memory: leave --budget out.")
    if search.first < 1:
        raise BadInput(f"--first is {search.first}: a batch has at least 1 example.")
    if search.ceiling is not None and search.ceiling < search.first:
        raise BadInput(
            f"--largest is {search.ceiling}, under the first size {search.first}; raise it, or lower --first."
        )
    if not 0.0 <= search.resolution < 1.0:
        raise BadInput(f"--resolution is {search.resolution}: it is a share of the batch size, at least 0 and below 1.")
    if not 0.0 < search.longest_step_seconds < math.inf:
        raise BadInput(f"--longest-step is {search.longest_step_seconds}: it must be above 0 seconds and finite.")


def options_of(tasks: Sequence[str], **changes: Any) -> Options:
    """Options of a frontier run; the sizes are the search's affair. Raises :class:`BadInput`."""
    options = plan.preset("smoke", tasks=tuple(tasks), batch_sizes=(1,), **changes)
    return replace(options, protocol=PROTOCOL, memory=False)

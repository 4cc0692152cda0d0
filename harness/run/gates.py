"""Tells what the gate says of a run's contestants: judged once for each task, asked for ever after."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from harness.environments.backend import Backend, Log
from harness.environments.executor import Executor, Limits, Venv
from harness.environments.unavailable import Unavailable
from harness.gate import admission
from harness.gate.admission import Verdict
from harness.plan.e2e import Job, Options
from harness.plan.gpu import TODAY
from harness.plan.registry import Contestant
from harness.run.session import ENDS_THE_RUN, killer, unforeseen
from harness.run.side_by_side import side_by_side
from harness.store.folder import MOST_ATTEMPTS, RunFolder
from harness.store.record import Gate, Record
from harness.worker.result import Result

Judge = Callable[[Contestant, bool], None]
"""Judges a contestant and tells of it; the flag: an earlier verdict is forgotten."""


@dataclass
class Gates:
    """Verdicts by contestant and task. ``executors``: made after this object; ``unchanged``: raises where a
    contestant's code is no longer what it was when the run began; ``longest``: seconds of a contestant's longest
    gate."""

    options: Options
    backend: Backend
    limits: Limits
    threads: int
    folder: RunFolder
    executors: Mapping[str, Executor | Unavailable]
    unchanged: Callable[[str], None]
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)

    def judge(self, contestant: Contestant, task: str, log: Log, fresh: bool = False) -> Verdict:
        """Return the verdict, which is kept. ``fresh``: forget an earlier one."""
        verdict = self.verdicts[contestant.name, task] = self._judge(contestant, task, log, fresh)
        return verdict

    def _judge(self, contestant: Contestant, task: str, log: Log, fresh: bool) -> Verdict:
        executor = self.executors[contestant.name]
        device, small = self.options.device, self.options.small_gate
        identity = "" if isinstance(executor, Unavailable) else executor.identity
        key = admission.key_of(contestant, task, device, self.threads, identity, small)
        nothing = Gate(passed=False, key=key, checks=[])
        if isinstance(executor, Unavailable):
            return Verdict("unsupported", executor.reason, nothing, {})
        if reason := contestant.variant.why_unsupported(task):
            return Verdict("unsupported", reason, nothing, {})
        with self.folder.attempt(f"{task}.{contestant.name}.gate") as killed:
            try:
                if killed < MOST_ATTEMPTS:
                    self.unchanged(contestant.name)
                    limits, threads, run_tool = self.limits, self.threads, self.backend.run_tool
                    return admission.judge(
                        contestant, task, executor, limits, device, threads, log, run_tool, fresh, small
                    )
                result = killer(killed)
            except ENDS_THE_RUN:
                raise
            except Exception as error:
                result = unforeseen(error)
            return Verdict(result.state, result.reason, nothing, {}, result.log_tail)

    @property
    def runs_here(self) -> bool:
        """Return whether all workers are processes of this machine's processors, and none a container."""
        made = [e for e in self.executors.values() if not isinstance(e, Unavailable)]
        return self.options.device == "cpu" and all(type(e) is Venv for e in made)

    def slots(self, task: str) -> int:
        """Return how many processes without a clock may be at work at once: those of the tasks of today need the
        machine's memory."""
        return max(1, len(os.sched_getaffinity(0)) // self.threads) if self.runs_here and task not in TODAY else 1

    def judge_together(
        self, contestants: Sequence[Contestant], task: str, judge: Judge, last: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Have each judged, several at once where there are processors for it; where neighbours may be the reason of a
        failure, once more alone. ``last``: begun after them, beside those that are still under way."""
        slots = self.slots(task)

        def timed(contestant: Contestant) -> None:
            began = time.monotonic()
            judge(contestant, False)
            self.longest[contestant.name] = max(time.monotonic() - began, self.longest.get(contestant.name, 0.0))

        # The longest first: who compiles in every case, who took long before, who has privacy to be checked.
        by_length = sorted(
            contestants,
            key=lambda c: (c.variant.static_shapes, self.longest.get(c.name, 0.0), c.variant.private),
            reverse=True,
        )
        work: list[Callable[[], None]] = [partial(timed, c) for c in by_length]
        side_by_side([*work, *last], slots)
        for contestant in contestants if slots > 1 else []:
            if self.may_blame_neighbours(contestant, task):
                judge(contestant, True)

    def may_blame_neighbours(self, contestant: Contestant, task: str) -> bool:
        """Return whether a verdict that was made beside others is to be made again alone: it did not pass, and nobody
        expected it."""
        verdict = self.verdicts[contestant.name, task]
        is_new = not verdict.passed and verdict.state != "unsupported" and not verdict.cached
        return is_new and not contestant.variant.why_rejected(task)

    def of(self, job: Job) -> Verdict:
        """Return the verdict on the job's contestant at its task."""
        return self.verdicts[job.contestant.name, job.cell.task]

    def said_of(self, job: Job) -> Gate:
        """Return what the record of a measurement says of its gate, whose checks stand in a record of their own."""
        gate = self.of(job).gate
        return Gate(passed=gate.passed, key=gate.key, checks=[], judged_as=gate.judged_as)

    def refusal(self, job: Job) -> Result | None:
        """Return a result without a process, where the gate did not pass."""
        verdict = self.of(job)
        if verdict.state != "ok":
            return verdict.result()
        if verdict.gate.passed:
            return None
        known = job.contestant.variant.why_rejected(job.cell.task)
        finding = f"; known finding: {known}" if known else ""
        return Result("rejected", f"by the gate: {admission.failures(verdict.gate)}{finding}")

    def is_of_the_past(self, job: Job, record: Record) -> bool:
        """Return whether a record has no measurement because its gate could not run or failed, though by now the gate
        passes."""
        return record.gate is not None and not record.gate.passed and self.of(job).passed

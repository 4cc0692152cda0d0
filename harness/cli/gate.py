"""``dpbench gate``: judges contestants and prints a table of checks."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.cli import options
from harness.environments import memory_limit
from harness.environments.backend import check_device, check_threads, default_threads
from harness.environments.executor import Limits
from harness.environments.unavailable import Unavailable
from harness.environments.venv import VenvBackend
from harness.errors import BadInput, did_you_mean
from harness.gate import admission
from harness.gate.admission import Verdict
from harness.gate.sampling import sampler_checks
from harness.paths import INSTALLED
from harness.plan import registry
from harness.plan.registry import Contestant
from harness.store.record import GateCheck
from harness.tasks import GATE_TASKS, PAPER_TASKS, TASKS
from harness.worker.gate.check import FINDING

MUTANTS = "mutants"
EXACT = f"{MUTANTS}-exact"
"""Prefix of the correct variants among the mutants: they show that the others fail for their fault alone."""
NARROW = {"adapter", "task", "error", "limit", "verdict"}
WIDTH = 150
"""Columns of a table that goes to a file."""
MUTANT_TASKS = ("mnist-cnn", "imdb-embedding", "imdb-lstm", *GATE_TASKS)
"""A mutant is judged on the first of these that its fault can show on."""


def judge_all(
    frameworks: tuple[str, ...] | None,
    tasks: tuple[str, ...] | None,
    mutants: bool,
    fresh: bool,
    device: str,
    threads: int | None,
    every_check: bool,
    as_json: bool,
    several: tuple[tuple[int, ...], tuple[str, ...] | None] | None = None,
) -> int:
    """Exit code: 0 where every verdict is the expected one, 1 where one is not, 3 where there is none because a gate
    crashed or could not be installed. Expected is that a contestant passes, except where it declares the fault for
    which it must be rejected (with ``mutants``: every wrong one is rejected). ``several``: numbers of processes that
    train together, and the ways in which they do (None: all); None: contestants of one process."""
    from rich.console import Console

    from harness.run.progress import Progress

    check_device(device)
    if threads is not None:
        check_threads(threads)
    if frameworks == () or tasks == ():
        what = "frameworks" if frameworks == () else "tasks"
        raise BadInput(f"--{what} names nothing: leave it out, or name at least one.")
    known = [*TASKS, *GATE_TASKS]
    for task in tasks or ():
        if task not in known:
            raise BadInput(f"There is no task {task!r}{did_you_mean(task, known)}; choose from {', '.join(known)}.")
    if mutants and INSTALLED:
        raise BadInput("--mutants judges adapters of dpbench's tests; run it in a checkout of dpbench.")
    if mutants and frameworks:
        raise BadInput(f"--mutants judges all wrong adapters and no framework; leave out --frameworks {frameworks[0]}.")
    if several is not None:
        contestants = registry.ranked(frameworks, *several, hidden=mutants)
    else:
        contestants = registry.select([f"{MUTANTS}:all"] if mutants else frameworks, hidden=mutants)
    if mutants and tasks is None:
        pairs = [(c, next(t for t in MUTANT_TASKS if c.variant.why_unsupported(t) is None)) for c in contestants]
    else:
        pairs = [(c, t) for t in tasks or PAPER_TASKS for c in contestants]
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else WIDTH)
    judged: list[Judged] = []
    with Progress(console, quiet=as_json) as progress:
        progress.begin(len(pairs), "gate")
        for contestant, task in pairs:
            progress.doing(f"{task} · {contestant.name}")
            one = Judged(contestant, task, judge_one(contestant, task, device, threads, progress, fresh))
            judged.append(one)
            progress.done(one.word)
    sampler = [GateCheck(**check) for check in sampler_checks()]
    rows = table_rows(judged, sampler, every_check)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows, console)
        console.print(summary(judged), markup=False)
    if not all(check.passed for check in sampler) or any(one.is_finding for one in judged):
        return options.FINDING
    return 0 if all(one.as_expected for one in judged) else options.CELL_FAILED


def judge_one(
    contestant: Contestant,
    task: str,
    device: str,
    threads: int | None,
    progress: Any,
    fresh: bool,
    small: bool = False,
) -> Verdict:
    """Return the verdict on one contestant and task. ``small``: as :func:`admission.judged_task` has it."""
    from harness.store.record import Gate

    nothing = Gate(passed=False, key="", checks=[])
    if reason := contestant.variant.why_unsupported(task):
        return Verdict("unsupported", reason, nothing, {})
    backend = VenvBackend()
    executor = backend.executor(contestant, progress.log)
    if isinstance(executor, Unavailable):
        return Verdict("crashed", executor.reason, nothing, {})
    limits = Limits(memory_limit.default_limit(), admission.TIMEOUT_SECONDS)
    cores = threads or default_threads()
    log, run_tool = progress.log, backend.run_tool
    return admission.judge(contestant, task, executor, limits, device, cores, log, run_tool, fresh, small)


@dataclass(frozen=True)
class Judged:
    """A verdict on a contestant and a task, held against what is expected of it."""

    contestant: Contestant
    task: str
    verdict: Verdict

    @property
    def known_fault(self) -> str | None:
        """The reason why it must be rejected, or None where it must pass."""
        if self.contestant.framework.name == MUTANTS and not self.contestant.name.startswith(EXACT):
            return self.contestant.variant.title
        return self.contestant.variant.why_rejected(self.task)

    @property
    def word(self) -> str:
        if self.verdict.state != "ok":
            return self.verdict.state
        return "passed" if self.verdict.gate.passed else "rejected"

    @property
    def is_finding(self) -> bool:
        """Return whether there is a verdict, and it is not the expected one."""
        return self.word in {"passed", "rejected"} and not self.as_expected

    @property
    def as_expected(self) -> bool:
        """Return whether the verdict is the expected one; ``unsupported``, which an adapter declares, is."""
        return self.word in {"unsupported", "rejected" if self.known_fault else "passed"}


def summary(judged: Sequence[Judged]) -> str:
    """Return how many of each verdict, and every verdict that is not the expected one."""
    counts = Counter(one.word for one in judged)
    known = sum(one.word == "rejected" and one.as_expected for one in judged)
    text = ", ".join(f"{count} {word}" for word, count in counts.items())
    text += f" ({known} of the rejected as declared)" if known else ""
    findings = [
        f"{one.contestant.name} on {one.task} is {one.word}"
        + (f", though it must be rejected: {one.known_fault}" if one.known_fault else "")
        for one in judged
        if not one.as_expected
    ]
    return f"{text}. " + (
        f"Not as expected: {'; '.join(findings)}." if findings else "Every verdict is the expected one."
    )


def table_rows(judged: Sequence[Judged], sampler: Sequence[GateCheck], every_check: bool) -> list[dict[str, Any]]:
    """Return a row per contestant and task, or with ``every_check`` per check. What a contestant cannot run for one and
    the same reason on several tasks is one row."""
    rows = [_row("harness", "poisson sampling", check, "") for check in sampler]
    without: dict[tuple[str, str, str], list[str]] = {}
    for one in judged:
        if one.word in {"passed", "rejected"}:
            rows += _rows(one, every_check)
        else:
            key = (one.contestant.name, one.word, one.verdict.reason or "")
            if key not in without:
                nothing = GateCheck(check="-", error=None, limit=None, passed=False)
                rows.append(_row(one.contestant.name, one.task, nothing, key[-1]) | {"verdict": one.word})
            without.setdefault(key, []).append(one.task)
    for row in rows:
        tasks = without.get((row["adapter"], row["verdict"], row["detail"]), [])
        row["task"] = ", ".join(tasks) or row["task"]
    return rows


def _rows(one: Judged, every_check: bool) -> list[dict[str, Any]]:
    """Return the rows of a contestant: if it passed, the update nearest its limit; else the first update that failed,
    which says most of what is wrong, or the failed check farthest beyond its own; the others are counted."""
    name, checks = one.contestant.name, one.verdict.gate.checks
    if every_check:
        return [_row(name, one.task, check, "") for check in checks]
    failed = [check for check in checks if not check.passed]
    if not failed:
        count = f"all of {len(checks)} checks" + (", remembered" if one.verdict.cached else "")
        if one.known_fault:
            count += f"; must be rejected: {one.known_fault}"
        count += "".join(f"; {c.detail.partition(';')[0]}" for c in checks if c.passed and c.detail.startswith(FINDING))
        return [_row(name, one.task, max(checks, key=_nearness), count)]
    updates = [check for check in failed if check.check.startswith("update") and check.error is not None]
    worst = updates[0] if updates else max(failed, key=_excess)
    detail = f"{len(failed)} of {len(checks)} checks failed: {', '.join(_groups(failed))}"
    told = worst.detail.partition("; relative L2")
    if worst.error is None or (updates and told[1]):
        detail = f"{told[0]}; {detail}"
    if one.known_fault:
        detail += f"; as declared: {one.known_fault}"
    return [_row(name, one.task, worst, detail)]


def _groups(checks: Sequence[GateCheck]) -> dict[str, None]:
    """Return what the names of the checks begin with, each once."""
    return dict.fromkeys(check.check.partition(":")[0] for check in checks)


def _row(name: str, task: str, check: GateCheck, note: str) -> dict[str, Any]:
    return {
        "adapter": name,
        "task": task,
        "check": check.check,
        "error": check.error,
        "limit": check.limit,
        "verdict": "passed" if check.passed else "rejected",
        "detail": note or check.detail,
    }


def _nearness(check: GateCheck) -> float:
    """Error over limit, of the updates: 1 is at the limit. The sensitivity of a right adapter is always at its own."""
    return (check.error or 0.0) / check.limit if check.limit and check.check.startswith("update") else 0.0


def _excess(check: GateCheck) -> float:
    """Error over limit; a check without a number counts only where no other failed."""
    if check.error is None or check.limit is None:
        return 0.0
    return check.error / check.limit if check.limit else math.inf


def _print(rows: list[dict[str, Any]], console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    view = Table(
        title="Admission gate (passed: the update nearest its limit; rejected: the first wrong update, else the worst)",
        title_justify="left",
    )
    for title in ("adapter", "task", "check", "error", "limit", "verdict", "detail"):
        is_number = title in {"error", "limit"}
        view.add_column(title, justify="right" if is_number else "left", overflow="fold", no_wrap=title in NARROW)
    for row in rows:
        numbers = ["-" if row[k] is None else f"{row[k]:.2e}" for k in ("error", "limit")]
        colour = {"passed": "green", "rejected": "red"}.get(row["verdict"], "yellow")
        verdict, task = Text(row["verdict"], style=colour), row["task"].replace(", ", "\n")
        view.add_row(row["adapter"], task, Text(row["check"]), *numbers, verdict, Text(row["detail"]))
    console.print(view)

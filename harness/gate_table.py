"""``dpbench gate``: judges contestants and prints a table of checks."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from harness import env, gatekeeper, limits, registry
from harness.errors import BadInput
from harness.gate_sampling import sampler_checks
from harness.gatekeeper import Verdict
from harness.isolation import Limits, Venv
from harness.record import GateCheck
from harness.registry import Contestant
from harness.run import check_device
from harness.tasks import PAPER_TASKS, TASKS

MUTANTS = "mutants"
EXACT = f"{MUTANTS}-exact"
"""Their variants that begin so are right: they show that the others fail for their fault alone."""
NARROW = {"adapter", "task", "error", "limit", "verdict"}
WIDTH = 150
"""Columns of a table that goes to a file."""
MUTANT_TASKS = ("mnist-cnn", "imdb-embedding", "imdb-lstm")
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
) -> int:
    """Exit code: 0 where every contestant passed (with ``mutants``: every mutant was rejected), else 1."""
    from rich.console import Console

    from harness.progress import Progress

    check_device(device)
    for task in tasks or ():
        if task not in TASKS:
            raise BadInput(f"There is no task {task!r}; choose from {', '.join(TASKS)}.")
    contestants = registry.select([f"{MUTANTS}:all"] if mutants else frameworks, hidden=mutants)
    if mutants and tasks is None:
        pairs = [(c, next(t for t in MUTANT_TASKS if t not in c.variant.unsupported)) for c in contestants]
    else:
        pairs = [(c, t) for t in tasks or PAPER_TASKS for c in contestants]
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else WIDTH)
    verdicts: dict[tuple[str, str], Verdict] = {}
    with Progress(console, quiet=as_json) as progress:
        progress.begin(len(pairs), "gate")
        for contestant, task in pairs:
            progress.doing(f"{task} · {contestant.name}")
            verdict = _judge(contestant, task, device, threads, progress, fresh)
            verdicts[contestant.name, task] = verdict
            progress.done(_word(verdict))
    sampler = [GateCheck.model_validate(check) for check in sampler_checks()]
    rows = [_row("harness", "poisson sampling", check, "") for check in sampler]
    rows += [row for (name, task), v in verdicts.items() for row in _rows(name, task, v, every_check)]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows, console)
    is_sampler_right = all(check.passed for check in sampler)
    return int(not is_sampler_right or not all(_as_wanted(name, verdict) for (name, _), verdict in verdicts.items()))


def _judge(contestant: Contestant, task: str, device: str, threads: int | None, progress: Any, fresh: bool) -> Verdict:
    from harness.record import Gate

    nothing = Gate(passed=False, key="", checks=[])
    if reason := contestant.variant.why_unsupported(task):
        return Verdict("unsupported", reason, nothing, {})
    try:
        python = env.ensure(contestant.framework, progress.say).python
    except env.EnvironmentFault as fault:
        return Verdict("unsupported", str(fault), nothing, {})
    place = Venv(python, contestant.variant.environment)
    bounds = Limits(limits.default_limit(), gatekeeper.TIMEOUT_SECONDS)
    cores = threads or len(os.sched_getaffinity(0))
    return gatekeeper.judge(contestant, task, place, bounds, device, cores, progress.say, fresh)


def _as_wanted(name: str, verdict: Verdict) -> bool:
    if verdict.state == "unsupported":
        return True
    is_wrong_on_purpose = name.startswith(f"{MUTANTS}-") and not name.startswith(EXACT)
    return verdict.state == "ok" and verdict.gate.passed != is_wrong_on_purpose


def _word(verdict: Verdict) -> str:
    if verdict.state != "ok":
        return verdict.state
    return "passed" if verdict.gate.passed else "rejected"


def _rows(name: str, task: str, verdict: Verdict, every_check: bool) -> list[dict[str, Any]]:
    """A row per check; or per contestant and task: the failed checks, or, if none, the update nearest its limit."""
    base = {"adapter": name, "task": task}
    if verdict.state != "ok" or not verdict.gate.checks:
        return [
            {
                **base,
                "check": "-",
                "error": None,
                "limit": None,
                "verdict": verdict.state,
                "detail": verdict.reason or "",
            }
        ]
    checks = verdict.gate.checks
    failed = [check for check in checks if not check.passed]
    if every_check or failed:
        return [_row(name, task, check, "") for check in (checks if every_check else failed)]
    count = f"all of {len(checks)} checks" + (", remembered" if verdict.cached else "")
    return [_row(name, task, max(checks, key=_nearness), count)]


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


def _print(rows: list[dict[str, Any]], console: Any) -> None:
    from rich.table import Table

    view = Table(
        title="Admission gate (passed: the update nearest its limit; rejected: every failed check)",
        title_justify="left",
    )
    for title in ("adapter", "task", "check", "error", "limit", "verdict", "detail"):
        is_number = title in {"error", "limit"}
        view.add_column(title, justify="right" if is_number else "left", overflow="fold", no_wrap=title in NARROW)
    for row in rows:
        numbers = ["-" if row[k] is None else f"{row[k]:.2e}" for k in ("error", "limit")]
        colour = {"passed": "green", "rejected": "red"}.get(row["verdict"], "yellow")
        view.add_row(
            row["adapter"], row["task"], row["check"], *numbers, f"[{colour}]{row['verdict']}[/]", row["detail"]
        )
    console.print(view)

"""Tell of a pack what only the reader's machine can: whether its code is the code here, and what its gate says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from harness.data import store
from harness.errors import BadInput
from harness.gate.admission import Verdict, judged_task
from harness.plan import registry
from harness.plan.registry import Contestant
from harness.store.record import Gate, Record
from harness.tasks import definition_hash, known_task
from harness.verify.records import CLOSE, Fault
from harness.worker import sketch

Judge = Callable[[Contestant, str], Verdict]
"""Judges a contestant on a task, here and now."""


def faults(records: Sequence[Record], judge: Judge) -> Iterator[Fault]:
    """Yield what this machine finds: of the data sets that it has, and of each contestant on each task."""
    seen: set[str] = set()
    for record in records:
        data = record.data
        if data is not None and data.sha256 not in seen:
            seen.add(data.sha256)
            here = store.describe(data.name, data.synthetic)
            if here is not None and here["sha256"] != data.sha256:
                yield Fault("data", data.name, f"its hash is {data.sha256[:12]}, here {here['sha256'][:12]}")
    verdicts = {(r.cell.runner, r.cell.task): r for r in records if r.purpose == "gate" and r.state == "ok"}
    measured = {(r.cell.runner, r.cell.task) for r in records if r.purpose != "gate" and r.state == "ok"}
    for name, task in sorted(measured & verdicts.keys()):
        yield from (Fault(kind, f"{task}, {name}", text) for kind, text in _again(verdicts[name, task], judge))


def undigested(records: Sequence[Record]) -> list[str]:
    """Return the verdicts whose updates cannot be compared: older ones, which hold no digest of them, and those on a
    network that is too large to be judged here."""
    found = [record for record in records if record.purpose == "gate" and record.state == "ok" and record.gate]
    return sorted(f"{one.cell.task}, {one.cell.runner}" for one in found if not _comparable(one))


def _comparable(record: Record) -> bool:
    gate, task = record.gate, record.cell.task
    is_small = gate is not None and (gate.judged_as or task) == judged_task(task, small=True)
    return is_small and gate is not None and any(check.digest for check in gate.checks)


def _again(record: Record, judge: Judge) -> Iterator[tuple[str, str]]:
    """Yield what differs when the gate judges once more."""
    cell, source = record.cell, record.source
    try:
        (contestant,) = registry.select([cell.contestant])
    except BadInput:
        yield "other code", "there is no such contestant here"
        return
    framework = contestant.framework
    adapter = hashlib.sha256((framework.adapter_hash + definition_hash(known_task(cell.task))).encode()).hexdigest()
    if (adapter[:12], framework.lock_hash) != (source.adapter_hash, source.lock_hash):
        yield "other code", f"its code or pins are others here; verify with dpbench of commit {source.commit}"
        return
    verdict = judge(replace(contestant, world_size=cell.world_size or 1), cell.task)
    if not verdict.passed:
        yield "gate", f"it does not pass here: {verdict.result().reason or verdict.state}"
    elif record.gate is not None:
        yield from _limits(record.gate, verdict.gate, cell.task)


def _limits(there: Gate, here: Gate, task: str) -> Iterator[tuple[str, str]]:
    """Yield checks that one of two verdicts lacks, or judges by another limit; of different networks only the first."""
    named = {check.check: check.limit for check in here.checks}
    said = {check.check: check.limit for check in there.checks}
    if (there.judged_as or task) != (here.judged_as or judged_task(task, small=True)):
        return
    for name in sorted(named.keys() ^ said.keys()):
        yield "check", f"{name} is only {'here' if name in named else 'in the pack'}"
    made = {check.check: check.digest for check in here.checks}
    for check in there.checks:
        ours, limits = made.get(check.check), (check.limit or 0.0) + (named.get(check.check) or 0.0)
        if check.digest and ours and sketch.differ(check.digest, ours, limits):
            yield "update", f"{check.check}: the update that the pack's adapter made is not the one made here"
    for name in named.keys() & said.keys():
        a, b = named[name], said[name]
        if (a is None) != (b is None) or (a is not None and b is not None and not math.isclose(a, b, rel_tol=CLOSE)):
            yield "limit", f"{name}: {b} in the pack, {a} here"

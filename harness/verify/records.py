"""Check what the records of a pack must agree on: figures that follow from others are computed anew. Pure functions.

A fault is found by its name, a word or two that docs/submit.md explains, with the record and both numbers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.analysis import accounting
from harness.plan import protocol as protocols
from harness.run.e2e import seeds_of
from harness.run.session import key_of_cell
from harness.store import surroundings
from harness.store.record import Record
from harness.tasks import TASKS
from harness.worker.clock import DISTURBED_SHARE
from harness.worker.sampling import steps_per_epoch

CLOSE = 1e-6
"""Relative: figures are written with all of their digits, and ε is computed by other versions of a library."""
SIGMA = re.compile(r"--sigma[ =](\S+)")


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that cannot be: its kind, the record, what is wrong."""

    kind: str
    where: str
    text: str


def faults(records: Sequence[Record]) -> list[Fault]:
    """Return all faults of a pack, apart from what only its gate can tell."""
    known = {protocols.load(name).label for name in protocols.names()}
    if old := {record.cell.protocol for record in records} - known:
        return [Fault("protocol", "the pack", f"{', '.join(sorted(old))} is no protocol of this dpbench: measure anew")]
    found: list[Fault] = []
    gates = {(r.gate.key, r.cell.contestant): r for r in records if r.purpose == "gate" and r.gate is not None}
    for record in records:
        for kind, text in _of_one(record, gates):
            found.append(Fault(kind, record.file_name, text))
    return sorted(found + [Fault(*parts) for parts in _of_all(records)])


def _of_one(record: Record, gates: dict[tuple[str, str], Record]) -> Iterator[tuple[str, str]]:
    checks: list[Callable[[Record], Iterable[tuple[str, str]]]] = [_identity, _numbers]
    if record.purpose == "gate":
        checks.append(_verdict)
    elif record.state == "ok" and record.cell.kind == "e2e":
        checks += [lambda one: _admitted(one, gates), _seeds]
        if record.purpose == "time":
            checks += [_clock, _steps, _privacy, _compared]
    for check in checks:
        yield from check(record)


def _identity(record: Record) -> Iterator[tuple[str, str]]:
    made = key_of_cell(record.cell, (record.source.adapter_hash, record.source.lock_hash))
    if record.purpose != "gate" and record.key != made:
        yield "identity", f"cell, code and pins have the key {made}, the record says {record.key}"


def _numbers(record: Record) -> Iterator[tuple[str, str]]:
    most = record.machine.get("memory_bytes")
    for name, value in record.memory.items():
        if most is not None and value > most and not record.machine.get("gpus"):
            yield "memory", f"{name} is {value} bytes on a machine of {most}"
    if record.data is not None and record.cell.kind == "e2e":
        known = TASKS[record.cell.task].train_size
        if record.data.train_size != known:
            yield "data", f"{record.data.train_size} rows to train on, the task has {known}"
    load = record.load
    if load is not None and record.purpose == "time" and not load.disturbed:
        is_in_turns = record.timed is not None and record.timed.turns
        if load.throttled > DISTURBED_SHARE or (load.foreign_share > DISTURBED_SHARE and not is_in_turns):
            yield "disturbed", f"others took {load.foreign_share:.0%}, which is not marked"


def _verdict(record: Record) -> Iterator[tuple[str, str]]:
    gate = record.gate
    if gate is None or record.state not in ("ok", "rejected"):
        return
    for check in gate.checks:
        if None not in (check.error, check.limit) and (check.error <= check.limit) != check.passed:  # type: ignore[operator]
            yield "check", f"{check.check}: error {check.error}, limit {check.limit}, passed: {check.passed}"
    passed = bool(gate.checks) and all(check.passed for check in gate.checks)
    if gate.passed != passed or (record.state == "ok") != passed:
        yield "verdict", f"its checks say {passed}, the verdict {gate.passed}, the state {record.state}"


def _admitted(record: Record, gates: dict[tuple[str, str], Record]) -> Iterator[tuple[str, str]]:
    gate = record.gate
    behind = None if gate is None else gates.get((gate.key, record.cell.contestant))
    if gate is None or behind is None or behind.gate is None:
        yield "no gate", "the pack has no verdict that it refers to"
        return
    judged = {behind.cell.task, behind.gate.judged_as}
    if not (gate.passed and behind.gate.passed and behind.state == "ok"):
        yield "not admitted", "it has figures, though its gate did not pass"
    if record.cell.task not in judged:
        yield "no gate", f"its verdict is one on {behind.cell.task}"
    if record.source.lock_hash != behind.source.lock_hash or record.source.adapter_hash != behind.source.adapter_hash:
        yield "other code", "its verdict is one on other code or pins"


def _seeds(record: Record) -> Iterator[tuple[str, str]]:
    if record.seeds is None:
        return
    made = seeds_of(record.block.run, record.seeds.initial // 1000, record.block.round)
    if made != record.seeds:
        yield "seeds", f"its run and round make {made}, the record says {record.seeds}"


def _clock(record: Record) -> Iterator[tuple[str, str]]:
    timed = record.timed
    assert timed is not None
    made = [seconds * timed.scale for seconds in timed.measured_seconds]
    if not _same(made, record.epoch_seconds):
        yield "epoch", f"measured seconds make {made[:3]} s an epoch, the record says {record.epoch_seconds[:3]}"
    total = sum(timed.measured_seconds)
    if timed.turns:
        for number, seconds in enumerate(timed.measured_seconds):
            turns = [turn for turn, start in zip(timed.turns, timed.starts, strict=False) if start[0] == number]
            steps, work = sum(turn[1] for turn in turns), sum(turn[3] for turn in turns)
            if not steps or not _same([work * timed.steps_timed / steps], [seconds]):
                yield "turns", f"turns of {work} s for {steps} of {timed.steps_timed} steps do not make {seconds} s"
        if any(turn[3] > turn[2] * (1 + CLOSE) for turn in timed.turns):
            yield "turns", "a turn worked longer than it lasted"
        wall = sum(turn[2] for turn in timed.turns)
        if timed.referee_seconds and not _same([sum(timed.referee_seconds)], [wall]):
            yield "clocks", f"the harness's clock says {sum(timed.referee_seconds)} s, the turns {wall} s"
    elif timed.part_seconds or timed.referee_seconds:
        clocks = [sum(timed.part_seconds), sum(timed.referee_seconds)]
        if not any(_same([clock], [total]) for clock in clocks):
            yield "clocks", f"the clocks say {clocks} s, measured are {total} s"
        if record.wall_seconds < total:
            yield "clocks", f"the process lasted {record.wall_seconds} s, measured are {total} s"


def _steps(record: Record) -> Iterator[tuple[str, str]]:
    timed = record.timed
    assert timed is not None
    made = steps_per_epoch(TASKS[record.cell.task].train_size, record.cell.batch_size)
    if timed.own_sampling is None and timed.steps_per_epoch != made:
        yield "steps", f"an epoch has {made} steps at this batch size, the record says {timed.steps_per_epoch}"


def _privacy(record: Record) -> Iterator[tuple[str, str]]:
    said = record.epsilon
    if said is None or not accounting.available():
        return
    protocol, other = protocols.load(record.cell.protocol.rpartition("-v")[0]), SIGMA.search(record.command)
    sigma = float(other[1]) if other else protocol.noise_multiplier
    rate = record.cell.batch_size / TASKS[record.cell.task].train_size
    made = accounting.epsilons(rate, sigma, said.steps, said.delta)
    if said.delta != protocol.delta:
        yield "epsilon", f"δ is {said.delta}, the protocol's is {protocol.delta}"
    for name, a, b in (("Rényi", made[0], said.rdp), ("PLD", made[1], said.pld)):
        if b is None or not math.isclose(a, b, rel_tol=1e-3):
            yield "epsilon", f"{name}: {said.steps} steps at σ = {sigma} make {a}, the record says {b}"


def _compared(record: Record) -> Iterator[tuple[str, str]]:
    found = record.timed.compared if record.timed is not None else None
    if found is None:
        return
    pairs = {"replay": (found.replay_error, found.replay_limit), "update": (found.update_error, found.update_limit)}
    pairs |= {name: (score, found.noise_limit or math.inf) for name, score in found.noise_scores.items()}
    for name, (error, limit) in pairs.items():
        if error > limit:
            yield "compared", f"{name}: {error} is above its limit {limit}, and the record is ok"


def _of_all(records: Sequence[Record]) -> Iterator[tuple[str, str, str]]:
    names = Counter((r.block.run, r.file_name) for r in records if r.purpose != "gate")
    for (run, name), count in names.items():
        if count > 1:
            yield "twice", name, f"it is there {count} times in {run}"
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        runs[record.block.run].append(record)
    for run, some in runs.items():
        if len({surroundings.of(record).key for record in some}) > 1:
            yield "machines", run, "its records are of more than one machine, or way to use it"
        if len({record.source.commit for record in some}) > 1:
            yield "commits", run, "its records name more than one commit"
        numbered = sorted((record.sequence, record.started) for record in some if record.sequence is not None)
        if any(a[1] > b[1] for a, b in itertools.pairwise(numbered)):
            yield "order", run, "records that were made later began sooner"
        yield from _blocks(run, some)
    hashes = _by(
        records, lambda r: (f"{r.data.name}, synthetic: {r.data.synthetic}", r.data.sha256) if r.data else None
    )
    yield from (("data", name, f"it has several hashes: {found}") for name, found in hashes)
    versions = _by(records, lambda r: (f"{r.source.lock_hash} {r.source.content}", str(sorted(r.versions.items()))))
    yield from (("versions", name, "one environment has several lists of versions") for name, _ in versions)


def _blocks(run: str, records: Sequence[Record]) -> Iterator[tuple[str, str, str]]:
    """Yield what a run's blocks lack: each contestant in each round, each at a place of its own."""
    blocks: dict[tuple[str, int, str], dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.cell.kind == "e2e" and record.purpose != "gate":
            blocks[record.cell.task, record.cell.batch_size, record.purpose][record.block.round].append(record)
    for (task, size, purpose), rounds in blocks.items():
        where = f"{run}: {task} at {size}, {purpose}"
        everybody = {record.cell.contestant for some in rounds.values() for record in some}
        if sorted(rounds) != list(range(len(rounds))):
            yield "missing", where, f"of its rounds only {sorted(rounds)} are there"
        for number, some in rounds.items():
            if missing := everybody - {record.cell.contestant for record in some}:
                yield "missing", where, f"round {number} lacks {', '.join(sorted(missing))}"
            if sorted(record.block.order for record in some) != list(range(len(some))):
                yield "order", where, f"the places in round {number} are not one each"


def _by(records: Iterable[Record], pair: Callable[[Record], tuple[str, str] | None]) -> Iterator[tuple[str, list[str]]]:
    """Yield names that have more than one value."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.state == "ok" and record.image is None and (said := pair(record)) is not None:
            found[said[0]].add(said[1])
    return ((name, sorted(values)) for name, values in found.items() if len(values) > 1)


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=CLOSE) for x, y in zip(a, b, strict=True))

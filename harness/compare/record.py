"""Records of a comparison: ``comparison.json``, and one file per pair of processes from which it can be made again.

The conclusions are pure functions of the pairs, so that a resumed comparison says the same as one that was never
killed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.analysis import sequential, turns
from harness.analysis.sequential import Rule
from harness.errors import BadInput
from harness.store.record import Container, GateCheck, Image, Load, State
from harness.worker.clock import DISTURBED_SHARE

SCHEMA = 1

Verdict = Literal["wrong", "repaired", "slower", "faster", "equivalent", "ambiguous", "failed", "not compared"]
Role = Literal["base", "head"]
Change = Literal["grown", "shrunk", "same", "not judged"]
ROLES: tuple[Role, Role] = ("base", "head")

SPARE_BYTES = 64 * 2**10
SPARE_SHARE = 0.005
"""Memory may grow by the larger of the two before it counts as grown: allocators round, and buffers depend on a
seed."""


DIED: tuple[State, ...] = ("crashed", "oom", "timeout")

UNEVEN_LOG = 0.1
"""Pairs whose two processes had CPU shares that differ by more than this (absolute log ratio) are set aside: other work
alone could explain their ratio."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Process(_Model):
    """One fresh process. ``seconds``: the median of its passes, or of its epochs. ``low``, ``high``: the passes' 10th
    and 90th percentile. ``interrupted``: see :class:`harness.store.record.Record`. ``sketch``: of what it left
    behind, and never written: what is kept is how far both sides' lie apart."""

    state: State
    reason: str | None = None
    seconds: float | None = None
    passes: int = 0
    low: float | None = None
    high: float | None = None
    bytes: int | None = None
    checks: list[GateCheck] = Field(default_factory=list)
    load: Load | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    started: str = ""
    wall_seconds: float = 0.0
    log_tail: str = ""
    container: Container | None = None
    interrupted: bool = False
    sketch: list[float] = Field(default_factory=list, exclude=True, repr=False)


class Pair(_Model):
    """One block: both sides, one right after the other. ``order``: which ran first. ``processors``: on which both
    ran. ``apart``: of a layer, how far the gradients of a batch of the measured size lie apart, over their size, and
    ``limit`` from where on they are not the same; None where they were not compared. ``blocks``: where the two took
    turns, seconds of a step of base and of head in each block; empty where they ran one after the other."""

    number: int
    order: tuple[Role, Role]
    processors: list[int] = Field(default_factory=list)
    base: Process
    head: Process
    apart: float | None = None
    limit: float | None = None
    blocks: list[tuple[float, float]] = Field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether the two sides leave different gradients (or weights) behind."""
        return self.apart is not None and self.limit is not None and not self.apart <= self.limit

    @property
    def processes(self) -> tuple[Process, ...]:
        return self.base, self.head

    @property
    def disturbed(self) -> bool:
        return any(p.load is not None and p.load.disturbed for p in (self.base, self.head))

    @property
    def is_uneven(self) -> bool:
        """Others used the processors beside one side much more than beside the other; or nobody did, and the machine
        itself changed its speed. The same for base and head exchanged, so that leaving such pairs out favours neither.
        Equal load on both sides is no reason: it cancels in the ratio, but for some noise."""
        if self.base.load is None or self.head.load is None:
            return False
        shares = [min(load.foreign_share, 0.99) for load in (self.base.load, self.head.load)]
        left = abs(math.log((1.0 - shares[0]) / (1.0 - shares[1])))
        return left > UNEVEN_LOG or (max(shares) <= DISTURBED_SHARE and self.disturbed)

    @property
    def log_ratio(self) -> float | None:
        """log(head / base); None where a side has no time."""
        if self.blocks:
            return turns.log_ratio(self.blocks)
        if not self.base.seconds or not self.head.seconds:
            return None
        return math.log(self.head.seconds / self.base.seconds)


class MemoryPair(_Model):
    """Bytes at the peak by side, a process each; a change is only believed if the second processes show it too."""

    base: list[Process]
    head: list[Process]

    @property
    def processes(self) -> tuple[Process, ...]:
        return *self.base, *self.head


class Memory(_Model):
    """``exact``: counted by the framework's allocator, byte by byte; else the process's resident set, which is shown
    and never judged. ``proven``: of a change, that a second process of each side showed it, too."""

    base: int
    head: int
    tolerance: int
    change: Change
    exact: bool
    proven: bool


class Time(_Model):
    """See :class:`harness.analysis.sequential.Finding`. Seconds are medians over the pairs that count; ``stop``: why
    no more pairs were run; ``set_aside``: pairs left out, both sides of them, because others used the machine."""

    base_seconds: float
    head_seconds: float
    n: int
    set_aside: int
    disturbed_counted: int
    ratio: float | None
    low: float | None
    high: float | None
    paired_sd: float | None
    within_threshold: bool
    beyond_threshold: bool
    smallest_effect: float | None
    stop: str


class CellResult(_Model):
    """``name``: as ``dpbench bisect`` takes it. ``alerts``: what the regression consists of: ``gate``, ``time``,
    ``memory``. ``reason``: why there is no comparison. ``gate``: by side, ``passed``, ``failed: why``, ``did not
    run: why`` or ``not begun``. ``weights``: of a task, the pair of processes without noise whose weights, after the
    first steps of the measured batch size, were compared."""

    name: str
    kind: Literal["layer", "e2e"]
    verdict: Verdict
    alerts: list[Literal["gate", "time", "memory"]]
    reason: str | None
    gate: dict[Role, str]
    time: Time | None
    memory: Memory | None
    pairs: list[Pair]
    memory_processes: MemoryPair | None
    weights: Pair | None = None

    @property
    def is_compared(self) -> bool:
        """Whether the verdict comes from a comparison: too few pairs for any interval are none."""
        if self.verdict == "ambiguous":
            return self.time is not None and self.time.low is not None
        return self.verdict not in ("failed", "not compared")

    @property
    def lacks_memory(self) -> bool:
        """Whether a process that was to measure the memory of a cell with a time died, so that growth goes unseen."""
        if self.memory_processes is None or self.verdict in ("wrong", "repaired", "failed", "not compared"):
            return False
        return any(p.state in DIED for p in (*self.memory_processes.base, *self.memory_processes.head))


class SideFacts(_Model):
    """``locks``: framework -> hash of its pins and Python (where the side is an image: of those that it was made
    from). ``versions``: framework -> distributions in its environment. ``images``: framework -> what its containers
    were made of, with the engine's digest; ``matches_lock`` is False where a side that is an image is not what the
    tree's lock describes."""

    asked: str
    title: str
    commit: str | None
    dirty: bool | None
    content: str
    package: str | None
    locks: dict[str, str]
    versions: dict[str, dict[str, str]]
    images: dict[str, Image] = Field(default_factory=dict)


class Comparison(_Model):
    """The whole. ``minutes``: of the processes, those of earlier calls that were resumed included. ``timed_cells``: how
    many cells share ``alpha``. ``engine``: of the containers, where there were any."""

    schema_: int = Field(SCHEMA, alias="schema")
    started: str
    command: str
    base: SideFacts
    head: SideFacts
    alpha: float
    threshold: float
    max_rounds: int
    timed_cells: int
    isolation: str
    engine: str | None = None
    threads: int
    seconds: float
    machine: dict[str, Any]
    minutes: float
    finished: bool
    cells: list[CellResult]

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @property
    def regressions(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.alerts]

    @property
    def failures(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.verdict == "failed"]

    @property
    def exit_code(self) -> int:
        """1 before 3: a proven regression stands, whatever else did not run. 3 also where nothing could be compared
        (for lack of time, too), or where a memory process died."""
        if self.regressions:
            return 1
        is_whole = not self.failures and not any(cell.lacks_memory for cell in self.cells)
        return 0 if is_whole and any(cell.is_compared for cell in self.cells) else 3

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1)


def read(path: Path) -> Comparison:
    """Raise :class:`BadInput` for what is no comparison."""
    try:
        return Comparison.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:  # pydantic's error is a ValueError
        raise BadInput(
            f"{path} is no comparison.json ({type(error).__name__}); name one that `dpbench compare` wrote."
        ) from None


# ---- conclusions


def counted(pairs: Sequence[Pair], most_set_aside: int) -> tuple[list[Pair], list[Pair]]:
    """Return (pairs that count, pairs set aside). An uneven pair is set aside whole, never one side of it, until so
    many are; on a machine that is always disturbed the rest counts, and is only noisier."""
    kept: list[Pair] = []
    aside: list[Pair] = []
    for pair in pairs:
        (aside if pair.is_uneven and len(aside) < most_set_aside else kept).append(pair)
    return kept, aside


def most_set_aside(rounds: int) -> int:
    """Return how many uneven pairs may be left out, at most. A side that ran beside other work can take several
    times as long, and a single such pair hides what ten show."""
    return max(2, rounds // 2)


def finding(pairs: Sequence[Pair], rule: Rule) -> sequential.Finding:
    """Return statistics of the pairs that count."""
    kept, _ = counted(pairs, most_set_aside(rule.rounds))
    ratios = [ratio for pair in kept if (ratio := pair.log_ratio) is not None]
    return sequential.judge(ratios[: rule.rounds], rule)


def is_over(pairs: Sequence[Pair], rule: Rule) -> bool:
    """Return whether the pairs say enough, one did not run, or there are as many as there may be."""
    if any(pair.base.state != "ok" or pair.head.state != "ok" or pair.differs for pair in pairs):
        return True
    found = finding(pairs, rule)
    return found.is_clear or found.n >= rule.rounds


def failed_checks(process: Process) -> str:
    """Return the failed checks of a process in one line."""
    failed = [check for check in process.checks if not check.passed]
    return "; ".join(f"{c.check}: error {_figure(c.error)}, limit {_figure(c.limit)}" for c in failed)


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def gate_of(processes: Sequence[Process]) -> str:
    """``passed``, ``failed: why``, ``did not run: why``, or ``not begun``, where no process was started."""
    for process in processes:
        if process.state == "rejected":
            return f"failed: {failed_checks(process) or process.reason}"
    bad = next((p for p in processes if p.state != "ok"), None)
    if bad is not None or not processes:
        return f"did not run: {bad.state}: {bad.reason}" if bad is not None else "not begun"
    return "passed"


def memory_of(processes: MemoryPair | None, exact: bool) -> Memory | None:
    """Return how memory changed from base to head; None where a side has no figure."""
    if processes is None:
        return None
    base = [p.bytes for p in processes.base if p.state == "ok" and p.bytes is not None]
    head = [p.bytes for p in processes.head if p.state == "ok" and p.bytes is not None]
    if not base or not head:
        return None
    tolerance = tolerance_of(base[0])
    change: Change = "same"
    if min(head) > max(base) + tolerance:
        change = "grown"
    elif max(head) < min(base) - tolerance:
        change = "shrunk"
    proven = exact and len(base) > 1 and len(head) > 1 and change != "same"
    change = change if exact else "not judged"
    return Memory(base=base[0], head=head[0], tolerance=tolerance, change=change, exact=exact, proven=proven)


def memory_fault(processes: MemoryPair | None) -> str | None:
    """Return which side has a memory process without a figure, and why; None where all have one."""
    for role in ROLES:
        for process in getattr(processes, role) if processes is not None else []:
            if process.state not in ("ok", "unsupported"):
                return f"memory was not compared: {role} {process.state}: {process.reason}"
    return None


def tolerance_of(base_bytes: int) -> int:
    """Return the bytes by which the memory may differ without being a change."""
    return max(SPARE_BYTES, math.ceil(SPARE_SHARE * base_bytes))


def needs_second(processes: MemoryPair) -> bool:
    """Return whether the first process of each side shows a change that a second one must confirm."""
    first = memory_of(processes, True)
    return first is not None and first.change != "same" and len(processes.base) == len(processes.head) == 1


def has_proven_growth(processes: MemoryPair | None, exact: bool) -> bool:
    """Return whether head needs more memory for certain; that needs no clock."""
    seen = memory_of(processes, exact)
    return seen is not None and seen.change == "grown" and seen.proven


def difference(pairs: Sequence[Pair], kind: Literal["layer", "e2e"]) -> str | None:
    """Return why the two sides do not compute the same, though each passes its own check; None where they do."""
    pair = next((pair for pair in pairs if pair.differs), None)
    if pair is None:
        return None
    of_layer, of_task = "gradients of a batch of the measured size", "weights after the first steps without noise"
    what = of_layer if kind == "layer" else of_task
    return (
        f"both sides pass their own checks, but the {what} differ between them by {_figure(pair.apart)} (limit "
        f"{_figure(pair.limit)}): one of them computes something else"
    )


def _unsupported(processes: Sequence[Process]) -> bool:
    return bool(processes) and all(process.state == "unsupported" for process in processes)


def _stop(found: sequential.Finding, rule: Rule) -> str:
    if found.is_clear:
        if found.alert:
            return "clear: slower by more than the threshold"
        return "clear: faster by more than the threshold" if not found.within else "clear: within the threshold"
    return "as many pairs as there may be" if found.n >= rule.rounds else "out of time"


def time_of(pairs: Sequence[Pair], rule: Rule) -> Time | None:
    """Return how the time changed from base to head; None without a pair in which both sides have one."""
    kept, aside = counted(pairs, most_set_aside(rule.rounds))
    kept = [pair for pair in kept if pair.log_ratio is not None][: rule.rounds]
    if not kept:
        return None
    found = finding(pairs, rule)
    return Time(
        base_seconds=median([p.base.seconds or 0.0 for p in kept]),
        head_seconds=median([p.head.seconds or 0.0 for p in kept]),
        n=len(kept),
        set_aside=len(aside),
        disturbed_counted=sum(pair.disturbed for pair in kept),
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        paired_sd=found.sd,
        within_threshold=found.within,
        beyond_threshold=found.beyond,
        smallest_effect=found.smallest,
        stop=_stop(found, rule),
    )


def conclude(
    name: str,
    kind: Literal["layer", "e2e"],
    pairs: Sequence[Pair],
    memory: MemoryPair | None,
    gates: dict[Role, Process] | None,
    refusal: str | None,
    rule: Rule,
    is_failure: bool = False,
    weights: Pair | None = None,
) -> CellResult:
    """Return what a cell's processes say. ``gates``: of a task, the verdicts of the admission gate, as processes.
    ``refusal``: why there was nothing to compare; ``is_failure``: because head no longer has what base has, or a side
    cannot run. ``weights``: see :class:`CellResult`."""
    processes: dict[Role, list[Process]] = {"base": [], "head": []}
    for role in ROLES:
        processes[role] += [gates[role]] if gates else []
        processes[role] += [getattr(pair, role) for pair in (*([weights] if weights else []), *pairs)]
        # A memory process counts for the gate only by its checks: parts that do not add up are the instrument's fault.
        of_memory = getattr(memory, role) if memory is not None else []
        processes[role] += [p for p in of_memory if p.state == "rejected" and failed_checks(p)]
    gate = {role: gate_of(processes[role]) for role in ROLES}
    ran = {role: gate[role] == "passed" for role in ROLES}
    rejected = {role: gate[role].startswith("failed") for role in ROLES}
    found = finding(pairs, rule)
    seen = memory_of(memory, kind == "layer")
    of_bytes: list[Literal["gate", "time", "memory"]] = ["memory"] if has_proven_growth(memory, kind == "layer") else []
    alerts: list[Literal["gate", "time", "memory"]] = []
    verdict: Verdict
    reason = refusal
    if refusal is not None:
        verdict = "failed" if is_failure else "not compared"
    elif rejected["head"] and ran["base"]:
        verdict, alerts, reason = "wrong", ["gate"], f"only head fails its correctness check ({gate['head']})"
    elif rejected["base"] and ran["head"]:
        verdict, reason = "repaired", f"base fails its correctness check, head passes ({gate['base']})"
    elif rejected["base"] and rejected["head"]:
        verdict, reason = "not compared", f"both sides fail their correctness check ({gate['head']})"
    elif _unsupported(processes["base"]) and _unsupported(processes["head"]):
        verdict, reason = "not compared", f"unsupported by both sides: {processes['head'][0].reason}"
    elif all(ran.values()) and (fault := difference([*([weights] if weights else []), *pairs], kind)):
        verdict, alerts, reason = "wrong", ["gate"], fault
    elif not pairs and not gates:
        verdict, alerts, reason = "ambiguous", of_bytes, "no pair was timed"
    elif not all(ran.values()):
        verdict = "failed"
        bad = [f"{role} {gate[role]}" for role in ROLES if not ran[role]]
        reason = "; ".join(bad)
    else:
        verdict = found.verdict or "ambiguous"
        alerts += ["time"] if found.alert else []
        alerts += of_bytes
        reasons = ["no pair was timed"] if not pairs else []
        reasons += [fault for fault in [memory_fault(memory)] if fault]
        reason = "; ".join(reasons) or None
    return CellResult(
        name=name,
        kind=kind,
        verdict=verdict,
        alerts=alerts,
        reason=reason,
        gate=gate,
        time=time_of(pairs, rule) if all(ran.values()) else None,
        memory=seen if all(ran.values()) or not (pairs or gates) else None,
        pairs=list(pairs),
        memory_processes=memory,
        weights=weights,
    )

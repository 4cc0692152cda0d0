"""Tables of measured steps: the comparison of two runs, and the table at the end of a session."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis import stats
from harness.analysis.stats import VERDICT_ROUNDS, Comparison
from harness.stopwatch.measure import TRACED, Process
from harness.stopwatch.runs import StepRun
from harness.worker.memory import GROWTH

DISTURBED = "ᵈ"
OBSERVED = "ᵒ"
Steps = Mapping[str, Sequence[Process]]


def values(processes: Sequence[Process]) -> tuple[list[float], bool]:
    """Return (seconds of each process, whether disturbed ones are among them): these are left out where enough others
    remain for a verdict."""
    calm = [p for p in processes if not p.disturbed]
    kept = calm if len(calm) >= VERDICT_ROUNDS else list(processes)
    return [stats.process_value(p.seconds) for p in kept], any(p.disturbed for p in kept)


@dataclass(frozen=True)
class Change:
    """A step now against then. ``result.ratio`` = seconds now / seconds then; None where it was not saved then.
    ``clock``: seconds of the speed probe now over then. ``proven``: its ratio is at least that, with the error rate
    kept over all steps of the comparison together and a slower machine taken off; None where nothing may be proven."""

    step: str
    result: Comparison | None
    disturbed: bool
    clock: float
    proven: float | None

    @property
    def verdict(self) -> str:
        r = self.result
        if r is None:
            return "new"
        if r.verdict is not None and not self.disturbed:
            # Comparison speaks about then: where that was the faster one, now is slower.
            return {"faster": "slower", "slower": "faster"}.get(r.verdict, r.verdict)
        why = "disturbed" if self.disturbed else "1 process" if r.n == 1 else f"{r.n} processes"
        return f"no verdict: {why}"


def changes(now: StepRun, then: StepRun) -> list[Change]:
    """Return each step of ``now``: the one that became slowest first, new ones last."""
    pairs = {name: (now.steps[name], then.steps[name]) for name in now.steps if name in then.steps}
    clock = math.sqrt(math.prod(now.canary) / math.prod(then.canary)) if now.canary and then.canary else 1.0
    # Each of m comparisons errs at most with 5 % / m, so that any of them does at most with 5 % (Bonferroni).
    confidence = 1 - (1 - stats.CONFIDENCE) / max(1, len(pairs))
    found = []
    for name, sides in pairs.items():
        (b, left), (a, right) = (values(side) for side in sides)
        disturbed = left or right or now.restless or then.restless
        result = stats.compare_unpaired(a, b)
        proven = None
        if result.verdict is not None and not disturbed:
            proven = stats.compare_unpaired(a, b, confidence=confidence).low / max(1.0, clock)
        found.append(Change(name, result, disturbed, clock, proven))
    found.sort(key=lambda change: -change.result.ratio if change.result else 0.0)
    return found + [Change(name, None, False, clock, None) for name in now.steps if name not in pairs]


def lines(now: Steps, compared: Sequence[Change], then: StepRun | None) -> Iterator[str]:
    """Yield the table, worst first: the slowest against then, else the slowest."""
    by_name = {change.step: change for change in compared}
    order = list(by_name) or sorted(now, key=lambda name: -statistics.median(values(now[name])[0]))
    with_memory = sorted({metric for found in now.values() for p in found for metric in p.memory})
    several = any(len(found) > 1 for found in now.values())
    header = ["step", "median", "of processes" if several else "of rounds", "processes", "rounds × calls"]
    header += [{TRACED: "traced peak", GROWTH: "resident peak"}.get(metric, metric) for metric in with_memory]
    header += ["now/then", "95 %", "verdict"] if then else []
    rows = [header]
    for name in order:
        found = now[name]
        figures, disturbed = values(found)
        spread = stats.median_interval(figures if len(found) > 1 else found[0].seconds)
        marks = (DISTURBED if disturbed else "") + (OBSERVED if any(p.observed for p in found) else "")
        row = [
            name,
            duration(spread.median) + marks,
            "" if math.isnan(spread.low) else f"{duration(spread.low)} … {duration(spread.high)}",
            str(len(found)),
            f"{len(found[0].seconds)} × {found[0].calls}",
        ]
        row += [size(max((p.memory.get(metric, 0) for p in found), default=0)) for metric in with_memory]
        if then:
            row += _compared(by_name[name])
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()
    yield from _notes(now, by_name, then, several, with_memory)


def _compared(change: Change) -> list[str]:
    r = change.result
    if r is None:
        return ["", "", change.verdict]
    return [f"{r.ratio:.3f}", "" if math.isnan(r.low) else f"{r.low:.3f} … {r.high:.3f}", change.verdict]


def _notes(
    now: Steps, compared: Mapping[str, Change], then: StepRun | None, several: bool, metrics: Sequence[str]
) -> Iterator[str]:
    everything = [p for found in now.values() for p in found]
    if not several:
        yield (
            "One process: … is the spread of its rounds and says nothing of the next process, which may lie elsewhere; "
            "--dpbench-processes 5 or more measures that."
        )
    elif min(len(found) for found in now.values()) < 6:
        yield "Under 6 processes, … is their whole range; from 6 on it holds the median with 95 %."
    if any(p.disturbed and not p.observed for p in everything):
        yield f"{DISTURBED} disturbed: meanwhile other programs took processor time."
    if any(p.observed for p in everything):
        yield f"{OBSERVED} observed: coverage, a debugger or a profiler slowed the step down (--no-cov)."
    if metrics:
        yield "traced peak: Python's and numpy's blocks, by tracemalloc; resident peak: the whole process; per call."
    if then is None:
        return
    where = f", commit {then.commit[:12]}" if then.commit else ""
    yield (
        f"then: {then.name} of {then.started}{where}. The two were not run in common blocks: what drifted between them "
        "is in the ratio."
    )
    clock = next(iter(compared.values())).clock
    if abs(math.log(clock)) > math.log1p(stats.MARGIN):
        yield f"The machine's own clockwork (speed probe) takes {clock:.2f} times as long as then."
    if then.restless:
        yield "The machine changed its speed during the saved run, so that it proves nothing."


def duration(seconds: float) -> str:
    """Four significant digits with a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def size(count: int) -> str:
    """Return bytes with their unit, as people read them."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"

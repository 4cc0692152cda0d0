"""Events of a history: steps of many cells gathered into one sentence, states that changed, what is open.

**Grouping.** Steps of one machine, one measure (time or memory) and one direction whose ranges of runs overlap in
common are one event: a change of a library moves many cells at once, and so does one of the machine. Cells of different
frameworks must also have moved by about as much. Ranges are joined narrowest first, so that a cell whose step can only
be placed to a month joins the one that is known to the day.

**Identity.** An event is named for ever by the cell that raised the first alarm and the run after which it did, which
later runs do not change (see :mod:`harness.analysis.change_points`): a reader of the feed is told once.

**Open.** A change for the worse is open as long as one of its cells is still at least half as far above its old level,
or still in its bad state.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

from harness.analysis.change_points import Step
from harness.analysis.naming import factor
from harness.compare.record import tolerance_of
from harness.history import series as series_of
from harness.history.runs import History, Run
from harness.history.series import Series

Metric = Literal["state", "memory", "time"]
SMALLEST = math.log(1.01)
"""Steps of less are drawn but no events: nobody mends 1 %. Of exact bytes, those within the tolerance of a
comparison."""
RANK = {"rejected": 0, "ungated": 0, "crashed": 1, "oom": 2, "timeout": 3, "unsupported": 4}
"""Most severe first. ``rejected``: the update was wrong."""
MOST_CELLS = 0.6
"""A step of this share of all cells of several frameworks is more likely one of the machine or of the instrument."""
_NAMESPACE = uuid.UUID("6c0f3c26-5f44-5d1c-9a0e-0d5b7c1f2e11")


@dataclass(frozen=True)
class Change:
    """One cell of an event. Indices are those of the machine's runs: ``before`` the last run that surely was at the old
    level, ``after`` the first that surely was at the new, ``alarm`` the one after which it was known."""

    series: Series
    before: int
    after: int
    alarm: int
    step: Step | None
    old: str = "ok"
    new: str = "ok"
    reason: str = ""
    back: int | None = None
    """The run at which a state was ok again."""


@dataclass(frozen=True)
class Event:
    """Cells of one machine that moved at one run, or whose state changed there, as one piece of news."""

    machine: str
    metric: Metric
    worse: bool
    changes: tuple[Change, ...]
    runs: tuple[Run, ...]
    notes: tuple[str, ...]

    @cached_property
    def before(self) -> Run:
        return self.runs[max(c.before for c in self.changes)]

    @cached_property
    def after(self) -> Run:
        return self.runs[min(c.after for c in self.changes)]

    @cached_property
    def first(self) -> Change:
        return min(self.changes, key=lambda c: (c.alarm, c.series.name))

    @property
    def detected(self) -> Run:
        return self.runs[self.first.alarm]

    @cached_property
    def id(self) -> str:
        """A UUID that later runs do not change."""
        first = self.first
        name = "|".join(
            (self.machine, self.metric, str(self.worse), first.series.name, self.runs[first.alarm].time, first.new)
        )
        return str(uuid.uuid5(_NAMESPACE, name))

    @cached_property
    def open(self) -> bool:
        return self.worse and any(_open(c, self.metric) for c in self.changes)

    @property
    def severity(self) -> tuple[int, float]:
        """Smaller is worse: states by their rank, then memory, then time, each by size."""
        if self.metric == "state":
            return min(RANK.get(c.new, 5) for c in self.changes), -float(len(self.changes))
        size = max((abs(math.log(c.step.ratio)) for c in self.changes if c.step and c.step.ratio > 0), default=0.0)
        return (5 if self.metric == "memory" else 6), -size

    @property
    def red(self) -> bool:
        """Whether it is something that no noise explains: a wrong update, a cell that stopped working, memory that
        grew."""
        return self.open and (self.metric == "memory" or (self.metric == "state" and self.severity[0] < 4))

    @property
    def frameworks(self) -> tuple[str, ...]:
        return tuple(sorted({c.series.cell.framework for c in self.changes}))

    @cached_property
    def ratios(self) -> tuple[float, float] | None:
        """Smallest and largest of the cells' ratios."""
        ratios = [c.step.ratio for c in self.changes if c.step]
        return (min(ratios), max(ratios)) if ratios else None

    @property
    def what(self) -> str:
        """``3 cells of dpcore became 12–15 % slower``."""
        names = self.frameworks
        whose = " and ".join(names) if len(names) <= 2 else f"{len(names)} frameworks"
        count = len(self.changes)
        who = self.changes[0].series.name if count == 1 else f"{count} cells of {whose}"
        if self.metric == "state":
            return f"{who} went from {self.changes[0].old} to {self.changes[0].new}"
        assert self.ratios is not None
        words = {
            ("time", True): "slower",
            ("time", False): "faster",
            ("memory", True): "more memory",
            ("memory", False): "less memory",
        }[self.metric, self.worse]
        verb = "became" if self.metric == "time" else "take" if len(self.changes) > 1 else "takes"
        return f"{who} {verb} {_span(*self.ratios)} {words}"

    @property
    def where(self) -> str:
        """``between a1b2c3d and d4e5f6a``."""
        a, b = self.before, self.after
        if a.commit == b.commit:
            return f"at {b.short_commit}, between the runs of {a.time[:10]} and {b.time[:10]}"
        return f"between {a.short_commit} and {b.short_commit}"

    @property
    def sentence(self) -> str:
        return f"{self.what} {self.where}"

    @property
    def bisect(self) -> str | None:
        """The command that looks for the commit in the cell that changed most; None where there is nothing to search or
        the cell cannot be repeated so."""
        a, b, change = self.before.commit, self.after.commit, self.changes[0]
        cell = change.series.cell
        if not (self.worse and a and b and a != b and cell.device == "cpu" and cell.isolation == "venv"):
            return None
        small = change.step is not None and self.metric == "time" and change.step.ratio < 1.1
        threshold = f" --threshold {(change.step.ratio - 1) / 2:.3f}" if small and change.step else ""
        return f"dpbench bisect {cell.name} {a[:10]} {b[:10]}{threshold}"

    @property
    def bad_cells(self) -> tuple[Change, ...]:
        return tuple(c for c in self.changes if _open(c, self.metric))

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "machine": self.machine,
            "metric": self.metric,
            "worse": self.worse,
            "open": self.open,
            "red": self.red,
            "sentence": self.sentence,
            "last_before": self.before.commit,
            "first_after": self.after.commit,
            "time": self.after.time,
            "detected": self.detected.time,
            "notes": list(self.notes),
            "bisect": self.bisect if self.open else None,
            "simulated": any(run.simulated for run in self.runs),
            "cells": [_change_json(c) for c in self.changes],
        }


def _change_json(c: Change) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "cell": c.series.name,
        "run": c.after,
        "last_before": c.series.runs[c.before].commit,
        "first_after": c.series.runs[c.after].commit,
    }
    if c.step is None:
        return {**shown, "old": c.old, "new": c.new, "reason": c.reason}
    s = c.step
    finite = {k: (v if math.isfinite(v) else None) for k, v in vars(s).items() if k in ("ratio", "low", "high")}
    return {**shown, **finite, "runs_after": s.runs_after, "confidence": s.confidence}


def _span(low: float, high: float) -> str:
    """``12–15 %``; from a factor of 2 on ``2.1×``."""
    if high > 2 or low < 0.5:
        texts = [f"{factor(low)}×" if math.isfinite(low) else "∞", f"{factor(high)}×" if math.isfinite(high) else "∞"]
        return texts[0] if texts[0] == texts[1] else "–".join(texts)
    percents = sorted(abs(r - 1) * 100 for r in (low, high))
    texts = [f"{p:.0f}" if p >= 9.95 else f"{p:.1f}" if p >= 0.05 else f"{p:.2g}" for p in percents]
    return (texts[0] if texts[0] == texts[1] else "–".join(texts)) + " %"


def _open(c: Change, metric: str) -> bool:
    if metric == "state":
        return c.back is None
    found, _ = c.series.found(metric)
    assert c.step is not None
    old = next(s.level for s in found.segments if s.stop == c.step.at)
    now = found.segments[-1].level
    if not old:
        return now > 0
    if now <= 0 or not math.isfinite(c.step.ratio):
        return now > old
    return math.log(now / old) >= 0.5 * math.log(c.step.ratio)


def of_history(history: History, machines: dict[str, list[Series]] | None = None) -> list[Event]:
    """Return every event of every machine, the latest first."""
    machines = series_of.of_history(history) if machines is None else machines
    events = [event for key, cells in machines.items() for event in of_machine(key, cells)]
    return sorted(events, key=lambda e: (e.after.moment, e.id), reverse=True)


def of_machine(key: str, cells: Sequence[Series]) -> list[Event]:
    """Return the events of one machine."""
    if not cells:
        return []
    runs = cells[0].runs
    moved = _machine_steps(key, runs)
    events = []
    for metric in ("time", "memory"):
        for worse in (True, False):
            changes = [c for s in cells for c in _steps(s, metric, worse)]
            for group in _grouped(changes):
                notes = _notes(group, runs, metric, len(cells), moved)
                events.append(Event(key, "time" if metric == "time" else "memory", worse, group, runs, notes))
    for group in _states(cells):
        events.append(Event(key, "state", True, group, runs, _notes(group, runs, "state", len(cells), ())))
    return events


def _steps(s: Series, metric: str, worse: bool) -> Iterable[Change]:
    for step, before, after, alarm in s.changes(metric):
        size = math.log(step.ratio) if 0 < step.ratio < math.inf else math.copysign(math.inf, step.ratio - 1)
        if (size > 0) == worse and (_counts(s, step) if step.low == step.high else abs(size) >= SMALLEST):
            yield Change(s, before, after, alarm, step)


def _counts(s: Series, step: Step) -> bool:
    """Return whether exact bytes changed by more than `dpbench compare` lets pass."""
    old, new = (next(p.level for p in s.memory.segments if p.start <= run < p.stop) for run in (step.at - 1, step.at))
    return abs(new - old) > tolerance_of(int(old))


def _grouped(changes: Iterable[Change]) -> list[tuple[Change, ...]]:
    """Return groups with a common range, narrowest ranges first."""
    groups: list[tuple[int, int, list[Change]]] = []
    for change in sorted(changes, key=lambda c: (c.after - c.before, c.after, c.series.name)):
        for i, (before, after, members) in enumerate(groups):
            common = max(before, change.before), min(after, change.after)
            alike = any(_alike(m, change) for m in members)
            if common[0] < common[1] and alike and all(m.series is not change.series for m in members):
                groups[i] = (*common, [*members, change])
                break
        else:
            groups.append((change.before, change.after, [change]))
    return [tuple(sorted(members, key=_size, reverse=True)) for _, _, members in groups]


def _alike(a: Change, b: Change) -> bool:
    """Return whether two events are of one framework, or so near in size that one cause may be behind both."""
    sizes = sorted((_size(a), _size(b)))
    return a.series.cell.framework == b.series.cell.framework or sizes[1] <= 1.25 * sizes[0]


def _size(c: Change) -> float:
    return abs(math.log(c.step.ratio)) if c.step and 0 < c.step.ratio < math.inf else math.inf


def _states(cells: Iterable[Series]) -> list[tuple[Change, ...]]:
    """Return cells that stopped being ok at one run, in one way. While a cell is not ok, only a worse state is news."""
    groups: dict[tuple[int, int, str], list[Change]] = {}
    for s in cells:
        good: int | None = None
        stretch: list[Change] = []
        for p in s.points:
            if p.state == "ok":
                for bad in stretch:
                    members = groups[bad.before, bad.after, bad.new]
                    members[members.index(bad)] = replace(bad, back=p.run)
                good, stretch = p.run, []
            elif good is not None and all(RANK.get(p.state, 5) < RANK.get(bad.new, 5) for bad in stretch):
                old = stretch[-1].new if stretch else "ok"
                change = Change(s, good, p.run, p.run, None, old, p.state, " ".join(p.cell.reason.split()))
                groups.setdefault((good, p.run, p.state), []).append(change)
                stretch.append(change)
    return [tuple(members) for members in groups.values()]


def _machine_steps(key: str, runs: Sequence[Run]) -> tuple[tuple[int, int, float], ...]:
    found, indices = series_of.probe_steps(key, runs)
    return tuple((indices[s.first - 1], indices[s.last], s.ratio) for s in found.steps)


def _notes(
    group: Sequence[Change], runs: Sequence[Run], metric: str, cells: int, moved: Iterable[tuple[int, int, float]]
) -> tuple[str, ...]:
    """Return notes on what else changed in the event's range."""
    low, high = max(c.before for c in group), min(c.after for c in group)
    notes = list(_versions(group, runs[low], runs[high]))
    for before, after, ratio in moved:
        # Where only the speed probe moved, normalising makes a step of the other direction and of the same size.
        against = all(c.step and math.log(c.step.ratio) / -math.log(ratio) <= 2 for c in group)
        opposite = all(c.step and (c.step.ratio > 1) != (ratio > 1) for c in group)
        if metric == "time" and against and opposite and max(before, low) < min(after, high):
            notes.append(
                f"the speed probe itself became {_span(ratio, ratio)} {'slower' if ratio > 1 else 'faster'} here: "
                "look at "
                "the raw seconds"
            )
    names = {c.series.cell.framework for c in group}
    if metric == "time" and len(names) > 1 and len(group) >= MOST_CELLS * cells:
        notes.append(f"{len(group)} of the machine's {cells} cells moved: more likely the machine or the instrument")
    for c in group:
        marks = {p.run: p.cell.extrapolated for p in c.series.timed}
        if metric == "time" and marks.get(low) is not None and marks.get(low) != marks.get(high, marks.get(low)):
            notes.append("seconds were extrapolated from a part of an epoch on one side only")
            break
    reasons = sorted({c.reason for c in group if c.reason})
    return (*notes, *reasons[:2])


def _versions(group: Sequence[Change], before: Run, after: Run) -> Iterable[str]:
    for name in sorted({c.series.cell.framework for c in group}):
        old, new = before.versions.get(name, {}), after.versions.get(name, {})
        if not old or not new:
            continue
        changed = [p for p in sorted(old.keys() | new.keys()) if old.get(p) != new.get(p)]
        if changed:
            shown = ", ".join(f"{p} {old.get(p, 'none')} → {new.get(p, 'none')}" for p in changed[:4])
            yield f"{name} ran on other versions: {shown}" + (
                f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            )


def current(events: Iterable[Event], newest: Run, days: int) -> list[Event]:
    """Open changes for the worse detected at most ``days`` before the ``newest`` run, most severe first."""
    kept = [e for e in events if e.open and newest.moment - e.detected.moment <= timedelta(days=days)]
    return sorted(kept, key=lambda e: (e.severity, e.after.moment))

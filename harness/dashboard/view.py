"""Values that the pages show: one :class:`CellView` per series, and small drawings made beforehand.

Charts are drawn by the page's own script from whole numbers. Vega, which the report uses, was measured first: 0.9 MB
and 0.8 to 2.6 s for 16 charts of 700 points on two cores, where a page of this site has up to 40.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from harness.analysis.naming import duration, factor, machine_slug, size, slug
from harness.history import series as series_of
from harness.history.events import RANK, Event
from harness.history.runs import History, Run
from harness.history.series import Move, Point, Series
from harness.tasks import TASKS

SPARK_WIDTH, SPARK_HEIGHT, SPARK_BINS = 132, 26, 60
LEAST_SPAN = 0.10
"""A sparkline spans at least +-10 %, so that noise looks as small as it is."""
SCALE = 10_000
"""Values go into a page as whole numbers, relative to the series' base."""


@dataclass(frozen=True)
class Options:
    """``days``: what counts as new. ``repository``: address that commits are linked to. ``site``: address that the feed
    links to; relative links without it."""

    days: int = 30
    repository: str | None = None
    site: str | None = None


@dataclass(frozen=True)
class MachineView:
    """``short`` tells machines apart inside of anchors."""

    key: str
    label: str
    short: str
    runs: tuple[Run, ...]
    speed_probe: str
    last: str

    @property
    def first(self) -> str:
        return self.runs[0].time[:10]


@dataclass(frozen=True)
class CellView:
    """A series as the pages show it."""

    series: Series
    machine: MachineView
    events: tuple[Event, ...]
    days: int

    @property
    def id(self) -> str:
        return f"{self.series.name}@{self.machine.short}"

    @property
    def kind(self) -> str:
        return "layer" if self.series.cell.kind == "layer" else "task"

    @property
    def subject(self) -> str:
        return self.series.cell.subject

    @property
    def page(self) -> str:
        return page_name(self.kind, self.subject)

    @property
    def address(self) -> str:
        return f"{self.page}#{self.id}"

    @property
    def framework(self) -> str:
        return self.series.cell.framework

    @property
    def subject_title(self) -> str:
        return subject_title(self.kind, self.subject)

    @cached_property
    def title(self) -> str:
        """Without the subject, which a page or a heading holds."""
        c = self.series.cell
        parts = [c.contestant, *((c.passes.replace("_", "-"),) if c.passes else ()), f"batch {c.batch_size}"]
        return " · ".join(parts)

    @property
    def full_title(self) -> str:
        return f"{self.subject_title} · {self.title}"

    @cached_property
    def setting(self) -> str:
        c = self.series.cell
        return " · ".join((c.protocol, c.device, c.isolation, *(("synthetic data",) if c.synthetic else ())))

    @property
    def state(self) -> str:
        return self.series.points[-1].state

    @property
    def reason(self) -> str:
        return self.series.points[-1].cell.reason

    @cached_property
    def stale(self) -> bool:
        """The machine's newest run does not hold this cell."""
        return self.series.points[-1].run < len(self.series.runs) - 1

    @property
    def last_day(self) -> str:
        """The day of the newest run that holds this cell."""
        return self.series.runs[self.series.points[-1].run].time[:10]

    @cached_property
    def last_time(self) -> Point | None:
        return next((p for p in reversed(self.series.points) if p.normalised is not None), None)

    @property
    def seconds(self) -> str:
        """Seconds of the newest run that holds the cell; a cell that is not ok has none."""
        p = self.last_time
        if p is None or p.normalised is None or self.state != "ok":
            return "–"
        return duration(p.normalised) + ("ᵉ" if p.cell.extrapolated else "") + ("ᵈ" if p.vetoed else "")

    @property
    def bytes(self) -> str:
        counted = self.series.counted
        return size(counted[-1].bytes or 0) if counted and self.state == "ok" else "–"

    @cached_property
    def move(self) -> Move | None:
        return series_of.move(self.series, self.days) if self.state == "ok" else None

    @property
    def ratio(self) -> str:
        return "–" if self.move is None else percent(self.move.ratio)

    @property
    def ratio_class(self) -> str:
        if self.move is None or not self.move.clear or abs(math.log(self.move.ratio)) < math.log(1.01):
            return "calm"
        return "worse" if self.move.ratio > 1 else "better"

    @cached_property
    def open(self) -> tuple[Event, ...]:
        """Its open changes for the worse, as far as they are its own."""
        return tuple(e for e in self.events if e.open and any(c.series is self.series for c in e.bad_cells))

    @cached_property
    def recent(self) -> tuple[Event, ...]:
        newest = self.machine.runs[-1].moment
        return tuple(e for e in self.events if (newest - e.detected.moment).days <= self.days)

    @property
    def trouble(self) -> str:
        """The new trouble with a cell that is ok: ``slower``, ``more memory``."""
        metrics = {e.metric for e in self.open if e in self.recent}
        return " and ".join(
            word for metric, word in (("time", "slower"), ("memory", "more memory")) if metric in metrics
        )

    @cached_property
    def mark(self) -> str:
        """``red``, ``worse``, ``better`` or nothing: what is new with it."""
        newest, recent = self.machine.runs[-1].moment, self.recent
        mine = [e for e in self.open if e in recent]
        seen = self.series.runs[self.series.points[-1].run].moment
        if any(e.red for e in mine) or (RANK.get(self.state, 9) < 4 and (newest - seen).days <= self.days):
            return "red"
        return "worse" if mine else "better" if any(not e.worse for e in recent) else ""

    @cached_property
    def spark(self) -> str:
        return spark(self.series)


def page_name(kind: str, name: str) -> str:
    """Return the file name of a page."""
    return f"{kind}-{slug(name)}.html"


def percent(ratio: float) -> str:
    """+12.3 %, −4.0 %, from a factor of 2 on 2.10×."""
    if ratio >= 2 or ratio <= 0.5:
        return f"{factor(ratio)}×"
    value = (ratio - 1) * 100
    text = f"{abs(value):.1f}"
    return "0.0 %" if text == "0.0" else f"{'+' if value > 0 else '−'}{text} %"


def subject_title(kind: str, name: str) -> str:
    """Return the name of a task, layer or framework for readers."""
    return TASKS[name].title if kind == "task" and name in TASKS else name


def days_of(runs: Sequence[Run]) -> list[float]:
    """Return the times of the runs in days."""
    return [run.moment.timestamp() / 86400 for run in runs]


def spark(s: Series) -> str:
    """SVG of the whole series on the time axis of its machine: medians in SPARK_BINS bins, the last level's end marked.
    A series of one run is a dot."""
    when = days_of(s.runs)
    return draw([(when[p.run], p.normalised) for p in s.timed if p.normalised], when[0], when[-1])


def draw(values: Sequence[tuple[float, float]], first: float, last: float) -> str:
    """SVG path data and the last point of (day, value) pairs, as ``d|x|y``; empty where there is none."""
    if not values:
        return ""
    span = max(last - first, 1e-9)
    bins: dict[int, list[float]] = {}
    for day, value in values:
        bins.setdefault(min(SPARK_BINS - 1, int((day - first) / span * SPARK_BINS)), []).append(value)
    points = [(i, float(np.log(np.median(v)))) for i, v in sorted(bins.items())]
    logs = np.array([y for _, y in points])
    middle = float(np.median(logs))
    reach = max(LEAST_SPAN, float(np.quantile(np.abs(logs - middle), 0.98)))
    inner, pad = SPARK_WIDTH - 6, 3
    drawn = [
        (
            round(pad + i / (SPARK_BINS - 1) * inner, 1),
            round(SPARK_HEIGHT / 2 - float(np.clip((y - middle) / reach, -1, 1)) * (SPARK_HEIGHT / 2 - pad), 1),
        )
        for i, y in points
    ]
    path, before = [], None
    for (i, _), (x, y) in zip(points, drawn, strict=True):
        # A gap breaks the line; a short stroke with round caps makes a dot of a run that stands alone.
        path.append(f"M{x - 0.7:g} {y:g}h1.4" if before is None or i - before > 3 else f"L{x:g} {y:g}")
        before = i
    return f"{''.join(path)}|{drawn[-1][0]:g}|{drawn[-1][1]:g}"


def machines(history: History) -> list[MachineView]:
    """Return what the pages show of each machine."""
    found, taken = [], set()
    for i, (key, runs) in enumerate(history.machines.items()):
        label = runs[-1].machine_label
        short = slug(machine_slug(label)) or key
        if short in taken:
            short = f"{short}-{i}"
        taken.add(short)
        when = days_of(runs)
        probes = [(day, run.canary_seconds) for day, run in zip(when, runs, strict=True) if run.canary_seconds]
        found.append(MachineView(key, label, short, runs, draw(probes, when[0], when[-1]), runs[-1].time[:10]))
    return found


def cells(history: History, events: Iterable[Event], all_series: dict[str, list[Series]], days: int) -> list[CellView]:
    """Return the views in order of machine, task or layer, framework, variant, batch size."""
    by_series: dict[int, list[Event]] = {}
    for event in events:
        for change in event.changes:
            by_series.setdefault(id(change.series), []).append(event)
    order = {name: i for i, name in enumerate(TASKS)}
    views = [
        CellView(s, machine, tuple(by_series.get(id(s), ())), days)
        for machine in machines(history)
        for s in all_series[machine.key]
    ]
    ranks = {view.machine.key: i for i, view in reversed(list(enumerate(views)))}

    def key(v: CellView) -> tuple[Any, ...]:
        c = v.series.cell
        return (
            ranks[v.machine.key],
            c.kind != "e2e",
            order.get(c.subject, len(order)),
            c.subject,
            c.framework,
            c.variant,
            c.passes or "",
            c.batch_size,
            c.protocol,
            c.synthetic,
        )

    return sorted(views, key=key)


def chart_data(views: Sequence[CellView]) -> dict[str, Any]:
    """Return the numbers of one page. Times in minutes, values in 1/SCALE of the series' base, bytes where they
    change."""
    used = list({v.machine.key: v.machine for v in views}.values())
    place = {m.key: i for i, m in enumerate(used)}
    return {
        "machines": [_machine_data(m.runs) for m in used],
        "cells": {v.id: _cell_data(v, place[v.machine.key]) for v in views},
    }


def _machine_data(runs: Sequence[Run]) -> dict[str, Any]:
    reference = series_of.reference_probe(runs)
    return {
        "t": [int(run.moment.timestamp() // 60) for run in runs],
        "commit": [(run.commit or "")[:12] for run in runs],
        "dirty": [i for i, run in enumerate(runs) if run.dirty],
        # Normalised seconds x this = raw seconds.
        "raw": [
            round(run.canary_seconds / reference * SCALE) if reference and run.canary_seconds else SCALE for run in runs
        ],
    }


def _cell_data(v: CellView, machine: int) -> dict[str, Any]:
    s = v.series
    base = float(np.median([p.normalised for p in s.points if p.normalised])) if v.last_time else 1.0
    every = [p.run for p in s.points] == list(range(len(s.runs)))
    data: dict[str, Any] = {
        "m": machine,
        "base": base,
        "v": [round(p.normalised / base * SCALE) if p.normalised else 0 for p in s.points],
        "n": _changes([p.cell.n for p in s.points]),
        "time": _found(s, "time", base),
    }
    if not every:
        data["runs"] = [p.run for p in s.points]
    if not s.normalises:
        data["fixed"] = True
    if vetoed := [i for i, p in enumerate(s.points) if p.vetoed]:
        data["vetoed"] = vetoed
    if any(p.cell.extrapolated for p in s.points):
        data["extrapolated"] = _changes([int(p.cell.extrapolated) for p in s.points])
    if bad := {i: p.state for i, p in enumerate(s.points) if p.state != "ok"}:
        data["states"] = bad
    if s.counted:
        data["bytes"] = _changes([p.bytes or 0 for p in s.points])
        data["memory_metric"] = s.memory_metric
        data["memory"] = _found(s, "memory", 1.0)
    return data


def _changes(values: Sequence[int]) -> list[list[int]]:
    """[index, value] wherever the value differs from the one before."""
    return [[i, v] for i, v in enumerate(values) if i == 0 or v != values[i - 1]]


def _found(s: Series, metric: str, base: float) -> dict[str, Any]:
    found, points = s.found(metric)
    scale = SCALE / base if metric == "time" else 1.0
    return {
        "sd": round(found.noise.sd, 4) if found.noise else None,
        "segments": [[points[g.start].run, points[g.stop - 1].run, round(g.level * scale)] for g in found.segments]
        if found.noise or metric == "memory"
        else [],
        "steps": [
            {
                "at": points[step.at].run,
                "from": before,
                "to": after,
                "alarm": alarm,
                "ratio": _finite(step.ratio),
                "low": _finite(step.low),
                "high": _finite(step.high),
                "sure": round(min(step.confidence, 0.9999), 4),
            }
            for step, before, after, alarm in s.changes(metric)
        ],
    }


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def movers(views: Iterable[CellView], count: int = 8) -> list[CellView]:
    """Return those that moved most against the days before, by more than noise explains."""
    moved = [v for v in views if v.move is not None and v.ratio_class != "calm"]
    return sorted(moved, key=lambda v: -abs(math.log(v.move.ratio)) if v.move else 0.0)[:count]


@dataclass(frozen=True)
class Coverage:
    """``ok`` of ``total`` cells of a subject and a framework; ``worst``: the state of one that is not ok."""

    ok: int
    total: int
    worst: str
    address: str


def coverage(views: Sequence[CellView]) -> tuple[list[str], list[tuple[str, str, dict[str, Coverage]]]]:
    """Return (frameworks, rows of (kind, subject, framework -> coverage)); all machines together."""
    frameworks = sorted({v.framework for v in views})
    groups: dict[tuple[str, str], dict[str, list[CellView]]] = {}
    for v in sorted(views, key=lambda v: v.kind == "layer"):
        groups.setdefault((v.kind, v.subject), {}).setdefault(v.framework, []).append(v)
    rows = []
    for (kind, subject), by_framework in groups.items():
        row = {}
        for name, here in by_framework.items():
            bad = sorted((v for v in here if v.state != "ok"), key=lambda v: RANK.get(v.state, 9))
            first = bad[0] if bad else here[0]
            row[name] = Coverage(len(here) - len(bad), len(here), bad[0].state if bad else "", first.address)
        rows.append((kind, subject, row))
    return frameworks, rows


def versions(history: History, framework: str) -> list[dict[str, str]]:
    """Return where a framework's packages changed, newest first; the first line of a machine is what it started
    with."""
    rows = []
    for runs in history.machines.values():
        before: dict[str, str] | None = None
        for run in runs:
            now = run.versions.get(framework)
            if not now or now == before:
                continue
            changed = sorted(p for p in now.keys() | (before or {}).keys() if now.get(p) != (before or {}).get(p))
            texts = [
                f"{p} {now.get(p, 'none')}" if before is None else f"{p} {before.get(p, 'none')} → {now.get(p, 'none')}"
                for p in changed
            ]
            rows.append(
                {
                    "time": run.time[:10],
                    "commit": run.commit or "",
                    "machine": run.machine_label,
                    "what": ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else ""),
                    "first": "first run" if before is None else "",
                }
            )
            before = now
    return sorted(rows, key=lambda row: row["time"], reverse=True)

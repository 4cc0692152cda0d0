"""What the pages show: one :class:`CellView` per series, and the Vega-Lite specification of their histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.analysis.naming import duration, factor, machine_slug, size, slug
from harness.history.events import Event
from harness.history.runs import History, Run
from harness.history.series import Point, Series
from harness.report.figures import looks
from harness.tasks import TASKS

MIB = 2**20

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


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
    def page(self) -> str:
        return f"{self.kind}-{slug(self.series.cell.subject)}.html"

    @property
    def address(self) -> str:
        return f"{self.page}#{self.id}"

    @property
    def framework(self) -> str:
        return self.series.cell.framework

    @property
    def subject_title(self) -> str:
        name = self.series.cell.subject
        return TASKS[name].title if self.kind == "task" and name in TASKS else name

    @cached_property
    def title(self) -> str:
        """Without the subject, which a page or a heading holds."""
        c = self.series.cell
        parts = [c.contestant, *((c.passes.replace("_", "-"),) if c.passes else ()), f"batch {c.batch_size}"]
        return " · ".join(parts)

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


def percent(ratio: float) -> str:
    """+12.3 %, −4.0 %, from a factor of 2 on 2.10×."""
    if ratio >= 2 or ratio <= 0.5:
        return f"{factor(ratio)}×"
    value = (ratio - 1) * 100
    text = f"{abs(value):.1f}"
    return "0.0 %" if text == "0.0" else f"{'+' if value > 0 else '−'}{text} %"


def machines(history: History) -> list[MachineView]:
    """Return what the pages show of each machine."""
    found, taken = [], set()
    for i, (key, runs) in enumerate(history.machines.items()):
        label = runs[-1].machine_label
        short = slug(machine_slug(label)) or key
        if short in taken:
            short = f"{short}-{i}"
        taken.add(short)
        found.append(MachineView(key, label, short, runs, runs[-1].time[:10]))
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


def chart(views: Sequence[CellView], metric: str) -> dict[str, Any]:
    """Return the Vega-Lite specification of the cells' ``time`` or ``memory``.

    Each cell has a small chart of its runs, of the levels that the step detection found, and of its steps.
    """
    titles = Counter(v.title for v in views)
    names = {v.id: v.title if titles[v.title] == 1 else f"{v.title} · {v.setting}" for v in views}
    rows = [{**row, "cell": names[v.id]} for v in views for row in _rows(v, metric)]

    x = {"field": "time", "type": "temporal", "title": None}
    title = "seconds, normalised" if metric == "time" else "memory in MiB"
    y = {"field": "value", "type": "quantitative", "title": title, "scale": {"zero": False}}
    colour = {"field": "colour", "type": "nominal", "scale": None}
    told = [{"field": name, "type": "nominal"} for name in ("time", "commit", "shown", "state", "n")]
    marks: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "level": (
            {"type": "rule", "strokeWidth": 2, "opacity": 0.6},
            {"x": x, "x2": {"field": "until"}, "y": y, "color": colour},
        ),
        "step": ({"type": "rule", "strokeDash": [4, 3]}, {"x": x, "tooltip": [{"field": "shown", "type": "nominal"}]}),
        "run": ({"type": "point", "filled": True, "size": 22}, {"x": x, "y": y, "color": colour, "tooltip": told}),
        "disturbed": ({"type": "point", "size": 22}, {"x": x, "y": y, "color": colour, "tooltip": told}),
        "no value": (
            {"type": "point", "shape": "cross", "color": "#a81e1e"},
            {"x": x, "y": {"value": 104}, "tooltip": told},
        ),
    }
    # A layer without rows would have a scale without ends, of which the browser complains.
    present = {row["kind"] for row in rows}
    layers = [
        {"transform": [{"filter": f"datum.kind === '{kind}'"}], "mark": mark, "encoding": encoding}
        for kind, (mark, encoding) in marks.items()
        if kind in present
    ]
    return {
        "$schema": SCHEMA,
        "data": {"values": rows},
        "facet": {"field": "cell", "type": "nominal", "title": None, "sort": list(names.values())},
        "columns": 2,
        "resolve": {"scale": {"y": "independent"}},
        "spec": {"width": 460, "height": 110, "layer": layers},
        "background": "#ffffff",
    }


def _rows(v: CellView, metric: str) -> Iterator[dict[str, Any]]:
    s = v.series
    common = {"colour": looks.of(f"{v.framework}-").colour}
    is_time = metric == "time"
    for p in s.points:
        value = p.normalised if is_time else None if p.bytes is None else p.bytes / MIB
        run = s.runs[p.run]
        shown = "–" if value is None else duration(value) if is_time else size(int(p.bytes or 0))
        if value is None and p.state == "ok":
            continue
        kind = "no value" if value is None else "disturbed" if is_time and p.vetoed else "run"
        told = {"commit": run.short_commit, "shown": shown, "state": p.state, "n": p.cell.n}
        yield {**common, "kind": kind, "time": run.time, "value": value, **told}
    found, points = s.found(metric)
    for level in found.segments if len(points) > 1 else ():
        ends = {"time": s.runs[points[level.start].run].time, "until": s.runs[points[level.stop - 1].run].time}
        yield {**common, "kind": "level", "value": level.level / (1 if is_time else MIB), **ends}
    for step, before, after, _ in s.changes(metric):
        where = f"{percent(step.ratio)} between {s.runs[before].short_commit} and {s.runs[after].short_commit}"
        yield {**common, "kind": "step", "time": s.runs[points[step.at].run].time, "shown": where}

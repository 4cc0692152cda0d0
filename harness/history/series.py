"""Series over the runs of a history: one cell on one machine, normalised by the speed probe, with its steps.

**Normalised seconds** = seconds x (reference speed probe / the run's speed probe). The speed probe
(:mod:`harness.worker.speed_probe`) is a fixed
piece of work of the processor that knows no framework, measured before and after every process; so where it takes 3 %
longer the machine is 3 % slower, and a cell that also takes 3 % longer has not changed. The reference is the median
speed probe of the machine's runs: a constant, which moves no ratio and no step. Cells on a GPU are not normalised: the
speed probe says nothing of a GPU. Runs without a speed probe are taken as they are.

What is vetoed (every process of the cell disturbed) is shown and counts in nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from harness.analysis import change_points
from harness.analysis.change_points import Found, Step
from harness.history.runs import CellResult, History, Run

EXACT = ("cpu_peak_allocated", "cuda_peak_allocated")
"""Metrics of memory that count bytes; they do not jitter."""
MEMORY_METRICS = (*EXACT, "peak_resident_growth", "nvml_process_peak")
"""Those that have a series: the first that a cell has."""


@dataclass(frozen=True)
class Point:
    """One run of a cell. ``run``: its index among the machine's runs. ``value`` None: no time, ``state`` says why."""

    run: int
    cell: CellResult
    seconds: float | None
    normalised: float | None
    vetoed: bool
    bytes: int | None

    @property
    def state(self) -> str:
        return self.cell.state


@dataclass(frozen=True)
class Series:
    """A cell on a machine. ``runs`` are all of the machine's; ``points`` those that hold the cell, in order."""

    machine: str
    name: str
    runs: tuple[Run, ...]
    points: tuple[Point, ...]
    memory_metric: str | None

    @property
    def cell(self) -> CellResult:
        """The cell as of the newest run that holds it."""
        return self.points[-1].cell

    @cached_property
    def timed(self) -> tuple[Point, ...]:
        """The points that the statistics see."""
        return tuple(p for p in self.points if p.normalised is not None and not p.vetoed)

    @cached_property
    def counted(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.bytes is not None)

    @cached_property
    def time(self) -> Found:
        """Indices of its steps are those of ``timed``."""
        return change_points.find([p.normalised for p in self.timed if p.normalised is not None])

    @cached_property
    def memory(self) -> Found:
        """Indices of its steps are those of ``counted``."""
        values = [p.bytes for p in self.counted if p.bytes is not None]
        if self.memory_metric in EXACT or not values:
            found = change_points.exact(values)
            # Bytes that keep going back to what they were are not exact after all; those that only grow are, however
            # often: a further step must not take back what was published of the earlier ones.
            levels = [segment.level for segment in found.segments]
            returns = sum(level in levels[:i] for i, level in enumerate(levels))
            if returns <= max(3, len(values) // 10):
                return found
        return change_points.find([max(1, v) for v in values])

    def found(self, metric: str) -> tuple[Found, tuple[Point, ...]]:
        """Return what was found of ``time`` or ``memory``, and the points that its indices count."""
        return (self.time, self.timed) if metric == "time" else (self.memory, self.counted)

    def changes(self, metric: str) -> Iterator[tuple[Step, int, int, int]]:
        """Yield (step, last run before it, first run after it, run of its alarm), as indices of ``runs``."""
        found, points = self.found(metric)
        for step in found.steps:
            yield step, points[step.first - 1].run, points[step.last].run, points[step.alarm].run


def reference_probe(runs: Sequence[Run]) -> float | None:
    """Return the usual seconds of the speed probe on this machine; None where no run has any."""
    probes = [run.canary_seconds for run in runs if run.canary_seconds]
    return median(probes) if probes else None


def of_machine(key: str, runs: Sequence[Run]) -> list[Series]:
    """Return all series of one machine, by name."""
    reference = reference_probe(runs)
    points: dict[str, list[Point]] = {}
    memory_metrics: dict[str, str] = {}
    for run in runs:
        for cell in run.cells:
            memory_metric = next((n for n in MEMORY_METRICS if n in cell.memory), None)
            if memory_metric is not None:
                known = memory_metrics.setdefault(cell.series, memory_metric)
                if MEMORY_METRICS.index(memory_metric) < MEMORY_METRICS.index(known):
                    memory_metrics[cell.series] = memory_metric
    for i, run in enumerate(runs):
        factor = reference / run.canary_seconds if reference and run.canary_seconds else 1.0
        for cell in run.cells:
            value = cell.value if cell.state == "ok" else None
            scaled = None if value is None else value * (factor if cell.device == "cpu" else 1.0)
            count = cell.memory.get(memory_metrics.get(cell.series, "")) if cell.state == "ok" else None
            points.setdefault(cell.series, []).append(Point(i, cell, value, scaled, cell.vetoed, count))
    return [Series(key, name, tuple(runs), tuple(p), memory_metrics.get(name)) for name, p in sorted(points.items())]


def of_history(history: History) -> dict[str, list[Series]]:
    """Machine -> its series."""
    return {key: of_machine(key, runs) for key, runs in history.machines.items()}


def probe_steps(key: str, runs: Sequence[Run]) -> tuple[Found, tuple[int, ...]]:
    """Steps of the machine itself, and the runs that the indices count."""
    with_canary = tuple(i for i, run in enumerate(runs) if run.canary_seconds)
    return change_points.find([float(runs[i].canary_seconds or 1) for i in with_canary]), with_canary

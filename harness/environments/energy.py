"""Energy by the driver's own counter of the GPU (NVML).

Nothing is estimated: what has no counter, or may not be read, is :class:`Unavailable`, with the reason. Samples of
power are no counter: between two of them anything may happen. What a figure is worth: :mod:`harness.analysis.energy`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from harness.environments.unavailable import Unavailable
from harness.store.energy import GPU, Energy
from harness.worker.clock import DISTURBED_SHARE, ForeignLoad
from harness.worker.result import Result

IDLE_SECONDS = 3.0
LOOK_SECONDS = 5e-3


class Counter(Protocol):
    """Energy since some moment."""

    def joules(self) -> float:
        """Return joules since the counter was opened. Raises OSError where it cannot be read any more."""
        ...


class Nvml:
    """The one GPU, as the driver counts it."""

    def __init__(self, module: Any, gpu: Any) -> None:
        self._nvml, self._gpu = module, gpu
        self._start = self._millijoules()

    def _millijoules(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu))
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML says {error}") from None

    def joules(self) -> float:
        return (self._millijoules() - self._start) / 1e3


def open_nvml() -> Nvml | Unavailable:
    """Return the counter of the GPU, or why there is none, or none that tells whose work it counts."""
    try:
        import pynvml
    except ImportError:
        return Unavailable("the harness's Python has no nvidia-ml-py, which reads the driver's counter")
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        if count != 1:
            return Unavailable(f"the driver sees {count} GPUs; what others do on them would be counted, too")
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        if _is_shared(pynvml, gpu):
            return Unavailable("the GPU is divided (MIG), and its counter is that of all parts")
        return Nvml(pynvml, gpu)
    except (pynvml.NVMLError, OSError) as error:
        return Unavailable(f"the driver does not count energy here ({error})")


def _is_shared(nvml: Any, gpu: Any) -> bool:
    """Return whether the GPU is divided; one that cannot be is not."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except nvml.NVMLError:
        return False


Counters = Mapping[str, Counter | Unavailable]


@cache
def counters(device: str) -> Counters:
    """Return the counters of what works for a contestant on ``device``, opened once in a process; none for the CPU."""
    return {GPU: open_nvml()} if device == "cuda" else {}


def _read(found: Counters) -> dict[str, float]:
    said = {}
    for name, counter in found.items():
        if not isinstance(counter, Unavailable):
            try:
                said[name] = counter.joules()
            except OSError:
                continue
    return said


@dataclass(frozen=True)
class Idle:
    """Power that the machine takes before anything of a run is at work: ``watts`` by counter, and how often each moves:
    once in ``step_seconds``. ``reason``: why nothing was measured."""

    watts: Mapping[str, float] = field(default_factory=dict)
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None


def idle(found: Counters, seconds: float = IDLE_SECONDS) -> Idle:
    """Watch the counters for so many seconds; at once where there is none."""
    first = _read(found)
    if not first:
        return Idle()
    load, start, last = ForeignLoad(), time.monotonic(), first
    moves = dict.fromkeys(first, 0)
    with load.watch():
        while (took := time.monotonic() - start) < seconds:
            time.sleep(LOOK_SECONDS)
            now = _read(found)
            for name in moves:
                moves[name] += now.get(name) != last.get(name)
            last = now
    if load.share > DISTURBED_SHARE:
        busy = f"other programs took {load.share:.0%} of the processors when the idle machine was to be measured"
        return Idle(reason=busy)
    there = first.keys() & last.keys()
    watts = {name: (last[name] - first[name]) / took for name in there}
    steps = {name: took / max(1, moves[name]) for name in there}
    return Idle(watts, steps)


@dataclass
class Meter:
    """Adds up what the counters move by in the timed stretches of one process."""

    found: Counters
    joules: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    stretches: int = 0
    _before: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        self._before = _read(self.found)

    def stop(self, seconds: float) -> None:
        """``seconds``: of the stretch, by the harness's clock."""
        after = _read(self.found)
        self.seconds += seconds
        self.stretches += 1
        for name, counter in self.found.items():
            if isinstance(counter, Unavailable):
                self.faults[name] = counter.reason
            elif name not in after or name not in self._before:
                self.faults[name] = "its counter could not be read during the run"
            else:
                self.joules[name] = self.joules.get(name, 0.0) + after[name] - self._before[name]

    def said(self) -> dict[str, Any]:
        """Return what :class:`harness.store.energy.Energy` has of the stretches."""
        joules = {name: value for name, value in self.joules.items() if name not in self.faults}
        return {
            "joules": joules,
            "seconds": self.seconds,
            "stretches": self.stretches,
            "unavailable": dict(self.faults),
        }


def energy_of(result: Result, idle: Idle) -> Energy | None:
    """Return the energy of a process, beside what the idle machine takes."""
    if result.energy is None:
        return None
    said = Energy(**result.energy, idle_watts=dict(idle.watts), step_seconds=dict(idle.step_seconds))
    if idle.reason is None:
        return said
    return said.model_copy(update={"unavailable": dict.fromkeys(said.joules, idle.reason) | said.unavailable})

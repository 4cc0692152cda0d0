"""Energy by the machine's own counters: NVML's of its GPU, RAPL's of its processors and their memory.

Nothing is estimated: what has no counter, or may not be read, is :class:`Unavailable`, with the reason. Samples of
power are no counter: between two of them anything may happen. What a figure is worth: :mod:`harness.analysis.energy`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from harness.environments.unavailable import Unavailable
from harness.store.record import GPU, PROCESSORS
from harness.worker.clock import ForeignLoad

POWERCAP = Path("/sys/class/powercap")
RAPL_ZONES = ("package", "dram")
"""Names of what is counted: processors and their memory. The zones of cores are parts of packages."""
MOST_WATTS = 1_000.0
"""Highest power of one zone, in watts. A counter that could have gone round more than once at that power says
nothing."""
IDLE_SECONDS = 3.0
LOOK_SECONDS = 5e-3
BUSY_SHARE = 0.05
"""Share of the processors from which on, if others take it, the machine is not idle."""


class Counter(Protocol):
    """Energy since some moment. ``longest_seconds``: after so many between two readings it may have gone round
    twice."""

    longest_seconds: float

    def joules(self) -> float:
        """Return joules since the counter was opened. Raises OSError where it cannot be read any more."""
        ...


class _Zone:
    """One RAPL zone, whose counter begins anew at its range."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self.range = int((folder / "max_energy_range_uj").read_text())
        self._last = self._read()
        self._total = 0

    def _read(self) -> int:
        return int(self._file.read_text())

    def microjoules(self) -> int:
        """Return what it has counted since it was opened, once round at most between two calls."""
        now = self._read()
        moved = now - self._last
        self._total += moved if moved >= 0 else moved + self.range
        self._last = now
        return self._total


class Rapl:
    """All packages of processors and their memory, as the kernel counts them."""

    def __init__(self, zones: list[_Zone]) -> None:
        self._zones = zones
        self.longest_seconds = min(zone.range for zone in zones) / 1e6 / MOST_WATTS

    def joules(self) -> float:
        return sum(zone.microjoules() for zone in self._zones) / 1e6


class Nvml:
    """The one GPU, as the driver counts it."""

    longest_seconds = float("inf")

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


def open_rapl(root: Path = POWERCAP) -> Rapl | Unavailable:
    """Return the counters of the processors under ``root``, or why there are none."""
    zones = []
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            if (folder / "name").read_text().startswith(RAPL_ZONES):
                zones.append(_Zone(folder))
        except PermissionError:
            return Unavailable("the kernel lets only its administrator read RAPL's counters (energy_uj)")
        except (OSError, ValueError) as error:
            return Unavailable(f"RAPL's counters cannot be read ({error})")
    return Rapl(zones) if zones else Unavailable("the kernel shows no RAPL counters here")


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
    """Return the counters of what works for a contestant on ``device``, opened once in a process."""
    found: dict[str, Counter | Unavailable] = {PROCESSORS: open_rapl()}
    return {GPU: open_nvml(), **found} if device == "cuda" else found


def _read(found: Counters) -> dict[str, float]:
    said = {}
    for name, counter in found.items():
        if not isinstance(counter, Unavailable):
            try:
                said[name] = counter.joules()
            except (OSError, ValueError):
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
    if load.share > BUSY_SHARE:
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
            elif seconds > counter.longest_seconds:
                self.faults[name] = (
                    f"its counter may go round twice in {counter.longest_seconds:.0f} s, and a timed stretch took "
                    f"{seconds:.0f} s"
                )
            else:
                self.joules[name] = self.joules.get(name, 0.0) + after[name] - self._before[name]

    def said(self) -> dict[str, Any]:
        """Return what :class:`harness.store.record.Energy` has of the stretches."""
        joules = {name: value for name, value in self.joules.items() if name not in self.faults}
        return {
            "joules": joules,
            "seconds": self.seconds,
            "stretches": self.stretches,
            "unavailable": dict(self.faults),
        }

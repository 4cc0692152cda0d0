"""The clock of the end-to-end tasks, and what disturbs it. Standard library only."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.worker import quota
from harness.worker.memory import descendants

if TYPE_CHECKING:
    import numpy as np

    from harness.contract import Adapter

Batch = tuple["np.ndarray", "np.ndarray | None"]
DISTURBED_SHARE = 0.05
"""Share of the processors that others may take while the clock runs: beyond it a time is disturbed, and a machine that
should be idle is not."""


def timed_steps(adapter: Adapter, batches: Sequence[Batch]) -> float:
    """Seconds from a device at rest to a device at rest, around one ``step`` for each (indices, mask)."""
    step = adapter.step
    adapter.synchronize()
    start = time.perf_counter()
    for indices, mask in batches:
        step(indices, mask)
    adapter.synchronize()
    return time.perf_counter() - start


def timed_until(adapter: Adapter, batches: Sequence[Batch], is_stopped: Callable[[], bool] | None) -> tuple[float, int]:
    """(seconds, steps made), as :func:`timed_steps`; ends after the step during which ``is_stopped`` became true."""
    if is_stopped is None:
        return timed_steps(adapter, batches), len(batches)
    step, made = adapter.step, 0
    adapter.synchronize()
    start = time.perf_counter()
    for indices, mask in batches:
        step(indices, mask)
        made += 1
        if is_stopped():
            break
    adapter.synchronize()
    return time.perf_counter() - start, made


def timed_epoch(adapter: Adapter, seed: int) -> tuple[float, int | None]:
    """(seconds, updates) of one epoch by the library's own loop, from a device at rest to a device at rest."""
    adapter.synchronize()
    start = time.perf_counter()
    updates = adapter.epoch(seed)
    adapter.synchronize()
    return time.perf_counter() - start, updates


@contextmanager
def collector_paused(collect: bool = True) -> Iterator[None]:
    """Python's cycle collector off, so that its pauses, which depend on what else was imported, fall on nobody.
    ``collect``: once before; not where that was done a moment ago."""
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass
class ForeignLoad:
    """Adds up, over timed windows, what share of the processors that this process may use others took, and how often a
    quota of its control group stopped it.

    Linux's /proc/stat counts all busy ticks (and ticks stolen by the host); what this process and its children used
    is taken off; of living children only where it has ``ranks``, because to find them takes milliseconds. Ticks are
    10 ms, so windows much shorter than a second are coarse.
    """

    foreign: float = 0.0
    available: float = 0.0
    periods: int = 0
    stopped: int = 0
    group: quota.Group | None = field(default_factory=quota.group)
    ranks: bool = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        before, begun = _cpu_seconds(self.ranks), self.group.periods() if self.group else (0, 0)
        yield
        after, ended = _cpu_seconds(self.ranks), self.group.periods() if self.group else (0, 0)
        self.periods += ended[0] - begun[0]
        self.stopped += ended[1] - begun[1]
        if before is None or after is None:
            return
        wall, busy, own = (b - a for a, b in zip(before, after, strict=True))
        self.foreign += max(0.0, busy - own)
        self.available += wall * len(_own_processors())

    @property
    def share(self) -> float:
        return self.foreign / self.available if self.available else 0.0

    @property
    def throttled(self) -> float:
        """Return the share of the quota's periods in which this process's group was stopped."""
        return self.stopped / self.periods if self.periods else 0.0


def _own_processors() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cpu_seconds(ranks: bool) -> tuple[float, float, float] | None:
    """(wall, busy seconds of our processors, this process tree's CPU seconds); None where there is no /proc/stat."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ours = {f"cpu{number}" for number in _own_processors()}
    busy = 0
    for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
        if name in ours:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(v) for v in fields[:8])
            busy += user + nice + system + irq + softirq + steal
    own = sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
    living = sum(map(_ticks, descendants())) if ranks else 0
    return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), own + living / os.sysconf("SC_CLK_TCK")


def _ticks(pid: str) -> int:
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    except OSError:  # it has ended meanwhile
        return 0

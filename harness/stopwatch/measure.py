"""A step of anybody's own under the instrument's clock: warm-up, calibrated rounds, foreign load. Standard library
only: a process that is measured holds little of the harness besides."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from harness.worker import memory as resident
from harness.worker.clock import ForeignLoad, collector_paused, timed_steps

if TYPE_CHECKING:
    from harness.contract import Adapter

WARM_UP_CALLS = 3
WARM_UP_SECONDS = 0.05
LONGEST_WARM_UP = 3.0
"""The warm-up takes at least so many calls and seconds; a slow step ends it."""

ROUND_SECONDS = 0.01
"""A round repeats a short step until it lasts so long: the clock itself (under 1 µs) is then nothing beside it."""

TIMED_SECONDS = 0.5
LEAST_ROUNDS = 5
MOST_ROUNDS = 200

COLLECTED_SECONDS = 0.5
"""Python's collector runs after so many timed seconds, outside the clock: a step may leave cyclic garbage."""

DISTURBED_SHARE = 0.05
SHARE_FROM = 0.5
"""Processor-seconds: over shorter times the kernel's ticks of 10 ms make the share of others a guess."""

REPEATS = 1
"""How often a disturbed measurement is made again; the last one counts and keeps its mark."""

TRACED = "tracemalloc_peak_growth"
"""Highest sum of the blocks that Python's tracemalloc sees during a call (Python's own and numpy's; not those of torch
or of a device), above what was there before it."""

Action = Callable[[], Any]


@dataclass(frozen=True)
class Process:
    """Measurements of one process. ``seconds``: per call, one figure a round of ``calls`` calls; ``foreign_share``: of
    the processors that it may use, taken by others meanwhile (0 where the time was too short to tell); ``observed``: a
    tracer, profiler or coverage tool was at work; ``memory``: bytes by named metric."""

    seconds: tuple[float, ...]
    calls: int
    warm_up: int
    foreign_share: float
    repeats: int = 0
    observed: bool = False
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def disturbed(self) -> bool:
        return self.foreign_share > DISTURBED_SHARE or self.observed

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"disturbed": self.disturbed}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Process:
        kept = {key: value for key, value in data.items() if key != "disturbed"}
        return cls(**kept | {"seconds": tuple(kept["seconds"])})


class _Subject:
    """The subject that the clock drives in place of an adapter: the step, however many calls, between two waits for the
    device."""

    def __init__(self, step: Action, synchronize: Action | None) -> None:
        self._step = step
        self._synchronize = synchronize
        self.last: Any = None

    def step(self, indices: object, mask: object) -> None:
        self.last = self._step()

    def synchronize(self) -> None:
        if self._synchronize is not None:
            self._synchronize()


def measure(
    step: Action,
    synchronize: Action | None = None,
    setup: Action | None = None,
    rounds: int | None = None,
    memory: bool = False,
) -> tuple[Process, Any]:
    """Return (figures, what the last call returned). ``synchronize`` blocks until the device has done all its work; it
    is called before the clock starts and before it stops. ``setup`` is called before every call of ``step``, outside
    the clock; with it every round is one call. ``rounds``: so many instead of what fits into half a second.
    """
    subject = _Subject(step, synchronize)

    def timed(calls: int) -> float:
        """Return seconds per call."""
        if setup is not None:
            setup()
        return timed_steps(cast("Adapter", subject), [(None, None)] * calls) / calls  # type: ignore[list-item]

    for repeat in range(REPEATS + 1):  # noqa: B007 (it goes into the figures)
        warm_up, pace = _warm_up(timed)
        calls = 1 if setup is not None else max(1, round(ROUND_SECONDS / max(pace, 1e-9)))
        load = ForeignLoad()
        with collector_paused(), load.watch():
            seconds = _rounds(timed, calls, rounds)
        share = load.share if load.available >= SHARE_FROM else 0.0
        if share <= DISTURBED_SHARE:
            break
    return (
        Process(
            seconds=tuple(seconds),
            calls=calls,
            warm_up=warm_up,
            foreign_share=share,
            repeats=repeat,
            observed=_observed(),
            memory=_peaks(subject, setup) if memory else {},
        ),
        subject.last,
    )


def _warm_up(timed: Callable[[int], float]) -> tuple[int, float]:
    """Return (calls, seconds of the fastest of the last three)."""
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < WARM_UP_CALLS or time.perf_counter() - started < WARM_UP_SECONDS:
        seconds.append(timed(1))
        if time.perf_counter() - started > LONGEST_WARM_UP:
            break
    return len(seconds), min(seconds[-3:])


def _rounds(timed: Callable[[int], float], calls: int, rounds: int | None) -> list[float]:
    seconds: list[float] = []
    spent = collected = 0.0
    while (
        len(seconds) < rounds
        if rounds is not None
        else len(seconds) < LEAST_ROUNDS or (spent < TIMED_SECONDS and len(seconds) < MOST_ROUNDS)
    ):
        seconds.append(timed(calls))
        spent += seconds[-1] * calls
        if spent - collected > COLLECTED_SECONDS:
            gc.collect()
            collected = spent
    return seconds


def _peaks(subject: _Subject, setup: Action | None) -> dict[str, int]:
    """Return bytes by metric, each from a call of its own that no clock watches: counting slows a call down."""

    def call() -> None:
        subject.step(None, None)
        subject.synchronize()

    found: dict[str, int] = {}
    if setup is not None:
        setup()
    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        found[TRACED] = max(0, tracemalloc.get_traced_memory()[1] - before)
    finally:
        if ours:
            tracemalloc.stop()
    if setup is not None:
        setup()
    try:
        resident.settle()
        before = resident.now()
        resident.reset_peak()
    except OSError:  # no Linux, or a sandbox that forbids it: this metric cannot be had
        return found
    call()
    found[resident.GROWTH] = max(0, resident.peak() - before)
    return found


def _observed() -> bool:
    """Return whether coverage, a debugger or a profiler watches this process, which then runs slower than its user's
    would."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return monitoring is not None and any(monitoring.get_tool(number) for number in range(6))

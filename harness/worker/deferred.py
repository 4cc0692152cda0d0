"""The weights as they are read after every timed stretch, and work that was put off until then."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from harness.contract import Adapter
from harness.worker.clock import DISTURBED_SHARE, Batch, ForeignLoad, collector_paused, timed_steps
from harness.worker.line import Line


@dataclass(frozen=True)
class Read:
    """Seconds: of the timed stretch before it, of a first and of a second reading of the weights; of this process's
    processor time in the longer one, and how much more it was in the first."""

    timed: float
    first: float
    second: float
    cpu: float
    extra_cpu: float


def copies(adapter: Adapter, into: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return copies of the weights, which an adapter may still change, in arrays of ``into`` where there are such.

    The pages of fresh memory are cleared when they are first written, which took 0.03 s for 64 MB: no work put off.
    """
    found = {}
    for name, value in adapter.parameters().items():
        value, held = np.asarray(value), into.get(name)
        if held is None or (held.shape, held.dtype) != (value.shape, value.dtype):
            held = np.empty(value.shape, value.dtype)
        np.copyto(held, value)
        found[name] = held
    return found


def hash_of(weights: Mapping[str, np.ndarray]) -> str:
    """Return a hash of weights, by which a worker commits itself to them: the empty text where there are none."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).data)
    return digest.hexdigest() if weights else ""


def read_twice(
    adapter: Adapter, timed: float, line: Line, into: Sequence[Mapping[str, np.ndarray]]
) -> tuple[list[dict[str, np.ndarray]], Read]:
    """(weights of both readings, how long it took): work that was deferred past the clock shows as a slow reading. The
    referee, who is told of each, has a clock that the adapter cannot stop. ``into``: the arrays of the last time."""
    start, cpu_start = time.perf_counter(), time.process_time()
    first = copies(adapter, into[0])
    middle, cpu_middle = time.perf_counter(), time.process_time()
    line.tell("read")
    again, cpu_again = time.perf_counter(), time.process_time()
    second = copies(adapter, into[1])
    end, cpu_end = time.perf_counter(), time.process_time()
    line.tell("read")
    one, other = cpu_middle - cpu_start, cpu_end - cpu_again
    return [first, second], Read(timed, middle - start, end - again, max(one, other), one - other)


@dataclass
class Stretches:
    """The timed stretches of one process. ``line``: to the referee, who lets each of them go. ``weights``: after the
    last one; the next is read into the same arrays."""

    adapter: Adapter
    line: Line
    load: ForeignLoad = field(default_factory=ForeignLoad)
    seconds: list[float] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    readings: list[dict[str, np.ndarray]] = field(default_factory=lambda: [{}, {}])
    in_turn: bool = False

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return self.readings[0]

    def begin_turn(self, uncounted: list[Batch], epoch: int, done: int) -> None:
        """Wait for this process's turn; its first steps, if any, are ``uncounted``: they find another one's caches."""
        gc.collect()
        if not self.in_turn:
            gc.freeze()  # what was built stays: the collections between turns do not go through it again
        self.in_turn = True
        self.line.ask("turn", epoch=epoch, done=done, weights=hash_of(self.weights))
        timed_steps(self.adapter, uncounted)

    def finish(self) -> None:
        """Commit to the last weights; return when nobody has a turn left."""
        self.line.ask("finish", weights=hash_of(self.weights))

    def time(
        self, work: Callable[[int], tuple[float, Any]], epoch: int, done: int = 0, stop_within: float | None = None
    ) -> tuple[float, Any]:
        """``work``, given the number that the order of the steps from ``done`` on follows from, gives seconds and
        something more. The weights are read after it. ``stop_within``: the referee may ask it to stop at any moment
        within so many seconds."""
        with collector_paused(collect=not self.in_turn), self.load.watch():
            more_said = {} if self.in_turn else {"weights": hash_of(self.weights)}
            order = self.line.ask("go", epoch=epoch, done=done, stop_within=stop_within, **more_said)["order"]
            seconds, more = work(order)
            self.line.tell("end")
        self.seconds.append(seconds)
        self.readings, read = read_twice(self.adapter, seconds, self.line, self.readings)
        self.reads.append(read)
        return seconds, more


READ_SECONDS = 0.02
READ_BYTES_PER_SECOND = 50e6
"""No reading of the weights, the second included, may take longer than READ_SECONDS and what their bytes need."""
DEFERRED_SECONDS = 0.005
DEFERRED_SHARE = 0.02
"""Of the timed stretch: by so much the first reading may take longer than the second."""


def is_beyond(excess: Sequence[float]) -> bool:
    """Return whether a limit was passed in sum or in the middle: a few may be held up by chance, of fifty turns too."""
    return sum(excess) > 0 or (len(excess) > 1 and median(excess) > 0)


def fault_of(
    weights: dict[str, np.ndarray], initial: dict[str, np.ndarray], reads: list[Read], foreign_share: float
) -> dict[str, Any]:
    """Why the timed run itself must be rejected, or nothing.

    ``initial``: the starting weights, empty where the steps had nothing to move them. On a busy machine a slow reading
    proves nothing by itself: then the process must also have been at work during it. Nor does one of several: a first
    copy of 90 MB in fresh memory took 0.07 s longer than the next. In sum and in the middle the limits hold.
    """
    if not all(np.isfinite(value).all() for value in weights.values()):
        return {"state": "rejected", "reason": "the weights after the timed steps are not finite."}
    if all(np.array_equal(weights[name], initial[name]) for name in initial) and initial:
        return {"state": "rejected", "reason": "the timed steps left every weight unchanged."}
    is_quiet = foreign_share <= DISTURBED_SHARE
    longest = READ_SECONDS + sum(value.nbytes for value in weights.values()) / READ_BYTES_PER_SECOND
    slow = [max(read.first, read.second) if is_quiet else read.cpu for read in reads]
    if is_beyond([seconds - longest for seconds in slow]):
        shown = f"{max(slow):.3f} s (limit {longest:.3f} s)"
        reason = f"reading the weights took {shown}: work was deferred past the clock."
        return {"state": "rejected", "reason": reason, "deferred": True}
    extra = [read.first - read.second if is_quiet else min(read.first - read.second, read.extra_cpu) for read in reads]
    limits = [DEFERRED_SECONDS + DEFERRED_SHARE * read.timed for read in reads]
    if is_beyond([more - limit for more, limit in zip(extra, limits, strict=True)]):
        more, limit = max(zip(extra, limits, strict=True), key=lambda pair: pair[0] - pair[1])
        reason = (
            f"reading the weights after the clock stopped took {more:.3f} s longer than a second time (limit "
            f"{limit:.3f} s): work was deferred past the clock."
        )
        return {"state": "rejected", "reason": reason, "deferred": True}
    return {}

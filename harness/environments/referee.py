"""The harness's own clock beside the worker's, and what a worker learns only when its work begins.

A timed worker gets the seed of its batches after its last ``build``, is let go by the referee, who takes the time from
then until the worker says that it has finished, and is stopped once at a moment drawn at random. With the word to start
the worker learns in which order the batches of the stretch come. The worker's seconds must agree with the referee's,
and its process tree may use no more processors than it was given. The referee's can only be longer: by the way of two
messages through a pipe, and by what its own thread and the worker's had to wait for a processor meanwhile, which the
kernel counts. The two readings of the weights after a stretch are timed in the same way, and the pause that follows.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.environments import energy
from harness.environments.order import Order
from harness.environments.processors import tree_processors, tree_seconds
from harness.environments.turn_watch import TurnWatch, Work, pause_for
from harness.environments.turns import Seat
from harness.tasks import TASKS
from harness.worker.batches import epoch_batches, order_of, setting_of
from harness.worker.deferred import (
    DEFERRED_SECONDS,
    DEFERRED_SHARE,
    READ_BYTES_PER_SECOND,
    READ_SECONDS,
    is_beyond,
)
from harness.worker.line import Message
from harness.worker.request import Request
from harness.worker.result import Result

UNKNOWN_SEED = -1
DISAGREEMENT_SECONDS = 5e-3
DISAGREEMENT_SHARE = 0.02
WAITING_FACTOR = 4.0
"""A message between the two goes through threads of both sides, of which two are asked how long they waited for a
processor: where they waited, the others did, too. On a machine that is not busy nobody waits: nothing is allowed."""
PREPARATION_SECONDS = 0.5
PREPARATION_FACTOR = 3.0
"""Between the seed of the batches and the first ``go`` a worker draws its index lists: so long may it take beside the
referee, who draws the same."""
PAUSE_SECONDS = 0.25
"""Between the second reading of the weights and the next ``go`` a worker collects garbage and may save the weights."""
PROCESSOR_SHARE = 0.02
PROCESSOR_SECONDS = 0.05
TICK_SECONDS = 0.01
"""Processor time that the process tree may use beyond threads times seconds: the kernel counts it in ticks, twice
in every stretch."""


@dataclass
class Referee:
    """The harness's side of one timed process: it keeps the seed, starts and stops each stretch, and times it.
    ``send`` sends the worker a message. ``attend``, or ``hear``, which returns its answer, must be
    called as soon as an event arrives."""

    request: Request
    send: Callable[[Message], None] = field(default=lambda message: None)
    pid: int | None = None
    """Number of the worker's process, where it runs on this machine."""

    seat: Seat | None = None
    """Its seat at the table of those that take turns."""

    room: float = DISAGREEMENT_SECONDS
    """Seconds that two messages may take: more than through a pipe where the worker is farther away."""

    seconds: list[float] = field(default_factory=list)
    """Seconds from each ``go`` to its end."""

    allowances: list[float] = field(default_factory=list)
    first_reads: list[tuple[float, float]] = field(default_factory=list)
    second_reads: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, room) of each reading of the weights after a stretch."""

    pauses: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, room) from each second reading to the next ``go``."""

    starts: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, steps of it that are done) at the start of each stretch of ``seconds``."""

    faults: list[str] = field(default_factory=list)
    is_strict: bool = True  # as harness.environments.order.Order has it

    def __post_init__(self) -> None:
        self._chance = random.SystemRandom()
        self._order = Order(self.seat is not None, self.is_strict)
        self._lock = threading.Lock()
        self._own_seconds = 0.0
        self._told_seed: tuple[float, float] | None = None
        self._went: tuple[float, float] | None = None
        self._energy = energy.Meter(energy.counters(self.request.device))
        self._read_from: tuple[float, float] | None = None
        self._paused_from: tuple[float, float] | None = None
        self._used_before = (0.0, 0.0)
        self._used = (0.0, 0.0)
        self._processors: set[int] = set()
        self._timer: threading.Timer | None = None
        self._left: float | None = None
        self._turns = TurnWatch(self.seat, self.request) if self.seat is not None else None

    @property
    def for_worker(self) -> Request:
        """The request without what the worker may not know yet."""
        return replace(self.request, batch_seed=UNKNOWN_SEED, order_seed=UNKNOWN_SEED)

    def _waited(self) -> float:
        here = _waited(f"self/task/{threading.get_native_id()}")
        return here + (_waited(f"{self.pid}/task/{self.pid}") if self.pid is not None else 0.0)

    def attend(self, event: Mapping[str, Any]) -> None:
        """Answer a worker's event. A malformed one is ignored, so that the worker times out."""
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            answer = self.hear(event)
            if answer is not None:
                with self._lock:
                    self.send(answer)

    def hear(self, event: Mapping[str, Any]) -> Message | None:
        now, waited = time.monotonic(), self._waited()
        if event.get("event") not in {"ask", "tell"}:
            return None
        if fault := self._order.fault(event):
            self.faults.append(fault)
            return {} if event["event"] == "ask" else None
        match event.get("what"):
            case "end":
                # At once: what the process waits for from here on is no longer inside the clock.
                self._end(now, waited, self._turns.work() if self._turns is not None else (0.0, {}))
            case "read":
                self._read(now, waited)
            case "sizes":
                planned = {name: int(event[name]) for name in ("steps", "epochs", "turn") if name in event}
                if self.seat is not None and self.seat.agreed is not None:
                    self.seat.agreed.update(self.seat.agreed or planned)
                    planned = self.seat.agreed
                sizes = self._sizes(planned["steps"], planned["epochs"])
                self._own_seconds = time.monotonic() - now
                return {"sizes": sizes, **planned}
            case "seed":
                self._told_seed = time.monotonic(), self._waited()
                return {"batch_seed": self.request.batch_seed}
            case "turn" if self._turns is not None:
                self._look_at_preparation(now)
                self._look_at_pause(now, waited)
                self._turns.take(int(event["epoch"]), int(event["done"]))
                self._turns.opened(time.monotonic(), self._waited())
                return {"turn": True}
            case "finish":
                self._look_at_pause(now, waited)
                if self._turns is not None:
                    self._turns.seat.finish()
                return {"finish": True}
            case "go":
                if self._turns is None:
                    self._look_at_preparation(now)
                    self._look_at_pause(now, waited)
                else:
                    self._turns.clock_starts(now, waited, self.room, WAITING_FACTOR)
                expected = event.get("stop_within")
                if expected is not None:
                    self._stop_within(float(expected))
                order = order_of(self.request.order_seed, int(event["epoch"]), int(event["done"]))
                self._read_from = None
                self.starts.append((int(event["epoch"]), int(event["done"])))
                self._energy.start()
                self._used_before = self._use()
                self._went = (time.monotonic(), self._waited())
                return {"go": True, "order": order}
        return {} if event["event"] == "ask" else None

    def _sizes(self, steps: int, epochs: int) -> list[int]:
        """Return the padded sizes that occur in the batches, which are all drawn here too; none where there is no
        padding."""
        given = self.request, setting_of(self.request)
        lists = [epoch_batches(*given, e, steps) for e in range(min(epochs, MOST_LISTED_EPOCHS))]
        return sorted({len(rows) for batches in lists for rows, mask in batches if mask is not None})

    def _look_at_preparation(self, now: float) -> None:
        if self._told_seed is not None and not self.seconds:
            since, waited = self._told_seed
            limit = PREPARATION_SECONDS + PREPARATION_FACTOR * self._own_seconds
            took, limit = now - since, limit + WAITING_FACTOR * (self._waited() - waited)
            if took > limit:
                self.faults.append(f"{took:.3f} s went by between the batches and the clock (limit {limit:.3f} s)")

    def _look_at_pause(self, now: float, waited: float) -> None:
        if self._paused_from is not None:
            start, waited_before = self._paused_from
            self.pauses.append((now - start, self.room + WAITING_FACTOR * (waited - waited_before)))
            self._paused_from = None
        if self._turns is not None:
            self._turns.resume()

    def _use(self) -> tuple[float, float]:
        """Return (seconds of the clock, of all processors by the worker and what it started)."""
        return time.monotonic(), tree_seconds(self.pid) if self.pid is not None else 0.0

    def _stop_within(self, seconds: float) -> None:
        """Once in all stretches together, at a moment drawn when the first of them begins that may be stopped."""
        if self._left is None:
            self._left = self._chance.uniform(0.0, seconds if 0.0 <= seconds <= LONGEST_STRETCH else LONGEST_STRETCH)
        self._timer = threading.Timer(max(0.0, self._left), self._stop)
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        with self._lock:
            if self._went is not None:
                self.send({"stop": True})

    def _end(self, now: float, waited: float, work: Work) -> None:
        (clock, used), (clock_before, used_before) = self._use(), self._used_before
        self._used = self._used[0] + clock - clock_before, self._used[1] + used - used_before
        with self._lock:
            assert self._went is not None
            start, waited_before = self._went
            self._went = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left = (self._left or 0.0) - (now - start)
        self._energy.stop(now - start)
        self.seconds.append(now - start)
        if self._turns is not None:
            self._turns.clock_stops(now - start, work)
        self.allowances.append(waited - waited_before)
        self._read_from = now, waited
        if self.pid is not None:
            self._processors |= tree_processors(self.pid)

    def _read(self, now: float, waited: float) -> None:
        """The first of two readings after a stretch, or the second."""
        assert self._read_from is not None
        start, waited_before = self._read_from
        room = self.room + WAITING_FACTOR * (waited - waited_before)
        if len(self.first_reads) < len(self.seconds):
            self.first_reads.append((now - start, room))
            self._read_from = now, waited
        else:
            self.second_reads.append((now - start, room))
            self._read_from = None
            self._paused_from = now, waited
            if self._turns is not None:
                self._turns.pause()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def judged(self, result: Result) -> Result:
        """Return the result with the referee's seconds; with ``clock_fault`` where they do not agree with the worker's.

        On a busy machine either clock may wait. Where only waiting explains the difference, the referee's seconds
        count, which are the longer ones: nobody gains by a clock that goes slowly. Of a process that took turns those
        count in which its threads did not wait for a processor.
        """
        if result.state != "ok" or result.timed is None:
            return replace(result, reason="; ".join([str(result.reason), *self.faults])) if self.faults else result
        stated = result.timed.part_seconds
        faults = [*self.faults, *self._disagreements(stated), *self._slow_reads(), *self._long_pauses()]
        faults += self._order.unfinished
        faults += self._too_many_processors()
        begun = {epoch for epoch, _ in self.starts}
        if len(self.starts) != len(self.seconds):
            faults.append(f"{len(self.starts)} stretches were begun, and {len(self.seconds)} ended")
        if begun != set(range(len(result.epoch_seconds))):
            faults.append(f"{len(result.epoch_seconds)} epochs were stated, and {len(begun)} were started")
        timed = replace(result.timed, referee_seconds=self.seconds, starts=self.starts, turns=[])
        made = self._made(timed.steps_timed)
        if self._turns is not None:
            faults += self._turns.faults(sum(self.seconds) / max(1, sum(made)), self._used[1])
            # A worker that forges its result may have begun more than it ended: the clocks do not agree then.
            whole = zip(self._turns.turns, made, self.seconds, strict=False)
            timed = replace(timed, turns=[(block, n, wall, work) for (block, work), n, wall in whole])
        if not faults and (timed.turns or self._disagreements(stated, waiting=False)):
            counts = [work for _, _, _, work in timed.turns] or self.seconds
            measured, counted = [0.0] * len(result.epoch_seconds), [0] * len(result.epoch_seconds)
            for (epoch, _), seconds, steps in zip(self.starts, counts, made, strict=True):
                measured[epoch] += seconds
                counted[epoch] += steps
            measured = [s * timed.steps_timed / n for s, n in zip(measured, counted, strict=True)]
            timed = replace(timed, measured_seconds=measured)
            result = replace(result, epoch_seconds=[seconds * timed.scale for seconds in measured])
        fault = "; ".join(dict.fromkeys(faults)) or None
        committed = self._order.committed if self.is_strict else None
        return replace(result, timed=timed, energy=self._energy.said(), clock_fault=fault, committed=committed)

    def _made(self, steps: int) -> list[int]:
        """Return the steps of each stretch, of an epoch of so many: from its start to the next one's."""
        every = sorted({*self.starts, *(self._turns.starts if self._turns is not None else ())})
        ends = {
            one: two[1] if one[0] == two[0] else steps for one, two in zip(every, [*every[1:], (-1, 0)], strict=False)
        }
        return [ends[start] - start[1] for start in self.starts]

    def _disagreements(self, stated: list[float], waiting: bool = True) -> list[str]:
        """Return how the clocks disagree in sum and in the middle of all stretches: a single one may be held up by
        chance.

        ``waiting``: whether what the threads waited for a processor excuses a difference.
        """
        if len(stated) != len(self.seconds):
            return [f"{len(stated)} stretches were timed by the worker, {len(self.seconds)} by the harness"]
        rooms = [
            self.room + DISAGREEMENT_SHARE * s + (WAITING_FACTOR * w if waiting else 0.0)
            for s, w in zip(self.seconds, self.allowances, strict=True)
        ]
        longer = [mine - theirs for mine, theirs in zip(self.seconds, stated, strict=True)]
        beyond = [more - room for more, room in zip(longer, rooms, strict=True)]
        if sum(beyond) > 0 or statistics.median(beyond) > 0 or min(longer) < -self.room:
            return [
                f"the worker's clock says {sum(stated):.4f} s, the harness's {sum(self.seconds):.4f} s in "
                f"{len(stated)} stretches (room {sum(rooms):.4f} s)"
            ]
        return []

    def _slow_reads(self) -> list[str]:
        """Return which readings of the weights were slow by this clock, as the worker judges its own."""
        if not len(self.first_reads) == len(self.second_reads) == len(self.seconds):
            return [f"the weights were not read twice after each of {len(self.seconds)} stretches"]
        longest = READ_SECONDS + TASKS[self.request.task].weight_bytes / READ_BYTES_PER_SECOND
        both = list(zip(self.seconds, self.first_reads, self.second_reads, strict=True))
        each = [max(one - room, two - more) - longest for _, (one, room), (two, more) in both]
        extra = [
            one - two - room - more - DEFERRED_SECONDS - DEFERRED_SHARE * timed
            for timed, (one, room), (two, more) in both
        ]
        if is_beyond(each) or is_beyond(extra):
            shown = ", ".join(f"{one:.4f} and {two:.4f} s" for _, (one, _), (two, _) in both[:3])
            return [f"the readings of the weights took {shown} by the harness's clock (limit {longest:.4f} s each)"]
        return []

    def _long_pauses(self) -> list[str]:
        limit = PAUSE_SECONDS + pause_for(self.request)
        if self.pauses and is_beyond([seconds - room - limit for seconds, room in self.pauses]):
            longest = max(seconds for seconds, _ in self.pauses)
            return [
                f"{longest:.3f} s went by between a reading of the weights and the next start (limit {limit:.3f} s)"
            ]
        return []

    def _too_many_processors(self) -> list[str]:
        clock, used = self._used
        threads = self.request.threads
        room = PROCESSOR_SHARE * threads * clock + PROCESSOR_SECONDS + TICK_SECONDS * len(self.seconds)
        if len(self._processors) > threads:
            return [f"its processes may use {len(self._processors)} processors, and were given {threads}"]
        if used > threads * clock + room:
            return [f"its processes used {used:.2f} s of processors in {clock:.2f} s on {threads} threads"]
        return []


class Direct:
    """The line to a referee in this very process, for tests of the harness."""

    def __init__(self, request: Request, referee: Referee | None = None) -> None:
        self._stopped = threading.Event()
        self.referee = Referee(request) if referee is None else referee
        self.referee.send = lambda message: self._stopped.set()
        self.is_stopped = self._stopped.is_set

    def ask(self, what: str, **more: Any) -> Message:
        self._stopped.clear()
        return self.referee.hear({"event": "ask", "what": what, **more}) or {}

    def tell(self, what: str) -> None:
        self.referee.hear({"event": "tell", "what": what})


LONGEST_STRETCH = 24 * 3600.0
MOST_LISTED_EPOCHS = 100


def _waited(task: str) -> float:
    """Return seconds that a thread was ready and waited for a processor; 0 where the kernel does not count."""
    try:
        return int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

"""The referee's notes on a process that takes turns: what it did in them, before their clock, and beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from harness.environments.processors import tree_clock, tree_waited
from harness.environments.turns import BESIDE_SECONDS, Seat
from harness.tasks import TASKS
from harness.worker.deferred import READ_BYTES_PER_SECOND, is_beyond
from harness.worker.request import Request

FIRST_STEP_FACTOR = 3.0
"""The first step of a turn, which is not counted, may take so many times another one: work for later steps is not done
in it."""
OWN_SECONDS = 0.003
"""Processor time that the worker needs between the start of a turn and that of its clock beside the step: a millisecond
for two messages, measured on a Zen 2."""
UNCOUNTED_SHARE, UNCOUNTED_SECONDS = 0.1, 0.1
"""Processor time beyond what was counted: the kernel tells that of ended children in ticks of 10 ms, and what is read
after a stretch holds a little of what follows."""
USUAL_PAUSE_SECONDS, FEWEST_USUAL = 0.015, 4
"""Processor time between the readings of the weights and the next turn: of so many pauses half may take no longer, and
what the weights' bytes need. Only a few are for what is done once."""
Work = tuple[float, dict[str, float]]
"""Seconds that the process's threads worked, and that each of them was ready and waited for a processor."""


@dataclass
class TurnWatch:
    """Notes on one process.

    Attributes:
        seat: where it sits.
        request: what it was asked for.
        starts: (epoch, steps of it that are done) where each turn began.
        turns: (block, seconds without waiting for a processor) of each timed stretch.
    """

    seat: Seat
    request: Request
    starts: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[int, float]] = field(default_factory=list)
    _before: Work = (0.0, {})
    _opened: tuple[float, float, float] | None = None
    _read_at: float | None = None
    _pauses: list[float] = field(default_factory=list)
    _first_steps: list[tuple[float, float]] = field(default_factory=list)

    def pause(self) -> None:
        """Note that the weights were read twice: what is done until the next turn is not counted."""
        self._read_at = self._clock()

    def resume(self) -> None:
        """Note that the process asks for its next turn, or to finish."""
        if self._read_at is not None:
            self._pauses.append(self._clock() - self._read_at)
            self._read_at = None

    def _clock(self) -> float:
        return tree_clock(self.seat.pid) if self.seat.pid is not None else 0.0

    def take(self, epoch: int, done: int) -> None:
        """Return when the process's next turn begins."""
        self.starts.append((epoch, done))
        self.seat.take()

    def opened(self, now: float, waited: float) -> None:
        """Note when its turn began: seconds, and those that the two sides' threads waited so far."""
        self._opened = now, waited, self.work()[0]

    def clock_starts(self, now: float, waited: float, room: float, factor: float) -> None:
        """Note that the first step of the turn is made. ``room``: seconds that two messages may take, and ``factor``
        times what the threads waited. One thread's work is known without either."""
        assert self._opened is not None
        start, waited_before, worked = self._opened
        self._before = self.work()
        if self._counts_work:
            self._first_steps.append((self._before[0] - worked, OWN_SECONDS))
        else:
            self._first_steps.append((now - start, room + factor * (waited - waited_before)))

    def clock_stops(self, wall: float, work: Work) -> None:
        """Note a timed stretch. ``work``: read when the worker said that it has finished."""
        (worked, waits), (worked_before, waits_before) = work, self._before
        # Of one thread: several that are ready at once count the same moment more than once.
        longest = max((waits[thread] - waits_before.get(thread, 0.0) for thread in waits), default=0.0)
        self.turns.append((self.seat.block, min(wall, max(worked - worked_before, wall - longest))))

    def work(self) -> Work:
        """Return what its threads worked and waited so far: where one at a time works on a CPU, whose waiting is the
        machine's; several also wait for each other."""
        if self.seat.pid is None or not self._counts_work:
            return 0.0, {}
        return tree_clock(self.seat.pid), tree_waited(self.seat.pid)

    @property
    def _counts_work(self) -> bool:
        return self.request.threads == 1 and self.request.device == "cpu"

    def faults(self, step_seconds: float, used: float) -> list[str]:
        """Return what is said against the steps between the start of a turn and that of its clock, and against work
        that was not counted: ``used``, the processor seconds of all timed stretches, those of ended children included,
        which a thread of the same process that only waits could otherwise hide."""
        found = []
        limit = FIRST_STEP_FACTOR * step_seconds
        if is_beyond([seconds - room - limit for seconds, room in self._first_steps]):
            found.append(
                f"the first step of a turn took more than {limit:.4f} s, {FIRST_STEP_FACTOR} times another one"
            )
        counted = sum(work for _, work in self.turns)
        if self._counts_work and used > counted * (1.0 + UNCOUNTED_SHARE) + UNCOUNTED_SECONDS:
            found.append(f"its processes used {used:.2f} s of a processor, and {counted:.2f} s were counted")
        usual = median(self._pauses or [0.0])
        most = self.request.threads * (USUAL_PAUSE_SECONDS + pause_for(self.request))  # pools of threads spin
        if len(self._pauses) >= FEWEST_USUAL and usual > most:
            found.append(f"in half of its pauses it worked for more than {usual:.3f} s (limit {most:.3f} s)")
        if self.seat.beside > BESIDE_SECONDS:
            found.append(f"it worked for {self.seat.beside:.3f} s while others had their turns")
        return found


def pause_for(request: Request) -> float:
    """Return the seconds in which the weights of its task are saved and hashed."""
    return 2 * TASKS[request.task].weight_bytes / READ_BYTES_PER_SECOND

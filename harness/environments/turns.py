"""Processes that are alive together and take turns: one at work, the others stopped.

A machine changes its speed within minutes, and a process that is started takes up to a minute before its clock runs. So
the contestants of a cell start, as many at once as there are processors for, and then go on in blocks on the same
processors: in each block, in random order, each of them has one turn. What the machine does to a block it does to all
of them, and their ratio within it stands. (The literature calls it randomised multiple interleaved trials, or duet
benchmarking.)

A process whose turn it is not is stopped, with all that it has started, so that no pool of threads spins beside the
clock of another.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import psutil

from harness.environments.memory_limit import tree_resident
from harness.environments.processors import keep_on, tree_clock, tree_members

T = TypeVar("T")
State = Literal["starting", "waiting", "at work", "finished", "gone"]
TURN_SECONDS = 0.1
"""A busy machine changes its speed within tenths of a second, and what changes between two turns does not cancel."""
BESIDE_SECONDS = 0.02
"""Processor seconds that a stopped process may use in all: the signal takes a moment to arrive."""


class Seat:
    """One process at the table. Its referee asks for its turns; its executor says which process it is.

    Attributes:
        state: what it does. A process is ``at work`` from the start of its turn until it asks for the next one.
        block: number of the block that its present turn belongs to.
        beside: processor seconds that it used while others had their turns.
        pid: its process, once there is one.
        agreed: steps, epochs and steps of a turn that all of them make; empty where each chooses its own.
        place: the processors that it starts and ends on.
    """

    def __init__(self, turns: Turns, place: Sequence[int] = ()) -> None:
        self._turns = turns
        self.place = place
        self.state: State = "starting"
        self.block = 0
        self.beside = 0.0
        self.pid: int | None = None
        self.agreed = turns.agreed

    @property
    def is_waiting(self) -> bool:
        """Whether it stands still because of the others, so that its time does not run."""
        return self.state in ("waiting", "finished")

    def take(self) -> None:
        """Return when its next turn begins."""
        self._turns.wait(self, "waiting")

    def finish(self) -> None:
        """Return when nobody has a turn left."""
        self._turns.wait(self, "finished")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started, wherever it went."""
        for pid in tree_members(self.pid) if self.pid is not None else ():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


class Turns:
    """The table.

    Args:
        seed: of the order within the blocks.
        equal: every process makes as many steps in a turn as the first one, on the same batches. For two states of one
            contestant; without it each makes what fits into the time of a turn.
        block: number of the block before the first one.
        places: processors for as many processes as may start, and end, at once; the turns are on the first ones. One
            at a time, and wherever they are, where there are none.
    """

    def __init__(self, seed: str, equal: bool = False, block: int = 0, places: Sequence[Sequence[int]] = ()) -> None:
        self._places = [place for place in places if place] or [()]
        self.agreed: dict[str, int] | None = {} if equal else None
        self._chance = random.Random(f"dpbench turns {seed}")
        self._changed = threading.Condition()
        self._seats: list[Seat] = []
        self._order: list[Seat] = []
        self._is_open = self._is_over = False
        self._block = block

    def together(self, processes: Mapping[str, Callable[[Seat], T]]) -> dict[str, T]:
        """Run the processes, which take turns, and return their results by name.

        Args:
            processes: name -> a function that runs one process, whose referee asks the seat, and returns its result.

        Returns:
            Results of the first of them, as many as the machine has memory for, and at least of one.

        Raises:
            BaseException: the first that a process raised, or an interruption of this thread; no process is left.
        """
        results: dict[str, T] = {}
        errors: list[BaseException] = []

        def run(name: str, process: Callable[[Seat], T], seat: Seat) -> None:
            try:
                if seat.place:
                    os.sched_setaffinity(0, seat.place)
                results[name] = process(seat)
            except BaseException as error:
                errors.append(error)
            finally:
                self._leave(seat)

        threads = []
        try:
            for name, process in processes.items():
                with self._changed:
                    # Each starts on processors of its own: what is built and tried out is hardly disturbed.
                    self._changed.wait_for(lambda: len(self._starting) < len(self._places))
                    taken = [seat.place for seat in self._starting]
                if not self._has_room():
                    break
                seat = Seat(self, next(place for place in self._places if place not in taken))
                self._seats.append(seat)
                threads.append(threading.Thread(target=run, args=(name, process, seat), daemon=True))
                threads[-1].start()
            with self._changed:
                self._changed.wait_for(lambda: not self._starting)
                self._is_open = True
                self._next()
            for thread in threads:
                thread.join()
        except BaseException:
            for seat in self._seats:
                seat.signal(signal.SIGKILL)
            raise
        if errors:
            raise errors[0]
        return {name: results[name] for name in processes if name in results}

    @property
    def _starting(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.state == "starting"]

    def _has_room(self) -> bool:
        """Whether one more process fits into memory beside those that start, if each takes no more than twice what the
        largest one here does: copies of the batch and workspaces come with its first steps."""
        largest = max((tree_resident(seat.pid) for seat in self._seats if seat.pid is not None), default=0)
        return not largest or psutil.virtual_memory().available > 2 * largest * (1 + len(self._starting))

    def wait(self, seat: Seat, state: Literal["waiting", "finished"]) -> None:
        """Stop a process until it is ``at work`` again."""
        with self._changed:
            if seat.state == "gone" or self._is_over:
                return
            was_starting, seat.state = seat.state == "starting", state
            seat.signal(signal.SIGSTOP)
            if was_starting:
                self._keep(seat, self._places[0])
            used = _used(seat)
            self._next()
            self._changed.wait_for(lambda: seat.state in ("at work", "gone"))
            seat.beside += _used(seat) - used
            if self._is_over:
                self._keep(seat, self._places[self._seats.index(seat) % len(self._places)])
            seat.signal(signal.SIGCONT)

    def _keep(self, seat: Seat, place: Sequence[int]) -> None:
        """Keep a process that stands still, and this thread, which talks to it, on these processors."""
        if place and seat.pid is not None:
            keep_on(seat.pid, place)

    def _leave(self, seat: Seat) -> None:
        with self._changed:
            seat.state = "gone"
            self._next()

    def _next(self) -> None:
        """Let the next one work, where nobody is at work; all of them, where nobody has a turn left."""
        self._changed.notify_all()
        if not self._is_open or any(seat.state == "at work" for seat in self._seats):
            return
        self._order = [seat for seat in self._order if seat.state == "waiting"]
        if not self._order:
            self._order = [seat for seat in self._seats if seat.state == "waiting"]
            self._chance.shuffle(self._order)
            self._block += 1
        if self._order:
            chosen = self._order.pop(0)
            chosen.state, chosen.block = "at work", self._block
        else:
            self._is_over = True
            for seat in self._seats:
                seat.state = "at work" if seat.state == "finished" else seat.state


def _used(seat: Seat) -> float:
    return tree_clock(seat.pid) if seat.pid is not None else 0.0

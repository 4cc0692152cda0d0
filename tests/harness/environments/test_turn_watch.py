"""What the referee notes of a process that takes turns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness.analysis.turns import log_ratio, shared
from harness.environments import turn_watch
from harness.environments.turn_watch import TurnWatch
from harness.environments.turns import Seat, Turns
from harness.worker.request import Request
from tests.harness.environments.test_referee import GIVEN


def watch(
    monkeypatch,
    worked: float,
    waited: float,
    threads: int = 1,
    pause: float = 0.0,
    first_steps: Sequence[float] = (0.01,) * 10,
    waited_in_them: float = 0.0,
) -> TurnWatch:
    """Ten turns of a second, in each of which the process worked and its longest waiting thread waited so long."""
    clock = {"worked": 0.0, "waited": 0.0}
    monkeypatch.setattr(turn_watch, "tree_clock", lambda pid: clock["worked"])
    monkeypatch.setattr(turn_watch, "tree_waited", lambda pid: {"1": 0.0, "2": clock["waited"]})
    seat = Seat(Turns("s"))
    seat.pid = 1
    notes = TurnWatch(seat, Request(**{**GIVEN, "threads": threads}))  # type: ignore[arg-type]
    for first in first_steps:
        notes.opened(0.0, 0.0)
        clock["worked"] += first
        notes.clock_starts(first + waited_in_them, waited_in_them, 0.003, 4.0)
        clock["worked"] += worked
        clock["waited"] += waited
        notes.clock_stops(1.0, notes.work())
        notes.pause()
        clock["worked"] += pause
        notes.resume()
    return notes


@pytest.mark.parametrize(
    ("worked", "waited", "threads", "counted"),
    [
        (1.0, 0.0, 1, 1.0),
        (0.6, 0.4, 1, 0.6),  # others had the processor
        (0.2, 0.0, 1, 1.0),  # it slept
        (0.6, 0.9, 1, 0.6),  # never less than it worked
        (1.8, 0.9, 2, 1.0),  # several threads wait for each other
    ],
)
def test_what_others_took_does_not_count_and_sleeping_does(monkeypatch, worked, waited, threads, counted):
    notes = watch(monkeypatch, worked, waited, threads)
    assert [work for _, work in notes.turns] == pytest.approx([counted] * 10)
    assert notes.faults(0.01, 10 * worked) == []


def test_work_of_children_that_have_ended_is_not_hidden_by_a_thread_that_waits(monkeypatch):
    (fault,) = watch(monkeypatch, worked=0.0, waited=0.95).faults(0.01, used=9.0)
    assert fault == "its processes used 9.00 s of a processor, and 0.50 s were counted"


def test_work_in_the_pauses_between_turns_is_a_fault(monkeypatch):
    assert watch(monkeypatch, 1.0, 0.0, pause=0.01).faults(0.01, 10.0) == []
    assert watch(monkeypatch, 1.0, 0.0, pause=0.1).faults(0.01, 10.0) == [
        "in half of its pauses it worked for more than 0.100 s (limit 0.015 s)"
    ]


@pytest.mark.parametrize(("held_up", "faults"), [(0, 0), (3, 0), (9, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_first_step_that_takes_many_others_is_a_fault_but_few_of_many_are_not(monkeypatch, held_up, faults, threads):
    notes = watch(monkeypatch, 0.1, 0.0, threads, first_steps=[0.009] * held_up + [0.004] * (10 - held_up))
    assert len(notes.faults(0.001, 5.0)) == faults


def test_what_a_first_step_waited_for_its_processor_hides_no_work(monkeypatch):
    notes = watch(monkeypatch, 0.1, 0.0, first_steps=[0.2] * 10, waited_in_them=0.1)
    assert "the first step of a turn took more than" in notes.faults(0.001, 5.0)[0]


def test_the_ratio_is_that_of_the_blocks_that_both_have_and_leaves_no_slow_one_out():
    base = [(block, 10, 1.0, 1.0) for block in range(1, 6)]
    head = [(block, 5, 0.5, 1.0 if block == 3 else 0.5) for block in range(2, 7)]
    blocks = shared(base, head)
    assert blocks == pytest.approx([(0.1, 0.2), (0.1, 0.1), (0.1, 0.1)])  # of 2 to 5, the first is left out
    assert log_ratio(blocks) == pytest.approx(0.2877, abs=1e-4)
    assert log_ratio([]) is None

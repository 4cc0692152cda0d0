"""Processes that take turns: one at work, the others stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from harness.environments.processors import tree_clock
from harness.environments.turns import BESIDE_SECONDS, Seat, Turns

SPINS = "while True: pass"
SPINS_IN_A_SESSION_OF_ITS_OWN = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}], start_new_session=True)"
)


class Player:
    """A process that never stops by itself, and ``turns`` turns of it; ``seen``: (block, who else was stopped)."""

    def __init__(self, turns: int, code: str = SPINS, seconds: float = 0.05) -> None:
        self.turns, self.code, self.seconds = turns, code, seconds
        self.blocks: list[int] = []
        self.worked: list[float] = []
        self.others: list[Player] = []
        self.beside = 0.0
        self.seat: Seat | None = None

    def __call__(self, seat: Seat) -> int:
        self.seat = seat
        with subprocess.Popen([sys.executable, "-c", self.code], start_new_session=True) as process:
            seat.pid = process.pid
            try:
                for _ in range(self.turns):
                    seat.take()
                    self.blocks.append(seat.block)
                    used = self._used_by_others()
                    time.sleep(self.seconds)
                    self.worked.append(self._used_by_others() - used)
                seat.finish()
            finally:
                self.beside = seat.beside
                with suppress(ProcessLookupError):
                    seat.signal(signal.SIGKILL)
        return self.turns

    def _used_by_others(self) -> float:
        return sum(tree_clock(other.seat.pid) for other in self.others if other.seat and other.seat.pid)


def play(players: dict[str, Player], seed: str = "s") -> dict[str, int]:
    for player in players.values():
        player.others = [other for other in players.values() if other is not player]
    return Turns(seed).together(dict[str, Callable[[Seat], int]](players))


@pytest.mark.parametrize("code", [SPINS, SPINS_IN_A_SESSION_OF_ITS_OWN])
def test_while_one_is_at_work_the_others_and_their_children_stand_still(code):
    players = {name: Player(4, code, seconds=0.1) for name in "ab"}

    assert play(players) == {"a": 4, "b": 4}

    for player in players.values():
        assert sum(player.worked) < BESIDE_SECONDS
        assert player.beside < BESIDE_SECONDS


def test_each_has_one_turn_in_each_block_in_an_order_that_changes():
    order: list[tuple[int, str]] = []

    def player(name: str) -> Callable[[Seat], None]:
        def take(seat: Seat) -> None:
            for _ in range(20):
                seat.take()
                order.append((seat.block, name))
            seat.finish()

        return take

    Turns("a seed").together({name: player(name) for name in "abc"})

    blocks = [[name for block, name in order if block == number] for number in range(1, 21)]
    assert [number for number, _ in order] == sorted(number for number, _ in order)
    assert all(sorted(block) == ["a", "b", "c"] for block in blocks)
    assert len({tuple(block) for block in blocks}) > 3


def test_one_starts_when_the_one_before_it_stands_still():
    begun: list[str] = []

    def player(name: str) -> Callable[[Seat], list[str]]:
        def take(seat: Seat) -> list[str]:
            begun.append(f"{name} begins")
            time.sleep(0.02)
            begun.append(f"{name} is ready")
            seat.take()
            seat.finish()
            return []

        return take

    Turns("s").together({name: player(name) for name in "abc"})
    assert begun == [f"{name} {what}" for name in "abc" for what in ("begins", "is ready")]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_as_many_start_and_end_at_once_as_there_are_places_and_all_turns_are_on_the_first():
    first, second = [[number] for number in sorted(os.sched_getaffinity(0))[:2]]
    at: dict[str, list[set[int]]] = {name: [] for name in "abc"}
    both = threading.Barrier(2)

    def player(name: str) -> Callable[[Seat], None]:
        def take(seat: Seat) -> None:
            with subprocess.Popen([sys.executable, "-c", SPINS]) as process:
                seat.pid = process.pid
                at[name].append(os.sched_getaffinity(process.pid))
                if name != "c":
                    both.wait(10.0)
                seat.take()
                at[name].append(os.sched_getaffinity(process.pid))
                seat.finish()
                at[name].append(os.sched_getaffinity(process.pid))
                process.kill()

        return take

    Turns("s", places=[first, second]).together({name: player(name) for name in "abc"})

    here, there = set(first), set(second)
    assert at["a"] == [here, here, here] and at["b"] == [there, here, there]
    assert at["c"][1:] == [here, here]


def test_who_has_fewer_turns_or_ends_early_holds_up_nobody():
    assert play({"few": Player(2), "many": Player(5)}) == {"few": 2, "many": 5}

    def dies(seat: Seat) -> int:
        seat.take()
        return -1

    many = Player(3)
    assert Turns("s").together({"dies": dies, "many": many}) == {"dies": -1, "many": 3}


def test_an_error_of_one_is_raised_when_the_others_are_done():
    def fails(seat: Seat) -> int:
        seat.take()
        raise RuntimeError("a disk is full")

    many = Player(3)
    with pytest.raises(RuntimeError, match="a disk is full"):
        Turns("s").together({"fails": fails, "many": many})
    assert len(many.blocks) == 3


def test_an_interruption_leaves_no_process(monkeypatch):
    pids: list[int] = []

    def endless(seat: Seat) -> int:
        with subprocess.Popen([sys.executable, "-c", SPINS], start_new_session=True) as process:
            seat.pid = process.pid
            pids.append(process.pid)
            seat.take()
        return 0

    join = threading.Thread.join

    def interrupted(self, timeout=None):
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Turns("s").together({"a": endless, "b": endless})
    deadline = time.monotonic() + 20
    while any(tree_clock(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(tree_clock(pid) for pid in pids)


def test_those_that_memory_has_no_room_for_come_later(monkeypatch):
    players = {name: Player(2) for name in "abc"}
    available = iter([10**12, 0])
    memory = type("Memory", (), {"available": property(lambda self: next(available))})()
    monkeypatch.setattr("harness.environments.turns.psutil.virtual_memory", lambda: memory)
    assert play(players) == {"a": 2, "b": 2}
    assert players["c"].seat is None


def test_who_asks_for_a_turn_when_all_are_over_waits_for_nobody():
    def greedy(seat: Seat) -> int:
        seat.take()
        seat.finish()
        seat.take()
        seat.finish()
        return seat.block

    assert Turns("s").together({"greedy": greedy, "other": Player(2)}) == {"greedy": 1, "other": 2}

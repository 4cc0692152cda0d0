"""The loop of ``dpbench grid run``: hand units to an engine until the files say that all are done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from harness.grid.folder import GridFolder, State
from harness.grid.plan import Unit

MOST_TRIES = 3
"""How often a unit is handed out by one ``grid run``: one that fails or is lost each time is named, and no more."""
PATIENCE = 2
"""Looks at the files after the engine has let go of a unit, before it counts as lost: a shared disk may tell late."""


class Launcher(Protocol):
    """Interface to an engine."""

    poll_seconds: float

    def submit(self, units: Sequence[Unit]) -> None:
        """Hand units to the engine, in this order."""
        ...

    def at_work(self) -> set[str]:
        """Return the names of units that the engine still has: waiting or under way."""
        ...

    def running(self) -> int | None:
        """Return how many units are measured now; None where the files say it."""
        return None

    def close(self) -> None:
        """Leave the engine."""
        ...


def drive(grid: GridFolder, launcher: Launcher, told: Callable[[State, int], None]) -> State:
    """Return the grid's state when each unit is done or given up.

    Args:
        grid: Its folder.
        launcher: The engine.
        told: Hears of each look at the files, and how many units are measured then.
    """
    tries: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    try:
        while True:
            grid.settle_all()
            held = launcher.at_work()
            state = grid.state()
            running = launcher.running()
            told(state, state.under_way if running is None else running)
            open_units = [unit for unit in grid.plan.units if unit.name not in state.done]
            due = []
            for unit in open_units:
                name = unit.name
                missed[name] = 0 if name in held else missed[name] + 1
                # At first nothing was handed out, and nothing can be late.
                if tries[name] < MOST_TRIES and missed[name] > (PATIENCE if tries[name] else 0):
                    due.append(unit)
            if due:
                launcher.submit(due)
                for unit in due:
                    tries[unit.name] += 1
                    missed[unit.name] = 0
            elif all(missed[unit.name] > PATIENCE for unit in open_units):
                return state
            time.sleep(launcher.poll_seconds)
    finally:
        launcher.close()

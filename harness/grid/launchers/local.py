"""This machine alone: one unit after the other, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from harness.environments.orphans import dying_with_parent
from harness.grid.drive import Launcher
from harness.grid.folder import GridFolder
from harness.grid.plan import Unit


class Local(Launcher):
    """Runs units one at a time, so that nothing of the grid is beside a clock."""

    poll_seconds = 0.5

    def __init__(self, grid: GridFolder) -> None:
        self.grid = grid
        self.waiting: list[Unit] = []
        self.current: tuple[Unit, subprocess.Popen[bytes]] | None = None

    def submit(self, units: Sequence[Unit]) -> None:
        """Append units to those that wait."""
        self.waiting += units

    def at_work(self) -> set[str]:
        """Return those that wait or are under way, after the next one was started where none is."""
        if self.current is not None and self.current[1].poll() is not None:
            self.current = None
        if self.current is None and self.waiting:
            unit = self.waiting.pop(0)
            words = [sys.executable, "-P", "-m", "harness", "grid", "unit", str(self.grid.path), unit.name]
            process = subprocess.Popen(
                dying_with_parent(words), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self.current = unit, process
        return {unit.name for unit in self.waiting} | ({self.current[0].name} if self.current else set())

    def close(self) -> None:
        """End the unit that is under way."""
        if self.current is not None and self.current[1].poll() is None:
            self.current[1].kill()
            self.current[1].wait()

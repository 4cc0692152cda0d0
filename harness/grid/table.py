"""The table of a grid: units done, running, failed, and the time left."""

from __future__ import annotations

from collections import Counter

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.grid.folder import LOG, GridFolder, State
from harness.run.remaining import Remaining, about
from harness.store.record import CONTROLS


def seconds_left(grid: GridFolder, state: State, running: int) -> float | None:
    """Return about how long the units that are not done take, on as many machines as are at work now."""
    known = Remaining()
    for unit in grid.plan.units:
        if unit.name in state.done:
            known.add((unit.task, str(unit.batch_size)), state.done[unit.name].seconds)
    left = [unit for unit in grid.plan.units if unit.name not in state.done]
    seconds = known.seconds([(unit.task, str(unit.batch_size)) for unit in left])
    if seconds is None and all(unit.seconds is not None for unit in left):
        seconds = sum(unit.seconds or 0.0 for unit in left)
    return None if seconds is None else seconds / max(1, running)


def counts(grid: GridFolder, state: State) -> dict[str, Counter[str]]:
    """Return by task how many units there are, and of them done, running, failed (at least once) and lost."""
    found: dict[str, Counter[str]] = {}
    for unit in grid.plan.units:
        row = found.setdefault(unit.task, Counter())
        is_done = unit.name in state.done
        row["units"] += 1
        row["done"] += is_done
        row["running"] += not is_done and state.running[unit.name] > 0
        row["failed"] += not is_done and unit.name in state.failed
        row["lost"] += not is_done and state.lost[unit.name] > 0
    return found


def table(grid: GridFolder, state: State, running: int) -> Group:
    """Return the table, a row for each task and their sum, and below it what units under way have said last.
    ``running``: units that are measured now."""
    names = ("units", "done", "running", "failed", "lost")
    made = Table("task", *names)
    for name in names:
        made.columns[1 + names.index(name)].justify = "right"
    rows = counts(grid, state)
    for task, row in rows.items():
        made.add_row(task, *(str(row[name]) for name in names))
    total = sum(rows.values(), Counter())
    left = seconds_left(grid, state, running) if total["done"] < total["units"] else 0.0
    total["running"] = max(total["running"], running)  # an engine without a shared disk knows only how many
    made.add_row("all", *(str(total[name]) for name in names), style="bold")
    made.caption = "" if left == 0.0 else "time left: unknown" if left is None else f"{about(left)} left"
    lines = (Text(f"{name}: {line}", no_wrap=True, overflow="ellipsis") for name, line in said(grid, state).items())
    return Group(made, *lines)


MOST_SAID = 4
"""Units of which the table tells what they are at."""


def said(grid: GridFolder, state: State) -> dict[str, str]:
    """Return by name the last line that each unit under way has said: it may make environments for half an hour."""
    found: dict[str, str] = {}
    for name in [name for name in sorted(state.running) if name not in state.done][:MOST_SAID]:
        for log in sorted(grid.attempts.glob(f"{name}.*/{LOG}"), key=lambda path: path.stat().st_mtime):
            lines = CONTROLS.sub("", log.read_text(errors="replace")[-2000:]).split("\n")
            found[name] = next((line for line in reversed(lines) if line.strip()), "begins")
    return found


class Told:
    """Shows the table while a grid is at work: live in a terminal, else a line for each change."""

    def __init__(self, grid: GridFolder, console: Console, quiet: bool) -> None:
        self.grid = grid
        self.console = console
        self.quiet = quiet
        self.live = Live(console=console, refresh_per_second=1, auto_refresh=False)
        self.last = ""

    def __call__(self, state: State, running: int) -> None:
        if self.quiet:
            return
        if self.console.is_terminal:
            if not self.live.is_started:
                self.live.start()
            self.live.update(table(self.grid, state, running), refresh=True)
            return
        total = sum(counts(self.grid, state).values(), Counter())
        line = f"{total['done']} of {total['units']} units done, {running} running, {total['failed']} failed"
        if line != self.last:
            left = seconds_left(self.grid, state, running)
            self.console.print(line + (f", {about(left)} left" if left else ""), markup=False)
            self.last = line

    def close(self) -> None:
        """Leave the table as it is."""
        self.live.stop()

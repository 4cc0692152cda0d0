"""The main tables in the terminal, at the end of a run and by ``dpbench report``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.analysis.frames import Tables
from harness.report import model
from harness.report.chapters import tables as task_tables
from harness.report.model import Grid, Report, Section

Part = Callable[[Tables, Section], Iterable[Grid]]
FAILURES = {"oom", "rejected", "timeout", "crashed", "ungated"}


def show(report: Report, console: Console) -> None:
    """Print seconds per epoch, ratio to PyTorch without DP, memory where nothing was timed, and failed gate checks,
    section by section; of other kinds of measurement the chapters that ask for it."""
    _end_to_end(report, console, (task_tables.seconds, task_tables.ratios, _memory_alone, _failed_checks))
    for chapter in report.chapters:
        if chapter.in_terminal and chapter.grids:
            console.print(f"\n[bold]{escape(chapter.title)}")
            if chapter.section:
                console.print(f"[dim]{escape(chapter.section.title)}; measured {escape(chapter.when)}")
            for grid in chapter.grids:
                _print(grid, console)


def times(report: Report, console: Console) -> None:
    """Print the seconds per epoch alone."""
    _end_to_end(report, console, (task_tables.seconds,))


def _end_to_end(report: Report, console: Console, parts: Sequence[Part]) -> None:
    tables = report.tables
    for section in model.sections(tables) if tables else ():
        assert tables is not None
        grids = [grid for part in parts for grid in part(tables, section) if grid.rows]
        if grids:  # a run that was stopped before its first time has none
            console.print(f"\n[bold]{escape(section.title)}")
            console.print(f"[dim]measured {escape(model.provenance(tables, section))}")
        for grid in grids:
            _print(grid, console)


def _memory_alone(tables: Tables, section: Section) -> list[Grid]:
    """Return the memory of a section in which nothing was timed: else its readers would see nothing."""
    timed = (section.of(tables.cells).state == "ok").any()
    return [] if timed else task_tables.first_metric(tables, task_tables.memory(tables, section))


def _failed_checks(tables: Tables, section: Section) -> Iterator[Grid]:
    for grid in task_tables.gate(tables, section):
        if failed := tuple(row for row in grid.rows if "FAILED" in row):
            yield Grid(f"{grid.title}: failed checks", grid.header, failed)


def _print(grid: Grid, console: Console) -> None:
    """Print as many columns side by side as fit; the rest below, so that nothing is cut off. Every part begins with the
    columns that tell its rows apart, if they leave room for others."""
    # Beside a column are a blank on either side and the line between columns.
    widths = [max(len(row[i]) for row in (grid.header, *grid.rows)) + 3 for i in range(len(grid.header))]
    keys = next((k for k in range(1, len(widths)) if len({row[:k] for row in grid.rows}) == len(grid.rows)), 1)
    if 2 * sum(widths[:keys]) > console.width:
        keys = 1
    chunks: list[list[int]] = [[]]
    room = console.width - sum(widths[:keys]) - 1
    for i, width in enumerate(widths[keys:], keys):
        if chunks[-1] and sum(widths[j] for j in chunks[-1]) + width > room:
            chunks.append([])
        chunks[-1].append(i)
    console.print(f"\n[bold]{escape(grid.title)}")
    for chunk in chunks:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(escape(grid.header[0]), no_wrap=True)
        shown = [*range(1, keys), *chunk]
        for i in shown:
            table.add_column(escape(grid.header[i]), justify="right")
        for row in grid.rows:
            table.add_row(escape(row[0]), *(_styled(row[i]) for i in shown))
        console.print(table)
    for note in grid.notes:
        console.print(f"[dim]  {escape(note)}")


def _styled(cell: str) -> str:
    text = escape(cell)
    if cell in FAILURES or cell == "FAILED":
        return f"[red]{text}[/]"
    return f"[yellow]{text}[/]" if cell == "unsupported" else text

"""The main tables in the terminal, at the end of a run and by ``dpbench report``."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.report import layout
from harness.report.layout import Grid
from harness.report.table import Tables

FAILURES = {"oom", "rejected", "timeout", "crashed", "ungated"}


def show(tables: Tables, console: Console) -> None:
    """Seconds per epoch, ratio to PyTorch without DP, and failed gate checks, section by section."""
    for section in layout.sections(tables):
        console.print(f"\n[bold]{escape(section.title)}")
        console.print(f"[dim]measured {escape(layout.provenance(tables, section))}")
        for grid in layout.seconds(tables, section):
            _print(grid, console)
        for grid in layout.ratios(tables, section):
            _print(grid, console)
        for grid in layout.gate(tables, section):
            failed = tuple(row for row in grid.rows if "FAILED" in row)
            if failed:
                _print(Grid(f"{grid.title}: failed checks", grid.header, failed), console)


def _print(grid: Grid, console: Console) -> None:
    """As many columns side by side as fit; the rest below, so that nothing is cut off."""
    widths = [max(len(row[i]) for row in (grid.header, *grid.rows)) + 2 for i in range(len(grid.header))]
    chunks: list[list[int]] = [[]]
    room = console.width - widths[0]
    for i, width in enumerate(widths[1:], 1):
        if chunks[-1] and sum(widths[j] for j in chunks[-1]) + width > room:
            chunks.append([])
        chunks[-1].append(i)
    console.print(f"\n[bold]{escape(grid.title)}")
    for chunk in chunks:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(escape(grid.header[0]), no_wrap=True)
        for i in chunk:
            table.add_column(escape(grid.header[i]), justify="right")
        for row in grid.rows:
            table.add_row(escape(row[0]), *(_styled(row[i]) for i in chunk))
        console.print(table)
    for note in grid.notes:
        console.print(f"[dim]  {escape(note)}")


def _styled(cell: str) -> str:
    text = escape(cell)
    if cell in FAILURES or cell == "FAILED":
        return f"[red]{text}[/]"
    return f"[yellow]{text}[/]" if cell == "unsupported" else text

"""The verbs ``report`` and ``explain``, and a comparison of records. Heavy imports happen inside."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import CELL_FAILED, In, Json, Tasks, names_of
from harness.errors import BadInput
from harness.paths import LOCAL_RESULTS

if TYPE_CHECKING:
    from harness.report.chapters.compare import Line

Places = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Folders or files with records, reported together; or `cited`, or the name of a committed run.",
        show_default=str(LOCAL_RESULTS),
    ),
]


def report(
    places: Places = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where tables go (default: report/ beside the records; of committed runs below results/local).",
            metavar="FOLDER",
        ),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Where figures go (default: OUT/plots).", metavar="FOLDER")] = None,
    frameworks: Annotated[
        str | None,
        typer.Option(help="Only these, comma-separated: opacus, or one variant as opacus-ghost.", metavar="NAMES"),
    ] = None,
    tasks: Tasks = None,
    as_json: Json = False,
) -> None:
    """Make tables (Markdown, CSV, LaTeX), figures (PDF, SVG, PNG) and a page from records; show the main tables."""
    # A report makes millions of objects and hardly a circle of them: looking for these takes a sixth of its time.
    gc.disable()
    try:
        _write(places, out, plots, names_of(frameworks), names_of(tasks), as_json)
    finally:
        gc.enable()


def _write(
    places: list[Path] | None,
    out: Path | None,
    plots: Path | None,
    frameworks: Sequence[str] | None,
    tasks: Sequence[str] | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    from harness.published import index
    from harness.report import contents, output
    from harness.report.formats import terminal
    from harness.store import read

    first, *others = places = places or [LOCAL_RESULTS]
    if out is None and others:
        raise BadInput(f"Records of {len(places)} places have no folder in common; choose one by --out.")
    found = index.places(places)
    if out is None and found != places:
        out = LOCAL_RESULTS / "reports" / first
    out = out or (first if first.is_dir() else first.parent) / "report"
    faults: list[str] = []
    built = contents.build(read.chosen(read.load(*found, left_out=faults.append), frameworks, tasks), faults)
    plots = plots or out / "plots"
    output.make_folders(out, plots)  # a wrong one is told at once, not below hundreds of lines
    console = Console()
    if not as_json:
        terminal.show(built, console)  # drawing the figures takes longer than all the rest
    written = output.write_report(built, out, plots)
    if as_json:
        cells = json.loads(built.tables.cells.to_json(orient="records")) if built.tables else []
        said = {"records": len(built.records), "cells": cells, "files": [str(p) for p in written], "left_out": faults}
        typer.echo(json.dumps(said))
        _refuse(faults)
        return
    told = [f"\n{len(built.records)} records. Files:"]
    for folder in dict.fromkeys(path.parent for path in written):
        kinds = Counter(path.suffix[1:] for path in written if path.parent == folder)
        told.append(f"  {folder}: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    page = next(path for path in written if path.name == "report.html").absolute()
    told.append(f"Report: {page.as_uri()}")
    console.print("\n".join(told), soft_wrap=True, highlight=False, markup=False)
    _refuse(faults)


def _refuse(faults: list[str]) -> None:
    """Raise :class:`BadInput` with what had to be left out, once the rest has been shown."""
    if faults:
        raise BadInput("Left out: " + "\ndpbench: Left out: ".join(faults))


def compare(a: str, b: str, folder: Path, as_json: bool) -> None:
    """Print how much faster or slower contestant A is than B, cell by cell, with interval and verdict."""
    from harness.analysis import frames
    from harness.published import index
    from harness.report.chapters import compare as comparison
    from harness.store import read

    faults: list[str] = []
    tables = frames.build(read.load(*index.places([folder]), left_out=faults.append))
    lines = comparison.compare(tables, a, b)
    if as_json:
        typer.echo(json.dumps([line.as_json() for line in lines]))
        _end_of_comparison(lines, faults)
        return
    section = None
    several = len({line.section for line in lines}) > 1
    for line in lines:
        if several and line.section != section:
            typer.echo(f"{line.section.title}:")
            section = line.section
        typer.echo(line.text)
    _end_of_comparison(lines, faults)


def _end_of_comparison(lines: Sequence[Line], faults: list[str]) -> None:
    """Exit code 3 where not one cell could be compared: nothing is no good news."""
    _refuse(faults)
    if not any(line.result is not None for line in lines):
        raise typer.Exit(CELL_FAILED)


def explain(
    cell: Annotated[
        str,
        typer.Argument(
            help="task/framework-variant/batch/protocol/device/isolation, or a part (layers: layer/.../passes/batch)."
        ),
    ],
    folder: In = LOCAL_RESULTS,
    every_check: Annotated[
        bool, typer.Option("--all-checks", help="Each check of the gate, not only failures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Go from a number in a table back to its processes: seconds, block, load, gate, environment, command."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from harness.analysis import frames
    from harness.published import index
    from harness.report.chapters import explain as explanation
    from harness.store import read

    faults: list[str] = []
    loaded = read.load(*index.places([folder]), left_out=faults.append)
    others = [r for r in loaded if r.cell.kind != "e2e"]
    # Cells of layers and of the frontier only where no cell of a task is meant.
    of_tasks = [r.cell.name for r in loaded if r.cell.kind == "e2e"]
    main = not others or any(cell in name for name in of_tasks)
    if not main and not any(cell in r.cell.name for r in others):
        explanation.cell_name(cell, (r.cell.name for r in loaded))  # fits none: it is said which ones of all are near
    tables = frames.build(loaded) if main else None
    found = explanation.rows(tables, cell) if tables else explanation.other_rows(others, cell)
    if as_json:
        shown = [
            {"shown_state": row["state"], "superseded": bool(row["superseded"]), "record": json.loads(record.to_json())}
            for record, row in found
        ]
        typer.echo(json.dumps(shown))
        _refuse(faults)
        return
    console = Console()
    full_name = next((r.cell.name for r, _ in found if r.purpose != "gate"), found[0][0].cell.name)
    console.print(Text(full_name, style="bold"))
    for line in explanation.summary(tables, full_name) if tables else ():
        console.print(Text(line))
    for title, facts in explanation.parts(found, every_check):
        console.print(Text(f"\n{title}", style="bold"))
        grid = Table.grid(padding=(0, 2))
        for name, text in facts:
            if name != explanation.COMMAND:
                grid.add_row(Text(name, style="dim"), Text(text))
        console.print(grid)
        for name, text in facts:
            if name == explanation.COMMAND:  # in one line, however long, so that it can be copied
                console.print(Text.assemble((f"{name}  ", "dim"), text), soft_wrap=True)
    _refuse(faults)

"""The end of the verbs below ``run``: carry out, write the report, show it, say where it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from harness.errors import BadInput
from harness.run.held import is_held, released
from harness.run.progress import watched
from harness.run.session import Session, Summary
from harness.store.folder import RunFolder
from harness.store.read import load


def carry_out(run: Session[Any, Any, Any, Any], fresh: bool, as_json: bool, beginning: str = "") -> Summary:
    """Carry out ``run``, and print its tables, its result in a sentence, and where its files are.

    Args:
        run: The run, of whatever kind.
        fresh: Whether earlier records of its folder are forgotten.
        as_json: Whether standard output gets JSON, and standard error the rest.
        beginning: A sentence to print first.

    Returns:
        How many records of each state there are.
    """
    folder = run.folder
    console = Console(stderr=as_json, highlight=False)
    if beginning and not as_json:
        console.print(beginning, markup=False, soft_wrap=True)
    try:
        summary = watched(lambda progress: run.execute(progress, fresh), folder.path, console, as_json)
    except typer.Exit:  # it was interrupted: what is there is shown all the same
        with suppress(BadInput):
            report(folder, console, shows=not as_json)
        raise
    written = report(folder, console, shows=not as_json)
    if as_json:
        said = {"folder": str(folder.path), "states": summary.states, "resumed": summary.resumed}
        print(json.dumps({**said, "written": [str(path) for path in written]}))
        return summary
    states = ", ".join(f"{count} {state}" for state, count in sorted(summary.states.items()))
    before = f"; {summary.resumed} from before" if summary.resumed else ""
    console.print(f"Records: {folder.records} ({summary.total}: {states}{before})", markup=False, soft_wrap=True)
    page = folder.path / "report" / "report.html"
    console.print(f"Report:  {page.as_uri()}", markup=False, soft_wrap=True)
    return summary


def interim(folder: RunFolder, as_json: bool) -> Callable[[str | None], None]:
    """Return what to do in the course of a run: a task's first times are shown, and the report is written anew.

    Args:
        folder: The run's.
        as_json: Whether standard output is for JSON.
    """

    def so_far(task: str | None) -> None:
        from harness.report import conclusion, contents, output
        from harness.report.formats import terminal

        found = load(folder.path, left_out=lambda fault: None)
        held_back = any(map(is_held, found))
        if task is not None:
            console = Console(stderr=as_json, highlight=False)
            built = contents.build([released(record) for record in found if record.cell.task == task])
            terminal.times(built, console)
            for text in conclusion.sentences(built):
                console.print(text, markup=False, soft_wrap=not console.is_terminal)
            provisional = ", and provisional: none counts before its memory process, next, has trained the same"
            told = f"These are the first times of {task}, of one process each{provisional if held_back else ''}."
            console.print(f"{told} Others follow and add intervals.", markup=False, soft_wrap=True)
        if not held_back:  # what is not compared stands in no file
            output.write_report(contents.build(found), folder.path / "report", folder.path / "report" / "plots")

    return so_far


def report(folder: RunFolder, console: Console, shows: bool) -> list[Path]:
    """Write the report of a run's records beside them, and print its main tables and conclusion where it ``shows``.

    Returns:
        The files written.
    """
    # A report imports pandas, which a run without one need not have.
    from harness.report import conclusion, contents, output
    from harness.report.formats import terminal

    faults: list[str] = []
    built = contents.build(load(folder.path, left_out=faults.append), faults)
    written = output.write_report(built, folder.path / "report", folder.path / "report" / "plots")
    if shows:
        for text in faults:
            console.print(text, markup=False)
        terminal.show(built, console)
        for text in conclusion.sentences(built):
            console.print(text, markup=False, soft_wrap=not console.is_terminal)
    return written

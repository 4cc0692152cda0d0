"""The verbs of ``history``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.options import FINDING, Json
from harness.cli.verbs import Verbs

app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Keep runs over time, find lasting changes, check in CI.")

FOLDER = Path("results/history")
UNREAD = 3

Folder = Annotated[Path, typer.Option(help="The history.", metavar="FOLDER")]


@app.command(short_help="Add a run as one small file.")
def add(
    places: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, packed files, or names of committed runs.")
    ],
    folder: Folder = FOLDER,
    machine: Annotated[
        str | None,
        typer.Option(
            help="A name that alike machines share (runners made anew each time); default: the machine's own.",
            metavar="NAME",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a run: one small file that is never rewritten. What is there already is left as it is."""
    from harness.history import runs as history
    from harness.published import index
    from harness.store import cache, read
    from harness.store.folder import PLAN

    places = index.places(places)
    for place in places:
        if (place / PLAN).exists():
            with cache.locked(place / ".lock", f"A run is at work in {place}; wait for it, then add it."):
                pass
    added = history.add(history.condense(read.load(*places), machine), folder)
    if as_json:
        shown = [{"file": str(a.path), "new": a.new, "run": a.run.run, "cells": len(a.run.cells)} for a in added]
        typer.echo(json.dumps(shown))
        return
    for a in added:
        what = f"{len(a.run.cells)} cells of run {a.run.run}"
        typer.echo(f"Added {what}: {a.path}" if a.new else f"Already there, nothing to do: {what}, {a.path}")


@app.command("list", short_help="List the runs, oldest first.")
def list_runs(folder: Folder = FOLDER, as_json: Json = False) -> None:
    """List the runs, oldest first."""
    from harness.cli import listing
    from harness.history import runs as history

    loaded = history.load(folder)
    rows = [
        {
            "time": run.time[:16].replace("T", " "),
            "commit": run.short_commit,
            "cells": len(run.cells),
            "ok": sum(cell.state == "ok" for cell in run.cells),
            "speed_probe_ms": None if run.canary_seconds is None else round(run.canary_seconds * 1e3, 2),
            "id": run.id,
            "machine": run.machine_label + (" (simulated)" if run.simulated else ""),
        }
        for run in loaded.runs
    ]
    if as_json:
        files = [{"file": f"{run.machine_key}/{run.file_name}", "run": run.run} for run in loaded.runs]
        typer.echo(json.dumps([row | file for row, file in zip(rows, files, strict=True)]))
    else:
        for machine in dict.fromkeys(str(row["machine"]) for row in rows):
            here = [row for row in rows if row["machine"] == machine]
            listing.table(machine, [{k: v for k, v in row.items() if k != "machine"} for row in here], False)
        if not rows:
            typer.echo("No run is in the history: `dpbench history add RUN` adds one.")
    _say(loaded.faults)


@app.command(short_help="Show one run, or one cell over time.")
def show(
    what: Annotated[str, typer.Argument(help="A cell (or a part of its name), or a run's file name (or a part).")],
    folder: Folder = FOLDER,
    raw: Annotated[bool, typer.Option("--raw", help="Seconds as measured, not normalised by the speed probe.")] = False,
    as_json: Json = False,
) -> None:
    """Show one run as it is stored, or one cell over time with its steps, a part per machine."""
    from harness.cli import listing
    from harness.history import runs as history
    from harness.history import series
    from harness.report.chapters.explain import cell_name

    loaded = history.load(folder)
    runs = [run for run in loaded.runs if what in run.file_name]
    if runs:
        typer.echo(f"[{','.join(run.to_json() for run in runs)}]" if as_json else runs[-1].to_json(), nl=False)
        return
    machines = series.of_history(loaded)
    name = cell_name(what, (s.name for cells in machines.values() for s in cells))
    found: list[dict[str, Any]] = []
    for key, cells in machines.items():
        for s in cells:
            if s.name != name:
                continue
            rows = [
                {
                    "time": s.runs[p.run].time,
                    "commit": s.runs[p.run].short_commit,
                    "state": p.state + (" (disturbed)" if p.vetoed else ""),
                    "n": p.cell.n,
                    "seconds": p.seconds if raw else p.normalised,
                    "bytes": p.bytes,
                }
                for p in s.points
            ]
            steps = [
                {
                    "metric": metric,
                    "ratio": step.ratio,
                    "last_before": s.runs[before].commit,
                    "first_after": s.runs[after].commit,
                }
                for metric in ("time", "memory")
                for step, before, after, _ in s.changes(metric)
            ]
            found.append({"machine": key, "cell": name, "normalised": not raw, "points": rows, "steps": steps})
    if as_json:
        typer.echo(json.dumps(found))
        return
    for part in found:
        listing.table(f"{part['cell']} on {part['machine']}", part["points"], False)
        for step in part["steps"]:
            typer.echo(
                f"{step['metric']} ×{step['ratio']:.3f} between {str(step['last_before'])[:7]} and "
                f"{str(step['first_after'])[:7]}"
            )


@app.command(short_help="Fail where a change for the worse is open.")
def check(
    folder: Folder = FOLDER,
    days: Annotated[
        int, typer.Option(help="Only regressions detected so many days before the newest run.", metavar="N")
    ] = 30,
    as_json: Json = False,
) -> None:
    """Fail where a change for the worse is open: slower, more memory, or no longer working.

    Exit codes: 0 none is open, 1 one is, 3 none was found but not every file of the history could be read.
    """
    from harness.analysis.change_points import LEAST_RUNS
    from harness.errors import BadInput
    from harness.history import events
    from harness.history import runs as history

    if days < 1:
        raise BadInput(f"--days is {days}: it must be at least 1.")
    loaded = history.load(folder)
    every = events.of_history(loaded)
    found = events.current(every, loaded.runs[-1], days) if loaded.runs else []
    older = sum(e.open for e in every) - len(found)
    if as_json:
        shown = {"open": [e.as_json() for e in found], "older_open": older, "faults": loaded.faults}
        typer.echo(json.dumps(shown))
    else:
        for event in found:
            typer.echo(f"{'RED  ' if event.red else ''}{event.sentence} [{event.machine}]")
            for note in event.notes:
                typer.echo(f"     {note}")
            if event.bisect:
                typer.echo(f"     to find the commit: {event.bisect}")
        last = f"; the newest run is of {loaded.runs[-1].time[:10]}" if loaded.runs else ""
        rest = f", {older} older" if older else ""
        said = f"{len(found) or 'No'} open regression{'' if len(found) == 1 else 's'} of {days} days{rest}"
        if not found and not loaded.can_judge:
            said = f"Too few runs to judge: a slowdown shows from {LEAST_RUNS} runs of a cell on one machine on, and "
            said += f"the most so far are {loaded.most_runs}"
        typer.echo(f"{said}{last}")
        _say(loaded.faults)
    raise typer.Exit(FINDING if found else UNREAD if loaded.faults else 0)


def _say(faults: tuple[str, ...]) -> None:
    for fault in faults:
        typer.echo(f"dpbench: {fault}", err=True)

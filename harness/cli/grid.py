"""``dpbench grid``: a plan over many machines. Everything heavy is imported when it runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import CELL_FAILED, Json
from harness.cli.run_e2e import e2e, options_of
from harness.cli.verbs import Verbs
from harness.errors import BadInput

if TYPE_CHECKING:
    from harness.grid.drive import Launcher
    from harness.grid.folder import GridFolder
    from harness.plan.e2e import Options

app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Measure a plan on many machines, by Slurm, Ray or one by one.")

Folder = Annotated[Path, typer.Argument(help="Folder of the grid; for Slurm on a disk that all nodes see.")]
OF_THE_GRID = {"out": "--out", "fresh": "--fresh", "as_json": "--json", "any_image": ""}
"""Options of ``run e2e`` that no unit has: each measures its whole plan, into a folder that the grid names."""
LAUNCHERS = ("local", "slurm", "ray")


@app.command(
    short_help="Cut a plan into units.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="All options of `dpbench run e2e` say what is measured, but --out, --fresh and --json.",
)
def plan(
    context: typer.Context,
    folder: Folder,
    command: Annotated[
        str, typer.Option(help="What starts dpbench on a node; default its Python.", metavar="COMMAND")
    ] = "",
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Measure all units about so long together, an equal share each, as `run e2e --minutes`.", metavar="M"
        ),
    ] = None,
) -> None:
    """Write the plan of a grid: a unit for each task and batch size. Takes the options of `dpbench run e2e`."""
    from harness.grid import plan as plans
    from harness.grid.folder import GridFolder
    from harness.run.pace import Pace

    Pace(minutes)  # refuses what is no time
    made = plans.make(context.args, _read, shlex.split(command))
    share = f"{minutes / len(made.units):.4g}" if minutes else ""
    if share:
        made = replace(made, words=(*made.words, "--minutes", share))
    GridFolder(folder.absolute()).begin(made)
    for unit in made.units:
        print(f"{unit.name}: {unit.processes} processes")
    if share:
        print(f"Each is measured for about {share} min: a round at least, then until it is known who is fastest.")
    print(f"{len(made.units)} units in {folder}. Next: dpbench grid run {folder} --launcher {'|'.join(LAUNCHERS)}")


def _read(words: Sequence[str]) -> Options:
    """Return the options that these words mean to ``run e2e``."""
    alone = typer.Typer(add_completion=False)
    alone.command("run e2e")(e2e)
    given = typer.main.get_command(alone).make_context("dpbench run e2e", list(words)).params
    usual = {"fresh": False, "as_json": False, "any_image": False}
    for name, option in OF_THE_GRID.items():
        if given[name] != usual.get(name):
            raise BadInput(f"{option or name} is no option of a grid, whose units are measured whole; leave it out.")
    return options_of(given)


@app.command(short_help="Hand out the units that are not done.")
def run(
    folder: Folder,
    launcher: Annotated[str, typer.Option(help="Who hands them out.", metavar="|".join(LAUNCHERS))] = "local",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="A setting of the engine: partition, account, timeout_min, ... (submitit's); address (Ray's).",
            metavar="NAME=VALUE",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the units that are not done, each on one machine, until all are done or were tried three times.

    The same command goes on where it was stopped. Exit code 3 where a unit is missing or a cell failed, 1 where a
    contestant was rejected; both are named.
    """
    from rich.console import Console

    from harness.grid.drive import drive
    from harness.grid.folder import GridFolder
    from harness.grid.table import Told
    from harness.run.progress import INTERRUPTED

    grid = GridFolder(folder.absolute())
    told = Told(grid, Console(highlight=False, stderr=as_json), as_json)
    engine = _launcher(grid, launcher, _settings(settings or []))
    try:
        state = drive(grid, engine, told)
    except KeyboardInterrupt:
        print("Stopped. What is done is kept; the same command goes on from there.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        told.close()
    missing = [unit.name for unit in grid.plan.units if unit.name not in state.done]
    if as_json:
        print(json.dumps({"done": len(state.done), "missing": missing}))
    if not as_json:
        for name in missing:
            print(f"Not done: {name}: {_why(grid, name)}")
        _say_without_time(grid, [name for name, end in sorted(state.done.items()) if end.exit])
        if not missing:
            print(f"All units are done. Next: dpbench grid merge {folder}")
    raise typer.Exit(CELL_FAILED if missing else max(end.exit for end in state.done.values()))


MOST_WITHOUT_TIME = 12
"""Cells without a time that are named after a run."""


def _say_without_time(grid: GridFolder, units: Sequence[str]) -> None:
    """Print which cells of units that are done have no time and why: what the exit code speaks of."""
    from harness.store.read import load

    found = {
        f"{one.cell.task}, batch {one.cell.batch_size}, {one.cell.contestant}": f"{one.state}: {one.reason}"
        for unit in units
        for one in load(grid.units / unit)
        if one.state != "ok"
    }
    for cell, why in list(found.items())[:MOST_WITHOUT_TIME]:
        print(f"Without a time: {cell}: {why}")
    if len(found) > MOST_WITHOUT_TIME:
        print(f"... and {len(found) - MOST_WITHOUT_TIME} more; dpbench report names all.")


def _settings(given: Sequence[str]) -> dict[str, str]:
    for text in given:
        if "=" not in text:
            raise BadInput(f"--with is {text!r}: give a name and a value, for instance --with partition=long.")
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def _launcher(grid: GridFolder, name: str, settings: dict[str, str]) -> Launcher:
    if name == "local":
        from harness.grid.launchers.local import Local

        if settings:
            raise BadInput(f"--with names {next(iter(settings))!r}: the launcher local has no settings.")
        return Local(grid)
    if name == "slurm":
        from harness.grid.launchers.slurm import Slurm

        return Slurm(grid, settings)
    if name == "ray":
        from harness.grid.launchers.ray_core import RayCore

        return RayCore(grid, settings)
    raise BadInput(f"--launcher is {name!r}: choose one of {', '.join(LAUNCHERS)}.")


def _why(grid: GridFolder, name: str) -> str:
    """Return what the files tell of a unit that is not done."""
    state = grid.state()
    if name in state.failed:
        return str(state.failed[name][-1].fault)
    return "under way" if state.running[name] else "lost with its machine" if state.lost[name] else "not begun"


@app.command(short_help="Show units done, running and failed.")
def status(folder: Folder, as_json: Json = False) -> None:
    """Show what the grid's files say: units done, running, failed or lost by task, and the time left."""
    from rich.console import Console

    from harness.grid.folder import GridFolder
    from harness.grid.table import table

    grid = GridFolder(folder.absolute())
    state = grid.state()
    if not as_json:
        Console(highlight=False).print(table(grid, state, state.under_way))
    said: dict[str, Any] = {"units": len(grid.plan.units), "done": sorted(state.done), "open": {}}
    for unit in grid.plan.units:
        if unit.name not in state.done:
            said["open"][unit.name] = why = _why(grid, unit.name)
            if not as_json and why != "not begun":
                print(f"{unit.name}: {why}")
    if as_json:
        print(json.dumps(said))


@app.command(short_help="Pack what is done into one file.")
def merge(
    folder: Folder,
    target: Annotated[
        Path | None, typer.Option("--to", help="The .jsonl.gz to write; default merged.jsonl.gz.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every unit, pack the records of those that count into one file, and name the others.

    Exit code 3 where a unit is missing.
    """
    from harness.grid.folder import GridFolder

    grid = GridFolder(folder.absolute())
    target = target or folder / "merged.jsonl.gz"
    count, faults = grid.merge(target)
    twins = sorted(path.name for path in grid.twins.glob("*"))
    done = [unit.name for unit in grid.plan.units if unit.name not in faults]
    places = {name: end.place for name in done if (end := grid.end_of(grid.plan.find(name))) is not None}
    if as_json:
        said = {"records": count, "target": str(target), "missing": faults, "twins": twins, "places": places}
        print(json.dumps(said))
    else:
        print(f"{count} records of {len(grid.plan.units) - len(faults)} units in {target}")
        nodes = Counter((place.get("node", "unknown"), place.get("engine") or "local") for place in places.values())
        for (node, engine), units in sorted(nodes.items()):
            print(f"  {units} measured on {node} ({engine})")
        for name, fault in faults.items():
            print(f"Not in it: {name}: {fault}")
        if twins:
            print(f"Done twice, and the later one set aside: {', '.join(twins)}")
    raise typer.Exit(CELL_FAILED if faults else 0)


@app.command(short_help="Write a text for another engine.")
def export(
    folder: Folder,
    kind: Annotated[str, typer.Option("--as", help="For whom.", metavar="sbatch|k8s|skypilot")],
    image: Annotated[str, typer.Option(help="Kubernetes: image with dpbench.", metavar="IMAGE")] = "dpbench:latest",
) -> None:
    """Print a text that the engine takes as it is: each job of it measures one unit."""
    from harness.grid import export as texts
    from harness.grid.folder import GridFolder

    print(texts.text(GridFolder(folder.absolute()), kind, image), end="")


@app.command(short_help="Measure one unit here.")
def unit(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="Its name or number.")],
    scratch: Annotated[
        Path | None, typer.Option(help="Make it on this disk, and copy what remains.", metavar="FOLDER")
    ] = None,
) -> None:
    """Measure one unit on this machine, unless it is done: what every job of an engine runs."""
    from harness.grid.perform import on_shared_disk

    end = on_shared_disk(folder.absolute(), name, scratch)
    print(f"{end.unit}: {end.fault or 'done'}")
    raise typer.Exit(CELL_FAILED if end.fault else end.exit)

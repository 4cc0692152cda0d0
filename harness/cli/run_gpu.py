"""The verb ``run gpu``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

NONE = "none"


def gpu(
    python: Annotated[
        Path, typer.Option(help="The Python whose packages are measured, as they are; nothing is installed.")
    ] = Path(sys.executable),
    seconds: Annotated[float, typer.Option(help="For everything; what does not fit is named as not begun.")] = 520.0,
    frameworks: Annotated[
        str | None, typer.Option(help="Comma-separated, as for run e2e; default those that matter on a GPU.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Comma-separated, most important first; or none.")] = None,
    layers: Annotated[str | None, typer.Option(help="Comma-separated layers or sets; or none.")] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Comma-separated, most important first; layers take the first.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Processes per cell; the second round comes last.")] = None,
    device: Annotated[str, typer.Option(help="cuda; or cpu, to try the same run without a GPU.")] = "cuda",
    threads: Annotated[int | None, typer.Option(help="Threads and pinned cores per process; default all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of plan, batches, weights and noise.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for records.jsonl, summary.txt and summary.json.")] = Path(
        "results/local/gpu"
    ),
    work: Annotated[
        Path | None, typer.Option(help="Folder of the unfinished run, to go on from; default OUT/.run.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Start anew, or go on where the run stopped.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Under 9 minutes, offline, in the Python that is there: the gate, training steps and layers, by importance.

    The versions found are recorded and are not the pinned ones; missing data sets are replaced by synthetic twins,
    which is said everywhere.
    """
    from rich.console import Console

    from harness.cli.options import exit_code, integers, names_of
    from harness.environments.backend import check_device
    from harness.errors import BadInput
    from harness.plan.gpu import ROUNDS, Choice
    from harness.run.e2e import command_line
    from harness.run.gpu import GpuRun
    from harness.run.gpu_summary import summary, text
    from harness.run.progress import watched

    if device != "cuda":  # its own sentence says more
        check_device(device)
    if tasks == NONE and layers == NONE:
        raise BadInput("--tasks and --layers are both none: leave one of them to measure.")
    choice = Choice(
        frameworks=names_of(frameworks),
        tasks=() if tasks == NONE else names_of(tasks),
        layers=() if layers == NONE else names_of(layers),
        batch_sizes=integers(batch_sizes, "--batch-sizes"),
        rounds=ROUNDS if rounds is None else rounds,
        device=device,
        threads=threads,
        seed=seed,
    )
    console = Console(stderr=as_json)
    run = GpuRun(choice, python, seconds, out.resolve(), work.resolve() if work else None, command_line())
    outcome = watched(lambda progress: run.execute(progress, fresh), run.out, console, as_json)
    if as_json:
        print(json.dumps(summary(outcome)))
    else:
        print(text(outcome))
        console.print(f"Records and summary: {run.out}; the whole report: dpbench report {run.out}", markup=False)
    raise typer.Exit(exit_code(outcome.states, outcome.expected_rejections))

"""The verb ``run gpu``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options as shared
from harness.cli.options import exit_code, integers, names_of

NONE = "none"


def gpu(
    python: Annotated[
        Path,
        typer.Option(
            help="The one whose packages are measured, as they are; nothing is installed.",
            metavar="PYTHON",
            show_default="this one",
        ),
    ] = Path(sys.executable),
    seconds: Annotated[
        float, typer.Option(help="For everything; what does not fit is named as not begun.", metavar="SECONDS")
    ] = 520.0,
    frameworks: Annotated[
        str | None,
        typer.Option(help="Comma-separated, as for run e2e; default those that matter on a GPU.", metavar="NAMES"),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Comma-separated, most important first; or none.", metavar="NAMES")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Comma-separated layers or sets; or none.", metavar="NAMES")
    ] = None,
    frontier: Annotated[
        str | None,
        typer.Option(help="Tasks whose largest physical batch is searched, last of all; or none.", metavar="NAMES"),
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Comma-separated, most important first; layers take the first.", metavar="SIZES")
    ] = None,
    rounds: shared.Rounds = None,
    device: Annotated[str, typer.Option(help="cpu: to try the same run without a GPU.", metavar="cuda|cpu")] = "cuda",
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
    out: Annotated[
        Path, typer.Option(help="Where records.jsonl, summary.txt and summary.json go.", metavar="FOLDER")
    ] = Path("results/local/gpu"),
    work: Annotated[
        Path | None, typer.Option(help="The unfinished run to go on from; default OUT/.run.", metavar="FOLDER")
    ] = None,
    fresh: shared.Fresh = False,
    as_json: shared.Json = False,
) -> None:
    """Measure a GPU in under 9 minutes, offline, in the Python that is there: gate, training steps, layers.

    The versions found are recorded and are not the pinned ones; missing data sets are replaced by synthetic twins,
    which is said everywhere.
    """
    from rich.console import Console

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
        frontier=() if frontier == NONE else names_of(frontier),
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

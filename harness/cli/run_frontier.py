"""The verb ``run frontier``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

BUDGET_GIB = 1.5
FAILED = {"crashed", "timeout"}


def frontier(
    tasks: Annotated[str, typer.Option(help="Comma-separated task names.")] = "mnist-cnn,cifar10-cnn",
    frameworks: Annotated[str, typer.Option(help="As for run e2e: names, core, defaults or all.")] = "core",
    budget: Annotated[
        float | None, typer.Option(help="GiB above start-up, on a CPU; default 1.5. On CUDA it is the device's memory.")
    ] = None,
    first: Annotated[int, typer.Option(help="The batch size that is tried first, then doubled.")] = 64,
    largest: Annotated[int | None, typer.Option(help="No larger size is tried; default the training set.")] = None,
    resolution: Annotated[float, typer.Option(help="The bisection ends at this share of the batch size.")] = 0.05,
    longest_step: Annotated[float, typer.Option(help="No size whose step would take more seconds is tried.")] = 20.0,
    rounds: Annotated[int, typer.Option(help="Processes at each frontier, for the throughput.")] = 3,
    seconds: Annotated[float, typer.Option(help="How long a process times steps (at least one).")] = 1.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Threads and pinned cores per process; default all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of order, batches, weights and noise.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a process is stopped.")] = 600.0,
    synthetic: Annotated[
        bool, typer.Option(help="Use the synthetic twins of the data sets; marked everywhere.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Run folder; default results/local/frontier.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Start anew, or go on where the run stopped.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")] = False,
) -> None:
    """Largest physical batch that fits a memory budget, and the throughput there."""
    from rich.console import Console

    from harness import report
    from harness.environments import memory_limit
    from harness.environments.venv import VenvBackend
    from harness.plan import registry
    from harness.run.e2e import command_line
    from harness.run.frontier import FrontierRun, Search, options_of
    from harness.run.progress import watched
    from harness.store.folder import RunFolder
    from harness.store.read import load

    if budget is None and device == "cpu":
        budget = BUDGET_GIB
    search = Search(first, largest, resolution, longest_step)
    options = options_of(
        [name.strip() for name in tasks.split(",") if name.strip()],
        frameworks=tuple(name.strip() for name in frameworks.split(",") if name.strip()),
        rounds=rounds,
        budget_seconds=seconds,
        device=device,
        threads=threads,
        seed=seed,
        timeout_seconds=timeout,
        synthetic=synthetic,
    )
    contestants = registry.select(options.frameworks)
    folder = RunFolder((out or Path("results/local/frontier")).resolve())
    console = Console(stderr=as_json)
    budget_bytes = memory_limit.from_gibibytes(budget, "--budget")
    run = FrontierRun(options, search, budget_bytes, contestants, folder, command_line(), VenvBackend())
    summary = watched(lambda progress: run.execute(progress, fresh), folder.path, console, as_json)
    paths = report.write(folder.path, folder.path / "report", folder.path / "report" / "plots")
    if as_json:
        print(
            json.dumps(
                {
                    "folder": str(folder.path),
                    "states": summary.states,
                    "resumed": summary.resumed,
                    "written": [str(path) for path in paths],
                }
            )
        )
    else:
        report.show(load(folder.path, left_out=lambda fault: console.print(fault, markup=False)), console)
        console.print(
            f"Records: {folder.records} ({summary.total}, {summary.resumed} of them from before)", markup=False
        )
        console.print(f"Report:  {folder.path / 'report'}", markup=False)
    unexpected = summary.states.get("rejected", 0) > summary.expected
    raise typer.Exit(3 if FAILED & summary.states.keys() else 1 if unexpected else 0)

"""The verb ``run layers``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import AnyImage

FAILED = {"crashed", "oom", "timeout"}


def layers(
    preset: Annotated[str, typer.Option(help="smoke, small, quick, full or paper.")] = "quick",
    layers: Annotated[str | None, typer.Option(help="Comma-separated layers or sets (paper, today, sweep).")] = None,
    frameworks: Annotated[
        str | None,
        typer.Option(help="Comma-separated: opacus (all of its variants), opacus-ghost, core, all."),
    ] = None,
    passes: Annotated[
        str | None, typer.Option(help="Comma-separated: plain (without DP), per_sample (the paper's), clipped.")
    ] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Comma-separated, up to 8192.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Processes per cell, in randomised paired blocks.")] = None,
    memory: Annotated[bool | None, typer.Option(help="Also count memory, in a process of its own.")] = None,
    seconds: Annotated[float | None, typer.Option(help="A cell stops after so many timed seconds.")] = None,
    most_passes: Annotated[int | None, typer.Option(help="Or after so many passes; 2000 in the paper.")] = None,
    longest_pass: Annotated[
        float | None, typer.Option(help="No cell is tried whose pass would take more seconds.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    isolation: Annotated[str, typer.Option(help="venv, docker, or inprocess (tests only).")] = "venv",
    threads: Annotated[int | None, typer.Option(help="Threads and pinned cores per process; default all.")] = None,
    repeats: Annotated[int | None, typer.Option(help="How often a disturbed measurement is made again.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of plan, batches and weights.")] = 0,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a process is stopped.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="GiB per process; default 90 % of what is free.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default results/local/layers-PRESET.")] = None,
    any_image: AnyImage = False,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Start anew, or go on where the run stopped.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")] = False,
) -> None:
    """Time and memory of single layers: plain module, a DP library's own module, and with DP."""
    from rich.console import Console

    from harness import report
    from harness.cli.options import integers, names_of
    from harness.environments import memory_limit as limits
    from harness.environments.choose import backend_of, check_isolation
    from harness.plan import layer_registry
    from harness.plan import layers as layer_plan
    from harness.run.e2e import command_line
    from harness.run.layers import LayerRun
    from harness.run.progress import watched
    from harness.store.folder import RunFolder
    from harness.store.read import load

    check_isolation(isolation)
    options = layer_plan.preset(
        preset,
        layers=names_of(layers),
        frameworks=names_of(frameworks),
        passes=names_of(passes),
        batch_sizes=integers(batch_sizes, "--batch-sizes"),
        rounds=rounds,
        memory=memory,
        seconds=seconds,
        most_passes=most_passes,
        longest_pass=longest_pass,
        device=device,
        isolation=isolation,
        threads=threads,
        repeats=repeats,
        seed=seed,
        timeout_seconds=timeout,
        memory_limit_bytes=limits.from_gibibytes(memory_limit, "--memory-limit"),
    )
    contestants = layer_registry.select(options.frameworks)
    folder = RunFolder((out or Path(f"results/local/layers-{preset}")).resolve())
    console = Console(stderr=as_json)
    run = LayerRun(options, contestants, folder, command_line(), backend_of(isolation, device, any_image=any_image))
    summary = watched(lambda progress: run.execute(progress, fresh), folder.path, console, as_json)
    paths = report.write(folder.path, folder.path / "report", folder.path / "report" / "plots")
    if as_json:
        written = [str(path) for path in paths]
        print(
            json.dumps(
                {"folder": str(folder.path), "states": summary.states, "resumed": summary.resumed, "written": written}
            )
        )
    else:
        report.show(load(folder.path, left_out=lambda fault: console.print(fault, markup=False)), console)
        states = ", ".join(f"{count} {state}" for state, count in sorted(summary.states.items()))
        console.print(
            f"Records: {folder.records} ({summary.total}: {states}; {summary.resumed} from before)", markup=False
        )
        console.print(f"Report:  {folder.path / 'report'}", markup=False)
    raise typer.Exit(3 if FAILED & summary.states.keys() else 1 if summary.states.get("rejected", 0) else 0)

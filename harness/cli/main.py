"""The command line. Every verb imports what it needs when it runs, so that ``--help`` stays fast.

Exit codes: 0 ok, 1 a finding (gate failed, regression found), 2 bad input, 3 a cell failed to run.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

# One thread for the harness's own arithmetic, before numpy is imported: the speed probe must not depend
# on the core count.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from harness.cli.options import BAD_INPUT, FINDING, AnyImage, Json, Names, exit_code, integers, names_of
from harness.errors import BadInput
from harness.paths import LOCAL_RESULTS

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
run_app = typer.Typer(no_args_is_help=True, help="Measure: plan, isolate, gate, time, store.")
env_app = typer.Typer(no_args_is_help=True, help="Environments of the frameworks: list, make, remove.")
app.add_typer(run_app, name="run")
app.add_typer(env_app, name="env")

READER_LEFT = 141


@run_app.command("e2e")
def run_e2e(
    preset: Annotated[str, typer.Option(help="smoke, quick, full or paper.")] = "quick",
    tasks: Annotated[str | None, typer.Option(help="Comma-separated task names.")] = None,
    frameworks: Names = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Comma-separated expected batch sizes.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Processes per cell, in randomised paired blocks.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Timed epochs per process.")] = None,
    subset: Annotated[
        float | None, typer.Option(help="Fraction of an epoch; the figures are then extrapolated.")
    ] = None,
    budget_seconds: Annotated[float | None, typer.Option(help="Time about so long; extrapolated to the epoch.")] = None,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, in a process of its own.")] = True,
    time: Annotated[bool, typer.Option(help="Without it, peak memory alone: nothing is timed.")] = True,
    protocol: Annotated[str, typer.Option(help="verified, paper or as_shipped.")] = "verified",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    isolation: Annotated[str, typer.Option(help="venv, docker, or inprocess (tests only).")] = "venv",
    threads: Annotated[int | None, typer.Option(help="Threads and pinned cores per process; default all.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Another noise multiplier than the protocol's.")] = None,
    repeats: Annotated[int | None, typer.Option(help="How often a disturbed measurement is made again.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of plan, batches, weights and noise.")] = 0,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a process is stopped.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="GiB per process; default 90 % of what is free.")] = None,
    synthetic: Annotated[
        bool, typer.Option(help="Use the synthetic twins of the data sets; marked everywhere.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Run folder; default results/local/PRESET.")] = None,
    any_image: AnyImage = False,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Start anew, or go on where the run stopped.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Median seconds per epoch and peak memory of every framework, task and batch size."""
    from rich.console import Console

    from harness import report
    from harness.environments import memory_limit as limits
    from harness.environments.choose import backend_of, check_isolation
    from harness.plan import e2e as plan
    from harness.plan import registry
    from harness.run.e2e import Run, command_line
    from harness.run.progress import watched
    from harness.store.folder import RunFolder
    from harness.store.read import load

    check_isolation(isolation)
    options = plan.preset(
        preset,
        tasks=names_of(tasks),
        frameworks=names_of(frameworks),
        batch_sizes=integers(batch_sizes, "--batch-sizes"),
        rounds=rounds,
        epochs=epochs,
        subset=subset,
        budget_seconds=budget_seconds,
        memory=memory,
        time=time,
        protocol=protocol,
        device=device,
        isolation=isolation,
        threads=threads,
        sigma=sigma,
        repeats=repeats,
        seed=seed,
        timeout_seconds=timeout,
        memory_limit_bytes=limits.from_gibibytes(memory_limit, "--memory-limit"),
        synthetic=synthetic,
    )
    contestants = registry.select(options.frameworks)
    folder = RunFolder((out or LOCAL_RESULTS / preset).resolve())
    console = Console(stderr=as_json)
    backend = backend_of(isolation, device, any_image=any_image)
    run = Run(options, contestants, folder, command_line(), backend)
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
        console.print(
            f"Records: {folder.records} ({summary.total}, {summary.resumed} of them from before)", markup=False
        )
        console.print(f"Report:  {folder.path / 'report'}", markup=False)
    raise typer.Exit(exit_code(summary.states, summary.expected))


@app.command()
def gate(
    frameworks: Names = None,
    tasks: Annotated[
        str | None, typer.Option(help="Comma-separated task names; default the four of the paper.")
    ] = None,
    mutants: Annotated[
        bool, typer.Option(help="Judge the deliberately wrong adapters: each must be rejected.")
    ] = False,
    fresh: Annotated[bool, typer.Option(help="Judge again even where nothing has changed.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Threads and pinned cores per process.")] = None,
    every_check: Annotated[bool, typer.Option("--all-checks", help="A row per check, not only one.")] = False,
    as_json: Json = False,
) -> None:
    """The admission gate alone: check, adapter, task, measured error, limit, verdict.

    Exit code 1 where a verdict is not the expected one; a rejection that the framework's folder declares is expected.
    """
    from harness.cli.gate import judge_all

    raise typer.Exit(
        judge_all(names_of(frameworks), names_of(tasks), mutants, fresh, device, threads, every_check, as_json)
    )


@app.command("new-framework")
def new_framework(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and underscores.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="Where; default frameworks/ (any other goes into DPBENCH_FRAMEWORKS)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes the folder of a new contestant: an adapter that runs, and that the gate rejects until it is filled in."""
    from harness.cli import new_framework as skeleton
    from harness.paths import INSTALLED, ROOT
    from harness.plan.registry import EXTRA_FOLDERS

    folder = folder or (Path("frameworks") if INSTALLED else ROOT / "frameworks")
    written = skeleton.write(name, folder)
    if as_json:
        print(json.dumps({"written": [str(path) for path in written]}))
        return
    for path in written:
        print(path)
    if folder.resolve() != ROOT / "frameworks":
        print(f"So that dpbench finds it: export {EXTRA_FOLDERS}={shlex.quote(str(folder.resolve()))}")
    print(f"Next: fill in step, then `dpbench gate --frameworks {name} --tasks logreg`; see docs/add-a-framework.md.")


@app.command("list")
def list_all(as_json: Json = False) -> None:
    """Tasks, frameworks with their variants, protocols and presets."""
    from harness.cli.listing import show_all

    show_all(as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Checks the instrument itself: known sleeps, known bytes, clock, noise floor, machine, engines."""
    from harness.cli.doctor import examine

    raise typer.Exit(0 if examine(as_json) else FINDING)


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    target: Annotated[Path, typer.Argument(help="The .jsonl.gz (or .jsonl) file to write.")],
    as_json: Json = False,
) -> None:
    """Packs a finished run's records into one file, a record a line, to be committed."""
    from harness.store.folder import pack as pack_records

    count = pack_records(folder, target)
    print(json.dumps({"records": count, "target": str(target)}) if as_json else f"{count} records in {target}")


@env_app.command("list")
def env_list(as_json: Json = False) -> None:
    """The environments that exist, with their sizes."""
    from harness.cli import listing
    from harness.environments import venv

    rows = [
        {"lock": e.lock_hash, "made_for": ", ".join(e.frameworks), "mib": e.size_bytes // 2**20, "seconds": e.seconds}
        for e in venv.existing()
    ]
    listing.table("Environments", rows, as_json)


@env_app.command("make")
def env_make(
    names: Annotated[list[str] | None, typer.Argument(help="Frameworks; default all.")] = None, as_json: Json = False
) -> None:
    """Builds environments ahead of a run."""
    from harness.cli import listing
    from harness.environments import venv
    from harness.plan import registry

    say = (lambda text: None) if as_json else print
    rows: list[dict[str, Any]] = []
    for framework in {c.framework.name: c.framework for c in registry.select(names or None)}.values():
        try:
            made = venv.ensure(framework, say)
            rows.append({"framework": framework.name, "state": "ready", "where": str(made.folder)})
        except venv.EnvironmentFault as fault:
            rows.append({"framework": framework.name, "state": "unsupported", "where": str(fault)})
    listing.table("Environments", rows, as_json)


@env_app.command("rm")
def env_rm(
    names: Annotated[list[str] | None, typer.Argument(help="Frameworks.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All environments.")] = False,
    as_json: Json = False,
) -> None:
    """Removes environments; the next run builds them anew."""
    from harness.cli import listing
    from harness.environments import venv
    from harness.plan import registry

    if not names and not everything:
        raise BadInput("env rm was given no framework: name one, or say --all.")
    locks = None if everything else {c.framework.lock_hash for c in registry.select(names)}
    rows = []
    for environment in venv.existing():
        if locks is None or environment.lock_hash in locks:
            venv.remove(environment)
            rows.append({"lock": environment.lock_hash, "removed": str(environment.folder)})
    listing.table("Removed environments", rows, as_json)


def _mount() -> None:
    """Verbs that live beside what they show."""
    from harness.cli.ci import app as ci_app
    from harness.cli.compare import bisect, compare
    from harness.cli.dashboard import dashboard
    from harness.cli.data import app as data_app
    from harness.cli.findings import findings
    from harness.cli.history import app as history_app
    from harness.cli.image import app as image_app
    from harness.cli.report import explain, report
    from harness.cli.run_frontier import frontier
    from harness.cli.run_gpu import gpu
    from harness.cli.run_layers import layers

    run_app.command()(frontier)
    run_app.command()(layers)
    run_app.command()(gpu)
    app.add_typer(ci_app, name="ci", hidden=True)
    app.add_typer(data_app, name="data")
    app.add_typer(image_app, name="image")
    app.add_typer(history_app, name="history")
    app.command()(dashboard)
    app.command()(report)
    app.command()(findings)
    app.command()(compare)
    app.command()(bisect)
    app.command()(explain)


_mount()


def main() -> None:
    """Console script: bad input is one sentence on standard error and exit code 2."""
    try:
        app()
    except BadInput as error:
        print(f"dpbench: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except BrokenPipeError:
        # Never 0: the reader left before the verdict. 141 is what a shell says of a process that SIGPIPE ended.
        sys.stderr.close()
        sys.exit(READER_LEFT)


if __name__ == "__main__":
    main()

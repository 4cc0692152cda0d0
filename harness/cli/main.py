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

from harness.cli import standard_output, verbs
from harness.cli.options import (
    BAD_INPUT,
    FINDING,
    Device,
    Json,
    Names,
    Parallel,
    Threads,
    WorldSize,
    integers,
    names_of,
)
from harness.errors import BadInput

DISTRIBUTION = "dpsgd-bench"
"""On the package index ``dpbench`` is somebody else's."""

ORDER = (
    *("run", "grid", "report", "compare", "bisect", "explain", "gate", "list", "data", "env", "image", "history"),
    *("dashboard", "new-framework", "doctor", "pack", "verify", "findings", "ci"),
)
"""The verbs of the help in their order: what most people want comes first."""


class Ordered(verbs.Verbs):
    """The verbs in their order."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=ORDER.index)


class Kinds(typer.core.TyperGroup):
    """Lists what can be measured. An option in front of the kind is refused with the command that takes it."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        option = args[0].partition("=")[0] if args else ""
        takers = [name for name, kind in self.commands.items() if any(option in p.opts for p in kind.params)]
        if takers and not any(option in p.opts for p in self.get_params(context)):
            others = f" (or {', '.join(takers[1:])})" if takers[1:] else ""
            command = shlex.join(["dpbench", str(context.info_name), takers[0], *args])
            raise BadInput(f"Say first what is measured: `{command}`{others}.")
        return super().parse_args(context, args)


app = typer.Typer(cls=Ordered, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
run_app = typer.Typer(cls=Kinds, no_args_is_help=True, help="Measure: plan, isolate, gate, time, store.")
app.add_typer(run_app, name="run")


def _version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"dpbench {version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Measure what differentially private training costs: seconds and memory of DP-SGD frameworks that are right."""


@app.command(short_help="Judge frameworks, without timing them.")
def gate(
    frameworks: Names = None,
    tasks: Annotated[
        str | None, typer.Option(help="Comma-separated task names; default the four of the paper.", metavar="NAMES")
    ] = None,
    mutants: Annotated[
        bool, typer.Option(help="Judge the deliberately wrong adapters: each must be rejected.")
    ] = False,
    fresh: Annotated[bool, typer.Option(help="Judge again even where nothing has changed.")] = False,
    device: Device = "cpu",
    threads: Threads = None,
    world_size: WorldSize = None,
    parallel: Parallel = None,
    every_check: Annotated[bool, typer.Option("--all-checks", help="A row per check, not only one.")] = False,
    as_json: Json = False,
) -> None:
    """Judge frameworks by the admission gate: check, adapter, task, measured error, limit, verdict.

    Exit code 1 where a verdict is not the expected one; a rejection that the framework's folder declares is expected.
    """
    from harness.cli.gate import judge_all

    named, sizes = names_of(frameworks), integers(world_size, "--world-size")
    several = None if sizes is None else (sizes, names_of(parallel))
    raise typer.Exit(judge_all(named, names_of(tasks), mutants, fresh, device, threads, every_check, as_json, several))


@app.command("new-framework", short_help="Write the folder of a new contestant.")
def new_framework(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and underscores.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="Where; default frameworks/ (any other goes into DPBENCH_FRAMEWORKS).", metavar="FOLDER"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the folder of a new contestant: an adapter that runs, and that the gate rejects until it is filled in."""
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


@app.command("list", short_help="List tasks, frameworks, presets and layers.")
def list_all(
    kind: Annotated[str | None, typer.Argument(help="One of tasks, frameworks, protocols, presets, layers.")] = None,
    details: Annotated[bool, typer.Option("--details", "-v", help="All columns; wants a wide terminal.")] = False,
    as_json: Json = False,
) -> None:
    """List tasks, frameworks with their variants, protocols, presets and layers."""
    from harness.cli.listing import show_all

    show_all(details, as_json, kind)


@app.command(short_help="Check the instrument and this machine.")
def doctor(as_json: Json = False) -> None:
    """Check the instrument itself: known sleeps, known bytes, clock, noise floor, machine, engines."""
    from harness.cli.doctor import examine

    raise typer.Exit(0 if examine(as_json) else FINDING)


@app.command(short_help="Pack a run's records into one file.")
def pack(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    target: Annotated[Path, typer.Argument(help="The .jsonl.gz (or .jsonl) file to write.")],
    as_json: Json = False,
) -> None:
    """Pack a finished run's records into one file, a record a line, to be committed."""
    from harness.store.folder import pack as pack_records

    count = pack_records(folder, target)
    print(json.dumps({"records": count, "target": str(target)}) if as_json else f"{count} records in {target}")


def _mount() -> None:
    """Verbs that live beside what they show."""
    from harness.cli.ci import app as ci_app
    from harness.cli.compare import bisect, compare
    from harness.cli.dashboard import dashboard
    from harness.cli.data import app as data_app
    from harness.cli.env import app as env_app
    from harness.cli.findings import findings
    from harness.cli.grid import app as grid_app
    from harness.cli.history import app as history_app
    from harness.cli.image import app as image_app
    from harness.cli.report import explain, report
    from harness.cli.run_e2e import e2e
    from harness.cli.run_frontier import frontier
    from harness.cli.run_gpu import gpu
    from harness.cli.run_layers import layers
    from harness.cli.verify import verify

    run_app.command(short_help="Measure training: seconds per epoch, peak memory.")(e2e)
    run_app.command(short_help="Measure single layers: time and memory.")(layers)
    run_app.command(short_help="Find the largest physical batch in a memory budget.")(frontier)
    run_app.command(short_help="Measure a GPU in under 9 minutes, offline.")(gpu)
    app.add_typer(ci_app, name="ci", hidden=True)
    app.add_typer(grid_app, name="grid", short_help="Measure a plan on many machines, by Slurm or Ray.")
    app.add_typer(env_app, name="env", short_help="Make, list and remove the frameworks' environments.")
    app.add_typer(data_app, name="data", short_help="Fetch, list and verify data sets.")
    app.add_typer(image_app, name="image", short_help="Build, list and verify container images.")
    app.add_typer(history_app, name="history", short_help="Keep runs over time; find lasting changes.")
    app.command(short_help="Make the site over the history.")(dashboard)
    app.command(short_help="Make tables and figures from records.")(report)
    app.command(short_help="Write README's and the findings' tables anew.")(findings)
    app.command(short_help="Check a pack: every figure, and the gate.")(verify)
    app.command(short_help="Compare two contestants, or two states of the code.")(compare)
    app.command(short_help="Name the commit that made a cell worse.")(bisect)
    app.command(short_help="Go from a number back to its processes.")(explain)


_mount()


def _refuse_empty(arguments: list[str]) -> None:
    """BadInput where the name of a folder is empty, as of a variable that was not set: it would be the current one."""
    for before, value in zip(["", *arguments], arguments, strict=False):
        if value in ("--out=", "--in=") or (not value and (before in ("--out", "--in") or not before.startswith("-"))):
            what = value.rstrip("=") or (before if before.startswith("-") else "An argument")
            raise BadInput(f"{what} is empty: give a value, or leave it out.")


def main() -> None:
    """Console script: bad input is one sentence on standard error and exit code 2."""
    try:
        _refuse_empty(sys.argv[1:])
        standard_output.prepare()
        with standard_output.watched():
            app()
    except BadInput as error:
        print(f"dpbench: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except BrokenPipeError:  # of standard error
        sys.stderr.close()
        sys.exit(standard_output.READER_LEFT)


if __name__ == "__main__":
    main()

"""The verbs of ``ci``: what the workflows call by make targets. Heavy imports happen inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import Json
from harness.errors import BadInput

app = typer.Typer(no_args_is_help=True, help="For CI jobs: compare a wheel with a release.")


@app.callback()
def ci() -> None:
    """Keep ``compare`` a verb of its own, though it is the only one."""


@app.command(short_help="Compare a wheel with a release.")
def compare(
    package: Annotated[str, typer.Option(help="The distribution's, for instance opacus.", metavar="NAME")],
    wheel: Annotated[
        str, typer.Option(help="The built wheel; a pattern such as dist/*.whl that means one file.", metavar="FILE")
    ],
    base: Annotated[str, typer.Option(help="A released one; empty: the last release.", metavar="VERSION")] = "",
    layers: Annotated[
        str, typer.Option(help="As for dpbench compare; empty: its default. So for what follows.", metavar="NAMES")
    ] = "",
    frameworks: Annotated[str, typer.Option(help="Contestants.", metavar="NAMES")] = "",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.", metavar="SIZES")] = "",
    threshold: Annotated[str, typer.Option(help="Slowdown from which it is a regression.", metavar="FRACTION")] = "",
    minutes: Annotated[str, typer.Option(help="After so many no new pair is begun.", metavar="M")] = "",
    threads: Annotated[str, typer.Option(help="Threads per process.", metavar="N")] = "",
    workspace: Annotated[str, typer.Option(help="What --wheel and --markdown are relative to.", metavar="FOLDER")] = "",
    markdown: Annotated[str, typer.Option(help="Where the Markdown is written.", metavar="FILE")] = "comparison.md",
    tolerate: Annotated[
        str, typer.Option(help="Whether a regression ends with 0 too.", metavar="true|false")
    ] = "false",
    dry_run: Annotated[str, typer.Option(help="Only say what would be run.", metavar="true|false")] = "false",
    as_json: Json = False,
) -> None:
    """Compare a wheel with a release of the same library; exit code and verdict are those of dpbench compare."""
    from harness.ci import wheel as wheel_check

    for option, value in (("--dry-run", dry_run), ("--tolerate", tolerate)):
        if value not in {"true", "false", ""}:
            raise BadInput(f"{option} is {value!r}: choose true or false.")
    root = Path(workspace or ".").resolve()
    found, version = wheel_check.find_wheel(wheel, root, package)
    against = wheel_check.check_version(base) if base else wheel_check.last_release(package)
    comparison = wheel_check.WheelComparison(
        package=package,
        wheel=found,
        base=against,
        markdown=root / (markdown or "comparison.md"),
        more={
            "layers": layers,
            "frameworks": frameworks,
            "batch-sizes": batch_sizes,
            "threshold": threshold,
            "minutes": minutes,
            "threads": threads,
        },
    )
    if as_json:
        typer.echo(json.dumps({"command": comparison.command[1:], "base": against, "head": str(version)}))
    else:
        typer.echo(f"{package} {version} ({found.name}) against the release {against}")
    code = wheel_check.compare_wheel(comparison, dry_run == "true")
    raise typer.Exit(0 if code == 1 and tolerate == "true" else code)

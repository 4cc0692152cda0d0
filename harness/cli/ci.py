"""The verbs of ``ci``: what the workflows call by make targets. Heavy imports happen inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import Json
from harness.errors import BadInput

app = typer.Typer(no_args_is_help=True, help="For CI jobs: compare a wheel, comment, publish the history.")


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


@app.command()
def comment(
    repository: Annotated[str, typer.Option(help="On GitHub.", metavar="OWNER/NAME")],
    pull_request: Annotated[int, typer.Option(help="The pull request's number.", metavar="N")],
    file: Annotated[Path, typer.Option(help="The comment's Markdown.", metavar="FILE")],
    name: Annotated[str, typer.Option(help="A former comment of that name is replaced.", metavar="NAME")] = "compare",
    as_json: Json = False,
) -> None:
    """Write the one comment of a pull request. Where the token may not, the text goes to the job's page instead."""
    from harness.ci import github
    from harness.ci import wheel as wheel_check

    try:
        text = file.read_text()
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror}); name the Markdown that compare wrote.") from None
    try:
        done = github.comment(github.GitHubClient.of_the_job(repository), pull_request, text, name)
    except github.Forbidden as error:
        wheel_check.append_summary(text)
        done = f"not allowed ({error}): written to the job's page instead"
    typer.echo(json.dumps({"comment": done}) if as_json else f"Comment {done}.")


@app.command()
def publish(
    repository: Annotated[str, typer.Option(help="Needed for pull requests.", metavar="OWNER/NAME")] = "",
    branch: Annotated[str, typer.Option(help="Where the history lives.", metavar="NAME")] = "main",
    by: Annotated[str, typer.Option(help="How it is published.", metavar="commit|pull-request")] = "commit",
    as_json: Json = False,
) -> None:
    """Commit the new runs of results/history and push them. A file that exists is never changed."""
    from harness.ci import github

    place = github.GitHubClient.of_the_job(repository) if repository and by == "pull-request" else None
    done = github.publish_history(Path(), by or "commit", branch or "main", place)
    typer.echo(json.dumps({"done": done}) if as_json else done)

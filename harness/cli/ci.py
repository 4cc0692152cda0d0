"""The verbs of ``ci``: what the workflows call by make targets. Heavy imports happen inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.errors import BadInput

app = typer.Typer(no_args_is_help=True, help="For CI jobs: compare a wheel, comment, publish the history.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.command()
def compare(
    package: Annotated[str, typer.Option(help="Name of the distribution, for instance opacus.")],
    wheel: Annotated[str, typer.Option(help="The built wheel; a pattern such as dist/*.whl that means one file.")],
    base: Annotated[str, typer.Option(help="A released version; empty: the last release.")] = "",
    layers: Annotated[str, typer.Option(help="As for dpbench compare; empty: its default. So for what follows.")] = "",
    frameworks: Annotated[str, typer.Option(help="Contestants.")] = "",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "",
    threshold: Annotated[str, typer.Option(help="Slowdown from which it is a regression, as a fraction.")] = "",
    minutes: Annotated[str, typer.Option(help="After so many no new pair is begun.")] = "",
    threads: Annotated[str, typer.Option(help="Threads per process.")] = "",
    workspace: Annotated[str, typer.Option(help="Folder to which --wheel and --markdown are relative.")] = "",
    markdown: Annotated[str, typer.Option(help="Where the Markdown is written.")] = "comparison.md",
    tolerate: Annotated[str, typer.Option(help="true: exit code 0 in spite of a regression.")] = "false",
    dry_run: Annotated[str, typer.Option(help="true: only say what would be run.")] = "false",
    as_json: Json = False,
) -> None:
    """A wheel against a release of the same library: exit code and verdict are those of ``dpbench compare``."""
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
    repository: Annotated[str, typer.Option(help="owner/name")],
    pull_request: Annotated[int, typer.Option(help="Its number.")],
    file: Annotated[Path, typer.Option(help="The comment's Markdown.")],
    name: Annotated[str, typer.Option(help="Of the comment: the former one of that name is replaced.")] = "compare",
    as_json: Json = False,
) -> None:
    """Writes the one comment of a pull request. Where the token may not, the text goes to the job's page instead."""
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
    repository: Annotated[str, typer.Option(help="owner/name; needed for pull requests.")] = "",
    branch: Annotated[str, typer.Option(help="Where the history lives.")] = "main",
    by: Annotated[str, typer.Option(help="commit or pull-request.")] = "commit",
    as_json: Json = False,
) -> None:
    """Commits the new runs of results/history and pushes them. A file that exists is never changed."""
    from harness.ci import github

    place = github.GitHubClient.of_the_job(repository) if repository and by == "pull-request" else None
    done = github.publish_history(Path(), by or "commit", branch or "main", place)
    typer.echo(json.dumps({"done": done}) if as_json else done)

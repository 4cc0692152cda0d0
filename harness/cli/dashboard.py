"""The verb ``dashboard``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import Json
from harness.errors import BadInput


def dashboard(
    history: Annotated[Path, typer.Option(help="The history.", metavar="FOLDER")] = Path("results/history"),
    out: Annotated[Path, typer.Option(help="Where the site goes; replaced as a whole.", metavar="FOLDER")] = Path(
        "results/local/dashboard"
    ),
    days: Annotated[int, typer.Option(help="What counts as new, in days before the newest run.", metavar="N")] = 30,
    repository: Annotated[
        str | None,
        typer.Option(
            envvar="DPBENCH_REPOSITORY",
            help="The repository: commits link to URL/commit/COMMIT. Default: the one whose GitHub job this is.",
            metavar="URL",
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(envvar="DPBENCH_SITE", help="The site's own, for the links of its feed.", metavar="URL"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the static site over the history: overview, tasks, layers, events and a feed."""
    from harness.dashboard import site as sites
    from harness.dashboard.view import Options
    from harness.history import runs as histories

    if repository is None and os.environ.get("GITHUB_SERVER_URL") and os.environ.get("GITHUB_REPOSITORY"):
        repository = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    if days < 1:
        raise BadInput(f"--days is {days}: it must be at least 1.")
    for option, address in (("--repository", repository), ("--site", site)):
        if address and not address.startswith(("https://", "http://")):
            raise BadInput(f"{option} is {address!r}: give an address that starts with https:// (or http://).")
    loaded = histories.load(history)
    options = Options(days, repository.rstrip("/") if repository else None, site or None)
    shown = sites.write(loaded, out, options)
    if as_json:
        typer.echo(json.dumps({"out": str(out), **shown}))
        return
    for fault in loaded.faults:
        typer.echo(f"dpbench: {fault}", err=True)
    mark = "simulated, " if loaded.simulated else ""
    typer.echo(
        f"{out / 'index.html'}: {mark}{shown['runs']} runs, {shown['cells']} cells, {shown['machines']} machines; "
        f"{len(shown['open'])} open regressions of {days} days"
    )

"""The verbs ``env list``, ``env make`` and ``env rm``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from harness.cli.options import CELL_FAILED, Json
from harness.cli.verbs import Verbs
from harness.errors import BadInput

app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Make, list and remove the frameworks' environments.")


@app.command("list")
def env_list(as_json: Json = False) -> None:
    """List the environments that exist, with their sizes."""
    from harness.cli import listing
    from harness.environments import venv

    rows = [
        {"lock": e.lock_hash, "made_for": ", ".join(e.frameworks), "mib": e.size_bytes // 2**20, "seconds": e.seconds}
        for e in venv.existing()
    ]
    listing.table("Environments", rows, as_json)


@app.command("make")
def env_make(
    names: Annotated[list[str] | None, typer.Argument(help="Frameworks; default all.")] = None,
    as_json: Json = False,
) -> None:
    """Build environments ahead of a run, one per processor at once. Exit code 3 where one could not be installed."""
    from concurrent.futures import ThreadPoolExecutor

    from harness.cli import listing
    from harness.environments import venv
    from harness.plan import registry

    log = (lambda text: None) if as_json else print

    def make(framework: registry.Framework) -> dict[str, Any]:
        try:
            made = venv.ensure(framework, log)
            return {"framework": framework.name, "state": "ready", "where": str(made.folder)}
        except venv.EnvironmentFault as fault:
            return {"framework": framework.name, "state": "not installed", "where": str(fault)}

    frameworks = {c.framework.name: c.framework for c in registry.select(names or None)}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = list(pool.map(make, frameworks.values()))
    listing.table("Environments", rows, as_json)
    if any(row["state"] != "ready" for row in rows):
        raise typer.Exit(CELL_FAILED)


@app.command("rm")
def env_rm(
    names: Annotated[list[str] | None, typer.Argument(help="Frameworks.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All environments.")] = False,
    unused: Annotated[
        bool, typer.Option("--unused", help="Those of no framework as it is: other pins, other sides of a comparison.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove environments; the next run builds them anew."""
    from harness.cli import listing
    from harness.environments import venv
    from harness.plan import registry

    if bool(names) + everything + unused != 1:
        raise BadInput("env rm takes either frameworks, or --unused, or --all.")
    locks = {c.framework.lock_hash for c in registry.select(["all"] if unused else names)}
    rows = []
    for environment in venv.existing():
        if everything or (environment.lock_hash in locks) != unused:
            venv.remove(environment)
            rows.append({"lock": environment.lock_hash, "removed": str(environment.folder)})
    listing.table("Removed environments", rows, as_json)

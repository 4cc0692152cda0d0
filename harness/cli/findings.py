"""The verb ``findings``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def findings(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; end with 1 where a table is out of date.")
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Only pack results/ into this .tar, with its checksum beside it.", metavar="FILE"),
    ] = None,
) -> None:
    """Write the tables and the figure of README, docs and results/findings anew from the committed records.

    And results/croissant.json, which describes the records to programs.
    """
    from harness.published import croissant, index, pages
    from harness.published import snapshot as archive
    from harness.store.cache import write_atomically

    runs = index.load()  # says what is wrong where there is no checkout
    if snapshot is not None:
        typer.echo(f"{archive.write(snapshot)}  {snapshot}")
        return
    stale = False
    made: list[dict[Path, bytes]] = [{croissant.FILE: croissant.text(runs).encode()}]
    for page in pages.pages():
        before = page.read_text(encoding="utf-8")
        made.append({page: pages.fill(page, before).encode(), **pages.pictures(before)})
    for files in made:
        for path, content in files.items():
            if path.exists() and path.read_bytes() == content:
                continue
            stale = True
            if not check:
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, content)
            typer.echo(f"{path}: {'out of date' if check else 'written'}")
    if check and stale:
        raise typer.Exit(1)

"""The verb ``findings``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

from typing import Annotated

import typer


def findings(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; end with 1 where a table is out of date.")
    ] = False,
) -> None:
    """Write the tables and the figure of README, docs and results/findings anew from the committed records."""
    from harness.published import index, pages
    from harness.store.cache import write_atomically

    index.load()  # says what is wrong where there is no checkout
    stale = False
    for page in pages.pages():
        before = page.read_text(encoding="utf-8")
        for path, content in {page: pages.fill(page, before).encode(), **pages.pictures(before)}.items():
            if path.exists() and path.read_bytes() == content:
                continue
            stale = True
            if not check:
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, content)
            typer.echo(f"{path}: {'out of date' if check else 'written'}")
    if check and stale:
        raise typer.Exit(1)

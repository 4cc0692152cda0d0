"""Options and exit codes that the verbs share, and the reading of lists."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import BadInput

FINDING, BAD_INPUT, CELL_FAILED = 1, 2, 3

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Names = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: opacus (its default variant), opacus-ghost, opacus:all; or core (the short presets'), "
        "defaults (every framework's default variants), all.",
        metavar="NAMES",
    ),
]
Tasks = Annotated[str | None, typer.Option(help="Comma-separated task names; see dpbench list.", metavar="NAMES")]
Rounds = Annotated[
    int | None, typer.Option(help="Processes per cell, in randomised paired blocks.", metavar="N", show_default=False)
]
Device = Annotated[str, typer.Option(help="Where contestants compute.", metavar="cpu|cuda")]
Isolation = Annotated[
    str, typer.Option(help="What keeps contestants apart; inprocess: for tests only.", metavar="venv|docker|inprocess")
]
WorldSize = Annotated[
    str | None,
    typer.Option(
        "--world-size",
        help="Comma-separated numbers of processes that train together, over gloo: of contestants that can.",
        metavar="NUMBERS",
        show_default=False,
    ),
]
Parallel = Annotated[
    str | None,
    typer.Option(help="How they do: copies, shards, or (default) both.", metavar="ddp,fsdp2", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads and pinned cores per process; default all but one.", metavar="N", show_default=False),
]
Repeats = Annotated[
    int | None, typer.Option(help="How often a disturbed measurement is made again.", metavar="N", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Seed of plan, batches, weights and noise.", metavar="N")]
Timeout = Annotated[
    float | None, typer.Option(help="Seconds after which a process is stopped.", metavar="SECONDS", show_default=False)
]
MemoryLimit = Annotated[
    float | None, typer.Option(help="GiB per process; default 90 % of what is free.", metavar="GIB", show_default=False)
]
Synthetic = Annotated[
    bool, typer.Option("--synthetic", help="Use the synthetic twins of the data sets; marked everywhere.")
]
Fresh = Annotated[bool, typer.Option("--fresh/--resume", help="Start anew, or go on where the run stopped.")]
AnyImage = Annotated[
    bool, typer.Option("--any-image", help="Containers: also in images that do not match their lock; marked.")
]
Out = Annotated[Path | None, typer.Option(help="Run folder; default below results/local.", metavar="FOLDER")]
In = Annotated[
    Path, typer.Option("--in", help="Folder or file with records, or the name of a committed run.", metavar="RECORDS")
]


def names_of(text: str | None) -> tuple[str, ...] | None:
    """Return the names in a comma-separated list; None where the option was not given."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text is not None else None


def integers(text: str | None, option: str) -> tuple[int, ...] | None:
    """Return the whole numbers in a comma-separated list; None where the option was not given.

    Raises:
        BadInput: one of them is no whole number.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"{option} is {text!r}: give whole numbers separated by commas, for instance 64,512.") from None


def exit_code(states: dict[str, int], expected: int, missing: int = 0) -> int:
    """Return the exit code of a run. ``expected``: how many rejections are known findings, which alone are no news.
    ``missing``: what could not be measured because it could not be installed here, or no time was left."""
    if missing or {"crashed", "oom", "timeout"} & states.keys():
        return CELL_FAILED
    return FINDING if states.get("rejected", 0) > expected else 0

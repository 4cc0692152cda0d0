"""What the verbs share: options, exit codes, and how a list is read."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.errors import BadInput

FINDING, BAD_INPUT, CELL_FAILED = 1, 2, 3

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Names = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: opacus (its default variant), opacus-ghost, opacus:all; or core (the short presets'), "
        "defaults (every framework's default variants), all."
    ),
]

AnyImage = Annotated[
    bool, typer.Option("--any-image", help="Containers: also in images that do not match their lock; marked.")
]


def names_of(text: str | None) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text is not None else None


def integers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"{option} is {text!r}: give whole numbers separated by commas, for instance 64,512.") from None


def exit_code(states: dict[str, int], expected: int) -> int:
    """``expected``: how many rejections are known findings, which alone are no news."""
    if {"crashed", "oom", "timeout"} & states.keys():
        return CELL_FAILED
    return FINDING if states.get("rejected", 0) > expected else 0

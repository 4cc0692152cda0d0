"""The whole report as one Markdown page."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.model import Chapter, Grid


def page(chapters: Sequence[Chapter]) -> str:
    """A page with a part per section. Measured tables first, then what they rest on."""
    parts = ["# Benchmark report", _reading()]
    section = None
    for chapter in chapters:
        if not chapter.grids:
            continue
        if chapter.section and chapter.section != section:
            section = chapter.section
            parts += [f"## {section.title}", f"Measured {chapter.when}."]
        parts.append(f"{'###' if chapter.section else '##'} {chapter.title}")
        parts += map(table, chapter.grids)
    return "\n\n".join(parts) + "\n"


def _reading() -> str:
    return (
        "One process gives one value, the median of its epochs. Machines, devices, protocols and isolations are never "
        "pooled. States in place of a time: `oom`, `timeout`, `crashed`, `unsupported`, `rejected` (the admission gate "
        "failed), `ungated` (no gate on record); the reason stands below the table. `dpbench explain CELL` goes from "
        "any number back to its processes."
    )


def table(grid: Grid) -> str:
    """A GitHub table with its title above and its notes below."""
    lines = [
        f"**{grid.title}**",
        "",
        _line(grid.header),
        "|:--|"
        + "".join("--:|" if _is_numeric(column) else ":--|" for column in list(zip(*grid.rows, strict=True))[1:]),
        *map(_line, grid.rows),
    ]
    if grid.notes:
        lines += ["", *(f"- {note}" for note in grid.notes)]
    return "\n".join(lines)


def _is_numeric(column: tuple[str, ...]) -> bool:
    return any(cell[:1].isdigit() for cell in column)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for cell in cells) + " |"

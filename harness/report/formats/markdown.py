"""The whole report as one Markdown page."""

from __future__ import annotations

from collections.abc import Iterator

from harness.analysis.frames import PAPER, Tables
from harness.report import model
from harness.report.chapters import overview
from harness.report.model import MISSING, Grid, Report, with_common_notes


def page(report: Report) -> str:
    """Return a page with a part per section: the main result, the measured tables, then what they rest on."""
    parts = ["# Benchmark report", *_main_result(report.tables), _reading()]
    section = None
    elsewhere = []
    for chapter in report.chapters:
        grids = chapter.grids if chapter.brief is None else chapter.brief
        if not grids:
            elsewhere += [chapter.title] if chapter.grids else []
            continue
        if chapter.section and chapter.section != section:
            section = chapter.section
            parts += [f"## {section.title}", f"Measured {chapter.when}."]
        parts.append(f"{'###' if chapter.section else '##'} {chapter.title}")
        parts += map(table, with_common_notes(grids))
    if elsewhere:
        parts += [
            "## Not on this page",
            f"In report.html, as CSV and for LaTeX: {', '.join(dict.fromkeys(elsewhere))}.",
        ]
    return "\n\n".join(parts) + "\n"


def _main_result(tables: Tables | None) -> Iterator[str]:
    section = model.sections(tables)[0] if tables else None
    found = overview.of(tables, section) if tables and section else None
    if tables is None or section is None or found is None:
        return
    yield f"**{found.sentence}** ({model.readable(section, section.of(tables.raw))})"
    rows = tuple(
        (tables.title(name), *(c.squares[name].text if name in c.squares else MISSING for c in found.columns))
        for name in found.rows
    )
    header = ("contestant", *(f"{column.title}, batch {column.batch_size}" for column in found.columns))
    notes = (_names(tables, found), *_marks("".join(text for row in rows for text in row[1:])))
    title = "Time of an epoch over PyTorch without DP (the faster of eager and compiled)"
    yield table(Grid(title, header, rows, notes))


def _names(tables: Tables, found: overview.Overview) -> str:
    """Return what the rows and columns are called below, and in options."""
    contestants = ", ".join(f"{tables.title(name)} `{name}`" for name in found.rows)
    tasks = ", ".join(dict.fromkeys(f"`{column.task}`" for column in found.columns))
    return f"Below and in `--frameworks`: {contestants}. In `--tasks`, in the order of the columns: {tasks}."


def _marks(shown: str) -> Iterator[str]:
    """Yield what the marks in ``shown`` mean."""
    if "ᵉ" in shown:
        yield "ᵉ extrapolated: from a part of an epoch."
    if "ᵈ" in shown:
        yield model.DISTURBED_NOTE
    if "‼" in shown:
        yield f"‼ {model.SWAMPED_NOTE}."


def _reading() -> str:
    return (
        "One process gives one value, the median of its epochs. Machines, devices, protocols and isolations are never "
        "pooled. States in place of a time: `oom`, `timeout`, `crashed`, `unsupported`, `rejected` (the admission gate "
        "failed), `ungated` (no gate on record); the reason stands below the table. `dpbench explain CELL` goes from "
        f"any number back to its processes. The paper: {PAPER}."
    )


def table(grid: Grid) -> str:
    """Return a GitHub table with its title above and its notes below."""
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

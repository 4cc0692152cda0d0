"""The whole report as one Markdown page."""

from __future__ import annotations

from harness.report import layout
from harness.report.layout import Grid
from harness.report.table import Tables


def page(tables: Tables) -> str:
    """A page with a chapter per section. Measured tables first, then what they rest on."""
    parts = ["# Benchmark report", _reading()]
    for section in layout.sections(tables):
        parts += [
            f"## {section.title}",
            f"Measured {layout.provenance(tables, section)}; {len(section.of(tables.raw))} processes.",
        ]
        parts.append("### Seconds per epoch")
        for grid, (task, _, group) in zip(
            layout.seconds(tables, section), layout.blocks(section.of(tables.cells)), strict=True
        ):
            parts.append(table(grid))
            old = layout.published(tables, task, sorted(group.batch_size.unique()))
            if old:
                parts.append(table(old))
        chapters = {
            "Relative to PyTorch without DP": layout.ratios(tables, section),
            "Framework, DP, compile": layout.overheads(tables, section),
            "The paper against these measurements": layout.against_the_paper(tables, section),
            "Compile seconds": layout.compile_seconds(tables, section),
            "Peak memory": layout.memory(tables, section),
            "Privacy": layout.privacy(tables, section),
            "Accuracy": layout.accuracy(tables, section),
            "Coverage": layout.coverage(tables, section),
            "Admission gate": layout.gate(tables, section),
        }
        for title, grids in chapters.items():
            if grids:
                parts += [f"### {title}", *map(table, grids)]
    parts += ["## Versions", *map(table, layout.versions(tables))] if len(tables.versions) else []
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
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

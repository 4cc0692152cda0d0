"""Writes a report: Markdown, CSV, LaTeX and figures."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from harness.cache import write_atomically
from harness.errors import BadInput
from harness.report import figures, latex, layout, markdown, naming, paper, records, table
from harness.report.table import Tables


def write(records_folder: Path, out: Path, plots: Path) -> list[Path]:
    """See :func:`harness.report.write`."""
    return write_tables(table.build(records.load(records_folder)), out, plots)


def write_tables(tables: Tables, out: Path, plots: Path) -> list[Path]:
    """Writes everything; files that carry synthetic or extrapolated figures say so in their names."""
    for folder in (out, plots):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"The folder {folder} cannot be made ({error.strerror}); choose another.") from None
    try:
        drawn = figures.draw(tables, plots)
        written = texts(tables, [os.path.relpath(path, out) for path in drawn if path.suffix == ".pdf"])
        for name, text in written.items():
            write_atomically(out / name, text.encode())
    except OSError as error:
        raise BadInput(
            f"The report cannot be written ({error.strerror}: {error.filename}); free space, or choose another folder."
        ) from None
    return [*(out / name for name in written), *drawn]


def texts(tables: Tables, pictures: list[str]) -> dict[str, str]:
    """File name -> content of all tables; ``pictures``: paths of the PDFs that ``report.tex`` shows."""
    texts = {f"{naming.slug('report', *_flags(tables.raw, 'synthetic'))}.md": markdown.page(tables)}
    frames = {
        "seconds-per-epoch": tables.cells,
        "relative-to-pytorch": tables.ratios,
        "overheads": tables.overheads,
        "paper-then-and-now": paper.then_and_now(tables),
        "paper-rank-correlation": paper.rank_correlation(tables),
        "paper-claims": paper.claims(tables),
        "compile-seconds": tables.compile,
        "peak-memory": tables.memory,
        "privacy": tables.privacy,
        "accuracy": tables.accuracy,
        "gate": tables.gate,
        "coverage": tables.coverage,
        "versions": tables.versions,
        "processes": tables.raw,
    }
    for kind, frame in frames.items():
        if len(frame):
            texts[f"{naming.slug(kind, *_flags(frame))}.csv"] = frame.to_csv(index=False)
    inputs = []
    for section in layout.sections(tables):
        for kind, frame, text in (
            ("seconds-per-epoch", tables.cells, latex.seconds),
            ("relative-to-pytorch", tables.ratios, latex.ratios),
        ):
            here = section.of(frame)
            if len(here):
                name = figures.file_name(kind, section, here)
                texts[f"{name}.tex"] = text(tables, section)
                inputs.append(name)
    texts["report.tex"] = latex.document(inputs, pictures)
    return texts


def _flags(frame: pd.DataFrame, *only: str) -> list[str]:
    return [f for f in only or ("extrapolated", "synthetic") if f in frame.columns and frame[f].any()]

"""Writes a report: Markdown, CSV, LaTeX, one HTML page and figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from harness.analysis import naming
from harness.errors import BadInput
from harness.report import model
from harness.report.figures import files
from harness.report.formats import latex, markdown, page
from harness.report.model import Chapter, Report, Section
from harness.store.cache import write_atomically


def make_folders(*folders: Path) -> None:
    """Make the folders of a report where they lack. Raises :class:`BadInput` where that cannot be done."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"The folder {folder} cannot be made ({error.strerror}); choose another.") from None


def write_report(report: Report, out: Path, plots: Path) -> list[Path]:
    """Write everything; files that carry synthetic figures say so in their names."""
    make_folders(out, plots)
    try:
        drawn = files.draw((picture for chapter in report.chapters for picture in chapter.pictures), plots)
        written = texts(report)
        written["report.html"] = page.page(report, {path.stem: path for path in drawn if path.suffix == ".svg"})
        for name, text in written.items():
            write_atomically(out / name, text.encode(), durable=False)
    except OSError as error:
        raise BadInput(
            f"The report cannot be written ({error.strerror}: {error.filename}); free space, or choose another folder."
        ) from None
    return [*(out / name for name in written), *drawn]


def texts(report: Report) -> dict[str, str]:
    """Return file name -> content of all tables."""
    synthetic = report.tables is not None and bool(report.tables.raw.synthetic.any())
    texts = {f"{naming.slug('report', 'synthetic' if synthetic else '')}.md": markdown.page(report)}
    for kind, frame in frames(report.chapters).items():
        texts[f"{naming.slug(kind, 'synthetic' if _is_synthetic(frame) else '')}.csv"] = frame.to_csv(index=False)
    names = model.section_names([*dict.fromkeys(c.section for c in report.chapters if c.section)])
    for chapter in report.chapters:
        texts |= {f"{name}.tex": text for name, text in latex_files(chapter, names).items()}
    texts[latex.BIBLIOGRAPHY.name] = latex.BIBLIOGRAPHY.read_text()
    return texts


def frames(chapters: Iterable[Chapter]) -> dict[str, pd.DataFrame]:
    """Return the numbers of all chapters by the stem of their file; those of several sections in one."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for chapter in chapters:
        for stem, frame in chapter.frames.items():
            if len(frame):
                parts.setdefault(stem, []).append(frame)
    return {stem: pd.concat(found, ignore_index=True) for stem, found in parts.items()}


def latex_files(chapter: Chapter, names: Mapping[Section, str]) -> dict[str, str]:
    r"""Stem of the file -> tables for ``\input``. ``names``: what tells a section from the others in file names."""
    if not chapter.grids or not chapter.printed:
        return dict(chapter.latex)
    marked = ["synthetic"] if any(map(_is_synthetic, chapter.frames.values())) else []
    label = naming.slug(chapter.title, names[chapter.section] if chapter.section else "", *marked)
    return {**chapter.latex, f"tab-{label}": latex.chapter(chapter, label)}


def _is_synthetic(frame: pd.DataFrame) -> bool:
    return "synthetic" in frame.columns and bool(frame.synthetic.any())

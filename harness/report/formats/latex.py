r"""Tables for ``\input`` by pandas' own LaTeX: every grid of the report, and the one main table of a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.frames import Tables
from harness.analysis.naming import number
from harness.analysis.standing import Standing, standings
from harness.analysis.tidy import rows_of
from harness.report import model
from harness.report.model import Chapter, Section

BIBLIOGRAPHY = Path(__file__).with_name("dpbench.bib")
"""The works that a paper with these tables has to cite."""
MARKS = {"extrapolated": "e", "disturbed": "d", "swamped": "!!", "failed": "f"}
MOST_COLUMNS = 12
"""Most columns of the table that goes into a paper: more do not fit beside the names on a page."""
MARKUP = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "\n": " ",
}


def escape(text: str) -> str:
    """Return text that LaTeX prints as it stands."""
    return "".join(MARKUP.get(c, c) for c in text)


def chapter(chapter: Chapter, label: str) -> str:
    r"""Return all grids of a chapter, each a ``longtable``, which breaks over pages.

    Needs booktabs, longtable, and an engine that has letters such as σ (LuaLaTeX). ``label``: of the first table, for
    ``\ref``; the next ones have -2, -3.
    """
    where = f" {chapter.section.title}" if chapter.section else ""
    when = f"; measured {chapter.when}." if chapter.when else "." if where else ""
    parts = []
    for k, grid in enumerate(chapter.grids, 1):
        frame = pd.DataFrame([[escape(cell) for cell in row] for row in grid.rows], columns=range(len(grid.header)))
        style = frame.style.hide(axis="index").format_index(lambda i, head=grid.header: escape(head[i]), axis=1)
        caption = escape(" ".join([f"{grid.title}.{where}{when}", *dict.fromkeys(grid.notes)]))
        name = f"tab:{label}" if k == 1 else f"tab:{label}-{k}"
        parts.append(style.to_latex(environment="longtable", hrules=True, caption=caption, label=name))
    return "\n".join(parts)


def main(tables: Tables, section: Section, label: str) -> str:
    """Return the one table for a paper: contestants with DP, the fastest first, then those without; tasks and batch
    sizes in columns; the fastest with DP of each column in bold. Needs the package booktabs."""
    cells = section.of(tables.cells)
    ok = cells[cells.state == "ok"]
    blocks = [(task, synthetic, sorted(group.batch_size.unique())) for task, synthetic, group in model.blocks(ok)]
    room = max(1, MOST_COLUMNS // max(1, len(blocks)))
    places = [(task, synthetic, size) for task, synthetic, sizes in blocks for size in _some(sizes, room)]
    by_place = {(r.task, r.synthetic, r.batch_size, r.contestant): r for r in rows_of(cells)}
    found = standings(tables)
    first = {place: found.get((*vars(section).values(), *place)) for place in places}
    private = dict(zip(cells.contestant, cells.private, strict=True))
    all_scaled = bool(ok.extrapolated.all())
    names = sorted((name for name in tables.order if name in set(ok.contestant)), key=lambda name: not private[name])
    values = [[_value(by_place.get((*place, name)), first[place], all_scaled) for place in places] for name in names]
    heads = [(escape(model.task_title(task, synthetic)), str(size)) for task, synthetic, size in places]
    titles = [_styled(escape(tables.title(name)), private[name]) for name in names]
    n = sorted(set(ok.n))
    sentences = [
        f"Median seconds per epoch of {' to '.join(dict.fromkeys((str(n[0]), str(n[-1]))))} processes "
        f"({model.readable(section, section.of(tables.raw))}). Bold: the fastest with DP.",
        "Italics: without DP." if len(private) > sum(private.values()) else "",
        "All values are extrapolated from parts of epochs." if all_scaled else "",
        "e: extrapolated from a part of an epoch." if ok.extrapolated.any() and not all_scaled else "",
        "d: disturbed by other programs." if (ok.disturbed > 0).any() else "",
        f"!!: {model.SWAMPED_NOTE}." if ok.swamped.any() else "",
        "Not all batch sizes are shown." if any(len(sizes) > room for _, _, sizes in blocks) else "",
        "--: no time." if len(ok) < len(names) * len(places) else "",
    ]
    frame = pd.DataFrame(values, index=titles, columns=pd.MultiIndex.from_tuples(heads, names=["", "Batch size"]))
    return str(
        frame.style.to_latex(
            environment="table*",
            position="!ht",
            position_float="centering",
            hrules=True,
            multicol_align="c",
            column_format="l" + "r" * len(places),
            caption=escape(" ".join(x for x in sentences if x)),
            label=f"tab:{label}",
        )
    )


def _some(sizes: Sequence[int], room: int) -> Sequence[int]:
    """Return as many sizes as there is room for, from the smallest to the largest."""
    if len(sizes) <= room:
        return sizes
    return [sizes[round(i * (len(sizes) - 1) / max(1, room - 1))] for i in range(room)]


def _styled(text: str, private: bool) -> str:
    return text if private else rf"\textit{{{text}}}"


def _value(row: Any, standing: Standing | None, all_scaled: bool) -> str:
    if row is None or row.state != "ok":
        return "--"
    marks = "".join(m for c, m in MARKS.items() if getattr(row, c) and not (c == "extrapolated" and all_scaled))
    value = number(row.median)
    if standing is not None and row.contestant == standing.first:
        value = rf"\textbf{{{value}}}"
    return _styled(value, row.private) + (rf"\textsuperscript{{{marks}}}" if marks else "")

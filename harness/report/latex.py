"""Tables for a paper: booktabs, ready for ``\\input``, in the layout of the paper's Table 1."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from harness.report import layout
from harness.report.layout import Section
from harness.report.naming import BASELINE_ROW, factor, number
from harness.report.table import PUBLISHED_LABEL, Tables

SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "·": r"$\cdot$",
    "…": r"\ldots{}",
    "×": r"$\times$",
    "σ": r"$\sigma$",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
MARKS = {"extrapolated": "e", "disturbed": "d", "failed": "f"}
PREAMBLE = r"""\documentclass{article}
\usepackage[a4paper,margin=20mm]{geometry}
\usepackage[utf8]{inputenc}
\usepackage{booktabs}
"""


def escape(text: str) -> str:
    """Text that LaTeX prints as it stands; characters that pdfTeX has no glyph for become a question mark."""
    escaped = "".join(SPECIAL.get(c, c) for c in text.replace("\n", " "))
    return escaped.encode("latin-1", "replace").decode("latin-1")


LINES_PER_PAGE = 62
"""Rows in footnotesize that fit on an A4 page with a caption; longer tables go on in a further one."""
INLINE_COLUMNS = 4
"""Up to this many batch sizes the interval stands beside its value, else in small type below it."""


def seconds(tables: Tables, section: Section) -> str:
    """The main table of a section: per task the measured rows, then the published ones, labelled as such.

    Needs the package booktabs. Tasks that do not fit on the page go into further tables with the same caption.
    """
    cells = section.of(tables.cells)
    sizes = sorted(cells.batch_size.unique())
    parts = []
    for task, synthetic, group in layout.blocks(cells):
        label = rf"{{\scriptsize measured{' on synthetic data' if synthetic else ''}}}"
        lines = [
            rf"\multicolumn{{{len(sizes) + 1}}}{{l}}{label}\\",
            *_measured_rows(group, sizes),
            *_published_rows(tables, task, sizes),
        ]
        parts.append((layout.task_title(task, synthetic), lines))
    return _pages(parts, sizes, _caption(tables, section, cells))


def _pages(parts: list[tuple[str, list[str]]], sizes: list[int], caption: str) -> str:
    """Table environments of as many parts (title, rows) as fit on a page each."""
    pages: list[list[str]] = []
    room = 0
    for letter, (title, rows) in zip(string.ascii_lowercase, parts, strict=False):
        if len(rows) + 4 > room:
            pages.append([])
            room = LINES_PER_PAGE
        room -= len(rows) + 4
        pages[-1] += [
            r"\toprule",
            _row(["Batch size", *map(str, sizes)]),
            r"\midrule",
            *rows,
            r"\bottomrule",
            rf"\multicolumn{{{len(sizes) + 1}}}{{c}}{{\rule{{0pt}}{{2.6ex}}({letter}) {escape(title)}}}\\[1.6ex]",
        ]
    tables = [
        [
            r"\begin{table}[p]",
            r"\footnotesize",
            r"\centering",
            r"\setlength{\tabcolsep}{3pt}",
            rf"\begin{{tabular}}{{l{'r' * len(sizes)}}}",
            *lines,
            r"\end{tabular}",
            rf"\caption{{{caption}{f' Part {i} of {len(pages)}.' if len(pages) > 1 else ''}}}",
            r"\end{table}",
        ]
        for i, lines in enumerate(pages, 1)
    ]
    return "\n".join(line for lines in tables for line in lines) + "\n"


def _row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _rows(name: str, private: bool, values: list[tuple[str, str]]) -> Iterator[str]:
    """One row of (value, interval), or two where there are many columns."""
    label = _styled(escape(name), private)
    if len(values) <= INLINE_COLUMNS:
        yield _row([label, *(_styled(v, private) + (rf" {{\scriptsize {i}}}" if i else "") for v, i in values)])
        return
    yield _row([label, *(_styled(value, private) for value, _ in values)]) + (
        "[-0.7ex]" if any(i for _, i in values) else ""
    )
    if any(interval for _, interval in values):
        yield _row(["", *(rf"{{\tiny {interval}}}" if interval else "" for _, interval in values)])


def _measured_rows(group: pd.DataFrame, sizes: list[int]) -> Iterator[str]:
    usual_n = layout.usual(group[group.state == "ok"].n)
    by_place = {(row.contestant, row.batch_size): row for row in group.itertuples()}
    for name in dict.fromkeys(group.contestant):
        rows = [by_place.get((name, size)) for size in sizes]
        private = next(row.private for row in rows if row is not None)
        yield from _rows(name, private, [(_median(row), _spread(row, usual_n)) for row in rows])


def _styled(text: str, private: bool) -> str:
    """The rows without DP are in italics, as in the paper."""
    return text if private else rf"\textit{{{text}}}"


def _median(row: Any) -> str:
    if row is None:
        return "--"
    if row.state != "ok":
        return rf"{{\scriptsize\textsf{{{escape(row.state)}}}}}"
    marks = "".join(mark for column, mark in MARKS.items() if getattr(row, column))
    return number(row.median) + (rf"\textsuperscript{{{marks}}}" if marks else "")


def _spread(row: Any, usual_n: int) -> str:
    if row is None or row.state != "ok":
        return ""
    spread = [f"[{number(row.low)}, {number(row.high)}]"] if row.n > 1 else []
    return "".join(spread) + _own_n(row.n, usual_n)


def _own_n(n: int, usual_n: int) -> str:
    """The number of processes as a subscript, where it is not the usual one."""
    return "" if n == usual_n else f"$_{{{n}}}$"


def _published_rows(tables: Tables, task: str, sizes: list[int]) -> Iterator[str]:
    frame = tables.published[(tables.published.task == task) & tables.published.batch_size.isin(sizes)]
    if frame.empty:
        return
    yield r"\midrule"
    yield rf"\multicolumn{{{len(sizes) + 1}}}{{l}}{{\scriptsize {escape(PUBLISHED_LABEL)} (not this machine)}}\\"
    by_place = {(row.paper_row, row.batch_size): f"{row.seconds:.2f}" for row in frame.itertuples()}
    for name in dict.fromkeys(frame.paper_row):
        private = name != BASELINE_ROW
        yield from _rows(name, private, [(by_place.get((name, size), "--"), "") for size in sizes])


def _caption(tables: Tables, section: Section, cells: pd.DataFrame) -> str:
    ok = cells[cells.state == "ok"]
    sentences = [
        f"Median seconds per epoch on {section.machine} ({section.device}), protocol {section.protocol}, isolation "
        f"{section.isolation}, {layout.provenance(tables, section)}.",
        layout.spread_note(layout.usual(ok.n), "unless a subscript says otherwise") if len(ok) else "",
    ]
    if ok.extrapolated.any():
        sentences.append("e: extrapolated from a part of an epoch.")
    if (ok.disturbed > 0).any():
        sentences.append("d: disturbed, other programs took processor time during some process of the cell.")
    if (ok.failed > 0).any():
        sentences.append("f: some processes of the cell failed.")
    if cells.synthetic.any():
        sentences.append("Tasks marked synthetic were trained on synthetic data of the same shape.")
    failed = cells[cells.state != "ok"]
    for (state, reason), group in failed.groupby(["state", "reason"], sort=False):
        where = ", ".join(dict.fromkeys(f"{r.contestant} on {r.task}" for r in group.itertuples()))
        sentences.append(f"{state} ({where}): {layout.short(reason).rstrip('.')}.")
    if _has_gaps(cells):
        sentences.append("--: not measured.")
    return escape(" ".join(s for s in sentences if s))


def _has_gaps(cells: pd.DataFrame) -> bool:
    sizes = cells.batch_size.nunique()
    return any(len(group) < sizes for _, group in cells.groupby(["task", "synthetic", "contestant"]))


def ratios(tables: Tables, section: Section) -> str:
    """Seconds relative to PyTorch without DP with 95 % intervals, a block per task."""
    frame = section.of(tables.ratios)
    sizes = sorted(frame.batch_size.unique())
    usual_n = layout.usual(frame.n)
    parts = []
    for task, synthetic, group in layout.blocks(frame):
        by_place = {(row.contestant, row.batch_size): row for row in group.itertuples()}
        lines: list[str] = []
        for name in dict.fromkeys(group.contestant):
            rows = [by_place.get((name, size)) for size in sizes]
            private = next(row.private for row in rows if row is not None)
            lines += _rows(name, private, [_ratio(row, usual_n) for row in rows])
        parts.append((layout.task_title(task, synthetic), lines))
    caption = (
        f"Seconds per epoch relative to {frame.baseline.iloc[0]} (without DP) on {section.machine} ({section.device}), "
        f"protocol {section.protocol}, isolation {section.isolation}, {layout.provenance(tables, section)}. Mean of "
        f"{usual_n} paired rounds (a subscript: that many), with its 95 % interval (Student's t on log-ratios)."
        + (" e: extrapolated from a part of an epoch." if frame.extrapolated.any() else "")
        + (" d: disturbed." if frame.disturbed.any() else "")
    )
    return _pages(parts, sizes, escape(caption))


def _ratio(row: Any, usual_n: int) -> tuple[str, str]:
    """(ratio with its marks, interval and n)."""
    if row is None:
        return "--", ""
    marks = "".join(mark for column, mark in MARKS.items() if getattr(row, column, False))
    raised = rf"\textsuperscript{{{marks}}}" if marks else ""
    interval = "" if pd.isna(row.low) else f"[{factor(row.low)}, {factor(row.high)}]"
    return rf"{factor(row.ratio)}$\times${raised}", interval + _own_n(row.n, usual_n)


def document(names: list[str], figures: list[str]) -> str:
    """A document that compiles as it is.

    ``names``: tables, as file names without ``.tex``. ``figures``: paths to PDFs.
    """
    body = [rf"\input{{{name}}}" for name in names]
    body += [
        rf"\begin{{figure}}[p]\centering\includegraphics[width=\linewidth]{{{path}}}\end{{figure}}" for path in figures
    ]
    graphics = "\\usepackage{graphicx}\n" if figures else ""
    return PREAMBLE + graphics + "\\begin{document}\n" + "\n".join(body) + "\n\\end{document}\n"

r"""Tables for a paper: booktabs, ready for ``\input``, in the layout of the paper's Table 1."""

from __future__ import annotations

import itertools
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.frames import PUBLISHED_LABEL, Tables, rows_of
from harness.analysis.naming import BASELINE_ROW, factor, number
from harness.report import model
from harness.report.model import Chapter, Grid, Picture, Section

BIBLIOGRAPHY = Path(__file__).with_name("dpbench.bib")
"""The works that a paper with these tables has to cite."""
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
    "ᵉ": r"\textsuperscript{e}",
    "ᵈ": r"\textsuperscript{d}",
    "‼": r"\textsuperscript{!!}",
    "ᶠ": r"\textsuperscript{f}",
    "ᵗ": r"\textsuperscript{t}",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "±": r"$\pm$",
    "−": r"$-$",
    "→": r"$\rightarrow$",
    "’": "'",
    "α": r"$\alpha$",
    "∞": r"$\infty$",
}
MARKS = {"extrapolated": "e", "disturbed": "d", "swamped": "!!", "failed": "f"}
PREAMBLE = r"""\documentclass{article}
\usepackage[a4paper,margin=20mm]{geometry}
\usepackage[utf8]{inputenc}
\usepackage{booktabs}
\usepackage{longtable}
\usepackage{array}
\usepackage{graphicx}
\setlength{\LTcapwidth}{\linewidth}
\setlength{\emergencystretch}{3em}
"""


def escape(text: str) -> str:
    """Text that LaTeX prints as it stands; characters that pdfTeX has no glyph for become a question mark."""
    escaped = "".join(SPECIAL.get(c, c) for c in text.replace("\n", " "))
    return escaped.encode("latin-1", "replace").decode("latin-1")


LINES_PER_PAGE = 62
"""Rows in footnotesize that fit on an A4 page with a caption; longer tables go on in a further one."""
INLINE_COLUMNS = 4
"""Up to this many batch sizes the interval stands beside its value, else in small type below it."""


ROOM = 132
"""Letters of a line in scriptsize; a grid with more gets narrower columns of text, then goes on in a further table."""
TITLE_ROOM = 100
"""Letters of a grid's title that fit on one line whatever they are."""
LETTER = 1.25
"""Millimetres that a letter takes in a column of fixed width."""
NARROWEST = 16
"""Letters; narrower columns of text are unreadable."""


def _label(name: str) -> str:
    return rf"\label{{tab:{name}}}"


def chapter(chapter: Chapter, label: str) -> str:
    r"""Return all grids of a chapter as ``longtable`` (which break over pages); neighbours with the same columns in one
    table, each under its title. Needs booktabs, longtable and array. ``label``: of the first table, for ``\ref``; the
    next ones have -2, -3."""
    groups: list[list[Grid]] = []
    for grid in chapter.grids:
        if groups and groups[-1][0].header == grid.header:
            groups[-1].append(grid)
        else:
            groups.append([grid])
    numbered = ((grids, label if k == 1 else f"{label}-{k}") for k, grids in enumerate(groups, 1))
    return "\n".join(line for grids, name in numbered for line in _longtable(grids, chapter, name)) + "\n"


def _longtable(grids: Sequence[Grid], chapter: Chapter, label: str) -> Iterator[str]:
    where = f" {chapter.section.title}" if chapter.section else ""
    when = f"; measured {chapter.when}." if chapter.when else "." if where else ""
    title = grids[0].title if len(grids) == 1 else chapter.title
    notes = dict.fromkeys(note for grid in grids for note in grid.notes)
    caption = escape(" ".join([f"{title}.{where}{when}", *notes]))
    whole = Grid(title, grids[0].header, tuple(row for grid in grids for row in grid.rows))
    parts = list(_parts(whole))
    for i, (columns, widths) in enumerate(parts, 1):
        kinds = [
            rf">{{\raggedright\arraybackslash}}p{{{widths[c] * LETTER:.0f}mm}}"
            if widths[c] < _width(whole, c)
            else ("l" if c == 0 or not _is_number(whole, c) else "r")
            for c in columns
        ]
        part = f" Part {i} of {len(parts)}." if len(parts) > 1 else ""
        yield r"{\scriptsize\setlength{\tabcolsep}{3pt}"
        yield rf"\begin{{longtable}}{{@{{}}{''.join(kinds)}@{{}}}}"
        yield rf"\caption{{{caption}{part}{_label(label) if i == 1 else ''}}}\\"
        head = [r"\toprule", _row([escape(whole.header[c]) for c in columns])]
        yield from [*head, r"\midrule\endfirsthead", *head, r"\midrule\endhead", r"\bottomrule\endfoot"]
        for k, grid in enumerate(grids):
            if len(grids) > 1:
                gap = r"\addlinespace " if k else ""
                # A title of many words is broken into lines; the column of its own length would leave the page.
                column = "l" if len(grid.title) <= TITLE_ROOM else r"p{0.98\linewidth}"
                yield rf"{gap}\multicolumn{{{len(columns)}}}{{@{{}}{column}}}{{\textit{{{escape(grid.title)}}}}}\\*"
            yield from (_row([escape(row[c]) for c in columns]) for row in grid.rows)
        yield r"\end{longtable}}"


def _width(grid: Grid, column: int) -> int:
    return max(len(row[column]) for row in (grid.header, *grid.rows))


def _is_number(grid: Grid, column: int) -> bool:
    return any(row[column][:1].isdigit() for row in grid.rows)


def _parts(grid: Grid) -> Iterator[tuple[list[int], dict[int, int]]]:
    """Yield (columns, their widths in letters) of every table that a grid needs; the first column stands in each.

    Columns of words that are wider than ``NARROWEST`` may be broken into lines; they share the room that the others
    leave, the narrowest first, so that what one does not need goes to the next.
    """
    natural = {c: _width(grid, c) for c in range(len(grid.header))}
    wordy = {c for c, width in natural.items() if width > NARROWEST and any(" " in row[c] for row in grid.rows)}
    wordy = {c for c in wordy if not any("[" in row[c] for row in grid.rows)}
    least = {c: NARROWEST if c in wordy else width for c, width in natural.items()}

    def taken(columns: list[int]) -> int:
        return sum(least[c] + 2 for c in columns)

    parts = [[0]]
    for c in range(1, len(grid.header)):
        if len(parts[-1]) > 1 and taken([*parts[-1], c]) > ROOM:
            parts.append([0])
        parts[-1].append(c)
    for columns in parts:
        widths = {c: least[c] for c in columns}
        spare = max(0, ROOM - taken(columns))
        breakable = sorted(wordy & set(columns), key=lambda c: natural[c])
        for i, c in enumerate(breakable):
            more = min(natural[c] - widths[c], spare // (len(breakable) - i))
            widths[c] += more
            spare -= more
        yield columns, widths


FEW_COLUMNS = 8
"""Most columns of numbers; more stand in smaller letters."""
MOST_COLUMNS = 12
"""Most columns of the table that goes into a paper: more do not fit beside the names on a page."""


def main(tables: Tables, section: Section, label: str) -> str:
    """Return the one table for a paper: contestants with DP, the fastest first, then those without; tasks and batch
    sizes in columns; the smallest with DP of each column in bold. Needs the package booktabs."""
    cells = section.of(tables.cells)
    ok = cells[cells.state == "ok"]
    columns = []
    for task, synthetic, group in model.blocks(ok):
        sizes = sorted(group.batch_size.unique())
        columns.append((task, synthetic, sizes))
    room = max(1, MOST_COLUMNS // max(1, len(columns)))
    cut = any(len(sizes) > room for _, _, sizes in columns)
    columns = [(task, synthetic, _some(sizes, room)) for task, synthetic, sizes in columns]
    places = [(task, synthetic, size) for task, synthetic, sizes in columns for size in sizes]
    by_place = {(r.task, r.synthetic, r.batch_size, r.contestant): r for r in rows_of(cells)}
    best = ok[ok.private].groupby(["task", "synthetic", "batch_size"])["median"].min().to_dict()
    private = dict(zip(cells.contestant, cells.private, strict=True))
    all_scaled = bool(ok.extrapolated.all())
    names = sorted((name for name in tables.order if name in set(ok.contestant)), key=lambda name: not private[name])
    lines = []
    for name in names:
        if not private[name] and (name == names[0] or private[names[names.index(name) - 1]]):
            lines.append(r"\midrule")
        row = [by_place.get((*place, name)) for place in places]
        values = [_main_value(r, best.get(place), all_scaled) for r, place in zip(row, places, strict=True)]
        lines.append(_row([_styled(escape(tables.title(name)), private[name]), *values]))
    heads, rules, first = [], [], 2
    for task, synthetic, sizes in columns:
        heads.append(rf"\multicolumn{{{len(sizes)}}}{{c}}{{{escape(model.task_title(task, synthetic))}}}")
        rules.append(rf"\cmidrule(lr){{{first}-{first + len(sizes) - 1}}}")
        first += len(sizes)
    n = sorted(set(ok.n))
    sentences = [
        f"Median seconds per epoch of {' to '.join(dict.fromkeys((str(n[0]), str(n[-1]))))} processes "
        f"({model.readable(section, section.of(tables.raw))}). Bold: the smallest median with DP.",
        "Italics: without DP." if len(private) > sum(private.values()) else "",
        "All values are extrapolated from parts of epochs." if all_scaled else "",
        "e: extrapolated from a part of an epoch." if ok.extrapolated.any() and not all_scaled else "",
        "d: disturbed by other programs." if (ok.disturbed > 0).any() else "",
        f"!!: {model.SWAMPED_NOTE}." if ok.swamped.any() else "",
        "Not all batch sizes are shown." if cut else "",
        "--: no time." if len(ok) < len(names) * len(places) else "",
    ]
    body = [
        r"\begin{table*}[!ht]",  # with h, the first page of report.tex holds it
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}"
        if len(places) <= FEW_COLUMNS
        else r"\centering\scriptsize\setlength{\tabcolsep}{2.5pt}",
        rf"\caption{{{escape(' '.join(x for x in sentences if x))}{_label(label)}}}",
        rf"\begin{{tabular}}{{@{{}}l{'r' * len(places)}@{{}}}}",
        r"\toprule",
        _row(["", *heads]),
        " ".join(rules),
        _row(["Batch size", *(str(size) for _, _, size in places)]),
        r"\midrule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table*}",
    ]
    return "\n".join(body) + "\n"


def _some(sizes: list[int], room: int) -> list[int]:
    """Return as many sizes as there is room for, from the smallest to the largest."""
    if len(sizes) <= room:
        return sizes
    return [sizes[round(i * (len(sizes) - 1) / max(1, room - 1))] for i in range(room)]


def _main_value(row: Any, best: float | None, all_scaled: bool) -> str:
    if row is None or row.state != "ok":
        return "--"
    marks = "".join(m for c, m in MARKS.items() if getattr(row, c) and not (c == "extrapolated" and all_scaled))
    value = number(row.median)
    if row.private and row.median == best:
        value = rf"\textbf{{{value}}}"
    value = value if row.private else rf"\textit{{{value}}}"
    return value + (rf"\textsuperscript{{{marks}}}" if marks else "")


def seconds(tables: Tables, section: Section, label: str) -> str:
    """Return the times of a section with intervals: per task the measured rows, then the published ones, labelled as
    such.

    Needs the package booktabs. Tasks that do not fit on the page go into further tables with the same caption.
    """
    cells = section.of(tables.cells)
    sizes = sorted(cells.batch_size.unique())
    parts = []
    for task, synthetic, group in model.blocks(cells):
        subtitle = rf"{{\scriptsize measured{' on synthetic data' if synthetic else ''}}}"
        lines = [
            rf"\multicolumn{{{len(sizes) + 1}}}{{l}}{subtitle}\\",
            *_measured_rows(tables, group, sizes),
            *_published_rows(tables, task, sizes),
        ]
        parts.append((model.task_title(task, synthetic), lines))
    return _pages(parts, sizes, _caption(tables, section, cells), label)


def _pages(parts: list[tuple[str, list[str]]], sizes: list[int], caption: str, label: str) -> str:
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
            r"\begin{table}[!htbp]",
            r"\footnotesize",
            r"\centering",
            r"\setlength{\tabcolsep}{3pt}",
            rf"\begin{{tabular}}{{l{'r' * len(sizes)}}}",
            *lines,
            r"\end{tabular}",
            rf"\caption{{{caption}{f' Part {i} of {len(pages)}.' if len(pages) > 1 else ''}"
            rf"{_label(label if i == 1 else f'{label}-{i}')}}}",
            r"\end{table}",
        ]
        for i, lines in enumerate(pages, 1)
    ]
    return "\n".join(line for lines in tables for line in lines) + "\n"


def _row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _rows(name: str, private: bool, values: list[tuple[str, str]]) -> Iterator[str]:
    """Yield one row of (value, interval), or two where there are many columns."""
    label = _styled(escape(name), private)
    if len(values) <= INLINE_COLUMNS:
        yield _row([label, *(_styled(v, private) + (rf" {{\scriptsize {i}}}" if i else "") for v, i in values)])
        return
    yield _row([label, *(_styled(value, private) for value, _ in values)]) + (
        "[-0.7ex]" if any(i for _, i in values) else ""
    )
    if any(interval for _, interval in values):
        yield _row(["", *(rf"{{\tiny {interval}}}" if interval else "" for _, interval in values)])


def _measured_rows(tables: Tables, group: pd.DataFrame, sizes: list[int]) -> Iterator[str]:
    usual_n = model.usual(group[group.state == "ok"].n)
    by_place = {(row.contestant, row.batch_size): row for row in rows_of(group)}
    for name in dict.fromkeys(group.contestant):
        rows = [by_place.get((name, size)) for size in sizes]
        private = next(row.private for row in rows if row is not None)
        yield from _rows(tables.title(name), private, [(_median(row), _spread(row, usual_n)) for row in rows])


def _styled(text: str, private: bool) -> str:
    """Return the name, in italics for rows without DP, as in the paper."""
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
    return model.interval(row.low, row.high).strip() + _own_n(row.n, usual_n)


def _own_n(n: int, usual_n: int) -> str:
    """Return the number of processes as a subscript, where it is not the usual one."""
    return "" if n == usual_n else f"$_{{{n}}}$"


def _published_rows(tables: Tables, task: str, sizes: list[int]) -> Iterator[str]:
    frame = tables.published[(tables.published.task == task) & tables.published.batch_size.isin(sizes)]
    if frame.empty:
        return
    yield r"\midrule"
    yield rf"\multicolumn{{{len(sizes) + 1}}}{{l}}{{\scriptsize {escape(PUBLISHED_LABEL)} (not this machine)}}\\"
    by_place = {(row.paper_row, row.batch_size): f"{row.seconds:.2f}" for row in rows_of(frame)}
    for name in dict.fromkeys(frame.paper_row):
        private = name != BASELINE_ROW
        yield from _rows(name, private, [(by_place.get((name, size), "--"), "") for size in sizes])


def _caption(tables: Tables, section: Section, cells: pd.DataFrame) -> str:
    ok = cells[cells.state == "ok"]
    sentences = [
        f"Median seconds per epoch on {section.machine} ({section.device}), protocol {section.protocol}, isolation "
        f"{section.isolation}, {model.provenance(tables, section)}.",
        model.spread_note(model.usual(ok.n), "unless a subscript says otherwise") if len(ok) else "",
    ]
    if ok.extrapolated.any():
        sentences.append("e: extrapolated from a part of an epoch.")
    if (ok.disturbed > 0).any():
        sentences.append("d: disturbed, meanwhile other programs took processor time or the machine changed its speed.")
    if ok.swamped.any():
        sentences.append(f"!!: {model.SWAMPED_NOTE}.")
    if (ok.failed > 0).any():
        sentences.append("f: some processes of the cell failed.")
    if cells.synthetic.any():
        sentences.append("Tasks marked synthetic were trained on synthetic data of the same shape.")
    if (cells.state != "ok").any():
        sentences.append("In place of a time: the state of the cell; its reason stands in the table of failures.")
    if _has_gaps(cells):
        sentences.append("--: not measured.")
    return escape(" ".join(s for s in sentences if s))


def _has_gaps(cells: pd.DataFrame) -> bool:
    sizes = cells.batch_size.nunique()
    return any(len(group) < sizes for _, group in cells.groupby(["task", "synthetic", "contestant"]))


def ratios(tables: Tables, section: Section, label: str) -> str:
    """Return seconds relative to PyTorch without DP with 95 % intervals, a block per task."""
    frame = section.of(tables.ratios)
    sizes = sorted(frame.batch_size.unique())
    usual_n = model.usual(frame.n)
    parts = []
    for task, synthetic, group in model.blocks(frame):
        by_place = {(row.contestant, row.batch_size): row for row in rows_of(group)}
        lines: list[str] = []
        for name in dict.fromkeys(group.contestant):
            rows = [by_place.get((name, size)) for size in sizes]
            private = next(row.private for row in rows if row is not None)
            lines += _rows(tables.title(name), private, [_ratio(row, usual_n) for row in rows])
        parts.append((model.task_title(task, synthetic), lines))
    caption = (
        f"Seconds per epoch relative to PyTorch without DP ({model.baselines(frame)}) on {section.machine} "
        f"({section.device}), protocol {section.protocol}, isolation {section.isolation}, "
        f"{model.provenance(tables, section)}. A subscript: that many rounds. {model.rounds_note(frame.n, 'brackets')}"
        + (" e: extrapolated from a part of an epoch." if frame.extrapolated.any() else "")
        + (" d: disturbed." if frame.disturbed.any() else "")
        + (f" !!: {model.SWAMPED_NOTE}." if frame.swamped.any() else "")
    )
    return _pages(parts, sizes, escape(caption), label)


def _ratio(row: Any, usual_n: int) -> tuple[str, str]:
    """Return (ratio with its marks, interval and n)."""
    if row is None:
        return "--", ""
    marks = "".join(mark for column, mark in MARKS.items() if getattr(row, column, False))
    raised = rf"\textsuperscript{{{marks}}}" if marks else ""
    interval = "" if pd.isna(row.low) else f"[{factor(row.low)}, {factor(row.high)}]"
    return rf"{factor(row.ratio)}$\times${raised}", interval + _own_n(row.n, usual_n)


def document(names: list[str], figures: Mapping[str, Picture], floating: Collection[str] = ()) -> str:
    """Return a document that compiles as it is.

    ``names``: tables, as file names without ``.tex``; ``floating``: those of them that hold floats. ``figures``: path
    of a PDF -> what it shows.
    """
    inputs = []
    for name, following in itertools.pairwise([*names, ""]):
        inputs.append(rf"\input{{{name}}}")
        # Tables that float would else come out among those of the next section, and not in the order of their numbers.
        if name in floating and following not in floating:
            inputs.append(r"\clearpage")
    body = [
        r"\title{Benchmark report}\author{dpbench}\date{}\maketitle",
        r"\noindent\textit{Extrapolated}: a part of an epoch was measured and scaled up. \textit{Synthetic}: data of "
        r"the same shape in place of the genuine. \textit{Simulated}: not run on the device that it speaks of. "
        "Every table and figure says in its caption where, when and under which rules it was measured. DP-SGD is that "
        r"of Abadi et al.~\cite{abadi2016deep}. Published values are those of Yousefpour et "
        r"al.~\cite{yousefpour2021opacus}, whose benchmark goes back to Subramani et al.~\cite{subramani2021enabling}.",
        *inputs,
        r"\clearpage",
        *(
            rf"\begin{{figure}}[p]\centering\includegraphics[width=\linewidth,height=.85\textheight,keepaspectratio]"
            rf"{{{path}}}\caption{{{escape(f'{picture.title}. {picture.provenance}')}\label{{fig:{picture.stem}}}}}"
            r"\end{figure}"
            for path, picture in figures.items()
        ),
        r"\clearpage",
        r"\bibliographystyle{plain}\bibliography{dpbench}",
    ]
    return PREAMBLE + "\\begin{document}\n" + "\n".join(body) + "\n\\end{document}\n"

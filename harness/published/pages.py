"""Pages with tables that are made from committed records: what stands between two comments is written anew.

A block begins with ``<!-- ratios: NAMES at SIZES -->``, ``<!-- tables: NAMES | TITLE -->``, ``<!-- sentence: NAMES at
SIZE -->``, ``<!-- winners: NAMES -->``, ``<!-- board: NAMES at SIZES -->``, ``<!-- compute: NAMES -->`` or ``<!--
figure: NAMES at SIZE | NAMES at SIZE as FILE -->`` and ends with ``<!-- end -->``. NAMES are those of ``dpbench
report``, separated by spaces; SIZES, batch sizes, may be left out. FILE is a name in plots/, without its ending. A name
of ``winners`` or ``board`` may take only some tasks of its run: ``NAME:TASK,TASK``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.errors import BadInput
from harness.paths import ROOT
from harness.published import index
from harness.published.index import Entry

BLOCK = re.compile(
    r"(?P<first><!-- (?P<kind>ratios|tables|sentence|winners|board|figure|compute): (?P<what>[^\n]*) -->\n)"
    r".*?(?P<last><!-- end -->)",
    re.DOTALL,
)


def pages() -> Iterator[Path]:
    """Yield the pages that may hold such blocks."""
    for page in ("README.md", "results/README.md", "docs/hyperparameters.md"):
        yield ROOT / page
    yield from sorted((ROOT / "results" / "findings").glob("*.md"))


def fill(page: Path, text: str) -> str:
    """Return the text of ``page`` with every block made anew.

    Raises:
        BadInput: A block names a run or a table that does not exist.
    """
    return BLOCK.sub(
        lambda found: f"{found['first']}{_table(page, found['kind'], found['what'])}\n{found['last']}", text
    )


def pictures(text: str) -> Mapping[Path, bytes]:
    """Return the files that the blocks of figures of a page show: path -> content."""
    from harness.published import headline

    found: dict[Path, bytes] = {}
    for block in BLOCK.finditer(text):
        if block["kind"] == "figure":
            shown, stem = _figure(block["what"])
            found |= headline.files(shown, stem)
    return found


def _figure(what: str) -> tuple[list[tuple[list[Entry], int]], str]:
    """Return (runs and batch size of each part, name of the file) of a block."""
    whole, _, stem = what.rpartition(" as ")
    if not whole or not re.fullmatch(r"[a-z0-9-]+", stem):
        raise BadInput(f"A figure asks for the file {stem!r}: end the block's line with `as NAME`, small letters.")
    parts = [part.partition(" at ") for part in whole.split(" | ")]
    return [(_entries(names), _size(size)) for names, _, size in parts], stem


def _size(text: str) -> int:
    if not text.isdecimal():
        raise BadInput(f"A figure or a sentence asks for batch size {text!r}: give one number, for instance `at 512`.")
    return int(text)


def _table(page: Path, kind: str, what: str) -> str:
    from harness.published import headline, tables

    if kind == "figure":
        shown, stem = _figure(what)
        return headline.block(shown, Path(os.path.relpath(headline.FOLDER, page.parent)) / stem)
    if kind in {"winners", "board"}:
        runs, _, rest = what.partition(" at ")
        parts = [name.partition(":") for name in runs.split()]
        chosen = [(e, tasks.split(",") if tasks else ()) for n, _, tasks in parts for e in _entries(n)]
        return tables.winners(chosen) if kind == "winners" else tables.board(chosen, [_size(n) for n in rest.split()])
    names, _, rest = what.partition(" | " if kind == "tables" else " at ")
    entries = _entries(names)
    if kind == "compute":
        return tables.compute(entries)
    if kind == "tables":
        return tables.grids(entries, rest)
    if kind == "sentence":
        return tables.sentence(entries, _size(rest))
    if not re.fullmatch(r"[\d ]*", rest):
        raise BadInput(f"A block of ratios asks for batch sizes {rest!r}: give numbers, separated by spaces.")
    return tables.ratios(entries, [int(size) for size in rest.split()])


def _entries(names: str) -> list[Entry]:
    return [entry for name in names.split() for entry in index.load().find(name)]

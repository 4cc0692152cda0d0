"""Pages with tables that are made from committed records: what stands between two comments is written anew.

A block begins with ``<!-- ratios: NAMES at SIZES -->``, ``<!-- tables: NAMES | TITLE -->``, ``<!-- sentence: NAMES at
SIZE -->`` or ``<!-- figure: NAMES at SIZE -->`` and ends with ``<!-- end -->``. NAMES are those of ``dpbench report``,
separated by spaces; SIZES, batch sizes, may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.errors import BadInput
from harness.paths import ROOT
from harness.published import index
from harness.published.index import Entry

BLOCK = re.compile(
    r"(?P<first><!-- (?P<kind>ratios|tables|sentence|figure): (?P<what>[^\n]*) -->\n).*?(?P<last><!-- end -->)",
    re.DOTALL,
)


def pages() -> Iterator[Path]:
    """Yield the pages that may hold such blocks."""
    yield ROOT / "README.md"
    yield ROOT / "results" / "README.md"
    yield from sorted((ROOT / "results" / "findings").glob("*.md"))


def fill(text: str) -> str:
    """Return the text with every block made anew.

    Raises:
        BadInput: A block names a run or a table that does not exist.
    """
    return BLOCK.sub(lambda found: f"{found['first']}{_table(found['kind'], found['what'])}\n{found['last']}", text)


def pictures(text: str) -> Mapping[Path, bytes]:
    """Return the files that the blocks of figures of a page show: path -> content."""
    from harness.published import headline

    found: dict[Path, bytes] = {}
    for block in BLOCK.finditer(text):
        if block["kind"] == "figure":
            names, _, size = block["what"].partition(" at ")
            found |= headline.files(_entries(names), _size(size))
    return found


def _size(text: str) -> int:
    if not text.isdecimal():
        raise BadInput(f"A figure or a sentence asks for batch size {text!r}: give one number, for instance `at 512`.")
    return int(text)


def _table(kind: str, what: str) -> str:
    from harness.published import headline, tables

    names, _, rest = what.partition(" | " if kind == "tables" else " at ")
    entries = _entries(names)
    if kind == "tables":
        return tables.grids(entries, rest)
    if kind == "figure":
        return headline.block(entries, _size(rest))
    if kind == "sentence":
        return tables.sentence(entries, _size(rest))
    if not re.fullmatch(r"[\d ]*", rest):
        raise BadInput(f"A block of ratios asks for batch sizes {rest!r}: give numbers, separated by spaces.")
    return tables.ratios(entries, [int(size) for size in rest.split()])


def _entries(names: str) -> list[Entry]:
    return [entry for name in names.split() for entry in index.load().find(name)]

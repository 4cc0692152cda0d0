"""Limits on the size of the house. ``python -m tests.test_house`` prints what there is beside what may be.

A number may be raised in a pull request that says beside it why nothing else could go; after a cut it is lowered to
what is left. A class over CLASS lines, or a file over FILE lines, is counted and not named, so that one may be split
and another grow only within the same number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLASS, FILE = 300, 500


@dataclass(frozen=True)
class Size:
    """Of the Python below a folder: lines, classes of more than CLASS lines, files of more than FILE lines."""

    lines: int
    long_classes: int
    long_files: int


# The last reasons; git has those before. On 2026-11-30 dpcore and tests for lazy tables on copies, parameters that stay
# gathered between pieces, and what a review of these found. Then for correlated noise on ranks, tables of which each
# rank holds a share, weights that one rank alone loads, and counts of passes that pieces find alike, with their tests.
LIMITS = {
    "harness": Size(lines=39_030, long_classes=0, long_files=0),
    "dpcore": Size(lines=37_097, long_classes=0, long_files=0),
    "dpcore/opacus_names": Size(lines=1_217, long_classes=0, long_files=0),
    "frameworks": Size(lines=6_730, long_classes=0, long_files=0),
    "tests": Size(lines=62_010, long_classes=0, long_files=16),
}
PRINTED = {"cases.md", "models.md", "exactness.md", "rules.md", "side_by_side.md"}
WRITTEN, WORDS = 199_742, 449


def files(folder: str) -> Iterator[Path]:
    rooms = [ROOT / name for name in LIMITS if name.startswith(f"{folder}/")]  # with limits of their own
    found = (path for path in sorted((ROOT / folder).rglob("*.py")) if "build" not in path.parts)
    return (path for path in found if not any(path.is_relative_to(room) for room in rooms))


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def long_classes(folder: str) -> Iterator[str]:
    for path in files(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno + 1 > CLASS:
                yield f"{node.name} ({path.relative_to(ROOT)}, {(node.end_lineno or 0) - node.lineno + 1} lines)"


def long_files(folder: str) -> Iterator[str]:
    return (f"{path.relative_to(ROOT)} ({lines(path)} lines)" for path in files(folder) if lines(path) > FILE)


def measured(folder: str) -> Size:
    return Size(sum(map(lines, files(folder))), len([*long_classes(folder)]), len([*long_files(folder)]))


@pytest.mark.parametrize("folder", LIMITS)
def test_the_house_has_not_grown(folder: str) -> None:
    said = [*long_classes(folder), *long_files(folder)]
    here, limit = asdict(measured(folder)), asdict(LIMITS[folder])
    above = {what: f"{here[what]}, at most {limit[what]}" for what in here if here[what] > limit[what]}
    assert not above, f"{folder}/ is larger than tests/test_house.py lets it be: {above}; long are {said}"


def written() -> int:
    """Count the bytes of the pages in docs/ that no program prints as a whole."""
    return sum(page.stat().st_size for page in (ROOT / "docs").glob("*.md") if page.name not in PRINTED)


def words(text: str) -> int:
    """Count the words of prose: without code blocks, comments, pictures and the targets of links."""
    prose = re.sub(r"```.*?```|<!--.*?-->|<picture>.*?</picture>|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL)
    return sum(any(map(str.isalnum, word)) for word in prose.split())


def test_what_people_read_has_not_grown() -> None:
    assert written() <= WRITTEN, f"docs/*.md has {written()} bytes written by hand, at most {WRITTEN}"
    assert words((ROOT / "README.md").read_text(encoding="utf-8")) <= WORDS


if __name__ == "__main__":
    print(f"docs/*.md by hand: {written()} bytes, at most {WRITTEN}")
    print(f"README.md: {words((ROOT / 'README.md').read_text(encoding='utf-8'))} words, at most {WORDS}")
    for name, most in LIMITS.items():
        print(f"{name}: {measured(name)}, at most {most}")
        for one in (*long_classes(name), *long_files(name)):
            print(f"  {one}")

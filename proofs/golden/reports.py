"""Proves that a change to the harness leaves every number of every committed run's report as it was.

``reports.json`` holds hashes of what ``dpbench report FILE`` writes as CSV: packed file by packed file, CSV file by CSV
file, column by column. Figures and Markdown are not compared: they show these numbers. ``make golden`` compares; where
a difference is meant, ``make golden ARGS=--write`` replaces the file, and the pull request says why.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.paths import ROOT
from harness.report import contents, output
from harness.store import read

FILE = Path(__file__).with_name("reports.json")
PACKED = ("results/records", "results/comparisons")
WHOLE, PART = 16, 4
"""Hexadecimal digits of the hash of a file, and of one of its columns: the latter only says where to look."""


@dataclass(frozen=True)
class Csv:
    """What is kept of one CSV file: its rows, the hash of all of it, and column -> hash."""

    rows: int
    hash: str
    columns: Mapping[str, str]

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Csv:
        """Return what is kept of a table as its CSV file has it."""
        parts = {str(name): _hash(frame[[name]], PART) for name in frame.columns}
        return cls(len(frame), _hash(frame, WHOLE), parts)

    def differences(self, now: Csv) -> list[str]:
        """Return what is different about ``now``, with the names of the columns."""
        if self == now:
            return []
        rows = [f"has {now.rows} rows instead of {self.rows}"] if self.rows != now.rows else []
        found = {
            "lacks": [c for c in self.columns if c not in now.columns],
            "has in addition": [c for c in now.columns if c not in self.columns],
            "differs in": [c for c in self.columns if c in now.columns and self.columns[c] != now.columns[c]],
        }
        return rows + [f"{what} {', '.join(names)}" for what, names in found.items() if names] or ["differs"]


def runs(named: str = "") -> list[Path]:
    """Return the packed files of records whose path contains ``named``, in order of their names."""
    found = [path for folder in PACKED for path in sorted((ROOT / folder).rglob("*.jsonl.gz"))]
    return [path for path in found if named in str(path)]


def frames(run: Path) -> dict[str, pd.DataFrame]:
    """Return the tables of a run's report by the stem of their CSV file."""
    return output.frames(contents.build(read.load(run)).chapters)


def differences(before: Mapping[str, Csv], now: Mapping[str, Csv]) -> list[str]:
    """Return one line for each file that came or went, and for each way in which one changed."""
    lines = [f"{name}.csv is gone" for name in before if name not in now]
    lines += [f"{name}.csv is new" for name in now if name not in before]
    for name in before.keys() & now.keys():
        lines += [f"{name}.csv {line}" for line in before[name].differences(now[name])]
    return sorted(lines)


def load() -> dict[str, dict[str, Csv]]:
    """Return the committed set: path of a packed file -> stem of a CSV file -> what is kept of it."""
    if not FILE.exists():
        return {}
    kept = json.loads(FILE.read_text())

    def csv(text: str) -> Csv:
        header, rows, whole, parts = text.split(" ")
        names = kept["headers"][int(header)]
        hashes = (parts[i : i + PART] for i in range(0, len(parts), PART))
        return Csv(int(rows), whole, dict(zip(names, hashes, strict=True)))

    return {run: {stem: csv(text) for stem, text in files.items()} for run, files in kept["runs"].items()}


def save(kept: Mapping[str, Mapping[str, Csv]]) -> None:
    """Write the set; most runs share the names of their columns, which are written once."""
    headers: dict[tuple[str, ...], int] = {}
    texts = {
        run: {
            stem: f"{headers.setdefault(tuple(csv.columns), len(headers))} {csv.rows} {csv.hash} "
            + "".join(csv.columns.values())
            for stem, csv in sorted(files.items())
        }
        for run, files in sorted(kept.items())
    }
    FILE.write_text(json.dumps({"headers": list(headers), "runs": texts}, indent=0) + "\n")


def _hash(frame: pd.DataFrame, digits: int) -> str:
    return hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest()[:digits]


def main() -> int:
    """Compare the committed hashes with those of this tree; return 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the committed hashes by those of this tree")
    parser.add_argument("--runs", default="", metavar="TEXT", help="only packed files whose path contains TEXT")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="keep the CSV files, to compare two trees by diff")
    said = parser.parse_args()
    gc.disable()  # as `dpbench report` does
    kept = load()
    different, began = 0, time.monotonic()
    chosen = runs(said.runs)
    for run in chosen:
        name = run.relative_to(ROOT).as_posix()
        tables = frames(run)
        if said.csv:
            folder = said.csv / run.name.removesuffix(".jsonl.gz")
            folder.mkdir(parents=True, exist_ok=True)
            for stem, frame in tables.items():
                frame.to_csv(folder / f"{stem}.csv", index=False)
        found = {stem: Csv.of(frame) for stem, frame in tables.items()}
        if said.write:
            kept[name] = found
            continue
        lines = differences(kept[name], found) if name in kept else ["is not in the golden set: ARGS=--write adds it"]
        different += bool(lines)
        for line in lines:
            print(f"{name}: {line}")
    if said.write:
        if not said.runs:
            kept = {name: found for name, found in kept.items() if (ROOT / name).exists()}
        save(kept)
    print(f"{len(chosen)} runs in {time.monotonic() - began:.0f} s: {different} differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

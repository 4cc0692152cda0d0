"""The parts of a report: chapters, grids of text and pictures, and the words that several chapters share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis import stats
from harness.analysis.frames import Tables
from harness.analysis.naming import factor, machine_slug, number, slug, where
from harness.analysis.tidy import SECTION, rows_of
from harness.store.record import Record
from harness.tasks import TASKS

MISSING = "–"


DISTURBED_NOTE = "ᵈ disturbed: meanwhile other programs took processor time or the machine changed its speed."


DISTURBED_PAIRS_NOTE = "ᵈ disturbed: too few undisturbed pairs, so that all were used."


MEBIBYTE = 2**20


@dataclass(frozen=True)
class Grid:
    """A table as text. ``header[0]`` and the first entry of every row name the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def by_size(
    title: str, cells: Mapping[tuple[str, int], str], notes: Sequence[str] = (), gap: str = "", head: str = "contestant"
) -> Grid:
    """Return a table with a row for each name, in the order of ``cells``, and a column for each batch size.

    Args:
        title: The table's.
        cells: (name, batch size) -> text.
        notes: Below the table.
        gap: What an empty place means, as a further note where there is one.
        head: What the names are of.
    """
    sizes = sorted({size for _, size in cells})
    names = dict.fromkeys(name for name, _ in cells)
    rows = tuple((name, *(cells.get((name, size), MISSING) for size in sizes)) for name in names)
    return _noted(Grid(title, (head, *(f"batch {size}" for size in sizes)), rows, tuple(notes)), gap)


Columns = dict[str, Callable[[Any], str]]
"""Head of a column -> what makes its text of a row."""


def listed(
    title: str,
    frame: pd.DataFrame,
    columns: Columns,
    notes: Sequence[str] = (),
    gap: str = "",
) -> Grid:
    """Return a table with a row for each row of a frame.

    Args:
        title: The table's.
        frame: What it shows.
        columns: From left to right.
        notes: Below the table.
        gap: As :func:`by_size` has it.
    """
    rows = tuple(tuple(text(row) for text in columns.values()) for row in rows_of(frame))
    return _noted(Grid(title, tuple(columns), rows, tuple(notes)), gap)


def _noted(grid: Grid, gap: str) -> Grid:
    is_missing = gap and any(MISSING in row for row in grid.rows)
    return replace(grid, notes=(*grid.notes, f"{MISSING} {gap}")) if is_missing else grid


@dataclass(frozen=True)
class Section:
    """One machine, device, protocol and isolation."""

    machine: str
    device: str
    protocol: str
    isolation: str

    @property
    def title(self) -> str:
        return f"{self.machine} · {self.device} · protocol {self.protocol} · {self.isolation}"

    def of(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of ``frame`` in this section."""
        if frame.empty:
            return frame
        keep = np.ones(len(frame), dtype=bool)
        for column in SECTION:
            keep &= (frame[column] == getattr(self, column)).to_numpy()
        return frame.copy(deep=False) if keep.all() else frame[keep]


@dataclass(frozen=True)
class Picture:
    """A figure for print. ``stem``: name of its files, without a suffix and unique in a report; ``title``: what it
    shows, in words, for those who cannot see it; ``provenance``: machine, rules, days and code, for captions and for
    the metadata of its files. ``draw`` makes a Vega-Lite specification."""

    stem: str
    title: str
    draw: Callable[[], Any]
    provenance: str


@dataclass(frozen=True)
class Chapter:
    r"""A part of the report, which every format takes: Markdown, LaTeX, HTML, CSV and pictures.

    ``section``: what it was measured on and how (None: it is of no one section); chapters of one section stand
    together. ``frames``: the numbers behind it as they go into CSV files, by the stem of the file; frames of one stem
    are appended to each other. ``when``: day and commit, for captions. ``latex``: further tables (for ``\input``), by
    the stem of their files. ``printed``: False where the grids are too
    long for LaTeX. ``in_terminal``: whether ``dpbench report`` prints the grids too.
    ``interactive``: whether the HTML page draws its figures anew, so that it does not hold the pictures. ``brief``: the
    grids of the Markdown page, where it does not take all of them; none: it only names the chapter.
    """

    title: str
    section: Section | None
    grids: tuple[Grid, ...] = ()
    pictures: tuple[Picture, ...] = ()
    frames: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    when: str = ""
    latex: Mapping[str, str] = field(default_factory=dict)
    printed: bool = True
    in_terminal: bool = False
    interactive: bool = False
    brief: tuple[Grid, ...] | None = None


@lru_cache(maxsize=4)
def sections(tables: Tables) -> list[Section]:
    """Return all sections of the end-to-end records: first the one with the most undisturbed times."""
    raw = tables.raw
    return sections_of(raw, (raw.purpose == "time") & (raw.state == "ok") & ~raw.disturbed & ~raw.superseded)


def sections_of(raw: pd.DataFrame, counts: pd.Series | None = None) -> list[Section]:
    """Return all sections of a frame: first the one with the most rows that ``counts`` marks (default: all), then by
    name."""
    sound = raw if counts is None else raw[counts]
    times = sound.groupby(SECTION).size()
    keys = sorted(raw[SECTION].drop_duplicates().itertuples(index=False, name=None))
    return [Section(*key) for key in sorted(keys, key=lambda key: -int(times.get(key, 0)))]


def section_names(sections: Sequence[Section]) -> dict[Section, str]:
    """Return what tells each section from the first one, for file names: nothing for the first, the parts that differ
    for others, and their number where even these are the same."""
    found: dict[Section, str] = {}
    for section in sections:
        main = sections[0]
        parts = [getattr(section, c) for c in SECTION[1:] if getattr(section, c) != getattr(main, c)]
        if section.machine != main.machine:
            parts.append(machine_slug(section.machine))
        name = slug("-".join(parts))
        found[section] = f"{name}-{len(found)}" if name in found.values() else name
    return found


def readable(section: Section, here: pd.DataFrame) -> str:
    """Machine, threads and days of a section as a reader wants them. ``here``: its processes."""
    return where(section.machine, sorted({str(started)[:10] for started in here.started}))


def baselines(ratios: pd.DataFrame) -> str:
    """Return name what the ratios are over; where it is not always the same, which for which task and batch sizes."""
    if ratios.baseline.nunique() == 1:
        return str(ratios.baseline.iloc[0])
    several = ratios.task.nunique() > 1
    places: dict[str, list[str]] = {}
    for task, group in ratios.groupby("task", sort=False):
        for name, mine in group.groupby("baseline"):
            sizes = " ".join(str(size) for size in sorted(mine.batch_size.unique()))
            of_task = [str(task)] if several else []
            places.setdefault(str(name), []).append(
                " ".join(of_task if group.baseline.nunique() == 1 else [*of_task, f"at {sizes}"])
            )
    return "the faster of " + " and ".join(f"{name} ({', '.join(at)})" for name, at in places.items())


def rounds_note(n: pd.Series, brackets: str) -> str:
    """Say what a ratio is the mean of, and what ``brackets`` or bars mean."""
    most, least = int(n.max()), int(n.min())
    fewer = f" (down to {least} where pairs were disturbed or are missing)" if least < most else ""
    if most < stats.INTERVAL_ROUNDS:
        return f"mean of n = {count(most, 'paired round', 'paired rounds')}, too few for an interval."
    return f"mean of {most} paired rounds{fewer}; {brackets}: 95 % interval (Student's t on log-ratios), from n = 3 on."


def blocks(frame: pd.DataFrame) -> Iterator[tuple[str, bool, pd.DataFrame]]:
    """Yield (task, synthetic, rows) in the order of the frame."""
    if frame.empty:
        return
    for (task, synthetic), group in frame.groupby(["task", "synthetic"], sort=False):
        yield str(task), bool(synthetic), group


def task_title(task: str, synthetic: bool) -> str:
    """Return the name of a task for readers, marked where its data are synthetic."""
    title = TASKS[task].title if task in TASKS else task
    return f"{title} – synthetic data" if synthetic else title


@lru_cache(maxsize=64)
def processes_of(tables: Tables, section: Section) -> pd.DataFrame:
    """Return the rows of a section's processes, which many chapters and captions ask for; nobody changes them."""
    return section.of(tables.raw)


@lru_cache(maxsize=64)
def provenance(tables: Tables, section: Section) -> str:
    """Return when and with which code a section was measured."""
    return measured(processes_of(tables, section))


def measured(here: pd.DataFrame) -> str:
    """Return days and commits of processes, from their columns ``started``, ``commit`` and ``dirty``."""
    days = sorted({str(started)[:10] for started in here.started})
    pairs = zip(here.commit, here.dirty, strict=True)
    commits = sorted({str(commit)[:9] + ("+changes" if dirty else "") for commit, dirty in pairs if commit})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{when}, commit {', '.join(commits) or 'unknown'}"


def usual(n: pd.Series) -> int:
    """Return the most frequent number of processes per cell; cells that differ say so themselves."""
    return int(n.mode().max()) if len(n) else 0


def marks(row: Any) -> str:
    """ᵉ extrapolated, ᵈ disturbed, ‼ too much so to be a result, ᶠ some processes of the cell failed."""
    disturbed = "‼" if row.swamped else "ᵈ" if row.disturbed else ""
    return ("ᵉ" if row.extrapolated else "") + disturbed + ("ᶠ" if row.failed else "")


SWAMPED_NOTE = (
    "too disturbed to be a result: other programs took more than half of the processors in every process. Stop them, "
    "or take a quieter machine, and run the same command with --fresh"
)


def doubts(row: Any) -> str:
    """ᵉ extrapolated, ᵈ disturbed, ‼ too much so to be a result, of a number that is made of several cells. Where a
    frame does not tell the last two apart, both are ᵈ."""
    disturbed = "‼" if getattr(row, "swamped", False) else "ᵈ" if row.disturbed else ""
    return ("ᵉ" if row.extrapolated else "") + disturbed


def doubt_notes(frame: pd.DataFrame, disturbed: str = DISTURBED_NOTE) -> list[str]:
    """Return the legend of :func:`doubts`. ``disturbed``: what ᵈ means here."""
    swamped = frame.swamped if "swamped" in frame else pd.Series(False, index=frame.index)
    return [
        *(["ᵉ extrapolated: from a part of an epoch."] if frame.extrapolated.any() else []),
        *([disturbed] if (frame.disturbed.astype(bool) & ~swamped).any() else []),
        *([f"‼ {SWAMPED_NOTE}."] if swamped.any() else []),
    ]


def interval(low: float, high: float) -> str:
    """Return bounds in brackets behind their number; nothing where there are none."""
    return "" if math.isnan(low) else f" [{number(low)}, {number(high)}]"


def bracketed(value: float) -> str:
    """Return a number in parentheses behind another; nothing where there is none."""
    return "" if math.isnan(value) else f" ({number(value)})"


def times(ratio: float, low: float = math.nan, high: float = math.nan, marks: str = "") -> str:
    """Return a ratio with its marks and bounds as far as there are some; MISSING for NaN."""
    bounds = "" if math.isnan(low) else f" [{factor(low)}, {factor(high)}]"
    return MISSING if math.isnan(ratio) else f"{factor(ratio)}×{marks}{bounds}"


def spread_note(n: int, unless: str = "unless shown") -> str:
    """Return what the brackets are."""
    if n < stats.INTERVAL_ROUNDS:
        many = count(n, "process", "processes")
        return f"n = {many} per cell {unless}: too few for an interval, another process may lie elsewhere."
    if n < 6:
        return f"n = {n} processes per cell {unless}; [lowest, highest] process (under 6 there is no 95 % interval)."
    return (
        f"n = {n} processes per cell {unless}; [distribution-free 95 % interval of the median, under 6 processes "
        "the lowest and highest]."
    )


MOST_NAMED = 4
"""Cells that a caption names."""


def processes(n: pd.Series, names: Sequence[str] = (), noun: str = "process") -> str:
    """Return how many processes the points of a figure stand for, as a caption has it.

    Args:
        n: The number of every cell.
        names: The cells' names in that order. Those that differ from most are named, if they are few; otherwise, and
            without names, the range is given.
        noun: What is counted.
    """
    most = usual(n)
    others = n[n != most]
    if others.empty:
        return f"n = {count(most, noun, noun + 'es')}"
    if not names or len(others) > MOST_NAMED:
        return f"n = {n.min()} to {n.max()} {noun}es, most often {most}"
    named = ", ".join(f"{name}: {here}" for here, name in zip(n, names, strict=True) if here != most)
    return f"n = {count(most, noun, noun + 'es')} ({named})"


def bars_note(n: pd.Series) -> str:
    """Return what the bars of medians over processes are, as the end of a sentence."""
    kinds = []
    if (n >= 6).any():
        kinds.append("distribution-free 95 % interval")
    if ((n >= stats.INTERVAL_ROUNDS) & (n < 6)).any():
        kinds.append("under 6 processes lowest to highest" if kinds else "lowest to highest process")
    if not kinds:
        return ", too few for an interval"
    few = [f"under {stats.INTERVAL_ROUNDS} none"] if (n < stats.INTERVAL_ROUNDS).any() else []
    return f"; bar: {', '.join([*kinds, *few])}"


def short(reason: str) -> str:
    """Return a reason as a note under a table; ``explain`` shows all of it."""
    return textwrap.shorten(reason, 240, placeholder=" …")


def count(n: int, singular: str, plural: str) -> str:
    """Return a number with its noun, singular or plural."""
    return f"{n} {singular if n == 1 else plural}"


def with_common_notes(grids: Sequence[Grid]) -> Iterator[Grid]:
    """Yield the tables of a chapter; notes that an earlier one of them has are not repeated."""
    seen: set[str] = set()
    for grid in grids:
        yield replace(grid, notes=tuple(note for note in grid.notes if note not in seen))
        seen.update(grid.notes)


METRICS = {
    "peak_resident_growth": "peak resident memory of the process above the loaded data and model",
    "resident_kept_after_warm_up": "how much of that was there before the first steady step",
    "peak_resident_growth_with_compile": "peak with the warm-up and its compilation",
    "nvml_process_peak": "highest memory of the process on the GPU as the driver counts it, seen every 0.1 s",
    "cuda_peak_allocated": "peak bytes that tensors occupied on the GPU",
    "cuda_peak_reserved": "peak bytes that the allocator held on the GPU",
}


def memory_failures(tables: Tables, section: Section, task: str, synthetic: bool) -> pd.DataFrame:
    """``contestant``, ``batch_size``, ``state`` of the memory processes that failed, where none succeeded."""
    here = processes_of(tables, section)
    here = here[(here.purpose == "memory") & ~here.superseded & (here.task == task) & (here.synthetic == synthetic)]
    where = ["contestant", "batch_size"]
    ever_ok = here.assign(ok=here.state == "ok").groupby(where).ok.transform("any")
    return here[~ever_ok].sort_values("when", kind="stable").groupby(where, as_index=False).last()[[*where, "state"]]


@dataclass(frozen=True)
class Report:
    """A report, from which every format is written. ``tables``: the end-to-end tables, None where no record is of that
    kind."""

    records: Sequence[Record]
    tables: Tables | None
    chapters: tuple[Chapter, ...]

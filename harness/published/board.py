"""Who wins where, on one screen: a row for each library, a column for each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean

from harness.analysis.frames import Tables
from harness.analysis.naming import factor
from harness.analysis.standing import Paired, Place, Standing, standings
from harness.analysis.tidy import SECTION
from harness.plan import registry
from harness.report import model
from harness.report import standings as words

MARKS = {"shown": "", "overlap": " ≈", "few": " ?", "apart": " ?"}
"""What the rounds say of the first one's lead over a library."""

LEGEND = (
    "How many times the time of the fastest library (**1**) each one takes, by its fastest variant. No mark: shown, "
    "the 95 % interval lies above 1. ≈: it holds 1, so the two cannot be told apart. ?: fewer than three undisturbed "
    "rounds, another run may turn it round. ·: not timed there."
)

Column = Mapping[str, tuple[float, str]]
"""Library -> its time over the fastest's, and what is shown of it."""


def text(tables: Tables, sizes: Sequence[int] = ()) -> str:
    """Return the table, what its marks mean, and where and when it was measured; empty where nobody with DP was timed.

    Args:
        tables: Of the records that it rests on.
        sizes: Batch sizes to show; all if empty.
    """
    found = standings(tables)
    places = [place for place in words.in_order(found) if not sizes or place[-1] in sizes]
    if not places:
        return ""
    framework = dict(zip(tables.raw.contestant, tables.raw.framework, strict=True))
    columns = [dict(_column(found[place], framework)) for place in places]
    titles = {known.name: known.title for known in registry.frameworks().values()}
    heads = [_head(place) for place in places]
    lines = [f"| | {' | '.join(heads)} |", "|:--|" + "--:|" * len(heads)]
    for library in sorted(set().union(*columns), key=lambda library: _rank(library, columns)):
        cells = (column[library][1] if library in column else "·" for column in columns)
        lines.append(f"| {titles.get(library, library)} | {' | '.join(cells)} |")
    lines.append(f"| *the fastest over PyTorch without DP* | {' | '.join(_price(found[p].price) for p in places)} |")
    bases = dict.fromkeys(words.basis(tables, place[: len(SECTION)]) for place in places)
    return "\n".join(lines) + f"\n\n{LEGEND} {'. '.join(bases)}."


def _head(place: Place) -> str:
    named = words.of(place)
    return f"{named['task']}<br>{place[-1]}" + ("<br>synthetic data" if named["synthetic"] else "")


def _column(standing: Standing, framework: Mapping[str, str]) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yield each library once: the others come in the order of their times."""
    seen = {framework[standing.first]}
    yield framework[standing.first], (1.0, "**1**")
    for paired in standing.others:
        library = framework[paired.contestant]
        if library not in seen and paired.times is not None:
            seen.add(library)
            yield library, (paired.times.ratio, f"{factor(paired.times.ratio)}{MARKS[paired.evidence]}")


def _rank(library: str, columns: Sequence[Column]) -> tuple[int, float]:
    timed = [column[library][0] for column in columns if library in column]
    return -len(timed), geometric_mean(timed)


def _price(paired: Paired | None) -> str:
    if paired is None or paired.times is None:
        return "·"
    doubt = MARKS["few"] if paired.evidence == "few" else ""
    return f"{factor(paired.times.ratio)}{model.interval(paired.times.low, paired.times.high)}{doubt}"

"""Contestants against each other, in pairs of processes of one block."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis import stats

PAIRING = ["run", "round", "moment"]
"""What two times of one block have in common."""


def paired(
    current: pd.DataFrame, place: Mapping[str, Any], a: str, b: str
) -> tuple[stats.Comparison | None, int, bool]:
    """a against b in one block of the table at one batch size.

    Returns (comparison, or None where no round holds both; number of pairs left out because one was disturbed; whether
    disturbed pairs had to be used because fewer than two others were left, which allows no verdict).
    """
    here = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    for column, value in place.items():
        here = here[here[column] == value]
    return paired_sides(by_block(here[here.contestant.isin([a, b])]), a, b)


Sides = Mapping[str, Mapping[Any, tuple[float, bool]]]
"""Contestant -> block (see PAIRING) -> (seconds, disturbed)."""


def by_block(here: pd.DataFrame) -> Sides:
    """Return seconds by contestant and block, of which two make a pair. A cell that was measured twice in one block (a
    retry) counts with its later value."""
    sides: dict[str, dict[Any, tuple[float, bool]]] = {}
    columns = ["contestant", *PAIRING, "seconds", "disturbed"]
    for contestant, *block, seconds, disturbed in zip(*(here[c] for c in columns), strict=True):
        sides.setdefault(contestant, {})[tuple(block)] = (seconds, disturbed)
    return sides


def paired_sides(sides: Sides, a: str, b: str) -> tuple[stats.Comparison | None, int, bool]:
    """Return what :func:`paired` does, for cells that are already grouped."""
    log_ratios, left_out, use_all = log_ratios_of(sides, a, b)
    if not log_ratios.size:
        return None, 0, False
    result = stats.compare(log_ratios)
    if use_all:
        result = stats.Comparison(result.ratio, result.low, result.high, result.n, None, False, None, result.margin)
    return result, left_out, use_all


def log_ratios_of(sides: Sides, a: str, b: str) -> tuple[np.ndarray, int, bool]:
    """Return (log(seconds of b / seconds of a) of the pairs that count, and the rest as :func:`paired`)."""
    left, right = sides.get(a, {}), sides.get(b, {})
    both = [block for block in left if block in right]
    clean = [block for block in both if not (left[block][1] or right[block][1])]
    use_all = len(clean) < min(2, len(both))
    used = both if use_all else clean
    found = stats.paired_log_ratios({k: left[k][0] for k in used}, {k: right[k][0] for k in used})
    return found, len(both) - len(used), use_all


def medians_of(sides: Sides) -> dict[str, float]:
    """Return contestant -> median of its seconds."""
    return {name: statistics.median(seconds for seconds, _ in side.values()) for name, side in sides.items()}


def foremost(sides: Sides) -> str:
    """Return the contestant that takes no more time than any other in the rounds that both share; where rounds go in a
    circle, the one of the smallest median."""
    medians = medians_of(sides)
    by_median = sorted(medians, key=medians.__getitem__)
    unbeaten = (
        name
        for name in by_median
        if not any(
            ratios.size and ratios.mean() < 0
            for ratios in (log_ratios_of(sides, name, other)[0] for other in by_median if other != name)
        )
    )
    return next(unbeaten, by_median[0])


def against_fastest(sides: Sides, candidates: Iterable[str], contestant: str) -> dict[str, Any] | None:
    """Return a contestant's seconds over those of the :func:`foremost` candidate; None where none shares a round.

    ``low`` and ``high`` are for the truly fastest one, see :func:`harness.analysis.stats.against_fastest`.
    """
    met = [c for c in candidates if not sides[c].keys().isdisjoint(sides[contestant])]
    if not met:
        return None
    other = foremost({c: sides[c] for c in met})
    result, left_out, disturbed = paired_sides(sides, other, contestant)
    assert result is not None
    low, high = stats.against_fastest([log_ratios_of(sides, c, contestant)[0] for c in met])
    bounded = result.n >= stats.INTERVAL_ROUNDS
    return {
        "other": other,
        "ratio": result.ratio,
        # Chosen by its median, the one shown may stand outside of what the means say.
        "low": min(result.ratio, math.exp(low)) if bounded else math.nan,
        "high": max(result.ratio, math.exp(high)) if bounded else math.nan,
        "candidates": len(met),
        "n": result.n,
        "left_out": left_out,
        "disturbed": int(disturbed),
    }

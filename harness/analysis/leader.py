"""Who is the fastest with DP at a task and batch size, and whether the rounds show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from harness.analysis import frames
from harness.analysis.frames import PLACE, Tables
from harness.analysis.naming import factor
from harness.analysis.stats import INTERVAL_ROUNDS, Comparison


@dataclass(frozen=True)
class Leader:
    """The contestant with DP of the smallest median.

    Attributes:
        contestant: Its name.
        rival: The next one, by median, that it is not told from; None where it is the fastest.
        times: Seconds of the rival over its own; None where there is no rival, or no round holds both.
        overlap: Whether enough rounds were paired, and the interval of their ratio holds 1.
        disturbed: Whether disturbed rounds were paired, because there are too few others.
        alone: Whether no other contestant with DP has a time.
    """

    contestant: str
    rival: str | None = None
    times: Comparison | None = None
    overlap: bool = False
    disturbed: bool = False
    alone: bool = False

    @property
    def evidence(self) -> str:
        """Its time over that of the rival, and what this rests on."""
        if self.times is None:
            return "no round holds both"
        ratio = f"time ratio {factor(1 / self.times.ratio)}"
        interval = f" [{factor(1 / self.times.high)}, {factor(1 / self.times.low)}]" if self.overlap else ""
        return f"{ratio}{interval}, n = {self.times.n}" + (", disturbed" if self.disturbed else "")


@lru_cache(maxsize=4)
def leaders(tables: Tables) -> Mapping[tuple[Any, ...], Leader]:
    """Return the leader of every place and batch size at which a contestant with DP has a time.

    It is told from another one where the 95 % interval of their paired ratio leaves out 1. Disturbed pairs, and fewer
    than ``stats.INTERVAL_ROUNDS``, tell nothing: where the next one has no others, the leader is not told from it;
    others of that kind are left out, as in :func:`harness.analysis.stats.against_fastest`.
    """
    current = tables.raw[~tables.raw.superseded & tables.raw.private]
    timed = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    return {
        place: _leader(frames.by_block(group)) for place, group in timed.groupby([*PLACE, "batch_size"], sort=False)
    }


def _leader(sides: frames.Sides) -> Leader:
    medians = frames.medians_of(sides)
    first, *others = sorted(medians, key=medians.__getitem__)
    for other in others:
        times, _, disturbed = frames.paired_sides(sides, first, other)
        bounded = times is not None and times.n >= INTERVAL_ROUNDS and not disturbed
        if times is not None and bounded and times.low <= 1:
            return Leader(first, other, times, overlap=True)
        if not bounded and other == others[0]:
            return Leader(first, other, times, disturbed=disturbed)
    return Leader(first, alone=not others)

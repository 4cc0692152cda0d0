"""Who is the fastest with DP at a task and batch size, and whether the rounds show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import pandas as pd

from harness.analysis import frames
from harness.analysis.frames import PLACE, Tables, rows_of
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


Place = tuple[Any, ...]
"""Values of PLACE, and a batch size."""

Evidence = Literal["shown", "overlap", "few", "apart"]
"""What the rounds say of a lead: an interval above 1; one that is not; too few undisturbed rounds for any; none that
holds both."""


@dataclass(frozen=True)
class Paired:
    """A contestant's time over another one's. ``times``: None where no round holds both. ``disturbed``: disturbed
    rounds were paired, because there are too few others."""

    contestant: str
    times: Comparison | None
    disturbed: bool = False

    @property
    def evidence(self) -> Evidence:
        """Return what the rounds say of the other one's lead over this contestant."""
        if self.times is None:
            return "apart"
        if self.times.n < INTERVAL_ROUNDS or self.disturbed:
            return "few"
        return "shown" if self.times.low > 1 else "overlap"


@dataclass(frozen=True)
class Standing:
    """Where the contestants with DP stand at a task and batch size.

    Attributes:
        contestant: The leader: nobody else takes less time in the rounds that both share.
        runner_up: The next one, of another framework, over the leader; None where no other one was timed.
        level: Further contestants of other frameworks whose interval over the leader is not above 1.
        price: The leader over PyTorch without DP; None where that was not timed beside it. ``contestant`` is then the
            plain one.
    """

    contestant: str
    runner_up: Paired | None = None
    level: tuple[str, ...] = ()
    price: Paired | None = None

    @property
    def is_shown(self) -> bool:
        """Return whether the rounds tell the leader from every other framework that has an interval."""
        return self.runner_up is not None and self.runner_up.evidence == "shown" and not self.level


@lru_cache(maxsize=4)
def leaders(tables: Tables) -> Mapping[Place, Leader]:
    """Return the leader of every place and batch size at which a contestant with DP has a time.

    It is told from another one where the 95 % interval of their paired ratio leaves out 1. Disturbed pairs, and fewer
    than ``stats.INTERVAL_ROUNDS``, tell nothing: where the next one has no others, the leader is not told from it;
    others of that kind are left out, as in :func:`harness.analysis.stats.against_fastest`.
    """
    return {place: _leader(frames.by_block(group)) for place, group in _timed_with_dp(tables)}


def standings(tables: Tables) -> Mapping[Place, Standing]:
    """Return where the contestants stand, of every place and batch size at which one with DP has a time.

    Unlike :func:`leaders` it goes by paired ratios, not by medians, which lie apart where a contestant lacks a round;
    and variants of the leader's own framework are no rivals.
    """
    prices = {
        (*(getattr(row, column) for column in (*PLACE, "batch_size")), row.contestant): Paired(
            row.baseline,
            Comparison(row.ratio, row.low, row.high, row.n, None, False, None),
            bool(row.disturbed),
        )
        for row in rows_of(tables.ratios)
    }
    found = {}
    for place, group in _timed_with_dp(tables):
        framework = dict(zip(group.contestant, group.framework, strict=True))
        sides = frames.by_block(group)
        first = foremost(sides)
        others = {name: side for name, side in sides.items() if framework[name] != framework[first]}
        found[place] = _standing(first, {first: sides[first], **others}, prices.get((*place, first)))
    return found


def foremost(sides: frames.Sides) -> str:
    """Return the contestant that takes no more time than any other in the rounds that both share; where rounds go in a
    circle, the one of the smallest median."""
    medians = frames.medians_of(sides)
    by_median = sorted(medians, key=medians.__getitem__)
    unbeaten = (
        name
        for name in by_median
        if not any(
            ratios.size and ratios.mean() < 0
            for ratios in (frames.log_ratios_of(sides, name, other)[0] for other in by_median if other != name)
        )
    )
    return next(unbeaten, by_median[0])


def _standing(first: str, sides: frames.Sides, price: Paired | None) -> Standing:
    medians = frames.medians_of(sides)
    paired = [_over(sides, first, name) for name in sides if name != first]
    paired.sort(key=lambda p: p.times.ratio if p.times else medians[p.contestant] / medians[first])
    level = tuple(p.contestant for p in paired[1:] if p.evidence == "overlap")
    return Standing(first, paired[0] if paired else None, level, price)


def _over(sides: frames.Sides, first: str, other: str) -> Paired:
    times, _, disturbed = frames.paired_sides(sides, first, other)
    return Paired(other, times, disturbed)


def _timed_with_dp(tables: Tables) -> Iterator[tuple[Place, pd.DataFrame]]:
    """Yield the processes of every place and batch size that count, those with DP."""
    current = tables.raw[~tables.raw.superseded & tables.raw.private]
    timed = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    yield from timed.groupby([*PLACE, "batch_size"], sort=False)


def _leader(sides: frames.Sides) -> Leader:
    medians = frames.medians_of(sides)
    first, *others = sorted(medians, key=medians.__getitem__)
    for other in others:
        found = _over(sides, first, other)
        if found.evidence == "overlap":
            return Leader(first, other, found.times, overlap=True)
        if found.evidence in {"few", "apart"} and other == others[0]:
            return Leader(first, other, found.times, disturbed=found.disturbed)
    return Leader(first, alone=not others)

"""Who is the fastest with DP at a task and batch size, by how much, and whether the rounds show it.

Whatever names a winner (terminal, page, README, findings, the paper's table) is a view of :func:`standings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import pandas as pd

from harness.analysis import pairs
from harness.analysis.frames import Tables
from harness.analysis.naming import factor
from harness.analysis.stats import INTERVAL_ROUNDS, Comparison
from harness.analysis.tidy import PLACE, rows_of

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
    def basis(self) -> str:
        """Return the other one's time over this one's, and what it rests on."""
        if self.times is None:
            return "no round holds both"
        low, high = 1 / self.times.high, 1 / self.times.low
        interval = f" [{factor(low)}, {factor(high)}]" if self.evidence in {"shown", "overlap"} else ""
        doubt = ", disturbed" if self.disturbed else ""
        return f"time ratio {factor(1 / self.times.ratio)}{interval}, n = {self.times.n}{doubt}"

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
        first: Nobody else takes less time in the rounds that both share.
        others: Those of other frameworks over the first, the next one first.
        price: The first over PyTorch without DP; None where that was not timed beside it. Its contestant is the plain
            one.
    """

    first: str
    others: tuple[Paired, ...] = ()
    price: Paired | None = None

    @property
    def runner_up(self) -> Paired | None:
        """Return the next one; None where no other framework was timed."""
        return self.others[0] if self.others else None

    @property
    def level(self) -> tuple[Paired, ...]:
        """Return those behind the next one whose interval over the first is not above 1."""
        return tuple(p for p in self.others[1:] if p.evidence == "overlap")

    @property
    def is_shown(self) -> bool:
        """Return whether the rounds tell the leader from every other framework that has an interval."""
        return self.runner_up is not None and self.untold is None

    @property
    def untold(self) -> Paired | None:
        """Return the first one that the rounds do not tell from the leader, or None."""
        after = (self.runner_up, *self.level) if self.runner_up is not None else ()
        return next((paired for paired in after if paired.evidence != "shown"), None)


@lru_cache(maxsize=4)
def standings(tables: Tables) -> Mapping[Place, Standing]:
    """Return where the contestants stand, of every place and batch size at which one with DP has a time.

    It goes by paired ratios, not by medians, which lie apart where a contestant lacks a round. Variants of the first
    one's own framework are no rivals.
    """
    prices = {
        (*(getattr(row, column) for column in (*PLACE, "batch_size")), row.contestant): Paired(
            row.baseline, Comparison(row.ratio, row.low, row.high, row.n, None, False, None), bool(row.disturbed)
        )
        for row in rows_of(tables.ratios)
    }
    found = {}
    for place, group in _timed_with_dp(tables):
        framework = dict(zip(group.contestant, group.framework, strict=True))
        sides = pairs.by_block(group)
        first = pairs.foremost(sides)
        others = {name: side for name, side in sides.items() if framework[name] != framework[first]}
        found[place] = _standing(first, {first: sides[first], **others}, prices.get((*place, first)))
    return found


def _standing(first: str, sides: pairs.Sides, price: Paired | None) -> Standing:
    medians = pairs.medians_of(sides)
    paired = [_over(sides, first, name) for name in sides if name != first]
    paired.sort(key=lambda p: p.times.ratio if p.times else medians[p.contestant] / medians[first])
    return Standing(first, tuple(paired), price)


def _over(sides: pairs.Sides, first: str, other: str) -> Paired:
    times, _, disturbed = pairs.paired_sides(sides, first, other)
    return Paired(other, times, disturbed)


def _timed_with_dp(tables: Tables) -> Iterator[tuple[Place, pd.DataFrame]]:
    """Yield the processes of every place and batch size that count, those with DP."""
    current = tables.raw[~tables.raw.superseded & tables.raw.private]
    timed = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    yield from timed.groupby([*PLACE, "batch_size"], sort=False)

"""Pace of a run: how long it goes on, and what happens between its rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import BadInput

NARROW = 1.05
"""Ends of an interval over its middle from which on it is narrow enough: the difference that nobody cares about."""

Block = tuple[str, int]
"""Task and batch size."""


def _nothing(done: int, planned: int) -> None:
    """Nothing happens between rounds."""


@dataclass(frozen=True)
class Pace:
    """``minutes``: how long to measure, apart from environments, data and gates; with it, rounds beyond the plan are
    made until every interval is narrow. ``after_round``: called with the rounds that are done and the planned ones."""

    minutes: float | None = None
    after_round: Callable[[int, int], None] = _nothing

    def __post_init__(self) -> None:
        """Raise :class:`BadInput` for minutes that cannot be measured for."""
        if self.minutes is not None and not 0.0 < self.minutes < math.inf:
            raise BadInput(f"--minutes is {self.minutes}: it must be above 0 and finite.")

    def is_over(self, seconds: float) -> bool:
        """Return whether ``seconds`` are all the time there was."""
        return self.minutes is not None and seconds >= 60.0 * self.minutes

    def open_blocks(self, folder: Path) -> list[Block]:
        """Return the blocks of a run of which an interval is not narrow enough yet.

        An interval counts from five rounds on. That rounds are added because an interval is wide costs some of its
        confidence: simulated with 5 to 12 rounds and noise of 1 to 15 %, it holds the truth in 92 % of runs or more.
        """
        from harness.analysis import frames, stats
        from harness.store.read import load

        tables = frames.build(load(folder))
        ratios = tables.ratios
        if ratios.empty:
            return []
        wide = ~((ratios.n >= stats.VERDICT_ROUNDS) & (ratios.high / ratios.low <= NARROW**2))
        return sorted(
            {(str(task), int(size)) for task, size in ratios.loc[wide, ["task", "batch_size"]].itertuples(index=False)}
        )

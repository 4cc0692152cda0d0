"""Pace of a run: how long it goes on, and what happens between its rounds."""

from __future__ import annotations

import itertools
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
        """Return the blocks of a run of which something is not known well enough yet: the ratio of a contestant and
        one without DP, which of two others is the faster one or that they are equally fast, the time of one that is
        alone. A block in which nothing has a time is not one of them.

        An interval counts from five rounds on. That rounds are added because an interval is wide costs some of its
        confidence: simulated with 5 to 12 rounds and noise of 1 to 15 %, it holds the truth in 92 % of runs or more.
        """
        import numpy as np

        from harness.analysis import frames, stats
        from harness.store.read import load

        raw = frames.tidy([r for r in load(folder) if r.cell.kind == "e2e"])
        plain = set(frames.plain_contestants(raw))
        timed = raw[~raw.superseded & (raw.purpose == "time") & (raw.state == "ok") & raw.seconds.notna()]
        found = []
        for (task, size), group in timed.groupby(["task", "batch_size"]):
            sides = frames.by_block(group)
            pairs = list(itertools.combinations(sorted(sides), 2))
            ratios = [(frames.paired_sides(sides, *two)[0], bool(plain & {*two})) for two in pairs]
            if not pairs:
                logs = np.log(group.seconds.to_numpy())
                ratios = [(stats.compare(logs - logs.mean()), True)]
            for ratio, must_be_narrow in ratios:
                if ratio is not None and ratio.n >= stats.VERDICT_ROUNDS:
                    is_apart = ratio.low > NARROW or ratio.high < 1.0 / NARROW
                    if ratio.high / ratio.low <= NARROW**2 or (is_apart and not must_be_narrow):
                        continue
                found.append((str(task), int(size)))
        return sorted(set(found))

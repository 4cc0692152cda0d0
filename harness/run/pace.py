"""Pace of a run: how long it goes on, and what happens between its rounds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import BadInput
from harness.store import cache

NARROW = 1.05
"""Ends of an interval over its middle from which on it is narrow enough: the difference that nobody cares about."""
EQUAL = 0.03
"""Relative difference within which two contestants are equally fast."""
ALPHA = 0.05
MEANING = {
    "shown": "the fastest is shown",
    "equal": f"some are within {EQUAL:.0%} of the fastest",
    "narrow": "the interval is narrow",
}

Block = tuple[str, int]
"""Task and batch size."""


def _nothing(task: str | None) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Pace:
    """``minutes``: how long to measure, apart from environments, data and gates; with it, rounds beyond the plan are
    made where it is open who is fastest. ``so_far``: tells of a task, once it has its first times, and of all that is
    measured (``None``) after every round but the last."""

    minutes: float | None = None
    so_far: Callable[[str | None], None] = _nothing

    def __post_init__(self) -> None:
        """Raise :class:`BadInput` for minutes that cannot be measured for."""
        if self.minutes is not None and not 0.0 < self.minutes < math.inf:
            raise BadInput(f"--minutes is {self.minutes}: it must be above 0 and finite.")

    def is_over(self, seconds: float) -> bool:
        """Return whether ``seconds`` are all the time there was."""
        return self.minutes is not None and seconds >= 60.0 * self.minutes

    def known(self, folder: Path, most: int) -> dict[Block, tuple[int, str | None]]:
        """Return the sessions of each block of a run that has a time, and what they tell of the fastest with DP against
        those of other frameworks (:func:`harness.analysis.sequential.lead`): None where it is open. Where nobody else
        has DP, the interval of his ratio to everybody else must be narrow, or, alone, that of his time, over five
        sessions. ``most``: sessions that there may be."""
        import numpy as np

        from harness.analysis import pairs, sequential, stats, tidy
        from harness.store.read import load

        raw = tidy.tidy([r for r in load(folder) if r.cell.kind == "e2e"])
        timed = raw[~raw.superseded & (raw.purpose == "time") & (raw.state == "ok") & raw.seconds.notna()]
        found: dict[Block, tuple[int, str | None]] = {}
        for (task, size), group in timed.groupby(["task", "batch_size"]):
            framework = dict(zip(group.contestant, group.framework, strict=True))
            sides = pairs.by_block(group)
            own = {name: sides[name] for name in group.contestant[group.private].unique()} or sides
            first = pairs.foremost(own)
            rivals = [name for name in own if framework[name] != framework[first]]
            others = rivals or [name for name in sides if name != first]
            several = [pairs.log_ratios_of(sides, first, name)[0] for name in others]
            if rivals:
                told: str | None = sequential.lead(several, ALPHA, EQUAL, most)
            else:
                logs = np.log(group.seconds.to_numpy())
                several = several or [logs - logs.mean()]
                made = [stats.compare(x) for x in several if x.size >= stats.VERDICT_ROUNDS]
                is_narrow = len(made) == len(several) and all(r.high / r.low <= NARROW**2 for r in made)
                told = "narrow" if is_narrow else None
            found[str(task), int(size)] = max(map(len, sides.values())), told
        return found

    def tell(self, folder: Path, most: int, otherwise: str, log: Callable[[str], None]) -> None:
        """Say how many sessions each block has and why there are no more, and leave it in ``sessions.json``.
        ``otherwise``: why an open one has no more."""
        said = {}
        for (task, size), (sessions, told) in self.known(folder, most).items():
            said[f"{task} at {size}"] = {"sessions": sessions, "why": MEANING[told] if told else otherwise}
            log(f"{task} at {size}: {sessions} sessions; {MEANING[told] if told else otherwise}")
        cache.write_atomically(folder / "sessions.json", json.dumps(said, indent=1).encode())

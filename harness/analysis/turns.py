"""Ratios of contestants that took turns: pure functions of what each needed for a step in each block."""

from __future__ import annotations

import math
from collections.abc import Sequence

TRIMMED = 0.2
"""Share of the blocks that is left out on either side, where the ratio is farthest from the middle: others disturb the
machine within a turn, and a busy machine does so in one block of five."""

Turn = tuple[int, int, float, float]
"""(block, steps, seconds, seconds without waiting for a processor), as :class:`harness.worker.result.Timed` has it."""


def step_seconds(turns: Sequence[Turn], waiting: bool = False) -> dict[int, float]:
    """Return seconds of a step by block. ``waiting``: with those in which its threads waited for a processor."""
    return {block: (wall if waiting else worked) / steps for block, steps, wall, worked in turns if steps and worked > 0}


def shared(base: Sequence[Turn], head: Sequence[Turn], skipped: int = 1) -> list[tuple[float, float]]:
    """Return (seconds of a step of base, of head) of each block in which both had a turn, but the first ``skipped``,
    which hold the first steps of all."""
    one, other = step_seconds(base), step_seconds(head)
    return [(one[block], other[block]) for block in sorted(one.keys() & other.keys())[skipped:]]


def log_ratio(blocks: Sequence[tuple[float, float]]) -> float | None:
    """Return the trimmed mean of log(head / base); None without a block."""
    logs = sorted(math.log(head / base) for base, head in blocks)
    cut = int(TRIMMED * len(logs))
    kept = logs[cut : len(logs) - cut]
    return sum(kept) / len(kept) if kept else None

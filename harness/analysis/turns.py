"""The ratio of two contestants that took turns: pure functions of what each needed in each block."""

from __future__ import annotations

import math
from collections.abc import Sequence

FIRST_BLOCKS = 1
"""Blocks that are left out: the first one holds the first steps of all."""

Turn = tuple[int, int, float, float]
"""(block, steps, seconds, seconds without waiting for a processor), as :class:`harness.worker.result.Timed` has it."""


def shared(base: Sequence[Turn], head: Sequence[Turn]) -> list[tuple[float, float]]:
    """Return (seconds of a step of base, of head) of each block in which both had a turn."""
    one, other = ({block: work / steps for block, steps, _, work in turns} for turns in (base, head))
    return [(one[block], other[block]) for block in sorted(one.keys() & other.keys())[FIRST_BLOCKS:]]


def log_ratio(blocks: Sequence[tuple[float, float]]) -> float | None:
    """Return log(head / base) of the sums over all blocks; None without a block.

    No block is left out: what a contestant does now and then, and takes long for, counts as often as it does it.
    (On a busy machine the mean over the blocks' own ratios without their extremes spread 14 % less.)
    """
    base, head = sum(b for b, _ in blocks), sum(h for _, h in blocks)
    return math.log(head / base) if base > 0 and head > 0 else None

"""Estimate how long the rest of a run takes, from what its pieces have taken so far. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Key = tuple[str, ...]
"""Description of a piece, from the general to the particular: purpose, task, batch size, contestant."""


@dataclass
class Remaining:
    """Seconds that pieces took, summed up by every beginning of their keys."""

    _sums: dict[Key, tuple[float, int]] = field(default_factory=dict)

    def add(self, key: Key, seconds: float) -> None:
        """Remember that a piece took ``seconds``."""
        for end in range(len(key) + 1):
            total, count = self._sums.get(key[:end], (0.0, 0))
            self._sums[key[:end]] = (total + seconds, count + 1)

    def seconds(self, left: Iterable[Key]) -> float | None:
        """Return the seconds that the pieces ``left`` will take; None before the first piece.

        A piece is expected to take what the pieces most like it have taken: those that share the longest beginning of
        its key.
        """
        return sum(self._mean(key) for key in left) if self._sums else None

    def _mean(self, key: Key) -> float:
        known = next(key[:end] for end in range(len(key), -1, -1) if key[:end] in self._sums)
        total, count = self._sums[known]
        return total / count


def clock(seconds: float) -> str:
    """``12:31`` or ``2:05:07``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def about(seconds: float) -> str:
    """``about 40 s``, ``about 19 min`` or ``about 3 h``: what an estimate is good for."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.0f} {unit}"
    return f"about {max(1, round(seconds))} s"

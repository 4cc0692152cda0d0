"""The rounds of a loader that are open at once: which draws are whose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Round:
    """The number of a round's first draw, how many batches were handed out, and whether others were open before it."""

    first: int
    is_second: bool
    taken: int = 0


class Rounds:
    """Those that have begun, and neither ended nor were left: ``open`` of them, and the ``newest``, if it is one.

    Open rounds draw in turn, and workers ahead, so that a draw is known to be of a round only where no other one has
    drawn since that began. A loader whose workers' order is free knows nothing.
    """

    def __init__(self) -> None:
        self.open = 0
        self.newest: Round | None = None

    def begin(self, first: int) -> Round:
        """Return the round that begins with this draw."""
        self.newest = Round(first, is_second=self.open > 0)
        self.open += 1
        return self.newest

    def end(self, begun: Round) -> None:
        """Note that a round has ended or was left; an older one may still go on."""
        self.open -= 1
        if begun is self.newest:
            self.newest = None

    @property
    def alone(self) -> Round | None:
        """The newest, where all draws since it began are its own."""
        newest = self.newest
        return None if newest is None or newest.is_second or self.open > 1 else newest

"""The order in which a timed worker says and asks what the referee hears, and the weights that it commits itself to.

Who asks sooner than the worker's own code does learns something too early, and who says that a stretch has ended may
still be at work on it. So every message has its place, and nothing is answered out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BEGINS, ENDS = "", "finish"
AFTER = {
    BEGINS: ("sizes",),
    "sizes": ("seed",),
    "seed": ("turn", "go"),
    "turn": ("go",),
    "go": ("end",),
    "end": ("read",),
    "read": ("read again",),
    "read again": ("turn", "go", ENDS),
}


@dataclass
class Order:
    """What was heard last.

    Attributes:
        has_turns: whether every stretch is in a turn.
        is_strict: whether the worker is of this very code; one of an older commit that is compared neither asks to
            finish nor commits itself.
        committed: hashes of the weights that were read after each stretch, as they were told before the next one.
    """

    has_turns: bool
    is_strict: bool = True
    last: str = BEGINS
    committed: list[str] = field(default_factory=list)
    _place: tuple[int, int] = (0, -1)

    def fault(self, event: Mapping[str, Any]) -> str | None:
        """Note a message; what is wrong with it, or None."""
        what = str(event.get("what"))
        said = "read again" if (what, self.last) == ("read", "read") else what
        expected = [name for name in AFTER.get(self.last, ()) if self.has_turns or name != "turn"]
        if self.has_turns and self.last in {"seed", "read again"}:
            expected = [name for name in expected if name != "go"]
        if said not in expected:
            due = " or ".join(expected) or "nothing"
            return f"it sent {what!r} after {self.last or 'its start'}, where {due} is due"
        if said in {"turn", "go"}:
            place = int(event["epoch"]), int(event["done"])
            if (self.last == "seed" and place != (0, 0)) or place < self._place or (said == self._kind(place)):
                return f"it asked for the steps from {place[1]} on of epoch {place[0]} after those from {self._place}"
            self._place = place
        if self.last == "read again":
            self.committed.append(str(event.get("weights", "")))
        self.last = said
        return None

    def _kind(self, place: tuple[int, int]) -> str:
        """Return the message that may not come again for the same place: the one that a stretch begins with."""
        first = "turn" if self.has_turns else "go"
        return first if place == self._place else ""

    @property
    def unfinished(self) -> list[str]:
        """Return what is wrong with an end here, if anything is."""
        is_over = self.last == ENDS or (not self.is_strict and self.last == "read again")
        return [] if is_over else [f"it ended after {self.last or 'its start'}, and not after {ENDS!r}"]

"""How an engine cuts batches: by what the first piece of their kind has left behind, and by what has fitted."""

from __future__ import annotations

from typing import Any

from dpcore.errors import warn_caller
from dpcore.microbatch.planner import MicroBatches

Kind = tuple[Any, ...]
"""Shapes and dtypes of one example's inputs; a plan of micro-batches holds for one kind."""


class Plans:
    """The plan of every kind of batch. ``physical``: examples at once, where the user has said how many."""

    def __init__(self, physical: int | None) -> None:
        if physical is not None and physical < 1:
            raise ValueError(f"physical_batch_size is {physical}; it must be at least 1.")
        self.physical = physical
        self.of: dict[Kind, MicroBatches] = {}
        self._largest: dict[Kind, int] = {}
        self._fitting: dict[Kind, int] = {}  # how many examples may be in work at once, where memory has run out

    def note(self, kind: Kind, batch_size: int) -> None:
        """Note that there is a batch of so many examples."""
        self._largest[kind] = max(batch_size, self._largest.get(kind, 0))

    def at_once(self, kind: Kind, planned: int) -> int:
        """Return the user's number, or ``planned``, or less where memory has run out with so many."""
        return self.physical or min(planned, self._fitting.get(kind, planned))

    def shrink(self, kind: Kind, at_once: int, error: Exception) -> None:
        """Plan for half as many examples at once as memory has run out with; raises ``error`` where there are none."""
        fitting = min(at_once, self._fitting.get(kind, at_once)) // 2
        if self.physical is not None or not fitting:
            remedy = "" if self.physical is None else "; with physical_batch_size=None it would go on with fewer"
            error.add_note(f"dpcore had {at_once} example{'s' if at_once > 1 else ''} in work at once{remedy}.")
            raise error
        self._fitting[kind] = fitting
        warn_caller(f"Memory ran out with {at_once} examples in work at once; the batch starts anew with {fitting}.")

    def sizes(self) -> list[int]:
        """Return the sizes of pieces of the largest batches so far."""
        planned = {self.at_once(kind, plan.size(self._largest[kind])) for kind, plan in self.of.items()}
        return sorted(planned) if self.physical is None else [self.physical]

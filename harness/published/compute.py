"""Adds up what the records took to make: machines, and the hours of their processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from harness.published.index import Entry
from harness.store.record import Record


def statement(made: Sequence[tuple[Entry, Sequence[Record]]]) -> str:
    """Return the sentence that says how many hours of which machines the records of some runs took.

    Contestants that take turns share the time of their session.

    Args:
        made: Each run and its records.
    """
    hours: dict[str, float] = defaultdict(float)
    for entry, records in made:
        hours[entry.machine] += sum(record.wall_seconds for record in records) / 3600.0
    each = "; ".join(f"{machine}: {hours[machine]:.1f}" for machine in sorted(hours, key=lambda m: -hours[m]))
    return (
        f"Processes of the {len(made)} cited runs took {sum(hours.values()):.1f} hours on {len(hours)} machines, gates "
        f"and failures included; tests, and runs that no page cites, are not. Hours by machine: {each}."
    )

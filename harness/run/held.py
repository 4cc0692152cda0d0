"""Times that wait for their untimed replay: each is on file as a record that counts nowhere, until it is compared."""

from __future__ import annotations

from harness.store.record import Record

WAITS = "its weights are not compared yet with its untimed replay, the memory process: the same command goes on."


def hold(record: Record) -> Record:
    """Return the record of a time that waits. No contestant can say of itself that it was interrupted."""
    return record.model_copy(update={"state": "crashed", "reason": WAITS, "interrupted": True})


def is_held(record: Record) -> bool:
    """Return whether it is the record of a time that waits."""
    return record.interrupted and record.reason == WAITS


def released(record: Record) -> Record:
    """Return the time as it was measured, for its comparison and for who is told that it does not count yet."""
    return (
        record.model_copy(update={"state": "ok", "reason": None, "interrupted": False}) if is_held(record) else record
    )

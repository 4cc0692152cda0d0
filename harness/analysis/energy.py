"""Joules per example from records: what the counters moved by above the idle machine, over the examples that were
timed, where that says something. Pure functions; nothing is estimated."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from harness.store.record import Record

STEPS_SHARE = 0.1
"""At the beginning and the end of each stretch a step of the counter may be missed. Together they may be so much of the
figure."""


def per_example(record: Record) -> tuple[dict[str, float], dict[str, str]]:
    """Return the joules that one example took and, for counters without such a figure, the reason.

    Args:
        record: Of a timed process.

    Returns:
        (joules by counter, reasons by counter); both empty where no counter was looked at.
    """
    if record.energy is None:
        return {}, {}
    rows = record.timed.rows_timed if record.timed is not None else None
    found, reasons = {}, {}
    for counter, joules in record.energy.joules.items():
        above = joules - record.energy.idle_watts.get(counter, 0.0) * record.energy.seconds
        why = record.energy.unavailable.get(counter) or _doubt(record, counter, above)
        if why is None and not rows:
            why = "nothing says how many examples were timed"
        if why is not None:
            reasons[counter] = why
        elif rows:
            found[counter] = above / rows
    return found, reasons | {c: why for c, why in record.energy.unavailable.items() if c not in found}


def _doubt(record: Record, counter: str, above: float) -> str | None:
    """Return why ``above``, the joules above the idle machine's, says nothing, or None."""
    energy = record.energy
    assert energy is not None
    step = energy.step_seconds.get(counter)
    if counter not in energy.idle_watts or step is None or energy.seconds <= 0:
        return "what the idle machine takes was not measured"
    if above <= 0:
        return "the machine took no more than when it was idle"
    missed = 2 * step * energy.stretches * energy.joules[counter] / energy.seconds
    if missed > STEPS_SHARE * above:
        stretches = f"{energy.stretches} timed stretches of {energy.seconds:.2g} s in all"
        return f"its counter moves every {step:.2g} s, which in {stretches} may hide {missed / above:.0%} of the figure"
    return None


def median(records: Iterable[Record]) -> dict[str, float]:
    """Return the median over processes, by counter."""
    values: dict[str, list[float]] = {}
    for record in records:
        for counter, joules in per_example(record)[0].items():
            values.setdefault(counter, []).append(joules)
    return {counter: statistics.median(found) for counter, found in values.items()}


def missing(records: Iterable[Record]) -> str | None:
    """Return one sentence on the counters that said nothing at all, with their first reasons, or None."""
    there: set[str] = set()
    reasons: dict[str, str] = {}
    for record in records:
        found, whys = per_example(record)
        there |= found.keys()
        for counter, why in whys.items():
            reasons.setdefault(counter, why)
    return sentence({counter: why for counter, why in reasons.items() if counter not in there})


def sentence(reasons: Mapping[str, str]) -> str | None:
    """Return the sentence on counters without a figure."""
    if not reasons:
        return None
    return "Joules per example: " + "; ".join(f"{c}: not available: {why}" for c, why in sorted(reasons.items())) + "."

"""Describe where and with what a measurement was made, and say whether two of them may be put together.

Asked wherever two measurements meet: pairs and pools of a report, a run that goes on, a remembered verdict, the
history, a comparison. What may differ is listed here, and nowhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.store.record import Record, Source

FACTS = ("cpu", "cores", "memory_bytes", "gpus", "id", "threads", "card", "quota", "variables")
"""Of what a record says of its machine, that which tells two places apart."""


@dataclass(frozen=True)
class Surroundings:
    """Description of what one measurement depends on beside the cell itself.

    Attributes:
        place: name -> value of :data:`FACTS`: the machine, the GPU that was used, threads, the quota of processors, the
            variables that libraries read.
        adapter: hash of the contestant's code and of the task's definition.
        environment: hashes of the pins and of what is installed.
        moment: when the block began that it belongs to.
    """

    place: Mapping[str, Any]
    adapter: str = ""
    environment: str = ""
    moment: str = ""

    @property
    def code(self) -> str:
        """Return what the newest measurement of a cell replaces older ones of."""
        return f"{self.adapter}+{self.environment}"

    @property
    def key(self) -> str:
        """Return a hash of the place: equal for two that have no difference."""
        return hashlib.sha256(repr(sorted((k, repr(v)) for k, v in self.place.items())).encode()).hexdigest()


def of(record: Record) -> Surroundings:
    """Return the surroundings of a record."""
    return Surroundings(
        facts(record.machine), record.source.adapter_hash, _environment(record.source), record.block.moment
    )


def code(source: Source) -> str:
    """Return :attr:`Surroundings.code` of a record with this source, without the rest."""
    return Surroundings({}, source.adapter_hash, _environment(source)).code


def _environment(source: Source) -> str:
    return source.lock_hash + (f"+{source.content}" if source.content else "")


def facts(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a machine's facts that tell two places apart."""
    return {name: machine[name] for name in FACTS if machine.get(name) not in (None, {}, "")}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield what differs by its dotted name, with both values; nothing where the two may be put together."""
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key} ({a!r} then, {b!r} now)"

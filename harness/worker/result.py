"""What one process answers: the worker makes it, the harness checks it and adds how the process did. Standard library
only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "rejected", "oom", "timeout", "crashed", "unsupported"]
Part = dict[str, Any]
"""As the class of that name in :mod:`harness.store.record` reads it."""


@dataclass(frozen=True)
class Result:
    """Of an end-to-end, layer, frontier or gate process.

    Attributes:
        state: how it ended; ``reason`` says why it is not ``ok``.
        epoch_seconds: of every timed epoch, extrapolated to a whole one.
        compile_seconds: what the first pass took more than a later one.
        timed: what was timed, as :class:`harness.store.record.Timed`.
        foreign_share: share of the processors that other processes took inside the clock.
        epsilon_steps: steps of the whole epochs that the figure stands for; ``epsilon_own``: the library's own ε.
        memory: bytes by metric.
        probe: of the memory frontier, as :class:`harness.store.record.Probe`.
        layer: of a layer, as :class:`harness.store.record.LayerResult`.
        checks: lines of the gate, as :class:`harness.store.record.GateCheck`.
        sketch: of the weights or gradients that it left (:mod:`harness.worker.sketch`).
        versions: of what is installed where it ran.
        machine: where it ran, None for this machine.
        container: how its container did, as :class:`harness.store.record.Container`.
        log_tail: the end of its error output.
        interrupted: somebody else ended it.
        harness_stopped: the harness itself was stopped meanwhile.
        energy: what the machine's counters moved by while the clock ran (:mod:`harness.environments.energy`).
        clock_fault: why the worker's clock and the harness's do not agree.
    """

    state: State
    reason: str | None = None
    epoch_seconds: list[float] = field(default_factory=list)
    compile_seconds: float | None = None
    timed: Part | None = None
    foreign_share: float = 0.0
    epsilon_steps: int | None = None
    epsilon_own: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    probe: Part | None = None
    layer: Part | None = None
    checks: list[Part] = field(default_factory=list)
    sketch: list[float] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    machine: Part | None = None
    container: Part | None = None
    log_tail: str = ""
    interrupted: bool = False
    harness_stopped: bool = False
    energy: Part | None = None
    clock_fault: str | None = None

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Result:
        """The result in an event; what it does not know is left out."""
        return cls(**{name: event[name] for name in NAMES & event.keys()})

    def as_event(self) -> Part:
        """The event that ends a worker's output, without what is as it is by default."""
        nothing = Result(self.state)
        said = {name: getattr(self, name) for name in sorted(NAMES) if getattr(self, name) != getattr(nothing, name)}
        return {"event": "result", "state": self.state, **said}

    def to_json(self) -> str:
        return json.dumps(self.as_event())

    @classmethod
    def from_json(cls, text: str) -> Result:
        return cls.of(json.loads(text))


NAMES = frozenset(f.name for f in dataclasses.fields(Result))
BY_THE_HARNESS = frozenset(
    {"machine", "container", "log_tail", "interrupted", "harness_stopped", "energy", "clock_fault"}
)
"""Fields that no worker fills."""
OUT_OF_MEMORY = ("out of memory", "resource_exhausted", "can't allocate memory", "cannot allocate memory", "bad_alloc")


def of_error(error: Exception) -> Result:
    """The result of a measurement that an error ended."""
    if isinstance(error, MemoryError):
        return Result("oom", f"MemoryError: {error}")
    text = f"{type(error).__name__}: {error}"
    is_oom = any(mark in text.lower() for mark in OUT_OF_MEMORY)
    return Result("oom" if is_oom else "crashed", text[:2000])

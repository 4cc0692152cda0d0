"""Typed result of one process: the worker fills it, the harness checks it and adds how the process ended. Standard
library only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

State = Literal["ok", "rejected", "oom", "timeout", "crashed", "unsupported"]
Part = dict[str, Any]
"""As the class of that name in :mod:`harness.store.record` reads it."""


@dataclass(frozen=True)
class Timed:
    """How the seconds came about. ``extrapolated``: epoch_seconds are the measured ones times
    steps_per_epoch / steps_timed. ``replay_error``: distance of the weights after the first timed steps from an untimed
    replay, over the distance travelled; None where they were not compared (later rounds, no memory process).
    ``part_seconds`` of each timed stretch by the worker's clock, ``referee_seconds`` by the harness's own.
    ``compared``: as :class:`harness.store.record.Compared`.

    By the harness: ``starts``, (epoch, steps done) where each stretch began; of a process that took turns with others,
    ``turns``: (block, steps, seconds, seconds without those that its threads waited for a processor) of each.

    Protocol ``as_shipped`` only: ``own_sampling`` (``poisson``, ``shuffled`` or ``fixed``) is how the library's own
    loop draws its batches, ``updates`` how many it made in the first timed epoch (None: it does not say)."""

    steps_per_epoch: int
    steps_timed: int
    epochs: int
    extrapolated: bool
    measured_seconds: list[float]
    first_pass_seconds: float | None = None
    warm_up_steps: int = 0
    padding_fraction: float = 0.0
    parameters_read_seconds: list[float] = field(default_factory=list)
    rows_timed: int | None = None
    replay_error: float | None = None
    part_seconds: list[float] = field(default_factory=list)
    referee_seconds: list[float] = field(default_factory=list)
    compared: Any = None
    own_sampling: str | None = None
    updates: int | None = None
    starts: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[int, int, float, float]] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """Return seconds of an epoch over the measured ones."""
        return self.steps_per_epoch / self.steps_timed if self.extrapolated else 1.0


@dataclass(frozen=True)
class Probe:
    """One probe of the memory frontier: bytes resident with model and data in place, and seconds of its steps;
    ``step_seconds`` are those after the first."""

    start_up_bytes: int | None = None
    first_step_seconds: float | None = None
    step_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class LayerParts:
    """Bytes of one pass, one by one. ``gradients`` is what the pass leaves behind beside the first three, ``peak`` the
    highest sum at any moment; ``intermediate`` = peak - input - labels - module - gradients. ``baseline``: allocated
    before anything of the layer was (workspaces of the BLAS library), not in the peak. ``instrument`` counted the
    bytes. ``unexplained``: what an independent count of the arrays alive after the pass found more (or less, below 0)
    than input + labels + module + gradients; None where the instrument cannot count them."""

    input: int
    labels: int
    module: int
    gradients: int
    intermediate: int
    peak: int
    baseline: int
    instrument: str
    unexplained: int | None = None


@dataclass(frozen=True)
class Layer:
    """What was measured of a layer. Time: ``pass_seconds`` of each timed pass, in order, on ``batches`` different
    batches in turn, after ``warm_up`` passes; ``stopped_by`` the number of ``passes`` or their ``seconds``. Memory:
    ``parts``. Both: ``predicted_seconds`` and ``predicted_bytes`` of one pass, from two small batches, where they were
    made before the cell was let run. ``plan``: what a framework that plans for itself says of it: ``micro_batch``
    examples at once, ``kept_bytes`` of per-sample gradients kept per example."""

    pass_seconds: list[float] = field(default_factory=list)
    batches: int = 1
    warm_up: int = 0
    stopped_by: Literal["passes", "seconds"] | None = None
    parts: LayerParts | None = None
    predicted_seconds: float | None = None
    predicted_bytes: int | None = None
    plan: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One line of the admission gate. ``error`` and ``limit`` in the check's own measure; passes if error <= limit. An
    infinite error is written as none. ``digest``: of the update that it looked at, by :mod:`harness.worker.sketch`;
    empty where it looked at none, and in older records."""

    check: str
    error: float | None
    limit: float | None
    passed: bool
    detail: str = ""
    digest: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Rank:
    """One of several processes that train together, in the steps whose memory was measured: its peak resident growth,
    its processor time in a step, and the bytes that it gave to each kind of collective in the one after them."""

    peak_bytes: int
    step_seconds: float
    payload: dict[str, int]
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class Result:
    """Result of an end-to-end, layer, frontier or gate process.

    Attributes:
        state: how it ended; ``reason`` says why it is not ``ok``.
        epoch_seconds: of every timed epoch, extrapolated to a whole one.
        compile_seconds: what the first pass took more than a later one.
        timed: how the seconds came about.
        foreign_share: share of the processors that other processes took inside the clock.
        throttled: share of the periods of its quota of processors in which it was stopped inside the clock.
        epsilon_steps: steps of the whole epochs that the figure stands for; ``epsilon_own``: the library's own ε.
        memory: bytes by metric.
        ranks: of a memory process that trains with others, all of them, rank 0 first.
        probe: the probe of the memory frontier that this process was.
        layer: what was measured of a layer.
        checks: lines of the gate.
        sketch: of the weights or gradients that it left (:mod:`harness.worker.sketch`).
        versions: of what is installed where it ran.
        container: how its container did, as :class:`harness.store.record.Container`.
        log_tail: the end of its error output.
        interrupted: somebody else ended it.
        harness_stopped: the harness itself was stopped meanwhile.
        energy: what the machine's counters moved by while the clock ran (:mod:`harness.environments.energy`).
        clock_fault: why the worker's clock and the harness's do not agree.
        committed: hashes of the weights that were read after each timed stretch, as the worker told them before the
            next one; None where it tells none.
        deferred: it was rejected for a slow reading of the weights, which a busy machine can bring about, too.
    """

    state: State
    reason: str | None = None
    epoch_seconds: list[float] = field(default_factory=list)
    compile_seconds: float | None = None
    timed: Timed | None = None
    foreign_share: float = 0.0
    throttled: float = 0.0
    epsilon_steps: int | None = None
    epsilon_own: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    ranks: Sequence[Rank] = field(default_factory=list)
    probe: Probe | None = None
    layer: Layer | None = None
    checks: Sequence[Check] = field(default_factory=list)
    sketch: list[float] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    container: Part | None = None
    log_tail: str = ""
    interrupted: bool = False
    harness_stopped: bool = False
    energy: Part | None = None
    clock_fault: str | None = None
    committed: list[str] | None = None
    deferred: bool = False

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Result:
        """Return the result in an event; names that it does not know are left out.

        Raises:
            TypeError: a part of it lacks a field, or has another one.
        """
        said = {name: event[name] for name in NAMES & event.keys()}
        for name, kind in (("timed", Timed), ("probe", Probe), ("layer", Layer)):
            if said.get(name) is not None:
                said[name] = kind(**said[name])
        layer = said.get("layer")
        if layer is not None and layer.parts is not None:
            said["layer"] = dataclasses.replace(layer, parts=LayerParts(**layer.parts))
        parts = {"checks": Check, "ranks": Rank}
        return cls(**said | {name: [kind(**part) for part in said.get(name, ())] for name, kind in parts.items()})

    def as_event(self) -> Part:
        """Return the event that ends a worker's output, without what is as it is by default."""
        nothing = dataclasses.asdict(Result(self.state))
        said = {name: value for name, value in sorted(dataclasses.asdict(self).items()) if value != nothing[name]}
        return {"event": "result", "state": self.state, **said}

    def to_json(self) -> str:
        return json.dumps(self.as_event())

    @classmethod
    def from_json(cls, text: str) -> Result:
        return cls.of(json.loads(text))


NAMES = frozenset(f.name for f in dataclasses.fields(Result))
BY_THE_HARNESS = frozenset(
    {"container", "log_tail", "interrupted", "harness_stopped", "energy", "clock_fault", "committed"}
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
